"""llama-cpp-python's `LlamaGrammar`, for where that library is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specgen.errors import UsageError
from specgen.option_values import shown_value


class LlamaGrammar:
    """A grammar, or a JSON schema, that an answer follows."""

    def __init__(self, *, field: str, value: Any) -> None:
        """Keep a grammar; use one of the class methods in its place.

        Args:
            field: The field of a request that takes it: ``grammar`` or ``json_schema``.
            value: The value of that field.
        """
        self.field = field
        self.value = value

    @classmethod
    def from_string(
        cls,
        grammar: str,
        verbose: bool = True,
    ) -> LlamaGrammar:
        """Return a grammar in GBNF."""
        del verbose
        return cls(field="grammar", value=grammar)

    @classmethod
    def from_file(
        cls,
        file: str | Path,
        verbose: bool = True,
    ) -> LlamaGrammar:
        """Return the grammar in a file."""
        return cls.from_string(Path(file).read_text(encoding="utf-8"), verbose)

    @classmethod
    def from_json_schema(
        cls,
        json_schema: str,
        verbose: bool = True,
    ) -> LlamaGrammar:
        """Return the grammar of a JSON schema, which is given as a text."""
        del verbose
        return cls(field="json_schema", value=json.loads(json_schema))


def grammar_fields(grammar: Any) -> dict[str, Any]:
    """Return a grammar as a field of a request.

    Args:
        grammar: A `LlamaGrammar`, also llama-cpp-python's; or a text in GBNF.

    Raises:
        UsageError: If it is something else.
    """
    if isinstance(grammar, LlamaGrammar):
        return {grammar.field: grammar.value}
    # llama-cpp-python's class has the text in an attribute without a public name.
    text = getattr(grammar, "_grammar", grammar)
    if not isinstance(text, str):
        raise UsageError(f"grammar: give a LlamaGrammar or a text, not {shown_value(grammar)}")
    return {"grammar": text}
