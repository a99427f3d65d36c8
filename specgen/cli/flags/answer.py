"""The options of an answer: its length, its end, its grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.flags.text import utf8
from specgen.errors import UsageError
from specgen.options import GenerationOptions, Grammar

_DEFAULT = GenerationOptions()
_ANSWER = "Answer"
_GRAMMAR = "Constrained answers"


def constraint(
    grammar: Annotated[
        str | None,
        typer.Option(
            "--grammar",
            metavar="GBNF",
            parser=utf8,
            help="A grammar that the answer must follow, in llama.cpp's GBNF.",
            rich_help_panel=_GRAMMAR,
        ),
    ] = None,
    grammar_file: Annotated[
        Path | None,
        typer.Option("--grammar-file", help="The same, from a file.", rich_help_panel=_GRAMMAR),
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            "-j",
            metavar="SCHEMA",
            parser=utf8,
            help="A JSON schema that the answer must follow; {} is any JSON object.",
            rich_help_panel=_GRAMMAR,
        ),
    ] = None,
    json_schema_file: Annotated[
        Path | None,
        typer.Option(
            "--json-schema-file", "-jf", help="The same, from a file.", rich_help_panel=_GRAMMAR
        ),
    ] = None,
) -> Grammar | None:
    """Return the grammar of the answer, if there is one. Raises `UsageError`."""
    given = {
        "--grammar": grammar,
        "--grammar-file": grammar_file,
        "--json-schema": json_schema,
        "--json-schema-file": json_schema_file,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} exclude each other", hint="use one of them")
    if grammar_file is not None:
        return Grammar("gbnf", _read(grammar_file, "--grammar-file"))
    if json_schema_file is not None:
        json_schema = _read(json_schema_file, "--json-schema-file")
    if json_schema is not None:
        from specgen.constrain.json_schema import schema_grammar

        return schema_grammar(json_schema)
    return None if grammar is None else Grammar("gbnf", grammar)


def answer(
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            "--predict",
            "-n",
            min=-1,
            help="The most tokens to generate; -1 is no limit but the end of the text or of the context.",
            rich_help_panel=_ANSWER,
        ),
    ] = _DEFAULT.max_tokens,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            "--reverse-prompt",
            "-r",
            metavar="TEXT",
            parser=utf8,
            help="End the answer before this text; may be given several times.",
            rich_help_panel=_ANSWER,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Never choose an end-of-text token.", rich_help_panel=_ANSWER
        ),
    ] = _DEFAULT.ignore_eos,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            min=0,
            max=100,
            metavar="N",
            help="With --json: report the target's log-probability of each token, and the N most likely "
            "tokens in its place.",
            show_default="none",
            rich_help_panel=_ANSWER,
        ),
    ] = _DEFAULT.logprobs,
) -> GenerationOptions:
    """Return the options of an answer without a grammar. Raises `UsageError`."""
    if stop is not None and "" in stop:
        raise UsageError("--stop '' is empty: every answer would end before it began")
    return GenerationOptions(
        max_tokens=max_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos, logprobs=logprobs
    )


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{option} {path}: cannot be read: {reason}") from error
