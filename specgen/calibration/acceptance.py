"""The acceptance rate of a drafter's tokens, estimated from their draft probabilities.

A draft model's probability and an n-gram's match say which tokens are likelier to be accepted,
not how likely: that depends on the pair, on the samplers and on the text. It is counted here.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specgen.arrays import ProbArray

#: Upper ends of the bins of confidence, the last one excepted, which ends at 1: finer where
#: most tokens are.
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
N_BINS = len(_EDGES) + 1
_MIDDLES = np.array(
    [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
)
#: How often each bin is thought to have been seen before anything was: a small model of a good
#: family is sure of most tokens, and of some not at all.
_START_SEEN = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.8, 1.2, 1.4, 1.6, 4.0])
#: So many observations a bin's start is worth.
_N_START = 6.0
#: Of so many observations the counts keep the memory; older ones fade.
_MEMORY = 1500.0
_FADING = 1.0 - 1.0 / _MEMORY
#: How fast the present text's deviation from the others' is learnt, in log-odds an observation,
#: and how large it may become.
_TEXT_RATE = 0.12
_MAX_DEVIATION = 2.5
#: What all texts say of how often each confidence comes counts as much as so many looks in the
#: present one. (In replays of 75 answers, plain decoding's time over that with a draft model went
#: from 1.08 to 1.12 with it, the model being asked in all of them.)
_N_HERE = 20.0
#: A text of so many looks counts half in what texts are worth, one of less than that not at all; and
#: of so many texts the memory is kept.
_N_HALF = 20.0
_N_ENOUGH = 6
_FADING_TEXTS = 1.0 - 1.0 / 33.0
#: What is thought of texts before any counts as much as so many of them do for the mean, and for the
#: variance; and how far apart they are thought to be: in proportion to the square root of what a
#: round gains before any, but no farther than that.
_N_START_MEAN = 2.0
_N_START_VARIANCE = 4.0
_START_DEVIATION = 1.2
_LEAST_DEVIATION, _MOST_DEVIATION = 0.05, 0.5
#: What may be lost on a drafter in all, in plain tokens' time: so much at first, a share of what is
#: generated, and what it saved, up to a limit.
_FIRST_ALLOWANCE = 32.0
_ALLOWED_SHARE = 0.02
_MOST_ALLOWANCE = 64.0
#: Origins whose tokens come without a model.
NGRAM_ORIGINS = ("ngram", "lookup")
#: No chance is held to be more extreme than this.
_LEAST = 0.002


def model_start(confidence: float) -> float:
    """The chance assumed of a draft model's token before anything was seen: models are less
    often wrong when unsure, and more often when sure, than they say."""
    return 0.15 + 0.78 * confidence


def ngram_start(confidence: float) -> float:
    """The same of an n-gram's token, whose confidence is fitted to texts already."""
    return confidence


def later_start(confidence: float) -> float:
    """The same of a token that its drafter takes for less likely than a sibling."""
    return 0.8 * confidence


#: Siblings behind this many others are counted together.
_N_RANKS = 3


@functools.cache
def origin_of_rank(origin: str, rank: int) -> str:
    """The name under which a drafter's tokens are counted that come after `rank` siblings: what
    its second guess is worth has little to do with what its first one is."""
    return origin if rank == 0 else f"{origin}:{min(rank, _N_RANKS) + 1}"


@dataclass(slots=True)
class Worths:
    """What a round with a drafter was worth in earlier texts, in plain tokens' time: some texts suit
    it and others do not, and a few of one kind say little about the next one.

    The mean and the variance of what texts are worth are both unknown; `start` is what was thought
    before any, by what the drafter's tokens were like in a sample.
    """

    start: float | None = None
    #: How many texts were counted, weighted by how much was seen of each; the sum of their worths,
    #: and of the squares.
    n: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    #: What may be lost on the drafter from here on, before it saves anything: it is not begun with
    #: where what it has to read first takes longer. So one that never pays costs next to nothing,
    #: whatever is expected of the next text.
    allowance: float = _FIRST_ALLOWANCE

    def account(self, saved: float, n_tokens: int) -> None:
        """Enter a round that added so many tokens, and what the drafter saved or, if negative, lost
        in it."""
        allowance = self.allowance + saved + _ALLOWED_SHARE * n_tokens
        self.allowance = min(_MOST_ALLOWANCE, allowance)

    def add(self, worth: float, weight: float) -> None:
        """Count another text."""
        self.n = self.n * _FADING_TEXTS + weight
        self.total = self.total * _FADING_TEXTS + weight * worth
        self.squares = self.squares * _FADING_TEXTS + weight * worth * worth

    def of_next(self, look: float) -> tuple[float, float]:
        """What the next text may be worth: mean and standard deviation. A look at what the drafter
        says costs so much."""
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
    """What was counted of a drafter: for each bin of confidence how many tokens were judged, how
    many of these accepted, and how often there was such a confidence, float64[N_BINS] each; and
    what texts were worth."""

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    worths: Worths = field(default_factory=Worths)
    #: The same of texts that were written beside others, where a plain token is cheaper: by
    #: how many there were, up to the next power of two.
    worths_beside: dict[int, Worths] = field(default_factory=dict)

    def worths_at(self, n_sequences: int) -> Worths:
        """What texts were worth of which so many were written at once."""
        if n_sequences <= 1:
            return self.worths
        return self.worths_beside.setdefault(1 << (n_sequences - 1).bit_length(), Worths())


