"""Read one tool call: its name, and its arguments as JSON while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tool_calls.literals import NoMatch, longest_match, match, skip_space
from specgen.serve.formats.tool_calls.values import (
    Arguments,
    ArgumentsReader,
    ReadArguments,
    as_mapping,
    in_json_text,
    typed_json,
)
from specgen.text.overlap import partial_match_length

_KEY = re.compile(r"(?!/)[^\s<>\"'=:,(){}]+")
_CDATA = "<![CDATA["


class CallHead(NamedTuple):
    """The name of a call, and where its arguments begin."""

    name: str
    end: int


class ReadCall(NamedTuple):
    """A complete call, and where it ends."""

    name: str
    arguments: Arguments
    end: int


def read_name(
    form: CallForm,
    text: str,
    start: int,
    names: Iterable[str],
    *,
    is_last: bool = False,
) -> CallHead | NoMatch:
    """Read the name of a call, and what comes between it and the arguments.

    Args:
        form: The form of the model's calls.
        text: The text so far.
        start: Where the name begins.
        names: The names of the functions that may be called.
        is_last: Whether no more text will come.
    """
    possible = [name for name in names if name.startswith(text[start : start + len(name)])]
    if not possible:
        return NoMatch.ABSENT
    complete = [name for name in possible if text.startswith(name, start)]
    may_grow = len(text) - start < max(map(len, possible))
    if not complete or (may_grow and not is_last):
        return NoMatch.UNCLEAR
    name = max(complete, key=len)

    begin: int | NoMatch = NoMatch.ABSENT
    for after_name in form.after_names:
        begin = match(after_name, text, start + len(name))
        if begin is not NoMatch.ABSENT:
            break
    if isinstance(begin, NoMatch):
        return begin
    if form.pair is None:
        begin = skip_space(text, begin)
    arguments = longest_match(form.argument_beginnings, text, begin)
    if isinstance(arguments, NoMatch):
        return arguments
    return CallHead(name, begin)


def arguments_reader(form: CallForm, schema: Mapping[str, Any]) -> ArgumentsReader | PairsReader:
    """Return a reader for the arguments of a function with this schema."""
    if form.style == "pairs":
        return PairsReader(form, schema)
    return ArgumentsReader(form.style, form.terminator)


def read_call(
    form: CallForm,
    text: str,
    start: int,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    is_last: bool = False,
) -> ReadCall | NoMatch:
    """Read a whole call whose name begins at `start`; `functions` maps names to schemas."""
    head = read_name(form, text, start, functions, is_last=is_last)
    if isinstance(head, NoMatch):
        return head
    reader = arguments_reader(form, functions[head.name])
    read = reader.read(text[head.end :], is_last=is_last)
    if not read.is_over:
        return NoMatch.UNCLEAR
    return ReadCall(head.name, json.loads(read.json), head.end + read.n_read)


class PairsReader:
    """Reads arguments that are written as pairs of key and value, and writes them as JSON.

    A text is passed on as it arrives, any other value when it is complete. The interface is that of
    `ArgumentsReader`.
    """

    def __init__(self, form: CallForm, schema: Mapping[str, Any]) -> None:
        assert form.pair is not None
        self._pair = form.pair
        self._ends = form.argument_ends
        self._properties = schema.get("properties", {})
        middles = form.pair.middles.values()
        self._middles = {middle.rstrip() for middle in middles}
        #: Whether values are on lines of their own.
        self._has_lines = any(middle.endswith("\n") for middle in middles)
        self._has_pairs = False
        #: Whether the value that is being read is a text, and what ends any value.
        self._is_in_text = False
        self._closing = ""
        #: What `read` was given, and how much of it is read.
        self._text = ""
        self._is_last = False
        self._place = 0

    def read(self, text: str, *, is_last: bool = False) -> ReadArguments:
        """Read on in the arguments; see `ArgumentsReader.read`."""
        self._text = text
        self._is_last = is_last
        self._place = 0
        written = ""
        while True:
            if self._is_in_text:
                written += self._read_text()
                if self._is_in_text:
                    break
            pair = self._read_pair()
            if pair is NoMatch.ABSENT:
                return ReadArguments(self._place, written + self._end(), True)
            if pair is NoMatch.UNCLEAR:
                break
            written += pair
        if is_last:
            written += self._end()
        return ReadArguments(self._place, written, is_last)

    def _end(self) -> str:
        """Return what ends the JSON object."""
        written = ""
        if self._is_in_text:
            written += '"'
        if not self._has_pairs:
            written += "{"
        return written + "}"

    def _read_text(self) -> str:
        """Read on in a text; return what that adds."""
        end, is_complete = self._value_end(self._place)
        value = self._without_line_end(self._text[self._place : end])
        if is_complete:
            self._place = end + len(self._closing)
            self._is_in_text = False
            return in_json_text(value) + '"'
        self._place += len(value)
        return in_json_text(value)

    def _read_pair(self) -> str | NoMatch:
        """Read a pair, or if its value is a text, what comes before that text.

        Returns:
            The JSON that this adds.
        """
        place = self._key_start()
        if isinstance(place, NoMatch):
            return place
        key = _KEY.match(self._text, place)
        if key is None:
            return _unclear_if(place == len(self._text))
        start = longest_match(self._middles, self._text, key.end())
        if isinstance(start, NoMatch):
            return start
        if self._has_lines and self._text.startswith("\n", start):
            start += 1
        rest = self._text[start:]
        may_become_cdata = len(rest) < len(_CDATA) and _CDATA.startswith(rest)
        if may_become_cdata and not self._is_last:
            return NoMatch.UNCLEAR

        self._closing = self._pair.closing_of(key[0]).strip()
        schema = as_mapping(self._properties.get(key[0]))
        begun = f"{json.dumps(key[0], ensure_ascii=False)}: "
        if schema.get("type") == "string" and not rest.startswith(_CDATA):
            self._is_in_text = True
            self._place = start
            return self._after_comma(begun + '"')
        end, is_complete = self._value_end(start)
        if not is_complete:
            return NoMatch.UNCLEAR
        value = self._without_line_end(self._text[start:end])
        self._place = end + len(self._closing)
        return self._after_comma(begun + typed_json(value, schema, self._pair.nested_tag))

    def _key_start(self) -> int | NoMatch:
        """Return where the next key begins; `ABSENT` if the arguments end here."""
        end = longest_match(self._ends, self._text, self._place)
        if isinstance(end, int):
            return NoMatch.ABSENT
        start = match(self._pair.opening, self._text, self._place)
        if isinstance(start, int):
            return start
        return _unclear_if(NoMatch.UNCLEAR in (start, end) and not self._is_last)

    def _after_comma(self, pair: str) -> str:
        before = "{"
        if self._has_pairs:
            before = ", "
        self._has_pairs = True
        return before + pair

    def _value_end(self, start: int) -> tuple[int, bool]:
        """Return how far a value certainly goes, and whether it ends there.

        A value ends at a closing mark that is followed by what may follow it.
        """
        place = start
        while (end := self._text.find(self._closing, place)) >= 0:
            place = end + len(self._closing)
            following = longest_match((self._pair.opening, *self._ends), self._text, place)
            if self._is_last or isinstance(following, int):
                return end, True
            if following is NoMatch.UNCLEAR:
                return end, False
        n_held = partial_match_length(self._text[place:], self._closing)
        return len(self._text) - n_held, False

    def _without_line_end(self, value: str) -> str:
        if self._has_lines:
            return value.removesuffix("\n")
        return value


def _unclear_if(is_unclear: bool) -> NoMatch:
    if is_unclear:
        return NoMatch.UNCLEAR
    return NoMatch.ABSENT
