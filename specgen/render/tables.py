"""The results of `specgen bench`, `draft find` and `tune`: tables and paragraphs on a terminal, tab-separated
lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from specgen.render.text import clean_line, counted
from specgen.session.files import name_of

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.measure.bench.figures import BenchReport, Figures
    from specgen.measure.search import Search, Tried
    from specgen.measure.trial import DraftFigures


#: The first cell of a row, the others, and the style.
_Row: TypeAlias = tuple[str, Sequence[str], str]

# --- specgen bench

_HEADINGS = (
    "speed-up",
    "quartiles",
    "worst",
    "tokens/s",
    "accepted",
    "per-pass",
    "first",
    "other",
    "whole",
)
#: The columns in a pipe.
_BENCH_COLUMNS = (
    *("target", "temperature", "contender", "category", "answers"),
    *("speedup", "first_quartile", "third_quartile", "worst_speedup", "tokens_per_s"),
    *("acceptance_rate", "tokens_per_pass", "first_token", "different", "whole_speedup"),
)


def bench_lines(report: BenchReport) -> Iterator[str]:
    """Yield the columns' names, then a line for each contender, followed by one for each of its categories if
    there are several. Tabs separate the columns, which are empty where there is no figure. Without figures
    there are no lines."""
    if report.figures:
        yield "\t".join(_BENCH_COLUMNS)
    for whole in report.figures:
        for each in (whole, *(whole.categories if len(whole.categories) > 1 else ())):
            names = (each.target, f"{each.temperature:g}", each.contender, each.category)
            yield "\t".join([*names, str(each.n_answers), *_cells(each, "")])


def _cells(each: Figures, missing: str) -> list[str]:
    spread, worst, speed = each.speedups, each.worst, each.tokens_per_s
    return [
        _number(each.speedup, missing),
        _number(spread.quartile if spread else None, missing),
        _number(spread.third_quartile if spread else None, missing),
        _number(worst.speedup if worst else None, missing),
        _number(speed.median if speed else None, missing),
        _number(each.acceptance_rate, missing),
        _number(each.mean_accepted_length, missing),
        _number(each.first_token, missing),
        missing if each.n_different is None else str(each.n_different),
        _number(each.whole, missing),
    ]


def print_bench_tables(report: BenchReport, console: Console) -> None:
    """Print the figures of each lineup, those by category, and an explanation."""
    for target, temperature in dict.fromkeys((e.target, e.temperature) for e in report.figures):
        every = [e for e in report.figures if (e.target, e.temperature) == (target, temperature)]
        console.print(Text(f"{target}, temperature {temperature:g}", style="bold"))
        best, rows = max(each.speedup or 0.0 for each in every), list[_Row]()
        for each in every:
            speedup, first, third, *others = _cells(each, "-")
            cells = [speedup + "!" * each.is_impossible, f"{first}-{third}", *others]
            rows.append((each.contender, cells, "bold" if each.speedup == best else ""))
        _print_table(console, "contender", _HEADINGS, rows)
        by_category = [{own.category: own.speedup for own in each.categories} for each in every]
        if len(categories := dict.fromkeys(name for own in by_category for name in own)) > 1:
            names = [each.contender for each in every]
            rows = [
                (clean_line(name), [_number(own.get(name), "-") for own in by_category], "")
                for name in categories
            ]
            _print_table(console, "category", names, rows)
        console.print()
    console.print(Text(_explanation(report), style="dim"))


def _print_table(
    console: Console, first: str, headings: Sequence[str], rows: Sequence[_Row]
) -> None:
    """Print a table. If the console is too narrow for it, the first cell of a row has a line of its own."""
    columns = zip(headings, *(cells for _, cells, _ in rows), strict=True)
    widths = [max(map(len, column)) for column in columns]
    first_width = max(map(len, (first, *(name for name, _, _ in rows))))
    is_narrow = first_width + sum(widths) + 2 * len(widths) > console.width
    for name, cells, style in ((first, headings, "dim"), *rows):
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        whole = f"{name}\n  {line}" if is_narrow else f"{name:<{first_width}}  {line}"
        console.print(Text(whole, style), soft_wrap=True)


def _explanation(report: BenchReport) -> str:
    n_prompts = len({result.prompt for result in report.runs.results})
    return (
        f"From {counted(n_prompts, 'prompt')}, each answered by all in turn: the speed-up over "
        "plain decoding of the same prompt (geometric means), its quartiles over the answers, and "
        "that of the worst prompt; tokens a second after the first (median); the share of drafted "
        "tokens that the target accepts; tokens per pass of the target; the time to the first token relative to "
        "plain decoding; answers whose text differs from plain decoding's; the speed-up of the whole answer, "
        "including reading the prompt."
        + " (! is more than the tokens per pass allow: the machine's speed changed.)"
        * any(each.is_impossible for each in report.figures)
    )


def _number(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.2f}"


# --- specgen draft find

#: The columns in a pipe.
_DRAFT_COLUMNS = (
    *("draft", "speedup", "worst_speedup", "tokens_per_s", "acceptance_rate", "tokens_per_pass"),
    *("draft_token_ms", "start_ms"),
)


def draft_lines(tried: Sequence[Tried]) -> list[str]:
    """Return the columns' names and a line for each draft, the columns separated by tabs; empty where there is
    no figure."""
    rows = [[str(one.draft), *_columns(one.figures, missing="")] for one in tried]
    return ["\t".join(row) for row in (_DRAFT_COLUMNS, *rows)]


def print_draft_table(search: Search, sentences: Sequence[str], console: Console) -> None:
    """Print the drafts as a table, an explanation of the figures, and sentences about them."""
    headings = ("speed-up", "worst", "tokens/s", "accepted", "per-pass", "ms", "start")
    rows = [
        (name_of(one.draft), _columns(one.figures, missing="-"), "bold" if number == 0 else "")
        for number, one in enumerate(search.tried)
    ]
    _print_table(console, "draft", headings, rows)
    explanation = (
        f"For {search.target.name} at temperature 0, on {counted(len(search.baseline.answers), 'answer')}: the "
        "speed-up over plain decoding, and that of the worst prompt; tokens a second; the share of drafted tokens "
        "that the target accepts; tokens per pass of the target; milliseconds to draft a token, and to begin, since "
        "a draft model reads the prompt too (that is not in the speed-up)."
    )
    console.print(Text(explanation, style="dim"))
    for sentence in sentences:
        console.print(Text(sentence))


def _columns(figures: DraftFigures, missing: str) -> list[str]:
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
