"""What decoding costs, and how often drafted tokens are accepted: tables that are measured, and learn.

Both are observed rather than derived. Costs are jagged (one more row may double the time, or cost nothing) and differ
between machines. Acceptance depends on the pair of models, the samplers and the text. (The rule that accepts a token
is in `verify.py`.)
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray

# --- costs: a decode that takes d times the expected seconds corrects what it says something about by a power of d
_SIZE_RATE = 0.12  # the exponent for the entry of its size,
_NEW_SIZE_RATE = 0.5  # the same in the first decodes of a size,
_N_NEW = 3  # which are so many,
_SPEED_RATE = 0.12  # and that for the machine's present speed, which affects all sizes
_MAX_DEVIATION = 1.5  # the largest d: a machine that is busy for a moment says nothing of the model
# --- acceptance
#: Upper ends of the bins of confidence; the last bin ends at 1. Bins are finer where most tokens are.
BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99)
N_BINS = len(BIN_EDGES) + 1
_MIDDLES = [(low + high) / 2 for low, high in zip((0, *BIN_EDGES), (*BIN_EDGES, 1), strict=True)]
#: The prior count of confidences in each bin: a small model of a good family is sure of most tokens.
_PRIOR_SEEN = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.7, 0.7, 0.8, 1.2, 1.4, 1.6, 4.0])
_N_PRIOR = 6.0  # the prior acceptance of a bin counts as so many judged tokens
_FADING = 1.0 - 1.0 / 1500.0  # of an observation's weight with each later one: 1500 are remembered
_TEXT_RATE = 0.12  # how fast the present text's deviation is learnt, in log-odds an observation
_MOST_OF_TEXT = 2.5  # the largest such deviation
_N_HERE = (
    20.0  # frequencies of confidences in all texts count as this many looks in the present one
)
_LEAST = 0.002  # rates keep at least this far from 0 and from 1
_N_RANKS = 3  # siblings behind this many others, or more, are counted together
NGRAM_ORIGINS = ("ngram", "lookup")  # of tokens that need no model


@dataclass(frozen=True, slots=True)
class Price:
    """What drafting costs, in seconds: the first drafted token, each further one, and once the prefill of what the
    drafter has not read yet, beyond the last round. A parallel draft predicts all its tokens in one decode, whose
    size is chosen before: `at_once_s[n - 1]` are the seconds of a decode that predicts n tokens, and `next_s` is
    0."""

    first_s: float
    next_s: float
    prefill_s: float = 0.0
    at_once_s: tuple[float, ...] = ()

    def seconds(self, n_drafted: int) -> float:
        """Return the seconds of drafting n >= 1 tokens, without the prefill."""
        if self.at_once_s:
            return self.at_once_s[min(n_drafted, len(self.at_once_s)) - 1]
        return self.first_s + (n_drafted - 1) * self.next_s


FREE = Price(0.0, 0.0)  # nothing worth counting


@dataclass(frozen=True, slots=True)
class Others:
    """The other sequences in a batch of the target, and the number of their rows, at least one each."""

    n_sequences: int = 0
    n_rows: int = 0


ALONE = Others()


class CostTable:
    """The seconds that a model's batches take, by their rows; every decode corrects them. Sizes between two known
    ones are interpolated; fewer rows than any known size cost what that does, and more cost in proportion to their
    rows."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = {n: s for n, s in sorted((seconds or {}).items()) if n > 0 and s > 0.0}
        self._sizes = list(self._seconds)
        self._n_observed: dict[int, int] = {}
        self._slowness = 1.0  # the machine's present seconds over those of the table
        self._n_sharing = 1  # the sequences that the last decodes served at once

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def known(self) -> dict[int, float]:
        """Seconds of the sizes that were measured or observed, at the machine's present speed."""
        return {size: seconds * self._slowness for size, seconds in self._seconds.items()}

    def knows(self, n_rows: int) -> bool:
        return n_rows in self._seconds

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a batch; 0 for no rows. Raise `LookupError` if no size is known."""
        sizes, known = self._sizes, self._seconds
        if n_rows <= 0:
            return 0.0
        if n_rows in known:
            return self._slowness * known[n_rows]
        if not sizes:
            raise LookupError("no decode was measured")
        index = bisect.bisect_left(sizes, n_rows)
        below, above = sizes[max(0, index - 1)], sizes[min(index, len(sizes) - 1)]
        if n_rows > above:
            return self._slowness * known[above] * n_rows / above
        place = (n_rows - below) / (above - below) if above > below else 1.0
        return self._slowness * (known[below] * (1.0 - place) + known[above] * place)

    def seconds_each(self, n_rows: int) -> float:
        """Return one sequence's part of a decode in which it and the others of the last decodes have `n_rows` rows
        each; 0 while nothing is known."""
        n = self._n_sharing
        return self.seconds(n_rows * n) / n if self._sizes else 0.0

    def share_of_batch(self, n_rows: int, n_batch_rows: int, n_sequences: int) -> float:
        """Return the share, in [0, 1], that one of N sequences pays of a batch in which it has `n_rows` rows: an
        equal part of v(N), and of the rest as much as its drafted rows are of all."""
        if n_sequences == 1:
            return 1.0
        plain_s = self.seconds(n_sequences)
        batch_s = max(plain_s, self.seconds(n_batch_rows))
        drafted = (n_rows - 1) / max(1, n_batch_rows - n_sequences)
        return (plain_s / n_sequences + drafted * (batch_s - plain_s)) / batch_s

    def set_seconds(self, n_rows: int, seconds: float) -> None:
        """Set the measured seconds of a size; they replace earlier ones."""
        if n_rows > 0 and seconds > 0.0:
            if n_rows not in self._seconds:
                bisect.insort(self._sizes, n_rows)
            self._seconds[n_rows] = seconds / self._slowness

    def observe(self, n_rows: int, seconds: float, n_sharing: int = 1) -> None:
        """Learn from a decode of `n_rows` rows, in a round in which `n_sharing` sequences share decodes."""
        self._n_sharing = n_sharing
        if n_rows <= 0 or not seconds > 0.0:
            return
        n_seen = self._n_observed.get(n_rows, 0)
        self._n_observed[n_rows] = n_seen + 1
        expected_s = self.seconds(n_rows) if self._sizes else seconds
        deviation = min(_MAX_DEVIATION, max(1.0 / _MAX_DEVIATION, seconds / expected_s))
        is_known = n_rows in self._seconds
        # The other sizes say what to expect of a new one only roughly.
        rate = _SIZE_RATE if is_known and n_seen >= _N_NEW else _NEW_SIZE_RATE
        self.set_seconds(n_rows, expected_s * deviation**rate)
        if is_known:
            self._slowness *= deviation**_SPEED_RATE


@functools.cache
def origin_of_rank(origin: str, rank: int) -> str:
    """Return the name under which a drafter's tokens with `rank` better siblings are counted: second guesses are
    another matter than first ones."""
    return origin if rank == 0 else f"{origin}:{min(rank, _N_RANKS) + 1}"


def prior_of(origin: str, confidence: float) -> float:
    """Return the prior acceptance probability of a drafter's token."""
    if ":" in origin:  # behind a better sibling
        return 0.8 * confidence
    if origin in NGRAM_ORIGINS:  # fitted to texts already
        return confidence
    # Models are right more often than their confidence when they are unsure, and less often when sure.
    return 0.15 + 0.78 * confidence


