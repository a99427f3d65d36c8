"""A policy that forwards to another one."""

from __future__ import annotations

import math
from collections.abc import Callable

from specgen.calibration.cost_table import ALONE, Others, Price
from specgen.core.draft import NO_DRAFT, Draft
from specgen.core.growing_tree import GrowingTree
from specgen.policy.base import Policy, RoundReport, TreePolicy


class WrappedPolicy:
    """Forwards every call to another policy; subclasses override what differs."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner

    @property
    def needs_confidence(self) -> bool:
        return self._inner.needs_confidence

    def room(self, n_left: int, others: Others = ALONE) -> int:
        return self._inner.room(n_left, others)

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        return self._inner.prospect(origin, price, after)

    def worth(self, draft: Draft) -> float:
        return self._inner.worth(draft)

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        return self._inner.wants_more(n_drafted, confidence, origin)

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        return self._inner.goes_on(n_drafted, origin)

    def frontier(
        self, tree: GrowingTree, n_deepest: int, n_most: int, seconds: Callable[[int], float]
    ) -> list[int]:
        return self._of_trees().frontier(tree, n_deepest, n_most, seconds)

    def pick(self, tree: GrowingTree, draft: Draft) -> Draft:
        return self._of_trees().pick(tree, draft)

    def trim(self, draft: Draft) -> Draft:
        return self._inner.trim(draft)

    def observe(self, report: RoundReport) -> None:
        self._inner.observe(report)

    def finish(self) -> None:
        self._inner.finish()

    def _of_trees(self) -> TreePolicy:
        assert isinstance(self._inner, TreePolicy), "only such a one is asked about trees"
        return self._inner


class Decided(WrappedPolicy):
    """The policy that a drafter gives to another drafter: whether that one starts is already decided.

    The first `n_own` tokens that the other drafter proposes are no choice, and do not count as a
    part of the draft. `n_after` tokens stand in the draft before its first token.
    """

    def __init__(self, inner: Policy, *, n_own: int = 0, n_after: int = 0) -> None:
        super().__init__(inner)
        self._n_own = n_own
        self._n_after = n_after

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        return math.inf

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        if n_drafted < self._n_own:
            return True
        return self._inner.wants_more(n_drafted - self._n_own + self._n_after, confidence, origin)

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        if n_drafted < self._n_own:
            return True
        return self._inner.goes_on(n_drafted - self._n_own + self._n_after, origin)

    def frontier(
        self, tree: GrowingTree, n_deepest: int, n_most: int, seconds: Callable[[int], float]
    ) -> list[int]:
        tree.n_before = self._n_after
        return super().frontier(tree, n_deepest, n_most, seconds)
