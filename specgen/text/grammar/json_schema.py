"""JSON schemas (draft 2020-12) as grammars, which llguidance reads.

llguidance honours a schema or refuses it by the name of a keyword. JSON is written on one line, with
properties in the schema's order. As in llama.cpp, an object has no other properties than those that the
schema names, unless `additionalProperties` allows them. A lenient grammar leaves out what cannot be enforced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.text.grammar.llguidance_grammar import objections_to

#: Keywords that do not constrain the text; a reference or an alternative beside them is all of a schema.
_IGNORED = frozenset(
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
#: Keywords about properties beside the named ones, or about their number.
_OPENING = frozenset(
    ["additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"]
)
_ALTERNATIVES = ("anyOf", "oneOf")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_UNKNOWN_FORMAT = re.compile("Unknown format: (.*)")
_OUTER_REFERENCE = re.compile("Resource '(.*)' is not present in a registry")
_N_SHOWN = 300
#: The most parts of a schema: its values, the characters of its patterns with repetitions written out, and a
#: tenth of each `multipleOf`. llguidance takes seconds for some schemas of this size. Above, it takes minutes, or
#: fails in the middle of an answer.
_MOST_PARTS = 10_000
#: The most optional properties of an object, any of which may come next; llguidance ends the text above.
_MOST_OPTIONAL = 500
#: The largest whole number that every reader of JSON reads as it is. Like llama.cpp, integers have 16 digits at most: a
#: model may write digits for ever.
_LARGEST = 2**53 - 1
_PATTERN_ITEM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)
#: Tells llguidance to ignore what it cannot enforce.
_LENIENT = {"x-guidance": {"lenient": True}}


def schema_grammar(schema: str) -> Grammar:
    """Return the grammar of the JSON texts that conform to a schema; ``{}`` means any object. References
    are resolved within the schema, and never fetched. Raise `UsageError` if the text is no schema, nothing
    conforms to it, or it cannot be enforced."""
    parsed = _parse(schema) or {"type": "object"}
    grammar = Grammar("json_schema", json.dumps(_closed(parsed)))
    is_wrong, messages = objections_to(grammar)
    if is_wrong:
        raise UsageError(f"the JSON schema cannot be enforced: {_plain('; '.join(messages))}")
    return grammar


def lenient_schema_grammar(schema: str) -> tuple[Grammar, tuple[str, ...]]:
    """Return a grammar of texts that conform to what can be enforced of a schema, and the names of what it
    leaves out: keywords, or the whole schema, in whose place any object conforms. Raise `UsageError` if the text is no
    schema."""
    parsed = _closed(_parse(schema) or {"type": "object"})
    grammar = Grammar("json_schema", json.dumps({**parsed, **_LENIENT}))
    is_wrong, messages = objections_to(grammar)
    if is_wrong:
        anything = Grammar("json_schema", json.dumps({"type": "object", **_LENIENT}))
        return anything, (f"it ({_plain('; '.join(messages))})",)
    return grammar, tuple(dict.fromkeys(name for text in messages for name in _names_in(text)))


def _names_in(message: str) -> list[str]:
    keywords, form = _UNKNOWN_KEYWORDS.search(message), _UNKNOWN_FORMAT.search(message)
    if keywords is not None:
        return re.findall('"([^"]*)"', keywords[1])
    if form is not None:
        return [f"format {form[1]}"]
    return ["oneOf"] if message.startswith("oneOf") else [message]


def _parse(schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"the JSON schema is {json.dumps(parsed)[:40]}, not an object")
    if _n_parts(parsed) > _MOST_PARTS:
        raise UsageError(
            f"the JSON schema is too large: more than {_MOST_PARTS} parts, with the repetitions in patterns "
            "written out, and a tenth of each multipleOf"
        )
    return parsed


def _n_parts(schema: dict[str, Any]) -> int:
    """Return the number of parts of a schema, as `_MOST_PARTS` counts them."""
    n_parts, multiples, are_joined = 0, [1], False
    todo: list[tuple[str, Any]] = [("", schema)]
    while todo:
        key, value = todo.pop()
        n_parts += 1
        if isinstance(value, dict):
            todo += value.items()
            if _n_optional(value) > _MOST_OPTIONAL:
                raise UsageError(
                    f"the JSON schema is too large: an object has more than {_MOST_OPTIONAL} optional "
                    "properties"
                )
            are_joined |= "allOf" in value or ("$ref" in value and len(value) > 1)
            if key == "patternProperties":
                n_parts += sum(map(_pattern_size, value))
        elif isinstance(value, list):
            todo += (("", each) for each in value)
        elif key == "pattern" and isinstance(value, str):
            n_parts += _pattern_size(value)
        elif key == "multipleOf" and isinstance(value, (int, float)) and abs(value) < math.inf:
            multiples.append(_coefficient(value))
    # A number that must be a multiple of several numbers is one of their least common multiple.
    return n_parts + (math.lcm(*multiples) if are_joined else sum(multiples)) // 10


def _n_optional(part: dict[str, Any]) -> int:
    named, required = part.get("properties"), part.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return 0
    return len(named) - len(required)


def _coefficient(number: float) -> int:
    """Return a number without its decimal point."""
    digits = Decimal(repr(number)).normalize()
    return abs(int(digits.scaleb(-min(0, int(digits.as_tuple().exponent))))) or 1


def _pattern_size(pattern: str) -> int:
    """Return the number of characters and classes in a pattern, with repetitions written out, up to a limit."""
    most = 10 * _MOST_PARTS
    sizes, last = [0], 0  # of the open groups, and of the last item
    for found in _PATTERN_ITEM.finditer(pattern):
        item = found[0]
        if found[1] is not None:
            times = max(int(number[:10]) for number in found.groups() if number)
            sizes[-1] += last * max(0, times - 1)
            last *= times
        elif item == "(":
            sizes.append(0)
        elif item == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif item not in "*+?":
            last = 1
            sizes[-1] += 1
        last, sizes[-1] = min(last, most), min(sizes[-1], most)
    return sum(sizes)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value")


def _plain(problem: str) -> str:
    keywords, reference = _UNKNOWN_KEYWORDS.search(problem), _OUTER_REFERENCE.search(problem)
    if keywords is not None:
        return f"no grammar can enforce {keywords[1]}"
    if reference is not None:
        return f"$ref {reference[1]!r} leads out of the schema"
    text = " ".join(problem.split())
    return text if len(text) <= _N_SHOWN else f"{text[:_N_SHOWN]}..."


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with limits of integers, and with ``additionalProperties: false`` in objects that name properties and do not
    mention others. Objects that are combined with others, for example by ``allOf``, stay unchanged: a
    property that one of them names is additional for another."""
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    parts = list(_parts(closed))
    for part in parts:
        _limit_integer(part)
    if any(
        "allOf" in part or ("$ref" in part and part.keys() - _IGNORED - {"$ref"}) for part in parts
    ):
        return closed
    todo: list[Any] = [closed]
    while todo:
        part = todo.pop()
        if not isinstance(part, dict):
            continue
        todo += _children(part)
        alternatives = [name for name in _ALTERNATIVES if name in part]
        if alternatives:
            if len(alternatives) == 1 and not part.keys() - _IGNORED - {*alternatives}:
                todo += _list(part[alternatives[0]])
        elif _names_all(part):
            part["additionalProperties"] = False
    return closed


