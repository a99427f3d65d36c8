"""How far a draft goes while it is expected to save time: optimal stopping for chains, the best nodes of trees."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specgen.method.acceptance import BIN_EDGES, NGRAM_ORIGINS, origin_of_rank
from specgen.method.draft import ROOT, Draft, TreeBuilder
from specgen.system.arrays import ProbArray

#: Values are computed for these probabilities that the draft so far is accepted whole, and interpolated
#: between them.
_N_GRID = 20
_LEAST = 0.01
_LOG_LEAST = math.log(_LEAST)
_STEP = -_LOG_LEAST / (_N_GRID - 1)
_LOG_GRID = np.linspace(_LOG_LEAST, 0.0, _N_GRID)
_GRID = np.exp(_LOG_GRID)
#: A rule is computed again when a price has changed by this share of a token's worth, or after this
#: many looks and judged tokens.
_NEWS = 0.05
_N_NEWS = 24


class StoppingRule:
    """The value, in seconds saved, of going on with a draft of n tokens.

    `batch_s` is float64[n_max + 1]: the target's seconds for a batch with a draft of 0 to n_max
    tokens. `next_s` are the seconds of a look at the next token, `token_s` the seconds that an
    accepted token is worth. `frequencies` and `acceptance`, float64[n_bins], are how often the next
    token falls in a bin of confidence, and how often a token of that bin is accepted.

    With A the probability that the draft so far is accepted whole, V(n, A) = -next_s + the mean
    over bins b of max(0, A acceptance[b] token_s - (batch_s[n + 1] - batch_s[n]) + max(0, V(n + 1, A
    acceptance[b]))); V(n_max, A) = 0. That is: look, then take the token or not, then look again or
    not.
    """

    def __init__(
        self,
        batch_s: ProbArray,
        next_s: float,
        token_s: float,
        frequencies: ProbArray,
        acceptance: ProbArray,
    ) -> None:
        self._n_max = len(batch_s) - 1
        self._token_s = token_s
        self._frequencies, self._gains_s = frequencies, token_s * acceptance
        costs_s: list[float] = np.diff(batch_s).tolist()
        # One matrix product adds the value behind a token, its gain and its cost, for each point of
        # the grid and each bin: calls take longer than the arithmetic.
        terms = np.empty((_N_GRID * len(acceptance), _N_GRID + 2))
        terms[:, :_N_GRID] = _interpolation(acceptance)
        terms[:, _N_GRID] = (token_s * _GRID[:, None] * acceptance).ravel()
        terms[:, _N_GRID + 1] = -1.0
        factors = np.ones(_N_GRID + 2)
        further = factors[:_N_GRID]
        taken = np.empty(len(terms))
        by_bin = taken.reshape(_N_GRID, -1)
        #: V + next_s at the grid's points, a row for each n.
        values = np.full((self._n_max + 1, _N_GRID), next_s)
        for n in range(self._n_max - 1, -1, -1):
            np.maximum(values[n + 1], next_s, out=further)
            factors[-1] = costs_s[n] + next_s
            terms.dot(factors, out=taken)
            np.maximum(taken, 0.0, out=taken)
            by_bin.dot(frequencies, out=values[n])
        values -= next_s
        # Only a few numbers are read at a time, for which lists are faster.
        self._values: list[list[float]] = values.tolist()
        self._costs_s = costs_s

    @property
    def n_max(self) -> int:
        return self._n_max

    def value(self, n_drafted: int, chance: float) -> float:
        """Return the expected gain V of a look at the next token, in seconds; below 0 the look does not
        pay."""
        if n_drafted >= self._n_max:
            return 0.0
        values = self._values[n_drafted]
        place = (math.log(max(chance, _LEAST)) - _LOG_LEAST) / _STEP
        index = min(int(place), _N_GRID - 2)
        share = place - index
        return values[index] * (1.0 - share) + values[index + 1] * share

    def single(self, chance: float, cost_s: float) -> float:
        """Return the expected gain, in seconds, of one more token after a draft with this probability, if
        taking it costs `cost_s`, its look costs nothing, and no look follows: the mean of max(0, A
        acceptance[b] token_s - cost_s)."""
        return float(np.maximum(chance * self._gains_s - cost_s, 0.0) @ self._frequencies)

    def takes(self, n_drafted: int, chance: float) -> float:
        """Return the expected gain of taking one more token, in seconds; with it, the draft's probability
        is `chance`."""
        if n_drafted >= self._n_max:
            return -1.0
        gain_s = chance * self._token_s - self._costs_s[n_drafted]
        return gain_s + max(0.0, self.value(n_drafted + 1, chance))


@dataclass(frozen=True, slots=True)
class KnownRule:
    """A stopping rule, the prices in seconds that it was computed for, and the number of looks and
    judged tokens (`AcceptanceRates.version`) by then."""

    rule: StoppingRule
    n_judged: int
    next_s: float
    token_s: float
    row_s: float

    def holds(self, n_judged: int, next_s: float, token_s: float, row_s: float) -> bool:
        """Return whether the rule is still good enough: computing a new one takes longer than it would
        save."""
        most = _NEWS * self.token_s
        return (
            n_judged - self.n_judged < _N_NEWS
            and abs(self.next_s - next_s) <= most
            and abs(self.token_s - token_s) <= most
            and abs(self.row_s - row_s) <= most
        )


def row_bucket(token_s: float, row_s: float) -> int:
    """Return a number for the price of a row, as a share of a token's worth; similar prices have the same
    number."""
    return round(row_s / (_NEWS * token_s)) if token_s > 0.0 else 0


def _interpolation(acceptance: ProbArray) -> ProbArray:
    """Return the matrix that turns values at the grid's points into values at each point times each
    probability: float64[_N_GRID * n_bins, _N_GRID]. Products below the lowest point count as that point."""
    places = np.log(np.maximum(acceptance, _LEAST)) / _STEP + np.arange(_N_GRID)[:, None]
    places = np.maximum(places, 0.0).ravel()
    index = np.minimum(places.astype(np.intp), _N_GRID - 2)
    share = places - index
    weights = np.zeros((len(places), _N_GRID))
    rows = np.arange(len(places))
    weights[rows, index] = 1.0 - share
    weights[rows, index + 1] = share
    return weights


#: Second guesses count with this share of their estimated probability: the cost of a row is certain, and
#: choosing among many small expected gains favours the overestimated ones. (With 1, trees were 6 %
#: slower than chains on a real pair whose rows cost 0.17 of a token; replays of 24 answers for an F16 target
#: were 1.3 % slower.)
_SECOND = 0.6


@dataclass(frozen=True, slots=True)
class WhilePaying:
    """Drafts as long as another token is expected to save time. The draft follows a chain of `n_before`
    found tokens, which are accepted whole with probability `before`.

    `curves` has, for each origin, the probability that its tokens are accepted, by bin of the drafter's
    confidence. An expected token counts `ngram_token_s` or `model_token_s` seconds, and `extra_s[n]` are
    the seconds that n drafted tokens add to the target's batch. A look of the drafter `origin` takes
    `next_s` seconds.
    """

    origin: str
    curves: Mapping[str, Sequence[float]]
    ngram_token_s: float
    model_token_s: float
    extra_s: Sequence[float]
    rule: StoppingRule | None = None
    next_s: float = 0.0
    p_min: float = 0.0
    n_before: int = 0
    before: float = 1.0
    #: In a trial, a chain of so many tokens is drafted and verified, whatever is expected of it.
    n_tried: int | None = None
    needs_confidence: bool = True

    def token_s(self, origin: str) -> float:
        """Return the seconds that an expected token of an origin counts."""
        return self.ngram_token_s if origin in NGRAM_ORIGINS else self.model_token_s

    def worth_of(self, draft: Draft) -> float:
        """Return the expected gain of verifying a draft, in seconds; 0 for none."""
        if not len(draft):
            return 0.0
        probabilities = self.path_probabilities(draft)[: len(self.extra_s) - 1]
        return (
            sum(probabilities) * self.token_s(draft.origins[0]) - self.extra_s[len(probabilities)]
        )

    def chance(self, origin: str, confidence: float | None) -> float:
        """Return the probability that a token is accepted if all before it are."""
        return self.curves[origin][
            bisect.bisect_left(BIN_EDGES, 1.0 if confidence is None else confidence)
        ]

    def guess_probability(self, rank: int, confidence: float) -> float:
        """Return the probability of the drafter's guess number `rank`, from 0, for one position of a tree."""
        chance = self.chance(origin_of_rank(self.origin, rank), confidence)
        return chance if rank == 0 else _SECOND * chance

    def keeps(self, confidences: Sequence[float]) -> bool:
        if self.n_tried is not None:
            return len(confidences) <= self.n_tried
        if confidences[-1] < self.p_min or self.rule is None:
            return False
        n_drafted = self.n_before + len(confidences) - 1
        return self.rule.takes(n_drafted, self._path_probability(confidences)) > 0.0

    def looks(self, confidences: Sequence[float]) -> bool:
        if self.n_tried is not None:
            return len(confidences) < self.n_tried
        if self.rule is None:
            return False
        n_drafted = self.n_before + len(confidences)
        return self.rule.value(n_drafted, self._path_probability(confidences)) > 0.0

    def cut(self, draft: Draft) -> Draft:
        if not len(draft):
            return draft
        if self.n_tried is not None:
            return draft if draft.is_chain or draft.is_drawn else draft.only(draft.first_children())
        if draft.is_chain:
            # A token that was drawn at random is not dropped because of what it is.
            return draft.first(max(draft.n_drawn, self._best_length(draft)))
        if not draft.is_drawn:
            token_s = self.token_s(draft.origins[0])
            return draft.only(best_nodes(self.path_probabilities(draft), token_s, self.extra_s)[0])
        if not draft.has_free_end:
            return draft
        # All drawn nodes, and those behind them that are worth verifying. The choice depends on the draws;
        # it biases nothing, since all draws are verified anyway.
        n_drawn = draft.n_drawn
        token_s, extra_s = self.token_s(draft.origins[n_drawn]), self._extra_after(n_drawn)
        behind, _ = best_nodes(self.path_probabilities(draft)[n_drawn:], token_s, extra_s)
        return draft.only([*range(n_drawn), *(n_drawn + node for node in behind)])

    def cut_after(self, draft: Draft) -> Draft:
        """Return the nodes worth verifying of a tree that follows the found tokens, likeliest first."""
        if self.n_tried is not None:
            return self.cut(draft)
        probabilities = [self.before * chance for chance in self.path_probabilities(draft)]
        token_s, extra_s = self.token_s(self.origin), self._extra_after(self.n_before)
        return draft.only(best_nodes(probabilities, token_s, extra_s)[0])

    def frontier(
        self,
        tree: TreeBuilder,
        probabilities: Sequence[float],
        n_deepest: int,
        n_most: int,
        seconds: Callable[[int], float],
    ) -> list[int]:
        """Return the nodes beyond which the model should look next, at most `n_most`; none ends the tree.

        `probabilities` are those of the paths down to the tree's nodes. Children have depths below `n_deepest`.
        `seconds(n)` is the model's time for a batch of n nodes.
        """
        nodes = [
            node
            for node in tree.open_nodes(n_deepest - 1)
            if tree.ranks[node] > 0 or tree.probabilities[node] >= self.p_min
        ]
        if (n := self.n_tried) is not None:
            return [
                node for node in nodes if tree.is_first_choice[node] and tree.depths[node] < n - 1
            ]
        if self.rule is None:
            return []
        nodes.sort(key=probabilities.__getitem__, reverse=True)
        return best_frontier(
            tree,
            probabilities,
            nodes[:n_most],
            self.rule,
            self.token_s(self.origin),
            self._extra_after(self.n_before),
            n_before=self.n_before,
            next_s=self.next_s,
            seconds=seconds,
        )

    def path_probabilities(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        probabilities: list[float] = []
        for parent, origin, rank, confidence in zip(
            draft.parents, draft.origins, draft.ranks(), draft.probabilities, strict=True
        ):
            chance = self.chance(origin_of_rank(origin, rank), confidence)
            probabilities.append(chance if parent == ROOT else chance * probabilities[parent])
        return probabilities

    def _best_length(self, draft: Draft) -> int:
        """Return the length at which a chain is worth most."""
        best_n, best_s, gain_s, token_s = 0, 0.0, 0.0, self.token_s(draft.origins[0])
        for n, chance in enumerate(self.path_probabilities(draft)[: len(self.extra_s) - 1], 1):
            gain_s += chance * token_s
            if gain_s - self.extra_s[n] > best_s:
                best_n, best_s = n, gain_s - self.extra_s[n]
        return best_n

    def _path_probability(self, confidences: Sequence[float]) -> float:
        """Return the probability that the found tokens and those with these confidences are
        accepted."""
        chance, curve = self.before, self.curves[self.origin]
        for confidence in confidences:
            chance *= curve[bisect.bisect_left(BIN_EDGES, confidence)]
        return chance

    def _extra_after(self, n_before: int) -> Sequence[float]:
        """Return the seconds that n tokens after a draft of `n_before` tokens add to the batch, for each n
        from 0."""
        if not n_before:
            return self.extra_s
        return [seconds - self.extra_s[n_before] for seconds in self.extra_s[n_before:]]


def best_nodes(
    path_probabilities: Sequence[float], token_s: float, extra_s: Sequence[float]
) -> tuple[list[int], float]:
    """Return the nodes of a tree that are worth most together, and what they are worth in seconds.

    The probability that a path is accepted does not grow along it. So the n likeliest nodes always
    form a tree, and it is the best tree of n nodes. `path_probabilities` lists parents before their
    children; `extra_s[n]` are the seconds to verify n nodes. Nodes are returned likeliest first.
    """
    order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
    best_n, best_s, gain_s = 0, 0.0, 0.0
    for n, node in enumerate(order[: len(extra_s) - 1], 1):
        gain_s += path_probabilities[node] * token_s
        if gain_s - extra_s[n] > best_s:
            best_n, best_s = n, gain_s - extra_s[n]
    return order[:best_n], best_s


def best_frontier(
    tree: TreeBuilder,
    probabilities: Sequence[float],
    nodes: Sequence[int],
    rule: StoppingRule,
    token_s: float,
    extra_s: Sequence[float],
    *,
    n_before: int,
    next_s: float,
    seconds: Callable[[int], float],
) -> list[int]:
    """Return the first of `nodes`, which come likeliest first, that are worth looking beyond in one batch.

    `rule` and `token_s` are for the tree's drafter; `extra_s[n]` are the seconds to verify n of the
    tree's nodes, which follow `n_before` found tokens. `probabilities` are those of the paths down to the nodes.
    A look beyond one node alone takes `next_s` seconds, a batch of n looks `seconds(n)`.
    """
    n_room = len(extra_s) - 1
    taken, _ = best_nodes(probabilities, token_s, extra_s)
    # A new node takes one more row, or the row of the least likely node that has one.
    n_taken, insert_s = len(taken), math.inf
    if n_taken < n_room:
        insert_s = extra_s[n_taken + 1] - extra_s[n_taken]
    if taken:
        insert_s = min(insert_s, probabilities[taken[-1]] * token_s)
    best, best_s, gain_s = 0, 0.0, 0.0
    for n, node in enumerate(nodes):
        n_rows = n_taken
        if n_rows >= n_room:  # no row is free: only likelier nodes keep theirs
            n_rows = sum(probabilities[other] >= probabilities[node] for other in taken)
        n_rows = max(n_rows, tree.depths[node] + 1)
        if n_rows >= n_room:
            break
        # The first node may be followed far. Tokens behind the others would compete for the same rows.
        if n == 0:
            gain_s += max(0.0, rule.value(n_before + n_rows, probabilities[node]) + next_s)
        else:
            gain_s += rule.single(probabilities[node], insert_s)
        if node not in taken:  # the node itself would need a row too
            gain_s += min(0.0, probabilities[node] * token_s - insert_s)
        value_s = gain_s - seconds(n + 1)
        if value_s > best_s:
            best, best_s = n + 1, value_s
    return list(nodes[:best])
