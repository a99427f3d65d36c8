"""Lets a draft learn from kept answers (online speculative decoding, Liu et al., arXiv:2310.07177).

A lesson trains the draft as `distillation` does, on answers that the target gave while it was used.
It continues from the better of the draft's original weights and those learnt before. The latest
answers are not learnt from: they judge the original weights, those in use and the new ones, each as
written to a file. What agrees best with the target is used from then on.

While a command answers, a process of its own learns: this module as a program. `Learner` starts it
with a task as JSON, and reads the result from its standard output. `PAUSE` and `GO` on its standard
input pause it between steps, so that answers have the processor for themselves. It has the lowest
priority, and ends when its input does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

from specgen.errors import ModelFileError, OutputError, SpecgenError, UsageError
from specgen.llama import LlamaModel, default_threads
from specgen.session import kept_answers
from specgen.session.kept_answers import (
    KeptAnswer,
    Learnt,
    last_number,
    learnt_weights,
    read_learnt,
)
from specgen.system.files import NEW, locked, new_beside, write_errors
from specgen.train.target_text import PackedRows, kept_texts, pack_split
from specgen.train.training_loop import Budget, Schedule, check_library

if TYPE_CHECKING:
    from specgen.session.engine import Engine
    from specgen.session.session import Session
    from specgen.train.distillation import Score

#: The learning rate of Adam at its peak.
RATE = 6e-3
#: The most passes over the texts: the next lesson uses them again.
N_PASSES = 1
#: The number of latest answers that are used.
MOST_ANSWERS = 128
#: The share of these that judges.
_JUDGING_SHARE = 0.25
#: The most answers that judge.
_MOST_JUDGING = 12
#: The fewest answers for a lesson, those that judge included.
LEAST_ANSWERS = 8
#: How often the draft is judged in a pass.
_JUDGED_PER_PASS = 2
#: Training ends after so many judgements without an improvement.
_PATIENCE = 3
#: The number of steps in which the learning rate rises.
_N_RISING = 5
#: The share of its peak to which the learning rate falls: with a lower one, the last steps of a
#: short lesson would learn nothing.
_LAST_SHARE = 0.5

#: What is used from now on: the new weights, those in use before, or the original ones.
Outcome: TypeAlias = Literal["new", "kept", "none"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The result of a lesson; agreements are shares of the judging answers' tokens."""

    #: How many answers it learnt from.
    n_answers: int
    #: How many answers judged.
    n_judging: int
    #: How many tokens these have.
    n_judged_tokens: int
    #: The agreement of the draft's original weights.
    agreement_as_it_came: float
    #: That of the weights learnt before; None if there were none.
    agreement_in_use: float | None
    #: That of the new weights.
    agreement_new: float
    outcome: Outcome
    #: How many steps of gradient descent it took.
    n_steps: int
    #: How long it took.
    seconds: float

    @property
    def text(self) -> str:
        """A sentence about the result, without its subject."""
        if self.outcome == "new":
            result = f"now uses what it learnt from {self.n_answers} answers"
        elif self.outcome == "none":
            result = "did worse with what it had learnt, and uses its original weights again"
        else:
            result = f"learnt nothing better from {self.n_answers} answers, and keeps its weights"
        before = f"originally {self.agreement_as_it_came:.1%}"
        if self.agreement_in_use is not None:
            before += f", before this lesson {self.agreement_in_use:.1%}"
        return (
            f"{result}: on the {self.n_judging} latest answers it agrees with the target on "
            f"{self.agreement_new:.1%} of the tokens ({before})"
        )


def split(answers: Sequence[KeptAnswer]) -> tuple[list[KeptAnswer], list[KeptAnswer]]:
    """Return the answers to learn from, and the latest, which judge."""
    latest = list(answers[-MOST_ANSWERS:])
    n_judging = min(_MOST_JUDGING, math.ceil(_JUDGING_SHARE * len(latest)))
    n_learning = len(latest) - n_judging
    return latest[:n_learning], latest[n_learning:]


