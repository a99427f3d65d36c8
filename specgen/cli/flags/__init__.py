"""The options of commands: groups of them, and single ones that several commands declare.

Most options are declared where they are used, in `specgen.options` and `specgen.cli.output`. How
they become parameters of commands is explained in `specgen.cli.flags.typer_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specgen.cli.flags.typer_groups import REQUIRED as REQUIRED
from specgen.cli.flags.typer_groups import argument as argument
from specgen.cli.flags.typer_groups import extends as extends
from specgen.cli.flags.typer_groups import group as group
from specgen.cli.flags.typer_groups import takes_options as takes_options
from specgen.cli.inputs import read_prompt, read_template, read_variables
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.option_fields import option as option
from specgen.option_fields import utf8
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    Grammar,
    KernelOptions,
    ModelChoice,
    PrefixOptions,
    Workers,
    parse_gpu_layers,
    staged,
)
from specgen.sampler_options import SamplerOptions
from specgen.system.files import named_file, read_text
from specgen.text.built_in_templates import BUILT_IN

# --- models


def model_names(incomplete: str) -> list[str]:
    """Complete the name of a model, in the registry or in a program's store."""
    from specgen.models.registry import load_registry
    from specgen.models.stored_models import stored_models

    names = [*load_registry().models, *(model.name for model in stored_models())]
    return [name for name in names if name.startswith(incomplete)]


def pair_names(incomplete: str) -> list[str]:
    """Complete the name of a pair."""
    from specgen.models.registry import load_registry

    return [name for name in load_registry().pairs if name.startswith(incomplete)]


def draft_names(incomplete: str) -> list[str]:
    """Complete the name of a draft: a model's, or a word."""
    from specgen.drafters.kinds import WORDS

    words = [word for word in (*WORDS, "none") if word.startswith(incomplete)]
    return words + model_names(incomplete)


def target_option(
    default: Any = REQUIRED,
    help: str = "The target, as for `specgen run`: a GGUF file or a name.",  # noqa: A002
    **settings: Any,
) -> Any:
    """Declare the option that names a target.

    `specgen.cli.llama_cpp_options` replaces -hf with it.
    """
    settings |= {"metavar": "FILE|NAME", "autocompletion": model_names}
    return option(default, "--target --model -m", help, **settings)


def draft_option(help: str, metavar: str = "FILE|NAME", **settings: Any) -> Any:  # noqa: A002
    """Declare the option that names a draft.

    `specgen.cli.llama_cpp_options` replaces -hfd with it.
    """
    return option(None, "--draft --model-draft -md", help, metavar=metavar, **settings)


_model = partial(option, panel="Models")


@extends(ModelChoice)
def models(
    *,
    target: str | None = target_option(
        None,
        "The target, the model that answers: a GGUF file, a name from `specgen models list`, or "
        "hf:USER/REPO:QUANT on the hub (-hf USER/REPO:QUANT; --hf-file names a file, HF_TOKEN or "
        "--hf-token opens gated repositories).",
        show_default="the default pair's",
        panel="Models",
    ),
    draft: list[str] | None = draft_option(
        "What drafts for it: a file or a name as for the target (-hfd on the hub), `mtp` (the "
        "target's own layers), `ngram` (repetitions of the text so far), `heads` (made by "
        "`specgen draft make`), or `none`. A second --draft drafts for the first.",
        metavar="FILE|NAME|mtp|ngram|none",
        autocompletion=draft_names,
        show_default="the pair's; with -m alone what `specgen draft find` saved, MTP layers, a "
        "known partner on this disk, or ngram",
        panel="Models",
    ),
    pair: str | None = _model(
        None,
        "--pair",
        "A target and its draft, by a name from `specgen models list`.",
        metavar="NAME",
        autocompletion=pair_names,
        show_default="the default pair, if no target is given",
    ),
) -> ModelChoice:
    """Return the models that the user chose."""
    return staged(target, draft or (), pair)


# --- the machine

#: llama.cpp's limit.
_MAX_WORKERS = 16
kernels = group(KernelOptions)
_machine = partial(option, panel="Machine")


