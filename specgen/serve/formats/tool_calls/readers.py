"""Read one tool call: its name, and its arguments as JSON while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tool_calls.literals import NoMatch, match, skip_space
from specgen.serve.formats.tool_calls.values import (
    Arguments,
    ArgumentsReader,
    ReadArguments,
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


class _ReadValue(NamedTuple):
    """The value of an argument, as far as it is certain."""

    text: str
    #: Where the text ends, or the closing mark if the value is complete.
    end: int
    is_complete: bool


def read_name(
    form: CallForm, text: str, start: int, names: Iterable[str], *, is_last: bool = False
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

    places = [match(after, text, start + len(name)) for after in form.after_names]
    begin = next((each for each in places if each is not NoMatch.ABSENT), NoMatch.ABSENT)
    if isinstance(begin, NoMatch):
        return begin

    if form.pair is not None:
        openings = [form.pair.opening, *form.argument_ends]
    else:
        begin = skip_space(text, begin)
        openings = ["(" if form.style == "python" else "{"]
    found = [match(opening, text, begin) for opening in openings]
    if any(isinstance(each, int) for each in found):
        return CallHead(name, begin)
    return NoMatch.UNCLEAR if NoMatch.UNCLEAR in found else NoMatch.ABSENT


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

    def read(self, text: str, *, is_last: bool = False) -> ReadArguments:
        """Read on in the arguments; see `ArgumentsReader.read`."""
        place = 0
        written = ""
        while True:
            if self._is_in_text:
                value = self._read_value(text, place, is_last)
                place = value.end
                written += in_json_text(value.text)
                if not value.is_complete:
                    break
                written += '"'
                self._is_in_text = False
            pair = self._read_pair(text, place, is_last)
            if pair is NoMatch.ABSENT:
                return ReadArguments(place, written + self._end(), True)
            if pair is NoMatch.UNCLEAR:
                break
            place, piece = pair
            written += piece
        if is_last:
            written += self._end()
        return ReadArguments(place, written, is_last)

    def _end(self) -> str:
        quote = '"' if self._is_in_text else ""
        return quote + ("}" if self._has_pairs else "{}")

    def _read_pair(self, text: str, place: int, is_last: bool) -> tuple[int, str] | NoMatch:
        """Read a pair, or if its value is a text, the pair up to that text.

        Returns:
            Where that ends, and the JSON that it adds.
        """
        ends = [match(end, text, place) for end in self._ends]
        if any(isinstance(end, int) for end in ends):
            return NoMatch.ABSENT
        key_start = match(self._pair.opening, text, place)
        if isinstance(key_start, NoMatch):
            is_unclear = NoMatch.UNCLEAR in (key_start, *ends) and not is_last
            return NoMatch.UNCLEAR if is_unclear else NoMatch.ABSENT
        key = _KEY.match(text, key_start)
        if key is None:
            return NoMatch.UNCLEAR if key_start == len(text) else NoMatch.ABSENT
        start = self._value_start(text, key.end())
        if isinstance(start, NoMatch):
            return start
        rest = text[start:]
        may_be_cdata = len(rest) < len(_CDATA) and _CDATA.startswith(rest)
        if may_be_cdata and not is_last:
            return NoMatch.UNCLEAR

        self._closing = self._pair.closing_of(key[0]).strip()
        schema = self._properties.get(key[0], {})
        schema = schema if isinstance(schema, Mapping) else {}
        before = ", " if self._has_pairs else "{"
        written = f"{before}{json.dumps(key[0], ensure_ascii=False)}: "
        if schema.get("type") == "string" and not rest.startswith(_CDATA):
            self._has_pairs = True
            self._is_in_text = True
            return start, written + '"'
        value = self._read_value(text, start, is_last)
        if not value.is_complete:
            return NoMatch.UNCLEAR
        self._has_pairs = True
        return value.end, written + typed_json(value.text, schema, self._pair.nested_tag)

    def _value_start(self, text: str, key_end: int) -> int | NoMatch:
        found = [match(middle, text, key_end) for middle in self._middles]
        places = [each for each in found if isinstance(each, int)]
        if not places:
            return NoMatch.UNCLEAR if NoMatch.UNCLEAR in found else NoMatch.ABSENT
        start = max(places)
        if self._has_lines and text.startswith("\n", start):
            start += 1
        return start

    def _read_value(self, text: str, start: int, is_last: bool) -> _ReadValue:
        """Read a value, which ends at a closing mark that is followed by what may follow it."""
        place = start
        while (end := text.find(self._closing, place)) >= 0:
            place = end + len(self._closing)
            following = [match(each, text, place) for each in (self._pair.opening, *self._ends)]
            if is_last or any(isinstance(each, int) for each in following):
                return _ReadValue(self._without_line_end(text[start:end]), place, True)
            if NoMatch.UNCLEAR in following:
                break
        else:
            end = len(text) - partial_match_length(text[place:], self._closing)
        value = self._without_line_end(text[start:end])
        return _ReadValue(value, start + len(value), False)

    def _without_line_end(self, value: str) -> str:
        return value.removesuffix("\n") if self._has_lines else value
