"""Grammars of calls: for answers that have to be calls, or may be."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specgen.backend.llama import json_schema_to_gbnf
from specgen.constrain.gbnf_names import literal, with_prefix
from specgen.errors import UsageError
from specgen.openai_format.body import BodyError
from specgen.openai_format.tool_forms import CallForm
from specgen.openai_format.tools import Function


def calls_grammar(form: CallForm, functions: Sequence[Function], *, is_parallel: bool) -> str:
    """GBNF for a call of one of `functions` as the model writes it, or for several if `is_parallel`.
    Raises `BodyError` if the parameters of a function cannot be made a grammar."""
    rules = [f"root ::= {_whole(form, is_parallel)}"]
    rules.append("call ::= " + " | ".join(f"call-{n}" for n in range(len(functions))))
    for number, function in enumerate(functions):
        name = f"arguments-{number}"
        before = f'{{"name": "{function.name}", "{form.arguments}": '
        rules.append(f'call-{number} ::= {literal(before)} {name}-root "}}"')
        rules.append(with_prefix(_arguments(function), f"{name}-"))
    return "\n".join(rules)


def either(first: str, second: str) -> str:
    """GBNF for the texts of two grammars."""
    parts = [with_prefix(first, "first-"), with_prefix(second, "second-")]
    return "\n".join(["root ::= first-root | second-root", *parts])


def _whole(form: CallForm, is_parallel: bool) -> str:
    """All calls of an answer, with what stands around them."""
    if form.is_list:
        more = ' (", " call)*' if is_parallel else ""
        return f'{literal(form.opening)} " "? "[" call{more} "]"'
    if form.is_bare:  # such models write one call in an answer
        return "call"
    one = f'{literal(form.opening)} "\\n" call "\\n" {literal(form.closing)}'
    return f'{one} ("\\n" {one})*' if is_parallel else one


def _arguments(function: Function) -> str:
    try:
        return json_schema_to_gbnf(json.dumps(function.parameters))
    except UsageError as error:
        raise BodyError(f"{function.field}.parameters", error.message) from None


__all__ = ["calls_grammar", "either"]
