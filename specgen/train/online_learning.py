"""Lets a draft learn from kept answers (online speculative decoding, Liu et al., arXiv:2310.07177).

Training continues from the better of the draft's own weights and those it learnt before. The latest
answers judge these and the new ones, each as written to a file; what agrees most often with the
target is used from then on. As a program, which `Learner` starts, it gets its task as JSON and
prints the result; `PAUSE` and `GO` on standard input pause it between steps. It has the lowest
priority, and ends with its input.
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
from specgen.train.target_text import kept_texts, pack_split
from specgen.train.training_loop import Budget, Schedule, check_library

if TYPE_CHECKING:
    from specgen.session.engine import Engine
    from specgen.session.session import Session

#: The learning rate of Adam at its peak, and the most passes over the texts: the next lesson uses
#: them again.
RATE, N_PASSES = 6e-3, 1
#: The number of latest answers that are used; the share of them that judges, and the most that
#: judge.
MOST_ANSWERS, _JUDGING_SHARE, _MOST_JUDGING = 128, 0.25, 12
#: The fewest answers for a lesson, those that judge included.
LEAST_ANSWERS = 8
#: Judgements in a pass, and the number without an improvement after which training ends.
_JUDGED_PER_PASS, _PATIENCE = 2, 3
#: The learning rate rises in so many steps, and falls to this share: less learns nothing in a
#: lesson.
_N_RISING, _LAST_SHARE = 5, 0.5

Outcome: TypeAlias = Literal["new", "kept", "none"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The shares of judging tokens that the draft finds likeliest: as it came, in use before, and
    newly learnt.
    """

    n_answers: int
    n_judging: int
    n_judged_tokens: int
    agreement_as_it_came: float
    agreement_in_use: float | None
    agreement_new: float
    #: What is used from now on: the new weights, those from before, or those that the draft came
    #: with.
    outcome: Outcome
    n_steps: int
    seconds: float

    @property
    def text(self) -> str:
        is_first = self.agreement_in_use is None
        before = "" if is_first else f", in use {self.agreement_in_use:.1%}"
        what = {
            "new": f"drafts with what it learnt from {self.n_answers} answers from now on",
            "kept": f"learnt nothing better from {self.n_answers} answers"
            + (": that is dropped" if is_first else ", and stays as it was"),
            "none": "does worse with what it learnt, and drafts as it came again",
        }[self.outcome]
        return (
            f"{what}: on the {self.n_judging} latest answers it agrees with the target on "
            f"{self.agreement_new:.1%} of the tokens (as it came {self.agreement_as_it_came:.1%}{before})"
        )


def split(answers: Sequence[KeptAnswer]) -> tuple[list[KeptAnswer], list[KeptAnswer]]:
    latest = list(answers[-MOST_ANSWERS:])
    n_judging = min(_MOST_JUDGING, math.ceil(_JUDGING_SHARE * len(latest)))
    return latest[: len(latest) - n_judging], latest[len(latest) - n_judging :]


