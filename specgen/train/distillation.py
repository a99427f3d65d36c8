"""Fits a draft model to a target's own text, and writes it as a GGUF file.

Training changes the scales of the blocks of its matrices (`specgen.train.gguf_weights`). It fits
the tokens that the target chose (hard labels) and, where they are known, the tokens that it found
likeliest (distillation as in DistillSpec, Zhou et al., arXiv:2310.08461). The draft has to agree with
the target only on the target's own text, so some ten thousand tokens of it suffice for a gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import MemoryLimitError, UsageError
from specgen.system.files import new_beside, write_errors
from specgen.train.gguf_weights import GgufWeights, read_weights, write_weights
from specgen.train.target_text import N_COLUMNS, Rows, TrainingText, pack_split
from specgen.train.training_loop import Budget, Schedule, TrainingState, check_library, train

if TYPE_CHECKING:
    from specgen.train.transformer import Trainer

#: The learning rate of Adam at its peak.
RATE = 6e-3
#: The weight of the target's distribution in the loss, where it is known; the rest is
#: on the token that the target chose. With 1, a second pass does not overfit.
SOFTNESS = 1.0
#: The number of rows in a step, and passes over the text at most.
N_ROWS = 3
N_PASSES = 2
#: Judgements in a pass over the text, and the number without an improvement after which training ends.
_JUDGED_PER_PASS = 3
_PATIENCE = 4
#: The learning rate rises in a quarter of the steps, but in so many at most, and falls to this share of its peak.
_MOST_RISING = 20
_LAST_SHARE = 0.05
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
    budget: Budget,
    *,
    rate: float = RATE,
    softness: float = SOFTNESS,
) -> Distilled | None:
    """Train a draft on texts and write it to `output`; None if interrupted. Raises `UsageError` if there is too little text,
    `ModelFileError` if the draft cannot be trained, `MemoryLimitError` and `OutputError`.
    """
    check_library()
    learnt, judged = pack_split(texts)
    if learnt.n_labels < _LEAST_LEARNT or judged.n_labels < _LEAST_JUDGED:
        raise UsageError(
            f"{learnt.n_labels} tokens to learn from and {judged.n_labels} to judge by: too few",
            hint=f"give more --minutes or --prompts: a draft needs {_LEAST_LEARNT} and {_LEAST_JUDGED}",
        )
    weights = read_weights(draft)
    check_memory(draft, weights)
    from specgen.train.transformer import Trainer

    trainer = Trainer(weights, softness=softness)
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    n_batch = min(N_ROWS, len(learnt))
    n_per_pass = len(learnt) // n_batch
    schedule = Schedule(
        len(learnt),
        n_batch,
        N_PASSES,
        rate,
        n_rising=1 + min(_MOST_RISING, N_PASSES * n_per_pass // 4),
        last_share=_LAST_SHARE,
        judged_every=max(1, n_per_pass // _JUDGED_PER_PASS),
        patience=_PATIENCE,
    )
    before = trainer.judge(judged)
    state = TrainingState(before.loss, trainer.changes())
    if not train_scales(trainer, learnt, judged, state, schedule, budget):
        return None
    with write_errors(output), new_beside(output) as new:
        write_weights(draft, state.best, new)
        after = Trainer(read_weights(new)).judge(judged)
        new.replace(output)
    return Distilled(before.agreement, after.agreement, state.n_steps, state.seconds)


def train_scales(
    trainer: Trainer,
    learnt: Rows,
    judged: Rows,
    state: TrainingState,
    schedule: Schedule,
    budget: Budget,
) -> bool:
    """Train on rows, judged by others, as `train` does; return False if interrupted."""
    return train(
        state,
        schedule,
        budget,
        step=lambda rows, rate: trainer.step(learnt.pick(rows), rate),
        # The loss tells steps apart that agree on as many of a few thousand tokens.
        loss=lambda: trainer.judge(judged).loss,
        parameters=trainer.changes,
    )


def check_memory(draft: Path, weights: GgufWeights) -> None:
    """Raise `MemoryLimitError` if the weights and the values of a step do not fit the free memory."""
    import psutil

    shape = weights.hyperparameters
    n_vocab = len(weights.tensors["token_embd.weight"])
    n_ff = max(len(weights.tensors[f"blk.{i}.ffn_up.weight"]) for i in range(shape.n_layer))
    # The outputs of a layer's matrices for each token, and some copies of a row's logits.
    states = shape.n_layer * (8 * shape.n_embd + 4 * n_ff) * N_ROWS * N_COLUMNS
    needed = 4 * (weights.n_parameters + states + 4 * N_COLUMNS * n_vocab)
    available = psutil.virtual_memory().available
    if needed > available:
        raise MemoryLimitError(
            f"{draft}: training it needs about {needed / 2**30:.1f} GiB more, "
            f"{available / 2**30:.1f} GiB are free",
            hint="train a smaller draft, or close other programs",
        )
