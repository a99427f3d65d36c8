"""The results of `specgen bench` and `specgen draft find`.

Tables on a terminal, and tab-separated lines in a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from specgen.render.rows import clean_line
from specgen.session.choose_models import name_of
from specgen.system.machine import busy_text, is_busy
from specgen.system.quantities import counted

#: The width up to which names are never cut to make room for figures, and the least of a figure.
_NAME_COLUMNS = 24
_FIGURE_COLUMNS = 7

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.events import FinishedEvent
    from specgen.measure.benchmark import Figures
    from specgen.measure.search import Search, Tried
    from specgen.serve.batch.runner import BatchStats


@dataclass(frozen=True, slots=True)
class _Column:
    """A figure that tables show."""

    #: Its name in tab-separated output.
    name: str
    #: Its heading on a terminal; empty if it is not shown there.
    heading: str
    #: Returns the figure of a row; None if it is not known.
    figure: Callable[[Any], float | None]


_SPEEDUP = _Column("speedup", "speed-up", lambda row: row.speedup)
#: The columns that the tables of contenders and of drafts have in common.
_COMMON: Sequence[_Column] = (
    _Column("worst_speedup", "worst", lambda row: row.worst_speedup),
    _Column("tokens_per_s", "tokens/s", lambda row: row.tokens_per_s),
    _Column("acceptance_rate", "accepted", lambda row: row.acceptance_rate),
    _Column("tokens_per_pass", "per-pass", lambda row: row.mean_accepted_length),
)
#: The figures of a contender, the most telling ones first.
_BENCH: Sequence[_Column] = (
    _Column("answers", "", lambda row: row.n_answers),
    _SPEEDUP,
    _Column("first_quartile", "25%", lambda row: row.quartiles[0] if row.quartiles else None),
    _Column("third_quartile", "75%", lambda row: row.quartiles[1] if row.quartiles else None),
    *_COMMON,
    _Column("first_token", "first", lambda row: row.first_token),
)
#: The figures of a draft.
_DRAFT: Sequence[_Column] = (
    _SPEEDUP,
    *_COMMON,
    _Column("draft_token_ms", "ms", lambda row: row.draft_token_s and 1000 * row.draft_token_s),
    _Column("start_ms", "start", lambda row: 1000 * row.start_s),
)
_BENCH_EXPLANATION = (
    "All contenders answered each prompt in turn. Columns: the geometric mean of the speed-ups "
    "over plain decoding, their quartiles and the worst; the median of tokens per second after "
    "the first token; the share of drafted tokens that the target accepted; tokens per pass of "
    "the target; the time to the first token relative to plain decoding."
)


# --- tab-separated lines


def bench_lines(figures: Sequence[Figures]) -> Iterator[str]:
    """Yield a line for each contender, and for each of its categories if there are several."""
    shown: list[Figures] = []
    for overall in figures:
        shown.append(overall)
        if len(overall.categories) > 1:
            shown += overall.categories
    rows = [(f"{row.temperature:g}\t{row.contender}\t{row.category}", row) for row in shown]
    if not rows:
        return iter(())
    return _lines("temperature\tcontender\tcategory", _BENCH, rows)


def draft_lines(tried: Sequence[Tried]) -> Iterator[str]:
    """Yield a line for each draft."""
    return _lines("draft", _DRAFT, [(str(one.draft), one.figures) for one in tried])


def _lines(
    key_names: str,
    columns: Sequence[_Column],
    rows: Sequence[tuple[str, Any]],
) -> Iterator[str]:
    yield "\t".join((key_names, *(column.name for column in columns)))
    for key, row in rows:
        cells = [_cell(column.figure(row)) for column in columns]
        yield "\t".join((key, *cells))


def _cell(value: float | None, missing: str = "") -> str:
    if value is None:
        return missing
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}"


# --- tables


def print_bench_tables(figures: Sequence[Figures], console: Console) -> None:
    """Print for each temperature a table of contenders, and their speed-ups by category."""
    for temperature in dict.fromkeys(each.temperature for each in figures):
        contenders = [each for each in figures if each.temperature == temperature]
        rows = [(each.contender, each) for each in contenders]
        console.print(Text(f"temperature {temperature:g}", style="bold"))
        console.print(_figure_table("contender", _BENCH, rows, console))
        _print_categories(contenders, console)
        console.print()
    console.print(Text(_BENCH_EXPLANATION))


def _print_categories(contenders: Sequence[Figures], console: Console) -> None:
    speedups = [{each.category: each.speedup for each in one.categories} for one in contenders]
    categories = dict.fromkeys(category for one in speedups for category in one)
    if len(categories) < 2:
        return
    table = _table("category", *(one.contender for one in contenders))
    for category in categories:
        cells = [_cell(one.get(category), "-") for one in speedups]
        table.add_row(Text(clean_line(category)), *cells)
    console.print(table)


def print_draft_table(search: Search, sentences: Sequence[str], console: Console) -> None:
    """Print the drafts that were tried, why they pay or not, and then `sentences`."""
    rows = [(name_of(one.draft), one.figures) for one in search.tried]
    console.print(_figure_table("draft", _DRAFT, rows, console))
    print_argument(search, console)
    n_answers = counted(len(search.baseline.answers), "answer")
    explanation = (
        f"For {search.target.name} at temperature 0, on {n_answers}. Columns: the speed-up over "
        "plain decoding, and the worst; tokens per second; the share of drafted tokens that the "
        "target accepted; tokens per pass of the target; milliseconds to draft a token, and to "
        "start, since a draft model needs a prefill too (not counted in the speed-up)."
    )
    for sentence in (explanation, *sentences):
        console.print(Text(sentence))


def print_argument(search: Search, console: Console) -> None:
    """Print why drafts pay here or not: what decodes cost, and what is accepted by kind of task."""
    best = next((one for one in search.tried if one.draft != "none"), None)
    console.print()
    console.print(_cost_table(search, best))
    console.print()
    if best is not None and best.figures.kinds:
        table = _table(f"with {name_of(best.draft)}", "speed-up", "accepted")
        for kind, figures in best.figures.kinds.items():
            acceptance = _cell(figures.acceptance_rate, "-")
            table.add_row(Text(kind), _cell(figures.speedup), acceptance)
        console.print(table)
        console.print()


def _cost_table(search: Search, best: Tried | None) -> Table:
    """Return what one and several tokens cost in one decode of the target, and one of the draft."""
    baseline = search.baseline
    table = _table("in one decode", "ms", "in tokens")

    def add(text: str, seconds: float) -> None:
        table.add_row(Text(text), f"{1000 * seconds:.1f}", _cell(seconds / baseline.token_s))

    for n_tokens in (1, 2, 4, 8):
        if n_tokens <= max(baseline.batch_s):
            text = f"{counted(n_tokens, 'token')} of {search.target.name}"
            add(text, baseline.costs.rows_s(n_tokens))
    if best is not None and best.figures.draft_token_s is not None:
        add(f"1 token of {name_of(best.draft)}", best.figures.draft_token_s)
    return table


def _figure_table(
    first_heading: str,
    columns: Sequence[_Column],
    rows: Sequence[tuple[str, Any]],
    console: Console,
) -> Table:
    """Return a table of as many of the first columns as fit; the best speed-up's row is bold."""
    longest_name = max((len(name) for name, _ in rows), default=0)
    shown = _fitting_columns(columns, console.width - min(_NAME_COLUMNS, longest_name))
    table = _table(first_heading, *(column.heading for column in shown))
    best = max((row.speedup or 0.0 for _, row in rows), default=0.0)
    for name, row in rows:
        cells = [_cell(column.figure(row), "-") for column in shown]
        table.add_row(Text(name), *cells, style="bold" if row.speedup == best else "")
    return table