def learn(
    folder: Path, target: Path, draft: Path, budget: Budget, *, rate: float = RATE
) -> Lesson | None:
    """Let a draft learn from the answers in a folder; None if interrupted, with nothing changed.
    Raise `UsageError` for too few answers, without JAX, or if another process learns there;
    `SpecgenError`.
    """
    check_library()
    from specgen.train.distillation import Trainer, fit

    started_s = budget.clock()
    answers = kept_answers.read_answers(folder)
    learning, judging = split(answers)
    if len(answers) < LEAST_ANSWERS:
        raise UsageError(
            f"{len(answers)} answers are kept for {target.name}: too few to learn from",
            hint=f"use --learn until there are {LEAST_ANSWERS} or more",
        )
    kept_answers.make_folder(folder)
    held = UsageError(f"another process learns for {target.name} already", "wait for its end")
    with locked(folder / "learning.lock", held):
        _clear(folder)
        with (
            contextlib.closing(LlamaModel(target, vocabulary_only=True)) as model,
            contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as small,
        ):
            rows, judged = pack_split(kept_texts(model, small, learning, judging))
        if not rows.n_labels or not judged.n_labels:
            raise UsageError(f"no answer that is kept for {target.name} can be read as its text")
        former, starts = learnt_weights(folder, draft), [Trainer(draft, rows, judged)]
        if former is not None:
            with contextlib.suppress(ModelFileError):  # no draft uses damaged ones
                starts.append(Trainer(former, rows, judged))
        as_it_came, in_use = starts[0].before, starts[1].before if starts[1:] else None
        start = max(starts, key=lambda each: each.before.agreement)
        n_rows, judged_every = rows.n_rows, max(1, rows.n_rows // _JUDGED_PER_PASS)
        schedule = Schedule(
            n_rows, 1, N_PASSES, rate, _N_RISING, _LAST_SHARE, judged_every, _PATIENCE
        )
        with write_errors(folder), new_beside(folder / "weights.gguf") as written:
            fitted = fit(start, schedule, budget, written)
            if fitted is None:
                return None
            state, new = fitted
            if answers[-1].number > last_number(folder):
                raise UsageError("the answers were deleted while the draft learnt from them")
            known = replace(read_learnt(folder, draft), last_number=answers[-1].number)
            outcome: Outcome = "kept"
            if new.agreement > start.before.agreement:
                outcome = "new"
                digest = hashlib.sha256(written.read_bytes()).hexdigest()[:12]
                agreements = as_it_came.agreement, new.agreement
                counts = known.last_number, len(learning)
                known = Learnt(f"{draft.stem}-{digest}.gguf", *counts, *agreements)
                written.replace(folder / known.weights)
            elif in_use is not None and in_use.agreement < as_it_came.agreement:
                outcome = "none"
                known = Learnt(last_number=known.last_number)
            kept_answers.write_learnt(folder, draft, known)
        if outcome != "kept" and former is not None:
            with contextlib.suppress(OSError):  # a later lesson deletes it
                former.unlink()
        return Lesson(
            len(learning),
            len(judging),
            judged.n_labels,
            as_it_came.agreement,
            None if in_use is None else in_use.agreement,
            new.agreement,
            outcome,
            state.n_steps,
            budget.clock() - started_s,
        )


def _clear(folder: Path) -> None:
    states = [kept_answers.read_state(path) for path in folder.glob("*.json")]
    named = {state.weights for state in states}
    for path in (*folder.glob(f"*{NEW}"), *folder.glob("*.gguf")):
        # Files of answers are left alone: they may be written at any time.
        if path.name not in named and not path.name.startswith(kept_answers.ANSWERS):
            with contextlib.suppress(OSError):
                path.unlink()


# --- the process in which a draft learns while a command goes on answering --------------------------

PAUSE, GO = b"-", b"+"
_LOWEST_PRIORITY = 19


class Pauses:
    """Pauses the training as standard input says, with a clock that stands still during pauses."""

    def __init__(self) -> None:
        self._is_running = threading.Event()
        self._is_running.set()
        self._paused_s = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> bool:
        """Wait until there is no pause, and return False: it is no interruption."""
        started = time.monotonic()
        self._is_running.wait()
        self._paused_s += time.monotonic() - started
        return False

    def clock(self) -> float:
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
    asked, pauses = json.loads(sys.argv[1]), Pauses()
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    try:
        found = learn(
            Path(asked["folder"]),
            Path(asked["target"]),
            Path(asked["draft"]),
            Budget(pauses.clock, pauses.clock() + 60.0 * asked["minutes"], pauses.wait),
        )
    except SpecgenError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    assert found is not None, "nothing interrupts it"
    sys.stdout.write(json.dumps(asdict(found)))
    return 0


# --- the command that starts it ---------------------------------------------------------------------

#: The number of new answers that starts a lesson, and how long it may take.
NEW_ANSWERS, _MINUTES = 10, 10.0
#: The process may use the processor's cores, divided by this.
_CORES_SHARE = 4
#: Seconds that the process has to end after it was told to.
_END_S = 5.0
COMMAND = (sys.executable, "-m", "specgen.train.online_learning")


class Learner:
    """A context manager that starts a lesson when there are enough new answers, pauses it while an
    answer is generated, and gives its result, or what another process learnt, to the engine's
    draft. `tell` gets a sentence for each lesson.
    """

    def __init__(self, session: Session, engine: Engine, tell: Callable[[str], None]) -> None:
        self._target, self._engine, self._tell = session.options.target, engine, tell
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] = io.BytesIO()  # the file of its standard error
        self._is_running = True
        #: The number of the kept answer from which on the next lesson may begin.
        self._not_before = 0
        folder, own = session.options.learning, session.draft
        self._is_on = False
        why_not = ""
        if folder is not None and own is not None and own.learns is not None:
            self._folder, self._draft = folder, own.learns
            #: The learnt weights that the draft was loaded with.
            self._in_use = learnt_weights(folder, own.learns)
            try:
                check_library()
                self._is_on = True
            except UsageError as error:
                why_not = f"{error.message} ({error.hint})"
        elif folder is not None and own is not None and not own.is_free:
            why_not = f"{own.name} cannot learn"
        if why_not:
            tell(f"answers are kept, and not learnt from: {why_not}")

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        child, self._child = self._child, None
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
        """Start, pause, continue or finish a lesson: after an answer, or before one (`begins`),
        which pauses it.
        """
        if not self._is_on:
            return
        try:
            if self._child is not None:
                if self._child.poll() is not None:
                    self._end_lesson(self._child)
            elif self._n_new >= NEW_ANSWERS and last_number(self._folder) >= self._not_before:
                self._start_lesson()
            if self._child is None:
                learnt = learnt_weights(self._folder, self._draft)
                if learnt != self._in_use and self._engine.reload_draft():
                    self._in_use = learnt
            elif begins == self._is_running:
                self._is_running = not begins
                self._send(GO if self._is_running else PAUSE)
        except (SpecgenError, OSError, ValueError, TypeError) as error:  # not the answers end
            self._is_on = False
            self._tell(f"learning has ended: {error}")

    def _send(self, data: bytes) -> None:
        stdin = None if self._child is None else self._child.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: the next call notices
            stdin.write(data)
            stdin.flush()

    @property
    def _n_new(self) -> int:
        last = last_number(self._folder)
        seen = read_learnt(self._folder, self._draft).last_number
        return last - seen if last >= seen else last  # smaller if the file was deleted

    def _start_lesson(self) -> None:
        n_threads = max(1, default_threads() // _CORES_SHARE)
        paths = {"folder": self._folder, "target": self._target, "draft": self._draft}
        task = json.dumps(paths | {"minutes": _MINUTES}, default=os.fspath)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call
        self._child = subprocess.Popen(
            (*COMMAND, task),
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
        result, _ = child.communicate()
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return result, lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
