"""Turn the argument values that models write into JSON.

Models write JSON, Python, Gemma's objects, or texts without quotes.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic_core import from_json

from specgen.text.overlap import partial_match_length

#: The values of arguments by their keys.
Arguments: TypeAlias = dict[str, Any]
#: How a model writes all of a call's arguments as one value.
Style: TypeAlias = Literal["json", "python", "gemma"]

#: What texts begin and end with, in each style. Longer quotes come first.
_QUOTES: Mapping[Style, tuple[str, ...]] = {
    "json": ('"',),
    "python": ('"""', "'''", '"', "'"),
    "gemma": ('<|"|>', "<escape>"),
}
_CLOSING_BRACKETS: Mapping[str, str] = {"{": "}", "[": "]", "(": ")"}
_SEPARATORS = re.compile(r"[\s,:=]+")
_WORD = re.compile(r"[^\s,:=(){}\[\]<>|\"']+")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
    r"|x[0-9a-fA-F]{2}|.|\Z)",
    re.DOTALL,
)
#: An escape that more text may change.
_UNFINISHED_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?"
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z"
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 100
#: The types of JSON schemas that a Python value has.
_SCHEMA_TYPES: Mapping[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}
_CDATA = "<![CDATA["


def arguments_of(written: str | Arguments | None) -> Arguments:
    """Return the arguments of an earlier call as an object.

    Most templates need an object. If a model wrote anything else, that is its value ``text``.
    """
    value: Any = written or {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = from_json(value)
    return value if isinstance(value, dict) else {"text": written}


def in_json_text(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ReadArguments(NamedTuple):
    """What a reader of arguments has made of a text."""

    #: The number of characters that were read.
    n_read: int
    #: The JSON that they add.
    json: str
    #: Whether the arguments end there.
    is_over: bool


class _Bracket(NamedTuple):
    """The closing bracket of an open value, as the model writes it and as JSON needs it."""

    written: str
    json: str


class _Quote(enum.Enum):
    """What a quote within a text is."""

    END = enum.auto()
    #: A character of the text that the model forgot to escape.
    CHARACTER = enum.auto()
    #: More text is needed to tell.
    UNCLEAR = enum.auto()


#: Where a step of the reader ends, and the JSON that it adds. A step that ends where it began waits
#: for more text.
_Step: TypeAlias = tuple[int, str]


class ArgumentsReader:
    """Reads the arguments of a call as they arrive, and writes them as JSON.

    Clients receive the beginning before the end is known, so whatever the model writes becomes
    valid JSON: a backslash that escapes nothing (as in Windows paths) and an unescaped quote stand
    for themselves, a word that JSON lacks becomes a text, and missing brackets are added.

    Args:
        style: How the arguments are written.
        closing: A text that ends a call whose brackets are missing.
        is_open: Whether an object has been opened before the text that will be read.
    """

    def __init__(self, style: Style, closing: str = "", *, is_open: bool = False) -> None:
        self._style = style
        self._closing = closing.strip()
        #: The brackets that close the open values, the innermost last.
        self._open = [_Bracket("}", "}")] if is_open else []
        #: What ends the text that is being read; empty outside of texts.
        self._quote = ""
        #: Whether that text is a key.
        self._is_key = False
        #: The key of the next value, as far as it is read; None before there is one.
        self._key: str | None = None
        #: Whether the innermost value has items already.
        self._has_items = False
        self._is_over = False

    def read(self, text: str, *, is_last: bool = False) -> ReadArguments:
        """Read on in the arguments.

        Args:
            text: What the last call left unread, and what has arrived since.
            is_last: Whether no more text will come, so that the arguments must end here.
        """
        place = 0
        written = ""
        while place < len(text) and not self._is_over:
            step = self._read_in_text if self._quote else self._read_outside
            end, piece = step(text, place, is_last)
            written += piece
            if end == place:
                break
            place = end
        if is_last and not self._is_over:
            written += self._give_up()
        return ReadArguments(place, written, self._is_over)

    # --- within a text ----------------------------------------------------------------------------

    def _read_in_text(self, text: str, place: int, is_last: bool) -> _Step:
        escape = "" if self._style == "gemma" else r"|\\"
        special = re.compile(re.escape(self._quote) + escape).search(text, place)
        if special is not None:
            end = special.start()
        else:
            end = len(text) - partial_match_length(text, self._quote)
        if end > place:
            return end, self._add_to_text(text[place:end])
        if special is None:
            return place, ""
        if special[0] == "\\":
            return self._read_escape(text, place, is_last)
        return self._read_quote(text, special.end(), is_last)

    def _read_escape(self, text: str, place: int, is_last: bool) -> _Step:
        if not is_last and _UNFINISHED_ESCAPE.match(text, place):
            return place, ""
        found = _ESCAPE.match(text, place)
        assert found is not None, "the pattern matches any backslash"
        return found.end(), self._add_to_text(_unescaped(found[0], self._style))

    def _read_quote(self, text: str, end: int, is_last: bool) -> _Step:
        meaning = self._meaning_of_quote(text[end:].lstrip())
        if meaning is _Quote.UNCLEAR and not is_last:
            return end - len(self._quote), ""
        if meaning is _Quote.CHARACTER:
            return end, self._add_to_text(self._quote)
        written = "" if self._is_key else '"'
        self._quote = ""
        self._is_key = False
        return end, written

    def _meaning_of_quote(self, following: str) -> _Quote:
        """Return what a quote in a text is, by what follows it."""
        if not following:
            return _Quote.UNCLEAR
        ends = ",}]"
        if self._is_key:
            ends += ":="
        if self._style == "python":
            ends += ")"
        if following[0] in ends:
            return _Quote.END
        if self._closing and following.startswith(self._closing):
            return _Quote.END
        return _Quote.UNCLEAR if self._closing.startswith(following) else _Quote.CHARACTER

    def _add_to_text(self, text: str) -> str:
        """Return what a piece of a text adds; keys are kept until their value begins."""
        piece = in_json_text(text)
        if not self._is_key:
            return piece
        self._key = (self._key or "") + piece
        return ""

    # --- outside of texts -------------------------------------------------------------------------

    def _read_outside(self, text: str, place: int, is_last: bool) -> _Step:
        """Read separators, a bracket, a word, or the quote that begins a text."""
        separators = _SEPARATORS.match(text, place)
        if separators is not None:
            if "," in separators[0]:
                self._key = None
            return separators.end(), ""

        is_key = bool(self._open) and self._open[-1].json == "}" and self._key is None
        if text[place] in "{[(":
            return self._open_bracket(text[place], place, is_key)
        if text[place] in "}])":
            return self._close_bracket(text[place], place)

        rest = text[place:]
        quotes = _QUOTES[self._style]
        if not is_last and any(rest != quote and quote.startswith(rest) for quote in quotes):
            return place, ""
        for quote in quotes:
            if rest.startswith(quote):
                return place + len(quote), self._begin_text(quote, is_key)

        word = _WORD.match(rest)
        if word is None:
            return place, self._give_up()
        if word.end() == len(rest) and not is_last:
            return place, ""
        if is_key:
            self._key = in_json_text(word[0])
            return place + word.end(), ""
        return place + word.end(), self._begin_value(_json_word(word[0]))

    def _begin_text(self, quote: str, is_key: bool) -> str:
        self._quote = quote
        self._is_key = is_key
        if is_key:
            self._key = ""
            return ""
        return self._begin_value('"')

    def _open_bracket(self, bracket: str, place: int, is_key: bool) -> _Step:
        if is_key or len(self._open) == _MAX_DEPTH:
            return place, self._give_up()
        # Parentheses around all arguments are an object; others are a tuple of Python.
        is_object = bracket == "{" or (bracket == "(" and not self._open)
        json_bracket = "{" if is_object else "["
        written = self._begin_value(json_bracket)
        closing = _Bracket(_CLOSING_BRACKETS[bracket], _CLOSING_BRACKETS[json_bracket])
        self._open.append(closing)
        self._has_items = False
        return place + 1, written

    def _close_bracket(self, bracket: str, place: int) -> _Step:
        levels = [level for level, each in enumerate(self._open) if each.written == bracket]
        if not levels:
            return place, self._give_up()
        written = self._close(levels[-1])
        self._is_over = not self._open
        return place + 1, written

    def _begin_value(self, begun: str) -> str:
        """Return the beginning of a value, after its comma and its key."""
        before = ", " if self._has_items and self._open else ""
        if self._key is not None:
            before += f'"{self._key}": '
        self._key = None
        self._has_items = True
        return before + begun

    # --- the end ----------------------------------------------------------------------------------

    def _close(self, n_left: int) -> str:
        """Close all open values but the outermost `n_left`; return what that adds."""
        quote = '"' if self._quote and not self._is_key else ""
        brackets = "".join(bracket.json for bracket in reversed(self._open[n_left:]))
        del self._open[n_left:]
        self._quote = ""
        self._key = None
        self._has_items = True
        return quote + brackets

    def _give_up(self) -> str:
        """End the arguments here, since what follows is not part of them."""
        self._is_over = True
        return self._close(0)


def _unescaped(escape: str, style: Style) -> str:
    quoted = f'"{escape}"'
    try:
        found = json.loads(quoted) if style == "json" else ast.literal_eval(quoted)
    except (ValueError, SyntaxError):
        return escape
    return str(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_word(word: str) -> str:
    """Return a word without quotes as a JSON value."""
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    try:
        value = from_json(word, allow_inf_nan=False) or 0
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    is_finite = abs(value) < math.inf
    return word if is_finite else json.dumps(word, ensure_ascii=False)


# --- values without quotes ------------------------------------------------------------------------


def typed_json(text: str, schema: Any, nested_tag: str = "") -> str:
    """Return a text without quotes as JSON, with a type that the argument's schema allows.

    Args:
        text: The text between the marks of an argument.
        schema: The JSON schema of the argument.
        nested_tag: How the tags begin in which lists and objects are written; empty for none.
    """
    try:
        value = _nested_value(text, schema, nested_tag) if nested_tag else _value(text, schema)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (TypeError, ValueError, RecursionError):  # Python values and lone surrogates, too
        return json.dumps(text, ensure_ascii=False)
    return found


def _nested_value(text: str, schema: Any, tag: str) -> Any:
    """Return the value of a text in which lists and objects are tags within tags."""
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = schema.get("type", ())
    children = _children(text, tag)
    if not children and (text.strip() or kinds not in ("array", "object")):
        return _value(text, schema)
    if "object" not in kinds and all(name == "item" for name, _ in children):
        return [_nested_value(inner, schema.get("items"), tag) for _, inner in children]
    properties = schema.get("properties", {})
    return {name: _nested_value(inner, properties.get(name), tag) for name, inner in children}


def _children(text: str, tag: str) -> Sequence[tuple[str, str]]:
    """Return the names and the contents of the outermost tags in a text."""
    found: list[tuple[str, str]] = []
    place = 0
    while (start := text.find(tag, place)) >= 0:
        name, _, rest = text[start + len(tag) :].partition(">")
        inner = _up_to_closing_tag(rest, name, tag)
        found.append((name, inner))
        inner_start = len(text) - len(rest)
        place = inner_start + len(inner) + len(f"{tag}/{name}>")
    return found


def _up_to_closing_tag(text: str, name: str, tag: str) -> str:
    depth = 1
    for found in re.finditer(rf"{re.escape(tag)}(/?){re.escape(name)}>", text):
        depth += -1 if found[1] else 1
        if depth == 0:
            return text[: found.start()]
    return text


def _value(text: str, schema: Any) -> Any:
    """Return the value of a text if the schema allows its type, or else the text."""
    schema = schema if isinstance(schema, Mapping) else {}
    if _CDATA in text:
        text = text.removeprefix(_CDATA).removesuffix("]]>")
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = from_json(stripped.encode(), allow_inf_nan=False)
    except ValueError:
        try:
            value = ast.literal_eval(stripped)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    is_allowed = not kinds or "string" not in kinds or kinds & _SCHEMA_TYPES.get(type(value), set())
    return value if is_allowed else text
