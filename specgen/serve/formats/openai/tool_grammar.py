"""Grammars for answers that must or may be calls: in Lark's form, with JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.serve.formats.openai.body import BodyError
from specgen.serve.formats.openai.tool_forms import CallForm
from specgen.serve.formats.openai.tools import Function
from specgen.text.grammar.json_schema import lenient_schema_grammar
from specgen.text.grammar.llguidance_grammar import JSON_FORM


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    is_parallel: bool,
    other: Grammar | None = None,
) -> tuple[Grammar, list[str]]:
    """Return a grammar for a call of one of `functions` in the model's form, for several if `is_parallel`,
    or else for text that conforms to the JSON schema `other`; and warnings that name what it cannot enforce
    of the parameters' schemas. Raise `BodyError` if no arguments conform to a function's parameters."""
    warnings: list[str] = []
    rules = [f"start: calls{' | other' if other is not None else ''}"]
    rules.append(f"calls: {_whole(form, is_parallel)}")
    rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(functions))))
    for number, function in enumerate(functions):
        before = f'{{"name": "{function.name}", "{form.arguments}": '
        rules.append(f'call_{number}: {_literal(before)} arguments_{number} "}}"')
        schema, left_out = _parameters(function)
        rules.append(f"arguments_{number}: {_json(schema)}")
        if left_out:
            names = ", ".join(left_out)
            warnings.append(f"{function.field}.parameters: no grammar can enforce {names}")
    if other is not None:
        rules.append(f"other: {_json(other)}")
    return Grammar("lark", "\n".join(rules)), warnings


def _whole(form: CallForm, is_parallel: bool) -> str:
    """Return the rule for all calls of an answer, with the text around them."""
    if form.is_list:
        more = ' (", " call)*' if is_parallel else ""
        return f'{_literal(form.opening)} " "? "[" call{more} "]"'
    if form.is_bare:  # these models write one call in an answer
        return "call"
    one = f'{_literal(form.opening)} "\\n" call "\\n" {_literal(form.closing)}'
    return f'{one} ("\\n" {one})*' if is_parallel else one


def _literal(text: str) -> str:
    """Return a text as a Lark literal, which has JSON's form."""
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Grammar) -> str:
    """Return a JSON schema in Lark's form."""
    parsed = json.loads(schema.text)
    form = {**JSON_FORM, "lenient": parsed.get("x-guidance") == {"lenient": True}}
    return f"%json {json.dumps({**parsed, 'x-guidance': form})}"


def _parameters(function: Function) -> tuple[Grammar, tuple[str, ...]]:
    try:
        return lenient_schema_grammar(json.dumps(function.parameters))
    except UsageError as error:
        raise BodyError(f"{function.field}.parameters", error.message) from None
