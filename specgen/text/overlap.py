"""Compares sequences from the start, and finds the beginning of a mark at the end of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import AnyStr

#: The number of items that are compared at once, since prompts may have many thousands of tokens.
_CHUNK = 256


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of items that two sequences have in common at their start."""
    max_length = min(len(one), len(other))
    length = 0
    # Whole chunks first: comparing two lists is much faster than comparing their items.
    while length < max_length and (
        list(one[length : length + _CHUNK]) == list(other[length : length + _CHUNK])
    ):
        length += _CHUNK
    while length < max_length and one[length] == other[length]:
        length += 1
    return min(length, max_length)  # the last chunk may have been shorter


def partial_match_length(text: AnyStr, mark: AnyStr) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a mark.

    A complete mark does not count.
    """
    max_length = min(len(text), len(mark) - 1)
    for length in range(max_length, 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
