"""Fits a draft model to a target's own text, and writes it as a GGUF file.

Training changes the scales of the blocks of its matrices (`specgen.training.distil.block_scales`). It fits
the tokens that the target chose (hard labels) and, where they are known, the tokens that it found
likeliest (distillation as in DistillSpec, Zhou et al., arXiv:2310.08461). The draft has to agree with
the target only on the target's own text, so some ten thousand tokens of it suffice for a gain.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specgen.errors import MemoryLimitError, UsageError
from specgen.system.atomic_files import new_beside
from specgen.system.json_lines import write_errors
from specgen.training.distil.gguf_weights import GgufWeights, read_weights, write_weights
from specgen.training.distil.training_texts import Rows, TrainingText, pack

if TYPE_CHECKING:
    from specgen.training.distil.training import Trainer

#: The learning rate of Adam at its peak.
RATE = 6e-3
#: The weight of the target's distribution in the loss, where it is known; the rest is
#: on the token that the target chose. With 1, a second pass does not overfit.
SOFTNESS = 1.0
#: Passes over the text at most.
N_PASSES = 2
#: The number of tokens in a row: most answers fit with their prompt.
N_COLUMNS = 384
#: Judgements in a pass over the text, and the number without an improvement after which training ends.
_JUDGED_A_PASS = 3
_PATIENCE = 4
#: The learning rate rises in a quarter of the steps, but in so many at most, and falls to this share of its peak.
_MOST_RISING = 20
_LAST_SHARE = 0.05
#: Seconds from one saved state to the next.
_SAVED_EVERY_S = 60.0
#: The fewest tokens of answers to learn from, and to judge by.
_LEAST_LEARNT = 1000
_LEAST_JUDGED = 100


@dataclass(frozen=True, slots=True)
class Distilled:
    """The result of a training. An agreement is the share of the held-back answers' tokens that the draft
    finds likeliest: before, and after, the latter of the weights as written to the file."""

    agreement_before: float
    agreement_after: float
    n_steps: int
    seconds: float


def distil(
    draft: Path,
    texts: Sequence[TrainingText],
    output: Path,
    *,
    minutes: float,
    clock: Callable[[], float],
    progress: Callable[[int, int, float], None],
    interrupted: Callable[[], bool],
    rate: float = RATE,
    softness: float = SOFTNESS,
    seed: int = 0,
) -> Distilled | None:
    """Train a draft on texts and write it to `output`; None if `interrupted` returns True.

    Training takes at most `minutes`, by `clock`. `progress` gets the steps done, the steps in all and the
    seconds left. The state is kept beside `output` during the training, so the same call continues a
    training that was interrupted or killed. Raise `UsageError` if JAX is not installed or there is too
    little text, `ModelFileError` if the draft cannot be trained, `MemoryLimitError` and `OutputError`.
    """
    check_library()
    learnt = pack([text for text in texts if not text.is_held_back], N_COLUMNS)
    judged = pack([text for text in texts if text.is_held_back], N_COLUMNS)
    if learnt.n_labels < _LEAST_LEARNT or judged.n_labels < _LEAST_JUDGED:
        raise UsageError(
            f"{learnt.n_labels} tokens to learn from and {judged.n_labels} to judge by: too few",
            hint=f"make more text: a draft needs {_LEAST_LEARNT} and {_LEAST_JUDGED}",
        )
    weights = read_weights(draft)
    check_memory(draft, weights)
    from specgen.training.distil.training import Trainer

    trainer = Trainer(weights, softness=softness)
    key = _key(draft, learnt, judged, f"scales {N_PASSES} {rate} {softness} {seed}")
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    run = _Run(trainer, learnt, judged, output.with_name(f"{output.name}.training"), key)
    if not run.train(60.0 * minutes, rate, seed, clock, progress, interrupted):
        return None
    with write_errors(output), new_beside(output) as new:
        write_weights(draft, run.best, new)
        after = Trainer(read_weights(new)).judge(judged)
        new.replace(output)
    run.forget()
    return Distilled(run.before, after.agreement, run.n_steps, run.seconds)


class _Run:
    """A training. It continues from the state in its file, if there is one."""

    def __init__(self, trainer: Trainer, learnt: Rows, judged: Rows, file: Path, key: str) -> None:
        self._trainer = trainer
        self._learnt = learnt
        self._judged = judged
        self._file = file
        self._key = key
        self.n_steps = 0
        self.seconds = 0.0
        self.before = 0.0
        self._best_loss = math.inf
        self._n_worse = 0
        #: The changes of the factors with the lowest loss.
        self.best: dict[str, Any] = {}

    def train(
        self,
        limit_s: float,
        rate: float,
        seed: int,
        clock: Callable[[], float],
        progress: Callable[[int, int, float], None],
        interrupted: Callable[[], bool],
    ) -> bool:
        """Train to the end; False if it was interrupted, with its state kept."""
        from specgen.training.distil.training import N_ROWS

        n_rows = min(N_ROWS, len(self._learnt))
        steps_a_pass = len(self._learnt) // n_rows
        n_steps = N_PASSES * steps_a_pass
        judged_every = max(1, steps_a_pass // _JUDGED_A_PASS)
        if not self._resume():
            score = self._trainer.judge(self._judged)
            self.before, self._best_loss = score.agreement, score.loss
            self.best = self._trainer.changes()
        started_s = clock() - self.seconds
        saved_s = clock()
        while self.n_steps < n_steps and self._n_worse < _PATIENCE:
            if interrupted():
                self._save()
                return False
            order = np.random.default_rng([seed, self.n_steps // steps_a_pass])
            first = self.n_steps % steps_a_pass * n_rows
            rows = order.permutation(len(self._learnt))[first : first + n_rows]
            done = max(self.n_steps / n_steps, self.seconds / limit_s)
            n_rising = 1 + min(_MOST_RISING, n_steps // 4)
            size = learning_rate(rate, self.n_steps, n_rising, done, _LAST_SHARE)
            self._trainer.step(self._learnt.pick(rows), size)
            self.n_steps += 1
            is_last = self.n_steps == n_steps or clock() - started_s >= limit_s
            if self.n_steps % judged_every == 0 or is_last:
                self._judge()
            self.seconds = clock() - started_s
            left_s = min(limit_s, self.seconds / self.n_steps * n_steps) - self.seconds
            progress(self.n_steps, n_steps, max(0.0, left_s))
            if is_last:
                break
            if clock() - saved_s >= _SAVED_EVERY_S:
                self._save()
                saved_s = clock()
        return True

    def forget(self) -> None:
        """Delete the saved state."""
        self._file.unlink(missing_ok=True)

    def _judge(self) -> None:
        # The loss tells steps apart that agree at as many of a few thousand positions.
        loss = self._trainer.judge(self._judged).loss
        self._n_worse += 1
        if loss < self._best_loss:
            self._best_loss, self._n_worse = loss, 0
            self.best = self._trainer.changes()

    def _save(self) -> None:
        numbers = [
            self.n_steps, self.seconds, self.before, self._best_loss, self._n_worse
        ]  # fmt: skip
        best = {f"best_{name}": values for name, values in self.best.items()}
        with write_errors(self._file):
            self._trainer.save(self._file, key=self._key, numbers=numbers, **best)

    def _resume(self) -> bool:
        """Restore the saved state of a training with the same key; False if there is none."""
        try:
            with self._file.open("rb") as file, np.load(file) as saved:
                if str(saved["key"]) != self._key:
                    return False
                best = {
                    name.removeprefix("best_"): saved[name]
                    for name in saved.files
                    if name.startswith("best_")
                }
                n_steps, seconds, before, best_loss, n_worse = saved["numbers"].tolist()
                self._trainer.restore(saved)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError):
            return False
        self.n_steps, self.seconds, self._n_worse = int(n_steps), seconds, int(n_worse)
        self.before, self._best_loss, self.best = before, best_loss, best
        return True


def learning_rate(peak: float, step: int, n_rising: int, done: float, last_share: float) -> float:
    """Return the learning rate of a step, counted from 0: it rises to `peak` in `n_rising` steps, and falls along half
    a cosine to `last_share` of it. `done` is the share of the training that is done."""
    along = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    return peak * min(1.0, (step + 1) / n_rising) * (last_share + (1.0 - last_share) * along)


def _key(draft: Path, learnt: Rows, judged: Rows, settings: str) -> str:
    """Return a digest of the draft, the data and the settings: trainings with another key are not
    continued."""
    found = hashlib.sha256(f"{draft.name} {draft.stat().st_size} {settings}".encode())
    for rows in (learnt, judged):
        found.update(rows.tokens.tobytes() + rows.labels.tobytes())
    return found.hexdigest()


def check_library() -> None:
    """Raise `UsageError` if JAX or optax is not installed."""
    for name in ("jax", "optax"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"training a draft needs {name}, which is not installed",
                hint="pip install 'specgen[train]'",
            )


def check_memory(draft: Path, weights: GgufWeights) -> None:
    """Raise `MemoryLimitError` if the weights and the values of a step do not fit the free memory."""
    import psutil

    shape = weights.hyperparameters
    n_vocab = len(weights.tensors["token_embd.weight"])
    n_ff = max(len(weights.tensors[f"blk.{i}.ffn_up.weight"]) for i in range(shape.n_layer))
    # The outputs of a layer's matrices for each token, and some copies of a row's logits.
    states = shape.n_layer * (8 * shape.n_embd + 4 * n_ff) * 3 * N_COLUMNS
    needed = 4 * (weights.n_parameters + states + 4 * N_COLUMNS * n_vocab)
    available = psutil.virtual_memory().available
    if needed > available:
        raise MemoryLimitError(
            f"{draft}: training it needs about {needed / 2**30:.1f} GiB more, "
            f"{available / 2**30:.1f} GiB are free",
            hint="train a smaller draft, or close other programs",
        )
