"""What decoding costs, how often drafted tokens are accepted, and how far a draft is worth going by both.

Costs are observed, since they are jagged (one more row may double the time, or cost nothing) and differ between
machines; acceptance depends on the models, the samplers and the text. (For the words see `policy.py`.)"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.system.arrays import ProbArray

# A decode that takes d times the expected seconds corrects its size's entry, and the machine's speed, by powers of d:
# what sizes cost beside others hardly changes with another program's work, but the machine's speed does.
_COST_RATE, _SPEED_RATE = 0.05, 0.2
_MAX_DEVIATION = 1.5  # the largest d: a machine that is busy for a moment says nothing of the model
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
N_RANKS = 3  # siblings behind this many others, or more, are counted together
#: The acceptance rates of an origin's tokens with so many better siblings.
Rates: TypeAlias = Callable[[str, int], "AcceptanceRates"]
#: The logarithms of `whole` at which the values of looks are computed.
_LOG_GRID = np.linspace(math.log(0.01), 0.0, 20)
_GRID: list[float] = _LOG_GRID.tolist()


@dataclass(frozen=True, slots=True)
class Price:
    """What drafting costs, in seconds: the first token, each further one, and once the prefill of what the drafter has
    not read yet, beyond the last round, which `seconds` leaves out."""

    first_s: float
    next_s: float
    prefill_s: float = 0.0

    def seconds(self, n_drafted: int) -> float:
        return self.first_s + (n_drafted - 1) * self.next_s


FREE = Price(0.0, 0.0)  # nothing worth counting


def _interpolated(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Do as np.interp does, which takes several times as long for one number."""
    place = bisect.bisect_right(places, x) - 1
    if not 0 <= place < len(places) - 1:
        return values[max(0, place)]
    slope = (values[place + 1] - values[place]) / (places[place + 1] - places[place])
    return slope * (x - places[place]) + values[place]


class CostTable:
    """The seconds of a model's batches by their rows; every decode corrects them. Between known sizes they are
    interpolated; fewer rows than any of these cost what it does, and more in proportion."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = {n: s for n, s in sorted((seconds or {}).items()) if n > 0 and s > 0.0}
        self._n_observed = dict.fromkeys(self._seconds, 20)
        self._slowness = 1.0  # the machine's present seconds over those of the table
        self.n_sharing = 1  # the sequences that the last decode served at once

    def __bool__(self) -> bool:
        return bool(self._seconds)

    @property
    def known(self) -> dict[int, float]:
        """The seconds of each known size, at the machine's present speed."""
        return {size: seconds * self._slowness for size, seconds in self._seconds.items()}

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
        return self._slowness * _interpolated(n_rows, sizes, [known[size] for size in sizes])

    def seconds_each(self, n_rows: int) -> float:
        """Return one sequence's part of a decode in which all have `n_rows` rows; 0 while nothing is known."""
        return self.seconds(n_rows * self.n_sharing) / self.n_sharing if self._seconds else 0.0

    def share_of_batch(self, n_drafted: int, n_rows: int) -> float:
        """Return one sequence's share of a batch: an equal part of plain rows, and the rest by its drafted rows."""
        n = self.n_sharing
        if n == 1 or n_rows <= n:
            return 1.0 / n
        plain_s, batch_s = self.seconds(n), max(self.seconds(n), self.seconds(n_rows))
        return (plain_s / n + n_drafted / (n_rows - n) * (batch_s - plain_s)) / batch_s

    def set_seconds(self, n_rows: int, seconds: float) -> None:
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
        seconds = expected_s * deviation ** max(_COST_RATE, 1 / (n_seen + 3))
        self._seconds[n_rows] = seconds / self._slowness
        if is_known:  # the other sizes say what to expect of a new one only roughly
            self._slowness *= deviation**_SPEED_RATE


@dataclass(slots=True)
class AcceptanceCounts:
    """A drafter's counts in all texts, float64[N_BINS] each, by bin of confidence: judged tokens, accepted ones among
    these, and confidences that were seen; and its credit (see `policy.py`)."""

    n_judged: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_accepted: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    n_seen: ProbArray = field(default_factory=lambda: np.zeros(N_BINS))
    credit: float = 0.0


class AcceptanceRates:
    """The probabilities, in one text, that a drafted token is accepted if all before it were, by its drafter's
    confidence in [0, 1]: those of all texts, in `counts`, and how far this text deviates from them, one number."""

    def __init__(self, origin: str = "model", counts: AcceptanceCounts | None = None) -> None:
        self.counts = counts if counts is not None else AcceptanceCounts()
        # Models are right more often than they say when unsure, less often when sure, or behind a better sibling.
        at_0, slope = (0.0, 0.8) if ":" in origin else (0.15, 0.78)
        at_0, slope = (0.0, 0.85) if origin in ("ngram", "lookup") else (at_0, slope)
        self._prior = [at_0 + slope * middle for middle in _MIDDLES]
        self._deviation = 0.0
        self._seen_here = [0.0] * N_BINS
        self._curve: list[float | None] = [None] * N_BINS  # None: not asked for since a judgement

    def acceptance(self, confidence: float) -> float:
        """Return the acceptance probability of a confidence's bin: that of all texts and this one's deviation."""
        index = bisect.bisect_left(BIN_EDGES, confidence)
        if (known := self._curve[index]) is not None:
            return known
        n_accepted = _N_PRIOR * self._prior[index] + self.counts.n_accepted.item(index)
        mean = n_accepted / (_N_PRIOR + self.counts.n_judged.item(index))
        odds = mean / (1.0 - mean) * math.exp(self._deviation)
        acceptance = self._curve[index] = min(1.0 - _LEAST, max(_LEAST, odds / (1.0 + odds)))
        return acceptance

    def curve(self) -> list[float]:
        return [self.acceptance(middle) for middle in _MIDDLES]

    def frequencies(self) -> ProbArray:
        """Return how frequent each bin of confidence is in this text: float64[N_BINS], summing to 1."""
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
    """Learn which tokens of each drafter's first draft are those with which the text goes on, verified or not. Drawn
    tokens are judged in a chain, of which `n_right` were accepted, by the confidence before the draw."""
    for origin, draft in {each.origins[0]: each for each in reversed(drafts) if each}.items():
        if draft.is_drawn:
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


