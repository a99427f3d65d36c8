"""How far a draft goes while it is expected to save time: optimal stopping for chains, the best nodes of trees.

Where an answer ends is another matter: `specgen.text.sequence`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specgen.method.acceptance_rates import BIN_EDGES, NGRAM_ORIGINS, origin_of_rank
from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray

#: Values are computed for these probabilities that the draft so far is accepted whole, and interpolated
#: between them.
_N_GRID = 20
_LEAST = 0.01
_STEP = -math.log(_LEAST) / (_N_GRID - 1)
_GRID = np.exp(np.linspace(math.log(_LEAST), 0.0, _N_GRID))
#: Second guesses count with this share of their estimated probability: the cost of a row is certain, and
#: choosing among many small expected gains favours the overestimated ones.
_SECOND = 0.6


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
        self.n_max = len(batch_s) - 1
        self._token_s = token_s
        self._costs_s: list[float] = np.diff(batch_s).tolist()
        # Where each point of the grid comes to lie once a token of each bin was accepted.
        places = np.log(np.maximum(acceptance, _LEAST)) / _STEP + np.arange(_N_GRID)[:, None]
        places = np.maximum(places, 0.0).ravel()
        below = np.minimum(places.astype(np.intp), _N_GRID - 2)
        rows = np.arange(len(places))
        interpolation = np.zeros((len(places), _N_GRID))
        interpolation[rows, below + 1] = places - below
        interpolation[rows, below] = 1.0 - (places - below)
        gains_s = np.outer(_GRID, token_s * acceptance).ravel()
        values = np.zeros((self.n_max + 1, _N_GRID))
        for n in range(self.n_max - 1, -1, -1):
            after_s = interpolation @ np.maximum(values[n + 1], 0.0)
            taken_s = np.maximum(after_s + (gains_s - self._costs_s[n]), 0.0)
            values[n] = taken_s.reshape(_N_GRID, -1) @ frequencies - next_s
        # Only a few numbers are read at a time, for which lists are faster.
        self._values: list[list[float]] = values.tolist()

    def value(self, n_drafted: int, chance: float) -> float:
        """Return the expected gain V of a look at the next token, in seconds; below 0 the look does not
        pay."""
        if n_drafted >= self.n_max:
            return 0.0
        values = self._values[n_drafted]
        place = math.log(max(chance, _LEAST) / _LEAST) / _STEP
        index = min(int(place), _N_GRID - 2)
        return values[index] + (place - index) * (values[index + 1] - values[index])

    def takes(self, n_drafted: int, chance: float) -> float:
        """Return the expected gain of taking one more token, in seconds; with it, the draft's probability
        is `chance`."""
        if n_drafted >= self.n_max:
            return -1.0
        gain_s = chance * self._token_s - self._costs_s[n_drafted]
        return gain_s + max(0.0, self.value(n_drafted + 1, chance))


@dataclass(frozen=True, slots=True)
class WhilePaying:
    """Drafts as long as another token is expected to save time.

    `curve` returns, for an origin, the probability that its tokens are accepted, by bin of the drafter's
    confidence. An expected token counts `ngram_token_s` or `model_token_s` seconds, and `extra_s[n]` are
    the seconds that n drafted tokens add to the target's batch. A look of the drafter `origin` takes
    `next_s` seconds; without a `rule` it drafts nothing.
    """

    origin: str
    curve: Callable[[str], Sequence[float]]
    ngram_token_s: float
    model_token_s: float
    extra_s: Sequence[float]
    rule: StoppingRule | None = None
    next_s: float = 0.0
    p_min: float = 0.0
    needs_confidence: bool = True

    def token_s(self, origin: str) -> float:
        """Return the seconds that an expected token of an origin counts."""
        return self.ngram_token_s if origin in NGRAM_ORIGINS else self.model_token_s

    def worth_of(self, draft: Draft) -> float:
        """Return the expected gain of verifying a draft, in seconds; 0 for none."""
        if not len(draft):
            return 0.0
        chances = self.path_probabilities(draft)[: len(self.extra_s) - 1]
        return sum(chances) * self.token_s(draft.origins[0]) - self.extra_s[len(chances)]

    def chance(self, origin: str, confidence: float | None) -> float:
        """Return the probability that a token is accepted if all before it are."""
        confidence = 1.0 if confidence is None else confidence
        return self.curve(origin)[bisect.bisect_left(BIN_EDGES, confidence)]

    def guess_probability(self, rank: int, confidence: float) -> float:
        """Return the probability of the drafter's guess number `rank`, from 0, for one position of a tree."""
        chance = self.chance(origin_of_rank(self.origin, rank), confidence)
        return chance if rank == 0 else _SECOND * chance

    def wants_token(self, confidences: Sequence[float]) -> bool:
        if confidences[-1] < self.p_min or self.rule is None:
            return False
        return self.rule.takes(len(confidences) - 1, self._path_probability(confidences)) > 0.0

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        if self.rule is None:
            return False
        return self.rule.value(len(confidences), self._path_probability(confidences)) > 0.0

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes worth verifying, those of a tree likeliest first. Drawn nodes, and all before them, are
        never dropped, since that would bias the text."""
        n_drawn = draft.n_drawn
        if not len(draft) or (n_drawn and not draft.has_free_end):
            return draft
        chances = self.path_probabilities(draft)
        if draft.is_chain:
            token_s = self.token_s(draft.origins[0])
            n_best = _best_number(chances, token_s, self.extra_s)
            return draft.first(max(n_drawn, n_best))
        token_s = self.token_s(draft.origins[n_drawn])
        extra_s = [seconds - self.extra_s[n_drawn] for seconds in self.extra_s[n_drawn:]]
        behind = best_nodes(chances[n_drawn:], token_s, extra_s)
        return draft.only([*range(n_drawn), *(n_drawn + node for node in behind)])

    def path_probabilities(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        probabilities: list[float] = []
        for parent, origin, rank, confidence in zip(
            draft.parents, draft.origins, draft.ranks(), draft.probabilities, strict=True
        ):
            chance = self.chance(origin_of_rank(origin, rank), confidence)
            probabilities.append(chance if parent == ROOT else chance * probabilities[parent])
        return probabilities

    def _path_probability(self, confidences: Sequence[float]) -> float:
        """Return the probability that tokens with these confidences are accepted."""
        chance, curve = 1.0, self.curve(self.origin)
        for confidence in confidences:
            chance *= curve[bisect.bisect_left(BIN_EDGES, confidence)]
        return chance


def best_nodes(
    path_probabilities: Sequence[float], token_s: float, extra_s: Sequence[float]
) -> list[int]:
    """Return the nodes of a tree that are worth most together, likeliest first.

    The probability that a path is accepted does not grow along it. So the n likeliest nodes always
    form a tree, and it is the best tree of n nodes (Sequoia, arXiv:2402.12374). `path_probabilities`
    lists parents before their children; `extra_s[n]` are the seconds to verify n nodes.
    """
    order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
    chances = [path_probabilities[node] for node in order]
    return order[: _best_number(chances, token_s, extra_s)]


def _best_number(chances: Sequence[float], token_s: float, extra_s: Sequence[float]) -> int:
    """Return how many of the first nodes, accepted with these probabilities, are worth most together."""
    best_n, best_s, gain_s = 0, 0.0, 0.0
    for n, chance in enumerate(chances[: len(extra_s) - 1], 1):
        gain_s += chance * token_s
        if gain_s - extra_s[n] > best_s:
            best_n, best_s = n, gain_s - extra_s[n]
    return best_n
