"""The ways to draft that are checked: that of the options, and one that drafts in every round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from specgen.calibration.acceptance import NGRAM_ORIGINS
from specgen.calibration.cost_table import ALONE, Others, Price
from specgen.core.draft import NO_DRAFT, Draft
from specgen.drafters import CombinedDrafter
from specgen.engine.generation import Generation
from specgen.options import DraftOptions, PolicyName
from specgen.policy import Policy, WrappedPolicy

WayName: TypeAlias = Literal[PolicyName, "forced"]


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """A way to draft. With `is_forced`, n-grams and the model draft in turn, and one continues the draft
    of the other, regardless of costs."""

    drafting: DraftOptions
    is_forced: bool = False

    @property
    def name(self) -> WayName:
        """The name of the policy that decides, or "forced"."""
        return "forced" if self.is_forced else self.drafting.policy_in_use

    def prepare(self, generation: Generation) -> None:
        """Let a generation draft this way."""
        if self.is_forced and isinstance(generation.drafter, CombinedDrafter):
            generation.policy = ByTurns(generation.policy)


def ways_to_draft(drafting: DraftOptions) -> list[DraftingPlan]:
    """Return how `specgen run` drafts with these options. If costs could decide that nothing is drafted,
    add a plan that always drafts, however unsure the draft is."""
    ways = [DraftingPlan(drafting)]
    if drafting.is_by_cost:
        shortest, longest = drafting.ngrams_of
        forced = replace(
            drafting,
            policy="fixed",
            p_min=0.0,
            ngrams=drafting.adds_ngrams,
            ngram_min=shortest,
            ngram_max=longest,
        )
        ways.append(DraftingPlan(forced, is_forced=True))
    return ways


class ByTurns(WrappedPolicy):
    """Lets a model and n-grams begin the draft in turn. In half of the rounds the other one continues
    after one or two tokens.

    Whose turn it is depends only on the number of the round, so the text is not biased.
    """

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self._n_rounds = 0

    @property
    def _model_begins(self) -> bool:
        return self._n_rounds % 2 == 0

    @property
    def _other_goes_on(self) -> bool:
        return self._n_rounds % 4 < 2

    @property
    def _n_first(self) -> int:
        """The number of tokens by the first drafter, if the other one continues."""
        return 1 + self._n_rounds // 4 % 2

    def room(self, n_left: int, others: Others = ALONE) -> int:
        self._n_rounds += 1
        return super().room(n_left, others)

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        if len(after):
            return 1.0 if self._other_goes_on else 0.0
        # Otherwise the model begins only if n-grams find nothing.
        return math.inf if self._model_begins else 0.5

    def worth(self, draft: Draft) -> float:
        return 1.0 if len(draft) else 0.0

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        if self._model_begins and self._other_goes_on and n_drafted >= self._n_first:
            return False
        return super().wants_more(n_drafted, confidence, origin)

    def trim(self, draft: Draft) -> Draft:
        kept = super().trim(draft)
        begins = not self._model_begins and set(kept.origins) <= set(NGRAM_ORIGINS)
        return kept.first(self._n_first) if begins and self._other_goes_on else kept
