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

from specgen.text.grammar.schema_parts import options_of, resolved
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
    str: {"string"},
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}
_CONTAINERS = {"array", "object"}
_CDATA = "<![CDATA["


def arguments_of(written: str | Arguments | None) -> Arguments:
    """Return the arguments of an earlier call as an object, which most templates need.

    Arguments that are not an object become the only value, ``text``, of one.
    """
    value: Any = written or {}
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = from_json(value)
    if isinstance(value, dict):
        return value
    return {"text": written}


def as_mapping(schema: Any) -> Mapping[str, Any]:
    """Return the schema if it is an object, or else an empty one: clients may send anything."""
    if isinstance(schema, Mapping):
        return schema
    return {}


def in_json_text(text: str) -> str:
    """Escape a text for use in a JSON string, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ParsedArguments(NamedTuple):
    """The result of reading one piece of a call's arguments."""

    #: The number of characters that were read.
    n_read: int
    #: The JSON for these characters, a continuation of what was returned before.
    json: str
    #: Whether the arguments end after these characters.
    is_over: bool


class _Bracket(NamedTuple):
    """The closing bracket of an open value, as the model writes it and as JSON needs it."""

    written: str
    json: str


class _Quote(enum.Enum):
    """The meaning of a quote that is found while reading a quoted text."""

    #: It closes the text.
    END = enum.auto()
    #: It is part of the text; the model forgot to escape it.
    CHARACTER = enum.auto()
    #: More text is needed to tell.
    UNCLEAR = enum.auto()


