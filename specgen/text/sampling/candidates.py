"""The tokens that a chain of samplers still considers, and the search for the best of many.

A vocabulary has 150 thousand tokens, and a chain like the default keeps forty. So a chain begins
with the row of logits itself, without a copy. The first sampler that drops tokens picks the few
that it keeps, without sorting the others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import BackendError
from specgen.system.arrays import Logits, TokenArray

#: float32[m] or float64[m]: logits as the samplers so far have left them.
Scores: TypeAlias = npt.NDArray[np.floating[Any]]

#: Size of the groups whose maxima bound the n-th largest score from below.
_GROUP = 64
#: If a row's largest logit is this near to 0, the sum of all e^logit is an ordinary float32, and terms
#: that underflow to 0 do not matter.
_EXP_RANGE = 60.0
#: A smaller vocabulary is partitioned at once, without groups.
_SMALL = 2048


class Candidates(NamedTuple):
    """Tokens and their scores.

    They are either ranked, by descending score and among equals by ascending id, or sorted by
    ascending id. A score may be minus infinity: such a token cannot be drawn.
    """

    #: float[m]. For the whole vocabulary this is the row of logits itself, as long as no sampler has
    #: changed it, so it is never written to.
    scores: Scores
    #: int64[m]; None is the whole vocabulary: the ids are 0 to m - 1.
    token_ids: TokenArray | None
    #: The number of candidates that llama.cpp would count here. It keeps tokens with a score of minus
    #: infinity in its list, and dynamic temperature depends on the number.
    size: int
    is_ranked: bool

    @classmethod
    def whole(cls, scores: Scores) -> Candidates:
        """Return all tokens of a vocabulary, by their scores, float[n_vocab]."""
        return cls(scores, None, len(scores), False)

    def take(self, positions: TokenArray, size: int, is_ranked: bool) -> Candidates:
        """Return the candidates at int64[n] positions, which must be in the order that `is_ranked` states."""
        scores = self.scores[positions].astype(np.float64)
        token_ids = positions if self.token_ids is None else self.token_ids[positions]
        return Candidates(scores, token_ids, size, is_ranked)

    def first(self, n: int) -> Candidates:
        """Return the first n of ranked candidates."""
        assert self.is_ranked
        assert self.token_ids is not None
        return Candidates(self.scores[:n], self.token_ids[:n], n, True)

    def ids(self) -> TokenArray:
        """Return the token ids, int64[m]."""
        return np.arange(len(self.scores)) if self.token_ids is None else self.token_ids

    def top(self) -> float:
        """Return the largest score."""
        return float(self.scores[0] if self.is_ranked else self.scores.max())

    def by_id(self) -> Candidates:
        """Return the same candidates, by ascending id."""
        if not self.is_ranked:
            return self
        assert self.token_ids is not None
        order = self.token_ids.argsort()
        return self._replace(
            scores=self.scores[order], token_ids=self.token_ids[order], is_ranked=False
        )


def best(scores: Scores, n: int) -> TokenArray:
    """Return the positions of the n largest of float[m], largest first, the lowest first among equals.

    Scores of minus infinity are left out, so there may be fewer than n. Scores must not be NaN.
    One pass finds the maxima of small groups. The n-th largest maximum bounds the n-th largest
    score from below, so that only a few scores are ever sorted.
    """
    positions = _candidates(scores, n) if 0 < n < len(scores) else None
    values = scores if positions is None else scores[positions]
    # Positions ascend, and a stable sort keeps equals in that order.
    order = (-values).argsort(kind="stable")[:n]
    if values[order[-1]] == -np.inf:
        order = order[: np.count_nonzero(values[order] > -np.inf)]
    return order if positions is None else positions[order]


def _candidates(scores: Scores, n: int) -> TokenArray:
    """Return ascending positions of some scores, which include the n largest (0 < n < m)."""
    group = min(_GROUP, len(scores) // (2 * n))
    if group < 4 or len(scores) < _SMALL:
        bound = np.partition(scores, len(scores) - n)[len(scores) - n]
        return np.flatnonzero(scores >= bound)
    # A group is a column of a table, not a stretch of the row, so that maxima are taken by whole SIMD
    # registers (17 microseconds instead of 140 for 152 thousand logits).
    n_groups = len(scores) // group
    n_grouped = n_groups * group
    table = scores[:n_grouped].reshape(group, n_groups)
    maxima = table.max(axis=0)
    bound = np.partition(maxima, n_groups - n)[n_groups - n]
    columns = np.flatnonzero(maxima >= bound)
    if len(columns) > 4 * n:  # ties
        return np.flatnonzero(scores >= bound)
    rows, hits = np.nonzero(table[:, columns] >= bound)
    rest = np.flatnonzero(scores[n_grouped:] >= bound)
    return np.concatenate((rows * n_groups + columns[hits], rest + n_grouped))


def argmax(logits: Logits) -> int:
    """Return the most likely token of a row, float32[n_vocab]; the lowest id among equals.

    Raise `BackendError` if the largest logit is not finite: NaN would win every comparison.
    """
    token_id = int(logits.argmax())
    check_finite(float(logits[token_id]))
    return token_id


def top_probability(logits: Logits) -> float:
    """Return the largest probability of a row at temperature 1, before any truncation."""
    top = float(logits[logits.argmax()])
    check_finite(top)
    if abs(top) < _EXP_RANGE:  # spares a pass over the row
        masses = np.exp(logits)
        return math.exp(top) / float(masses.sum())
    with np.errstate(over="ignore"):  # from one end of float32 to the other
        masses = logits - np.float32(top)
    np.exp(masses, out=masses)  # in place: another row of a large vocabulary leaves the CPU's cache
    return 1.0 / float(masses.sum())


def check_finite(logit: float) -> None:
    """Raise `BackendError` if the largest logit of a row is not finite."""
    if not math.isfinite(logit):
        raise BackendError(
            f"the model's largest logit is {logit}: the file is damaged, or this build of "
            "llama.cpp computes wrongly on this machine",
            hint="run `specgen doctor`",
        )
