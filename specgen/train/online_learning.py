"""Lets a draft learn from kept answers (online speculative decoding, Liu et al., arXiv:2310.07177).

A lesson trains the draft as `distillation` does, on answers that the target gave to its users. It
continues from the draft's original weights or from those learnt in earlier lessons, whichever agree
better with the target. The latest answers are not learnt from. They are for judging: the original
weights, the weights in use and the new ones, each as stored in a file, are compared on them, and
the weights that agree best with the target are used from then on.

Lessons that run alongside a chat or a server have a process of their own, which runs this module as
a program. `Learner` starts it with a task as JSON, and reads the result from its standard output.
Sending `PAUSE` and `GO` to its standard input pauses it between steps, so that generating answers
has the processor for itself. It has the lowest priority, and exits when its standard input closes.
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
from specgen.system.files import NEW_SUFFIX, locked, new_beside, write_errors
from specgen.system.machine import available_memory_bytes
from specgen.train.target_text import PackedRows, kept_texts, pack_split
from specgen.train.training_loop import Budget, Schedule, check_library

if TYPE_CHECKING:
    from specgen.session.engine import Engine
    from specgen.session.session import Session
    from specgen.train.distillation import Score, Trainer

#: The highest learning rate of Adam.
RATE = 6e-3
#: The maximum number of passes over the texts. One is enough: later lessons use them again.
N_PASSES = 1
#: A lesson uses at most this many answers, the latest.
MAX_ANSWERS = 128
#: The share of these answers that are for judging.
_JUDGING_SHARE = 0.25
#: The maximum number of answers for judging.
_MAX_JUDGING = 12
#: The minimum number of answers for a lesson, including those for judging.
MIN_ANSWERS = 8
#: The number of times that the draft is judged in a pass.
_JUDGEMENTS_PER_PASS = 2
#: Training ends after this many consecutive judgements without an improvement.
_PATIENCE = 3
#: The number of steps at the beginning during which the learning rate rises.
_N_RISING = 5
#: The last learning rate, as a share of the highest. If it were lower, the last steps of a short
#: lesson would learn nothing.
_LAST_SHARE = 0.5

#: The weights to use after a lesson: "new" are the new ones, "kept" those in use before, "none" the
#: draft's original ones, with nothing learnt.
Outcome: TypeAlias = Literal["new", "kept", "none"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The result of a lesson.

    Agreements are shares of the tokens in the answers for judging.
    """

    #: The number of answers learnt from.
    n_answers: int
    #: The number of answers for judging.
    n_judging: int
    #: The agreement of the draft's original weights.
    agreement_as_it_came: float
    #: The agreement of the weights learnt in earlier lessons; None if there were none.
    agreement_in_use: float | None
    #: The agreement of the new weights.
    agreement_new: float
    #: The weights that are used from now on.
    outcome: Outcome
    #: The number of gradient descent steps.
    n_steps: int
    #: The time that the lesson took.
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
    """Divide the latest answers into those to learn from, and the very latest, for judging."""
    latest = list(answers[-MAX_ANSWERS:])
    n_judging = min(_MAX_JUDGING, math.ceil(_JUDGING_SHARE * len(latest)))
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

    Args:
        folder: The folder of kept answers, to which the new weights are written.
        target: The target's file.
        draft: The draft's file, which stays unchanged.
        budget: The time that training may take.
        rate: The highest learning rate.

    Returns:
        The result, or None if interrupted; nothing has changed then.

    Raises:
        UsageError: If there are too few answers, JAX is missing, another process is learning from
            the same folder, or the answers are deleted in the meantime.
        ModelFileError: If the draft cannot be read or trained.
        MemoryLimitError: If there is too little memory.
        OutputError: If the folder cannot be written to.
    """
    check_library()
    answers = kept_answers.read_answers(folder)
    if len(answers) < MIN_ANSWERS:
        raise UsageError(
            f"too few answers are kept for {target.name} to learn from: {len(answers)}",
            hint=f"use --learn until there are {MIN_ANSWERS} or more",
        )
    kept_answers.make_folder(folder)
    busy = UsageError(
        f"another process is already learning for {target.name}",
        "wait until it is done",
    )
    with locked(folder / "learning.lock", busy):
        _delete_leftovers(folder)
        return _run_lesson(folder, target, draft, answers, budget, rate)


def _delete_leftovers(folder: Path) -> None:
    """Delete weights that no draft uses, for example those of a lesson that was killed."""
    states = [kept_answers.read_state(path) for path in folder.glob("*.json")]
    names_in_use = {state.weights for state in states}
    for path in (*folder.glob(f"*{NEW_SUFFIX}"), *folder.glob("*.gguf")):
        # Files of answers are left alone, because other processes may write them at any time.
        is_answers = path.name.startswith(kept_answers.ANSWERS)
        if path.name not in names_in_use and not is_answers:
            with contextlib.suppress(OSError):
                path.unlink()


def _run_lesson(
    folder: Path,
    target: Path,
    draft: Path,
    answers: Sequence[KeptAnswer],
    budget: Budget,
    rate: float,
) -> Lesson | None:
    """Train the draft, judge the result, and record what to use; see `learn`, which locks."""
    from specgen.train.distillation import fit

    started_s = budget.clock()
    learning, judging = split(answers)
    learnt_rows, judged_rows = _packed_answers(target, draft, learning, judging)
    former_weights = learnt_weights(folder, draft)
    start = _best_start(draft, former_weights, learnt_rows, judged_rows)
    schedule = Schedule(
        learnt_rows.n_rows,
        n_batch=1,
        n_passes=N_PASSES,
        rate=rate,
        n_rising=_N_RISING,
        last_share=_LAST_SHARE,
        judged_every=max(1, learnt_rows.n_rows // _JUDGEMENTS_PER_PASS),
        patience=_PATIENCE,
    )
    with write_errors(folder), new_beside(folder / "weights.gguf") as written:
        fitted = fit(start.trainer, schedule, budget, written)
        if fitted is None:
            return None
        state, new_score = fitted
        original_score = start.original_score
        in_use_score = start.in_use_score
        lesson = Lesson(
            n_answers=len(learning),
            n_judging=len(judging),
            agreement_as_it_came=original_score.agreement,
            agreement_in_use=None if in_use_score is None else in_use_score.agreement,
            agreement_new=new_score.agreement,
            outcome=_outcome(new_score, original_score, in_use_score),
            n_steps=state.n_steps,
            seconds=budget.clock() - started_s,
        )
        _adopt(lesson, folder, draft, written, answers[-1].number)
    if lesson.outcome != "kept" and former_weights is not None:
        with contextlib.suppress(OSError):  # a later lesson deletes it
            former_weights.unlink()
    return lesson


@dataclass(frozen=True, slots=True)
class _Start:
    """The weights from which a lesson starts, and how well the draft predicted before it."""

    #: Trains the original weights or those in use, whichever agree better.
    trainer: Trainer
    #: The score of the original weights.
    original_score: Score
    #: The score of the weights in use; None if there were none, or if they are damaged.
    in_use_score: Score | None = None


def _best_start(
    draft: Path,
    weights_in_use: Path | None,
    learnt_rows: PackedRows,
    judged_rows: PackedRows,
) -> _Start:
    """Judge the original weights and those in use, and start from the better ones."""
    from specgen.train.distillation import Trainer

    original = Trainer(draft, learnt_rows, judged_rows, available_memory_bytes())
    if weights_in_use is not None:
        with contextlib.suppress(ModelFileError):  # damaged weights are ignored, as in loading
            in_use = Trainer(weights_in_use, learnt_rows, judged_rows, available_memory_bytes())
            is_better = in_use.before.agreement > original.before.agreement
            trainer = in_use if is_better else original
            return _Start(trainer, original.before, in_use.before)
    return _Start(original, original.before)


def _outcome(
    new: Score,
    original: Score,
    in_use: Score | None,
) -> Outcome:
    """Return which weights agree best; the new ones must be strictly better than all others."""
    best_former = original.agreement
    if in_use is not None:
        best_former = max(best_former, in_use.agreement)
    if new.agreement > best_former:
        return "new"
    if in_use is not None and in_use.agreement < original.agreement:
        return "none"
    return "kept"


def _adopt(
    lesson: Lesson,
    folder: Path,
    draft: Path,
    written: Path,
    last_answer: int,
) -> None:
    """Record which weights the draft uses from now on, and keep the new ones if they are better.

    Args:
        lesson: The result of the lesson.
        folder: The folder of kept answers, in which it is recorded.
        draft: The draft's file.
        written: The file of the new weights.
        last_answer: The number of the latest answer that the lesson used.

    Raises:
        UsageError: If the answers have been deleted since the lesson began.
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