@dataclass(slots=True)
class AcceptanceCounts:
    """A drafter's counts in all texts, float64[N_BINS] each, by bin of confidence: judged tokens, accepted ones among
    these, and confidences that were seen; and what trials of it may still cost, in plain tokens' time."""

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    trial_credit: float = 0.0


class AcceptanceRates:
    """The probabilities, in one text, that a drafted token is accepted if all before it were, by its drafter's
    confidence in [0, 1]. `counts` cover all texts, which share them. In addition one number is learnt, the deviation
    of this text: some texts suit a draft better than others."""

    def __init__(self, origin: str = "model", counts: AcceptanceCounts | None = None) -> None:
        self.origin = origin
        self.counts = counts if counts is not None else AcceptanceCounts()
        self._prior = [prior_of(origin, middle) for middle in _MIDDLES]
        self._deviation = 0.0
        self._seen_here = np.zeros(N_BINS)
        self.version = 0  # the number of looks and judgements: each may change the rates
        self._curve: tuple[float, ...] | None = None

    def acceptance(self, confidence: float) -> float:
        return self.curve()[bisect.bisect_left(BIN_EDGES, confidence)]

    def curve(self) -> tuple[float, ...]:
        """Return the acceptance probabilities by bin: those in all texts, shifted by this text's deviation."""
        if self._curve is None:
            self._curve = tuple(self._of_bin(index) for index in range(N_BINS))
        return self._curve

    def _of_bin(self, index: int) -> float:
        n_accepted = _N_PRIOR * self._prior[index] + self.counts.n_accepted.item(index)
        mean = n_accepted / (_N_PRIOR + self.counts.n_judged.item(index))
        odds = mean / (1.0 - mean) * math.exp(self._deviation)
        return min(1.0 - _LEAST, max(_LEAST, odds / (1.0 + odds)))

    def frequencies(self) -> ProbArray:
        """Return the frequency of each bin of confidence in this text, summing to 1: float64[N_BINS]."""
        seen = self.counts.n_seen + _PRIOR_SEEN
        seen = seen * (_N_HERE / seen.sum()) + self._seen_here
        return np.asarray(seen / seen.sum(), np.float64)

    def mean(self) -> float:
        """Return the acceptance probability of a token whose confidence is not known yet."""
        return float(np.array(self.curve()) @ self.frequencies())

    @property
    def n_judged(self) -> float:
        return float(self.counts.n_judged.sum())

    def see(self, confidence: float) -> None:
        index = bisect.bisect_left(BIN_EDGES, confidence)
        self.counts.n_seen *= _FADING
        self.counts.n_seen[index] += 1.0
        self._seen_here[index] += 1.0
        self.version += 1

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted; all tokens before it were."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        n_judged, n_accepted = self.counts.n_judged, self.counts.n_accepted
        deviation = self._deviation + _TEXT_RATE * (accepted - self._of_bin(index))
        self._deviation = min(_MOST_OF_TEXT, max(-_MOST_OF_TEXT, deviation))
        # Only this bin fades: a bin that was not seen for long is not less known.
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted[index] = n_accepted.item(index) * _FADING + accepted
        self.version += 1
        self._curve = None


