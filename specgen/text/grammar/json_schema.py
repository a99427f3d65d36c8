"""Turns JSON schemas (draft 2020-12) into grammars for llguidance.

JSON is generated on one line, with properties in the schema's order, and objects are closed
(`closed_objects`). Keywords that llguidance does not support are replaced with others. A schema
with parts that no grammar can enforce is refused, or these parts are left out and named.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from typing import Any

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.text.grammar.closed_objects import close_objects
from specgen.text.grammar.llguidance_grammar import problem_following, validate
from specgen.text.grammar.schema_choices import ChoiceWriter
from specgen.text.grammar.schema_ends import may_end
from specgen.text.grammar.schema_parts import (
    CONSTRAINTS,
    IN_PLACE,
    TYPES,
    Part,
    as_list,
    int_keyword,
    only_required,
    parts,
    properties,
    required_names,
)
from specgen.text.grammar.schema_references import move_referenced
from specgen.text.grammar.schema_size import check_size

#: The formats of the standard that llguidance does not support. Formats that neither knows are only
#: annotations.
_IGNORED_FORMATS = frozenset(
    [
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    ]
)
_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
#: Patterns for llguidance's messages.
_IGNORES_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_IGNORES_FORMAT = re.compile(r"Unknown format: (.*?)(?: \(\d+ times\))?$")
_OUTER_REFERENCE = re.compile("Resource '(.*)' is not present in a registry")
#: Keywords that llguidance combines with a pattern.
_LENGTHS = ("minLength", "maxLength", "format")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
#: The maximum number of dependencies of an object, since each one doubles its forms.
_MAX_DEPENDENCIES = 4
#: The maximum number of characters of a problem, and of a pattern or a type, in a message.
_MAX_SHOWN_PROBLEM = 300
_MAX_SHOWN_PATTERN = 60


def schema_grammar(schema: str) -> Grammar:
    """Return the grammar of the JSON texts that conform to a schema; ``{}`` means any object.

    References to other documents are never fetched.

    Raises:
        UsageError: If the text is not a schema, nothing conforms to it, or it cannot be enforced.
    """
    grammar, left_out = lenient_schema_grammar(schema)
    if left_out:
        names = ", ".join(left_out)
        raise UsageError(f"the JSON schema cannot be enforced: no grammar can enforce {names}")
    return grammar


@functools.lru_cache(maxsize=256)
def lenient_schema_grammar(
    schema: str, *, is_open: bool = False
) -> tuple[Grammar, tuple[str, ...]]:
    """Return a grammar that enforces as much of a schema as possible.

    Args:
        schema: The text of the schema.
        is_open: Whether to leave objects open unless the schema closes them.

    Returns:
        The grammar, and the names of what it does not enforce, such as keywords. If the whole
        schema cannot be enforced, the grammar allows any object, and the only name tells why.

    Raises:
        UsageError: If the text is not a schema.
    """
    root = _parse(schema)
    if not may_end(root):
        return _ANY_OBJECT, (
            "it: its $ref leads back to it without end, so no value conforms to it",
        )
    left_out: list[str] = []
    move_referenced(root)
    for part in list(parts(root)):
        _leave_out_unknown_type(part, root, left_out)
        _leave_out_bad_patterns(part, left_out)
        _replace_unknown_keywords(part)
    closed_ids = set() if is_open else close_objects(root)
    choices = ChoiceWriter(root, closed_ids, left_out)
    for part in list(parts(root)):
        _leave_out_property_counts(part, left_out)
        choices.rewrite(part)
    grammar = Grammar("json_schema", json.dumps(root))
    is_refused, messages = validate(grammar)
    if is_refused:
        return _ANY_OBJECT, (f"it ({_readable('; '.join(messages))})",)
    for message in messages:
        left_out += _names_in(message)
    return grammar, tuple(dict.fromkeys(left_out))  # without duplicates


def _parse(text: str) -> Part:
    """Parse a schema; ``true`` and ``{}`` become any object, ``false`` a schema for no value.

    Raises:
        UsageError: If the text is not a schema, or is too large.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply") from error
    if schema is True:
        schema = {}
    elif schema is False:
        schema = {"allOf": [False]}
    if not isinstance(schema, dict):
        raise UsageError(f"the JSON schema is {json.dumps(schema)[:40]}, not an object")
    check_size(schema)
    schema.pop("x-guidance", None)  # llguidance's own options
    return schema or {"type": "object"}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a value")


def _names_in(message: str) -> list[str]:
    """Return the names of what llguidance ignores, from one of its warnings."""
    keywords = _IGNORES_KEYWORDS.search(message)
    if keywords is not None:
        return re.findall('"([^"]*)"', keywords[1])
    format_name = _IGNORES_FORMAT.search(message)
    if format_name is not None:
        is_standard = format_name[1] in _IGNORED_FORMATS
        return [f"format {format_name[1]}"] if is_standard else []
    if message.startswith("oneOf"):
        return ["oneOf"]
    return [message]


