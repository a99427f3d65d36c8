"""Marks on the contents of messages, so that a rendered chat template shows which characters it wrote itself.

A template may cut contents, join them to its own text and write them as JSON. So the mark is in each
character: code points from U+0021 to U+07FF become lone surrogates, which no valid text contains. They
survive whatever a template does. White space, `"` and the backslash stay, since templates strip the one and
JSON escapes the others. Every known control token has a character that is marked.

Templates also compare contents with texts of their own (``'</think>' in content``). `MarkedText` compares
like the text without marks. If a comparison misses a marked text, the template may take another branch, but
the marks stay.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from specgen.session.template_sandbox import BoundedEnvironment

_MARKS = {
    code: 0xD800 + code
    for code in range(0x21, 0x800)
    if not chr(code).isspace() and chr(code) not in '"\\'
}
_CHARACTERS = {mark: code for code, mark in _MARKS.items()}
_MARKED = re.compile("[\ud800-\udfff]")


def marked(value: Any) -> Any:
    """Return a text, or a list or an object of JSON, with all of its texts marked, also the keys."""
    if isinstance(value, str):
        return MarkedText(value.translate(_MARKS))
    if isinstance(value, Mapping):
        return {marked(key): marked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(each) for each in value]
    return value


def unmarked(text: str) -> str:
    """Return a text, of the same length, without marks."""
    return text.translate(_CHARACTERS)


def _kept(value: Any) -> Any:
    """Return the result of an operation; a text that has marks compares as `MarkedText` again."""
    return MarkedText(value) if type(value) is str and _MARKED.search(value) else value


def _plain(text: Any) -> Any:
    """Return an argument without marks: a text, several texts, or None."""
    if isinstance(text, str):
        return unmarked(text)
    return tuple(map(unmarked, text)) if isinstance(text, tuple) else text


def _like_plain(name: str) -> Any:
    """Return the method of `str` for texts without marks."""
    method = getattr(str, name)

    def call(text: str, *arguments: Any) -> Any:
        return method(unmarked(text), *map(_plain, arguments))

    return call


class MarkedText(str):
    """A text with marks, which compares, splits and replaces like the text without marks. Operations that
    only copy characters are those of `str`."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return repr(unmarked(self)).translate(_MARKS)

    __hash__ = _like_plain("__hash__")
    __eq__ = _like_plain("__eq__")
    __ne__ = _like_plain("__ne__")
    __lt__ = _like_plain("__lt__")
    __le__ = _like_plain("__le__")
    __gt__ = _like_plain("__gt__")
    __ge__ = _like_plain("__ge__")
    __contains__ = _like_plain("__contains__")
    startswith = _like_plain("startswith")
    endswith = _like_plain("endswith")
    find = _like_plain("find")
    rfind = _like_plain("rfind")
    index = _like_plain("index")
    rindex = _like_plain("rindex")
    count = _like_plain("count")

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return MarkedText(super().__getitem__(index))

    def __iter__(self) -> Iterator[str]:
        return map(MarkedText, super().__iter__())

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split, sep, maxsplit)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit, sep, maxsplit)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [MarkedText(line) for line in super().splitlines(keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._three(*unmarked(self).partition(unmarked(sep)))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._three(*unmarked(self).rpartition(unmarked(sep)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return MarkedText(super().replace(old, new, count))
        return MarkedText(str.join(new, self.split(old, count)))

    def strip(self, characters: str | None = None, /) -> str:
        return self.rstrip(characters).lstrip(characters)

    def lstrip(self, characters: str | None = None, /) -> str:
        return self[len(self) - len(unmarked(self).lstrip(_plain(characters))) :]

    def rstrip(self, characters: str | None = None, /) -> str:
        return self[: len(unmarked(self).rstrip(_plain(characters)))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) if self.startswith(prefix) else 0 :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - (len(suffix) if self.endswith(suffix) else 0)]

    def lower(self) -> str:
        return self._cased(str.lower)

    def upper(self) -> str:
        return self._cased(str.upper)

    def capitalize(self) -> str:
        return self._cased(str.capitalize)

    def title(self) -> str:
        return self._cased(str.title)

    def _pieces(
        self, split: Callable[..., list[str]], separator: str | None, most: SupportsIndex
    ) -> list[str]:
        if separator is None:  # white space has no marks
            return [MarkedText(piece) for piece in split(str.__str__(self), None, most)]
        pieces: list[str] = []
        start = 0
        for piece in split(unmarked(self), unmarked(separator), most):
            pieces.append(self[start : start + len(piece)])
            start += len(piece) + len(separator)
        return pieces

    def _three(self, before: str, separator: str, after: str) -> tuple[str, str, str]:
        start, stop = len(before), len(self) - len(after)
        return self[:start], self[start:stop], self[stop:]

    def _cased(self, convert: Callable[[str], str]) -> str:
        plain = convert(unmarked(self))
        if len(plain) != len(self):
            return MarkedText(plain.translate(_MARKS))
        places = zip(plain, str.__str__(self), strict=True)
        return MarkedText(
            "".join(new.translate(_MARKS) if _MARKED.match(old) else new for new, old in places)
        )


class MarkedEnvironment(BoundedEnvironment):
    """Renders a template with marked variables: results of operations on texts with marks compare as
    `MarkedText` too."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.filters = {name: _keeping(each) for name, each in self.filters.items()}

    def concat(self, parts: Iterable[str]) -> str:
        """Return the output of a macro or a block as one text; compiled templates call this."""
        return str(_kept("".join(parts)))

    def joined(self, parts: Sequence[Any]) -> str:
        """Return values as one text."""
        return str(_kept(super().joined(parts)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation."""
        return _kept(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """Call a function."""
        return _kept(super().call(context, function, *arguments, **named))


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks, which say what else to pass to the filter
    def call(*arguments: Any, **named: Any) -> Any:
        return _kept(function(*arguments, **named))

    return call