def judge_drafts(
    rates: Callable[[str], AcceptanceRates], drafts: Sequence[Draft], text: Sequence[int]
) -> None:
    """Count, by origin and rank, which drafted tokens are those with which the text goes on, verified or not; the
    drafts may have common nodes. Drafts with drawn tokens do not count."""
    judged: set[tuple[int, str, int]] = set()
    for draft in drafts:
        node, ranks = ROOT, draft.ranks()
        for depth, token in enumerate(() if draft.is_drawn else text):
            children = draft.children(node)
            for child in children:
                place = depth, draft.origins[child], draft.tokens[child]
                if place not in judged:
                    judged.add(place)
                    known = draft.probabilities[child]
                    origin = origin_of_rank(draft.origins[child], ranks[child])
                    is_right = draft.tokens[child] == token
                    rates(origin).judge(1.0 if known is None else known, accepted=is_right)
            right = [child for child in children if draft.tokens[child] == token]
            if not right:
                break
            node = right[-1]


def judge_draws(rates: Callable[[str], AcceptanceRates], draft: Draft, n_accepted: int) -> None:
    """Count which drawn tokens of a verified chain were accepted, by the model's confidence before the draw."""
    drawn = [node for node, source in enumerate(draft.distributions) if source is not None]
    for node, confidence in zip(drawn, draft.looks, strict=False):
        if node <= n_accepted:
            rates(draft.origins[node]).judge(confidence, accepted=node < n_accepted)
