"""What decoding costs, and how often drafted tokens are accepted: tables that are measured, and learn.

Both are observed rather than derived. Costs are jagged (one more row may double the time, or cost nothing) and differ
between machines. Acceptance depends on the pair of models, the samplers and the text. (The rule that accepts a token
is in `verify.py`.)
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray

# --- costs: a decode that takes d times the expected seconds corrects what it says something about by a power of d
_COST_RATE = (
    0.1  # the exponent for the machine's present speed, and at least that for the size's entry
)
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
_N_HERE = 20.0  # the confidences of all texts count as so many looks in the present one
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


class CostTable:
    """The seconds that a model's batches take, by their rows; every decode corrects them. Sizes between two known
    ones are interpolated; fewer rows than any known size cost what that does, and more cost in proportion to their
    rows."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = {n: s for n, s in sorted((seconds or {}).items()) if n > 0 and s > 0.0}
        self._n_observed: dict[int, int] = {}
        self._slowness = 1.0  # the machine's present seconds over those of the table
        self.n_sharing = 1  # the sequences that the last decode served at once

    def __bool__(self) -> bool:
        return bool(self._seconds)

    @property
    def known(self) -> dict[int, float]:
        """Seconds of the sizes that were measured or observed, at the machine's present speed."""
        return {size: seconds * self._slowness for size, seconds in self._seconds.items()}

    def knows(self, n_rows: int) -> bool:
        return n_rows in self._seconds

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a batch; 0 for no rows. Raise `LookupError` if no size is known."""
        known = self._seconds
        if n_rows <= 0:
            return 0.0
        if n_rows in known:
            return self._slowness * known[n_rows]
        if not known:
            raise LookupError("no decode was measured")
        sizes = sorted(known)
        if n_rows > sizes[-1]:
            return self._slowness * known[sizes[-1]] * n_rows / sizes[-1]
        between = np.interp(n_rows, sizes, [known[size] for size in sizes])
        return self._slowness * float(between)

    def seconds_each(self, n_rows: int) -> float:
        """Return one sequence's part of a decode in which it and the others of the last decode have `n_rows` rows
        each; 0 while nothing is known."""
        return self.seconds(n_rows * self.n_sharing) / self.n_sharing if self._seconds else 0.0

    def share_of_batch(self, n_drafted: int, n_rows: int) -> float:
        """Return the share, in [0, 1], that one of N sequences pays of a batch: an equal part of v(N), the cost without
        drafts, and of the rest as much as its drafted rows are of all."""
        n = self.n_sharing
        if n == 1 or n_rows <= n:
            return 1.0 / n
        plain_s, batch_s = self.seconds(n), max(self.seconds(n), self.seconds(n_rows))
        return (plain_s / n + n_drafted / (n_rows - n) * (batch_s - plain_s)) / batch_s

    def set_seconds(self, n_rows: int, seconds: float) -> None:
        """Set the measured seconds of a size; they replace earlier ones."""
        if n_rows > 0 and seconds > 0.0:
            self._seconds[n_rows] = seconds / self._slowness

    def observe(self, n_rows: int, seconds: float, n_sharing: int = 1) -> None:
        """Learn from a decode of `n_rows` rows, which served `n_sharing` sequences."""
        if n_rows <= 0 or not seconds > 0.0:
            return
        self.n_sharing = n_sharing
        expected_s = self.seconds(n_rows) if self._seconds else seconds
        deviation = min(_MAX_DEVIATION, max(1.0 / _MAX_DEVIATION, seconds / expected_s))
        is_known, n_seen = n_rows in self._seconds, self._n_observed.get(n_rows, 0)
        self._n_observed[n_rows] = n_seen + 1
        self.set_seconds(n_rows, expected_s * deviation ** max(_COST_RATE, 1 / (n_seen + 3)))
        if is_known:  # the other sizes say what to expect of a new one only roughly
            self._slowness *= deviation**_COST_RATE


def origin_of_rank(origin: str, rank: int) -> str:
    """Return the name under which a drafter's tokens with `rank` better siblings are counted: second guesses are
    another matter than first ones."""
    return origin if rank == 0 else f"{origin}:{min(rank, _N_RANKS) + 1}"


def prior_of(origin: str, confidence: float) -> float:
    """Return the prior acceptance probability of a drafter's token."""
    if ":" in origin:  # behind a better sibling
        return 0.8 * confidence
    if origin in NGRAM_ORIGINS:  # fitted to texts of another kind
        return 0.85 * confidence
    # Models are right more often than their confidence when they are unsure, and less often when sure.
    return 0.15 + 0.78 * confidence


@dataclass(slots=True)
class AcceptanceCounts:
    """A drafter's counts in all texts, float64[N_BINS] each, by bin of confidence: judged tokens, accepted ones among
    these, and confidences that were seen; and the time that it may lose, in plain decodes (see `policy.py`)."""

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    credit: float = 0.0


class AcceptanceRates:
    """The probabilities, in one text, that a drafted token is accepted if all before it were, by its drafter's
    confidence in [0, 1]. `counts` cover all texts, which share them. In addition one number is learnt, the deviation
    of this text: some texts suit a draft better than others."""

    def __init__(self, origin: str = "model", counts: AcceptanceCounts | None = None) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        self._prior = [prior_of(origin, middle) for middle in _MIDDLES]
        self._deviation = 0.0
        self._seen_here = np.zeros(N_BINS)
        self._curve: tuple[float, ...] | None = None

    def acceptance(self, confidence: float) -> float:
        return (self._curve or self.curve())[bisect.bisect_left(BIN_EDGES, confidence)]

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

    def see(self, confidence: float) -> None:
        index = bisect.bisect_left(BIN_EDGES, confidence)
        self.counts.n_seen *= _FADING
        self.counts.n_seen[index] += 1.0
        self._seen_here[index] += 1.0

    def judge(self, confidence: float, *, accepted: bool) -> None:
        """Learn whether a token was accepted; all tokens before it were."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        n_judged, n_accepted = self.counts.n_judged, self.counts.n_accepted
        deviation = self._deviation + _TEXT_RATE * (accepted - self._of_bin(index))
        self._deviation = min(_MOST_OF_TEXT, max(-_MOST_OF_TEXT, deviation))
        # Only this bin fades: a bin that was not seen for long is not less known.
        n_judged[index] = n_judged.item(index) * _FADING + 1.0
        n_accepted[index] = n_accepted.item(index) * _FADING + accepted
        self._curve = None


def judge_drafts(
    rates: Callable[[str], AcceptanceRates],
    drafts: Sequence[Draft],
    text: Sequence[int],
    n_accepted: int,
) -> None:
    """Learn which tokens of each drafter's first draft are those with which the text goes on, verified or not. A drawn
    token is judged where it was verified, in a chain of which `n_accepted` tokens were accepted, and by the confidence
    before the draw."""
    for origin, draft in {each.origins[0]: each for each in reversed(drafts) if each}.items():
        if draft.is_drawn:
            if draft.is_chain:
                for node, confidence in enumerate(draft.looks[: min(len(draft), n_accepted + 1)]):
                    rates(origin).judge(confidence, accepted=node < n_accepted)
            continue
        node, ranks = ROOT, draft.ranks()
        for token in text:
            right = None
            for child in draft.children(node):
                is_right, known = draft.tokens[child] == token, draft.probabilities[child]
                right = child if is_right else right
                of_rank = rates(origin_of_rank(origin, ranks[child]))
                of_rank.judge(1.0 if known is None else known, accepted=is_right)
            if right is None:
                break
            node = right
