"""Values of arguments in the texts that models write: JSON, Python, Gemma's objects, and texts without quotes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

#: The values of arguments by their keys.
Arguments = dict[str, Any]
_DECODER = json.JSONDecoder()
_ESCAPE, _ESCAPED = re.compile(r"\\(.?)", re.DOTALL), '"\\/bfnrtu'
_JSON_NAMES = {"true": True, "false": False, "null": None}


def raw_json(text: str, start: int) -> tuple[Any, int]:
    """Read a value of JSON; a backslash that escapes nothing, as those of Windows' paths, stands for itself."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Invalid \\escape"):
            raise
    added: list[int] = []  # places of added backslashes in the mended text

    def mend(found: re.Match[str]) -> str:
        if found[1] and found[1] in _ESCAPED:
            return found[0]
        added.append(found.start() + len(added))
        return "\\" + found[0]

    value, end = _DECODER.raw_decode(_ESCAPE.sub(mend, text[start:]))
    return value, start + end - sum(place < end for place in added)


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a text without quotes is, by the types that the schema of the argument allows."""
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
    is_wanted = not kinds or "string" not in kinds or (value is None and "null" in kinds)
    return value if is_wanted else text


def gemma_value(text: str, start: int) -> tuple[int, Any]:
    """Read a value as Gemma writes it: texts between marks, keys without quotes. Raise IndexError at its end."""
    quote = '<|"|>'
    if text.startswith(quote, start):
        end = text.find(quote, start + len(quote))
        if end < 0:
            raise IndexError
        return end + len(quote), text[start + len(quote) : end]
    if text[start] in "{[":
        is_object = text[start] == "{"
        items: list[Any] = []
        while text[start] not in "}]":
            start += 1
            if text[start] in "}]":
                break
            key = None
            if is_object:
                end = text.index(":", start) if ":" in text[start:] else len(text)
                key, start = (
                    text[start:end].strip().removeprefix(quote).removesuffix(quote),
                    end + 1,
                )
            start, value = gemma_value(text, start)
            items.append((key, value) if is_object else value)
            if text[start] not in ",}]":
                raise ValueError(text[start])
        return start + 1, dict(items) if is_object else items
    found = re.compile(r"[^,}\]\s]+").match(text, start)
    if found is None or found.end() == len(text):
        raise IndexError
    return found.end(), json.loads(found[0])


def python_arguments(text: str, start: int) -> tuple[int, Arguments]:
    """Read the arguments of a call in Python, from the opening bracket on."""
    if text[start] != "(":
        raise ValueError(text[start])
    place = start
    while (place := text.find(")", place) + 1) > 0:
        try:
            call = ast.parse(f"f{text[start:place]}", mode="eval").body
        except (SyntaxError, ValueError):
            continue
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(text[start:place])
        return place, {str(each.arg): _python_value(each.value) for each in call.keywords}
    raise IndexError


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    return ast.literal_eval(node)
