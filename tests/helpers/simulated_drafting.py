"""Made-up worlds in which drafting has known costs and known chances, for tests of policies.

No clock and no model: what a decode takes is looked up in a table, and whether a drafted token is
accepted was drawn before anything is drafted, so that all policies face the same text.
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

#: A token that is never right.
WRONG = -1


@dataclass(frozen=True)
class World:
    """A text of `n_tokens` tokens, and what it costs to come by them: `target_s` are the seconds of
    a target's batch by its rows, `draft_s` those of a model's decode. At each place of the text the
    model's confidence and whether it is right are known beforehand. Where it was wrong it goes on
    as if it had been right.
    """

    target_s: Callable[[int], float]
    draft_s: float
    confidences: ProbArray
    rights: ProbArray
    n_max: int = 16

    @property
    def n_tokens(self) -> int:
        return len(self.rights)

    @property
    def plain_s(self) -> float:
        """Seconds without drafts."""
        return self.n_tokens * self.target_s(1)

    def table(self) -> dict[int, float]:
        """What a measurement of the target says."""
        return {n: self.target_s(n) for n in range(1, self.n_max + 2)}

    def fixed_s(self, n_draft: int) -> float:
        """Seconds with drafts of a fixed length."""
        seconds = 0.0
        place = 0
        while place < self.n_tokens:
            n = min(n_draft, self.n_tokens - place - 1)
            seconds += n * self.draft_s + self.target_s(n + 1)
            place += self.n_right(place, n) + 1
        return seconds

    def best_fixed(self) -> tuple[int, float]:
        """The best of all fixed lengths, none among them, and its seconds."""
        seconds = {n: self.fixed_s(n) for n in range(self.n_max + 1)}
        best = min(seconds, key=lambda n: seconds[n])
        return best, seconds[best]

    def n_right(self, place: int, n: int) -> int:
        """How many of n drafted tokens after the first `place` of the text are accepted."""
        return min(n, self._n_right_from[place])

    @cached_property
    def _n_right_from(self) -> list[int]:
        """How many tokens in a row are right, from each place of the text on."""
        counts: list[int] = []
        for is_right in reversed(self.rights.tolist()):
            counts.append(counts[-1] + 1 if is_right and counts else int(is_right))
        return counts[::-1]


@dataclass
class Run:
    """What became of a policy in a world."""

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
    """Let a policy decide about a model's drafts through the whole text.

    `prefill_s` is what the model has to read first, once. Drafting and verifying take `slowness()`
    times as long.
    """
    found = Run()
    place = 0
    while place < world.n_tokens:
        n_left = world.n_tokens - place
        price = Price(world.draft_s, world.draft_s, prefill_s)
        plan = policy.plan(Offer(n_left, n_left - 1, drafter="model", price=price))
        proposed = NO_DRAFT
        draft_s = 0.0
        if plan.n_max >= 1:
            proposed = _drafted(world, plan, place)
            n_steps = len(proposed.step_confidences)
            draft_s = prefill_s + n_steps * world.draft_s
            prefill_s = 0.0
            found.n_draft_steps += n_steps
        draft = plan.stop.cut(proposed)
        n_right = world.n_right(place, len(draft))
        n_rows = len(draft) + 1
        draft_s = slowness() * draft_s
        target_s = slowness() * world.target_s(n_rows)
        committed = tuple(range(place, place + n_right + 1))
        accepted = tuple(range(n_right))
        policy.observe(
            RoundResult(plan, draft, accepted, draft_s, target_s, n_rows, committed, (proposed,))
        )
        place += n_right + 1
        found.seconds += draft_s + target_s
        found.n_rounds += 1
        found.lengths.append(len(draft))
    return found


def _drafted(world: World, plan: RoundPlan, place: int) -> Draft:
    """What a model drafts; each of its draft steps took a decode."""
    tokens: list[int] = []
    confidences: list[float] = []
    cumulative_acceptance = 1.0
    while True:
        position = place + len(tokens)
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
    """Confidences, each right with its chance. The higher `sureness`, the more are near 0 or 1; at
    0 all are alike.
    """
    rng = np.random.default_rng(seed)
    confidences = np.full(n_tokens, 0.75)
    if sureness > 0.0:
        confidences = rng.beta(1.5 / sureness, 0.5 / sureness, n_tokens)
    rights = rng.random(n_tokens) < np.array([chance(float(c)) for c in confidences])
    return confidences, rights.astype(np.float64)


def steps(table: Mapping[int, float]) -> Callable[[int], float]:
    """A jagged curve: each number of rows costs what the largest one not above it does."""
    sizes = sorted(table)
    return lambda n: table[max(size for size in sizes if size <= n)]
