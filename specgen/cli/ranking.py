"""What was found out about drafts, in order: for people, for pipes, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.selection.candidates import Refused
from specgen.selection.default_draft import name_of

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.options import DraftSource
    from specgen.selection.trial import Baseline, Figures

#: Where two gain the same as far as it is shown: what needs no second model comes first, and
#: a model only that gains something.
_TIES = ("ngram", "none")


@dataclass(frozen=True, slots=True)
class Tried:
    """A draft, and what it would gain."""

    draft: DraftSource
    figures: Figures


@dataclass(frozen=True, slots=True)
class Search:
    """What `specgen draft find` found: the drafts from the best down, and files that cannot
    draft. `saved` is what was kept for the target, if anything was."""

    target: Path
    baseline: Baseline
    tried: tuple[Tried, ...]
    refused: tuple[Refused, ...]
    saved: DraftSource | None = None
    is_interrupted: bool = False


def ranked(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Drafts by what they gain, the best first."""

    def order(one: Tried) -> tuple[float, int]:
        tie = len(_TIES) if isinstance(one.draft, Path) else _TIES.index(one.draft)
        return (-round(one.figures.speedup, 2), tie)

    return tuple(sorted(tried, key=order))


def lines(tried: Sequence[Tried]) -> list[str]:
    """A line for each draft, its columns separated by tabs; empty where there is no figure."""
    return ["\t".join([str(one.draft), *_columns(one.figures, missing="")]) for one in tried]


def to_json_object(search: Search) -> dict[str, object]:
    """Everything, with times in seconds."""
    baseline = search.baseline
    return {
        "target": str(search.target),
        "plain_tokens_per_s": 1.0 / baseline.token_s,
        "batch_s": {str(size): seconds for size, seconds in sorted(baseline.batch_s.items())},
        "n_prompts": len(baseline.answers),
        "n_tokens": sum(len(answer.tokens) for answer in baseline.answers),
        "skipped_prompts": list(baseline.skipped),
        "drafts": [
            {"draft": str(one.draft), **dataclasses.asdict(one.figures)} for one in search.tried
        ],
        "refused": [
            {"file": str(refused.file), "reason": refused.reason} for refused in search.refused
        ],
        "saved": None if search.saved is None else str(search.saved),
        "is_interrupted": search.is_interrupted,
    }


def print_table(search: Search, console: Console) -> None:
    """Print the drafts as a table, and what the figures mean."""
    from rich.table import Table
    from rich.text import Text

    from specgen.render.text import counted

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


def _columns(figures: Figures, missing: str) -> list[str]:
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
