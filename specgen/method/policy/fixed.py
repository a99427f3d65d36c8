"""Policies that know no costs: a fixed draft length, and a bound on a draft's probability that adapts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.policy.plan import Offer, RoundPlan, RoundResult, Stop
from specgen.method.policy.reasons import Reason
from specgen.options import DraftOptions

#: The share of drafted tokens that may be rejected: the bound falls while fewer are, and rises while
#: more are.
_REJECTED = 0.25
#: How far the bound moves in a round, in log-probability for each unit of difference to that share.
_RATE = 0.4
_START, _LEAST, _MOST = 0.3, 0.01, 0.9


@dataclass(frozen=True, slots=True)
class UntilUnsure:
    """A draft goes on while its model gives a token at least `p_min` (llama.cpp's rule). Drafts of fewer
    than `n_min` tokens are not verified."""

    p_min: float
    n_min: int = 0

    @property
    def needs_confidence(self) -> bool:
        return self.p_min > 0.0

    def keeps(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self.p_min

    def looks(self, confidences: Sequence[float]) -> bool:
        return True

    def cut(self, draft: Draft) -> Draft:
        return draft if draft.is_drawn or len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True)
class UntilUnlikely:
    """A draft goes on while the product of its tokens' probabilities is at least `bound`, and each of them
    at least `p_min`."""

    bound: float
    p_min: float
    n_min: int = 0
    needs_confidence: bool = True

    def keeps(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self.p_min and math.prod(confidences) >= self.bound

    def looks(self, confidences: Sequence[float]) -> bool:
        return True

    def cut(self, draft: Draft) -> Draft:
        if draft.is_drawn:  # a drawn token is not dropped because of what it is
            return draft
        if draft.is_chain:
            chance, n_kept = 1.0, 0
            for probability in draft.probabilities:
                chance *= 1.0 if probability is None else probability
                if chance < self.bound:
                    break
                n_kept += 1
            draft = draft.first(n_kept)
        return draft if len(draft) >= self.n_min else NO_DRAFT


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure (llama.cpp's rule).

    Among several drafters, the first one that has a draft is used.
    """

    def __init__(self, options: DraftOptions) -> None:
        self.n_max = options.n_max
        self._stop: Stop = UntilUnsure(options.stops_below, options.min_tokens)

    def plan(self, offer: Offer) -> RoundPlan:
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1:
            return RoundPlan(Reason("no room"))
        found = self._stop.cut(
            offer.found.first(n_max) if len(offer.found) > n_max else offer.found
        )
        if len(found):
            return RoundPlan(Reason("fixed"), found=found, stop=self._stop)
        if offer.drafter is None:
            return RoundPlan(Reason("nothing found"))
        return RoundPlan(Reason("fixed"), n_max, stop=self._stop, drafter=offer.drafter)

    def observe(self, result: RoundResult) -> None:
        pass

    def finish(self) -> None:
        pass


class ThresholdPolicy(FixedPolicy):
    """Drafts while the product of the tokens' probabilities stays above a bound, which adapts.

    The product is the model's own estimate of the probability that the whole draft is accepted. A
    bound on the product lets a confident draft become long and stops an uncertain one early; a
    bound on each token's own probability would let many fairly sure tokens follow each other. After
    each round the bound moves so that, in the long run, a fixed share of the drafted tokens is
    rejected. This suits machines on which one more row costs little. (A confidence bound that
    follows the accepted share: Mamou et al., arXiv:2405.04304, and the dynamic thresholds of
    Hugging Face's assisted generation.) The policy does not know any costs.
    """

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._options = options
        self._set_bound(math.log(_START))

    @property
    def bound(self) -> float:
        """The present bound on a draft's probability."""
        return math.exp(self._log_bound)

    def observe(self, result: RoundResult) -> None:
        n_drafted = len(result.draft)
        # If nothing was sure enough, the bound falls slowly, since nothing is learnt without drafts.
        difference = -0.1 * _REJECTED
        if n_drafted:
            difference = 1.0 - len(result.path) / n_drafted - _REJECTED
        self._set_bound(self._log_bound + _RATE * difference)

    def _set_bound(self, log_bound: float) -> None:
        self._log_bound = min(math.log(_MOST), max(math.log(_LEAST), log_bound))
        options = self._options
        self._stop = UntilUnlikely(self.bound, options.stops_below, options.min_tokens)
