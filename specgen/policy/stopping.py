"""When to stop drafting: optimal stopping, solved backwards.

A draft grows token by token. For each token the model has to look first, which takes `next_s`
seconds. The look shows how sure the model is, and so how likely the token is to be accepted. Each
token that is taken adds a row to the target's batch. The value of another look depends on the
looks that may follow it, so values are computed from the longest draft backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specgen.arrays import ProbArray

#: Values are computed for these chances that the draft so far is accepted whole, and interpolated
#: between them.
_N_GRID = 20
_LEAST = 0.01
_LOG_LEAST = math.log(_LEAST)
_STEP = -_LOG_LEAST / (_N_GRID - 1)
_LOG_GRID = np.linspace(_LOG_LEAST, 0.0, _N_GRID)
_GRID = np.exp(_LOG_GRID)
#: A rule is computed anew when a price has changed by this share of a token's worth, or after this
#: many looks and judged tokens.
_NEWS = 0.05
_N_NEWS = 24


class StoppingRule:
    """The value, in seconds saved, of going on with a draft of n tokens.

    `batch_s` is float64[n_max + 1]: the target's seconds for a batch with a draft of 0 to n_max
    tokens. `next_s` are the seconds of a look at the next token, `token_s` the seconds that an
    accepted token is worth. `frequencies` and `chances`, float64[n_bins], are how often the next
    token falls in a bin of confidence, and how often a token of that bin is accepted.

    With A the chance that the draft so far is accepted whole, V(n, A) = -next_s + the mean over
    bins b of max(0, A chances[b] token_s - (batch_s[n + 1] - batch_s[n]) +
    max(0, V(n + 1, A chances[b]))); V(n_max, A) = 0. That is: look, then take the token or not,
    then look again or not.
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
        # One matrix product adds the value behind a token, its gain and its cost, for each point of
        # the grid and each bin: calls take longer than the arithmetic.
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
        # Only a few numbers are read at a time, for which lists are faster.
        self._values: list[list[float]] = values.tolist()
        self._costs_s = costs_s

    @property
    def n_max(self) -> int:
        return self._n_max

    def value(self, n_drafted: int, chance: float) -> float:
        """V: the expected gain of a look at the next token, in seconds; below 0 it is not worth it."""
        if n_drafted >= self._n_max:
            return 0.0
        values = self._values[n_drafted]
        place = (math.log(max(chance, _LEAST)) - _LOG_LEAST) / _STEP
        index = min(int(place), _N_GRID - 2)
        share = place - index
        return values[index] * (1.0 - share) + values[index + 1] * share

    def single(self, chance: float, cost_s: float) -> float:
        """The expected gain, in seconds, of one more token after a draft with this chance, if taking it
        costs `cost_s`, its look costs nothing, and no look follows: the mean of
        max(0, A chances[b] token_s - cost_s)."""
        return float(np.maximum(chance * self._gains_s - cost_s, 0.0) @ self._frequencies)

    def takes(self, n_drafted: int, chance: float) -> float:
        """The expected gain of taking one more token, in seconds; with it, the draft's chance is
        `chance`."""
        if n_drafted >= self._n_max:
            return -1.0
        gain_s = chance * self._token_s - self._costs_s[n_drafted]
        return gain_s + max(0.0, self.value(n_drafted + 1, chance))


@dataclass(frozen=True, slots=True)
class KnownRule:
    """A stopping rule, the prices in seconds that it was computed for, and the number of looks and
    judged tokens (`Chances.version`) by then."""

    rule: StoppingRule
    n_judged: int
    next_s: float
    token_s: float
    row_s: float

    def holds(self, n_judged: int, next_s: float, token_s: float, row_s: float) -> bool:
        """Whether the rule is still good enough: computing a new one takes longer than it would save."""
        most = _NEWS * self.token_s
        return (
            n_judged - self.n_judged < _N_NEWS
            and abs(self.next_s - next_s) <= most
            and abs(self.token_s - token_s) <= most
            and abs(self.row_s - row_s) <= most
        )


def row_bucket(token_s: float, row_s: float) -> int:
    """A number for the price of a row, as a share of a token's worth; similar prices have the same."""
    return round(row_s / (_NEWS * token_s)) if token_s > 0.0 else 0


def _interpolation(chances: ProbArray) -> ProbArray:
    """The matrix that turns values at the grid's points into values at each point times each chance:
    float64[_N_GRID * n_bins, _N_GRID]. Products below the lowest point count as that point."""
    places = np.log(np.maximum(chances, _LEAST)) / _STEP + np.arange(_N_GRID)[:, None]
    places = np.maximum(places, 0.0).ravel()
    index = np.minimum(places.astype(np.intp), _N_GRID - 2)
    share = places - index
    weights = np.zeros((len(places), _N_GRID))
    rows = np.arange(len(places))
    weights[rows, index] = 1.0 - share
    weights[rows, index + 1] = share
    return weights
