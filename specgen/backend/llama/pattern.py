"""Regular expressions of JSON schemas, in the part of their syntax that the converter reads.

It passes most escapes on to GBNF, which has others, lets sets match quotes and backslashes that
would break the JSON string around them, and never returns from a bracket that closes nothing.
The expressions written here have none of that: sets without escapes but for code points, letters,
groups and repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn, TypeAlias

Ranges: TypeAlias = list[tuple[int, int]]

_LAST = 0x10FFFF
#: What cannot stand in a JSON string as it is: control characters, quote, backslash.
_FORBIDDEN: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0)]
_CODE_POINT = re.compile(r"u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})")
_COUNT = re.compile(r"\{\d+(,\d*)?\}")


def portable_pattern(pattern: str, fail: Callable[[str], NoReturn]) -> str:
    """`pattern` for the texts that need no escape within a JSON string.

    Calls `fail` with the reason where the pattern means something else.
    """
    return _Pattern(pattern, fail).rewrite()


class _Pattern:
    def __init__(self, pattern: str, fail: Callable[[str], NoReturn]) -> None:
        self._shown = pattern
        self._report = fail
        if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$":
            self._fail("must begin with ^ and end with $")
        self._text = pattern[1:-1]
        self._position = 0
        self._depth = 0
        self._alternatives = False

    def rewrite(self) -> str:
        written = []
        while self._position < len(self._text):
            written.append(self._unit())
        if self._depth:
            self._fail("has a group that is not closed")
        body = "".join(written)
        return f"^({body})$" if self._alternatives else f"^{body}$"

    def _fail(self, what: str) -> NoReturn:
        self._report(f"pattern {self._shown[:80]!r} {what}")

    def _next(self) -> str:
        if self._position >= len(self._text):
            self._fail("ends too early")
        self._position += 1
        return self._text[self._position - 1]

    def _unit(self) -> str:
        character = self._next()
        if character == "(":
            return self._group()
        if character == ")":
            self._depth -= 1
            if self._depth < 0:
                self._fail("has a ')' that closes nothing")
            return ")"
        if character == "|":
            self._alternatives |= self._depth == 0
            return "|"
        if character in "*+?{":
            return self._repetition(character)
        if character == "[":
            return self._write(self._set())
        if character == ".":
            return self._write(_without([(0, _LAST)], [(0x0A, 0x0A), (0x0D, 0x0D)]))
        if character == "\\":
            return self._write(self._escape())
        if character in "]}":
            self._fail(f"has a {character!r} that closes nothing")
        if character in "^$":
            self._fail(f"has a {character!r} in the middle")
        return self._write([(ord(character), ord(character))])

    def _group(self) -> str:
        self._depth += 1
        if self._text.startswith("?", self._position):
            if not self._text.startswith("?:", self._position):
                self._fail("looks ahead or behind, or names a group: not supported")
            self._position += 2
        return "("

    def _repetition(self, character: str) -> str:
        if character == "{":
            count = _COUNT.match(self._text, self._position - 1)
            if count is None:
                self._fail("has a '{' that is no repetition")
            character = count.group()
            self._position = count.end()
        if self._position > 0 and self._text.startswith("?", self._position):
            self._position += 1  # as few as possible: the same texts
        return character

    def _set(self) -> Ranges:
        negated = self._text.startswith("^", self._position)
        self._position += negated
        ranges: Ranges = []
        while not self._text.startswith("]", self._position):
            first = self._member()
            if (
                self._text.startswith("-", self._position)
                and not self._text.startswith("-]", self._position)
                and len(first) == 1
                and first[0][0] == first[0][1]
            ):
                self._position += 1
                last = self._member()
                if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    self._fail("has a range that is none")
                ranges.append((first[0][0], last[0][1]))
            else:
                ranges += first
        self._position += 1
        return _without([(0, _LAST)], ranges) if negated else ranges

    def _member(self) -> Ranges:
        character = self._next()
        return self._escape() if character == "\\" else [(ord(character), ord(character))]

    def _escape(self) -> Ranges:
        code_point = _CODE_POINT.match(self._text, self._position)
        if code_point is not None:
            self._position = code_point.end()
            value = int(code_point.group(1) or code_point.group(2), 16)
            return [(value, value)]
        character = self._next()
        classes = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
        if character in classes:
            return classes[character]
        if character.lower() in classes:
            return _without([(0, _LAST)], classes[character.lower()])
        if character.isalnum():
            self._fail(f"has the escape \\{character}: not supported")
        return [(ord(character), ord(character))]

    def _write(self, ranges: Ranges) -> str:
        allowed = _without(ranges, _FORBIDDEN)
        if not allowed:
            self._fail("needs characters that JSON strings have in escaped form only")
        if len(allowed) == 1 and allowed[0][0] == allowed[0][1]:
            character = chr(allowed[0][0])
            if character.isalnum() or character in " -_:/,@#":
                return character
        return "[" + "".join(f"\\U{low:08X}-\\U{high:08X}" for low, high in allowed) + "]"


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """The code points in `ranges` and not in `others`, in ascending order."""
    kept: Ranges = []
    for low, high in sorted(ranges):
        start = max(low, kept[-1][1] + 1) if kept else low
        for first, last in sorted(others):
            if first > high:
                break
            if start < first:
                kept.append((start, first - 1))
            start = max(start, last + 1)
        if start <= high:
            kept.append((start, high))
    return kept
