"""JSON schemas: every text conforms, and unsupported keywords are rejected by name."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jsonschema
import llguidance
import numpy as np
import pytest

from specgen.errors import BackendError, UsageError
from specgen.llama import LlamaModel, LlamaVocabulary
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import Grammar
from specgen.sampler_options import SamplerOptions
from specgen.text.grammar.base import GrammarState
from specgen.text.grammar.json_schema import lenient_schema_grammar, schema_grammar
from specgen.text.grammar.llguidance_grammar import LlguidanceGrammar
from specgen.text.sampling.chain import Sampler
from tests.helpers.tiny import vocabulary_of
from tests.tiny import TinyConfig, write_tiny_model

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "kind": {"enum": ["alpha", 'b"e"ta', "é", None, 3]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "$defs": {"item": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
}
#: Schemas that are enforced.
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "any object": {},
    "minItems without items": {"type": "array", "minItems": 2, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"const": 1}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "numbers": {"type": "number", "exclusiveMinimum": -2, "maximum": 2.5},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 100},
    "several types": {"type": ["string", "null"], "maxLength": 3, "minLength": 2},
    "const": {"const": {"a": ['"\\\n\té', 1.5, None, True]}},
    "anyOf": {
        "anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"a": {"const": 1}}}]
    },
    "oneOf apart": {"oneOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "pattern": {"type": "string", "pattern": r"^(\d{3}-)?[a-cé]{2,4}\.(com|org)$"},
    "pattern anywhere": {"type": "string", "pattern": "ab", "maxLength": 5},
    "format": {"type": "string", "format": "date"},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "additionalProperties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "boolean"},
    },
    "a reference to itself": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "escaped references": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"enum": ["a~b"]}}},
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaVocabulary]:
    with vocabulary_of(tmp_path_factory.mktemp("schemas")) as found:
        yield found


def followed(vocabulary: LlamaVocabulary, grammar: Grammar, seed: int) -> str:
    """A text of a grammar: random tokens, and from some length on those that end it soon."""
    rng, text = np.random.default_rng(seed), b""
    state = LlguidanceGrammar(vocabulary, grammar).start
    every = np.arange(vocabulary.n_tokens)
    closing = b'"}]0'
    for number in range(400):
        allowed = np.flatnonzero(state.allows(every)).tolist()
        assert allowed, text
        soon = [
            token
            for token in allowed
            if vocabulary.is_end(token) or vocabulary.token_bytes(token) in closing
        ]
        token = int(rng.choice(soon if number > 30 and soon else allowed))
        text += vocabulary.token_bytes(token)
        if vocabulary.is_end(token):
            return text.decode()
        state = state.after(token)
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_conforms(vocabulary: LlamaVocabulary, name: str) -> None:
    schema = SCHEMAS[name]
    grammar = schema_grammar(json.dumps(schema))
    for seed in range(12):
        value = json.loads(followed(vocabulary, grammar, seed))
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


def test_an_empty_schema_is_an_object(vocabulary: LlamaVocabulary) -> None:
    for seed in range(5):
        assert isinstance(json.loads(followed(vocabulary, schema_grammar("{}"), seed)), dict)


def takes(vocabulary: LlamaVocabulary, grammar: Grammar, text: str) -> bool:
    state = LlguidanceGrammar(vocabulary, grammar).start
    for token in [*vocabulary.tokenize_inside(text), *vocabulary.end_tokens()[:1]]:
        if not state.allows(np.array([token]))[0]:
            return False
        state = state.after(token)
    return True


@pytest.mark.parametrize(
    ("schema", "text", "is_taken"),
    [
        ({"type": "integer"}, "-" + "9" * 18, True),
        ({"type": "integer"}, "1" * 19, False),
        ({"type": ["null", "integer"], "minimum": 0}, "1" * 19, False),
        ({"type": "integer", "minimum": 10**17}, "1" * 18, True),
        ({"type": "number"}, "0.30000000000000004", True),
        ({"type": "number"}, "6.02214076e23", True),
        ({"type": "number"}, "0." + "3" * 19, False),
        ({"type": "number", "maximum": 4}, "3." + "1" * 19, False),
        ({"items": {}}, "[1.5, " + "3" * 19 + "]", False),
        ({"type": "string"}, '"' + "3" * 40 + '"', True),
        ({"type": "string", "pattern": "^[0-9]{30,}$"}, '"' + "3" * 40 + '"', True),
    ],
)
def test_a_number_ends(
    vocabulary: LlamaVocabulary, schema: dict[str, Any], text: str, is_taken: bool
) -> None:
    """Models wrote digits until the answer reached its limit."""
    assert takes(vocabulary, schema_grammar(json.dumps(schema)), text) is is_taken


@pytest.mark.parametrize(
    ("lengths", "text", "is_taken"),
    [
        ({}, r'"K\u00f6ln\u2019\ud83d\ude00\u001e"', True),
        ({}, r'"\ud83d"', False),
        ({}, r'"\ude00\ud83d"', False),
        ({}, r'"\u00fg"', False),
        ({"minLength": 2, "maxLength": 2}, r'"\u00f6\ud83d\ude00"', True),
        ({"minLength": 2}, r'"\ud83d\ude00"', False),
        ({"maxLength": 3}, r'"K\u00f6ln"', False),
    ],
)
def test_a_string_may_escape_any_character(
    vocabulary: LlamaVocabulary, lengths: dict[str, int], text: str, is_taken: bool
) -> None:
    """A pair of surrogates is one character, and half a pair is none."""
    schema = json.dumps({"type": "string", **lengths})
    assert takes(vocabulary, schema_grammar(schema), text) is is_taken


ONE = {"properties": {"a": {"type": "number"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "text", "wanted", "said"),
    [
        (ONE, '{"a": 99.50', ",0}", "}"),
        (ONE, '{"a": 99.50', " 0}", "}"),
        (ONE, '{"a": 99.5', "0,}", "0"),
        (ONE, '{"a": 99', ".,}", "."),
        (ONE, '{"a": 1.5', ".e}", "}"),
        (ONE, '{"a": 1.5e', ",-}", "-"),
        ({**ONE, "required": ["a", "b"]}, '{"a": 7', "}0,", ","),
        ({"items": {"type": "integer"}, "type": "array", "maxItems": 2}, "[1, 2", ",0]", "]"),
        ({"type": "integer"}, "12", " 0", ""),
        ({"type": "integer", "maximum": 124}, "12", "50,", "0"),
        ({"type": "string", "maxLength": 3}, '"12', '"0', '"'),
        ({"type": "string", "pattern": "^[0-9]{2,5}$"}, '"12', 'x0"', "0"),
    ],
)
def test_what_would_end_a_number_ends_it(
    vocabulary: LlamaVocabulary, schema: dict[str, Any], text: str, wanted: str, said: str
) -> None:
    """A comma after the last property is not allowed: "99.50" went on with "0000000004e-01"."""
    tokens = {vocabulary.token_bytes(n): n for n in range(vocabulary.n_tokens)}
    state = LlguidanceGrammar(vocabulary, schema_grammar(json.dumps(schema))).start
    row = np.full(vocabulary.n_tokens, -30, np.float32)
    row[[tokens[each.encode()] for each in wanted]] = 5 - np.arange(len(wanted))
    given = row.copy()
    shaper = SamplingPipeline(Sampler(SamplerOptions(temperature=1.0)), TextState((), state))
    found = shaper.distribution(row, vocabulary.tokenize_inside(text))
    expected = tokens[said.encode()] if said else vocabulary.end_tokens()[0]
    assert found.token_ids[found.probs.argmax()] == expected
    if wanted == ",0}":  # others keep their scores
        zero = found.probability(tokens[b"0"])
        assert found.probability(expected) / zero == pytest.approx(np.e)
    assert (row == given).all()


CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["kind"],
}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]}
PETS = {"$defs": {"Cat": CAT, "Dog": DOG}}
EITHER = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
A_OR_B = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (True, "{}", "1"),
        ({"properties": {"a": True, "b": False}}, '{"a": 1}', '{"a": 1, "b": 1}'),
        ({"type": "array", "uniqueItems": False}, "[1, 1]", "{}"),
        # Formats that the standard does not have, and keywords that nobody knows, are annotations.
        ({"type": "string", "format": "path"}, '"x"', "1"),
        ({"type": "integer", "format": "int32", "x-order": 1}, "1", '"x"'),
        # zod's records
        ({"propertyNames": {"type": "string"}, "type": "object"}, '{"a": 1}', "1"),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            '{"a": null}',
            '{"c": null}',
        ),
        ({"propertyNames": {"pattern": "^a"}, "type": "object"}, '{"ab": 1}', '{"b": 1}'),
        # Pydantic's unions
        ({**PETS, "oneOf": EITHER}, '{"kind": "dog"}', '{"kind": "dog", "lives": 1}'),
        (
            {**PETS, "items": {"oneOf": EITHER, "discriminator": {"propertyName": "kind"}}},
            '[{"kind": "cat", "lives": 9}]',
            '[{"kind": "cat", "tail": 1}]',
        ),
        (
            {**PETS, "anyOf": EITHER, "nullable": True, "type": "object", "x-a": 1},
            '{"kind": "dog"}',
            '{"kind": "dog", "tail": 1}',
        ),
        ({**PETS, "allOf": EITHER[:1]}, '{"kind": "cat"}', '{"kind": "cat", "tail": 1}'),
        # options that differ in what they require
        ({"oneOf": [{"type": "string"}, {"type": ["null", "integer"]}]}, "null", "1.5"),
        (
            {"oneOf": [{**DOG, "properties": {"a": {}}, "required": ["a"]}, DOG]},
            '{"a": 1}',
            '{"a": 1, "kind": "dog"}',
        ),
        (
            {**A_OR_B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            '{"b": null}',
            '{"a": null, "b": null}',
        ),
        # references as programs write them that bundle several files
        (
            {
                "properties": {
                    "a": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
                    "b": {"$ref": "#/properties/a/oneOf/1"},
                    "c": {"$ref": "#/properties/a/oneOf/1"},
                }
            },
            '{"a": "x", "b": 1, "c": 2}',
            '{"a": "x", "b": 1, "c": "x"}',
        ),
        (
            {
                "$defs": {"moved0": {"type": "null"}},
                "properties": {"a": {"$ref": "#/oneOf/0/properties/b~1c/oneOf/0"}},
                "oneOf": [{"properties": {"b/c": {"oneOf": [{"type": "null"}]}}}],
            },
            '{"a": null}',
            '{"a": 1}',
        ),
        (
            {
                "properties": {"a": {}, "b": {"$ref": "#/dependentSchemas/a/properties/c"}},
                "dependentSchemas": {"a": {"properties": {"c": {"type": "null"}}}},
            },
            '{"b": null}',
            '{"b": 1}',
        ),
        ({**A_OR_B, "not": {"required": ["b"]}}, '{"a": null}', '{"b": null}'),
        ({"not": {"anyOf": [{"required": ["b"]}]}}, '{"a": null}', '{"b": null}'),
        ({**A_OR_B, "dependentRequired": {"a": ["b"]}}, '{"b": null}', '{"a": null}'),
        (
            {**A_OR_B, "dependencies": {"b": {"properties": {"a": {"type": "null"}}}}},
            '{"a": null, "b": null}',
            '{"c": null}',
        ),
        ({**A_OR_B, "minProperties": 1}, '{"b": null}', "{}"),
        ({**A_OR_B, "anyOf": [{"required": ["a"]}]}, '{"a": null}', '{"a": null, "c": 1}'),
    ],
)
def test_what_clients_send_is_enforced(
    vocabulary: LlamaVocabulary, schema: Any, taken: str, refused: str
) -> None:
    grammar = schema_grammar(json.dumps(schema))
    assert takes(vocabulary, grammar, taken)
    assert not takes(vocabulary, grammar, refused)


def test_a_closed_option_takes_nothing_that_conforms_to_another_one() -> None:
    """Closed here, the options are apart; as they were, a value has both."""
    one = {"properties": {"a": {}, "id": {}}, "required": ["a", "b"]}
    both = {"oneOf": [{**one, "type": "object"}, {**one, "type": "object", "required": ["a"]}]}
    assert lenient_schema_grammar(json.dumps(both))[1] == ("oneOf",)


@pytest.mark.parametrize(
    ("pattern", "more", "left_out"),
    [
        (r"^$|(^(?:\S+\s+){0,99}\S+$)".replace("\\\\", "\\"), {"maxLength": 5000}, "the pattern"),
        ("^(?=a)b$", {}, "look-around"),
        ("^[a-z]+$", {"maxLength": 5000}, ""),
    ],
)
def test_patterns_that_cannot_be_followed_are_left_out(
    vocabulary: LlamaVocabulary, pattern: str, more: dict[str, Any], left_out: str
) -> None:
    """Some were accepted and failed within the answer."""
    text = json.dumps({"type": "string", "pattern": pattern, **more})
    grammar, found = lenient_schema_grammar(text)
    assert left_out in "".join(found)
    assert bool(found) is bool(left_out)
    assert takes(vocabulary, grammar, '"abcdefghijklm"')
    if found:
        with pytest.raises(UsageError, match=left_out):
            schema_grammar(text)


def test_properties_are_those_that_are_named_in_their_order(vocabulary: LlamaVocabulary) -> None:
    for seed in range(20):
        value = json.loads(followed(vocabulary, schema_grammar(json.dumps(PERSON)), seed))
        assert list(value) == [name for name in PERSON["properties"] if name in value]
        for item in value.get("items", []):
            assert set(item) <= {"x"}


def test_joined_objects_and_those_that_list_nothing_stay_open() -> None:
    """One of them lists what is additional for another."""
    a = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    b = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
    for schema in (
        {"allOf": [a, b]},
        {"$ref": "#/$defs/a", "properties": b["properties"], "$defs": {"a": a}},
        {**a, "anyOf": [b, {"properties": {"c": True}}]},
        {"allOf": [{"properties": {"a": a}}, {"properties": {"a": b}}]},
        {"type": "object", "properties": {"a": {}}, "required": ["a", "c"]},
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 2},
        {"items": {"type": "object", "properties": {}}},
    ):
        assert "additionalProperties" not in schema_grammar(json.dumps(schema)).text
    nothing = schema_grammar('{"type": "object", "properties": {}}')
    assert '"additionalProperties": false' in nothing.text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ("{", "is not JSON"),
        ('{"maximum": NaN}', "NaN"),
        ("[1]", "not an object"),
        ("false", "schema is false"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "deep"),
        ('{"items":' * 500 + "{}" + "}" * 500, "recursion"),
        ('{"type": "string", "pattern": "(a|bc){99999999999}"}', "too large"),
        ('{"type": "integer", "multipleOf": 100000007}', "too large"),
        (json.dumps({"multipleOf": 10**400}), "too large"),
        ('{"allOf": [{"multipleOf": 101}, {"multipleOf": 103}, {"multipleOf": 107}]}', "too large"),
        (json.dumps({"enum": [*range(10_001)]}), "too large"),
        ('{"properties": {"a": {}}, "required": [{}]}', "cannot be enforced"),
        ('{"type": "foo"}', '"foo" is not a type'),
        ('{"type": 123}', "123 is not a type"),
        ('{"properties": {"a": {"type": ["int", "null"]}}}', 'type "int"'),
        ('{"type": "string", "minLength": 5, "maxLength": 2}', "minLength"),
        ('{"allOf": [{"type": "string"}, {"type": "integer"}]}', "incompatible"),
        ('{"type": "object", "required": ["a"], "additionalProperties": false}', "'a'"),
        ('{"enum": []}', "empty"),
        ('{"anyOf": []}', "empty"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"type": "array", "contains": {}}', "contains"),
        ('{"if": {"type": "string"}, "then": {}}', "if"),
        ('{"properties": {"a": {"propertyNames": {"minLength": 1}}}}', "propertyNames"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ('{"type": "string", "format": "regex"}', "format regex"),
        ('{"type": "string", "pattern": "^(?=a)b$"}', "look"),
        ('{"type": "string", "pattern": "^(a$"}', "regex"),
        ('{"$ref": "https://example.com/x.json"}', "example.com"),
        ('{"$ref": "other.json"}', "other.json"),
        ('{"$ref": "#/$defs/a"}', "/$defs/a"),
        # llguidance cuts such a value in the middle of a character.
        (json.dumps({"type": "array", "maxItems": "é" * 300}), "cannot be enforced"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        schema_grammar(schema)
    assert named in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("odd", "left_out"),
    [
        ({"type": "integer"}, ()),
        ({"type": "object", "propertyNames": {"minLength": 2}}, ("propertyNames",)),
        ({"not": {"type": "string"}, "contains": {}, "type": "array"}, ("contains", "not")),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",)),
        ({"type": "string", "format": "iri"}, ("format iri",)),
        ({**A_OR_B, "minProperties": 2}, ("minProperties",)),
    ],
)
def test_a_lenient_grammar_enforces_the_rest(
    vocabulary: LlamaVocabulary, odd: dict[str, Any], left_out: tuple[str, ...]
) -> None:
    rest = {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"]}
    schema = {**rest, "properties": {**rest["properties"], "odd": odd}}  # type: ignore[dict-item]
    grammar, found = lenient_schema_grammar(json.dumps(schema))
    assert found == left_out
    for seed in range(4):
        jsonschema.validate(json.loads(followed(vocabulary, grammar, seed)), rest)


_ENDLESS = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {**_ENDLESS, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    ],
)
def test_a_schema_without_end_is_refused_in_words(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    with pytest.raises(UsageError, match="leads back to it without end"):
        schema_grammar(text)
    grammar, left_out = lenient_schema_grammar(text)
    assert json.loads(grammar.text) == {"type": "object"}
    assert "without end" in left_out[0]


@pytest.mark.parametrize(
    "schema",
    [
        {**_ENDLESS, "type": "object"},
        {"properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"$ref": "#/elsewhere/a", "elsewhere": {"a": {"type": "string"}}},
    ],
)
def test_a_schema_that_may_end_is_followed(schema: dict[str, Any]) -> None:
    assert lenient_schema_grammar(json.dumps(schema))[1] == ()


@pytest.mark.parametrize(
    "schema", ['{"enum": []}', '{"$ref": "#/a"}', '{"$ref": "https://example.com/x.json"}']
)
def test_a_lenient_grammar_of_what_cannot_be_read_takes_any_object(
    vocabulary: LlamaVocabulary, schema: str
) -> None:
    grammar, (left_out,) = lenient_schema_grammar(schema)
    assert left_out.startswith("it (")
    assert isinstance(json.loads(followed(vocabulary, grammar, 0)), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 7, "required": ["a"], "minProperties": {}},
        {"properties": {"a": {}}, "minProperties": []},
        {"propertyNames": {"pattern": [1]}},
        {"propertyNames": {"enum": {}}},
        {"multipleOf": True},
        {"oneOf": [{"required": [[]]}, {"required": {}}, True, 3, {"$ref": 5}, {"$ref": "#/x/y"}]},
        {"allOf": [{"$ref": "#"}, {"$ref": "#/allOf/7"}, None], "properties": [1]},
        {
            "oneOf": [
                {"$ref": "#/oneOf/0"},
                {"$ref": f"#/oneOf/{'1' * 5000}"},
                {"$ref": "#/oneOf/x"},
            ]
        },
        {"oneOf": [{"type": "null"}], "$defs": 3, "items": {"$ref": "#/oneOf/0"}},
        {"not": {"anyOf": [{"required": [None]}]}, "properties": "x"},
        {"dependencies": {"a": 3, "b": ["c"]}, "patternProperties": {"(": 1}},
        {"pattern": 5, "anyOf": {"a": 1}, "enum": 3},
    ],
)
def test_a_malformed_schema_does_not_crash(schema: dict[str, Any]) -> None:
    for part in (schema, {"items": schema}, {"anyOf": [schema, schema]}):
        grammar, left_out = lenient_schema_grammar(json.dumps(part))
        assert grammar.text
        assert all(left_out)


def test_huge_schemas_end(vocabulary: LlamaVocabulary) -> None:
    """They are enforced or rejected: for many values or repetitions, the work must be bounded."""
    many = {"enum": [f"value number {n}" for n in range(5000)]}
    assert json.loads(followed(vocabulary, schema_grammar(json.dumps(many)), 0)) in many["enum"]
    for pattern in ("^(a{1000}){1000}$", "^((a|b|c){1,99}){1,99}x$", "^(a|aa|aaa)*b$" * 50):
        schema = {"type": "string", "pattern": pattern}
        with contextlib.suppress(UsageError, BackendError):
            state = LlguidanceGrammar(vocabulary, schema_grammar(json.dumps(schema))).start
            assert state.allows(np.arange(vocabulary.n_tokens)).any()


# --- states -----------------------------------------------------------------------------------


def test_control_tokens_are_not_text(vocabulary: LlamaVocabulary) -> None:
    state = LlguidanceGrammar(vocabulary, schema_grammar('{"type": "string"}')).start
    quote = next(t for t in range(vocabulary.n_tokens) if vocabulary.token_bytes(t) == b'"')
    silent = [t for t in range(vocabulary.n_tokens) if not vocabulary.token_bytes(t)]
    assert silent
    assert not state.after(quote).allows(np.array(silent)).any()


def test_a_closed_model_is_freed(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", TinyConfig())
    opened = LlamaModel(path, vocabulary_only=True)
    LlguidanceGrammar(opened.vocabulary, schema_grammar("{}"))
    kept = weakref.ref(opened.vocabulary)
    opened.close()
    del opened
    gc.collect()
    assert kept() is None


def test_a_grammar_that_grows_too_large_within_a_text_is_an_error(
    vocabulary: LlamaVocabulary,
) -> None:
    every = np.arange(vocabulary.n_tokens)
    (letter,) = vocabulary.tokenize_inside("a")
    state = LlguidanceGrammar(vocabulary, Grammar("lark", "start: /(([abc]){1,99}){1,99}x/")).start

    def follow(state: GrammarState) -> None:
        for _ in range(99 * 99):
            state.allows(every)
            state = state.after(letter)

    with pytest.raises(BackendError, match="any further: [^\n]*too many[^\n]*$"):
        follow(state)


def test_a_grammar_that_is_too_large_at_the_start_of_a_text_is_refused(
    vocabulary: LlamaVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = MagicMock()
    broken.deep_copy.return_value = broken
    broken.get_error.return_value = "too complex\nand more"
    broken.is_error.side_effect = lambda: broken.unsafe_compute_mask_ptr.called
    grammar = schema_grammar('{"minimum": 17}')  # not compiled before
    monkeypatch.setattr(llguidance, "LLMatcher", MagicMock(return_value=broken))
    with pytest.raises(UsageError, match="too complex$"):
        LlguidanceGrammar(vocabulary, grammar)