def learn(
    folder: Path,
    target: Path,
    draft: Path,
    budget: Budget,
    *,
    rate: float = RATE,
) -> Lesson | None:
    """Let a draft learn from the answers in a folder.

    Returns:
        The result, or None if interrupted, with nothing changed.

    Raises:
        UsageError: If there are too few answers, JAX is missing, another process learns there, or
            the answers are deleted in the meantime.
        ModelFileError: If the draft cannot be read or trained.
        OutputError: If the folder cannot be written to.
    """
    check_library()
    answers = kept_answers.read_answers(folder)
    if len(answers) < LEAST_ANSWERS:
        raise UsageError(
            f"{len(answers)} answers are kept for {target.name}: too few to learn from",
            hint=f"use --learn until there are {LEAST_ANSWERS} or more",
        )
    kept_answers.make_folder(folder)
    held = UsageError(
        f"another process is already learning for {target.name}", "wait until it is done"
    )
    with locked(folder / "learning.lock", held):
        _delete_leftovers(folder)
        return _lesson(folder, target, draft, answers, budget, rate)


def _delete_leftovers(folder: Path) -> None:
    """Delete weights that no draft uses, for example those of a lesson that was killed."""
    states = [kept_answers.read_state(path) for path in folder.glob("*.json")]
    in_use = {state.weights for state in states}
    for path in (*folder.glob(f"*{NEW}"), *folder.glob("*.gguf")):
        # Files of answers are left alone: they may be written at any time.
        if path.name not in in_use and not path.name.startswith(kept_answers.ANSWERS):
            with contextlib.suppress(OSError):
                path.unlink()