def _fitting_columns(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Return the columns of a terminal's table that fit; all if names leave no room for any."""
    shown = [column for column in columns if column.heading]
    if width <= 0:
        return shown
    widths = [max(_FIGURE_COLUMNS, len(column.heading) + 2) for column in shown]
    while sum(widths[: len(shown)]) > width:
        shown.pop()
    return shown


def _table(first_heading: str, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first_heading, overflow="fold")
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


# --- sentences


def totals(n_answers: int, answers: Sequence[FinishedEvent | BatchStats]) -> list[str]:
    """Return the figures of several answers together, in words."""

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in answers)

    texts = [f"{counted(n_answers, 'answer')} of {counted(total('n_tokens'), 'token')}"]
    n_drafted = total("n_drafted")
    if n_drafted:
        texts.append(f"{total('n_accepted') / n_drafted:.0%} of the draft accepted")
    n_cached = total("n_cached_tokens")
    if n_cached:
        texts.append(f"{n_cached / total('n_prompt_tokens'):.0%} of the prompts from the cache")
    return texts


def batch_summary(stats: BatchStats, seconds: float, where: str) -> str:
    """Return a sentence about a finished batch.

    Args:
        stats: Its figures.
        seconds: How long it took.
        where: How many answers were generated at once, or by whom.
    """
    answers, *others = totals(stats.n_answers, [stats])
    speed = f"{duration(seconds)}: {stats.n_tokens / seconds:.1f} tokens/s"
    return ", ".join((answers, speed, where, *others))


def notes_on_figures(others_share: float | None) -> list[str]:
    """Return a note if the machine was too busy for its figures to be trusted."""
    if others_share is None or not is_busy(others_share):
        return []
    return [f"{busy_text(others_share)}: run it again when the machine is idle"]


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"
