"""Reads JSON schemas: their parts, and the types, values and properties that a part allows.

Schemas come from users, so a keyword may have a value of any kind. If the kind is wrong, the
keyword is treated as absent.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

#: A schema, or a schema within one, that is an object, as opposed to `true` or `false`.
Part: TypeAlias = dict[str, Any]

#: Keywords whose schemas describe the same value as the schema that they are in.
IN_PLACE = ("allOf", "anyOf", "oneOf")
#: Keywords about properties that are not listed by name.
ABOUT_UNLISTED = frozenset(["additionalProperties", "patternProperties", "unevaluatedProperties"])
#: All keywords about properties.
ABOUT_PROPERTIES = ABOUT_UNLISTED | {
    *("properties", "required", "minProperties", "maxProperties", "propertyNames"),
    *("not", "if", "dependencies", "dependentRequired", "dependentSchemas"),
}
#: Keywords that constrain a value, apart from `type`, `$ref` and `IN_PLACE`.
CONSTRAINTS = ABOUT_PROPERTIES | {
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("pattern", "minLength", "maxLength", "format", "enum", "const", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
TYPES = frozenset(["null", "boolean", "number", "integer", "string", "array", "object"])
#: How many levels of properties are compared in two schemas, and how many references are followed
#: in a row.
MAX_DEPTH = 8
#: The JSON Schema types of the simple values that Python's JSON reader returns.
_PYTHON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    str: "string",
    type(None): "null",
}


def parts(schema: Any) -> Iterator[Part]:
    """Yield a schema and all schemas within it, except for those that are `true` or `false`."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        # Keywords with a single schema. (`items` may also have a list of them.)
        pending += [part.get("items"), part.get("additionalProperties")]
        # Keywords with a list of schemas.
        for keyword in ("items", "prefixItems", *IN_PLACE):
            pending += as_list(part.get(keyword))
        # Keywords with schemas by name.
        for keyword in ("properties", "patternProperties", "$defs", "definitions"):
            schemas_by_name = part.get(keyword)
            if isinstance(schemas_by_name, dict):
                pending += schemas_by_name.values()


def same_value_parts(root: Part, group: Iterable[Part]) -> dict[int, Part]:
    """Return a group of schemas and all schemas within them for the same value, by their `id`.

    References are followed.
    """
    parts_by_id: dict[int, Part] = {}
    pending = deque(group)
    while pending:
        part = pending.popleft()
        parts_by_id[id(part)] = part
        in_place = [schema for keyword in IN_PLACE for schema in as_list(part.get(keyword))]
        in_place += [part.get("then"), part.get("else")]
        if "$ref" in part:
            in_place.append(resolved(root, part))
        for schema in in_place:
            if isinstance(schema, dict) and id(schema) not in parts_by_id:
                pending.append(schema)
    return parts_by_id


def resolved(root: Part, schema: Any) -> Any:
    """Follow the references of a schema, within the root schema.

    Returns:
        The schema itself if it is not a reference, or else the schema that is referred to. If that
        cannot be found, `{}`, which allows everything.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = referenced(root, schema["$ref"])
    return {}


def referenced(root: Part, reference: str) -> Any:
    """Return what a JSON pointer, such as ``#/$defs/name``, refers to; `{}` if there is nothing."""
    base, _, pointer = reference.partition("#")
    if base not in ("", root.get("$id"), root.get("id")):
        return {}
    value: Any = root
    for escaped in unquote(pointer).split("/")[1:]:  # nothing is before the first slash
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = {str(index): item for index, item in enumerate(value)}
        if not isinstance(value, dict):
            return {}
        value = value.get(name, {})
    return value


def types_of(schema: Any) -> set[str]:
    """Return the types that conforming values may have; "number" includes "integer"."""
    if not isinstance(schema, dict):
        return set(TYPES)
    given = schema.get("type")
    if not given:  # then only an enum or a constant limits the types
        types = {_PYTHON_TYPES[type(json.loads(value))] for value in only_values(schema)}
    elif isinstance(given, list):
        types = set(map(str, given))
    else:
        types = {str(given)}
    if "number" in types:
        types.add("integer")
    return types or set(TYPES)


def only_values(schema: Part) -> set[str]:
    """Return the values of an enum or a constant, as JSON.

    The set is empty if the schema has neither, or if one of the values is not simple.
    """
    values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    if all(value is None or isinstance(value, (str, int)) for value in values):
        return set(map(json.dumps, values))
    return set()


def properties(part: Part) -> Part:
    """Return the schemas of the listed properties, by name."""
    given = part.get("properties")
    return given if isinstance(given, dict) else {}


def required_names(schema: Any) -> list[str]:
    """Return the names of the required properties."""
    if not isinstance(schema, dict):
        return []
    return [str(name) for name in as_list(schema.get("required"))]


def only_required(schema: Any) -> list[str]:
    """Return the required properties of a schema that requires properties and does nothing else.

    For any other schema, the list is empty.
    """
    if not isinstance(schema, dict) or schema.keys() - {"title", "description"} != {"required"}:
        return []
    return required_names(schema)


def property_schema(
    schema: Part,
    name: str,
    *,
    is_open: bool = False,
) -> Any:
    """Return the schema of a property.

    Args:
        schema: The schema of the object.
        name: The name of the property.
        is_open: Whether to assume that the object may have properties that are not listed, even if
            the schema excludes them.

    Returns:
        The schema of a listed property. For another one the schema `true` or `false`: whether the
        object may have it.
    """
    takes_others = schema.get("additionalProperties") is not False or "patternProperties" in schema
    return properties(schema).get(name, is_open or takes_others)


def int_keyword(part: Part, keyword: str) -> int:
    """Return the integer value of a keyword; 0 if it has none."""
    given = part.get(keyword, 0)
    return given if isinstance(given, int) else 0


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list; otherwise an empty list."""
    return value if isinstance(value, list) else []


def options_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives of a schema, its `anyOf` or `oneOf`; empty if it has none."""
    return as_list(schema.get("anyOf", schema.get("oneOf")))
