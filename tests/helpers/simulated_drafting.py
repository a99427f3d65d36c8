"""Simulated worlds in which drafting has known costs and acceptance rates, for tests of policies.

There is no clock and no model. The time of a decode comes from a table. Whether a drafted token is
right was decided before the simulation, so that all policies get the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specgen.method.cost_table import Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.policy import Offer, Policy, RoundPlan, RoundResult
from specgen.system.arrays import ProbArray

#: A drafted token that is not in the text.
WRONG = -1


@dataclass(frozen=True)
class World:
    """A text, the costs of decodes, and what a draft model would predict.

    After a wrong token, the draft model continues as if it had been right.
    """

    #: The seconds of a batch of the target, by its number of rows.
    target_s: Callable[[int], float]
    #: The seconds of a decode of the draft model.
    draft_s: float
    #: The confidence of the draft model at each position of the text.
    confidences: ProbArray
    #: Whether the draft model is right at each position: 1.0 or 0.0.
    rights: ProbArray
    #: The maximum length of a draft.
    n_max: int = 16

    @property
    def n_tokens(self) -> int:
        return len(self.rights)

    @property
    def plain_s(self) -> float:
        """The seconds without drafts."""
        return self.n_tokens * self.target_s(1)

    def table(self) -> dict[int, float]:
        """The cost table that a measurement of the target would give."""
        return {n: self.target_s(n) for n in range(1, self.n_max + 2)}

    def fixed_s(self, n_draft: int) -> float:
        """The seconds with drafts of a fixed length."""
        seconds = 0.0
        position = 0
        while position < self.n_tokens:
            n = min(n_draft, self.n_tokens - position - 1)
            seconds += n * self.draft_s + self.target_s(n + 1)
            position += self.n_right(position, n) + 1
        return seconds

    def best_fixed(self) -> tuple[int, float]:
        """The best fixed length, which may be 0, and its seconds."""
        seconds = {n: self.fixed_s(n) for n in range(self.n_max + 1)}
        best = min(seconds, key=lambda n: seconds[n])
        return best, seconds[best]

    def n_right(self, position: int, n: int) -> int:
        """How many of n tokens that are drafted at a position are accepted."""
        return min(n, self._n_right_from[position])

    @cached_property
    def _n_right_from(self) -> list[int]:
        """How many tokens in a row are right, from each position on."""
        counts: list[int] = []
        for is_right in reversed(self.rights.tolist()):
            counts.append(counts[-1] + 1 if is_right and counts else int(is_right))
        return counts[::-1]


@dataclass
class Run:
    """The result of a policy in a world."""

    seconds: float = 0.0
    n_rounds: int = 0
    #: The tokens drafted in each round.
    lengths: list[int] = field(default_factory=list)
    #: Draft steps, each of which took a decode of the draft model.
    n_draft_steps: int = 0


def run(
    world: World,
    policy: Policy,
    *,
    prefill_s: float = 0.0,
    slowness: Callable[[], float] = lambda: 1.0,
) -> Run:
    """Let a policy decide about the draft model's drafts for the whole text.

    Args:
        world: The text and the costs.
        policy: The policy.
        prefill_s: The seconds of the draft model's prefill, before its first draft.
        slowness: Returns the factor by which decodes are slowed down now.
    """
    result = Run()
    position = 0
    while position < world.n_tokens:
        n_left = world.n_tokens - position
        price = Price(world.draft_s, world.draft_s, prefill_s)
        plan = policy.plan(Offer(n_left, n_left - 1, drafter="model", price=price))
        proposed = NO_DRAFT
        draft_s = 0.0
        if plan.n_max >= 1:
            proposed = _drafted(world, plan, position)
            n_steps = len(proposed.step_confidences)
            draft_s = prefill_s + n_steps * world.draft_s
            prefill_s = 0.0
            result.n_draft_steps += n_steps
        draft = plan.stop.cut(proposed)
        n_right = world.n_right(position, len(draft))
        n_rows = len(draft) + 1
        draft_s = slowness() * draft_s
        target_s = slowness() * world.target_s(n_rows)
        committed = tuple(range(position, position + n_right + 1))
        accepted = tuple(range(n_right))
        policy.observe(
            RoundResult(plan, draft, accepted, draft_s, target_s, n_rows, committed, (proposed,))
        )
        position += n_right + 1
        result.seconds += draft_s + target_s
        result.n_rounds += 1
        result.lengths.append(len(draft))
    return result


def _drafted(world: World, plan: RoundPlan, start: int) -> Draft:
    """The draft of the draft model, with a decode for each draft step."""
    tokens: list[int] = []
    confidences: list[float] = []
    cumulative_acceptance = 1.0
    while True:
        position = start + len(tokens)
        confidences.append(float(world.confidences[position]))
        step = plan.after_draft_step(len(tokens), cumulative_acceptance, confidences[-1])
        cumulative_acceptance = step.cumulative_acceptance
        if not step.keep_token:
            break
        tokens.append(position if world.rights[position] else WRONG)
        if not step.continue_drafting:
            break
    return Draft.chain(tokens, "model", confidences[: len(tokens)], step_confidences=confidences)


def text(
    n_tokens: int, chance: Callable[[float], float], *, sureness: float = 1.0, seed: int = 0
) -> tuple[ProbArray, ProbArray]:
    """Generate the confidences of a draft model, and whether it is right.

    Args:
        n_tokens: The length of the text.
        chance: The probability of being right, by confidence.
        sureness: The higher, the more confidences are near 0 or 1. With 0, all are the same.
        seed: Chooses the text.
    """
    rng = np.random.default_rng(seed)
    confidences = np.full(n_tokens, 0.75)
    if sureness > 0.0:
        confidences = rng.beta(1.5 / sureness, 0.5 / sureness, n_tokens)
    rights = rng.random(n_tokens) < np.array([chance(float(c)) for c in confidences])
    return confidences, rights.astype(np.float64)


def steps(table: Mapping[int, float]) -> Callable[[int], float]:
    """A step function: each number of rows costs as much as the largest known one below it."""
    sizes = sorted(table)
    return lambda n: table[max(size for size in sizes if size <= n)]
