"""The training loop of every draft that is trained: steps of gradient descent, judged on held-back
text.
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
#: The fewest tokens of answers to learn from, and to judge by, by what is made of them.
LEAST_TEXT = {"heads": (2048, 100), "distilled": (1000, 100), "pruned": (0, 100)}
_text = partial(option, panel="The target's text")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Answers to `prompts`, `n_tokens` in all, to make drafts from."""

    prompts: Sequence[str]
    n_tokens: int = _text(
        N_TOKENS, "--tokens", "How many tokens of answers to write in all.", min=1
    )
    max_tokens: int = _text(
        256, "--max-tokens --predict --n-predict -n", "The most tokens of an answer.", min=8
    )
    n_parallel: int = _text(16, "--parallel -np", "How many answers to generate at once.", min=1)


@dataclass(frozen=True, slots=True)
class Budget:
    """The time that work may take: until `until_s`, or `interrupted`. `progress` gets steps done
    and in all.
    """

    clock: Callable[[], float]
    until_s: float = math.inf
    interrupted: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] = lambda _done, _total: None

    def is_over(self) -> bool:
        return self.interrupted() or self.clock() > self.until_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """`n_passes` over `n_rows` rows, `n_batch` a step. The rate rises in `n_rising` steps, and
    falls along half a cosine to `last_share`. Training ends after `patience` judgements, every
    `judged_every` steps, without a lower loss.
    """

    n_rows: int
    n_batch: int
    n_passes: int
    rate: float
    n_rising: int
    last_share: float
    judged_every: int
    patience: int

    @property
    def n_steps(self) -> int:
        return self.n_passes * (self.n_rows // self.n_batch)

    def batch(self, step: int) -> NDArray[np.int64]:
        number, index = divmod(step, self.n_rows // self.n_batch)
        order = np.random.default_rng(number).permutation(self.n_rows)
        return order[index * self.n_batch : (index + 1) * self.n_batch]

    def learning_rate(self, step: int, done: float) -> float:
        falling = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        rising = min(1.0, (step + 1) / self.n_rising)
        return self.rate * rising * (self.last_share + (1.0 - self.last_share) * falling)


@dataclass(slots=True)
class TrainingState:
    """The lowest loss on held-back text, the parameters that had it, and the judgements since."""

    best_loss: float
    best: Parameters = field(default_factory=dict)
    n_steps: int = 0
    seconds: float = 0.0
    n_worse: int = 0


class Trainee(Protocol):
    """What is trained: it has a loss on the held-back text, and gives copies of its present
    parameters.
    """

    def step(self, batch: NDArray[np.int64], rate: float) -> None: ...

    def loss(self) -> float: ...

    def copied(self) -> Parameters: ...


def train(trainee: Trainee, state: TrainingState, schedule: Schedule, budget: Budget) -> bool:
    """Train to the end, from `state` on, which is kept up to date; return False if interrupted."""
    started_s = budget.clock()
    limit_s = max(1e-9, budget.until_s - started_s)
    while state.n_steps < schedule.n_steps and state.n_worse < schedule.patience:
        if budget.interrupted():
            return False
        done = max(state.n_steps / schedule.n_steps, state.seconds / limit_s)
        trainee.step(schedule.batch(state.n_steps), schedule.learning_rate(state.n_steps, done))
        state.n_steps += 1
        is_last = state.n_steps == schedule.n_steps or budget.clock() >= budget.until_s
        if is_last or state.n_steps % schedule.judged_every == 0:
            new_loss = trainee.loss()
            state.n_worse += 1
            if new_loss < state.best_loss:
                state.best_loss, state.best, state.n_worse = new_loss, trainee.copied(), 0
        state.seconds = budget.clock() - started_s
        budget.progress(state.n_steps, schedule.n_steps)
        if is_last:
            break
    return True