@extends(ContextOptions)
def machine(
    *,
    kernels: KernelOptions = kernels,
    n_gpu_layers_draft: int = _machine(
        ContextOptions().n_gpu_layers,
        "--gpu-layers-draft -ngld",
        "Layers of the draft on the GPU; -1 also means all.",
        min=-1,
        metavar="N|all",
        parse=parse_gpu_layers,
    ),
    rpc: str | None = _machine(
        None,
        "--rpc",
        "Spread the target's layers over these machines, which run `specgen worker`.",
        metavar="HOST:PORT,...",
    ),
    tensor_split: str | None = _machine(
        None,
        "--tensor-split -ts",
        "With --rpc: each device's share of the target, such as 3,1.",
        metavar="N,N,...",
        show_default="by their free memory",
    ),
    output_here: bool = _machine(
        False,
        "--output-here",
        "With --rpc: compute logits on this machine. Workers then send hidden states instead, a "
        "twentieth of the data or less.",
    ),
    rpc_timeout: float = _machine(
        Workers(()).timeout_s,
        "--rpc-timeout",
        "With --rpc: give up when a worker is silent for longer.",
        metavar="SECONDS",
        min=0.1,
    ),
    chat_template: str | None = _model(
        None,
        "--chat-template --chat-template-file",
        "A chat template: a file of Jinja, the template itself, a model's (a GGUF file, or its "
        f"name), or {', '.join(BUILT_IN)}.",
        metavar="FILE|NAME",
        show_default="the target's own",
    ),
    template_variables: str | None = _model(
        None,
        "--chat-template-kwargs",
        'Variables for the chat template, such as {"enable_thinking": false}.',
        metavar="JSON",
        parse=utf8,
    ),
    **others: Any,
) -> Contexts:
    """Return the contexts of target and draft, and the kernels."""
    shares: tuple[float, ...] = ()  # by free memory
    if tensor_split is not None:
        shares = _shares(tensor_split)
    workers = None
    if rpc is not None:
        workers = Workers(endpoints_of(rpc), shares, output_here, rpc_timeout)
    elif output_here:
        raise UsageError("--output-here needs --rpc: it is about workers on other machines")
    elif tensor_split is not None:
        raise UsageError("--tensor-split needs --rpc: it is about workers on other machines")
    # Target and draft share all options except those that concern only one of them.
    shared = ContextOptions(**others)
    target = replace(
        shared,
        workers=workers,
        chat_template=None if chat_template is None else read_template(chat_template),
        template_variables=read_variables(template_variables or "{}"),
    )
    draft = replace(shared, n_gpu_layers=n_gpu_layers_draft, weights_memory="auto")
    return Contexts(target, draft, kernels)


def endpoints_of(rpc: str) -> tuple[str, ...]:
    """Return the workers' addresses, which commas separate.

    Raises:
        UsageError: If one is not HOST:PORT, or is there twice, or there are too many.
    """
    from specgen.system.worker_probe import parse_endpoint

    endpoints = tuple(endpoint.strip() for endpoint in rpc.split(","))
    for endpoint in endpoints:
        parse_endpoint(endpoint)
    if len(set(endpoints)) < len(endpoints):
        raise UsageError(f"--rpc {rpc} names a worker twice")
    if len(endpoints) > _MAX_WORKERS:
        raise UsageError(f"--rpc names {len(endpoints)} workers; {_MAX_WORKERS} at most")
    return endpoints


def _shares(text: str) -> tuple[float, ...]:
    """Return each device's share of the target.

    Raises:
        UsageError: If one is not a number of 0 or more, or all are 0.
    """
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = ()  # whose sum is 0: an error below
    if 0.0 < sum(shares) < math.inf and min(shares) >= 0.0:
        return shares
    raise UsageError(
        f"--tensor-split {text}: give a number of 0 or more for each device, for example 3,1"
    )


# --- drafts


drafting = group(DraftOptions)

# --- samplers, prompts and answers

