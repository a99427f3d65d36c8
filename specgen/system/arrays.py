"""Names for the array types that pass between modules, and the largest values of an array."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, TypeAlias

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

#: Size of the groups whose maxima bound the n-th largest score from below.
_GROUP = 64
#: A smaller array is partitioned at once, without groups.
_SMALL = 2048


def best(scores: Scores, n: int) -> TokenArray:
    """Return the positions of the n largest of float[m], largest first; maxima of groups leave few
    to sort.
    """
    positions = _likely(scores, n) if 0 < n < len(scores) else None
    values = scores if positions is None else scores[positions]
    # Positions ascend, and a stable sort keeps equals in that order.
    order = (-values).argsort(kind="stable")[:n]
    if len(order) and values[order[-1]] == -np.inf:
        order = order[: np.count_nonzero(values[order] > -np.inf)]
    return order if positions is None else positions[order]


def _likely(scores: Scores, n: int) -> TokenArray:
    """Return ascending positions of some scores, which include the n largest (0 < n < m)."""
    group = min(_GROUP, len(scores) // (2 * n))
    if group < 4 or len(scores) < _SMALL:
        bound = np.partition(scores, len(scores) - n)[len(scores) - n]
        return np.flatnonzero(scores >= bound)
    # A group is a column, not a stretch of the row, so that maxima are taken by whole SIMD
    # registers.
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


def interpolate(x: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Return what `np.interp` does for a single number, several times as fast."""
    place = bisect.bisect_right(places, x) - 1
    if not 0 <= place < len(places) - 1:
        return values[max(0, place)]
    slope = (values[place + 1] - values[place]) / (places[place + 1] - places[place])
    return slope * (x - places[place]) + values[place]
