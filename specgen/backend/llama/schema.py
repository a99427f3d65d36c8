"""JSON schemas as grammars, by llama-cpp-python's converter.

The converter refuses with bare assertions, takes a reference for the rule that happens to have
the name, reads patterns in a way of its own (see `pattern`), and writes a rule for strings that
allows raw line breaks, which JSON does not. All of that is dealt with here, on the schema before
and on the grammar after, and what it passes over in silence can be asked for with
`unenforced_keywords`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

from llama_cpp import llama_grammar

from specgen.backend.llama.pattern import portable_pattern
from specgen.errors import UsageError

#: Where the targets of references go, under names that no rule has.
_TARGETS = "specgen-targets"
#: The converter's rule for a character of a string, and the one that it should be (RFC 8259).
_LOOSE_CHARACTER = r'char ::= [^"\\] |'
_JSON_CHARACTER = r'char ::= [^"\\\x7F\x00-\x1F] |'

#: What the converter reads, at least in some schemas, and what says nothing about the text.
_READ = frozenset(
    [
        "$ref",
        "type",
        "format",
        "oneOf",
        "anyOf",
        "allOf",
        "const",
        "enum",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "pattern",
        "minLength",
        "maxLength",
    ]
)
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
#: Keywords whose values are schemas, lists of them, or schemas by name.
_ONE = ("items", "additionalProperties")
_LISTS = ("oneOf", "anyOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "$defs", "definitions")


def json_schema_to_gbnf(schema: str) -> str:
    """A grammar for the JSON texts that a schema describes, properties in the schema's order.

    References are resolved within the schema, never fetched. Raises `UsageError` if the text
    is not JSON, or not a schema that can be converted.
    """
    parsed = _parse(schema)
    try:
        _rewrite_patterns(parsed)
        parsed = _name_targets(parsed)
        _check_no_fetching(parsed)
        grammar = llama_grammar.json_schema_to_gbnf(json.dumps(parsed))
    except UsageError:
        raise
    except RecursionError:
        _fail("it is nested too deeply, or repeats something too often")
    except Exception as error:
        what = str(error).split("\n", maxsplit=1)[0][:200]
        raise UsageError(
            f"the JSON schema cannot be made a grammar: {what or type(error).__name__}"
        ) from error
    lines = grammar.split("\n")
    return "\n".join(
        _JSON_CHARACTER + line.removeprefix(_LOOSE_CHARACTER)
        if line.startswith(_LOOSE_CHARACTER)
        else line
        for line in lines
    )


def unenforced_keywords(schema: str) -> tuple[str, ...]:
    """Keywords of a schema that the grammar does not enforce, sorted: ``minimum``, for one.

    Keywords that are enforced in some places only count as enforced.
    """
    found: set[str] = set()
    for part in _schemas(_parse(schema)):
        found |= part.keys() - _READ - _SILENT - {_TARGETS}
    return tuple(sorted(found))


def _fail(what: str) -> NoReturn:
    raise UsageError(f"the JSON schema cannot be made a grammar: {what}")


def _parse(schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"the JSON schema is {json.dumps(parsed)[:40]}, not an object")
    return parsed


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those within it."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield part
        todo += [part[key] for key in _ONE if key in part]
        for key in _LISTS:
            todo += part[key] if isinstance(part.get(key), list) else []
        for key in _NAMED:
            todo += part[key].values() if isinstance(part.get(key), dict) else []


def _name_targets(schema: dict[str, Any]) -> dict[str, Any]:
    """Let each reference name a copy of its target that has a name of its own: the converter
    takes ``#/$defs/item`` for any rule ``item``, and does not know ``#`` or escapes."""
    references = [part for part in _schemas(schema) if "$ref" in part]
    names: dict[str, str] = {}
    targets: dict[str, Any] = {}
    while references:
        part = references.pop()
        pointer = part["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            _fail(f"$ref {pointer!r} leads out of the schema")
        if pointer not in names:
            target = _follow(schema, pointer)
            names[pointer] = f"ref-{len(names)}-target"
            targets[names[pointer]] = target
            references += [inner for inner in _schemas(target) if "$ref" in inner]
    if not targets:
        return schema
    copies = json.loads(json.dumps(targets))
    for part in [
        *_schemas(schema),
        *(inner for copy in copies.values() for inner in _schemas(copy)),
    ]:
        if "$ref" in part:
            part["$ref"] = f"#/{_TARGETS}/{names[part['$ref']]}"
    if "$ref" in schema:  # the converter looks no further, not even for references in its target
        schema = {"anyOf": [{"$ref": schema["$ref"]}]}
    return {**schema, _TARGETS: copies}


def _follow(schema: dict[str, Any], pointer: str) -> Any:
    """What a JSON pointer (RFC 6901) leads to."""
    target: Any = schema
    for step in unquote(pointer).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        elif isinstance(target, dict) and key in target:
            target = target[key]
        else:
            _fail(f"$ref {pointer!r} leads nowhere: there is no {key!r}")
    return target


def _check_no_fetching(schema: dict[str, Any]) -> None:
    """The converter follows references anywhere, even where they are data; that it does not
    fetch them is an assertion, which ``python -O`` leaves out."""
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            pointer = part.get("$ref")
            if isinstance(pointer, str) and not pointer.startswith("#/"):
                _fail(f"$ref {pointer!r} leads out of the schema")
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def _rewrite_patterns(schema: dict[str, Any]) -> None:
    for part in _schemas(schema):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = portable_pattern(part["pattern"], _fail)
