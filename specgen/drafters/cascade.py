"""Several drafters in a row."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.draft import NO_DRAFT, Draft
from specgen.drafters.base import Drafter
from specgen.policy import Policy, RoundReport


class CascadeDrafter:
    """Drafts with the first of several drafters that has anything to propose: the cheap ones
    first, which mostly have nothing, and at the end one that nearly always has."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._proposer: Drafter | None = None

    @property
    def name(self) -> str:
        return "+".join(drafter.name for drafter in self._drafters)

    @property
    def model_s(self) -> float:
        return sum(drafter.model_s for drafter in self._drafters)

    def propose(self, context: Sequence[int], n_max: int, policy: Policy) -> Draft:
        for drafter in self._drafters:
            draft = drafter.propose(context, n_max, policy)
            if len(draft):
                self._proposer = drafter
                return draft
        self._proposer = None
        return NO_DRAFT

    def observe(self, report: RoundReport) -> None:
        if self._proposer is not None:
            self._proposer.observe(report)

    def rewind(self, n_tokens: int) -> None:
        for drafter in self._drafters:
            drafter.rewind(n_tokens)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
