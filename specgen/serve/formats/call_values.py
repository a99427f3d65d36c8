"""Values of arguments in the texts that models write: JSON, Python, Gemma's objects, and texts
without quotes.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic_core import from_json

from specgen.text.overlap import partial_match_length

#: The values of arguments by their keys.
Arguments = dict[str, Any]
Style: TypeAlias = Literal["json", "python", "gemma"]
_QUOTES: Mapping[Style, tuple[str, ...]] = {
    "json": ('"',),
    "python": ('"""', "'''", '"', "'"),
    "gemma": ('<|"|>', "<escape>"),
}
_BETWEEN, _WORD = re.compile(r"[\s,:=]*"), re.compile(r"[^\s,:=(){}\[\]<>|\"']+")
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.|\Z)",
    re.DOTALL,
)
#: An escape that more text may change.
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?"
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z"
)
_NAMES = {"True": "true", "False": "false", "None": "null"}
_MOST_DEPTH = 100
#: The types of JSON schemas that a value has.
_KINDS: Mapping[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}


def arguments_of(text: str | dict[str, Any] | None) -> Mapping[str, Any]:
    """Return the arguments as an object; what a model wrote instead of one is in it, since most
    templates want one.
    """
    value: Any = text or {}
    if isinstance(text, str) and text:
        try:
            value = from_json(text)
        except ValueError:
            value = text
    return value if isinstance(value, dict) else {"text": text}


class ArgumentsReader:
    """Reads the arguments of a call in pieces, and writes them as JSON.

    A client has the beginning before the end is known, so JSON is written whatever is read: a
    backslash that escapes nothing, as those of Windows' paths, and a quote within a text stand for
    themselves, a word that JSON lacks becomes a text, and brackets that are missing are added.
    `closing` ends a call whose brackets are missing.
    """

    def __init__(self, style: Style, closing: str = "", *, is_open: bool = False) -> None:
        self._style, self._quotes, self._closing = style, _QUOTES[style], closing.strip()
        #: The brackets that end what is open, as they are read and as they are written.
        self._open = [("}", "}")] if is_open else []
        #: What ends the text that is read; whether that is a key, or the key of the next value.
        self._quote, self._is_key = "", False
        self._key: str | None = None
        self._has_items = self._is_over = False

    def read(self, text: str, *, is_last: bool = False) -> tuple[int, str, bool]:
        """Return how many characters are read, what they add, and whether the arguments end there.
        With `is_last` they do.
        """
        place, written = 0, ""
        while place < len(text) and not self._is_over:
            step = self._inside if self._quote else self._outside
            end, piece = step(text, place, is_last)
            written += piece
            if end == place:
                break
            place = end
        if is_last and not self._is_over:
            self._is_over, written = True, written + self._ended(0)
        return place, written, self._is_over

    def _ended(self, n_left: int) -> str:
        """End what is open, down to so many brackets; return what that adds."""
        quote = '"' if self._quote and not self._is_key else ""
        ends = "".join(end for _, end in reversed(self._open[n_left:]))
        self._quote, self._key, self._open = "", None, self._open[:n_left]
        self._has_items = True
        return quote + ends

    def _inside(self, text: str, place: int, is_last: bool) -> tuple[int, str]:
        """Read a part of a text in quotes."""
        escape = "" if self._style == "gemma" else r"|\\"
        mark = re.compile(re.escape(self._quote) + escape).search(text, place)
        end = len(text) - partial_match_length(text, self._quote) if mark is None else mark.start()
        if end > place:
            piece = text[place:end]
        elif mark is None:
            return place, ""
        elif text[place] == "\\":
            if not is_last and _ESCAPE_BEGUN.match(text, place):
                return place, ""
            found = _ESCAPE.match(text, place)
            assert found is not None
            end, piece = found.end(), _unescaped(found[0], self._style)
        else:
            is_end = self._ends_text(text, mark.end())
            if is_end is None and not is_last:
                return place, ""
            if is_end is not False:
                is_key, self._quote, self._is_key = self._is_key, "", False
                return mark.end(), "" if is_key else '"'
            end, piece = mark.end(), self._quote
        piece = json.dumps(piece, ensure_ascii=False)[1:-1]
        if self._is_key:
            self._key, piece = (self._key or "") + piece, ""
        return end, piece

    def _ends_text(self, text: str, place: int) -> bool | None:
        """Return whether a quote ends a text, by what follows it; None if that is not known yet."""
        following = text[_SPACE.match(text, place).end() :]  # type: ignore[union-attr]
        if not following:
            return None
        ends = ",}]" + (":=" if self._is_key else "") + (")" if self._style == "python" else "")
        if following[0] in ends or (self._closing and following.startswith(self._closing)):
            return True
        return None if self._closing.startswith(following) else False

    def _outside(self, text: str, place: int, is_last: bool) -> tuple[int, str]:
        """Read what stands between texts: brackets, words, and the beginning of a text."""
        start = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if start > place:
            if "," in text[place:start]:
                self._key = None
            return start, ""
        is_key = bool(self._open) and self._open[-1][1] == "}" and self._key is None
        if text[place] in "{[(}])":
            return self._bracket(text, place, is_key)
        begun = text[place:]
        if not is_last and any(begun != each and each.startswith(begun) for each in self._quotes):
            return place, ""
        quote = next((each for each in self._quotes if begun.startswith(each)), None)
        if quote is not None:
            self._quote, self._is_key = quote, is_key
            self._key = "" if is_key else self._key
            return place + len(quote), "" if is_key else self._value('"')
        word = _WORD.match(text, place)
        if word is None:
            return self._broken(place)
        if word.end() == len(text) and not is_last:
            return place, ""
        if is_key:
            self._key = json.dumps(word[0], ensure_ascii=False)[1:-1]
            return word.end(), ""
        return word.end(), self._value(_word(word[0]))

    def _bracket(self, text: str, place: int, is_key: bool) -> tuple[int, str]:
        bracket = text[place]
        if bracket in "{[(":
            if is_key or len(self._open) == _MOST_DEPTH:
                return self._broken(place)
            is_object = bracket == "{" or (bracket == "(" and not self._open)
            written = self._value("{" if is_object else "[")
            self._open.append(("})]"["{([".index(bracket)], "}" if is_object else "]"))
            self._has_items = False
            return place + 1, written
        wanted = [n for n, (end, _) in enumerate(self._open) if end == bracket]
        if not wanted:
            return self._broken(place)
        written = self._ended(wanted[-1])
        self._is_over = not self._open
        return place + 1, written

    def _broken(self, place: int) -> tuple[int, str]:
        self._is_over = True
        return place, self._ended(0)

    def _value(self, begun: str) -> str:
        """Return the beginning of a value, with what stands before it."""
        before = ", " if self._has_items and self._open else ""
        if self._key is not None:
            before += f'"{self._key}": '
        self._key, self._has_items = None, True
        return before + begun


