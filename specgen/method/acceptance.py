"""The acceptance rate of a drafter's tokens, estimated from their draft probabilities.

A draft model's probability and an n-gram's match show which tokens are likelier to be accepted, but
not how likely. That depends on the pair of models, the samplers and the text, and is counted here.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specgen.system.arrays import ProbArray

#: Upper ends of the bins of confidence; the last bin ends at 1. Bins are finer where most tokens are.
BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
N_BINS = len(BIN_EDGES) + 1
_MIDDLES = np.array(
    [(low + high) / 2 for low, high in zip((0.0, *BIN_EDGES), (*BIN_EDGES, 1.0), strict=True)]
)
#: The prior count of confidences in each bin: a small model of a good family is sure of most tokens,
#: and not at all sure of some.
_START_SEEN = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.8, 1.2, 1.4, 1.6, 4.0])
#: The prior probability of a bin counts as this many observations.
_N_START = 6.0
#: The counts remember about this many observations; older ones fade.
_MEMORY = 1500.0
_FADING = 1.0 - 1.0 / _MEMORY
#: How fast the present text's deviation from other texts is learnt, in log-odds an observation, and
#: its largest size.
_TEXT_RATE = 0.12
_MAX_DEVIATION = 2.5
#: The frequencies of confidences in all texts count as this many looks in the present text. (In replays
#: of 75 answers, all with the draft model, this raised the speed from 1.08 to 1.12 times that of plain
#: decoding.)
_N_HERE = 20.0
#: A text of `_N_HALF` looks counts half in the worth of texts, one of fewer than `_N_ENOUGH` not at
#: all; about 33 texts are remembered.
_N_HALF = 20.0
_N_ENOUGH = 6
_FADING_TEXTS = 1.0 - 1.0 / 33.0
#: The prior worth of texts counts as this many texts for the mean, and as this many for the variance.
#: Its standard deviation is in proportion to the square root of a round's gain before the cost of a
#: look, within the two bounds.
_N_START_MEAN = 2.0
_N_START_VARIANCE = 4.0
_START_DEVIATION = 1.2
_LEAST_DEVIATION, _MOST_DEVIATION = 0.05, 0.5
#: The most that may be lost on a drafter in all, in plain tokens' time: this much at first, plus a share
#: of the generated tokens, plus what the drafter saved, up to a limit.
_FIRST_ALLOWANCE = 32.0
_ALLOWED_SHARE = 0.02
_MOST_ALLOWANCE = 64.0
#: Origins of tokens that need no model.
NGRAM_ORIGINS = ("ngram", "lookup")
#: Rates are kept at least this far from 0 and from 1.
_LEAST = 0.002


def model_start(confidence: float) -> float:
    """Return the prior acceptance probability of a draft model's token: models are right more often than
    their confidence when they are unsure, and less often when they are sure."""
    return 0.15 + 0.78 * confidence


def ngram_start(confidence: float) -> float:
    """Return the prior acceptance probability of an n-gram's token, whose confidence is already fitted to
    texts."""
    return confidence


def later_start(confidence: float) -> float:
    """Return the prior acceptance probability of a token that its drafter ranks below a sibling."""
    return 0.8 * confidence


#: Siblings that are ranked behind this many others, or more, are counted together.
_N_RANKS = 3


@functools.cache
def origin_of_rank(origin: str, rank: int) -> str:
    """Return the name under which a drafter's tokens with `rank` better siblings are counted: the
    acceptance rate of its second guess has little to do with that of its first one."""
    return origin if rank == 0 else f"{origin}:{min(rank, _N_RANKS) + 1}"


@dataclass(slots=True)
class TextWorths:
    """The worth of a round with a drafter in earlier texts, in plain tokens' time. Some texts suit a
    drafter and others do not, and a few texts of one kind predict little about the next one.

    Both the mean and the variance of the worth are unknown. `start` is the prior mean: the worth that
    was expected in the first text, for example after a sample of the drafter's tokens.
    """

    start: float | None = None
    #: The number of texts, weighted by how much was seen of each; the sum of their worths, and that
    #: of the squares.
    n: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    #: What may still be lost on the drafter before it saves anything. The drafter is not started if
    #: reading the text takes longer than this. So a drafter that never pays costs next to nothing,
    #: whatever is expected of the next text.
    allowance: float = _FIRST_ALLOWANCE

    def account(self, saved: float, n_tokens: int) -> None:
        """Record a round that added `n_tokens` tokens, and what the drafter saved in it; negative if it
        lost time."""
        allowance = self.allowance + saved + _ALLOWED_SHARE * n_tokens
        self.allowance = min(_MOST_ALLOWANCE, allowance)

    def add(self, worth: float, weight: float) -> None:
        """Count another text."""
        self.n = self.n * _FADING_TEXTS + weight
        self.total = self.total * _FADING_TEXTS + weight * worth
        self.squares = self.squares * _FADING_TEXTS + weight * worth * worth

    def of_next(self, look: float) -> tuple[float, float]:
        """Return the mean and the standard deviation of the next text's worth; `look` is the cost of one of
        the drafter's looks, in plain tokens' time."""
        start = self.start or 0.0
        mean = (_N_START_MEAN * start + self.total) / (_N_START_MEAN + self.n)
        # A drafter that is never right gains nothing in any text.
        deviation = _START_DEVIATION * math.sqrt(max(0.0, start + look))
        deviation = min(_MOST_DEVIATION, max(_LEAST_DEVIATION, deviation))
        spread = max(0.0, self.squares - self.total**2 / self.n) if self.n else 0.0
        variance = (_N_START_VARIANCE * deviation**2 + spread) / (_N_START_VARIANCE + self.n)
        return mean, math.sqrt(variance * (1.0 + 1.0 / (_N_START_MEAN + self.n)))


@dataclass(slots=True)
class AcceptanceCounts:
    """The counts of a drafter, float64[N_BINS] each, by bin of confidence: judged tokens, accepted
    ones among these, and confidences that were seen. Also the worths of texts."""

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    worths: TextWorths = field(default_factory=TextWorths)
    #: The worths of texts that were generated beside others, where a plain token is cheaper: by the
    #: number of texts at once, rounded up to a power of two.
    worths_beside: dict[int, TextWorths] = field(default_factory=dict)

    def worths_at(self, n_sequences: int) -> TextWorths:
        """Return the worths of texts of which `n_sequences` were generated at once."""
        if n_sequences <= 1:
            return self.worths
        return self.worths_beside.setdefault(1 << (n_sequences - 1).bit_length(), TextWorths())


class AcceptanceRates:
    """The probabilities, in one text, that a drafted token is accepted if all before it were, by
    its drafter's confidence in [0, 1].

    `counts` cover all texts; texts that are generated at the same time share them. In addition one
    number is learnt, the deviation of this text: some texts suit a draft better than others.
    """

    def __init__(
        self, counts: AcceptanceCounts | None = None, start: Callable[[float], float] = model_start
    ) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        self._start_of = start
        self._start = [start(float(middle)) for middle in _MIDDLES]
        self._deviation = 0.0
        #: The number of confidences that were counted in this text, in all and by bin.
        self.n_looks = 0
        self._seen_here = np.zeros(N_BINS)
        #: What a round is worth in this text, in plain tokens' time, if that is known; and the worths of
        #: other texts, with as many texts at once.
        self._worth: float | None = None
        self.worths = self.counts.worths
        #: Counts the looks and judgements: each may change the probabilities, or how often each comes.
        self.version = 0
        #: The acceptance probabilities by bin, until the next judgement; None if they are not computed yet.
        self._curve: tuple[float, ...] | None = None

    def for_new_text(self) -> AcceptanceRates:
        """Return the statistics for another text, which has its own deviation and shares the counts."""
        return AcceptanceRates(self.counts, self._start_of)

    def expect(self, worth: float, n_sequences: int = 1) -> None:
        """Note what a round seems to be worth in this text, in plain tokens' time, with `n_sequences`
        texts at once."""
        self._worth, self.worths = worth, self.counts.worths_at(n_sequences)
        if self.worths.start is None:
            self.worths.start = worth

    def end_text(self) -> None:
        """Count this text's worth once, if enough was seen of the text."""
        if self._worth is not None and self.n_looks >= _N_ENOUGH:
            self.worths.add(self._worth, self.n_looks / (self.n_looks + _N_HALF))
        self._worth = None

    def chance(self, confidence: float) -> float:
        """Return the acceptance probability of a token with this confidence."""
        return self.curve()[_bin(confidence)]

    def curve(self) -> tuple[float, ...]:
        """Return the acceptance probabilities by bin of confidence, N_BINS of them."""
        if self._curve is None:
            self._curve = tuple(self._of_bin(index) for index in range(N_BINS))
        return self._curve

    def frequencies(self) -> ProbArray:
        """Return the frequency of each bin of confidence in this text, summing to 1: float64[N_BINS]."""
        seen = self.counts.n_seen + _START_SEEN
        seen = seen * (_N_HERE / seen.sum()) + self._seen_here
        frequencies: ProbArray = seen / seen.sum()
        return frequencies

    def mean(self) -> float:
        """Return the acceptance probability of a token whose confidence is not known yet."""
        return float(np.array(self.curve()) @ self.frequencies())

    @property
    def n_judged(self) -> float:
        """The number of judged tokens that the counts rest on."""
        return float(self.counts.n_judged.sum())

    def see(self, confidence: float) -> None:
        """Count a confidence, whether or not a token is drafted with it."""
        n_seen, index = self.counts.n_seen, _bin(confidence)
        n_seen *= _FADING
        n_seen[index] = n_seen.item(index) + 1.0
        self._seen_here[index] = self._seen_here.item(index) + 1.0
        self.n_looks += 1
        self.version += 1

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted; all tokens before it were."""
        index = _bin(confidence)
        n_judged, n_accepted = self.counts.n_judged, self.counts.n_accepted
        expected = self.curve()[index]
        deviation = self._deviation + _TEXT_RATE * (accepted - expected)
        self._deviation = min(_MAX_DEVIATION, max(-_MAX_DEVIATION, deviation))
        # Only this bin fades: a bin that was not seen for long is not less known.
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted[index] = n_accepted.item(index) * _FADING + accepted
        self.version += 1
        self._curve = None

    def _of_bin(self, index: int) -> float:
        """Return the probability of a bin in this text: that in all texts, shifted by the text's deviation."""
        counts = self.counts
        n_accepted = _N_START * self._start[index] + counts.n_accepted.item(index)
        return _shifted(n_accepted / (_N_START + counts.n_judged.item(index)), self._deviation)


def new_acceptance_rates(origin: str, counts: AcceptanceCounts | None = None) -> AcceptanceRates:
    """Return the acceptance statistics of a drafter's tokens, with the prior for their origin."""
    if ":" in origin:
        return AcceptanceRates(counts, later_start)
    return AcceptanceRates(counts, ngram_start if origin in NGRAM_ORIGINS else model_start)


def _bin(confidence: float) -> int:
    return bisect.bisect_left(BIN_EDGES, confidence)


def _shifted(chance: float, log_odds: float) -> float:
    """Return a probability shifted by `log_odds`."""
    chance = min(1.0 - _LEAST, max(_LEAST, chance))
    odds = chance / (1.0 - chance) * math.exp(log_odds)
    return odds / (1.0 + odds)