def _lesson(
    folder: Path,
    target: Path,
    draft: Path,
    answers: Sequence[KeptAnswer],
    budget: Budget,
    rate: float,
) -> Lesson | None:
    from specgen.train.distillation import Trainer, fit

    started_s = budget.clock()
    learning, judging = split(answers)
    learnt_rows, judged_rows = _packed(target, draft, learning, judging)

    # Training starts from the original weights or those in use, whichever agree better.
    start = Trainer(draft, learnt_rows, judged_rows)
    as_it_came = start.before
    in_use: Score | None = None
    former_weights = learnt_weights(folder, draft)
    if former_weights is not None:
        with contextlib.suppress(ModelFileError):  # no draft uses damaged ones
            former = Trainer(former_weights, learnt_rows, judged_rows)
            in_use = former.before
            if in_use.agreement > as_it_came.agreement:
                start = former

    schedule = Schedule(
        learnt_rows.n_rows,
        n_batch=1,
        n_passes=N_PASSES,
        rate=rate,
        n_rising=_N_RISING,
        last_share=_LAST_SHARE,
        judged_every=max(1, learnt_rows.n_rows // _JUDGED_PER_PASS),
        patience=_PATIENCE,
    )
    with write_errors(folder), new_beside(folder / "weights.gguf") as written:
        fitted = fit(start, schedule, budget, written)
        if fitted is None:
            return None
        state, new = fitted
        lesson = Lesson(
            n_answers=len(learning),
            n_judging=len(judging),
            n_judged_tokens=judged_rows.n_labels,
            agreement_as_it_came=as_it_came.agreement,
            agreement_in_use=None if in_use is None else in_use.agreement,
            agreement_new=new.agreement,
            outcome=_outcome(new, start.before, as_it_came, in_use),
            n_steps=state.n_steps,
            seconds=budget.clock() - started_s,
        )
        _adopt(lesson, folder, draft, written, answers[-1].number)
    if lesson.outcome != "kept" and former_weights is not None:
        with contextlib.suppress(OSError):  # a later lesson deletes it
            former_weights.unlink()
    return lesson


def _outcome(
    new: Score,
    start: Score,
    as_it_came: Score,
    in_use: Score | None,
) -> Outcome:
    if new.agreement > start.agreement:
        return "new"
    if in_use is not None and in_use.agreement < as_it_came.agreement:
        return "none"
    return "kept"


def _adopt(
    lesson: Lesson,
    folder: Path,
    draft: Path,
    written: Path,
    last_answer: int,
) -> None:
    """Record what the draft uses from now on, and keep the new weights if these are better.

    Args:
        lesson: The result of the lesson.
        folder: Where it is recorded.
        draft: The draft's file.
        written: The file of the new weights.
        last_answer: The number of the latest answer that was used.
    """
    if last_answer > last_number(folder):
        raise UsageError("the answers were deleted while the draft learnt from them")
    if lesson.outcome == "new":
        digest = hashlib.sha256(written.read_bytes()).hexdigest()[:12]
        learnt = Learnt(
            weights=f"{draft.stem}-{digest}.gguf",
            last_number=last_answer,
            n_answers=lesson.n_answers,
            agreement_before=lesson.agreement_as_it_came,
            agreement_after=lesson.agreement_new,
        )
        written.replace(folder / learnt.weights)
    elif lesson.outcome == "none":
        learnt = Learnt(last_number=last_answer)
    else:
        learnt = replace(read_learnt(folder, draft), last_number=last_answer)
    kept_answers.write_learnt(folder, draft, learnt)


def _packed(
    target: Path,
    draft: Path,
    learning: Sequence[KeptAnswer],
    judging: Sequence[KeptAnswer],
) -> tuple[PackedRows, PackedRows]:
    """Return answers to learn from and answers that judge, as the draft reads them."""
    with (
        contextlib.closing(LlamaModel(target, vocabulary_only=True)) as target_model,
        contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as draft_model,
    ):
        learnt, judged = pack_split(kept_texts(target_model, draft_model, learning, judging))
    if not learnt.n_labels or not judged.n_labels:
        raise UsageError(f"none of the answers kept for {target.name} can be learnt from")
    return learnt, judged


# --- the process that learns while a command answers ----------------------------------------------

#: What the process reads from its standard input.
PAUSE = b"-"
GO = b"+"
_LOWEST_PRIORITY = 19


class Pauses:
    """Pauses the training as standard input asks, with a clock that stops during pauses."""

    def __init__(self) -> None:
        self._is_running = threading.Event()
        self._is_running.set()
        self._paused_s = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> bool:
        """Wait until there is no pause, and return False: it is no interruption."""
        started_s = time.monotonic()
        self._is_running.wait()
        self._paused_s += time.monotonic() - started_s
        return False

    def clock(self) -> float:
        """Return the seconds that were not spent in pauses."""
        return time.monotonic() - self._paused_s

    def _read(self) -> None:
        # Read without Python's lock on the file, which would not let the process end.
        while command := os.read(sys.stdin.fileno(), 1):
            if command == PAUSE:
                self._is_running.clear()
            elif command == GO:
                self._is_running.set()
        os._exit(1)


def main() -> int:
    """Learn as the first argument asks, print the result as JSON, and return the exit code."""
    task = json.loads(sys.argv[1])
    pauses = Pauses()
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    until_s = pauses.clock() + 60.0 * task["minutes"]
    try:
        lesson = learn(
            Path(task["folder"]),
            Path(task["target"]),
            Path(task["draft"]),
            Budget(pauses.clock, until_s, pauses.wait),
        )
    except SpecgenError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    assert lesson is not None, "nothing interrupts it"
    sys.stdout.write(json.dumps(asdict(lesson)))
    return 0


# --- the command that starts it -------------------------------------------------------------------

#: The number of new answers that starts a lesson.
NEW_ANSWERS = 10
#: How long a lesson may take.
_MINUTES = 10.0
#: The process may use the processor's cores, divided by this.
_CORES_SHARE = 4
#: How long the process may take to end after it was told to.
_END_S = 5.0
COMMAND = (sys.executable, "-m", "specgen.train.online_learning")


class Learner:
    """Runs lessons in a process of their own, between a command's answers; a context manager.

    It starts a lesson when there are enough new answers, pauses it while an answer is generated,
    and loads the engine's draft again when this, or another process, learnt something.

    Args:
        session: The models, and the folder of kept answers. Without one, nothing is learnt.
        engine: What generates the answers.
        tell: Gets a sentence about each lesson.
        command: Starts the process; the task is added as the last argument.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        tell: Callable[[str], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._target = session.options.target
        self._engine = engine
        self._tell = tell
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        #: The file of its standard error.
        self._errors: IO[bytes] = io.BytesIO()
        #: Whether the process runs, and is not paused.
        self._is_running = True
        #: The number of the kept answer from which on the next lesson may begin.
        self._not_before = 0
        self._is_on = False
        folder = session.options.learning
        draft = session.draft
        if folder is None or draft is None:
            return
        if draft.learns is None:
            if not draft.is_free:
                self._tell_why_not(f"{draft.name} cannot learn")
            return
        self._folder = folder
        self._draft = draft.learns
        #: The learnt weights that the draft was loaded with.
        self._in_use = learnt_weights(folder, draft.learns)
        try:
            check_library()
            self._is_on = True
        except UsageError as error:
            self._tell_why_not(f"{error.message} ({error.hint})")

    def _tell_why_not(self, reason: str) -> None:
        self._tell(f"answers are kept, but not learnt from: {reason}")

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        child = self._child
        self._child = None
        if child is None:
            return
        with contextlib.suppress(OSError):
            child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
        self._last_words(child)

    def between_answers(self, *, begins: bool = False) -> None:
        """Start, pause, continue or finish a lesson.

        Args:
            begins: Whether an answer is about to begin, which pauses a lesson. If not, one ended.
        """
        if not self._is_on:
            return
        try:
            if self._child is None:
                if self._n_new >= NEW_ANSWERS and last_number(self._folder) >= self._not_before:
                    self._start_lesson()
            elif self._child.poll() is not None:
                self._end_lesson(self._child)
            if self._child is None:
                self._reload_draft()
            elif begins == self._is_running:
                self._is_running = not begins
                self._send(GO if self._is_running else PAUSE)
        except (SpecgenError, OSError, ValueError, TypeError) as error:  # not the answers end
            self._is_on = False
            self._tell(f"learning has ended: {error}")

    @property
    def _n_new(self) -> int:
        last = last_number(self._folder)
        seen = read_learnt(self._folder, self._draft).last_number
        return last - seen if last >= seen else last  # smaller if the file was deleted

    def _reload_draft(self) -> None:
        """Let the engine use the latest weights, if it can now."""
        learnt = learnt_weights(self._folder, self._draft)
        if learnt != self._in_use and self._engine.reload_draft():
            self._in_use = learnt

    def _send(self, data: bytes) -> None:
        stdin = None if self._child is None else self._child.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: the next call notices
            stdin.write(data)
            stdin.flush()

    def _start_lesson(self) -> None:
        n_threads = max(1, default_threads() // _CORES_SHARE)
        paths = {"folder": self._folder, "target": self._target, "draft": self._draft}
        task = json.dumps(paths | {"minutes": _MINUTES}, default=os.fspath)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call
        self._child = subprocess.Popen(
            (*self._command, task),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C ends the answer, not the lesson
            env=os.environ | {"NPROC": str(n_threads), "OMP_NUM_THREADS": str(n_threads)},
        )
        self._is_running = True

    def _end_lesson(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        result, words = self._last_words(child)
        if child.returncode == UsageError.exit_code:  # for example, another process learns
            self._not_before = last_number(self._folder) + NEW_ANSWERS
            self._tell(f"{self._draft.name} has not learnt: {words}")
            return
        if child.returncode != 0:
            raise OutputError(words or f"its process ended with code {child.returncode}")
        self._tell(f"{self._draft.name} {Lesson(**json.loads(result)).text}")

    def _last_words(self, child: subprocess.Popen[bytes]) -> tuple[bytes, str]:
        """Return the standard output of a process that ended, and the last line of its errors."""
        result, _ = child.communicate()
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return result, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
