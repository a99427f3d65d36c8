"""Match the fixed parts of a tool call in a text that is still being generated."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable

from specgen.text.grammar.free_text import ANY

_ANY_TEXT = re.compile(r"[\w.\-]*")


class NoMatch(enum.Enum):
    """Why something was not found at a place in a text."""

    #: Something else is there.
    ABSENT = enum.auto()
    #: The text ends before it is clear what is there.
    UNCLEAR = enum.auto()


def match(
    literal: str,
    text: str,
    start: int,
) -> int | NoMatch:
    """Match a literal with the text at `start`, and return the index at which it ends there.

    Where the literal has white space, and before a tag or a closing bracket, the text may have any
    white space or none. `ANY` in the literal stands for any name or number.
    """
    for part in _parts(literal):
        if part.isspace():
            start = skip_space(text, start)
            continue
        if part[0] in "<]}":
            start = skip_space(text, start)
        if part == ANY:
            start = _end_of_any(text, start)
        elif text.startswith(part, start):
            start += len(part)
        elif part.startswith(text[start:]):
            return NoMatch.UNCLEAR
        else:
            return NoMatch.ABSENT
    return start


def longest_match(
    literals: Iterable[str],
    text: str,
    start: int,
) -> int | NoMatch:
    """Match several literals with the text at `start`, and return the furthest index reached.

    Returns:
        `UNCLEAR` if none matches yet, but one may with more text; `ABSENT` if none can match.
    """
    results = [match(literal, text, start) for literal in literals]
    ends = [end for end in results if isinstance(end, int)]
    if ends:
        return max(ends)
    if NoMatch.UNCLEAR in results:
        return NoMatch.UNCLEAR
    return NoMatch.ABSENT


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is not white space."""
    while start < len(text) and text[start].isspace():
        start += 1
    return start


@functools.lru_cache(maxsize=256)
def _parts(literal: str) -> list[str]:
    """Split a literal into white space, `ANY`, and words; a ``<`` always begins a new word."""
    return re.findall(rf"\s+|{ANY}|<?[^\s{ANY}<]+|<", literal)


def _end_of_any(text: str, start: int) -> int:
    any_text = _ANY_TEXT.match(text, start)
    assert any_text is not None, "the pattern matches an empty text"
    return any_text.end()
