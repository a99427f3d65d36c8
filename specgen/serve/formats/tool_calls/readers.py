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
    ParsedArguments,
    TypedValues,
    in_json_text,
)
from specgen.text.overlap import partial_match_length

_KEY = re.compile(r"(?!/)[^\s<>\"'=:,(){}]+")
_CDATA = "<![CDATA["


class CallHead(NamedTuple):
    """The part of a call before its arguments."""

    #: The name of the function.
    name: str
    #: The index in the text at which the arguments begin.
    end: int


class ParsedCall(NamedTuple):
    """A complete call."""

    #: The name of the function.
    name: str
    #: The values that the function gets.
    arguments: Arguments
    #: The index in the text at which the call ends.
    end: int


def read_name(
    form: CallForm,
    text: str,
    start: int,
    names: Iterable[str],
    *,
    is_last: bool = False,
) -> CallHead | NoMatch:
    """Read the name of a call, and the text between it and the arguments.

    Args:
        form: The form of the model's calls.
        text: The text so far.
        start: The index at which the name begins.
        names: The names of the functions that may be called.
        is_last: Whether no more text will come.

    Returns:
        `ABSENT` if there is no such name, or if no arguments can follow it.
    """
    # One name may begin with another: the longest one that is complete in the text is meant.
    possible_names = [name for name in names if name.startswith(text[start : start + len(name)])]
    if not possible_names:
        return NoMatch.ABSENT
    complete_names = [name for name in possible_names if text.startswith(name, start)]
    may_become_longer = len(text) - start < max(map(len, possible_names))
    if not complete_names or (may_become_longer and not is_last):
        return NoMatch.UNCLEAR
    name = max(complete_names, key=len)

    arguments_start: int | NoMatch = NoMatch.ABSENT
    for after_name in form.after_names:
        arguments_start = match(after_name, text, start + len(name))
        if arguments_start is not NoMatch.ABSENT:
            break
    if isinstance(arguments_start, NoMatch):
        return arguments_start
    if form.pair is None:
        arguments_start = skip_space(text, arguments_start)
    # What follows must look like arguments, but is left for their reader.
    beginning_end = longest_match(form.argument_beginnings, text, arguments_start)
    if isinstance(beginning_end, NoMatch):
        return beginning_end
    return CallHead(name, arguments_start)


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
) -> ParsedCall | NoMatch:
    """Read a whole call, from its name to the end of its arguments.

    Args:
        form: The form of the model's calls.
        text: The text that has the call.
        start: The index at which the name begins.
        functions: The JSON schemas of the functions that may be called, by name.
        is_last: Whether no more text will come.
    """
    head = read_name(
        form,
        text,
        start,
        functions,
        is_last=is_last,
    )
    if isinstance(head, NoMatch):
        return head
    reader = arguments_reader(form, functions[head.name])
    parsed = reader.read(text[head.end :], is_last=is_last)
    if not parsed.is_over:
        return NoMatch.UNCLEAR
    return ParsedCall(head.name, json.loads(parsed.json), head.end + parsed.n_read)


