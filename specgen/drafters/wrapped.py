"""A drafter that forwards to another one."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.calibration.cost_table import Price
from specgen.core.draft import Draft
from specgen.drafters.base import Drafter, Drafting, draft_alone, drafting_of
from specgen.policy import Policy, RoundReport


class WrappedDrafter:
    """Forwards every call to another drafter; subclasses override what differs."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def model_s(self) -> float:
        return self._inner.model_s

    def price(self, n_context: int) -> Price:
        return self._inner.price(n_context)

    def propose(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Draft:
        return draft_alone(self.drafting(context, n_max, policy, n_drafted))

    def drafting(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Drafting:
        return (yield from drafting_of(self._inner, context, n_max, policy, n_drafted))

    def observe(self, report: RoundReport) -> None:
        self._inner.observe(report)

    def rewind(self, n_tokens: int) -> None:
        self._inner.rewind(n_tokens)
