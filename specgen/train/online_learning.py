"""Lets a draft learn from kept answers (online speculative decoding, Liu et al., arXiv:2310.07177).

Training continues from the better of two sets of weights: the draft's own and those it learnt before. It uses
the kept answers except the latest ones. The latest ones judge three drafts, each with its weights as written
to a file: the draft as it came, the one in use, and the new one. The draft that agrees most often with the
target is used from then on. The comparison is paired, token by token. Learnt weights that do worse than the
draft as it came on later answers are dropped by the next lesson.

As a program (`python -m specgen.train.online_learning`) it reads its task as a line of JSON from standard input and
prints the result. After that line, `PAUSE` makes it wait before its next step, while an answer is generated, and `GO`
lets it continue. It has the lowest priority. It ends as soon as its standard input closes, so that no lesson outlives
the command.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from specgen.errors import ModelFileError, SpecgenError, UsageError
from specgen.llama import LlamaModel
from specgen.session import kept_answers
from specgen.session.kept_answers import KeptAnswer, Learnt
from specgen.system.files import NEW, locked, new_beside, write_errors
from specgen.train.distillation import check_memory, train_scales
from specgen.train.gguf_weights import read_weights, write_weights
from specgen.train.target_text import Rows, kept_texts, pack_split
from specgen.train.training_loop import Budget, Schedule, TrainingState, check_library

if TYPE_CHECKING:
    from specgen.train.transformer import Score, Trainer

#: The learning rate of Adam at its peak, and the most passes over the texts: the next lesson uses them again.
#: A step learns from one row, since there are few rows.
RATE = 6e-3
N_PASSES = 1
#: The number of latest answers that are used; the share of them that judges, and the most that judge.
MOST_ANSWERS = 128
_JUDGING_SHARE = 0.25
_MOST_JUDGING = 12
#: The fewest answers for a lesson, those that judge included.
LEAST_ANSWERS = 8
#: Judgements in a pass, and the number without an improvement after which training ends.
_JUDGED_PER_PASS = 2
_PATIENCE = 3
#: The learning rate rises in so many steps, and falls to this share of its peak. (Down to a twentieth, a lesson
#: of fifteen steps learnt nearly nothing.)
_N_RISING = 5
_LAST_SHARE = 0.5

Outcome: TypeAlias = Literal["new", "kept", "none"]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The result of learning. An agreement is the share of the judging answers' tokens that the draft finds
    likeliest: as it came, with the weights in use before (None if there were none), and with the new ones."""

    n_answers: int
    n_judging: int
    n_judged_tokens: int
    agreement_as_it_came: float
    agreement_in_use: float | None
    agreement_new: float
    #: What is used from now on: the new weights, those from before, or those that the draft came with.
    outcome: Outcome
    n_steps: int
    seconds: float

    @property
    def text(self) -> str:
        before = "" if self.agreement_in_use is None else f", in use {self.agreement_in_use:.1%}"
        shares = (
            f"on the {self.n_judging} latest answers it agrees with the target on "
            f"{self.agreement_new:.1%} of the tokens (as it came {self.agreement_as_it_came:.1%}{before})"
        )
        what = {
            "new": f"drafts with what it learnt from {self.n_answers} answers from now on",
            "kept": f"learnt nothing better from {self.n_answers} answers, and stays as it was",
            "none": "does worse with what it learnt, and drafts as it came again",
        }[self.outcome]
        if self.outcome == "kept" and self.agreement_in_use is None:
            what = f"learnt nothing better from {self.n_answers} answers: that is dropped"
        return f"{what}: {shares}"


def split(answers: Sequence[KeptAnswer]) -> tuple[list[KeptAnswer], list[KeptAnswer]]:
    """Return the answers to learn from, and the latest ones, which judge."""
    latest = list(answers[-MOST_ANSWERS:])
    n_judging = min(_MOST_JUDGING, math.ceil(_JUDGING_SHARE * len(latest)))
    return latest[: len(latest) - n_judging], latest[len(latest) - n_judging :]