class Chances:
    """The chance that a drafted token is accepted in one text, those before it being accepted, by
    the confidence in [0, 1] that its drafter has.

    `counts` are those of all texts; texts that are written at the same time count in the same
    ones. On top of them a deviation of this text is learnt, one number: some texts suit a draft
    better than others.
    """

    def __init__(
        self, counts: AcceptanceCounts | None = None, start: Callable[[float], float] = model_start
    ) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        self._start_of = start
        self._start = [start(float(middle)) for middle in _MIDDLES]
        self._deviation = 0.0
        #: How many confidences were counted in this text, and in which bins.
        self.n_looks = 0
        self._seen_here = np.zeros(N_BINS)
        #: What a round is worth in this text, in plain tokens' time, if that is known; and what
        #: other texts were worth in such company.
        self._worth: float | None = None
        self.worths = self.counts.worths
        #: Counts all that may have changed the chances, or how often each comes.
        self.version = 0
        #: The chances that were asked for since then.
        self._by_bin: dict[int, float] = {}

    def of_another_text(self) -> Chances:
        """The chances in another text, which deviates in its own way; they share the counts."""
        return Chances(self.counts, self._start_of)

    def expect(self, worth: float, n_sequences: int = 1) -> None:
        """Note what a round seems to be worth in this text, in plain tokens' time, where so many
        are written at once."""
        self._worth, self.worths = worth, self.counts.worths_at(n_sequences)
        if self.worths.start is None:
            self.worths.start = worth

    def end_text(self) -> None:
        """Count what this text was worth, if enough was seen of it, and once."""
        if self._worth is not None and self.n_looks >= _N_ENOUGH:
            self.worths.add(self._worth, self.n_looks / (self.n_looks + _N_HALF))
        self._worth = None

    def chance(self, confidence: float) -> float:
        """The chance for such a token."""
        return self._of_bin(bisect.bisect_left(_EDGES, confidence))

    def curve(self) -> ProbArray:
        """The chances by bin: float64[N_BINS]."""
        return np.array([self._of_bin(index) for index in range(N_BINS)])

    def frequencies(self) -> ProbArray:
        """How often each bin's confidences come in this text, summing to 1:
        float64[N_BINS]."""
        seen = self.counts.n_seen + _START_SEEN
        seen = seen * (_N_HERE / seen.sum()) + self._seen_here
        frequencies: ProbArray = seen / seen.sum()
        return frequencies

    def mean(self) -> float:
        """The chance of a token of which nothing is known yet."""
        return float(self.curve() @ self.frequencies())

    @property
    def n_judged(self) -> float:
        """How many tokens the counts rest on."""
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
        """Learn what became of a token whose predecessors were accepted."""
        index = _bin(confidence)
        n_judged, n_accepted = self.counts.n_judged, self.counts.n_accepted
        expected = self._of_bin(index)
        deviation = self._deviation + _TEXT_RATE * (accepted - expected)
        self._deviation = min(_MAX_DEVIATION, max(-_MAX_DEVIATION, deviation))
        # Only the bin itself fades: what was not seen for long is not less known.
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted[index] = n_accepted.item(index) * _FADING + accepted
        self.version += 1
        self._by_bin.clear()

    def _of_bin(self, index: int) -> float:
        """The chance in this text, of a bin."""
        chance = self._by_bin.get(index)
        if chance is None:
            chance = self._by_bin[index] = _shifted(self._kept(index), self._deviation)
        return chance

    def _kept(self, index: int) -> float:
        """The chance in all texts, of a bin."""
        counts = self.counts
        n_accepted = _N_START * self._start[index] + counts.n_accepted.item(index)
        return n_accepted / (_N_START + counts.n_judged.item(index))


def new_chances(origin: str, counts: AcceptanceCounts | None = None) -> Chances:
    """The chances of a drafter's tokens, with the start that suits it."""
    if ":" in origin:
        return Chances(counts, later_start)
    return Chances(counts, ngram_start if origin in NGRAM_ORIGINS else model_start)


def _bin(confidence: float) -> int:
    return bisect.bisect_left(_EDGES, confidence)


def _shifted(chance: float, log_odds: float) -> float:
    """A chance moved by so much log-odds."""
    chance = min(1.0 - _LEAST, max(_LEAST, chance))
    odds = chance / (1.0 - chance) * math.exp(log_odds)
    return odds / (1.0 + odds)
