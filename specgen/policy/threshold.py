"""The threshold policy: draft until the whole draft is too unlikely."""

from __future__ import annotations

import math

from specgen.calibration.cost_table import ALONE, Others, Price
from specgen.core.draft import NO_DRAFT, Draft
from specgen.options import DraftOptions
from specgen.policy.base import RoundReport

#: The share of drafted tokens that may be rejected: the bound falls while fewer are, and rises while
#: more are.
_REFUSED = 0.25
#: How far the bound moves in a round, in log-probability for each unit of difference to that share.
_RATE = 0.4
_START, _LEAST, _MOST = 0.3, 0.01, 0.9


class ThresholdPolicy:
    """Drafts while the product of the tokens' probabilities stays above a bound, which adapts.

    The product is the chance that the whole draft is accepted, in its model's opinion. A bound on
    the product lets a sure draft grow long and stops an unsure one early; a bound on each token's
    own probability would let many fairly sure tokens follow each other. After each round the bound
    moves so that, in the long run, a fixed share of the drafted tokens is rejected. This drafts
    as much as pays where one more row costs little. (A confidence bound that follows the accepted
    share: Mamou et al., arXiv:2405.04304, and the dynamic thresholds of Hugging Face's assisted
    generation.) The policy does not know any costs.
    """

    def __init__(self, options: DraftOptions) -> None:
        self._n_max = options.n_max
        self._n_min = options.min_tokens
        self._p_min = options.stops_below
        self._log_bound = math.log(_START)
        #: The log-probability of the draft in progress, up to and including each token.
        self._log_chances: list[float] = []

    @property
    def bound(self) -> float:
        """The present bound on a draft's probability."""
        return math.exp(self._log_bound)

    @property
    def needs_confidence(self) -> bool:
        return True

    def room(self, n_left: int, others: Others = ALONE) -> int:
        self._log_chances.clear()
        return self._n_max

    def prospect(self, origin: str, price: Price, after: Draft = NO_DRAFT) -> float:
        return 0.0 if len(after) else 1.0

    def worth(self, draft: Draft) -> float:
        return math.inf if len(draft) else 0.0

    def wants_more(self, n_drafted: int, confidence: float, origin: str = "model") -> bool:
        if n_drafted >= self._n_max or confidence < self._p_min:
            return False
        before = self._log_chances[n_drafted - 1] if n_drafted else 0.0
        log_chance = before + math.log(max(confidence, 1e-12))
        self._log_chances[n_drafted:] = [log_chance]
        return log_chance >= self._log_bound

    def goes_on(self, n_drafted: int, origin: str = "model") -> bool:
        return n_drafted < self._n_max

    def trim(self, draft: Draft) -> Draft:
        if draft.is_drawn:  # a drawn token is not dropped because of what it is
            return draft
        log_chance, n_kept = 0.0, 0
        for confidence in draft.probabilities:
            log_chance += math.log(max(1.0 if confidence is None else confidence, 1e-12))
            if log_chance < self._log_bound:
                break
            n_kept += 1
        kept = draft.first(n_kept) if draft.is_chain else draft
        return kept if len(kept) >= self._n_min else NO_DRAFT

    def observe(self, report: RoundReport) -> None:
        if not len(report.draft):
            # Nothing was sure enough. The bound falls slowly, since nothing is learnt without drafts.
            self._move(-0.1 * _REFUSED)
            return
        refused = 1.0 - len(report.path) / len(report.draft)
        self._move(refused - _REFUSED)

    def finish(self) -> None:
        pass

    def _move(self, difference: float) -> None:
        moved = self._log_bound + _RATE * difference
        self._log_bound = min(math.log(_MOST), max(math.log(_LEAST), moved))
