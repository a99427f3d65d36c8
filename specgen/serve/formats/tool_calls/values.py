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
from collections.abc import Mapping
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
_CLOSING = {
    "{": "}",
    "[": "]",
    "(": ")",
}
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
_PYTHON_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
}
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
    if isinstance(value, dict):
        return value
    return {"text": written}


def as_mapping(schema: Any) -> Mapping[str, Any]:
    """Return a schema that is an object, or an empty one: clients send anything."""
    if isinstance(schema, Mapping):
        return schema
    return {}


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

    def __init__(
        self,
        style: Style,
        closing: str = "",
        *,
        is_open: bool = False,
    ) -> None:
        self._style = style
        self._closing = closing.strip()
        #: The brackets that close the open values, the innermost last.
        self._open: list[_Bracket] = []
        if is_open:
            self._open.append(_Bracket("}", "}"))
        #: What ends the text that is being read; empty outside of texts.
        self._quote = ""
        #: Whether that text is a key.
        self._is_key = False
        #: The key of the next value, as far as it is read; None before there is one.
        self._key: str | None = None
        #: Whether the innermost value has items already.
        self._has_items = False
        self._is_over = False
        #: What `read` was given, and how much of it is read.
        self._text = ""
        self._is_last = False
        self._place = 0

    def read(self, text: str, *, is_last: bool = False) -> ReadArguments:
        """Read on in the arguments.

        Args:
            text: What the last call left unread, and what has arrived since.
            is_last: Whether no more text will come, so that the arguments must end here.
        """
        self._text = text
        self._is_last = is_last
        self._place = 0
        written = ""
        while self._place < len(text) and not self._is_over:
            place = self._place
            if self._quote:
                written += self._read_in_text()
            else:
                written += self._read_outside()
            if self._place == place:  # more text is needed
                break
        if is_last and not self._is_over:
            written += self._give_up()
        return ReadArguments(self._place, written, self._is_over)

    # Each of these reads on from `_place`, which stays if more text is needed, and returns the JSON
    # that this adds.

    # --- within a text ----------------------------------------------------------------------------

    def _read_in_text(self) -> str:
        """Read characters, an escape, or a quote."""
        special = re.escape(self._quote)
        if self._style != "gemma":
            special += r"|\\"
        found = re.compile(special).search(self._text, self._place)
        if found is None:
            end = len(self._text) - partial_match_length(self._text, self._quote)
        else:
            end = found.start()
        if end > self._place:
            characters = self._text[self._place : end]
            self._place = end
            return self._add_to_text(characters)
        if found is None:
            return ""
        if found[0] == "\\":
            return self._read_escape()
        return self._read_quote(found.end())

    def _read_escape(self) -> str:
        if not self._is_last and _UNFINISHED_ESCAPE.match(self._text, self._place):
            return ""
        found = _ESCAPE.match(self._text, self._place)
        assert found is not None, "the pattern matches any backslash"
        self._place = found.end()
        return self._add_to_text(_unescaped(found[0], self._style))

    def _read_quote(self, end: int) -> str:
        meaning = self._meaning_of_quote(self._text[end:].lstrip())
        if meaning is _Quote.UNCLEAR and not self._is_last:
            return ""
        self._place = end
        if meaning is _Quote.CHARACTER:
            return self._add_to_text(self._quote)
        self._quote = ""
        if self._is_key:
            self._is_key = False
            return ""
        return '"'

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
        if self._closing.startswith(following):
            return _Quote.UNCLEAR
        return _Quote.CHARACTER

    def _add_to_text(self, text: str) -> str:
        """Return what a piece of a text adds; keys are kept until their value begins."""
        piece = in_json_text(text)
        if not self._is_key:
            return piece
        self._key = (self._key or "") + piece
        return ""

    # --- outside of texts -------------------------------------------------------------------------

    def _read_outside(self) -> str:
        """Read separators, a bracket, the quote that begins a text, or a word."""
        separators = _SEPARATORS.match(self._text, self._place)
        if separators is not None:
            self._place = separators.end()
            if "," in separators[0]:
                self._key = None
            return ""
        character = self._text[self._place]
        if character in "{[(":
            return self._open_bracket(character)
        if character in "}])":
            return self._close_bracket(character)

        rest = self._text[self._place :]
        for quote in _QUOTES[self._style]:
            if not self._is_last and rest != quote and quote.startswith(rest):
                return ""
        for quote in _QUOTES[self._style]:
            if rest.startswith(quote):
                self._place += len(quote)
                return self._begin_text(quote)
        return self._read_word(rest)

    def _read_word(self, rest: str) -> str:
        word = _WORD.match(rest)
        if word is None:
            return self._give_up()
        if word.end() == len(rest) and not self._is_last:
            return ""
        self._place += word.end()
        if self._expects_key:
            self._key = in_json_text(word[0])
            return ""
        return self._begin_value(_json_word(word[0]))

    def _begin_text(self, quote: str) -> str:
        self._quote = quote
        self._is_key = self._expects_key
        if self._is_key:
            self._key = ""
            return ""
        return self._begin_value('"')

    @property
    def _expects_key(self) -> bool:
        return bool(self._open) and self._open[-1].json == "}" and self._key is None

    def _open_bracket(self, bracket: str) -> str:
        if self._expects_key or len(self._open) == _MAX_DEPTH:
            return self._give_up()
        # Parentheses around all arguments are an object; others are a tuple of Python.
        json_bracket = "["
        if bracket == "{" or (bracket == "(" and not self._open):
            json_bracket = "{"
        written = self._begin_value(json_bracket)
        self._open.append(_Bracket(_CLOSING[bracket], _CLOSING[json_bracket]))
        self._has_items = False
        self._place += 1
        return written

    def _close_bracket(self, bracket: str) -> str:
        levels = [level for level, each in enumerate(self._open) if each.written == bracket]
        if not levels:
            return self._give_up()
        written = self._close(levels[-1])
        self._is_over = not self._open
        self._place += 1
        return written

    def _begin_value(self, begun: str) -> str:
        """Return the beginning of a value, after its comma and its key."""
        before = ""
        if self._has_items and self._open:
            before += ", "
        if self._key is not None:
            before += f'"{self._key}": '
        self._key = None
        self._has_items = True
        return before + begun

    # --- the end ----------------------------------------------------------------------------------

    def _close(self, n_left: int) -> str:
        """Close all open values but the outermost `n_left`; return what that adds."""
        written = ""
        if self._quote and not self._is_key:
            written += '"'
        for bracket in reversed(self._open[n_left:]):
            written += bracket.json
        del self._open[n_left:]
        self._quote = ""
        self._key = None
        self._has_items = True
        return written

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
    # Two surrogates are one character, a lone one is none.
    return str(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_word(word: str) -> str:
    """Return a word without quotes as a JSON value."""
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    with contextlib.suppress(ValueError):
        if abs(from_json(word, allow_inf_nan=False) or 0) < math.inf:
            return word
    return json.dumps(word, ensure_ascii=False)


# --- values without quotes ------------------------------------------------------------------------


def typed_json(text: str, schema: Any, nested_tag: str = "") -> str:
    """Return a text without quotes as JSON, with a type that the argument's schema allows.

    Args:
        text: The text between the marks of an argument.
        schema: The JSON schema of the argument.
        nested_tag: How the tags begin in which lists and objects are written; empty for none.
    """
    try:
        value = _nested_value(text, schema, nested_tag)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (TypeError, ValueError, RecursionError):  # Python values and lone surrogates, too
        return json.dumps(text, ensure_ascii=False)
    return found


def _nested_value(text: str, schema: Any, tag: str) -> Any:
    """Return the value of a text in which lists and objects may be tags within tags."""
    if not tag:
        return _value(text, schema)
    schema = as_mapping(schema)
    kinds = schema.get("type", ())
    children = _children(text, tag)
    is_container = bool(children) or (not text.strip() and kinds in ("array", "object"))
    if not is_container:
        return _value(text, schema)
    if "object" not in kinds and all(name == "item" for name, _ in children):
        items = schema.get("items")
        return [_nested_value(content, items, tag) for _, content in children]
    properties = schema.get("properties", {})
    return {name: _nested_value(content, properties.get(name), tag) for name, content in children}


def _children(text: str, tag: str) -> list[tuple[str, str]]:
    """Return the names and the contents of the outermost tags in a text."""
    found: list[tuple[str, str]] = []
    _, opening, rest = text.partition(tag)
    while opening:
        name, _, rest = rest.partition(">")
        content = _up_to_closing_tag(rest, name, tag)
        found.append((name, content))
        closing = f"{tag}/{name}>"
        _, opening, rest = rest[len(content) + len(closing) :].partition(tag)
    return found


def _up_to_closing_tag(text: str, name: str, tag: str) -> str:
    depth = 1
    for found in re.finditer(rf"{re.escape(tag)}(/?){re.escape(name)}>", text):
        is_closing = found[1] == "/"
        if not is_closing:
            depth += 1
            continue
        depth -= 1
        if depth == 0:
            return text[: found.start()]
    return text


def _value(text: str, schema: Any) -> Any:
    """Return the value of a text if the schema allows its type, or else the text."""
    if _CDATA in text:
        text = text.removeprefix(_CDATA).removesuffix("]]>")
    kinds = as_mapping(schema).get("type", ())
    if isinstance(kinds, str):
        kinds = [kinds]
    kinds = set(kinds)
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
    # Where texts are allowed, it is one, unless the schema also allows the type it looks like.
    if "string" in kinds and not kinds & _SCHEMA_TYPES.get(type(value), set()):
        return text
    return value