class ArgumentsReader:
    """Reads the arguments of a call as they arrive, and writes them as JSON.

    Clients receive the beginning before the end is known, so whatever the model writes becomes
    valid JSON: a backslash that escapes nothing (as in Windows paths) and an unescaped quote stand
    for themselves, a word that is not valid JSON becomes a string, and missing brackets are added.

    Args:
        style: How the arguments are written.
        closing: The text after the call, which ends the arguments even if brackets are missing.
        is_open: Whether the opening bracket of the arguments was read before the first piece.
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
        #: The quote that ends the text that is being read; empty outside of quoted texts.
        self._quote = ""
        #: Whether that text is a key.
        self._is_key = False
        #: The key of the next value, as far as it is read; None if no key has begun.
        self._key: str | None = None
        #: Whether the innermost open value has items already, so that the next needs a comma.
        self._has_items = False
        #: Whether the end of the arguments was read.
        self._is_over = False
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
        """Read as much of a piece as is unambiguous.

        Args:
            text: The characters that the previous call left unread, followed by the new ones.
            is_last: Whether no more text will come, so that the arguments must end here.
        """
        self._text = text
        self._is_last = is_last
        self._place = 0
        added_json = ""
        while self._place < len(text) and not self._is_over:
            previous_place = self._place
            if self._quote:
                added_json += self._read_in_text()
            else:
                added_json += self._read_outside()
            if self._place == previous_place:  # more text is needed
                break
        if is_last and not self._is_over:
            added_json += self._end_here()
        return ParsedArguments(self._place, added_json, self._is_over)

    # Each of these methods reads one thing at `_place`, moves `_place` after it, and returns the
    # JSON to add. If more text is needed to tell what is there, it leaves `_place` unchanged.

    # --- within a text ----------------------------------------------------------------------------

    def _read_in_text(self) -> str:
        """Read plain characters up to the next quote or backslash, or that quote or escape."""
        special_pattern = re.escape(self._quote)
        if self._style != "gemma":  # Gemma's texts have no escapes
            special_pattern += r"|\\"
        special = re.compile(special_pattern).search(self._text, self._place)
        if special is None:
            # A quote of several characters may have begun at the end.
            plain_end = len(self._text) - partial_match_length(self._text, self._quote)
        else:
            plain_end = special.start()
        if plain_end > self._place:
            characters = self._text[self._place : plain_end]
            self._place = plain_end
            return self._add_to_text(characters)
        if special is None:
            return ""
        if special[0] == "\\":
            return self._read_escape()
        return self._read_quote(special.end())

    def _read_escape(self) -> str:
        """Read an escape if it is complete, or if no more text will come."""
        if not self._is_last and _UNFINISHED_ESCAPE.match(self._text, self._place):
            return ""
        escape = _ESCAPE.match(self._text, self._place)
        assert escape is not None, "the pattern matches any backslash"
        self._place = escape.end()
        return self._add_to_text(_unescaped(escape[0], self._style))

    def _read_quote(self, end: int) -> str:
        """Read the quote before the index `end`, which ends the text or is a part of it."""
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
        """Tell an ending quote from a character by the text that follows it."""
        if not following:
            return _Quote.UNCLEAR
        following_an_end = ",}]"
        if self._is_key:
            following_an_end += ":="
        if self._style == "python":
            following_an_end += ")"
        if following[0] in following_an_end:
            return _Quote.END
        if self._closing and following.startswith(self._closing):
            return _Quote.END
        if self._closing.startswith(following):
            return _Quote.UNCLEAR
        return _Quote.CHARACTER

    def _add_to_text(self, text: str) -> str:
        """Return the JSON for a piece of a text; a key is kept until its value begins."""
        escaped = in_json_text(text)
        if not self._is_key:
            return escaped
        self._key = (self._key or "") + escaped
        return ""

    # --- outside of texts -------------------------------------------------------------------------

    def _read_outside(self) -> str:
        """Read separators, a bracket, the quote that begins a text, or a word."""
        separators = _SEPARATORS.match(self._text, self._place)
        if separators is not None:
            self._place = separators.end()
            if "," in separators[0]:  # a key without a value is dropped
                self._key = None
            return ""
        character = self._text[self._place]
        if character in "{[(":
            return self._open_bracket(character)
        if character in "}])":
            return self._close_bracket(character)

        rest = self._text[self._place :]
        # Wait if the rest may be the beginning of a longer quote.
        for quote in _QUOTES[self._style]:
            if not self._is_last and rest != quote and quote.startswith(rest):
                return ""
        for quote in _QUOTES[self._style]:
            if rest.startswith(quote):
                self._place += len(quote)
                return self._begin_text(quote)
        return self._read_word(rest)

    def _read_word(self, rest: str) -> str:
        """Read a word without quotes: a key or a value. Anything else ends the arguments."""
        word = _WORD.match(rest)
        if word is None:
            return self._end_here()
        if word.end() == len(rest) and not self._is_last:  # the word may go on
            return ""
        self._place += word.end()
        if self._expects_key:
            self._key = in_json_text(word[0])
            return ""
        return self._begin_value(_json_word(word[0]))

    def _begin_text(self, quote: str) -> str:
        """Begin a quoted text after its first quote: a key or a value."""
        self._quote = quote
        self._is_key = self._expects_key
        if self._is_key:
            self._key = ""
            return ""
        return self._begin_value('"')

    @property
    def _expects_key(self) -> bool:
        """Whether the innermost open value is an object whose next key has not begun."""
        return bool(self._open) and self._open[-1].json == "}" and self._key is None

    def _open_bracket(self, bracket: str) -> str:
        """Begin an object or a list, except where a key is expected or the nesting is too deep."""
        if self._expects_key or len(self._open) == _MAX_DEPTH:
            return self._end_here()
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
        """Close the innermost open value that has this bracket, and all values within it."""
        levels = [level for level, each in enumerate(self._open) if each.written == bracket]
        if not levels:
            return self._end_here()
        # The values within the one that the bracket closes lack their brackets.
        written = self._close(n_left_open=levels[-1])
        self._is_over = not self._open
        self._place += 1
        return written

    def _begin_value(self, value_start: str) -> str:
        """Return the JSON for the beginning of a value: comma, key, and `value_start`."""
        before = ""
        if self._has_items and self._open:
            before += ", "
        if self._key is not None:
            before += f'"{self._key}": '
        self._key = None
        self._has_items = True
        return before + value_start

    # --- the end ----------------------------------------------------------------------------------

    def _close(self, n_left_open: int) -> str:
        """Close all open values but the outermost `n_left_open`; return the JSON for that."""
        written = ""
        if self._quote and not self._is_key:
            written += '"'
        for bracket in reversed(self._open[n_left_open:]):
            written += bracket.json
        del self._open[n_left_open:]
        self._quote = ""
        self._key = None
        self._has_items = True
        return written

    def _end_here(self) -> str:
        """End the arguments here, since what follows is not part of them."""
        self._is_over = True
        return self._close(n_left_open=0)


def _unescaped(escape: str, style: Style) -> str:
    """Return the character for an escape, or the escape itself if it is not valid."""
    quoted = f'"{escape}"'
    try:
        character = json.loads(quoted) if style == "json" else ast.literal_eval(quoted)
    except (ValueError, SyntaxError):
        return escape
    # A surrogate pair becomes one character; a lone surrogate becomes U+FFFD.
    return str(character).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_word(word: str) -> str:
    """Return a word without quotes as JSON: a literal, a finite number, or else a string."""
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    with contextlib.suppress(ValueError):
        # A literal such as 1e999 parses as infinity, which JSON does not have.
        if abs(from_json(word, allow_inf_nan=False) or 0) < math.inf:
            return word
    return json.dumps(word, ensure_ascii=False)


# --- values without quotes ------------------------------------------------------------------------


class TypedValues:
    """Turns texts without quotes into JSON values, with types that the arguments' schemas allow.

    Args:
        parameters: The JSON schema of all arguments, to which references in their schemas refer.
        tag_prefix: What begins each tag, such as ``<``, if lists and objects are written as tags
            within tags; empty if they are written as JSON.
    """

    def __init__(self, parameters: Mapping[str, Any], tag_prefix: str = "") -> None:
        self._root = dict(parameters)
        self._tag_prefix = tag_prefix

    def json_of(self, text: str, schema: Any) -> str:
        """Return the value of the text between the marks of an argument, as JSON.

        A text that is neither JSON nor Python stays a text, whatever the schema says.
        """
        try:
            value = self._nested_value(text, schema)
            value_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
            value_json.encode()  # fails on lone surrogates
        except (TypeError, ValueError, RecursionError):  # Python values may not be JSON either
            return json.dumps(text, ensure_ascii=False)
        return value_json

    def resolved(self, schema: Any) -> Mapping[str, Any]:
        """Return a schema, or the one that it refers to; an empty one if there is none."""
        return as_mapping(resolved(self._root, schema))

    def types_of(self, schema: Any) -> set[str]:
        """Return the names of the JSON types that a schema allows; empty if it may allow any."""
        try:
            return self._types_of(schema)
        except (TypeError, RecursionError):  # it is not valid, or is one of its own options
            return set()

    def _nested_value(self, text: str, schema: Any) -> Any:
        """Return the value of a text in which lists and objects may be written as tags within tags.

        A list is ``<item>VALUE</item>...``, an object ``<NAME>VALUE</NAME>...``.
        """
        if not self._tag_prefix:
            return self._value(text, schema)
        schema = self._container_schema(schema)
        kinds = self._types_of(schema)
        elements = _elements(text, self._tag_prefix)
        may_be_container = not kinds.isdisjoint(_CONTAINERS)
        is_empty_container = not text.strip() and may_be_container and "string" not in kinds
        if not elements and not is_empty_container:
            return self._value(text, schema)
        # Without elements, this is true: an empty container is a list unless it may be an object.
        if "object" not in kinds and all(name == "item" for name, _ in elements):
            item_schema = schema.get("items")
            return [self._nested_value(content, item_schema) for _, content in elements]
        properties = as_mapping(schema.get("properties"))
        fields: Arguments = {}
        for name, content in elements:
            fields[name] = self._nested_value(content, properties.get(name))
        return fields

    def _container_schema(self, schema: Any) -> Mapping[str, Any]:
        """Return the schema of a list or object if it is an option of a schema, or the schema.

        Pydantic describes an optional list as a choice of a list and null.
        """
        whole_schema = self.resolved(schema)
        for option in options_of(whole_schema):
            if not self._types_of(option).isdisjoint(_CONTAINERS):
                return self.resolved(option)
        return whole_schema

    def _value(self, text: str, schema: Any) -> Any:
        """Return the value that a text has in JSON or Python, or the text if it must be one."""
        if text.startswith(_CDATA):
            text = text.removeprefix(_CDATA).removesuffix("]]>")
        kinds = self._types_of(schema)
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
        # If the schema allows strings, the text is one, unless the type of its value is allowed
        # too.
        if "string" in kinds and not kinds & _SCHEMA_TYPES.get(type(value), set()):
            return text
        return value

    def _types_of(self, schema: Any) -> set[str]:
        """Do what `types_of` does, for valid schemas only."""
        schema = self.resolved(schema)
        kinds = schema.get("type", ())
        if kinds:
            return {kinds} if isinstance(kinds, str) else set(kinds)
        choices = schema.get("enum")
        if isinstance(choices, list):
            return set().union(*(_SCHEMA_TYPES.get(type(choice), set()) for choice in choices))
        types_of_options = [self._types_of(option) for option in options_of(schema)]
        if not all(types_of_options):
            return set()
        return set().union(*types_of_options)


def _elements(text: str, tag_prefix: str) -> list[tuple[str, str]]:
    """Return the name and the content of each outermost element in a text."""
    elements: list[tuple[str, str]] = []
    _, opening, rest = text.partition(tag_prefix)
    while opening:
        name, _, rest = rest.partition(">")
        content = _element_content(rest, name, tag_prefix)
        elements.append((name, content))
        closing_tag = f"{tag_prefix}/{name}>"
        _, opening, rest = rest[len(content) + len(closing_tag) :].partition(tag_prefix)
    return elements


def _element_content(
    text: str,
    name: str,
    tag_prefix: str,
) -> str:
    """Return the text before the closing tag of an element, or all of it if that tag is missing.

    Args:
        text: The text after the opening tag.
        name: The name in the tag.
        tag_prefix: What begins a tag, such as ``<``.
    """
    # Elements of the same name may be nested, so count how many are open.
    depth = 1
    for tag in re.finditer(rf"{re.escape(tag_prefix)}(/?){re.escape(name)}>", text):
        if tag[1] == "/":
            depth -= 1
        else:
            depth += 1
        if depth == 0:
            return text[: tag.start()]
    return text
