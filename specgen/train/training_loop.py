"""The training loop that all trained drafts share.

It takes steps of gradient descent, judges the draft on held-back text at intervals, and keeps the
parameters with the lowest loss. The learning rate rises linearly, then falls along half a cosine
(Loshchilov and Hutter, arXiv:1608.03983). The cosine is stretched to end when the time is over, so
that even a short training ends with small steps.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgen.errors import UsageError
from specgen.option_fields import option

#: Arrays by name.
Parameters: TypeAlias = dict[str, NDArray[Any]]


def check_library() -> None:
    """Raise `UsageError` if JAX or optax is not installed."""
    for name in ("jax", "optax"):
        if importlib.util.find_spec(name) is None:
            hint = "pip install 'specgen-gguf[train]'"
            raise UsageError(f"training a draft needs {name}, which is not installed", hint)


#: The default number of tokens that the target writes for making drafts. With twice as many,
#: decoder heads agree with it only slightly more.
N_TOKENS = 40_000
#: The minimum numbers of answer tokens to learn from and to judge on, for each kind of draft.
MIN_TEXT = {"heads": (2048, 100), "distilled": (1000, 100), "pruned": (0, 100)}
_text = partial(option, panel="The target's text")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The text that a target writes for making drafts."""

    #: The prompts to answer.
    prompts: Sequence[str]
    n_tokens: int = _text(
        N_TOKENS,
        "--tokens",
        "How many tokens of answers to generate in all.",
        min=1,
    )
    max_tokens: int = _text(
        256,
        "--max-tokens --predict --n-predict -n",
        "The maximum number of tokens in an answer.",
        min=8,
    )
    n_parallel: int = _text(
        16,
        "--parallel -np",
        "How many answers to generate at once.",
        min=1,
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """The time limit of a piece of work, and the callbacks that interrupt it and show progress."""

    #: Returns the time in seconds.
    clock: Callable[[], float]
    #: When the work should end, in seconds of `clock`.
    until_s: float = math.inf
    #: Returns whether the user has asked to stop.
    interrupted: Callable[[], bool] = lambda: False
    #: Called with the number of steps done and the total number of steps.
    progress: Callable[[int, int], None] = lambda _done, _total: None

    def is_over(self) -> bool:
        """Return whether the work was interrupted or its time is over."""
        return self.interrupted() or self.clock() > self.until_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """The number of steps, their rows, learning rates and judgements."""

    #: The number of rows to learn from.
    n_rows: int
    #: The number of rows in a step.
    n_batch: int
    #: The number of times that each row is learnt from.
    n_passes: int
    #: The highest learning rate.
    rate: float
    #: The number of steps at the beginning during which the learning rate rises.
    n_rising: int
    #: The last learning rate, as a share of the highest.
    last_share: float
    #: The number of steps between two judgements.
    judged_every: int
    #: Training ends after this many consecutive judgements without a lower loss.
    patience: int

    @property
    def n_steps(self) -> int:
        """The number of steps if nothing ends training earlier."""
        return self.n_passes * (self.n_rows // self.n_batch)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the indices of the rows, int64[n_batch], to learn from in a step, counted from 0.

        Each pass over the rows has its own random order, seeded with the number of the pass.
        """
        number, index = divmod(step, self.n_rows // self.n_batch)
        order = np.random.default_rng(number).permutation(self.n_rows)
        return order[index * self.n_batch : (index + 1) * self.n_batch]

    def learning_rate(self, step: int, done: float) -> float:
        """Return the learning rate of a step, counted from 0.

        Args:
            step: The step, which determines how far the rate has risen.
            done: The share of training that is done, which determines how far it has fallen.
        """
        falling = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        rising = min(1.0, (step + 1) / self.n_rising)
        return self.rate * rising * (self.last_share + (1.0 - self.last_share) * falling)


@dataclass(slots=True)
class TrainingState:
    """The progress of a training."""

    #: The lowest loss on held-back text so far.
    best_loss: float
    #: The parameters with that loss.
    best: Parameters = field(default_factory=dict)
    #: The number of steps taken.
    n_steps: int = 0
    #: The time spent.
    seconds: float = 0.0
    #: The number of judgements since the loss was lowest.
    n_worse: int = 0


class Trainee(Protocol):
    """A draft in training."""

    #: Its current parameters.
    parameters: Parameters

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        """Take a step of gradient descent at this learning rate, on the rows with these indices."""

    def loss(self) -> float:
        """Return the current loss on held-back text."""


def train(
    trainee: Trainee,
    state: TrainingState,
    schedule: Schedule,
    budget: Budget,
) -> bool:
    """Train until the schedule or the time ends, or the loss stops falling.

    Args:
        trainee: The draft to train.
        state: The state to begin with, which is updated; its `best` parameters are the result.
        schedule: The steps to take.
        budget: The time that training may take.

    Returns:
        Whether training ended normally; False if it was interrupted.
    """
    started_s = budget.clock()
    limit_s = max(1e-9, budget.until_s - started_s)
    while state.n_steps < schedule.n_steps and state.n_worse < schedule.patience:
        if budget.interrupted():
            return False
        # The share of training that is done, by steps or by time, whichever is further.
        done = max(state.n_steps / schedule.n_steps, state.seconds / limit_s)
        trainee.step(schedule.batch(state.n_steps), schedule.learning_rate(state.n_steps, done))
        state.n_steps += 1
        is_last = state.n_steps == schedule.n_steps or budget.clock() >= budget.until_s
        if is_last or state.n_steps % schedule.judged_every == 0:
            _judge(trainee, state)
        state.seconds = budget.clock() - started_s
        budget.progress(state.n_steps, schedule.n_steps)
        if is_last:
            break
    return True


def _judge(trainee: Trainee, state: TrainingState) -> None:
    """Compare the current loss with the lowest so far, and keep the parameters if it is lower."""
    loss = trainee.loss()
    if loss < state.best_loss:
        state.best_loss = loss
        state.best = copied(trainee.parameters)
        state.n_worse = 0
    else:
        state.n_worse += 1


def copied(parameters: Parameters) -> Parameters:
    """Return a copy of parameters, which the next step overwrites."""
    return {name: np.array(values) for name, values in parameters.items()}
