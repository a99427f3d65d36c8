"""The options of commands. Those that several commands share are groups (`groups.takes_options`).

The options of answers, samplers, drafts and machines are declared in `specgen.options`, those of the output in
`specgen.cli.output`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from typer import Option

from specgen.cli.flags.groups import group, panel, takes_options, utf8
from specgen.cli.flags.machine import kernels, machine
from specgen.cli.flags.models import (
    draft_model_option,
    draft_names,
    model_names,
    models,
    pair_names,
    target_option,
)
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.options import DraftOptions, GenerationOptions, Grammar, TreeShape, parse_tree
from specgen.sampler_options import (
    DEFAULT_SAMPLERS,
    LARGEST_FACTOR,
    SamplerOptions,
    option,
    parse_sampler_letters,
    parse_samplers,
)
from specgen.sampler_options import utf8 as utf8_texts

__all__ = [
    "CHAT",
    "JSON_REPORT",
    "Template",
    "answer",
    "constraint",
    "draft_model_option",
    "draft_names",
    "drafting",
    "group",
    "kernels",
    "loudness",
    "machine",
    "model_names",
    "models",
    "output",
    "pair_names",
    "panel",
    "sampling",
    "setup",
    "takes_options",
    "target_option",
    "template",
    "tree_shape",
    "utf8",
]

# --- drafts


@group(DraftOptions)
def drafting(**given: Any) -> DraftOptions:
    """Return the options of drafting. Raise `UsageError`."""
    options = DraftOptions(**given)
    shortest, longest = options.ngram_min, options.ngram_max
    if shortest is not None and longest is not None and shortest > longest:
        raise UsageError(
            f"--ngram-min {shortest} is larger than --ngram-max {longest}",
            hint="give a smaller --ngram-min, or a larger --ngram-max",
        )
    shape, n_most = options.tree, options.max_tokens
    if shape.is_fixed and n_most is not None and n_most < shape.n_nodes:
        raise UsageError(
            f"--tree {shape} has {shape.n_nodes} tokens, but --draft-max allows {n_most}",
            hint="use a smaller shape, or leave --draft-max out",
        )
    return options


def tree_shape(text: str) -> TreeShape:
    """Parse a shape in the form of --tree. Raise `UsageError`."""
    try:
        return parse_tree(text)
    except ValueError as error:
        raise UsageError(f"--tree: {error}") from None


# --- samplers


@group(
    SamplerOptions,
    panel(
        "Sampling",
        samplers=Option(
            "--samplers",
            metavar="NAMES",
            help="The samplers to use, in order, separated by ;",
            show_default="; ".join(DEFAULT_SAMPLERS),
        ),
        sampler_letters=Option(
            "--sampler-seq",
            "--sampling-seq",
            metavar="LETTERS",
            help="The same as llama.cpp's letters, for example edskypmxt.",
        ),
    ),
)
def sampling(
    *, samplers: str | None = None, sampler_letters: str | None = None, **others: Any
) -> SamplerOptions:
    """Return the options of the samplers. Raise `UsageError`."""
    if samplers is not None and sampler_letters is not None:
        raise UsageError("--samplers and --sampler-seq exclude each other", hint="use one of them")
    try:
        if samplers is not None:
            others["samplers"] = parse_samplers(samplers)
        elif sampler_letters is not None:
            others["samplers"] = parse_sampler_letters(sampler_letters)
    except ValueError as error:
        raise UsageError(
            f"{'--sampler-seq' if samplers is None else '--samplers'}: {error}"
        ) from None
    for name, value in others.items():
        if isinstance(value, float) and abs(value) > LARGEST_FACTOR:
            raise UsageError(
                f"{sampling.spelling(name)} {value} is too large",
                hint=f"give a number between {-LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}",
            )
    return SamplerOptions(**others)


# --- prompts

_prompt = partial(option, panel="Prompt")


@dataclass(frozen=True, slots=True)
class Template:
    """How a prompt is put into the chat template: `chat` of None means if the model has one."""

    chat: bool | None = _prompt(
        None,
        "--chat/--raw",
        "Put the prompt into the model's chat template, or continue it as it is, with names of control tokens "
        "(<|im_end|>, ...) as these tokens.",
        show_default="chat, if the model has a template",
    )
    system: str | None = _prompt(
        None,
        "--system -sys",
        "A system message for the chat template.",
        metavar="TEXT",
        parse=utf8_texts,
    )


@group(Template)
def template(**given: Any) -> Template:
    """Return the use of the chat template. Raise `UsageError`."""
    made = Template(**given)
    if made.system is not None and made.chat is False:
        raise UsageError("--system and --raw exclude each other: --raw uses no chat template")
    return made


CHAT = group(Template)(lambda **given: Template(**given).chat).without("system")

# --- answers

_GRAMMAR = panel(
    "Constrained answers",
    grammar=Option(
        "--grammar",
        metavar="GBNF",
        parser=utf8,
        help="A grammar that the answer must follow, in llama.cpp's GBNF.",
    ),
    grammar_file=Option(
        "--grammar-file", help="A file with a grammar that the answer must follow."
    ),
    json_schema=Option(
        "--json-schema",
        "-j",
        metavar="SCHEMA",
        parser=utf8,
        help="A JSON schema that the answer must follow; {} is any JSON object.",
    ),
    json_schema_file=Option(
        "--json-schema-file", "-jf", help="A file with a JSON schema that the answer must follow."
    ),
)


@group(GenerationOptions, _GRAMMAR)
def answer(
    *,
    grammar: str | None = None,
    grammar_file: Path | None = None,
    json_schema: str | None = None,
    json_schema_file: Path | None = None,
    **others: Any,
) -> GenerationOptions:
    """Return the options of an answer. Raise `UsageError`."""
    options = GenerationOptions(**others)
    if "" in options.stop:
        raise UsageError("--stop '' is empty: every answer would end before it began")
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
        grammar = _read(grammar_file, "--grammar-file")
    if json_schema_file is not None:
        json_schema = _read(json_schema_file, "--json-schema-file")
    if names and options.ignore_eos:
        raise UsageError(
            "--ignore-eos and a grammar exclude each other: text that follows a grammar has an end"
        )
    if json_schema is not None:
        from specgen.text.grammar.base import schema_grammar

        return replace(options, grammar=schema_grammar(json_schema))
    return options if grammar is None else replace(options, grammar=Grammar("gbnf", grammar))


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{option} {path}: cannot be read: {reason}") from error


#: The grammar of an answer alone.
constraint = answer.without("max_tokens", "stop", "ignore_eos", "logprobs")

#: The options of commands that load models and answer with them.
setup = group(
    Setup,
    {
        "models": models,
        "answer": answer,
        "sampling": sampling,
        "drafting": drafting,
        "machine": machine,
        "learn": Option(
            "--learn/--no-learn",
            envvar="SPECGEN_LEARN",
            help="Keep prompts and answers in the data folder, readable by you alone. The draft model learns from "
            "them (`specgen draft learn`), and repetitions of them draft. `specgen draft forget` deletes them.",
            rich_help_panel="Learning",
        ),
        "prompt_cache": Option(
            "--prompt-cache",
            metavar="FILE",
            help="Keep in this file what was computed of the prompt; one that begins with the same text is then "
            "not read again.",
            show_default="not kept",
            rich_help_panel="Prompt",
        ),
    },
)(Setup)

# --- output

JSON_REPORT = Option("--json", help="Print a JSON object.")


@group(Output)
def output(**given: Any) -> Output:
    """Return how a command shows answers, and what it prints besides. Raise `UsageError`."""
    made = Output(**given)
    if made.quiet and made.verbose:
        raise UsageError("--quiet and --verbose exclude each other", hint="use one of them")
    return made


#: The output of commands that show no answers: --quiet and --verbose.
loudness = output.without("show", "stats", "json", "newline")
