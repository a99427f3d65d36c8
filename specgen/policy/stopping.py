"""When to stop drafting: optimal stopping, worked out backwards.

A draft grows token by token. Before each one a model has to be run, for `next_s` seconds; then
it is known how sure the model is, and so how likely the token is to be accepted; and for each
token that is taken the target's batch has a row more. Whether to run the model again depends on
what it will say then, so the value of going on is worked out from the longest draft down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specgen.arrays import ProbArray

#: The values are worked out for these chances that the draft so far is accepted whole, and lie
#: between those of their neighbours for others.
_N_GRID = 20
_LEAST = 0.01
_LOG_LEAST = math.log(_LEAST)
_STEP = -_LOG_LEAST / (_N_GRID - 1)
_LOG_GRID = np.linspace(_LOG_LEAST, 0.0, _N_GRID)
_GRID = np.exp(_LOG_GRID)
#: A rule is worked out anew when a price has changed by this share of a token's time, or after so
#: many tokens were judged.
_NEWS = 0.05
_N_NEWS = 24


class StoppingRule:
    """The value, in seconds saved, of going on with a draft of n tokens.

    `batch_s` is float64[n_max + 1]: the target's seconds for a batch with a draft of 0 to n_max
    tokens. `next_s` are the seconds for a look at the next token, `token_s` those that an
    accepted token is worth. `frequencies` and `chances`, float64[n_bins], tell how often a next
    token is of a bin, and how often such a token is accepted.

    With A the chance that the draft so far is accepted whole, V(n, A) = -next_s + the mean over
    bins b of max(0, A chances[b] token_s - (batch_s[n + 1] - batch_s[n]) +
    max(0, V(n + 1, A chances[b]))); V(n_max, A) = 0: to look, and then to take the token or not,
    and then to look again or not.
    """

    def __init__(
        self,
        batch_s: ProbArray,
        next_s: float,
        token_s: float,
        frequencies: ProbArray,
        chances: ProbArray,
    ) -> None:
        self._n_max = len(batch_s) - 1
        self._token_s = token_s
        self._frequencies, self._gains_s = frequencies, token_s * chances
        costs_s: list[float] = np.diff(batch_s).tolist()
        # What lies behind a token, what it gains and what it costs, for each of the grid's points
        # and each bin, come of one product: calls take longer than the arithmetic.
        terms = np.empty((_N_GRID * len(chances), _N_GRID + 2))
        terms[:, :_N_GRID] = _interpolation(chances)
        terms[:, _N_GRID] = (token_s * _GRID[:, None] * chances).ravel()
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
        # A few numbers at a time are looked at: lists are quicker.
        self._values: list[list[float]] = values.tolist()
        self._costs_s = costs_s

    @property
    def n_max(self) -> int:
        return self._n_max

    def value(self, n_drafted: int, chance: float) -> float:
        """V: what a look at the next token promises, in seconds; below 0 it is not worth it."""
        if n_drafted >= self._n_max:
            return 0.0
        values = self._values[n_drafted]
        place = (math.log(max(chance, _LEAST)) - _LOG_LEAST) / _STEP
        index = min(int(place), _N_GRID - 2)
        share = place - index
        return values[index] * (1.0 - share) + values[index + 1] * share

    def single(self, chance: float, cost_s: float) -> float:
        """What one more token promises after a draft with this chance, in seconds, if it costs so
        much to take it and nothing to look at it, and nothing is looked at behind it: the mean of
        max(0, A chances[b] token_s - cost_s)."""
        return float(np.maximum(chance * self._gains_s - cost_s, 0.0) @ self._frequencies)

    def takes(self, n_drafted: int, chance: float) -> float:
        """What it promises to take one more token, with which the draft's chance is `chance`."""
        if n_drafted >= self._n_max:
            return -1.0
        gain_s = chance * self._token_s - self._costs_s[n_drafted]
        return gain_s + max(0.0, self.value(n_drafted + 1, chance))


@dataclass(frozen=True, slots=True)
class KnownRule:
    """A stopping rule, and what it was worked out for: prices in seconds, and how many tokens had
    been judged."""

    rule: StoppingRule
    n_judged: int
    next_s: float
    token_s: float
    row_s: float

    def holds(self, n_judged: int, next_s: float, token_s: float, row_s: float) -> bool:
        """Whether the rule is still good enough: to work it out takes longer than it would save."""
        most = _NEWS * self.token_s
        return (
            n_judged - self.n_judged < _N_NEWS
            and abs(self.next_s - next_s) <= most
            and abs(self.token_s - token_s) <= most
            and abs(self.row_s - row_s) <= most
        )


def row_bucket(token_s: float, row_s: float) -> int:
    """Rows of much the same price, as a share of a token's time, have the same number."""
    return round(row_s / (_NEWS * token_s)) if token_s > 0.0 else 0


def _interpolation(chances: ProbArray) -> ProbArray:
    """What makes values at the grid's points into those at each point times each chance:
    float64[_N_GRID * n_bins, _N_GRID]. A point below the least one is taken for that."""
    places = np.log(np.maximum(chances, _LEAST)) / _STEP + np.arange(_N_GRID)[:, None]
    places = np.maximum(places, 0.0).ravel()
    index = np.minimum(places.astype(np.intp), _N_GRID - 2)
    share = places - index
    weights = np.zeros((len(places), _N_GRID))
    rows = np.arange(len(places))
    weights[rows, index] = 1.0 - share
    weights[rows, index + 1] = share
    return weights
