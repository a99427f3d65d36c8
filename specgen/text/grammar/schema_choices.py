"""Rewrites ``oneOf`` in JSON schemas, which llguidance does not support, as ``anyOf``."""

from __future__ import annotations

from typing import Any

from specgen.text.grammar.schema_parts import (
    CONSTRAINTS,
    MAX_DEPTH,
    Part,
    as_list,
    only_required,
    only_values,
    options_of,
    property_schema,
    required_names,
    resolved,
    types_of,
)

#: The maximum number of comparisons of two schemas, over all options of a whole schema.
_MAX_COMPARISONS = 20_000


class ChoiceWriter:
    """Rewrites ``oneOf`` as ``anyOf``: they mean the same if no value conforms to two options.

    Options that overlap are narrowed first, where that is possible.

    Args:
        root: The whole schema.
        closed_ids: The `id` of each schema that `close_objects` closed.
        left_out: Gets "oneOf" if options may still overlap, or if there are too many to compare.
    """

    def __init__(
        self,
        root: Part,
        closed_ids: set[int],
        left_out: list[str],
    ) -> None:
        self._root = root
        self._closed_ids = closed_ids
        self._left_out = left_out
        self._n_comparisons_left = _MAX_COMPARISONS

    def rewrite(self, part: Part) -> None:
        """Rewrite the ``oneOf`` of a schema, if it has one. The schema is changed in place."""
        self._drop_redundant_type(part)
        options = part.get("oneOf")
        if not isinstance(options, list):
            return
        exclusive = options
        if len(options) ** 2 > self._n_comparisons_left:
            self._left_out.append("oneOf")
        else:
            exclusive = [self._exclusive(index, options) for index in range(len(options))]
        if "anyOf" not in part:
            _replace_one_of(part, "anyOf", exclusive)
        else:
            # The schema has an `anyOf` already, so the choice becomes one more part of its `allOf`.
            all_of = [*as_list(part.get("allOf")), {"anyOf": exclusive}]
            _replace_one_of(part, "allOf", all_of)

    def _drop_redundant_type(self, part: Part) -> None:
        """Remove a type that all options have, which llguidance would merge into each of them."""
        if part.keys() & CONSTRAINTS:
            return
        options = [part] if "$ref" in part else options_of(part)
        types = types_of(part)
        if options and all(types_of(resolved(self._root, option)) <= types for option in options):
            part.pop("type", None)

    def _exclusive(self, index: int, options: list[Any]) -> Any:
        """Return an option without the values that also conform to another option.

        If these values cannot be excluded, "oneOf" is added to what is left out.
        """
        option = options[index]
        if isinstance(option, dict) and option.keys() & {"properties", "required"}:
            # Without a type, values that are not objects would conform to all such options.
            option = {"type": "object", **option}
        exclusive = option
        for other in options[:index] + options[index + 1 :]:
            if self._are_apart(option, other):
                continue
            other_required = only_required(other)
            if not other_required:
                self._left_out.append("oneOf")
                continue
            # A value does not conform to the other option if a property that it requires is absent.
            # Properties that this option requires too cannot be absent.
            own_required = required_names(resolved(self._root, option))
            absences = [
                {"properties": {name: False}} for name in other_required if name not in own_required
            ]
            exclusive = {"allOf": [exclusive, {"anyOf": absences} if absences else False]}
        return exclusive

    def _are_apart(
        self,
        one: Any,
        other: Any,
        depth: int = MAX_DEPTH,
    ) -> bool:
        """Return whether it is certain that no value conforms to both schemas.

        If `other` was closed by `close_objects`, it is taken as it was before: its objects may have
        other properties.
        """
        self._n_comparisons_left -= 1
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
        # Two kinds of objects are apart if the values of a required property are apart.
        is_open = id(other) in self._closed_ids
        for name in required_names(one) + required_names(other):
            if self._n_comparisons_left <= 0:
                return False
            one_property = property_schema(one, name)
            other_property = property_schema(other, name, is_open=is_open)
            if self._are_apart(one_property, other_property, depth - 1):
                return True
        return False


def _have_different_values(one: Part, other: Part) -> bool:
    """Return whether both schemas list their values, with none in common."""
    values = only_values(one)
    other_values = only_values(other)
    return bool(values and other_values) and values.isdisjoint(other_values)


def _replace_one_of(part: Part, new: str, value: Any) -> None:
    """Replace ``oneOf`` with the keyword `new`, at the same position and in place of any `new`."""
    keywords = {new if keyword == "oneOf" else keyword: given for keyword, given in part.items()}
    keywords[new] = value
    part.clear()
    part.update(keywords)
