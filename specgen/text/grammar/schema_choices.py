"""``oneOf`` in JSON schemas, which llguidance does not know, as ``anyOf``."""

from __future__ import annotations

from typing import Any

from specgen.text.grammar.schema_parts import (
    CONSTRAINTS,
    MAX_DEPTH,
    Part,
    as_list,
    only_required,
    only_values,
    property_schema,
    required,
    resolved,
    types_of,
)

#: How many times two schemas are compared, in all options of a schema together.
_MAX_COMPARISONS = 20_000


class ChoiceWriter:
    """Writes ``oneOf`` as ``anyOf``: they mean the same if no value conforms to two options.

    Args:
        root: The whole schema.
        closed: The `id` of each schema that `close_objects` closed.
        left_out: Gets "oneOf" if options may overlap, or are too many to compare.
    """

    def __init__(
        self,
        root: Part,
        closed: set[int],
        left_out: list[str],
    ) -> None:
        self._root = root
        self._closed = closed
        self._left_out = left_out
        self._n_left = _MAX_COMPARISONS

    def rewrite(self, part: Part) -> None:
        """Rewrite the choice of a schema, if it has one."""
        self._drop_redundant_type(part)
        options = part.get("oneOf")
        if not isinstance(options, list):
            return
        exclusive = options
        if len(options) ** 2 > self._n_left:
            self._left_out.append("oneOf")
        else:
            exclusive = [self._exclusive(index, options) for index in range(len(options))]
        if "anyOf" not in part:
            _replace_keyword(part, "oneOf", "anyOf", exclusive)
        else:
            both = [*as_list(part.get("allOf")), {"anyOf": exclusive}]
            _replace_keyword(part, "oneOf", "allOf", both)

    def _drop_redundant_type(self, part: Part) -> None:
        """Remove a type that all options have: llguidance would join it with each of them."""
        if part.keys() & CONSTRAINTS:
            return
        options = [part] if "$ref" in part else as_list(part.get("anyOf", part.get("oneOf")))
        types = types_of(part)
        if options and all(types_of(resolved(self._root, each)) <= types for each in options):
            part.pop("type", None)

    def _exclusive(self, index: int, options: list[Any]) -> Any:
        """Return an option without the values that conform to others, as far as this is known."""
        option = options[index]
        if isinstance(option, dict) and option.keys() & {"properties", "required"}:
            # Values other than objects would conform to all such options.
            option = {"type": "object", **option}
        exclusive = option
        for other in options[:index] + options[index + 1 :]:
            if self._are_apart(option, other):
                continue
            excluded = only_required(other)
            if not excluded:
                self._left_out.append("oneOf")
                continue
            given = required(resolved(self._root, option))
            absent = [{"properties": {name: False}} for name in excluded if name not in given]
            exclusive = {"allOf": [exclusive, {"anyOf": absent} if absent else False]}
        return exclusive

    def _are_apart(
        self,
        one: Any,
        other: Any,
        depth: int = MAX_DEPTH,
    ) -> bool:
        """Return whether certainly no value conforms to both schemas.

        The second one counts as it was before it was closed: its object may have other properties.
        """
        self._n_left -= 1
        one = resolved(self._root, one)
        other = resolved(self._root, other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth == 0:
            return False
        types = types_of(one) & types_of(other)
        if not types or _have_different_values(one, other):
            return True
        if types != {"object"}:
            return False
        is_open = id(other) in self._closed
        for name in required(one) + required(other):
            if self._n_left <= 0:
                return False
            in_one = property_schema(one, name)
            in_other = property_schema(other, name, is_open=is_open)
            if self._are_apart(in_one, in_other, depth - 1):
                return True
        return False


def _have_different_values(one: Part, other: Part) -> bool:
    values = only_values(one)
    other_values = only_values(other)
    return bool(values and other_values) and values.isdisjoint(other_values)


def _replace_keyword(
    part: Part,
    old: str,
    new: str,
    value: Any,
) -> None:
    """Replace a keyword in its place; an existing `new` is overwritten."""
    keywords = {new if keyword == old else keyword: given for keyword, given in part.items()}
    keywords[new] = value
    part.clear()
    part.update(keywords)
