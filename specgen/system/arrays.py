"""Names for the array types that pass between modules, and what NumPy lacks or does slowly."""

from __future__ import annotations

import bisect
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

#: float32[n_vocab] (a row) or float32[n_rows, n_vocab]: a view into the backend's memory,
#: valid until its next decode.
Logits: TypeAlias = npt.NDArray[np.float32]
#: float32[n_rows, n_embd]: final hidden states, also a view.
Hidden: TypeAlias = npt.NDArray[np.float32]
#: int64[n]: token ids.
TokenArray: TypeAlias = npt.NDArray[np.int64]
#: float64[n]: probabilities.
ProbArray: TypeAlias = npt.NDArray[np.float64]
#: bool[n].
BoolArray: TypeAlias = npt.NDArray[np.bool_]
#: float32[m] or float64[m]: logits as the samplers so far have left them, or probabilities.
Scores: TypeAlias = npt.NDArray[np.floating[Any]]

#: The errors that reading arrays from a damaged file raises, which may seem to be encrypted, for
#: example.
FILE_DAMAGE: Final = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
#: The usual size of the groups in `_candidates`.
_GROUP_SIZE = 64
#: Arrays with fewer scores are partitioned without groups.
_MIN_GROUPED = 2048


def best(scores: Scores, n: int) -> TokenArray:
    """Return the positions of the n largest scores, largest first; ties are ordered by position.

    Args:
        scores: The scores, float[m].
        n: The maximum number of positions.

    Returns:
        The positions, int64[k] with k <= n: scores of -infinity are left out.
    """
    if not 0 < n < len(scores):
        return _sorted_best(scores, n)
    candidates = _candidates(scores, n)
    return candidates[_sorted_best(scores[candidates], n)]


def _sorted_best(scores: Scores, n: int) -> TokenArray:
    """Do what `best` does, by sorting all scores."""
    order = (-scores).argsort(kind="stable")[:n]
    if len(order) and scores[order[-1]] == -np.inf:
        n_possible = np.count_nonzero(scores[order] > -np.inf)
        order = order[:n_possible]
    return order


def _candidates(scores: Scores, n: int) -> TokenArray:
    """Return the ascending positions of some scores, among them the n largest (0 < n < m).

    The scores are divided into groups. The n largest maxima of groups are n of the scores, so the
    smallest of them is a lower bound for the n-th largest score. Only groups whose maximum reaches
    this bound are searched.
    """
    # There are at least 2n groups, so that the bound is close.
    group_size = min(_GROUP_SIZE, len(scores) // (2 * n))
    if group_size < 4 or len(scores) < _MIN_GROUPED:
        bound = np.partition(scores, len(scores) - n)[len(scores) - n]
        return np.flatnonzero(scores >= bound)
    # A group is a column of the table, and not a row of neighbouring scores, so that the maxima of
    # many groups are computed at once (SIMD).
    n_groups = len(scores) // group_size
    n_grouped = n_groups * group_size
    table = scores[:n_grouped].reshape(group_size, n_groups)
    maxima = table.max(axis=0)
    bound = np.partition(maxima, n_groups - n)[n_groups - n]
    columns = np.flatnonzero(maxima >= bound)
    if len(columns) > 4 * n:  # many scores are equal
        return np.flatnonzero(scores >= bound)
    rows, hits = np.nonzero(table[:, columns] >= bound)
    in_groups = rows * n_groups + columns[hits]
    after_groups = np.flatnonzero(scores[n_grouped:] >= bound) + n_grouped
    return np.concatenate((in_groups, after_groups))


def interpolate(
    x: float,
    places: Sequence[float],
    values: Sequence[float],
) -> float:
    """Interpolate linearly at `x`, as `np.interp` does, but several times as fast for one number.

    Args:
        x: Where to interpolate.
        places: The ascending places at which the values are known.
        values: The values; outside of the places, the first or the last one is returned.
    """
    left = bisect.bisect_right(places, x) - 1
    if left < 0:
        return values[0]
    if left >= len(places) - 1:
        return values[left]
    right = left + 1
    slope = (values[right] - values[left]) / (places[right] - places[left])
    return values[left] + slope * (x - places[left])
