"""The options of commands, each with its spellings and its help.

The readable spelling comes first, llama.cpp's second. Defaults are not here, but in `specgen.options`.
Options that several commands share come in groups (`groups.takes_options`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specgen.cli.flags.answer import answer, constraint
from specgen.cli.flags.drafting import drafting, tree_shape
from specgen.cli.flags.groups import takes_options
from specgen.cli.flags.machine import machine
from specgen.cli.flags.models import models
from specgen.cli.flags.sampling import sampling
from specgen.cli.flags.server import server
from specgen.cli.flags.text import utf8
from specgen.errors import UsageError
from specgen.options import Show

_PROMPT = "Prompt"
_TRIALS = "Trials"
_OUTPUT = "Output"

# --- prompt

PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT", help="The prompt; - reads it from standard input.", show_default=False
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="The prompt, as an option as in llama.cpp.",
        rich_help_panel=_PROMPT,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        help="Read the prompt from a file; a newline at its end is dropped.",
        rich_help_panel=_PROMPT,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Put the prompt into the model's chat template, or continue it as it is.",
        show_default="chat, if the model has a template",
        rich_help_panel=_PROMPT,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        "-sys",
        metavar="TEXT",
        parser=utf8,
        help="A system message for the chat template.",
        rich_help_panel=_PROMPT,
    ),
]

# --- trials

TrialPrompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help='Prompts to try with: JSON Lines with "prompt" or "turns".',
        show_default="a few of our own",
        rich_help_panel=_TRIALS,
    ),
]
TrialCount = Annotated[
    int,
    typer.Option(
        "--count",
        "-N",
        min=1,
        help="How many prompts to use, spread evenly over the file.",
        rich_help_panel=_TRIALS,
    ),
]
TrialTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens",
        "--predict",
        "-n",
        min=2,
        help="How many tokens of each answer to use.",
        rich_help_panel=_TRIALS,
    ),
]

# --- learning

Learn = Annotated[
    bool,
    typer.Option(
        "--learn/--no-learn",
        envvar="SPECGEN_LEARN",
        help="Keep prompts and answers on this disk, in the data folder, readable by you alone. The "
        "draft model learns from them (`specgen draft learn`), and repetitions of them draft. "
        "`specgen draft forget` deletes them. Without it nothing is kept.",
        rich_help_panel="Learning",
    ),
]

# --- output

ShowOption = Annotated[
    Show,
    typer.Option(
        "--show",
        help="On a terminal: accepted (coloured tokens; rejected ones vanish after their round), all "
        "(coloured tokens; rejected ones stay), or none (plain text).",
        rich_help_panel=_OUTPUT,
    ),
]
Stats = Annotated[
    bool | None,
    typer.Option(
        "--stats/--no-stats",
        help="Print a summary on standard error after the answer.",
        show_default="stats, but not with --json or --quiet",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print events instead of the answer, as one JSON object on each line.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print only errors on standard error.",
        rich_help_panel=_OUTPUT,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print llama.cpp's own log and more detail on standard error.",
        rich_help_panel=_OUTPUT,
    ),
]

__all__ = [
    "Chat",
    "Json",
    "Learn",
    "PromptArgument",
    "PromptFile",
    "PromptOption",
    "Quiet",
    "ShowOption",
    "Stats",
    "System",
    "TrialCount",
    "TrialPrompts",
    "TrialTokens",
    "Verbose",
    "answer",
    "constraint",
    "drafting",
    "machine",
    "models",
    "sampling",
    "server",
    "takes_options",
    "tree_shape",
]


def check_loudness(*, quiet: bool, verbose: bool) -> None:
    """Raise `UsageError` if both were given."""
    if quiet and verbose:
        raise UsageError("--quiet and --verbose exclude each other", hint="use one of them")
