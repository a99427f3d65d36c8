"""How far two texts are the same."""

from __future__ import annotations

from collections.abc import Sequence

#: Tokens that are compared at once: prompts may have many thousands.
_PIECE = 256


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts, in tokens."""
    n = 0
    while n < len(one) and list(one[n : n + _PIECE]) == list(other[n : n + _PIECE]):
        n += min(_PIECE, len(one) - n)
    for first, second in zip(one[n : n + _PIECE], other[n : n + _PIECE], strict=False):
        if first != second:
            break
        n += 1
    return n
