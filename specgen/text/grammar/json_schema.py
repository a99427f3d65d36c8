"""JSON schemas (draft 2020-12) as grammars, which llguidance reads.

JSON is written on one line, with properties in the schema's order. As in llama.cpp and vLLM, an
object that lists properties has no others, unless `additionalProperties` allows them: left open,
small models invent properties, also in place of those that are listed. What no grammar can enforce
is refused, or left out by name.
"""

from __future__ import annotations

import functools
import json
import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.text.grammar.llguidance_grammar import objections_to, trouble_with

#: Schemas within a schema, which describe the same value as it does.
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_TYPES = frozenset(["null", "boolean", "number", "integer", "string", "array", "object"])
#: Keywords about properties beside the named ones.
_OPENING = frozenset(["additionalProperties", "patternProperties", "unevaluatedProperties"])
_ABOUT_PROPERTIES = _OPENING | {
    *("properties", "required", "minProperties", "maxProperties", "propertyNames"),
    *("not", "if", "dependencies", "dependentRequired", "dependentSchemas"),
}
#: Keywords that constrain a value, but for its type and schemas in place.
_CONSTRAINTS = _ABOUT_PROPERTIES | {
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("pattern", "minLength", "maxLength", "format", "enum", "const", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
#: The standard's formats that llguidance does not know; other unknown formats are annotations.
_FORMATS = frozenset(
    ("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template")
) | {"json-pointer", "relative-json-pointer", "regex"}
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(.*)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*?)(?: \(\d+ times\))?$")
_OUTER_REFERENCE = re.compile("Resource '(.*)' is not present in a registry")
#: The most parts of a schema: its values, the characters of its patterns with repetitions written
#: out, and a tenth of each `multipleOf`. For larger ones llguidance takes minutes, or fails in the
#: middle of an answer.
_MOST_PARTS = 10_000
#: The most optional properties of an object, any of which may come next; llguidance ends the text
#: above.
_MOST_OPTIONAL = 500
_PATTERN_ITEM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)
_LENGTHS = ("minLength", "maxLength", "format")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
#: Each doubles the forms of an object.
_MOST_DEPENDENCIES = 4
#: The most characters of a problem and of a pattern that a message shows.
_N_SHOWN, _N_NAMED = 300, 60
#: References that are followed to compare two schemas.
_DEPTH = 8

Part = dict[str, Any]


