"""Keeps references valid that lead through a keyword which is rewritten, such as ``oneOf``."""

from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import unquote

from specgen.text.grammar.schema_parts import Part, parts

#: Keywords that are replaced by others, so that nothing can be found in them afterwards.
_REPLACED = frozenset(["oneOf", "dependencies", "dependentSchemas"])


def move_referenced(root: Part) -> None:
    """Move schemas in a rewritten keyword that are referred to by their place to ``$defs``.

    Programs that bundle schemas write such references: ``#/properties/a/oneOf/1``. A reference to
    the new place remains at the old one. Schemas that contain others with an ``$id`` of their own
    are left alone, since their references are relative to that.
    """
    all_parts = list(parts(root))
    if any(isinstance(part.get("$id"), str) for part in all_parts if part is not root):
        return
    # All places are found before anything is moved.
    references = [(part, _place(root, part.get("$ref"))) for part in all_parts]
    definitions = root.get("$defs", {})
    if not isinstance(definitions, dict):
        return
    unused_names = (name for n in itertools.count() if (name := f"moved{n}") not in definitions)
    new_references: dict[tuple[int, str | int], str] = {}
    for part, place in references:
        if place is None:
            continue
        holder, key = place
        if (id(holder), key) not in new_references:
            name = next(unused_names)
            reference = f"#/$defs/{name}"
            definitions[name] = holder[key]
            holder[key] = {"$ref": reference}
            new_references[id(holder), key] = reference
        part["$ref"] = new_references[id(holder), key]
    if new_references:
        root["$defs"] = definitions


def _place(root: Part, reference: Any) -> tuple[Any, str | int] | None:
    """Return what holds the schema that a reference leads to, and its key or index there.

    Returns:
        None if the reference leads through no rewritten keyword, or to no schema.
    """
    if not isinstance(reference, str):
        return None
    base, _, pointer = reference.partition("#")
    names = [name.replace("~1", "/").replace("~0", "~") for name in unquote(pointer).split("/")[1:]]
    if base not in ("", root.get("$id"), root.get("id")) or not _REPLACED & {*names}:
        return None
    holder: Any = None
    key: str | int = ""
    value: Any = root
    for name in names:
        holder = value
        try:
            key = int(name) if isinstance(holder, list) else name
            value = holder[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return (holder, key) if isinstance(value, dict) else None
