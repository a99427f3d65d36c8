"""Mark the texts of messages, to tell them from the text of a chat template after rendering.

The name of a control token in a message has to stay plain text, whatever a template does with the
message: it may cut it, join it with text of its own, or write it as JSON. So the characters of
messages are marked before rendering: each code point from U+0021 to U+07FF is replaced with a lone
surrogate, which no valid text contains. Every name of a control token has such characters. White
space is not marked, because templates strip it; nor are `"` and the backslash, because JSON escapes
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex

#: Replaces characters with their marks, for `str.translate`.
_MARKS = {
    code: 0xD800 + code
    for code in range(0x21, 0x800)
    if not chr(code).isspace() and chr(code) not in '"\\'
}
#: Replaces marks with the characters.
_CHARACTERS = {mark: code for code, mark in _MARKS.items()}
_MARKED = re.compile("[\ud800-\udfff]")


def marked(value: Any) -> Any:
    """Return a JSON value with all of its texts marked, including the keys of objects."""
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
    """Return the result of an operation of a template, with marked texts as `MarkedText` again.

    Many operations on a `MarkedText` return a plain `str` with marks in it.
    """
    if isinstance(value, list) and value and type(value[0]) is str:
        # Change the list in place: the template may hold it elsewhere, and append to it.
        value[:] = map(with_marks_kept, value)
    if type(value) is str and _MARKED.search(value):
        return MarkedText(value)
    return value


def _plain(argument: Any) -> Any:
    """Return the argument of a method of `str` without marks."""
    if isinstance(argument, str):
        return unmarked(argument)
    if isinstance(argument, tuple):
        return tuple(map(unmarked, argument))
    return argument


def _as_plain(name: str) -> Any:
    """Return a method of `MarkedText` that ignores marks, such as a comparison or a search.

    Args:
        name: The method of `str` to call with the texts without marks.
    """
    method = getattr(str, name)

    def call(text: str, *arguments: Any) -> Any:
        return method(unmarked(text), *map(_plain, arguments))

    return call


def _recased(name: str) -> Any:
    """Return a method of `MarkedText` that changes the case of the characters under the marks."""
    method: Callable[[str], str] = getattr(str, name)

    def call(text: str) -> str:
        return MarkedText(method(unmarked(text)).translate(_MARKS))

    return call


def _pieces(name: str) -> Any:
    """Return a method of `MarkedText` that splits it without regard to marks.

    The text is split without marks; then the same pieces are cut from the text with marks.

    Args:
        name: A method of `str` that returns pieces of the text from left to right, such as "split".
    """
    method = _as_plain(name)
    # "partition" and "rpartition" return the separator as a piece.
    keeps_separator = not name.endswith("split")

    def call(
        text: str,
        separator: str | None = None,
        *max_splits: SupportsIndex,
    ) -> list[str]:
        plain = unmarked(text)
        n_between = 0
        if separator is not None and not keeps_separator:
            n_between = len(separator)
        pieces = []
        start = 0
        for piece in method(text, separator, *max_splits):
            start = plain.index(piece, start)  # skips white space, if that separates the pieces
            pieces.append(text[start : start + len(piece)])
            start += len(piece) + n_between
        return pieces

    return call


class MarkedText(str):
    """A text with marks that can be compared, searched and split as if it had none.

    Templates need that for their tests of messages, such as ``'</think>' in content``.
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

    def replace(
        self,
        old: str,
        new: str,
        count: SupportsIndex = -1,
        /,
    ) -> str:
        """Replace `old`, which is found without regard to marks, with `new`, marked or not."""
        pieces = self.split(old, count) if old else list(self)
        return MarkedText(str.join(new, pieces))

    def strip(self, characters: str | None = None, /) -> str:
        """Strip both ends without regard to marks."""
        return self.rstrip(characters).lstrip(characters)

    def rstrip(self, characters: str | None = None, /) -> str:
        """Strip the end without regard to marks."""
        return self[: len(str.rstrip(unmarked(self), _plain(characters)))]

    def lstrip(self, characters: str | None = None, /) -> str:
        """Strip the beginning without regard to marks."""
        return self[len(self) - len(str.lstrip(unmarked(self), _plain(characters))) :]

    def removesuffix(self, suffix: str, /) -> str:
        """Remove a suffix that is compared without regard to marks."""
        if not self.endswith(suffix):
            return self
        return self[: len(self) - len(suffix)]

    def removeprefix(self, prefix: str, /) -> str:
        """Remove a prefix that is compared without regard to marks."""
        if not self.startswith(prefix):
            return self
        return self[len(prefix) :]
