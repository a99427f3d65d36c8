"""Keep names of control tokens in messages plain text, whatever a chat template does with them.

A template may cut contents, join them to its own text and write them as JSON. So each character of a content
carries a mark: code points from U+0021 to U+07FF become lone surrogates, which no valid text contains. White
space, `"` and the backslash stay, since templates strip the one and JSON escapes the others. Every known
control token has a character that is marked.

llama.cpp first cuts a text at the names of special tokens, the longest names first, and then tokenizes what
is between them. `tokenize_marked` does the same, but finds names of control tokens only where nothing is marked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex, TypeAlias

from specgen.llama.vocabulary import LlamaVocabulary, SpecialToken

_MARKS = {
    code: 0xD800 + code
    for code in range(0x21, 0x800)
    if not chr(code).isspace() and chr(code) not in '"\\'
}
_CHARACTERS = {mark: code for code, mark in _MARKS.items()}
_MARKED = re.compile("[\ud800-\udfff]")
#: What C's `isspace` takes for white space.
_SPACE = " \t\n\v\f\r"

#: A part of a prompt: a token, or a range of characters that are not yet tokenized.
_Part: TypeAlias = "int | range"


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


def kept(value: Any) -> Any:
    """Return the result of an operation; a text that has marks becomes a `MarkedText` again."""
    return MarkedText(value) if type(value) is str and _MARKED.search(value) else value


def _plain(text: Any) -> Any:
    if isinstance(text, str):
        return unmarked(text)
    return tuple(map(unmarked, text)) if isinstance(text, tuple) else text


class MarkedText(str):
    """A text with marks, which compares, splits and replaces like the text without marks, since templates
    compare contents with texts of their own (``'</think>' in content``). Operations that only copy
    characters are those of `str`. If a comparison misses a marked text, the template may take another
    branch, but the marks stay."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return repr(unmarked(self)).translate(_MARKS)

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return MarkedText(super().__getitem__(index))

    def __iter__(self) -> Iterator[str]:
        return map(MarkedText, super().__iter__())

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(str.split, sep, maxsplit)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._split(str.rsplit, sep, maxsplit)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = self._pieces(unmarked(self).partition(unmarked(sep)))
        return before, found, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = self._pieces(unmarked(self).rpartition(unmarked(sep)))
        return before, found, after

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [MarkedText(line) for line in super().splitlines(keepends)]

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

    def _split(
        self, split: Callable[..., list[str]], separator: str | None, most: SupportsIndex
    ) -> list[str]:
        if separator is None:  # white space has no marks
            return [MarkedText(piece) for piece in split(str.__str__(self), None, most)]
        return self._pieces(split(unmarked(self), unmarked(separator), most), len(separator))

    def _pieces(self, pieces: Iterable[str], n_between: int = 0) -> list[str]:
        """Return the pieces of this text that stand where these stand in the plain one."""
        found, start = [], 0
        for piece in pieces:
            found.append(self[start : start + len(piece)])
            start += len(piece) + n_between
        return found


def _like_plain(name: str) -> Any:
    method = getattr(str, name)

    def call(text: str, *arguments: Any) -> Any:
        return method(unmarked(text), *map(_plain, arguments))

    return call


def _cased(name: str) -> Any:
    """Return a method that changes the case of letters, and marks those again that were marked."""
    convert = getattr(str, name)

    def call(text: str) -> str:
        plain = convert(unmarked(text))
        if len(plain) != len(text):
            return MarkedText(plain.translate(_MARKS))
        places = zip(plain, str.__str__(text), strict=True)
        return MarkedText(
            "".join(new.translate(_MARKS) if _MARKED.match(old) else new for new, old in places)
        )

    return call


for _name in (
    *("__hash__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"),
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
):
    setattr(MarkedText, _name, _like_plain(_name))
for _name in ("lower", "upper", "capitalize", "title"):
    setattr(MarkedText, _name, _cased(_name))


def control_names(vocabulary: LlamaVocabulary, tokens: Iterable[int]) -> set[str]:
    """Return the names of the control tokens among these tokens."""
    return {vocabulary.token_text(token) for token in set(tokens) if vocabulary.is_control(token)}


def tokenize_marked(
    vocabulary: LlamaVocabulary, marked_text: str, *, add_special: bool
) -> list[int]:
    """Return the tokens of a rendered conversation. Names of control tokens are parsed if no character of
    them is marked. `add_special` adds the beginning-of-text token if the model wants one."""
    text = unmarked(marked_text)
    marked_text = str.__str__(marked_text)  # a `MarkedText` would find names in contents too
    parts: list[_Part] = [range(len(text))] if text else []
    for special in vocabulary.named_tokens():
        searched = marked_text if special.is_control else text
        if special.name in searched:
            parts = list(_cut(parts, searched, special))
    around = vocabulary.tokenize("", add_special=add_special, parse_special=False)
    tokens = around[: int(vocabulary.add_bos)]
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            piece = text[part.start : part.stop]
            tokens += vocabulary.tokenize(piece, add_special=False, parse_special=False)
    return tokens + around[int(vocabulary.add_bos) :]


def _cut(parts: Iterable[_Part], text: str, special: SpecialToken) -> Iterator[_Part]:
    """Cut the ranges of a text where the name of a token is."""
    name = special.name
    for part in parts:
        if isinstance(part, int):
            yield part
            continue
        start, stop = part.start, part.stop
        while (found := text.find(name, start, stop)) >= 0:
            before = text[start:found]
            if special.strips_before:
                before = before.rstrip(_SPACE)
            if before:
                yield range(start, start + len(before))
            yield special.token
            start = found + len(name)
            if special.strips_after:
                start = stop - len(text[start:stop].lstrip(_SPACE))
        if start < stop:
            yield range(start, stop)
