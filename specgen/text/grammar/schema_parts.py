"""What JSON schemas say: their parts, and the types, values and properties of a part.

Schemas come from outside, so a keyword may have a value of any kind. A value of a wrong kind is
treated here as if the keyword were absent.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

#: A schema that is an object, so neither `true` nor `false`.
Part: TypeAlias = dict[str, Any]

#: Keywords for schemas within a schema that describe the same value as it does.
IN_PLACE = ("allOf", "anyOf", "oneOf")
#: Keywords about properties that are not listed by name.
ABOUT_UNLISTED = frozenset(["additionalProperties", "patternProperties", "unevaluatedProperties"])
#: All keywords about properties.
ABOUT_PROPERTIES = ABOUT_UNLISTED | {
    *("properties", "required", "minProperties", "maxProperties", "propertyNames"),
    *("not", "if", "dependencies", "dependentRequired", "dependentSchemas"),
}
#: Keywords that constrain a value, other than its type and schemas in place.
CONSTRAINTS = ABOUT_PROPERTIES | {
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("pattern", "minLength", "maxLength", "format", "enum", "const", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
TYPES = frozenset(["null", "boolean", "number", "integer", "string", "array", "object"])
#: How deep two schemas are compared, and how many references are followed from one to the next.
MAX_DEPTH = 8
#: The types of values that Python's JSON reader makes.
_PYTHON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    str: "string",
    type(None): "null",
}


def parts(schema: Any) -> Iterator[Part]:
    """Yield a schema and all schemas within it."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        yield part
        todo += [part.get("items"), part.get("additionalProperties")]
        for keyword in ("items", "prefixItems", *IN_PLACE):
            todo += as_list(part.get(keyword))
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            named = part.get(keyword)
            if isinstance(named, dict):
                todo += named.values()


def same_value_parts(root: Part, group: Iterable[Part]) -> dict[int, Part]:
    """Return some schemas, and all others that describe the same value, by their `id`."""
    found: dict[int, Part] = {}
    todo = deque(group)
    while todo:
        part = todo.popleft()
        found[id(part)] = part
        inner = [each for keyword in IN_PLACE for each in as_list(part.get(keyword))]
        inner += [part.get("then"), part.get("else")]
        if "$ref" in part:
            inner.append(resolved(root, part))
        todo.extend(each for each in inner if isinstance(each, dict) and id(each) not in found)
    return found


def resolved(root: Part, schema: Any) -> Any:
    """Follow the references of a schema, within the root schema.

    Returns:
        The schema that is referred to; `{}`, which allows everything, if it cannot be found.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _referenced(root, schema["$ref"])
    return {}


def _referenced(root: Part, reference: str) -> Any:
    base, _, pointer = reference.partition("#")
    if base not in ("", root.get("$id"), root.get("id")):
        return {}
    found: Any = root
    for escaped in unquote(pointer).split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = {str(index): each for index, each in enumerate(found)}
        if not isinstance(found, dict):
            return {}
        found = found.get(name, {})
    return found


def types_of(schema: Any) -> set[str]:
    """Return the types that conforming values may have; an integer is a number too."""
    if not isinstance(schema, dict):
        return set(TYPES)
    given = schema.get("type")
    if not given:
        types = {_PYTHON_TYPES[type(json.loads(value))] for value in only_values(schema)}
    elif isinstance(given, list):
        types = set(map(str, given))
    else:
        types = {str(given)}
    if "number" in types:
        types.add("integer")
    return types or set(TYPES)


def only_values(schema: Part) -> set[str]:
    """Return the only values that conform, as JSON; nothing if these are not known."""
    values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    if all(value is None or isinstance(value, (str, int)) for value in values):
        return set(map(json.dumps, values))
    return set()


def properties(part: Part) -> Part:
    """Return the schemas of the listed properties, by name."""
    given = part.get("properties")
    return given if isinstance(given, dict) else {}


def required(schema: Any) -> list[str]:
    """Return the names of the required properties."""
    if not isinstance(schema, dict):
        return []
    return [str(name) for name in as_list(schema.get("required"))]


def only_required(schema: Any) -> list[str]:
    """Return the properties that a schema requires, if it says nothing else."""
    if not isinstance(schema, dict) or schema.keys() - {"title", "description"} != {"required"}:
        return []
    return required(schema)


def property_schema(
    schema: Part,
    name: str,
    *,
    is_open: bool = False,
) -> Any:
    """Return the schema of a property; for one that is not listed, whether the object may have it.

    Args:
        schema: The schema of the object.
        name: The name of the property.
        is_open: Whether the object may have others than those that are listed, whatever it says.
    """
    takes_others = schema.get("additionalProperties") is not False or "patternProperties" in schema
    return properties(schema).get(name, is_open or takes_others)


def int_keyword(part: Part, keyword: str) -> int:
    """Return the number that a keyword gives, or 0."""
    given = part.get(keyword, 0)
    return given if isinstance(given, int) else 0


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and an empty one for anything else."""
    return value if isinstance(value, list) else []
