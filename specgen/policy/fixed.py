"""A fixed draft length."""

from __future__ import annotations

import math

from specgen.calibration.cost_table import ALONE, Others, Price
from specgen.core.draft import NO_DRAFT, Draft
from specgen.options import DraftOptions
from specgen.policy.base import RoundReport


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure (llama.cpp's rule).

    Among several drafters, the first one that has a draft is used.
    """

    def __init__(self, options: DraftOptions) -> None:
        self._n_max = options.n_max
        self._n_min = options.min_tokens
        self._p_min = options.stops_below

    @property
    def needs_confidence(self) -> bool:
        return self._p_min > 0.0

    def room(self, n_left: int, others: Others = ALONE) -> int:
        return self._n_max

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        return 0.0 if len(after) else 1.0

    def worth(self, draft: Draft) -> float:
        return math.inf if len(draft) else 0.0

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        return n_drafted < self._n_max and confidence >= self._p_min

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        return n_drafted < self._n_max

    def trim(self, draft: Draft) -> Draft:
        return draft if draft.is_drawn or len(draft) >= self._n_min else NO_DRAFT

    def observe(self, report: RoundReport) -> None:
        pass

    def finish(self) -> None:
        pass
