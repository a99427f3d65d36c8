"""The forms of grammars: GBNF, JSON schemas, and Lark of llguidance.

A form's module is imported when the first answer follows such a grammar.
"""

from importlib import import_module
from typing import Any

from specgen.options import Grammar
from specgen.text.grammar.base import GrammarState, Vocabulary


def grammar_start(grammar: Grammar, vocabulary: Vocabulary) -> GrammarState:
    """Return the state of a grammar before a text. Raise `UsageError` if the grammar is invalid."""
    name = "gbnf" if grammar.form == "gbnf" else "llguidance"
    start: GrammarState = _module(f"{name}_grammar").start(grammar, vocabulary)
    return start


def schema_grammar(schema: str) -> Grammar:
    """Return the grammar of a JSON schema. Raise `UsageError` if it cannot be followed."""
    found: Grammar = _module("json_schema").schema_grammar(schema)
    return found


def _module(name: str) -> Any:
    return import_module(f"specgen.text.grammar.{name}")