class PairsReader:
    """Reads arguments that are written as pairs of key and value, and writes them as JSON.

    A string is passed on as it arrives, any other value when it is complete. It is used like
    `ArgumentsReader`.
    """

    def __init__(self, form: CallForm, schema: Mapping[str, Any]) -> None:
        assert form.pair is not None
        self._pair = form.pair
        self._ends = form.argument_ends
        self._properties = schema.get("properties", {})
        self._values = TypedValues(schema, form.pair.tag_prefix)
        middles = form.pair.middles.values()
        self._middles = {middle.rstrip() for middle in middles}
        #: Whether each value is on a line of its own.
        self._has_lines = any(middle.endswith("\n") for middle in middles)
        #: Whether a pair was read already.
        self._has_pairs = False
        #: Whether a string is being read, which has been passed on in part.
        self._is_in_text = False
        #: The text that ends the value that is being read.
        self._closing = ""
        #: The arguments of the current call of `read`, and the index of the next character.
        self._text = ""
        self._is_last = False
        self._place = 0

    def read(
        self,
        text: str,
        *,
        is_last: bool = False,
    ) -> ParsedArguments:
        """Read as much of a piece as is unambiguous; see `ArgumentsReader.read`."""
        self._text = text
        self._is_last = is_last
        self._place = 0
        added_json = ""
        while True:
            if self._is_in_text:
                added_json += self._read_text()
                if self._is_in_text:  # more text is needed
                    break
            pair_json = self._read_pair()
            if pair_json is NoMatch.ABSENT:
                return ParsedArguments(self._place, added_json + self._end(), True)
            if pair_json is NoMatch.UNCLEAR:
                break
            added_json += pair_json
        if is_last:
            added_json += self._end()
        return ParsedArguments(self._place, added_json, is_last)

    def _end(self) -> str:
        """Return the JSON that ends the object, which is ``{}`` if there were no pairs."""
        written = ""
        if self._is_in_text:
            written += '"'
        if not self._has_pairs:
            written += "{"
        return written + "}"

    def _read_text(self) -> str:
        """Read on in a string, and return the JSON to add. Leave it if the value ends there."""
        end, is_complete = self._value_end(self._place)
        value = self._without_line_end(self._text[self._place : end])
        if is_complete:
            self._place = end + len(self._closing)
            self._is_in_text = False
            return in_json_text(value) + '"'
        self._place += len(value)
        return in_json_text(value)

    def _read_pair(self) -> str | NoMatch:
        """Read a pair; if its value is a string, only up to the beginning of that string.

        Returns:
            The JSON to add; `ABSENT` if there are no more pairs.
        """
        # The key, and the text between it and the value.
        key_start = self._key_start()
        if isinstance(key_start, NoMatch):
            return key_start
        key_match = _KEY.match(self._text, key_start)
        if key_match is None:
            return _unclear_if(key_start == len(self._text))
        key = key_match[0]
        value_start = longest_match(self._middles, self._text, key_match.end())
        if isinstance(value_start, NoMatch):
            return value_start
        if self._has_lines and self._text.startswith("\n", value_start):
            value_start += 1
        # A string in a CDATA section is not passed on as it arrives.
        rest = self._text[value_start:]
        may_become_cdata = len(rest) < len(_CDATA) and _CDATA.startswith(rest)
        if may_become_cdata and not self._is_last:
            return NoMatch.UNCLEAR

        # The value. A string may end in a later piece.
        self._closing = self._pair.closing_of(key).strip()
        schema = self._properties.get(key)
        key_json = f"{json.dumps(key, ensure_ascii=False)}: "
        if self._values.types_of(schema) == {"string"} and not rest.startswith(_CDATA):
            self._is_in_text = True
            self._place = value_start
            return self._after_comma(key_json + '"')
        value_end, is_complete = self._value_end(value_start)
        value = self._without_line_end(self._text[value_start:value_end])
        if is_complete:
            self._place = value_end + len(self._closing)
        elif self._is_last and value:  # the text after it is missing
            self._place = len(self._text)
        else:
            return NoMatch.UNCLEAR
        value_json = self._values.json_of(value, schema)
        return self._after_comma(key_json + value_json)

    def _key_start(self) -> int | NoMatch:
        """Return the index at which the next key begins; `ABSENT` if the arguments end here."""
        end = longest_match(self._ends, self._text, self._place)
        if isinstance(end, int):
            return NoMatch.ABSENT
        key_start = match(self._pair.opening, self._text, self._place)
        if isinstance(key_start, int):
            return key_start
        return _unclear_if(NoMatch.UNCLEAR in (key_start, end) and not self._is_last)

    def _after_comma(self, pair_json: str) -> str:
        """Put a comma before a pair, or the object's opening bracket if it is the first one."""
        before = "{"
        if self._has_pairs:
            before = ", "
        self._has_pairs = True
        return before + pair_json

    def _value_end(self, start: int) -> tuple[int, bool]:
        """Return the index up to which everything is the value, and whether the value ends there.

        The closing mark may also be part of a value, so it ends the value only if it is followed by
        another pair or by the end of the arguments.
        """
        search_start = start
        while True:
            end = self._text.find(self._closing, search_start)
            if end < 0:
                break
            search_start = end + len(self._closing)
            following = longest_match((self._pair.opening, *self._ends), self._text, search_start)
            if self._is_last or isinstance(following, int):
                return end, True
            if following is NoMatch.UNCLEAR:
                return end, False
        n_partial_closing = partial_match_length(self._text[search_start:], self._closing)
        return len(self._text) - n_partial_closing, False

    def _without_line_end(self, value: str) -> str:
        if self._has_lines:
            return value.removesuffix("\n")
        return value


def _unclear_if(is_unclear: bool) -> NoMatch:
    if is_unclear:
        return NoMatch.UNCLEAR
    return NoMatch.ABSENT
