"""Texts that a template did not write, marked, so that its own text can be told from them.

A name of a control token in a message has to stay plain text, whatever a template does with the
message: it may cut it, join it to text of its own and write it as JSON. So each character of a
content carries a mark: the code points from U+0021 to U+07FF, of which every control token's name
has some, become lone surrogates, which no valid text contains. White space, `"` and the backslash
stay, because templates strip the one and JSON escapes the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex

_MARKS = {
    code: 0xD800 + code
    for code in range(0x21, 0x800)
    if not chr(code).isspace() and chr(code) not in '"\\'
}
_CHARACTERS = {mark: code for code, mark in _MARKS.items()}
_MARKED = re.compile("[\ud800-\udfff]")


def marked(value: Any) -> Any:
    """Return a JSON value with all of its texts marked, also the keys of objects."""
    if isinstance(value, str):
        return MarkedText(value.translate(_MARKS))
    if isinstance(value, Mapping):
        return {marked(key): marked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(each) for each in value]
    return value


def unmarked(text: str) -> str:
    """Return a text without marks."""
    return text.translate(_CHARACTERS)


def with_marks_kept(value: Any) -> Any:
    """Return the result of an operation, in which texts with marks are `MarkedText` again."""
    if isinstance(value, list) and value and type(value[0]) is str:
        value[:] = map(with_marks_kept, value)  # the same list, to which a template may add
    if type(value) is str and _MARKED.search(value):
        return MarkedText(value)
    return value


def _plain(argument: Any) -> Any:
    """Return the argument of a method of `str`, without marks."""
    if isinstance(argument, str):
        return unmarked(argument)
    if isinstance(argument, tuple):
        return tuple(map(unmarked, argument))
    return argument


def _as_plain(name: str) -> Any:
    """Return a method whose result is that of the text without marks."""
    method = getattr(str, name)

    def call(text: str, *arguments: Any) -> Any:
        return method(unmarked(text), *map(_plain, arguments))

    return call


def _recased(name: str) -> Any:
    """Return a method that changes the characters under the marks."""
    method: Callable[[str], str] = getattr(str, name)

    def call(text: str) -> str:
        return MarkedText(method(unmarked(text)).translate(_MARKS))

    return call


def _pieces(name: str) -> Any:
    """Return a method whose results are pieces of the text, in their order."""
    method = _as_plain(name)
    keeps_separator = not name.endswith("split")

    def call(text: str, separator: str | None = None, *most: SupportsIndex) -> list[str]:
        plain = unmarked(text)
        n_between = 0
        if separator is not None and not keeps_separator:
            n_between = len(separator)
        found = []
        start = 0
        for piece in method(text, separator, *most):
            start = plain.index(piece, start)  # after white space
            found.append(text[start : start + len(piece)])
            start += len(piece) + n_between
        return found

    return call


class MarkedText(str):
    """A text with marks that compares, splits and replaces like the text without them.

    Templates compare contents with texts of their own: ``'</think>' in content``.
    """

    __slots__ = ()

    __hash__ = _as_plain("__hash__")
    __eq__ = _as_plain("__eq__")
    __ne__ = _as_plain("__ne__")
    __lt__ = _as_plain("__lt__")
    __le__ = _as_plain("__le__")
    __gt__ = _as_plain("__gt__")
    __ge__ = _as_plain("__ge__")
    __contains__ = _as_plain("__contains__")
    startswith = _as_plain("startswith")
    endswith = _as_plain("endswith")
    find = _as_plain("find")
    rfind = _as_plain("rfind")
    index = _as_plain("index")
    rindex = _as_plain("rindex")
    count = _as_plain("count")
    lower = _recased("lower")
    upper = _recased("upper")
    capitalize = _recased("capitalize")
    title = _recased("title")
    split = _pieces("split")
    rsplit = _pieces("rsplit")
    partition = _pieces("partition")
    rpartition = _pieces("rpartition")

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return repr(unmarked(self)).translate(_MARKS)

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return MarkedText(super().__getitem__(index))

    def __iter__(self) -> Iterator[str]:
        return map(MarkedText, super().__iter__())

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        """Replace a text that is found without regard to marks; `new` keeps its own."""
        pieces = self.split(old, count) if old else list(self)
        return MarkedText(str.join(new, pieces))

    def strip(self, characters: str | None = None, /) -> str:
        """Strip both ends, as of the text without marks."""
        return self.rstrip(characters).lstrip(characters)

    def rstrip(self, characters: str | None = None, /) -> str:
        """Strip the end, as of the text without marks."""
        return self[: len(str.rstrip(unmarked(self), _plain(characters)))]

    def lstrip(self, characters: str | None = None, /) -> str:
        """Strip the beginning, as of the text without marks."""
        return self[len(self) - len(str.lstrip(unmarked(self), _plain(characters))) :]

    def removesuffix(self, suffix: str, /) -> str:
        """Remove an ending that is found without regard to marks."""
        if not self.endswith(suffix):
            return self
        return self[: len(self) - len(suffix)]

    def removeprefix(self, prefix: str, /) -> str:
        """Remove a beginning that is found without regard to marks."""
        if not self.startswith(prefix):
            return self
        return self[len(prefix) :]