def schema_grammar(schema: str) -> Grammar:
    """Return the grammar of the JSON texts that conform to a schema; ``{}`` means any object.
    References are never fetched. Raise `UsageError` if the text is no schema, nothing conforms to
    it, or it cannot be enforced.
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
    """Return a grammar of texts that conform to what can be enforced of a schema, and the names of
    what it leaves out: keywords, or the whole schema, in whose place any object conforms. With
    `is_open`, objects are closed only where the schema says so. Raise `UsageError` if the text is
    no schema.
    """
    root = _parse(schema)
    left_out: list[str] = []
    for part in list(_parts(root)):
        _leave_out_unknown_type(part, root, left_out)
        _put_in_known_keywords(part, left_out)
    choices = _Choices(root, set() if is_open else _close(root), left_out)
    for part in list(_parts(root)):
        _limit_number_of_properties(part, left_out)
        choices.write(part)
    grammar = Grammar("json_schema", json.dumps(root))
    is_wrong, messages = objections_to(grammar)
    if is_wrong:
        anything = Grammar("json_schema", '{"type": "object"}')
        return anything, (f"it ({_plain('; '.join(messages))})",)
    left_out += [name for text in messages for name in _names_in(text)]
    return grammar, tuple(dict.fromkeys(left_out))


def _names_in(message: str) -> list[str]:
    keywords, form = _UNKNOWN_KEYWORDS.search(message), _UNKNOWN_FORMAT.search(message)
    if keywords is not None:
        return re.findall('"([^"]*)"', keywords[1])
    if form is not None:
        return [f"format {form[1]}"] if form[1] in _FORMATS else []
    return ["oneOf"] if message.startswith("oneOf") else [message]


def _parse(schema: str) -> Part:
    try:
        parsed = json.loads(schema, parse_constant=_refuse_constant)
    except ValueError as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError("the JSON schema is nested too deeply") from error
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"allOf": [False]}
    if not isinstance(parsed, dict):
        raise UsageError(f"the JSON schema is {json.dumps(parsed)[:40]}, not an object")
    if _n_parts(parsed) > _MOST_PARTS:
        raise UsageError(
            f"the JSON schema is too large: more than {_MOST_PARTS} parts, with the repetitions in patterns "
            "written out, and a tenth of each multipleOf"
        )
    parsed.pop("x-guidance", None)  # llguidance's own options
    return parsed or {"type": "object"}


def _n_parts(schema: dict[str, Any]) -> int:
    n_parts, multiples, are_joined = 0, [1], False
    todo: list[tuple[str, Any]] = [("", schema)]
    while todo:
        key, value = todo.pop()
        n_parts += 1
        if isinstance(value, dict):
            todo += value.items()
            if len(_properties(value)) - len(_required(value)) > _MOST_OPTIONAL:
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
        elif key == "multipleOf" and type(value) in (int, float) and abs(value) < math.inf:
            multiples.append(_coefficient(value))
    # A number that must be a multiple of several numbers is one of their least common multiple.
    return n_parts + (math.lcm(*multiples) if are_joined else sum(multiples)) // 10


def _coefficient(number: float) -> int:
    digits = Decimal(repr(number)).normalize()
    return abs(int(digits.scaleb(-min(0, int(digits.as_tuple().exponent))))) or 1


def _pattern_size(pattern: str) -> int:
    """Return the number of characters and classes in a pattern, with repetitions written out, up to
    a limit.
    """
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
    reference = _OUTER_REFERENCE.search(problem)
    if reference is not None:
        return f"$ref {reference[1]!r} leads out of the schema"
    return textwrap.shorten(problem, _N_SHOWN, placeholder="...")


# --- keywords that llguidance does not know -------------------------------------------------------


def _leave_out_unknown_type(part: Part, root: Part, left_out: list[str]) -> None:
    given = part.get("type", [])
    types = given if isinstance(given, list) else [given]
    unknown = [json.dumps(each)[:_N_NAMED] for each in types if str(each) not in _TYPES]
    if unknown and part is root:
        raise UsageError(f"the JSON schema is invalid: {unknown[0]} is no type")
    if unknown:
        left_out.append(f"type {unknown[0]}")
        del part["type"]


def _put_in_known_keywords(part: Part, left_out: list[str]) -> None:
    """Write keywords that llguidance does not know by others, and leave out patterns that it cannot
    follow.
    """
    if part.get("uniqueItems") is False:
        del part["uniqueItems"]
    _follow_patterns(part, left_out)
    names = part.get("propertyNames")
    if isinstance(names, dict) and names.get("type", "string") == "string":
        said = names.keys() & {*_CONSTRAINTS, *_IN_PLACE, "$ref"}
        is_map = not part.keys() & {"properties", "patternProperties"}
        others = part.get("additionalProperties", True)
        if said == {"pattern"} and is_map:
            part["patternProperties"] = {str(names["pattern"]): others}
        elif said == {"enum"} and is_map:
            part["properties"] = dict.fromkeys(map(str, _list(names["enum"])), others)
        if not said or (is_map and said in ({"pattern"}, {"enum"})):
            del part["propertyNames"]
            part |= {"additionalProperties": False} if said else {}
    banned = part.get("not")
    if isinstance(banned, dict) and part.get("type", "object") == "object":
        options = banned["anyOf"] if banned.keys() == {"anyOf"} else [banned]
        names = [_only_required(option) for option in _list(options)]
        if all(len(each) == 1 for each in names):
            del part["not"]
            part["type"] = "object"
            part["properties"] = _properties(part) | {each[0]: False for each in names}
    _write_dependencies(part)


def _only_required(schema: Any) -> list[str]:
    """Return the properties that a schema requires, if it says nothing else."""
    said = schema.keys() - {"title", "description"} if isinstance(schema, dict) else ()
    return _required(schema) if said == {"required"} else []


def _write_dependencies(part: Part) -> None:
    names = [name for name in _DEPENDENCIES if isinstance(part.get(name), dict)]
    needs = [each for name in names for each in part[name].items()]
    if not needs or len(needs) > _MOST_DEPENDENCIES:
        return
    for name in names:
        del part[name]
    part["allOf"] = [*_list(part.get("allOf"))]
    for key, needed in needs:
        then = {"required": [key, *needed]} if isinstance(needed, list) else needed
        with_key = {"allOf": [{"required": [key]}, then]}
        part["allOf"].append({"anyOf": [{"properties": {key: False}}, with_key]})


def _follow_patterns(part: Part, left_out: list[str]) -> None:
    pattern, keys = part.get("pattern"), part.get("patternProperties")
    if isinstance(pattern, str):
        lengths = {name: part[name] for name in _LENGTHS if name in part}
        if problem := _trouble(**lengths, pattern=pattern):
            left_out.append(f"the pattern {pattern[:_N_NAMED]} ({problem})")
            del part["pattern"]
    if isinstance(keys, dict) and keys:
        wrong = "; ".join(filter(None, (_trouble(pattern=key) for key in keys)))
        if wrong:
            left_out.append(f"patternProperties ({wrong})")
            del part["patternProperties"]
            part.pop("additionalProperties", None)


def _trouble(**keywords: Any) -> str:
    return _plain(trouble_with(Grammar("json_schema", json.dumps(keywords))))


def _limit_number_of_properties(part: Part, left_out: list[str]) -> None:
    """Leave out a number of properties that llguidance cannot enforce: it does not count named
    optional ones.
    """
    named, required = _properties(part), _required(part)
    least, most = _count(part, "minProperties"), part.get("maxProperties")
    if not named.keys() - {*required} or (most is None and least <= len(required)):
        return
    is_known = part.get("additionalProperties") is False and "patternProperties" not in part
    if not is_known or least - len(required) > 1 or most not in (None, len(required) + 1):
        left_out += [name for name in ("minProperties", "maxProperties") if name in part]
        part.pop("minProperties", None), part.pop("maxProperties", None)


# --- objects without other properties -------------------------------------------------------------


def _close(root: Part) -> set[int]:
    """Put ``additionalProperties: false`` in objects that list properties and mention no others,
    and return which. What holds together with others, as by ``allOf``, stays open: what one of them
    names is additional for another.
    """
    parts = list(_parts(root))
    joined: set[int] = set()
    closed: set[int] = set()
    for part in parts:
        n_places = sum(name in part for name in (*_IN_PLACE, "$ref"))
        if n_places > 1 or part.keys() & _ABOUT_PROPERTIES or len(_list(part.get("allOf"))) > 1:
            was_joined = id(part) in joined
            _join(root, [part], joined)
            joined -= set() if was_joined else {id(part)}
    for part in parts:
        named = _properties(part)
        if "properties" not in part or id(part) in joined or part.keys() & _OPENING:
            continue
        if (named or part is not root) and all(schema is False for schema in named.values()):
            # it lists nothing, or only what it excludes; a function without parameters takes none
            continue
        names: set[str] = set()
        for each in _together(root, [part]).values():
            names |= {*_properties(each)} | {*_required(each)}
        if names <= named.keys() and _count(part, "minProperties") <= len(named):
            part["additionalProperties"] = False
            closed.add(id(part))
    return closed


def _join(root: Part, group: list[Part], joined: set[int], depth: int = _DEPTH) -> None:
    """Note the schemas that describe the same value as some schemas do, and those of a property
    that several name.
    """
    together = _together(root, group)
    joined.update(together)
    inner: dict[str, list[Part]] = {}
    for part in together.values():
        for name, schema in (*_properties(part).items(), ("", part.get("items"))):
            inner.setdefault(name, []).extend([schema] if isinstance(schema, dict) else [])
    for schemas in inner.values():
        if len(schemas) > 1 and depth:
            _join(root, schemas, joined, depth - 1)


def _together(root: Part, todo: list[Part]) -> dict[int, Part]:
    """Return schemas and those within them that describe the same value as they do."""
    found: dict[int, Part] = {}
    while todo:
        part, *todo = todo
        found[id(part)] = part
        inner = [each for name in _IN_PLACE for each in _list(part.get(name))]
        inner += [part.get("then"), part.get("else")]
        inner += [_target(root, part)] if "$ref" in part else []
        todo += [each for each in inner if isinstance(each, dict) and id(each) not in found]
    return found


def _parts(schema: Any) -> Iterator[Part]:
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            yield part
            todo += [part.get("items"), part.get("additionalProperties"), *_list(part.get("items"))]
            for name in ("prefixItems", *_IN_PLACE):
                todo += _list(part.get(name))
            for name in ("properties", "patternProperties", "$defs", "definitions"):
                named = part.get(name)
                todo += named.values() if isinstance(named, dict) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- one of several -------------------------------------------------------------------------------


@dataclass
class _Choices:
    """Writes ``oneOf`` as ``anyOf``, which is the same if no value conforms to two of the options."""

    root: Part
    closed: set[int]  # the schemas that were closed here
    left_out: list[str]
    n_left: int = 20_000  # comparisons of options

    def write(self, part: Part) -> None:
        """Write a schema's choice, without a type beside options that have it: llguidance would
        join it with each.
        """
        options = [part] if "$ref" in part else _list(part.get("anyOf", part.get("oneOf")))
        types = [_types(_target(self.root, option)) <= _types(part) for option in options]
        if types and all(types) and not part.keys() & _CONSTRAINTS:
            part.pop("type", None)
        if not isinstance(part.get("oneOf"), list):
            return
        alone = options = part["oneOf"]
        if len(options) ** 2 > self.n_left:
            self.left_out.append("oneOf")
        else:
            alone = [self._alone(number, options) for number in range(len(options))]
        name, value = "anyOf", alone
        if "anyOf" in part:
            name, value = "allOf", [*_list(part.get("allOf")), {"anyOf": alone}]
        keywords = {(name if each == "oneOf" else each): given for each, given in part.items()}
        part.clear()
        part |= keywords | {name: value}

    def _alone(self, number: int, options: list[Any]) -> Any:
        """Return an option without values that conform to other ones, as far as that can be said."""
        option = options[number]
        if isinstance(option, dict) and option.keys() & {"properties", "required"}:
            option = {"type": "object", **option}  # other values would conform to all such options
        whole = option
        for other in options[:number] + options[number + 1 :]:
            # What is closed here stays closed, but another option may have other properties in
            # truth.
            if self._are_apart(option, other):
                continue
            needed = _only_required(other)
            if needed:
                given = _required(_target(self.root, option))
                bans = [{"properties": {name: False}} for name in needed if name not in given]
                whole = {"allOf": [whole, {"anyOf": bans} if bans else False]}
            else:
                self.left_out.append("oneOf")
        return whole

    def _are_apart(self, one: Any, other: Any, depth: int = _DEPTH) -> bool:
        """Return whether surely no value conforms to both schemas, the second as it was before it
        was closed.
        """
        self.n_left -= 1
        one, other = _target(self.root, one), _target(self.root, other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or not depth:
            return False
        types, values = _types(one) & _types(other), (_values(one), _values(other))
        if not types or (values[0] and values[1] and not values[0] & values[1]):
            return True
        is_open = id(other) in self.closed
        return types == {"object"} and any(
            self.n_left > 0
            and self._are_apart(
                _property(one, name), _property(other, name, is_open=is_open), depth - 1
            )
            for name in _required(one) + _required(other)
        )


def _target(root: Part, part: Any) -> Any:
    for _ in range(_DEPTH):
        if not isinstance(part, dict) or not isinstance(part.get("$ref"), str):
            return part
        base, _, path = part["$ref"].partition("#")
        if base not in ("", root.get("$id"), root.get("id")):
            return {}
        part = root
        for escaped in unquote(path).split("/")[1:]:
            name = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                part = {str(number): each for number, each in enumerate(part)}
            part = part.get(name, {}) if isinstance(part, dict) else {}
    return {}


def _types(schema: Any) -> set[str]:
    """Return the types of values that may conform; an integer is a number too."""
    if not isinstance(schema, dict):
        return {*_TYPES}
    names = {bool: "boolean", int: "integer", str: "string", type(None): "null"}
    given = schema.get("type") or [names[type(json.loads(value))] for value in _values(schema)]
    types = {*map(str, given)} if isinstance(given, list) else {str(given)}
    types |= {"integer"} if "number" in types else set()
    return types or {*_TYPES}


def _count(part: Part, name: str) -> int:
    given = part.get(name, 0)
    return given if isinstance(given, int) else 0


def _properties(part: Part) -> Part:
    given = part.get("properties")
    return given if isinstance(given, dict) else {}


def _required(schema: Any) -> list[str]:
    return [*map(str, _list(schema.get("required")))] if isinstance(schema, dict) else []


def _values(schema: Part) -> set[str]:
    """Return the only values that conform, in JSON; nothing if that is not known."""
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    is_plain = all(value is None or isinstance(value, (str, int)) for value in values)
    return {*map(json.dumps, values)} if is_plain else set()


def _property(schema: Part, name: str, *, is_open: bool = False) -> Any:
    is_open |= schema.get("additionalProperties") is not False or "patternProperties" in schema
    return _properties(schema).get(name, is_open)
