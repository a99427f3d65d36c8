"""How often drafted tokens are accepted, by the confidence of their drafter."""

from __future__ import annotations

import bisect
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
_MIDDLES = [(low + high) / 2 for low, high in zip((0, *BIN_EDGES), (*BIN_EDGES, 1), strict=True)]
#: The prior count of confidences in each bin: a small model of a good family is sure of most
#: tokens.
_PRIOR_SEEN = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.8, 1.2, 1.4, 1.6, 4.0])
_N_PRIOR = 6.0  # the prior acceptance of a bin counts as so many judged tokens
_FADING = 1.0 - 1.0 / 1500.0  # of an observation's weight with each later one: 1500 are remembered
_TEXT_RATE = 0.12  # how fast the present text's deviation is learnt, in log-odds an observation
_MOST_OF_TEXT = 2.5  # the largest such deviation
_N_HERE = 20.0  # the confidences of all texts count as so many looks in the present one
LEAST_RATE = 0.002  # rates keep at least this far from 0 and from 1
N_RANKS = 3  # siblings behind this many others, or more, are counted together
#: The acceptance rates of an origin's tokens with so many better siblings.
Rates: TypeAlias = Callable[[str, int], "AcceptanceRates"]


@dataclass(slots=True)
class AcceptanceCounts:
    """A drafter's counts in all texts, float64[N_BINS] each, by bin of confidence: judged tokens,
    accepted ones among these, and confidences that were seen; and its credit (see `policy.py`).
    """

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    credit: float = 0.0


class AcceptanceRates:
    """The probabilities, in one text, that a drafted token is accepted if all before it were, by
    its drafter's confidence in [0, 1]: those of all texts, in `counts`, and how far this text
    deviates from them, one number.
    """

    def __init__(self, origin: str = "model", counts: AcceptanceCounts | None = None) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        # Models are right more often than they say when unsure, less often when sure, or behind a
        # better sibling.
        at_0, slope = (0.0, 0.8) if ":" in origin else (0.15, 0.78)
        at_0, slope = (0.0, 0.85) if origin in ("ngram", "lookup") else (at_0, slope)
        self._prior = [at_0 + slope * middle for middle in _MIDDLES]
        self._deviation = 0.0
        self._seen_here = [0.0] * N_BINS
        self._curve: list[float | None] = [None] * N_BINS  # None: not asked for since a judgement

    def acceptance(self, confidence: float) -> float:
        """Return the acceptance probability of a confidence's bin: that of all texts and this one's
        deviation.
        """
        index = bisect.bisect_left(BIN_EDGES, confidence)
        if (known := self._curve[index]) is not None:
            return known
        n_accepted = _N_PRIOR * self._prior[index] + self.counts.n_accepted.item(index)
        mean = n_accepted / (_N_PRIOR + self.counts.n_judged.item(index))
        odds = mean / (1.0 - mean) * math.exp(self._deviation)
        acceptance = self._curve[index] = min(
            1.0 - LEAST_RATE, max(LEAST_RATE, odds / (1.0 + odds))
        )
        return acceptance

    def curve(self) -> list[float]:
        return [self.acceptance(middle) for middle in _MIDDLES]

    def frequencies(self) -> ProbArray:
        """Return how frequent each bin of confidence is in this text: float64[N_BINS], summing to
        1.
        """
        seen = self.counts.n_seen + _PRIOR_SEEN
        seen = seen * (_N_HERE / seen.sum()) + self._seen_here
        return np.asarray(seen / seen.sum(), np.float64)

    def mean(self) -> float:
        """Return the acceptance probability of a token whose confidence is not known yet."""
        return float(np.array(self.curve()) @ self.frequencies())

    def see(self, confidences: Iterable[float]) -> None:
        # Lists: the few numbers of a round take NumPy longer.
        seen, here = self.counts.n_seen.tolist(), self._seen_here
        for confidence in confidences:
            index = bisect.bisect_left(BIN_EDGES, confidence)
            seen = [each * _FADING for each in seen]
            seen[index] += 1.0
            here[index] += 1.0
        self.counts.n_seen[:] = seen

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted; all tokens before it were."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        n_judged, n_accepted = self.counts.n_judged, self.counts.n_accepted
        deviation = self._deviation + _TEXT_RATE * (accepted - self.acceptance(confidence))
        self._deviation = min(_MOST_OF_TEXT, max(-_MOST_OF_TEXT, deviation))
        # Only this bin fades: a bin that was not seen for long is not less known.
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted[index] = n_accepted.item(index) * _FADING + accepted
        self._curve = [None] * N_BINS


def judge_drafts(rates: Rates, drafts: Sequence[Draft], text: Sequence[int], n_right: int) -> None:
    """Learn which tokens of each drafter's first draft are those with which the text goes on,
    verified or not. Drawn tokens are judged in a chain, of which `n_right` were accepted, by the
    confidence before the draw.
    """
    for origin, draft in {each.origins[0]: each for each in reversed(drafts) if each}.items():
        if draft.is_sampled:
            if draft.is_chain:
                for node, confidence in enumerate(draft.looks[: min(len(draft), n_right + 1)]):
                    rates(origin, 0).judge(confidence, accepted=node < n_right)
            continue
        node = ROOT
        for token in text:
            right = None
            for child in draft.children[node]:
                is_right, known = draft.tokens[child] == token, draft.probabilities[child]
                right = child if is_right else right
                of_rank = rates(origin, draft.ranks[child])
                of_rank.judge(1.0 if known is None else known, accepted=is_right)
            if right is None:
                break
            node = right