def _unescaped(escape: str, style: Style) -> str:
    try:
        found = json.loads(f'"{escape}"') if style == "json" else ast.literal_eval(f'"{escape}"')
    except (ValueError, SyntaxError):
        return escape
    return str(found).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _word(word: str) -> str:
    """Return a word without quotes as a value of JSON."""
    try:
        is_value = abs(from_json(word, allow_inf_nan=False) or 0) < math.inf
    except ValueError:
        is_value = False
    return word if is_value else _NAMES.get(word) or json.dumps(word, ensure_ascii=False)


def typed_json(text: str, schema: Any, nests: str = "") -> str:
    """Return a text without quotes as JSON: as the value that it is by the types that the
    argument's schema allows. Lists and objects may be tags within tags, which begin with `nests`.
    """
    try:
        value = _nested(text, schema, nests) if nests else _typed(text, schema)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        found.encode()
    except (TypeError, ValueError, RecursionError):  # of Python's values and surrogates, too
        found = json.dumps(text, ensure_ascii=False)
    return found


def _nested(text: str, schema: Any, nests: str) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    tags, place, kinds = list[tuple[str, str]](), 0, schema.get("type", ())
    while (start := text.find(nests, place)) >= 0:
        name, _, behind = text[start + len(nests) :].partition(">")
        inner = _inner(behind, name, nests)
        tags.append((name, inner))
        place = len(text) - len(behind) + len(inner) + len(f"{nests}/{name}>")
    if not tags and (text.strip() or kinds not in ("array", "object")):
        return _typed(text, schema)
    if "object" not in kinds and all(name == "item" for name, _ in tags):
        return [_nested(inner, schema.get("items"), nests) for _, inner in tags]
    properties = schema.get("properties", {})
    return {name: _nested(inner, properties.get(name), nests) for name, inner in tags}


def _inner(text: str, name: str, nests: str) -> str:
    """Return what comes before the end of a tag that has begun."""
    depth = 1
    for found in re.finditer(rf"{re.escape(nests)}(/?){re.escape(name)}>", text):
        depth += -1 if found[1] else 1
        if not depth:
            return text[: found.start()]
    return text


def _typed(text: str, schema: Any) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    text = text.removeprefix("<![CDATA[").removesuffix("]]>") if "<![CDATA[" in text else text
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds == {"string"}:
        return text
    try:
        value = from_json(text.strip().encode(), allow_inf_nan=False)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    is_wanted = not kinds or "string" not in kinds or kinds & _KINDS.get(type(value), set())
    return value if is_wanted else text
