"""JSON schemas whose objects have only the properties that they list.

As in llama.cpp and vLLM, an object that lists properties has no others, unless
`additionalProperties` allows them. If objects are left open, small models invent properties, even
instead of the listed ones.
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
    required_names,
    same_value_parts,
)


def close_objects(root: Part) -> set[int]:
    """Put ``additionalProperties: false`` in objects that list all their properties.

    Schemas that describe the same value as another schema, for example in an ``allOf``, stay open,
    because the properties that one of them lists are additional ones for the other.

    Returns:
        The `id` of each schema that was closed.
    """
    all_parts = list(parts(root))
    joined_ids = _joined_parts(root, all_parts)
    closed_ids: set[int] = set()
    for part in all_parts:
        if id(part) not in joined_ids and _lists_all_properties(root, part):
            part["additionalProperties"] = False
            closed_ids.add(id(part))
    return closed_ids


def _lists_all_properties(root: Part, part: Part) -> bool:
    """Return whether a schema seems to list every property that its object may have.

    It does not if it already has a rule for other properties, requires more properties than it
    lists, or names others in a schema for the same value.
    """
    if "properties" not in part or part.keys() & ABOUT_UNLISTED:
        return False
    listed = properties(part)
    excludes_all = all(schema is False for schema in listed.values())
    # An empty list means that nothing is known, but at the root a function without parameters.
    if excludes_all and (listed or part is not root):
        return False
    if int_keyword(part, "minProperties") > len(listed):
        return False
    named_properties: set[str] = set()
    for same_value_part in same_value_parts(root, [part]).values():
        named_properties.update(properties(same_value_part), required_names(same_value_part))
    return named_properties <= listed.keys()


def _joined_parts(root: Part, all_parts: list[Part]) -> set[int]:
    """Return the ids of schemas that describe the same value as another schema."""
    joined_ids: set[int] = set()
    for part in all_parts:
        if _joins_others(part):
            was_joined = id(part) in joined_ids
            _add_joined(root, [part], joined_ids)
            # The schema itself may be closed: it knows what the schemas within it list.
            if not was_joined:
                joined_ids.discard(id(part))
    return joined_ids


def _joins_others(part: Part) -> bool:
    """Return whether a schema may be combined with other schemas for the same value."""
    n_places = sum(keyword in part for keyword in (*IN_PLACE, "$ref"))
    has_own_properties = not part.keys().isdisjoint(ABOUT_PROPERTIES)
    return n_places > 1 or has_own_properties or len(as_list(part.get("allOf"))) > 1


def _add_joined(
    root: Part,
    group: list[Part],
    joined_ids: set[int],
    depth: int = MAX_DEPTH,
) -> None:
    """Add to `joined_ids` all schemas that together describe one value, and values within it.

    If two of them describe the same property, the schemas of that property are joined too.

    Args:
        root: The whole schema.
        group: Schemas of one value. Schemas within them for the same value are found from here.
        joined_ids: Gets the `id` of each schema.
        depth: How many levels of properties are followed.
    """
    same_value = same_value_parts(root, group)
    joined_ids.update(same_value)
    # The schemas of each property by its name, and those of the items of an array by "".
    schemas_by_property: dict[str, list[Part]] = {}
    for part in same_value.values():
        for name, schema in (*properties(part).items(), ("", part.get("items"))):
            if isinstance(schema, dict):
                schemas_by_property.setdefault(name, []).append(schema)
    for schemas in schemas_by_property.values():
        if len(schemas) > 1 and depth > 0:
            _add_joined(root, schemas, joined_ids, depth - 1)