def _packed_answers(
    target: Path,
    draft: Path,
    learning: Sequence[KeptAnswer],
    judging: Sequence[KeptAnswer],
) -> tuple[PackedRows, PackedRows]:
    """Return the answers to learn from and those for judging, in the draft's tokens.

    Raises:
        UsageError: If nothing is left of either, for example because all prompts are too long.
    """
    with (
        contextlib.closing(LlamaModel(target, vocabulary_only=True)) as target_model,
        contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as draft_model,
    ):
        learnt, judged = pack_split(kept_texts(target_model, draft_model, learning, judging))
    if not learnt.n_labels or not judged.n_labels:
        raise UsageError(f"none of the answers kept for {target.name} can be learnt from")
    return learnt, judged


# --- the process that learns while a command answers ----------------------------------------------

#: The commands that the process reads from its standard input: to pause, and to continue.
PAUSE = b"-"
GO = b"+"
#: The highest value of `nice`.
_LOWEST_PRIORITY = 19


class Pauses:
    """Pauses training when standard input says so, with a clock that stops during pauses."""

    def __init__(self) -> None:
        self._is_running = threading.Event()
        self._is_running.set()
        self._paused_s = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> bool:
        """Wait until the pause is over, if there is one.

        Returns:
            False, so that it can be a budget's `interrupted`, which is called between steps.
        """
        started_s = time.monotonic()
        self._is_running.wait()
        self._paused_s += time.monotonic() - started_s
        return False

    def clock(self) -> float:
        """Return the time in seconds, not counting pauses."""
        return time.monotonic() - self._paused_s

    def _read(self) -> None:
        """Obey commands from standard input; end the process when it is closed."""
        # `sys.stdin.read` would hold a lock that keeps the process from ending.
        while command := os.read(sys.stdin.fileno(), 1):
            if command == PAUSE:
                self._is_running.clear()
            elif command == GO:
                self._is_running.set()
        os._exit(1)