def learn(
    folder: Path, target: Path, draft: Path, budget: Budget, *, rate: float = RATE
) -> Lesson | None:
    """Let a draft learn from the answers in a folder; None if interrupted, with nothing changed.

    Of the models only the vocabularies are read. Raises `UsageError` if JAX is not installed, there are too few answers,
    or another process learns there; `ModelFileError` if the draft cannot be trained, `MemoryLimitError`, `OutputError`.
    """
    check_library()
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
        former = kept_answers.learnt_weights(folder, draft)
        start = _better_start(draft, former, judged)
        trainer = start.trainer
        state = TrainingState(start.score.loss, trainer.changes())
        schedule = Schedule(
            len(rows),
            1,
            N_PASSES,
            rate,
            n_rising=_N_RISING,
            last_share=_LAST_SHARE,
            judged_every=max(1, len(rows) // _JUDGED_PER_PASS),
            patience=_PATIENCE,
        )
        if not train_scales(trainer, rows, judged, state, schedule, budget):
            return None
        if answers[-1].number > kept_answers.last_number(folder):
            raise UsageError("the answers were deleted while the draft learnt from them")
        known = replace(kept_answers.read_learnt(folder, draft), last_number=answers[-1].number)
        with write_errors(folder), new_beside(folder / "weights.gguf") as written:
            write_weights(start.file, state.best, written)
            new = type(trainer)(read_weights(written)).judge(judged)
            outcome = _outcome(start, new)
            if outcome == "none":
                known = Learnt(last_number=known.last_number)
            elif outcome == "new":
                digest = hashlib.sha256(written.read_bytes()).hexdigest()[:12]
                known = Learnt(
                    f"{draft.stem}-{digest}.gguf",
                    known.last_number,
                    len(learning),
                    start.as_it_came.agreement,
                    new.agreement,
                )
                written.replace(folder / known.weights)
            kept_answers.write_learnt(folder, draft, known)
        if outcome != "kept" and former is not None:
            with contextlib.suppress(OSError):  # a later lesson deletes it
                former.unlink()
        return Lesson(
            len(learning),
            len(judging),
            judged.n_labels,
            start.as_it_came.agreement,
            None if start.in_use is None else start.in_use.agreement,
            new.agreement,
            outcome,
            state.n_steps,
            budget.clock() - started_s,
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """The weights that training starts from, and how two sets of weights agree with the target."""

    file: Path
    trainer: Trainer
    as_it_came: Score
    in_use: Score | None = None

    @property
    def score(self) -> Score:
        """The better of the two scores, that of `trainer`."""
        if self.in_use is None or self.in_use.agreement <= self.as_it_came.agreement:
            return self.as_it_came
        return self.in_use


def _better_start(base: Path, learnt: Path | None, judged: Rows) -> _Start:
    """Judge a draft as it came and with what it learnt, and start from the better of the two."""
    from specgen.train.transformer import Trainer

    weights = read_weights(base)
    check_memory(base, weights)
    trainer = Trainer(weights)
    start = _Start(base, trainer, trainer.judge(judged))
    if learnt is not None:
        with contextlib.suppress(ModelFileError):  # damaged: no draft uses it
            other = Trainer(read_weights(learnt))
            start = replace(start, in_use=other.judge(judged))
            if start.score is start.in_use:
                start = replace(start, file=learnt, trainer=other)
    return start


def _outcome(start: _Start, new: Score) -> Outcome:
    if new.agreement > start.score.agreement:
        return "new"
    is_worse = start.in_use is not None and start.in_use.agreement < start.as_it_came.agreement
    return "none" if is_worse else "kept"


def _clear(folder: Path) -> None:
    """Delete weights and unfinished files that no state names: a killed process leaves them."""
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

    def listen(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def is_paused(self) -> bool:
        return not self._is_running.is_set()

    def wait(self) -> bool:
        """Wait until there is no pause, then return False (training takes True as an interruption)."""
        started = time.monotonic()
        self._is_running.wait()
        self._paused_s += time.monotonic() - started
        return False

    def clock(self) -> float:
        return time.monotonic() - self._paused_s

    def _read(self) -> None:
        while command := sys.stdin.buffer.read(1):
            if command == PAUSE:
                self._is_running.clear()
            elif command == GO:
                self._is_running.set()
        os._exit(1)


def main() -> int:
    """Learn, and return the exit code."""
    asked = json.loads(sys.stdin.buffer.readline())
    pauses = Pauses()
    pauses.listen()
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


def _end() -> NoReturn:
    """Run `main`, then end the process at once. In a normal exit the interpreter aborts if a thread waits for
    standard input, and that would look like a failed lesson."""
    code = 1
    try:
        code = main()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - the parent shows the last line
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end()