def _readable(problem: str) -> str:
    """Return llguidance's message in a form for users."""
    reference = _OUTER_REFERENCE.search(problem)
    if reference is not None:
        return f"$ref {reference[1]!r} points outside the schema"
    return textwrap.shorten(problem, _MAX_SHOWN_PROBLEM, placeholder="...")


# --- what no grammar can enforce


def _leave_out_unknown_type(
    part: Part,
    root: Part,
    left_out: list[str],
) -> None:
    """Leave out a type that does not exist. Raise `UsageError` if it is that of the root."""
    given = part.get("type", [])
    types = given if isinstance(given, list) else [given]
    unknown = [json.dumps(each)[:_MAX_SHOWN_PATTERN] for each in types if str(each) not in TYPES]
    if not unknown:
        return
    if part is root:
        raise UsageError(f"the JSON schema is invalid: {unknown[0]} is not a type")
    left_out.append(f"type {unknown[0]}")
    del part["type"]


def _leave_out_bad_patterns(part: Part, left_out: list[str]) -> None:
    """Leave out patterns of strings and property names that llguidance cannot follow."""
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        lengths = {keyword: part[keyword] for keyword in _LENGTHS if keyword in part}
        problem = _problem(**lengths, pattern=pattern)
        if problem:
            left_out.append(f"the pattern {pattern[:_MAX_SHOWN_PATTERN]} ({problem})")
            del part["pattern"]
    names = part.get("patternProperties")
    if isinstance(names, dict):
        problems = [problem for name in names if (problem := _problem(pattern=name))]
        if problems:
            left_out.append(f"patternProperties ({'; '.join(problems)})")
            del part["patternProperties"]
            part.pop("additionalProperties", None)


def _problem(**keywords: Any) -> str:
    """Return why llguidance cannot follow a schema with these keywords; empty if it can."""
    return _readable(problem_following(Grammar("json_schema", json.dumps(keywords))))


def _leave_out_property_counts(part: Part, left_out: list[str]) -> None:
    """Leave out limits on the number of properties that llguidance would not enforce.

    It does not count listed properties that are optional.
    """
    n_required = len(required_names(part))
    has_optional = not properties(part).keys() <= set(required_names(part))
    min_properties = int_keyword(part, "minProperties")
    max_properties = part.get("maxProperties")
    is_limited = max_properties is not None or min_properties > n_required
    if not has_optional or not is_limited:
        return
    # In a closed object llguidance enforces limits that allow at most, or demand at least, one
    # optional property.
    is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
    allows_min = min_properties <= n_required + 1
    allows_max = max_properties in (None, n_required + 1)
    if is_closed and allows_min and allows_max:
        return
    for keyword in ("minProperties", "maxProperties"):
        if keyword in part:
            left_out.append(keyword)
            del part[keyword]


# --- keywords that llguidance does not know


def _replace_unknown_keywords(part: Part) -> None:
    """Replace keywords that llguidance does not support, where others mean the same."""
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    _replace_property_names(part)
    _replace_not(part)
    _replace_dependencies(part)


def _replace_property_names(part: Part) -> None:
    """Replace `propertyNames` with properties or patterns, if the object lists no others."""
    names = part.get("propertyNames")
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return
    constraints = names.keys() & {*CONSTRAINTS, *IN_PLACE, "$ref"}
    if not constraints:  # it allows any name
        del part["propertyNames"]
        return
    if part.keys() & {"properties", "patternProperties"}:
        return
    values = part.get("additionalProperties", True)
    if constraints == {"pattern"}:
        part["patternProperties"] = {str(names["pattern"]): values}
    elif constraints == {"enum"}:
        part["properties"] = dict.fromkeys(map(str, as_list(names["enum"])), values)
    else:
        return
    del part["propertyNames"]
    part["additionalProperties"] = False


def _replace_not(part: Part) -> None:
    """Replace a `not` that only forbids properties with properties whose schema is `false`.

    That is `not` with one required property, or with an `anyOf` of such schemas.
    """
    banned = part.get("not")
    if not isinstance(banned, dict) or part.get("type", "object") != "object":
        return
    options = as_list(banned["anyOf"]) if banned.keys() == {"anyOf"} else [banned]
    names = [only_required(option) for option in options]
    if any(len(required_names) != 1 for required_names in names):
        return
    del part["not"]
    part["type"] = "object"
    part["properties"] = properties(part) | {name: False for (name,) in names}


def _replace_dependencies(part: Part) -> None:
    """Replace each dependency on a property with a choice: it is absent, or the rest holds."""
    keywords = [name for name in _DEPENDENCIES if isinstance(part.get(name), dict)]
    dependencies = [item for keyword in keywords for item in part[keyword].items()]
    if not dependencies or len(dependencies) > _MAX_DEPENDENCIES:
        return
    for keyword in keywords:
        del part[keyword]
    choices: list[Any] = []
    for name, needed in dependencies:
        # Other properties that are required, or a schema for the whole object.
        requirement = {"required": [name, *needed]} if isinstance(needed, list) else needed
        if_absent = {"properties": {name: False}}
        if_present = {"allOf": [{"required": [name]}, requirement]}
        choices.append({"anyOf": [if_absent, if_present]})
    part["allOf"] = [*as_list(part.get("allOf")), *choices]
