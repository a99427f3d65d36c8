"""The options of commands, each with its spellings and its help.

The readable spelling comes first, llama.cpp's second. Defaults are not here, but in `specgen.options`.
Options that several commands share come in groups (`groups.takes_options`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer import Option

from specgen.cli.flags.drafting import drafting, tree_shape
from specgen.cli.flags.groups import Group, group, panel, takes_options, utf8
from specgen.cli.flags.hub import HUB, HUB_DRAFT, hub_names, named, one_name
from specgen.cli.flags.machine import KERNELS, machine
from specgen.cli.flags.sampling import sampling
from specgen.cli.flags.server import limits, server
from specgen.cli.model_loading import Setup
from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.options import GenerationOptions, Grammar, ModelChoice, staged

__all__ = [
    "CHAT",
    "HUB",
    "HUB_DRAFT",
    "JSON_REPORT",
    "KERNELS",
    "LEARN",
    "Template",
    "Trials",
    "answer",
    "constraint",
    "draft_model",
    "drafting",
    "group",
    "hub_names",
    "limits",
    "loudness",
    "machine",
    "models",
    "named",
    "output",
    "panel",
    "sampling",
    "server",
    "setup",
    "takes_options",
    "target",
    "target_option",
    "template",
    "tree_shape",
    "trials",
    "utf8",
]

# --- models


def model_names(incomplete: str) -> list[str]:
    """Return the models whose names begin so."""
    from specgen.models import load_registry

    return [name for name in load_registry().models if name.startswith(incomplete)]


def pair_names(incomplete: str) -> list[str]:
    """Return the pairs whose names begin so."""
    from specgen.models import load_registry

    return [name for name in load_registry().pairs if name.startswith(incomplete)]


def draft_names(incomplete: str) -> list[str]:
    """Return what drafts and begins so."""
    kinds = [name for name in ("mtp", "ngram", "heads", "none") if name.startswith(incomplete)]
    return kinds + model_names(incomplete)


def target_option(**settings: Any) -> Any:
    """Return the option that names a target."""
    usual: dict[str, Any] = {
        "help": "The target: a GGUF file, or a name from `specgen models list`.",
        "autocompletion": model_names,
    }
    return Option("--target", "--model", "-m", metavar="FILE|NAME", **(usual | settings))


def target(*, required: bool = True, **settings: Any) -> Group:
    """Return the options that name a target, one of which must be given if it is `required`."""
    settings = {"show_default": "required" if required else False} | settings
    return named(target_option(**settings), required=required)


def draft_model(**settings: Any) -> Group:
    """Return the options that name a small model."""
    option = Option("--draft", "--model-draft", "-md", metavar="FILE|NAME", **settings)
    return named(option, HUB_DRAFT)


_MODELS = panel(
    "Models",
    target=target_option(show_default="the default pair's"),
    draft=Option(
        "--draft",
        "--model-draft",
        "-md",
        metavar="FILE|NAME|mtp|ngram|none",
        autocompletion=draft_names,
        help="What drafts: a GGUF file or a name; `mtp` (the target's own MTP layers); `ngram` (repetitions "
        "of the text so far); `heads` (made by `specgen draft make`); or `none` (plain decoding). A second --draft drafts for the first: a "
        "smaller model or `ngram`.",
        show_default="the pair's; with -m alone the one that `specgen draft find` or `specgen draft make` "
        "saved, its MTP layers, a known partner on this disk, or ngram",
    ),
    pair=Option(
        "--pair",
        metavar="NAME",
        autocompletion=pair_names,
        help="A target and its draft, by a name from `specgen models list`; fetched on first use.",
        show_default="the default pair, if no target is given",
    ),
)


@group(ModelChoice, _MODELS, HUB, HUB_DRAFT)
def models(
    *,
    target: str | None = None,
    draft: list[str] | None = None,
    pair: str | None = None,
    hf_repo: str | None = None,
    hf_repo_draft: str | None = None,
    hf_file: str | None = None,
    hf_token: str | None = None,
) -> ModelChoice:
    """Return the models as the user named them. Raise `UsageError`."""
    target = one_name(target, hub_names(hf_repo, hf_file, hf_token))
    return staged(target, [*(draft or ()), *hub_names(hf_repo_draft)], pair)


# --- prompts

CHAT = Option(
    "--chat/--raw",
    help="Put the prompt into the model's chat template, or continue it as it is. In a raw prompt, names of "
    "control tokens (<|im_end|>, ...) become these tokens.",
    show_default="chat, if the model has a template",
    rich_help_panel="Prompt",
)


@dataclass(frozen=True, slots=True)
class Template:
    """How a prompt is put into the chat template: `chat` of None means if the model has one."""

    chat: bool | None = None
    system: str | None = None


@group(
    Template,
    panel(
        "Prompt",
        chat=CHAT,
        system=Option(
            "--system",
            "-sys",
            metavar="TEXT",
            parser=utf8,
            help="A system message for the chat template.",
        ),
    ),
)
def template(**given: Any) -> Template:
    """Return the use of the chat template. Raise `UsageError`."""
    made = Template(**given)
    if made.system is not None and made.chat is False:
        raise UsageError("--system and --raw exclude each other: --raw uses no chat template")
    return made


@dataclass(frozen=True, slots=True)
class Trials:
    """Prompts to measure with, and how many tokens of each answer count."""

    prompts: Path | None = None
    n_prompts: int = 4
    max_tokens: int = 64

    def texts(self) -> list[str]:
        """Return the prompts. Raise `PromptError`."""
        from specgen.measure.prompts import TRIAL_PROMPTS, evenly_chosen, read_prompts

        every = TRIAL_PROMPTS if self.prompts is None else read_prompts(self.prompts)
        return evenly_chosen(every, self.n_prompts)


trials = group(
    Trials,
    panel(
        "Trials",
        prompts=Option(
            "--prompts",
            help='Prompts to try with: JSON Lines with "prompt" or "turns".',
            show_default="a few of our own",
        ),
        n_prompts=Option(
            "--count",
            "-N",
            min=1,
            help="How many prompts to use, spread evenly over the file.",
        ),
        max_tokens=Option(
            "--max-tokens",
            "--predict",
            "--n-predict",
            "-n",
            min=2,
            help="How many tokens of each answer to use.",
        ),
    ),
)(Trials)

# --- answers

_ANSWER = panel(
    "Answer",
    max_tokens=Option(
        "--max-tokens",
        "--predict",
        "--n-predict",
        "-n",
        min=-1,
        help="The most tokens to generate; -1 continues until the text ends or the context is full.",
    ),
    stop=Option(
        "--stop",
        "--reverse-prompt",
        "-r",
        metavar="TEXT",
        parser=utf8,
        help="End the answer before this text; may be given several times.",
    ),
    ignore_eos=Option("--ignore-eos", help="Never choose an end-of-text token."),
    logprobs=Option(
        "--logprobs",
        min=0,
        max=100,
        metavar="N",
        help="With --json: report the target's log-probability of each token, and the N most likely tokens "
        "in its place.",
        show_default="none",
    ),
)
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


@group(GenerationOptions, _ANSWER, _GRAMMAR)
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
    options = replace(
        options, grammar=_grammar(grammar, grammar_file, json_schema, json_schema_file)
    )
    if options.grammar is not None and options.ignore_eos:
        raise UsageError(
            "--ignore-eos and a grammar exclude each other: text that follows a grammar has an end"
        )
    return options


def _grammar(
    grammar: str | None,
    grammar_file: Path | None,
    json_schema: str | None,
    json_schema_file: Path | None,
) -> Grammar | None:
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
    if json_schema is not None:
        from specgen.text.grammar.json_schema import schema_grammar

        return schema_grammar(json_schema)
    return None if grammar is None else Grammar("gbnf", grammar)


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{option} {path}: cannot be read: {reason}") from error


LEARN = Option(
    "--learn/--no-learn",
    envvar="SPECGEN_LEARN",
    help="Keep prompts and answers on this disk, in the data folder, readable by you alone. The draft model "
    "learns from them (`specgen draft learn`), and repetitions of them draft. `specgen draft forget` deletes "
    "them. Without it nothing is kept.",
    rich_help_panel="Learning",
)

PROMPT_CACHE = Option(
    "--prompt-cache",
    metavar="FILE",
    help="Keep what was read in this file, and what was computed of it; a prompt that begins with the same text is "
    "then not read again. The file is made if it does not exist.",
    show_default="not kept",
    rich_help_panel="Prompt",
)

#: The options of commands that load models and answer with them.
setup = group(
    Setup,
    {
        "models": models,
        "answer": answer,
        "sampling": sampling,
        "drafting": drafting,
        "machine": machine,
        "learn": LEARN,
        "prompt_cache": PROMPT_CACHE,
    },
)(Setup)

# --- output

JSON_REPORT = Option("--json", help="Print a JSON object.")


@group(
    Output,
    panel(
        "Output",
        show=Option(
            "--show",
            help="What a terminal shows of drafts. accepted: coloured tokens; rejected ones vanish after their "
            "round. all: rejected ones stay, and each round's reason to draft or not to draft is shown where it "
            "changes. none: plain text.",
        ),
        stats=Option(
            "--stats/--no-stats",
            help="Print a summary on standard error after the answer.",
            show_default="stats, but not with --json or --quiet",
        ),
        json=Option(
            "--json",
            help="Print events instead of the answer, as one JSON object on each line.",
        ),
        newline=Option(
            "--newline/--no-newline",
            help="In a pipe, end the answer with a line break. (A file gets the answer as it is.)",
            show_default="newline; in fim no-newline",
        ),
        quiet=Option("--quiet", "-q", help="Print only errors on standard error."),
        verbose=Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            help="Print more detail on standard error (models, memory, contexts, warnings). Twice (-vv), all of "
            "llama.cpp's own log.",
        ),
    ),
)
def output(**given: Any) -> Output:
    """Return how a command shows answers, and what it prints besides. Raise `UsageError`."""
    made = Output(**given)
    if made.quiet and made.verbose:
        raise UsageError("--quiet and --verbose exclude each other", hint="use one of them")
    return made


#: The grammar of an answer alone.
constraint = answer.without("max_tokens", "stop", "ignore_eos", "logprobs")
#: The output of commands that show no answers: --quiet and --verbose.
loudness = output.without("show", "stats", "json", "newline")
