"""The training loop of every draft that is trained.

It takes steps of gradient descent, judges the draft on held-back text now and then, and remembers
the parameters that did best. The learning rate rises linearly and then falls along half a cosine
(Loshchilov and Hutter, arXiv:1608.03983), so that training ends well whenever the time ends.
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
from specgen.sampler_options import option

#: Arrays by name.
Parameters: TypeAlias = dict[str, NDArray[Any]]


def check_library() -> None:
    """Raise `UsageError` if JAX or optax is not installed."""
    for name in ("jax", "optax"):
        if importlib.util.find_spec(name) is None:
            hint = "pip install 'specgen-gguf[train]'"
            raise UsageError(f"training a draft needs {name}, which is not installed", hint)


#: Tokens of the target's own text for making drafts; with twice as many, heads agree only a little
#: more.
N_TOKENS = 40_000
#: The fewest tokens of answers to learn from, and to judge by, for each kind of draft.
LEAST_TEXT = {"heads": (2048, 100), "distilled": (1000, 100), "pruned": (0, 100)}
_text = partial(option, panel="The target's text")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Which answers a target writes for making drafts."""

    #: The prompts to answer.
    prompts: Sequence[str]
    n_tokens: int = _text(
        N_TOKENS,
        "--tokens",
        "How many tokens of answers to write in all.",
        min=1,
    )
    max_tokens: int = _text(
        256,
        "--max-tokens --predict --n-predict -n",
        "The most tokens of an answer.",
        min=8,
    )
    n_parallel: int = _text(16, "--parallel -np", "How many answers to generate at once.", min=1)


@dataclass(frozen=True, slots=True)
class Budget:
    """The time that work may take."""

    clock: Callable[[], float]
    #: The time by the clock when it ends.
    until_s: float = math.inf
    interrupted: Callable[[], bool] = lambda: False
    #: Gets the number of steps done and of all steps.
    progress: Callable[[int, int], None] = lambda _done, _total: None

    def is_over(self) -> bool:
        """Return whether the work should end."""
        return self.interrupted() or self.clock() > self.until_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a training."""

    #: The number of rows to learn from.
    n_rows: int
    #: The number of rows in a step.
    n_batch: int
    #: How often each row is learnt from.
    n_passes: int
    #: The highest learning rate.
    rate: float
    #: The number of steps in which the learning rate rises.
    n_rising: int
    #: The share of the highest learning rate to which it falls.
    last_share: float
    #: The number of steps from one judgement to the next.
    judged_every: int
    #: Training ends after so many judgements without a lower loss.
    patience: int

    @property
    def n_steps(self) -> int:
        """The number of steps if nothing ends training earlier."""
        return self.n_passes * (self.n_rows // self.n_batch)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Return the rows of a step, from 0: each pass has its own order, the same every time."""
        number, index = divmod(step, self.n_rows // self.n_batch)
        order = np.random.default_rng(number).permutation(self.n_rows)
        return order[index * self.n_batch : (index + 1) * self.n_batch]

    def learning_rate(self, step: int, done: float) -> float:
        """Return the learning rate of a step, from 0, with this share of training done."""
        falling = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        rising = min(1.0, (step + 1) / self.n_rising)
        return self.rate * rising * (self.last_share + (1.0 - self.last_share) * falling)


@dataclass(slots=True)
class TrainingState:
    """How far training is."""

    #: The lowest loss on held-back text.
    best_loss: float
    #: The parameters that had it.
    best: Parameters = field(default_factory=dict)
    n_steps: int = 0
    seconds: float = 0.0
    #: The number of judgements since the best one.
    n_worse: int = 0


class Trainee(Protocol):
    """What is trained."""

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        """Take a step of gradient descent, learning from some rows."""

    def loss(self) -> float:
        """Return the present loss on held-back text."""

    def copied(self) -> Parameters:
        """Return a copy of the present parameters."""


def train(
    trainee: Trainee,
    state: TrainingState,
    schedule: Schedule,
    budget: Budget,
) -> bool:
    """Train until the schedule or the time ends, or the loss stops falling.

    Args:
        trainee: What is trained.
        state: Where training begins; it is kept up to date.
        schedule: The steps.
        budget: The time.

    Returns:
        False if interrupted.
    """
    started_s = budget.clock()
    limit_s = max(1e-9, budget.until_s - started_s)
    while state.n_steps < schedule.n_steps and state.n_worse < schedule.patience:
        if budget.interrupted():
            return False
        # The share of training that is done, by steps or by time, whichever ends first.
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
    loss = trainee.loss()
    if loss < state.best_loss:
        state.best_loss = loss
        state.best = trainee.copied()
        state.n_worse = 0
    else:
        state.n_worse += 1
