"""Refuses JSON schemas that are too large for llguidance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from specgen.errors import UsageError
from specgen.text.grammar.schema_parts import Part, properties, required_names

#: The maximum number of parts in a schema: its values, the characters of its patterns with
#: repetitions written out, and a tenth of each `multipleOf`. For larger schemas llguidance takes
#: minutes, or fails in the middle of an answer.
MAX_PARTS = 10_000
#: The divisor for `multipleOf`.
_MULTIPLES_PER_PART = 10
#: The maximum number of optional properties in an object. With more of them llguidance ends the
#: text.
_MAX_OPTIONAL = 500
#: An item of a regular expression: an escape, a class, a repetition (groups 1 and 2), or a
#: character.
_PATTERN_ITEM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_size(schema: Part) -> None:
    """Check that a schema is small enough.

    Raises:
        UsageError: If it is too large.
    """
    n_parts = 0
    multiples = [1]
    #: Whether a value may have to conform to several schemas, and so to several `multipleOf`.
    joins_schemas = False
    for keyword, value in _values_within(schema):
        n_parts += 1 + sum(map(pattern_size, _patterns(keyword, value)))
        if isinstance(value, dict):
            _check_optional_properties(value)
            if "allOf" in value or ("$ref" in value and len(value) > 1):
                joins_schemas = True
        elif keyword == "multipleOf" and type(value) in (int, float) and abs(value) < math.inf:
            multiples.append(_coefficient(value))
    # A multiple of several numbers is a multiple of their least common multiple.
    total = math.lcm(*multiples) if joins_schemas else sum(multiples)
    n_parts += total // _MULTIPLES_PER_PART
    if n_parts > MAX_PARTS:
        raise UsageError(
            f"the JSON schema is too large: more than {MAX_PARTS} parts, counting the repetitions "
            "in patterns as if written out, and a tenth of each multipleOf"
        )


def _values_within(schema: Part) -> Iterator[tuple[str, Any]]:
    """Yield every value within a schema, with its keyword; items of lists have an empty keyword."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        keyword, value = pending.pop()
        yield keyword, value
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += (("", item) for item in value)


def _check_optional_properties(part: Part) -> None:
    if len(properties(part)) - len(required_names(part)) > _MAX_OPTIONAL:
        raise UsageError(
            f"the JSON schema is too large: an object has more than {_MAX_OPTIONAL} optional "
            "properties"
        )


def _coefficient(number: float) -> int:
    """Return the digits of a number without its power of ten: 25 for 0.25, 2.5 and 25."""
    digits = Decimal(repr(number)).normalize()
    exponent = int(digits.as_tuple().exponent)
    return abs(int(digits.scaleb(-min(0, exponent)))) or 1


def _patterns(keyword: str, value: Any) -> list[str]:
    """Return the regular expressions in the value of a keyword."""
    if keyword == "pattern" and isinstance(value, str):
        return [value]
    if keyword == "patternProperties" and isinstance(value, dict):
        return list(value)
    return []


def pattern_size(pattern: str) -> int:
    """Count the characters and classes of a pattern, with repetitions written out.

    Nested repetitions can make this number astronomical, so counting stops at a limit.
    """
    limit = 10 * MAX_PARTS  # far too large for any schema
    group_sizes = [0]  # of the open groups, the outermost first
    last_size = 0  # of the last item, which a repetition would repeat
    for match in _PATTERN_ITEM.finditer(pattern):
        item = match[0]
        if match[1] is not None:  # a repetition; the first copy of its item is counted already
            n_times = max(int(number[:10]) for number in match.groups() if number)
            group_sizes[-1] += last_size * max(0, n_times - 1)
            last_size *= n_times
        elif item == "(":
            group_sizes.append(0)
        elif item == ")" and len(group_sizes) > 1:
            last_size = group_sizes.pop()
            group_sizes[-1] += last_size
        elif item not in "*+?":
            last_size = 1
            group_sizes[-1] += 1
        last_size = min(last_size, limit)
        group_sizes[-1] = min(group_sizes[-1], limit)
    return sum(group_sizes)
