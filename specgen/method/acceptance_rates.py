"""The acceptance rate of a drafter's tokens, estimated from their draft probabilities.

A draft model's probability and an n-gram's match show which tokens are likelier to be accepted, but
not how likely. That depends on the pair of models, the samplers and the text, and is counted here. (The rule
that accepts a token is in `verify.py`.)
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray

#: Upper ends of the bins of confidence; the last bin ends at 1. Bins are finer where most tokens are.
BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
N_BINS = len(BIN_EDGES) + 1
_MIDDLES = [
    (low + high) / 2 for low, high in zip((0.0, *BIN_EDGES), (*BIN_EDGES, 1.0), strict=True)
]
#: The prior count of confidences in each bin: a small model of a good family is sure of most tokens,
#: and not at all sure of some.
_START_SEEN = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.8, 1.2, 1.4, 1.6, 4.0])
#: The prior probability of a bin counts as this many observations.
_N_START = 6.0
#: The counts remember about 1500 observations; older ones fade.
_FADING = 1.0 - 1.0 / 1500.0
#: How fast the present text's deviation from other texts is learnt, in log-odds an observation, and
#: its largest size.
_TEXT_RATE = 0.12
_MAX_DEVIATION = 2.5
#: The frequencies of confidences in all texts count as this many looks in the present text.
_N_HERE = 20.0
#: What trials of a drafter may cost, in plain tokens' time: this share of the generated tokens, and at most so much
#: at once.
_TRIAL_SHARE = 0.015
_MOST_CREDIT = 32.0
#: Origins of tokens that need no model.
NGRAM_ORIGINS = ("ngram", "lookup")
#: Rates are kept at least this far from 0 and from 1.
_LEAST = 0.002
#: Siblings that are ranked behind this many others, or more, are counted together.
_N_RANKS = 3


@functools.cache
def origin_of_rank(origin: str, rank: int) -> str:
    """Return the name under which a drafter's tokens with `rank` better siblings are counted: the
    acceptance rate of its second guess has little to do with that of its first one."""
    return origin if rank == 0 else f"{origin}:{min(rank, _N_RANKS) + 1}"


def start_of(origin: str, confidence: float) -> float:
    """Return the prior acceptance probability of a drafter's token."""
    if ":" in origin:  # behind a better sibling
        return 0.8 * confidence
    if origin in NGRAM_ORIGINS:  # fitted to texts already
        return confidence
    # Models are right more often than their confidence when they are unsure, and less often when sure.
    return 0.15 + 0.78 * confidence


@dataclass(slots=True)
class AcceptanceCounts:
    """The counts of a drafter in all texts, float64[N_BINS] each, by bin of confidence: judged tokens, accepted
    ones among these, and confidences that were seen."""

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    #: What trials of the drafter may still cost, in plain tokens' time.
    trial_credit: float = 0.0

    def account(self, n_tokens: int, saved: float = 0.0) -> None:
        """Note that the text has grown by `n_tokens`, and what a trial saved; negative if it lost time."""
        credit = self.trial_credit + _TRIAL_SHARE * n_tokens + saved
        self.trial_credit = min(_MOST_CREDIT, credit)


class AcceptanceRates:
    """The probabilities, in one text, that a drafted token is accepted if all before it were, by
    its drafter's confidence in [0, 1].

    `counts` cover all texts; texts that are generated at the same time share them. In addition one
    number is learnt, the deviation of this text: some texts suit a draft better than others.
    """

    def __init__(self, origin: str = "model", counts: AcceptanceCounts | None = None) -> None:
        self._origin = origin
        self.counts = counts if counts is not None else AcceptanceCounts()
        self._start = [start_of(origin, middle) for middle in _MIDDLES]
        self._deviation = 0.0
        self._seen_here = np.zeros(N_BINS)
        #: Counts the looks and judgements: each may change the probabilities, or how often each comes.
        self.version = 0
        #: The acceptance probabilities by bin, until the next judgement; None if they are not computed yet.
        self._curve: tuple[float, ...] | None = None

    def for_new_text(self) -> AcceptanceRates:
        """Return the statistics for another text, which has its own deviation and shares the counts."""
        return AcceptanceRates(self._origin, self.counts)

    def chance(self, confidence: float) -> float:
        """Return the acceptance probability of a token with this confidence."""
        return self.curve()[_bin(confidence)]

    def curve(self) -> tuple[float, ...]:
        """Return the acceptance probabilities by bin of confidence, N_BINS of them: those in all texts, shifted
        by this text's deviation."""
        if self._curve is None:
            self._curve = tuple(self._of_bin(index) for index in range(N_BINS))
        return self._curve

    def _of_bin(self, index: int) -> float:
        n_accepted = _N_START * self._start[index] + self.counts.n_accepted.item(index)
        chance = n_accepted / (_N_START + self.counts.n_judged.item(index))
        odds = chance / (1.0 - chance) * math.exp(self._deviation)
        return min(1.0 - _LEAST, max(_LEAST, odds / (1.0 + odds)))

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
        index = _bin(confidence)
        self.counts.n_seen *= _FADING
        self.counts.n_seen[index] += 1.0
        self._seen_here[index] += 1.0
        self.version += 1

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted; all tokens before it were."""
        index = _bin(confidence)
        n_judged, n_accepted = self.counts.n_judged, self.counts.n_accepted
        deviation = self._deviation + _TEXT_RATE * (accepted - self._of_bin(index))
        self._deviation = min(_MAX_DEVIATION, max(-_MAX_DEVIATION, deviation))
        # Only this bin fades: a bin that was not seen for long is not less known.
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted[index] = n_accepted.item(index) * _FADING + accepted
        self.version += 1
        self._curve = None


def judge_drafts(
    rates: Callable[[str], AcceptanceRates], drafts: Sequence[Draft], text: Sequence[int]
) -> None:
    """Count, by origin and rank, which drafted tokens are those with which the text goes on; the drafts may
    have common nodes.

    A token that was not drawn at random need not be verified for this. Drafts with drawn tokens do not
    count: `judge_draws` does that for those that were verified.
    """
    judged: set[tuple[int, str, int]] = set()
    for draft in drafts:
        if draft.is_drawn:
            continue
        node, ranks = ROOT, draft.ranks()
        for depth, token in enumerate(text):
            reached = None
            for child in draft.children(node):
                is_right = draft.tokens[child] == token
                reached = child if is_right else reached
                place = (depth, draft.origins[child], draft.tokens[child])
                if place in judged:
                    continue
                judged.add(place)
                confidence = draft.probabilities[child]
                rates(origin_of_rank(draft.origins[child], ranks[child])).judge(
                    1.0 if confidence is None else confidence, accepted=is_right
                )
            if reached is None:
                break
            node = reached


def judge_draws(rates: Callable[[str], AcceptanceRates], draft: Draft, n_accepted: int) -> None:
    """Count which tokens of a verified chain that were drawn at random were accepted.

    They are counted by the model's confidence before the draw, which shows what to expect of
    them, and not by the probability of the drawn token."""
    looks = iter(draft.looks)
    for node in range(min(n_accepted + 1, len(draft))):
        if draft.distributions[node] is not None:
            confidence = next(looks, None)
            if confidence is not None:
                rates(draft.origins[node]).judge(confidence, accepted=node < n_accepted)


def _bin(confidence: float) -> int:
    return bisect.bisect_left(BIN_EDGES, confidence)
