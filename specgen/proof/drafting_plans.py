"""The ways to draft that are checked: the default one, and one that drafts in every round."""

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
    """Options to draft by. With `is_forced`, n-grams and the model draft by turns, and one behind
    the other, whatever costs say."""

    drafting: DraftOptions
    is_forced: bool = False

    @property
    def name(self) -> WayName:
        """The policy of the way that runs, or "forced"."""
        return "forced" if self.is_forced else self.drafting.policy_in_use

    def prepare(self, generation: Generation) -> None:
        """Let a generation draft this way."""
        if self.is_forced and isinstance(generation.drafter, CombinedDrafter):
            generation.policy = ByTurns(generation.policy)


def ways_to_draft(drafting: DraftOptions) -> list[DraftingPlan]:
    """The way that `specgen run` drafts with these options and, where costs may decide that nothing
    is drafted, one in which something is."""
    ways = [DraftingPlan(drafting)]
    if drafting.is_by_cost:
        shortest, longest = drafting.ngrams_of
        forced = replace(
            drafting,
            policy="fixed",
            ngrams=drafting.adds_ngrams,
            ngram_min=shortest,
            ngram_max=longest,
        )
        ways.append(DraftingPlan(forced, is_forced=True))
    return ways


class ByTurns(WrappedPolicy):
    """Lets a model and n-grams begin in turn, and the other one go on behind one token or two.

    Whose turn it is depends on the number of the round alone, so it biases nothing.
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
        """How many tokens the one drafts that begins, where the other goes on."""
        return 1 + self._n_rounds // 4 % 2

    def room(self, n_left: int, others: Others = ALONE) -> int:
        self._n_rounds += 1
        return super().room(n_left, others)

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        if len(after):
            return 1.0 if self._other_goes_on else 0.0
        # Else the model begins where n-grams find nothing.
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