sampling = group(SamplerOptions)
_prompt = partial(option, panel="Prompt")


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt of a command that answers one."""

    prompt_option: str | None = _prompt(
        None,
        "--prompt -p",
        "The prompt, given as an option, as in llama.cpp.",
        metavar="TEXT",
    )
    files: tuple[Path, ...] = _prompt(
        (),
        "--file -f",
        "A file with the prompt, or with text that comes before it; may be repeated. "
        "A newline at its end is dropped.",
    )
    prompt: str | None = argument(
        "PROMPT", "The prompt, after the files and standard input; - is standard input."
    )

    def read(self, note: Callable[[str], None]) -> str:
        """Return the prompt, as `read_prompt` does.

        Args:
            note: Prints a note.
        """
        return read_prompt(self.prompt, self.prompt_option, self.files, note)


question = group(Question)


def chat_option() -> Any:
    """Declare the option that says whether prompts are put into the chat template."""
    return _prompt(
        None,
        "--chat/--raw",
        "Put the prompt into the chat template, or continue it as it is (--raw); names of control "
        "tokens in it then become those tokens.",
        show_default="chat, if the model has a template",
    )


@dataclass(frozen=True, slots=True)
class Template:
    """How a prompt is put into the chat template."""

    #: Whether the prompt is put into the template; None if it is whenever the model has one.
    chat: bool | None = chat_option()
    system: str | None = _prompt(
        None,
        "--system -sys",
        "A system message for the chat template.",
        metavar="TEXT",
        parse=utf8,
    )

    def __post_init__(self) -> None:
        if self.system is not None and self.chat is False:
            raise UsageError(
                "--system and --raw cannot be used together: --raw uses no chat template"
            )


template = group(Template)

_grammar = partial(option, panel="Constrained answers")


@extends(GenerationOptions)
def answer(
    *,
    grammar: str | None = _grammar(
        None,
        "--grammar",
        "A grammar for the answer, in llama.cpp's GBNF.",
        metavar="GBNF",
        parse=utf8,
    ),
    grammar_file: Path | None = _grammar(None, "--grammar-file", "A file with a grammar."),
    json_schema: str | None = _grammar(
        None,
        "--json-schema -j",
        "A JSON schema for the answer; {} is any JSON object.",
        metavar="SCHEMA",
        parse=utf8,
    ),
    json_schema_file: Path | None = _grammar(
        None, "--json-schema-file -jf", "A file with a JSON schema."
    ),
    **others: Any,
) -> GenerationOptions:
    """Return when an answer ends, and the grammar that it has to follow, if any."""
    options = GenerationOptions(**others)
    given = {
        "--grammar": grammar,
        "--grammar-file": grammar_file,
        "--json-schema": json_schema,
        "--json-schema-file": json_schema_file,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} cannot be used together", hint="use one of them")
    if names and options.ignore_eos:
        raise UsageError(
            "--ignore-eos and a grammar cannot be used together: "
            "text that follows a grammar has an end"
        )
    # At most one of the four is given.
    for name, text in (("--grammar", grammar), ("--json-schema", json_schema)):
        if text is not None and named_file(text) is not None:
            raise UsageError(f"{name} {text}: that is a file", f"use {name}-file {text}")
    if json_schema_file is not None:
        json_schema = text_in(json_schema_file, "--json-schema-file")
    if json_schema is not None:
        from specgen.text.grammar.json_schema import schema_grammar

        return replace(options, grammar=schema_grammar(json_schema))
    if grammar_file is not None:
        grammar = text_in(grammar_file, "--grammar-file")
    if grammar is not None:
        return replace(options, grammar=Grammar("gbnf", grammar))
    return options


def text_in(path: Path, option: str) -> str:
    """Return the text of a file that an option names.

    Args:
        path: The file.
        option: The option, for messages.

    Raises:
        UsageError: If the file cannot be read, or is not text.
    """
    return read_text(path, f"{option} {path}", UsageError)


#: The options of `answer` for a grammar only.
constraint = answer.without("--max-tokens", "--stop", "--ignore-eos", "--logprobs")

#: The options of commands that load models and answer with them.
setup = group(
    Setup,
    models=models,
    answer=answer,
    sampling=sampling,
    drafting=drafting,
    machine=machine,
    prefixes=group(PrefixOptions),
)

# --- output

JSON_REPORT = option(False, "--json", "Print a JSON object.")
output = group(Output)
#: The output of commands that show no answers: --quiet and --verbose.
loudness = output.without(
    "--show",
    "--stats",
    "--json",
    "--html",
    "--newline",
)
