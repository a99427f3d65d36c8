"""How far two sequences agree, and whether a text ends in the middle of a mark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr

#: How many items are compared at once: prompts may have many thousands of tokens.
_CHUNK = 256


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items two sequences have in common at their start."""
    longest = min(len(one), len(other))
    length = 0
    # Whole chunks first: comparing two lists is much faster than comparing their items.
    while length < longest and (
        list(one[length : length + _CHUNK]) == list(other[length : length + _CHUNK])
    ):
        length += _CHUNK
    while length < longest and one[length] == other[length]:
        length += 1
    return min(length, longest)


def partial_match_length(text: AnyStr, mark: AnyStr) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark.

    A complete mark does not count.
    """
    longest = min(len(text), len(mark) - 1)
    for length in range(longest, 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