def _limit_integer(part: dict[str, Any]) -> None:
    """Limit an integer on the sides where the schema does not."""
    kind = part.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if "integer" not in kinds or "number" in kinds or part.keys() & {"const", "enum"}:
        return
    for name, other, sign in (("maximum", "minimum", 1), ("minimum", "maximum", -1)):
        given = [part[each] for each in _bounds(other) if each in part]
        numbers = all(type(each) in (int, float) and sign * each < _LARGEST for each in given)
        if numbers and not part.keys() & {*_bounds(name)}:
            part[name] = sign * _LARGEST


def _bounds(name: str) -> tuple[str, str]:
    return name, f"exclusive{name.capitalize()}"


def _names_all(part: dict[str, Any]) -> bool:
    named, required = part.get("properties"), part.get("required", [])
    if not isinstance(named, dict) or part.keys() & _OPENING:
        return False
    return isinstance(required, list) and {*map(str, required)} <= named.keys()


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += _children(part)
            for name in (*_ALTERNATIVES, "allOf"):
                todo += _list(part.get(name))


def _children(part: dict[str, Any]) -> list[Any]:
    """Return the schemas within a schema that describe other values than it does, or are only referred to."""
    found = [part.get(name) for name in ("items", "additionalProperties")]
    found += _list(part.get("prefixItems"))
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        named = part.get(name)
        found += named.values() if isinstance(named, dict) else []
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
