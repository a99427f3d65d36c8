"""How far two texts are the same."""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens that are compared at once: prompts may have many thousands.
_PIECE = 256


def n_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts, in tokens or in characters."""
    n, n_most = 0, min(len(one), len(other))
    while n < n_most and list(one[n : n + _PIECE]) == list(other[n : n + _PIECE]):
        n += _PIECE
    while n < n_most and one[n] == other[n]:
        n += 1
    return min(n, n_most)
