"""When to stop drafting: optimal stopping, worked out backwards.

A draft grows token by token. Before each one a model has to be run, for `next_s` seconds; then
it is known how sure the model is, and so how likely the token is to be accepted; and for each
token that is taken the target's batch has a row more. Whether to run the model again depends on
what it will say then, so the value of going on is worked out from the longest draft down.
"""

from __future__ import annotations

import numpy as np

from specgen.arrays import ProbArray

#: The values are worked out for these chances that the draft so far is accepted whole, and lie
#: between those of their neighbours for others.
_N_GRID = 20
_LEAST = 0.01
_LOG_GRID = np.linspace(np.log(_LEAST), 0.0, _N_GRID)
_GRID = np.exp(_LOG_GRID)


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
        self._batch_s = batch_s
        self._token_s = token_s
        n_max = len(batch_s) - 1
        #: V at the grid's points, a row for each n.
        self._values = np.zeros((n_max + 1, _N_GRID))
        log_chances = np.log(np.maximum(chances, _LEAST))
        after = np.maximum(_LOG_GRID[:, None] + log_chances[None, :], _LOG_GRID[0])
        gains = token_s * _GRID[:, None] * chances[None, :]
        for n in range(n_max - 1, -1, -1):
            further = np.interp(after, _LOG_GRID, np.maximum(self._values[n + 1], 0.0))
            taken = np.maximum(gains - (batch_s[n + 1] - batch_s[n]) + further, 0.0)
            self._values[n] = taken @ frequencies - next_s
        self._log_grid = _LOG_GRID.tolist()
        self._step = (self._log_grid[-1] - self._log_grid[0]) / (_N_GRID - 1)

    @property
    def n_max(self) -> int:
        return len(self._batch_s) - 1

    def value(self, n_drafted: int, chance: float) -> float:
        """V: what a look at the next token promises, in seconds; below 0 it is not worth it."""
        if n_drafted >= self.n_max:
            return 0.0
        values = self._values[n_drafted]
        place = (float(np.log(max(chance, _LEAST))) - self._log_grid[0]) / self._step
        index = min(int(place), _N_GRID - 2)
        share = place - index
        return float(values[index] * (1.0 - share) + values[index + 1] * share)

    def takes(self, n_drafted: int, chance: float) -> float:
        """What it promises to take one more token, with which the draft's chance is `chance`."""
        if n_drafted >= self.n_max:
            return -1.0
        cost_s = float(self._batch_s[n_drafted + 1] - self._batch_s[n_drafted])
        return chance * self._token_s - cost_s + max(0.0, self.value(n_drafted + 1, chance))
