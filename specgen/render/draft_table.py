"""The results of `specgen draft find`: a table on a terminal, tab-separated lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from specgen.render.text import counted
from specgen.selection.default_draft import name_of

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.selection.draft_search import Search, Tried
    from specgen.selection.trial import DraftFigures


def draft_lines(tried: Sequence[Tried]) -> list[str]:
    """A line for each draft, its columns separated by tabs; empty where there is no figure."""
    return ["\t".join([str(one.draft), *_columns(one.figures, missing="")]) for one in tried]


def print_draft_table(search: Search, console: Console) -> None:
    """Print the drafts as a table, and an explanation of the figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("draft", overflow="fold")
    for heading in ("speed-up", "worst", "tokens/s", "accepted", "length", "ms", "start"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, one in enumerate(search.tried):
        style = "bold" if number == 0 else ""
        columns = _columns(one.figures, missing="-")
        table.add_row(*(Text(column) for column in (name_of(one.draft), *columns)), style=style)
    console.print(table)
    explanation = (
        f"Expected for {search.target.name} at temperature 0, from "
        f"{counted(len(search.baseline.answers), 'prompt')}: the speed-up over plain decoding, "
        "and that of the worst prompt; tokens a second; the share of drafted tokens that the "
        "target accepts; tokens a round; milliseconds to draft a token, and to begin, since a "
        "draft model reads the prompt too (that is not in the speed-up)."
    )
    console.print(Text(explanation, style="dim"))


def _columns(figures: DraftFigures, missing: str) -> list[str]:
    """The figures as text, in the order of the table; times are milliseconds."""
    share, token_s = figures.acceptance_rate, figures.draft_token_s
    return [
        f"{figures.speedup:.2f}",
        f"{figures.worst_speedup:.2f}",
        f"{figures.tokens_per_s:.2f}",
        missing if share is None else f"{share:.2f}",
        f"{figures.mean_accepted_length:.2f}",
        missing if token_s is None else f"{1000 * token_s:.2f}",
        f"{1000 * figures.start_s:.1f}",
    ]
