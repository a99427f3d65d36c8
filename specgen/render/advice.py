"""Prints the results of `specgen tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from specgen.render.text import counted
from specgen.selection.advice import advice, n_answer_tokens

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.selection.tuning import Tuning

#: The width of output to a file, wide enough to read; items are below their heading.
_WIDTH = 100
_INDENT = "  "


def print_advice(tuning: Tuning, console: Console) -> None:
    """Print the sections, for people."""
    width = console.width if console.is_terminal else _WIDTH
    n_prompts = counted(len(tuning.baseline.answers), "prompt")
    n_tokens = counted(n_answer_tokens(tuning.baseline), "token")
    about = f"{tuning.target.name}: {n_prompts}, {n_tokens} of answers, temperature 0"
    console.print(Text(about), soft_wrap=True)
    for section in advice(tuning):
        console.print()
        console.print(Text(section.heading, "bold"), soft_wrap=True)
        for sentence in section.sentences:
            for line in Text(sentence).wrap(console, max(1, width - 2 * len(_INDENT))):
                line.rstrip()
                console.print(Text(_INDENT) + line, soft_wrap=True)
