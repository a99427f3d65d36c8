"""Lets a draft learn from kept answers (online speculative decoding, Liu et al., arXiv:2310.07177).

Training continues from the better of two sets of weights: the draft's own and those it learnt before. It uses
the kept answers except the latest ones. The latest ones judge three drafts, each with its weights as written
to a file: the draft as it came, the one in use, and the new one. The draft that agrees most often with the
target is used from then on. The comparison is paired, token by token. Learnt weights that do worse than the
draft as it came on later answers are dropped by the next lesson.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from specgen.engine.kept_answers import ANSWERS, KeptAnswer, make_folder, read_answers
from specgen.engine.kept_answers import last_number as last_number_of
from specgen.engine.learnt_weights import (
    Learnt,
    learnt_weights,
    read_learnt,
    read_state,
    write_learnt,
)
from specgen.errors import ModelFileError, UsageError
from specgen.llama import LlamaModel
from specgen.system.atomic_files import NEW, new_beside
from specgen.system.json_lines import locked, write_errors
from specgen.training.distil.distillation import check_library, check_memory, learning_rate
from specgen.training.distil.gguf_weights import read_weights, write_weights
from specgen.training.distil.training_texts import Rows, pack
from specgen.training.online.kept_texts import N_COLUMNS, KeptTexts

if TYPE_CHECKING:
    from specgen.training.distil.training import Score, Trainer
    from specgen.training.distil.transformer import Parameters

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
_JUDGED_A_PASS = 2
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
        """A sentence about the lesson, for the user."""
        before = "" if self.agreement_in_use is None else f", in use {self.agreement_in_use:.3f}"
        shares = (
            f"on the {self.n_judging} latest answers it says what the target says at "
            f"{self.agreement_new:.3f} of the places (as it came {self.agreement_as_it_came:.3f}{before})"
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
    folder: Path,
    target: LlamaModel,
    draft: LlamaModel,
    base: Path,
    *,
    minutes: float,
    clock: Callable[[], float],
    progress: Callable[[int, int], None],
    interrupted: Callable[[], bool],
    rate: float = RATE,
    seed: int = 0,
) -> Lesson | None:
    """Let a draft learn from the answers in a folder; None if interrupted, with nothing changed.

    `base` is the file of the draft without what it learnt: its own file or a copy. Training takes at most
    `minutes`, by `clock`. Raise `UsageError` if JAX is not installed, there are too few answers, or another
    process learns there; `ModelFileError` if the draft cannot be trained, `MemoryLimitError` and
    `OutputError`.
    """
    check_library()
    answers = read_answers(folder)
    learning, judging = split(answers)
    if len(answers) < LEAST_ANSWERS:
        raise UsageError(
            f"{len(answers)} answers are kept for {target.name}: too few to learn from",
            hint=f"use --learn until there are {LEAST_ANSWERS} or more",
        )
    make_folder(folder)
    held = UsageError(f"another process learns for {target.name} already", "wait for its end")
    with locked(folder / "learning.lock", held):
        _clear(folder)
        texts = KeptTexts(target, draft)
        rows = pack(texts.texts(learning, is_held_back=False), N_COLUMNS)
        judged = pack(texts.texts(judging, is_held_back=True), N_COLUMNS)
        if not rows.n_labels or not judged.n_labels:
            raise UsageError(f"no answer that is kept for {target.name} can be read as its text")
        run = _Run(folder, draft.path, base, rows, judged, minutes, clock, seed)
        found = run.train(rate, progress, interrupted)
        if found is None:
            return None
        return run.decide(found, answers[-1].number, len(learning), len(judging))


def learn_from_files(
    folder: Path,
    target: Path,
    draft: Path,
    base: Path,
    *,
    minutes: float,
    clock: Callable[[], float],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Lesson | None:
    """Do the same as `learn` for models that are not loaded: only their vocabularies are read."""
    check_library()  # before loading, which takes a second
    with (
        contextlib.closing(LlamaModel(target, vocabulary_only=True)) as model,
        contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as small,
    ):
        return learn(
            folder,
            model,
            small,
            base,
            minutes=minutes,
            clock=clock,
            progress=progress,
            interrupted=interrupted,
        )


class _Run:
    """One lesson."""

    def __init__(
        self,
        folder: Path,
        draft: Path,
        base: Path,
        rows: Rows,
        judged: Rows,
        minutes: float,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        self._folder, self._draft, self._base = folder, draft, base
        self._rows, self._judged = rows, judged
        self._clock, self._started_s = clock, clock()
        self._limit_s = 60.0 * minutes
        self._seed = seed
        self._state = read_learnt(folder, draft)
        self._as_it_came: Score | None = None
        self._in_use: Score | None = None
        self._n_steps = 0
        #: The file that training started from.
        self._origin = base

    @property
    def _seconds(self) -> float:
        return self._clock() - self._started_s

    def train(
        self,
        rate: float,
        progress: Callable[[int, int], None],
        interrupted: Callable[[], bool],
    ) -> Parameters | None:
        """Return the changes with the lowest loss on the judging answers; None if interrupted."""
        trainer, best_loss = self._start()
        steps_a_pass = len(self._rows)
        n_steps = N_PASSES * steps_a_pass
        judged_every = max(1, steps_a_pass // _JUDGED_A_PASS)
        best, n_worse = trainer.changes(), 0
        while self._n_steps < n_steps and n_worse < _PATIENCE:
            if interrupted():
                return None
            order = np.random.default_rng([self._seed, self._n_steps // steps_a_pass])
            picked = order.permutation(len(self._rows))[[self._n_steps % steps_a_pass]]
            done = max(self._n_steps / n_steps, self._seconds / self._limit_s)
            size = learning_rate(rate, self._n_steps, _N_RISING, done, _LAST_SHARE)
            trainer.step(self._rows.pick(picked), size)
            self._n_steps += 1
            is_last = self._n_steps == n_steps or self._seconds >= self._limit_s
            if self._n_steps % judged_every == 0 or is_last:
                loss, n_worse = trainer.judge(self._judged).loss, n_worse + 1
                if loss < best_loss:
                    best, best_loss, n_worse = trainer.changes(), loss, 0
            progress(self._n_steps, n_steps)
            if is_last:
                break
        return best

    def _start(self) -> tuple[Trainer, float]:
        """Return a trainer that starts from the better of two drafts, as it came and in use, and its loss on
        the judging answers."""
        from specgen.training.distil.training import Trainer

        weights = read_weights(self._base)
        check_memory(self._base, weights)
        trainer = Trainer(weights)
        score = self._as_it_came = trainer.judge(self._judged)
        in_use = learnt_weights(self._folder, self._draft)
        if in_use is not None:
            with contextlib.suppress(ModelFileError):  # damaged: no draft uses it
                other = Trainer(read_weights(in_use))
                self._in_use = other.judge(self._judged)
                if self._in_use.agreement > score.agreement:
                    trainer, score, self._origin = other, self._in_use, in_use
        return trainer, score.loss

    def decide(
        self, changes: Parameters, last_number: int, n_answers: int, n_judging: int
    ) -> Lesson:
        """Write the new weights, judge them as written, and keep the best of the three."""
        from specgen.training.distil.training import Trainer

        as_it_came, in_use = self._as_it_came, self._in_use
        assert as_it_came is not None
        if last_number > last_number_of(self._folder):
            raise UsageError("the answers were deleted while the draft learnt from them")
        with write_errors(self._folder), new_beside(self._folder / "weights.gguf") as written:
            write_weights(self._origin, changes, written)
            new = Trainer(read_weights(written)).judge(self._judged)
            before = max(as_it_came.agreement, in_use.agreement if in_use is not None else 0.0)
            outcome: Outcome = "kept"
            state = self._state
            if new.agreement > before:
                outcome = "new"
                state = Learnt(
                    weights=f"{self._draft.stem}-{_digest(written)}.gguf",
                    n_answers=n_answers,
                    agreement_before=as_it_came.agreement,
                    agreement_after=new.agreement,
                )
                written.replace(self._folder / state.weights)
            elif in_use is not None and in_use.agreement < as_it_came.agreement:
                outcome, state = "none", Learnt()
            values = {name: getattr(state, name) for name in Learnt.__slots__}
            write_learnt(
                self._folder, self._draft, Learnt(**{**values, "last_number": last_number})
            )
        if outcome != "kept":
            self._delete_former()
        return Lesson(
            n_answers,
            n_judging,
            self._judged.n_labels,
            as_it_came.agreement,
            None if in_use is None else in_use.agreement,
            new.agreement,
            outcome,
            self._n_steps,
            self._seconds,
        )

    def _delete_former(self) -> None:
        """Delete the weights that were used before. If deleting fails, a later lesson deletes them."""
        name = self._state.weights
        if name and Path(name).name == name:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _clear(folder: Path) -> None:
    """Delete weights and unfinished files that no state names: a killed process leaves them."""
    states = [read_state(path) for path in folder.glob("*.json")]
    named = {state.weights for state in states}
    for path in (*folder.glob(f"*{NEW}"), *folder.glob("*.gguf")):
        # Files of answers are left alone: they may be written at any time.
        if path.name not in named and not path.name.startswith(ANSWERS):
            with contextlib.suppress(OSError):
                path.unlink()
