"""How far two sequences agree, and whether a text ends inside a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr

#: Tokens that are compared at once: prompts may have many thousands.
_PIECE = 256


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    n, n_most = 0, min(len(one), len(other))
    while n < n_most and list(one[n : n + _PIECE]) == list(other[n : n + _PIECE]):
        n += _PIECE
    while n < n_most and one[n] == other[n]:
        n += 1
    return min(n, n_most)


def partial_match_length(text: AnyStr, mark: AnyStr) -> int:
    """Return how many characters at the end of a text may begin a mark that is not there as a
    whole.
    """
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