def main() -> int:
    """Run the lesson that the first argument describes as JSON, and print its result as JSON.

    Returns:
        The exit code.
    """
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
    assert lesson is not None, "`Pauses.wait` never interrupts"
    sys.stdout.write(json.dumps(asdict(lesson)))
    return 0


# --- the command that starts it -------------------------------------------------------------------

#: A lesson starts when there are this many new answers.
NEW_ANSWERS = 10
#: The maximum duration of a lesson, not counting pauses.
_LESSON_MINUTES = 10.0
#: The process uses the default number of threads divided by this.
_CORES_DIVISOR = 4
#: The process is killed if it has not ended this long after being told to.
_END_TIMEOUT_S = 5.0
#: The command that starts the process.
COMMAND = (sys.executable, "-m", "specgen.train.online_learning")


class Learner:
    """Runs lessons in a separate process, between the answers of a command; a context manager.

    It starts a lesson when there are enough new answers, pauses it while an answer is generated,
    and reloads the engine's draft when this or another process has learnt better weights. The
    command calls `before_answers` and `after_answers`.

    Args:
        session: The models, and the folder of kept answers; without a folder, nothing is learnt.
        engine: The engine that generates the answers, whose draft is reloaded.
        note: Called with a sentence about each lesson.
        command: The command that starts the process; the task is added as the last argument.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        note: Callable[[str], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._target = session.options.target
        self._engine = engine
        self._note = note
        self._command = command
        #: The process of the current lesson; None between lessons.
        self._child: subprocess.Popen[bytes] | None = None
        #: The temporary file that receives the process's standard error.
        self._errors: IO[bytes] = io.BytesIO()
        #: Whether the process is not paused.
        self._is_running = True
        #: The next lesson waits until the kept answers have reached this number.
        self._not_before = 0
        #: Whether lessons can take place: False without JAX, or after a failure.
        self._is_on = False
        folder = session.options.learning
        draft = session.draft
        if folder is None or draft is None:
            return
        if draft.learns is None:
            # A free draft, which costs no time, has no weights: no need to mention it.
            if not draft.is_free:
                self._note_why_not(f"{draft.name} cannot learn")
            return
        self._folder = folder
        #: The file of the draft's original weights.
        self._draft = draft.learns
        #: The learnt weights that the engine's draft was loaded with; None if the original ones.
        self._in_use = learnt_weights(folder, draft.learns)
        try:
            check_library()
            self._is_on = True
        except UsageError as error:
            self._note_why_not(f"{error.message} ({error.hint})")

    def _note_why_not(self, reason: str) -> None:
        self._note(f"answers are kept, but not learnt from: {reason}")

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process of an unfinished lesson, without using what it has learnt."""
        child = self._child
        self._child = None
        if child is None:
            return
        with contextlib.suppress(OSError):
            child.terminate()
        try:
            child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
        self._finish_process(child)

    def before_answers(self) -> None:
        """Make way for answers: pause the lesson, or use what it has learnt if it is finished.

        If learning fails, it is switched off, and answers go on.
        """
        self._manage_lesson(may_run=False)

    def after_answers(self) -> None:
        """Use the time between answers: start, continue or finish a lesson.

        If learning fails, it is switched off, and answers go on.
        """
        self._manage_lesson(may_run=True)

    def _manage_lesson(self, *, may_run: bool) -> None:
        """Start, pause, continue or finish a lesson.

        Args:
            may_run: Whether the process of a lesson may run now, or is paused.
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
            else:
                self._set_running(may_run)
        except (SpecgenError, OSError, ValueError, TypeError) as error:
            self._is_on = False
            self._note(f"learning has ended: {error}")

    @property
    def _n_new(self) -> int:
        """The number of kept answers that no lesson has used yet."""
        last = last_number(self._folder)
        used = read_learnt(self._folder, self._draft).last_number
        if last < used:  # the answers were deleted, and numbers began again
            return last
        return last - used

    def _set_running(self, is_running: bool) -> None:
        """Pause or continue the process, if it is not already paused or running."""
        if is_running != self._is_running:
            self._is_running = is_running
            self._send(GO if is_running else PAUSE)

    def _reload_draft(self) -> None:
        """Let the engine use the latest weights, unless it already does or is busy."""
        learnt = learnt_weights(self._folder, self._draft)
        if learnt != self._in_use and self._engine.reload_draft():
            self._in_use = learnt

    def _send(self, data: bytes) -> None:
        stdin = None if self._child is None else self._child.stdin
        assert stdin is not None
        # If the process has ended, the next call of `_manage_lesson` notices.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(data)
            stdin.flush()

    def _start_lesson(self) -> None:
        """Start the process of a lesson."""
        n_threads = max(1, default_threads() // _CORES_DIVISOR)
        task = {
            "folder": os.fspath(self._folder),
            "target": os.fspath(self._target),
            "draft": os.fspath(self._draft),
            "minutes": _LESSON_MINUTES,
        }
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call
        self._child = subprocess.Popen(
            (*self._command, json.dumps(task)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C ends the answer, not the lesson
            env=os.environ | {"NPROC": str(n_threads), "OMP_NUM_THREADS": str(n_threads)},
        )
        self._is_running = True

    def _end_lesson(self, child: subprocess.Popen[bytes]) -> None:
        """Tell the result of a lesson whose process has ended.

        Raises:
            OutputError: If the process failed, other than with a usage error.
        """
        self._child = None
        result, error = self._finish_process(child)
        # Try again after more answers if, for example, another process is learning.
        if child.returncode == UsageError.exit_code:
            self._not_before = last_number(self._folder) + NEW_ANSWERS
            self._note(f"{self._draft.name} has not learnt: {error}")
            return
        if child.returncode != 0:
            raise OutputError(error or f"its process ended with code {child.returncode}")
        lesson = Lesson(**json.loads(result))
        self._note(f"{self._draft.name} {lesson.text}")

    def _finish_process(self, child: subprocess.Popen[bytes]) -> tuple[bytes, str]:
        """Return the standard output of a process, and the last line of its standard error."""
        result, _ = child.communicate()
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        last_line = lines[-1] if lines else ""
        return result, last_line


if __name__ == "__main__":
    sys.exit(main())
