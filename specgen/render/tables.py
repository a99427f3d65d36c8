"""The results of `specgen bench` and `draft find`: tables on a terminal, tab-separated lines in a
pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.table import Table
from rich.text import Text

from specgen.render.rows import clean_line
from specgen.session.choose_models import name_of
from specgen.system.machine import busy_text, is_busy
from specgen.system.quantities import counted

#: A figure's name in a pipe, its heading on a terminal (none there if empty), and the figure.
_Column: TypeAlias = tuple[str, str, Callable[[Any], float | None]]
#: For names there is at least so much room, if they are as long, and for a figure.
_NAME_COLUMNS, _FIGURE_COLUMNS = 24, 7

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.events import FinishedEvent
    from specgen.measure.benchmark import Figures
    from specgen.measure.search import Search, Tried
    from specgen.serve.batch.runner import BatchStats

#: The figures of a contender.
_BENCH: Sequence[_Column] = (
    ("answers", "", lambda of: of.n_answers),
    ("speedup", "speed-up", lambda of: of.speedup),
    ("first_quartile", "25%", lambda of: of.quartiles[0] if of.quartiles else None),
    ("third_quartile", "75%", lambda of: of.quartiles[1] if of.quartiles else None),
    ("worst_speedup", "worst", lambda of: of.worst_speedup),
    ("tokens_per_s", "tokens/s", lambda of: of.tokens_per_s),
    ("acceptance_rate", "accepted", lambda of: of.acceptance_rate),
    ("tokens_per_pass", "per-pass", lambda of: of.mean_accepted_length),
    ("first_token", "first", lambda of: of.first_token),
)
#: The figures of a draft.
_DRAFT: Sequence[_Column] = (
    *(each for each in _BENCH[1:-1] if "quartile" not in each[0]),
    ("draft_token_ms", "ms", lambda of: of.draft_token_s and 1000 * of.draft_token_s),
    ("start_ms", "start", lambda of: 1000 * of.start_s),
)


def _cell(value: float | None, missing: str = "") -> str:
    if value is None:
        return missing
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _lines(headings: str, columns: Sequence[_Column], rows: Mapping[str, Any]) -> Iterator[str]:
    """Yield the columns' names, and the figures of each row behind its beginning, with tabs
    between.
    """
    yield "\t".join((headings, *(name for name, _, _ in columns)))
    for beginning, of in rows.items():
        yield "\t".join((beginning, *(_cell(figure(of)) for _, _, figure in columns)))


def bench_lines(figures: Sequence[Figures]) -> Iterator[str]:
    rows = {
        f"{each.temperature:g}\t{each.contender}\t{each.category}": each
        for whole in figures
        for each in (whole, *(whole.categories if len(whole.categories) > 1 else ()))
    }
    return _lines("temperature\tcontender\tcategory", _BENCH, rows) if rows else iter(())


def draft_lines(tried: Sequence[Tried]) -> Iterator[str]:
    return _lines("draft", _DRAFT, {str(one.draft): one.figures for one in tried})


def print_bench_tables(figures: Sequence[Figures], console: Console) -> None:
    for temperature in dict.fromkeys(each.temperature for each in figures):
        every = [each for each in figures if each.temperature == temperature]
        console.print(Text(f"temperature {temperature:g}", style="bold"))
        rows = [(each.contender, each) for each in every]
        console.print(_figures("contender", _BENCH, rows, console))
        speedups = [{own.category: own.speedup for own in each.categories} for each in every]
        if len(categories := dict.fromkeys(name for own in speedups for name in own)) > 1:
            table = _table("category", *(each.contender for each in every))
            for name in categories:
                cells = [_cell(own.get(name), "-") for own in speedups]
                table.add_row(Text(clean_line(name)), *cells)
            console.print(table)
        console.print()
    explanation = (
        "Each prompt was answered by all in turn: the speed-up over plain decoding (geometric mean), its quartiles "
        "and its least; tokens a second after the first (median); the share of drafted tokens that the target "
        "accepts; tokens per pass of the target; the time to the first token relative to plain decoding."
    )
    console.print(Text(explanation))


def print_draft_table(search: Search, sentences: Sequence[str], console: Console) -> None:
    rows = [(name_of(one.draft), one.figures) for one in search.tried]
    console.print(_figures("draft", _DRAFT, rows, console))
    print_argument(search, console)
    explanation = (
        f"For {search.target.name} at temperature 0, on {counted(len(search.baseline.answers), 'answer')}: the "
        "speed-up over plain decoding, and its least; tokens a second; the share of drafted tokens that the target "
        "accepts; tokens per pass of the target; milliseconds to draft a token, and to begin, since a draft model "
        "reads the prompt too (that is not in the speed-up)."
    )
    for sentence in (explanation, *sentences):
        console.print(Text(sentence))


def print_argument(search: Search, console: Console) -> None:
    """Print why drafts pay here, or not: what one and several rows cost, and what is accepted by
    kind of task.
    """
    baseline, best = search.baseline, next((o for o in search.tried if o.draft != "none"), None)
    sizes = [n for n in (1, 2, 4, 8) if n <= max(baseline.batch_s)]
    rows = [
        (f"{counted(n, 'token')} of {search.target.name}", baseline.costs.rows_s(n)) for n in sizes
    ]
    if best is not None and best.figures.draft_token_s is not None:
        rows.append((f"1 token of {name_of(best.draft)}", best.figures.draft_token_s))
    table = _table("in one decode", "ms", "in tokens")
    for text, seconds in rows:
        table.add_row(Text(text), f"{1000 * seconds:.1f}", _cell(seconds / baseline.token_s))
    console.print()
    console.print(table)
    console.print()
    if best is not None and best.figures.kinds:
        table = _table(f"with {name_of(best.draft)}", "speed-up", "accepted")
        for kind, of in best.figures.kinds.items():
            table.add_row(Text(kind), _cell(of.speedup), _cell(of.acceptance_rate, "-"))
        console.print(table)
        console.print()


def _figures(
    first: str, columns: Sequence[_Column], rows: Sequence[tuple[str, Any]], console: Console
) -> Table:
    """Return a table of the first columns, the most telling ones, for which there is room beside
    the names. The best speed-up is bold.
    """
    columns = [each for each in columns if each[1]]
    room = console.width - min(_NAME_COLUMNS, max((len(name) for name, _ in rows), default=0))
    while sum(max(_FIGURE_COLUMNS, len(heading) + 2) for _, heading, _ in columns) > room > 0:
        columns = columns[:-1]
    table = _table(first, *(heading for _, heading, _ in columns))
    best = max((of.speedup or 0.0 for _, of in rows), default=0.0)
    for name, of in rows:
        cells = [_cell(figure(of), "-") for _, _, figure in columns]
        table.add_row(Text(name), *cells, style="bold" if of.speedup == best else "")
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


def totals(n_answers: int, answers: Sequence[FinishedEvent | BatchStats]) -> list[str]:
    def whole(name: str) -> int:
        return sum(getattr(each, name) for each in answers)

    found = [f"{counted(n_answers, 'answer')} of {counted(whole('n_tokens'), 'token')}"]
    if n_drafted := whole("n_drafted"):
        found.append(f"{whole('n_accepted') / n_drafted:.0%} of the draft accepted")
    if n_cached := whole("n_cached_tokens"):
        found.append(f"{n_cached / whole('n_prompt_tokens'):.0%} of the prompts from the cache")
    return found


def batch_summary(stats: BatchStats, seconds: float, where: str) -> str:
    """Return a sentence about a finished batch. `where` says how many answers were generated at
    once, or by whom.
    """
    answers, *others = totals(stats.n_answers, [stats])
    speed = f"{duration(seconds)}: {stats.n_tokens / seconds:.1f} tokens/s"
    return ", ".join((answers, speed, where, *others))


def notes_on_figures(others_share: float | None) -> list[str]:
    if others_share is None or not is_busy(others_share):
        return []
    return [f"{busy_text(others_share)}: run it again when the machine is idle"]


def duration(seconds: float) -> str:
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"
