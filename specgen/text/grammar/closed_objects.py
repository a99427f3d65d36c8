"""JSON schemas whose objects have only the properties that they list.

As in llama.cpp and vLLM, an object that lists properties has no others, unless
`additionalProperties` allows them: left open, small models invent properties, also in place of
those that are listed.
"""

from __future__ import annotations

from specgen.text.grammar.schema_parts import (
    ABOUT_PROPERTIES,
    ABOUT_UNLISTED,
    IN_PLACE,
    MAX_DEPTH,
    Part,
    as_list,
    int_keyword,
    parts,
    properties,
    required,
    same_value_parts,
)


def close_objects(root: Part) -> set[int]:
    """Put ``additionalProperties: false`` in objects that list all their properties.

    Schemas that describe a value together with others, as by ``allOf``, stay open: what one of them
    lists is additional for another.

    Returns:
        The `id` of each schema that was closed.
    """
    all_parts = list(parts(root))
    joined = _joined_parts(root, all_parts)
    closed: set[int] = set()
    for part in all_parts:
        if id(part) not in joined and _lists_all_properties(root, part):
            part["additionalProperties"] = False
            closed.add(id(part))
    return closed


def _lists_all_properties(root: Part, part: Part) -> bool:
    if "properties" not in part or part.keys() & ABOUT_UNLISTED:
        return False
    listed = properties(part)
    excludes_all = all(schema is False for schema in listed.values())
    # At the root, an empty list means a function without parameters.
    if excludes_all and (listed or part is not root):
        return False
    if int_keyword(part, "minProperties") > len(listed):
        return False
    named: set[str] = set()
    for each in same_value_parts(root, [part]).values():
        named.update(properties(each), required(each))
    return named <= listed.keys()


def _joined_parts(root: Part, all_parts: list[Part]) -> set[int]:
    """Return the ids of schemas that describe a value together with another schema."""
    joined: set[int] = set()
    for part in all_parts:
        if _joins_others(part):
            was_joined = id(part) in joined
            _add_joined(root, [part], joined)
            if not was_joined:
                joined.discard(id(part))
    return joined


def _joins_others(part: Part) -> bool:
    n_places = sum(keyword in part for keyword in (*IN_PLACE, "$ref"))
    has_own_properties = not part.keys().isdisjoint(ABOUT_PROPERTIES)
    return n_places > 1 or has_own_properties or len(as_list(part.get("allOf"))) > 1


def _add_joined(
    root: Part,
    group: list[Part],
    joined: set[int],
    depth: int = MAX_DEPTH,
) -> None:
    """Add the schemas that describe the same value as a group, and those of shared properties."""
    together = same_value_parts(root, group)
    joined.update(together)
    # The schemas of each property, and, without a name, of the items of an array.
    inner: dict[str, list[Part]] = {}
    for part in together.values():
        for name, schema in (*properties(part).items(), ("", part.get("items"))):
            if isinstance(schema, dict):
                inner.setdefault(name, []).append(schema)
    for schemas in inner.values():
        if len(schemas) > 1 and depth > 0:
            _add_joined(root, schemas, joined, depth - 1)
