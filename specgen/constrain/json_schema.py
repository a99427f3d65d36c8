"""JSON schemas (draft 2020-12) as grammars, which llguidance reads.

llguidance honours a schema or refuses it by the name of a keyword. JSON is written on one line, with
properties in the schema's order. As in llama.cpp, an object has no other properties than those that the
schema names, unless it says that it may.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from specgen.constrain.llguidance_grammar import problem_of
from specgen.errors import UsageError
from specgen.options import Grammar

#: What says nothing about the text, beside which a reference or an alternative is all there is.
_SILENT = frozenset(
    [
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    ]
)
#: Keywords that say which properties there may be beside those that are named, or how many.
_OPENING = frozenset(
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"]
)
_ALTERNATIVES = ("anyOf", "oneOf")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_OUTER_REFERENCE = re.compile("Resource '(.*)' is not present in a registry")
_N_SHOWN = 300


def schema_grammar(schema: str) -> Grammar:
    """The grammar of the JSON texts that conform to a schema; ``{}`` is any object. References are
    resolved within the schema, and never fetched. Raises `UsageError` if the text is no schema, or one
    that nothing conforms to or that cannot be honoured."""
    parsed = _parse(schema) or {"type": "object"}
    grammar = Grammar("json_schema", json.dumps(_closed(parsed)))
    problem = problem_of(grammar)
    if problem is not None:
        raise UsageError(f"the JSON schema cannot be enforced: {_plain(problem)}")
    return grammar


def _parse(schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"the JSON schema is {json.dumps(parsed)[:40]}, not an object")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value")


def _plain(problem: str) -> str:
    """What llguidance says, in one line."""
    keywords, reference = _UNKNOWN_KEYWORDS.search(problem), _OUTER_REFERENCE.search(problem)
    if keywords is not None:
        return f"no grammar can enforce {keywords[1]}"
    if reference is not None:
        return f"$ref {reference[1]!r} leads out of the schema"
    text = " ".join(problem.split())
    return text if len(text) <= _N_SHOWN else f"{text[:_N_SHOWN]}..."


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with ``additionalProperties: false`` in objects that say nothing of others than
    the properties that they name. Objects that hold together with others, by ``allOf`` for example,
    stay as they are: what one of them names is another one's additional property."""
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    parts = list(_parts(closed))
    if any(
        "allOf" in part or ("$ref" in part and part.keys() - _SILENT - {"$ref"}) for part in parts
    ):
        return closed
    todo: list[Any] = [closed]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        todo += _children(part)
        alternatives = [name for name in _ALTERNATIVES if name in part]
        if alternatives:
            if len(alternatives) == 1 and not part.keys() - _SILENT - {*alternatives}:
                todo += _list(part[alternatives[0]])
        elif _names_all(part):
            part["additionalProperties"] = False
    return closed


def _names_all(part: dict[str, Any]) -> bool:
    """Whether a schema names the properties of an object, and says nothing of others."""
    named, required = part.get("properties"), part.get("required", [])
    if not isinstance(named, dict) or part.keys() & _OPENING:
        return False
    return isinstance(required, list) and all(name in named for name in required)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those within it."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += _children(part)
            for name in (*_ALTERNATIVES, "allOf"):
                todo += _list(part.get(name))


def _children(part: dict[str, Any]) -> list[Any]:
    """The schemas within a schema that are about other values than itself, or only referred to."""
    found = [part.get(name) for name in ("items", "additionalProperties")]
    found += _list(part.get("prefixItems"))
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        named = part.get(name)
        found += named.values() if isinstance(named, dict) else []
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


__all__ = ["schema_grammar"]