@dataclass(frozen=True, slots=True)
class Stop:
    """How far a draft goes: while its model gives a token at least `p_min` (as llama.cpp), and the product of all its
    tokens' probabilities is at least `bound`. Drafts of fewer than `n_min` tokens are not verified. A confidence is a
    pass over the logits, if `needs_confidence`."""

    p_min: float = 0.0
    n_min: int = 0
    bound: float = 0.0
    needs_confidence: bool = False

    def after_look(self, n: int, whole: float, confidence: float) -> tuple[bool, bool, float]:
        """Return what `RoundPlan.after_look` does; `n` tokens were drafted before."""
        whole *= confidence
        return confidence >= self.p_min and whole >= self.bound, True, whole

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes that are worth verifying, likeliest first. A drawn draft stays whole, to bias no text."""
        if draft.is_drawn:
            return draft
        if draft.is_chain and self.bound > 0.0:
            known = (1.0 if each is None else each for each in draft.probabilities)
            products = itertools.accumulate(known, operator.mul)
            draft = draft.first(sum(product >= self.bound for product in products))
        return draft if len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class WhilePaying(Stop):
    """Drafts as long as another token is expected to save time: optimal stopping. An accepted token is worth `token_s`
    seconds; n drafted tokens add `extra_s[n]` to the target's batch. A look of the drafter `origin` takes `next_s`, and
    has the values of `values_of_looks`; without these, nothing is drafted."""

    origin: str
    rates: Rates
    token_s: float
    extra_s: Sequence[float]
    next_s: float = 0.0
    values: Sequence[Sequence[float]] = ()
    needs_confidence: bool = True

    def after_look(self, n: int, whole: float, confidence: float) -> tuple[bool, bool, float]:
        if not self.values:
            return False, False, whole
        whole *= self.rates(self.origin, 0).acceptance(confidence)
        more_s = self.value(n + 1, whole)
        gain_s = whole * self.token_s - (self.extra_s[n + 1] - self.extra_s[n])
        return confidence >= self.p_min and gain_s + max(0.0, more_s) > 0.0, more_s > 0.0, whole

    def value(self, n_drafted: int, whole: float) -> float:
        """Return the seconds that a look at the next token is expected to save; below 0 it does not pay."""
        return _interpolated(math.log(max(whole, _LEAST)), _GRID, self.values[n_drafted])

    def cut(self, draft: Draft) -> Draft:
        return draft if draft.is_drawn else draft.only(self.best_nodes(self.wholes(draft)))

    def best_nodes(self, wholes: Sequence[float]) -> list[int]:
        """Return the nodes that are worth most together, likeliest first. Wholes fall along a path, so the n likeliest
        nodes form a tree, the best one (Sequoia, arXiv:2402.12374)."""
        order = sorted(range(len(wholes)), key=wholes.__getitem__, reverse=True)
        worths_s = self._worths([wholes[node] for node in order])
        return order[: worths_s.index(max(worths_s))]

    def worth_of(self, draft: Draft) -> float:
        """Return the seconds that verifying a draft is expected to save."""
        return self._worths(self.wholes(draft))[-1]

    def _worths(self, wholes: Sequence[float]) -> list[float]:
        """Return the seconds that verifying none, one, two, ... of the nodes is expected to save."""
        n_accepted = itertools.accumulate(wholes, initial=0.0)
        return [n * self.token_s - s for n, s in zip(n_accepted, self.extra_s, strict=False)]

    def wholes(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        wholes: list[float] = []
        for node, parent in enumerate(draft.parents):
            rates = self.rates(draft.origins[node], draft.ranks[node])
            known = draft.probabilities[node]
            acceptance = rates.acceptance(1.0 if known is None else known)
            wholes.append(acceptance if parent == ROOT else acceptance * wholes[parent])
        return wholes


def values_of_looks(
    extra_s: Sequence[float], next_s: float, token_s: float, rates: AcceptanceRates
) -> list[list[float]]:
    """Return V, the value in seconds of a look at the next token: by n, the tokens of the draft so far, and by W, their
    whole, on the grid.

    V(n, W) = -next_s + the mean over bins b of max(0, W acceptance[b] token_s - (extra_s[n + 1] - extra_s[n]) + max(0,
    V(n + 1, W acceptance[b]))), and V(n_max, W) = 0: look, then add the token or not, then look again or not."""
    frequencies = rates.frequencies()
    # Axes: W on the grid, bin b. The token that is looked at turns W into W acceptance[b].
    log_wholes = np.add.outer(_LOG_GRID, np.log(rates.curve()))
    gains_s = token_s * np.exp(log_wholes)  # W acceptance[b] token_s
    found = [np.zeros(len(_LOG_GRID))]
    for row_s in np.diff(extra_s)[::-1]:  # extra_s[n + 1] - extra_s[n], from the longest draft back
        # max(0, V(n + 1, W acceptance[b])), between the grid's places
        after_s = np.interp(log_wholes, _LOG_GRID, np.maximum(found[-1], 0.0))
        found.append(np.maximum(after_s + gains_s - row_s, 0.0) @ frequencies - next_s)
    return [values.tolist() for values in reversed(found)]
