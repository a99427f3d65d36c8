"""Finds JSON schemas that refer to themselves without end, so that no value is ever complete."""

from __future__ import annotations

from typing import Any

from specgen.text.grammar.schema_parts import (
    Part,
    as_list,
    int_keyword,
    parts,
    properties,
    referenced,
    required_names,
    types_of,
)

#: How often all parts are checked again. Each time, those are known to end that refer to others
#: that do. If a schema needs more, it counts as one that ends.
_MAX_PASSES = 40


def may_end(root: Part) -> bool:
    """Return whether a value can conform to a schema without containing another such value."""
    # Parts come before those within them, so the reverse order needs few passes.
    all_parts = list(parts(root))[::-1]
    endings = _Endings(root, {id(part) for part in all_parts})
    for _ in range(_MAX_PASSES):
        n_before = len(endings.known_ids)
        for part in all_parts:
            endings.add(part)
        if id(root) in endings.known_ids:
            return True
        if len(endings.known_ids) == n_before:
            return False
    return True


class _Endings:
    """The parts of a schema for which a finite value is known to exist."""

    def __init__(self, root: Part, all_ids: set[int]) -> None:
        self._root = root
        #: The `id` of all parts. A reference to anything else is taken to end.
        self._all_ids = all_ids
        #: The `id` of the parts that end.
        self.known_ids: set[int] = set()

    def add(self, part: Part) -> None:
        """Add a part if it ends, according to what is known about others."""
        if self._ends(part):
            self.known_ids.add(id(part))

    def _ends(self, part: Part) -> bool:
        """Return whether a finite value conforms to a part, according to what is known so far."""
        if isinstance(part.get("$ref"), str):
            target = referenced(self._root, part["$ref"])
            if not self._is_known(target):
                return False
        if not all(map(self._is_known, as_list(part.get("allOf")))):
            return False
        for keyword in ("anyOf", "oneOf"):
            choices = as_list(part.get(keyword))
            if choices and not any(map(self._is_known, choices)):
                return False
        return any(self._type_ends(part, name) for name in types_of(part))

    def _type_ends(self, part: Part, type_name: str) -> bool:
        """Return whether a value of this type ends that conforms to a part."""
        needed: list[Any] = []
        if type_name == "object":
            by_name = properties(part)
            needed = [by_name.get(name) for name in required_names(part)]
        elif type_name == "array":
            n_items = int_keyword(part, "minItems")
            first_items = as_list(part.get("prefixItems"))
            needed = first_items[:n_items]
            if n_items > len(first_items):
                needed.append(part.get("items"))
        return all(map(self._is_known, needed))

    def _is_known(self, schema: Any) -> bool:
        """Return whether a schema is known to end, or is none of the parts."""
        return id(schema) in self.known_ids or id(schema) not in self._all_ids
