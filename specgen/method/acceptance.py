"""How often drafted tokens are accepted, by the confidence of their drafter.

A drafter's confidence is sorted into bins. In each bin, the acceptance rate is counted over all
texts, with a prior; how far the present text deviates is one more number, in log-odds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray

#: Upper ends of the bins of confidence; the last bin ends at 1. Bins are finer where most tokens
#: are.
BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
N_BINS = len(BIN_EDGES) + 1
_MIDDLES = [(low + high) / 2 for low, high in itertools.pairwise((0.0, *BIN_EDGES, 1.0))]
#: The prior count of confidences in each bin: a small model of a good family is sure of most
#: tokens.
_PRIOR_SEEN = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.8, 1.2, 1.4, 1.6, 4.0])
#: The prior acceptance of a bin counts as this many judged tokens.
_N_PRIOR = 6.0
#: The factor of an observation's weight with each later one: about 1500 are remembered.
_FADING = 1.0 - 1.0 / 1500.0
#: How fast the deviation of the present text is learnt, in log-odds per observation.
_TEXT_RATE = 0.12
#: The largest deviation of a text, in log-odds.
_MAX_DEVIATION = 2.5
#: The confidences of all texts count as this many draft steps of the present one.
_N_STEPS_OF_OTHERS = 20.0
#: Rates stay at least this far from 0 and from 1.
LEAST_RATE = 0.002
#: Tokens with this many better siblings, or more, are counted together.
N_RANKS = 3
#: Returns the acceptance rates of an origin's tokens with so many better siblings.
Rates: TypeAlias = Callable[[str, int], "AcceptanceRates"]


@dataclass(slots=True)
class AcceptanceCounts:
    """What was counted of one drafter in all texts, by bin of confidence."""

    #: Tokens that were judged, float64[N_BINS].
    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: Those of them that were accepted, float64[N_BINS].
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: Confidences of draft steps, float64[N_BINS].
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: The time that the drafter may lose, in plain decodes; see `policy.CreditGate`.
    credit: float = 0.0


class AcceptanceRates:
    """How likely a drafted token is accepted in one text, if all tokens before it are.

    The probability depends on the drafter's confidence, in [0, 1]. It combines the `counts` of all
    texts with how far this text deviates from them.
    """

    def __init__(self, origin: str = "model", counts: AcceptanceCounts | None = None) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        at_0, slope = _prior_line(origin)
        self._prior = [at_0 + slope * middle for middle in _MIDDLES]
        #: This text's deviation from all texts, in log-odds.
        self._deviation = 0.0
        #: This text's draft steps by bin.
        self._seen_here = [0.0] * N_BINS
        #: The acceptance of each bin; None if it was not asked for since the last judgement.
        self._curve: list[float | None] = [None] * N_BINS

    def acceptance(self, confidence: float) -> float:
        """Return the acceptance probability of a token of this confidence."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        known = self._curve[index]
        if known is not None:
            return known
        # The mean of all texts, with the prior, then this text's deviation.
        n_accepted = _N_PRIOR * self._prior[index] + self.counts.n_accepted.item(index)
        mean = n_accepted / (_N_PRIOR + self.counts.n_judged.item(index))
        odds = mean / (1.0 - mean) * math.exp(self._deviation)
        acceptance = min(1.0 - LEAST_RATE, max(LEAST_RATE, odds / (1.0 + odds)))
        self._curve[index] = acceptance
        return acceptance

    def curve(self) -> list[float]:
        """Return the acceptance probability of each bin."""
        return [self.acceptance(middle) for middle in _MIDDLES]

    def frequencies(self) -> ProbArray:
        """Return how frequent each bin of confidence is in this text: float64[N_BINS], sum 1."""
        seen = self.counts.n_seen + _PRIOR_SEEN
        seen = seen * (_N_STEPS_OF_OTHERS / seen.sum()) + self._seen_here
        return np.asarray(seen / seen.sum(), np.float64)

    def mean(self) -> float:
        """Return the acceptance probability of a token whose confidence is not known yet."""
        return float(np.array(self.curve()) @ self.frequencies())

    def see(self, confidences: Iterable[float]) -> None:
        """Count the confidences of draft steps."""
        # Lists: NumPy takes longer for the few numbers of a round.
        seen = self.counts.n_seen.tolist()
        for confidence in confidences:
            index = bisect.bisect_left(BIN_EDGES, confidence)
            seen = [count * _FADING for count in seen]
            seen[index] += 1.0
            self._seen_here[index] += 1.0
        self.counts.n_seen[:] = seen

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted; all tokens before it were."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        outcome = 1.0 if accepted else 0.0
        surprise = outcome - self.acceptance(confidence)
        deviation = self._deviation + _TEXT_RATE * surprise
        self._deviation = min(_MAX_DEVIATION, max(-_MAX_DEVIATION, deviation))
        # Only this bin fades: a bin that was not seen for long is not less known.
        n_judged = self.counts.n_judged
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted = self.counts.n_accepted
        n_accepted[index] = n_accepted.item(index) * _FADING + outcome
        self._curve = [None] * N_BINS


def _prior_line(origin: str) -> tuple[float, float]:
    """Return the acceptance at confidence 0, and its slope, that are expected of a drafter.

    Models are right more often than they say when they are unsure, and less often when they are
    sure, or when the token has a better sibling (its origin then ends with a rank).
    """
    if origin in ("ngram", "lookup"):
        return 0.0, 0.85
    if ":" in origin:
        return 0.0, 0.8
    return 0.15, 0.78


def judge_drafts(
    rates: Rates,
    drafts: Sequence[Draft],
    text: Sequence[int],
    n_accepted: int,
) -> None:
    """Learn which drafted tokens are those with which the text goes on, verified or not.

    Args:
        rates: The acceptance rates that learn.
        drafts: What was drafted in a round, uncut. Of each drafter, the first draft counts.
        text: The tokens that the round committed.
        n_accepted: The number of accepted tokens. A sampled draft is judged by it, if it is a
            chain: by the confidence before each token was sampled.
    """
    first_drafts = {draft.origins[0]: draft for draft in reversed(drafts) if len(draft)}
    for origin, draft in first_drafts.items():
        if not draft.is_sampled:
            _judge_along_text(rates, draft, origin, text)
        elif draft.is_chain:
            n_judged = min(len(draft), n_accepted + 1)
            for node, confidence in enumerate(draft.step_confidences[:n_judged]):
                rates(origin, 0).judge(confidence, accepted=node < n_accepted)


def _judge_along_text(
    rates: Rates,
    draft: Draft,
    origin: str,
    text: Sequence[int],
) -> None:
    """Judge the children of each node on the path that the text takes through a draft."""
    node = ROOT
    for token in text:
        right_child = None
        for child in draft.children[node]:
            is_right = draft.tokens[child] == token
            if is_right:
                right_child = child
            probability = draft.probabilities[child]
            confidence = 1.0 if probability is None else probability
            rates(origin, draft.ranks[child]).judge(confidence, accepted=is_right)
        if right_child is None:
            return
        node = right_child
