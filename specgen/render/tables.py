"""The results of commands that measure drafts, for people and for pipes.

They are tables on a terminal, and tab-separated lines in a pipe.
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
from specgen.system.quantities import counted, duration, seconds_text

#: The time of a batch that took less than this is shown with fractions of a second.
_SHORT_S = 10.0
#: Names up to this width are never wrapped to make room for figures.
_NAME_COLUMNS = 24
#: The minimum width of a figure, with the space after it.
_MIN_FIGURE_COLUMNS = 7

if TYPE_CHECKING:
    from rich.console import Console

    from specgen.events import FinishedEvent
    from specgen.measure.benchmark import Figures
    from specgen.measure.draft_search import Search, Tried
    from specgen.measure.draft_trial import DraftFigures
    from specgen.measure.race import Race
    from specgen.serve.batch.runner import BatchStats


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of figures."""

    #: Its name in tab-separated lines.
    name: str
    #: Its heading in tables; empty if it is left out there.
    heading: str
    #: Takes the figure from a contender's or a draft's figures; None if it is not known.
    figure: Callable[[Any], float | None]


def _draft_token_ms(row: DraftFigures) -> float | None:
    return None if row.draft_token_s is None else 1000 * row.draft_token_s


_SPEEDUP = _Column("speedup", "speed-up", lambda row: row.speedup)
#: Columns for contenders and for drafts.
_COMMON_COLUMNS: Sequence[_Column] = (
    _Column("worst_speedup", "worst", lambda row: row.worst_speedup),
    _Column("tokens_per_s", "tokens/s", lambda row: row.tokens_per_s),
    _Column("acceptance_rate", "accepted", lambda row: row.acceptance_rate),
    _Column("tokens_per_pass", "per-pass", lambda row: row.mean_accepted_length),
)
#: The columns for contenders; narrow terminals only show the first ones.
_BENCH_COLUMNS: Sequence[_Column] = (
    _Column("answers", "", lambda row: row.n_answers),
    _SPEEDUP,
    _Column("first_quartile", "25%", lambda row: row.quartiles[0] if row.quartiles else None),
    _Column("third_quartile", "75%", lambda row: row.quartiles[1] if row.quartiles else None),
    *_COMMON_COLUMNS,
    _Column("first_token", "first", lambda row: row.first_token),
)
#: The columns for drafts.
_DRAFT_COLUMNS: Sequence[_Column] = (
    _SPEEDUP,
    *_COMMON_COLUMNS,
    _Column("draft_token_ms", "ms", _draft_token_ms),
    _Column("start_ms", "start", lambda row: 1000 * row.start_s),
)
#: The columns for the answers of a race.
_RACE_COLUMNS: Sequence[_Column] = (
    _Column("tokens", "", lambda row: row.n_tokens),
    _Column("seconds", "", lambda row: row.seconds),
    _Column("first_token_s", "", lambda row: row.time_to_first_token_s),
    _Column("tokens_per_s", "", lambda row: row.tokens_per_s),
    _Column("acceptance_rate", "", lambda row: row.acceptance_rate),
    _SPEEDUP,
)
_BENCH_EXPLANATION = (
    "All contenders answered each prompt in turn. Columns: the geometric mean of the speed-ups "
    "over plain decoding, their quartiles and the worst; the median of tokens per second after "
    "the first token; the share of drafted tokens that the target accepted; tokens per pass of "
    "the target; the time to the first token relative to plain decoding."
)


# --- tab-separated lines


def bench_lines(figures: Sequence[Figures]) -> Iterator[str]:
    """Return the lines for `specgen bench`; none if there are no figures.

    After the heading comes a line for each contender, followed by one for each of its categories if
    there are several.
    """
    shown: list[Figures] = []
    for overall in figures:
        shown.append(overall)
        if len(overall.categories) > 1:
            shown += overall.categories
    rows = [(f"{row.temperature:g}\t{row.contender}\t{row.category}", row) for row in shown]
    if not rows:
        return iter(())
    return _lines("temperature\tcontender\tcategory", _BENCH_COLUMNS, rows)


def draft_lines(tried: Sequence[Tried]) -> Iterator[str]:
    """Return the lines for `specgen draft find`: a heading, and a line for each draft."""
    return _lines("draft", _DRAFT_COLUMNS, [(str(one.draft), one.figures) for one in tried])


def race_lines(race: Race) -> Iterator[str]:
    """Return the lines for `specgen race`: a heading, and a line for each answer."""
    return _lines("draft", _RACE_COLUMNS, [(row.draft, row) for row in race.figures])


def _lines(
    first_names: str,
    columns: Sequence[_Column],
    rows: Sequence[tuple[str, Any]],
) -> Iterator[str]:
    """Yield a heading and a line for each row.

    Args:
        first_names: The names of the columns before the figures, separated by tabs.
        columns: The columns with figures.
        rows: For each row the text of the columns before the figures, and the object from which
            `columns` take the figures.
    """
    yield "\t".join((first_names, *(column.name for column in columns)))
    for first_cells, figures in rows:
        cells = [_cell(column.figure(figures)) for column in columns]
        yield "\t".join((first_cells, *cells))


def _cell(value: float | None, missing: str = "") -> str:
    """Return a figure as text: an integer as it is, another number with two decimals."""
    if value is None:
        return missing
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}"


# --- tables


def print_bench_tables(figures: Sequence[Figures], console: Console) -> None:
    """Print a table of contenders, and one of their speed-ups by category, per temperature.

    Nothing is printed if there are no figures.
    """
    for temperature in dict.fromkeys(each.temperature for each in figures):
        contenders = [each for each in figures if each.temperature == temperature]
        rows = [(each.contender, each) for each in contenders]
        console.print(Text(f"temperature {temperature:g}", style="bold"))
        console.print(_figure_table("contender", _BENCH_COLUMNS, rows, console))
        _print_categories(contenders, console)
        console.print()
    if figures:
        console.print(Text(_BENCH_EXPLANATION))


def _print_categories(contenders: Sequence[Figures], console: Console) -> None:
    """Print the contenders' speed-ups by category, if there are several categories."""
    speedups_of_contenders = [
        {each.category: each.speedup for each in contender.categories} for contender in contenders
    ]
    # A dict keeps the categories in order.
    categories = dict.fromkeys(
        category for speedups in speedups_of_contenders for category in speedups
    )
    if len(categories) < 2:
        return
    table = _table("category", *(each.contender for each in contenders))
    for category in categories:
        cells = [_cell(speedups.get(category), "-") for speedups in speedups_of_contenders]
        table.add_row(Text(clean_line(category)), *cells)
    console.print(table)


def print_draft_table(
    search: Search,
    sentences: Sequence[str],
    console: Console,
) -> None:
    """Print the result of a search.

    Args:
        search: The result.
        sentences: More sentences, which are printed at the end.
        console: The console to print on.
    """
    rows = [(name_of(one.draft), one.figures) for one in search.tried]
    console.print(_figure_table("draft", _DRAFT_COLUMNS, rows, console))
    _print_costs_and_acceptance(search, console)
    n_answers = counted(len(search.baseline.answers), "answer")
    explanation = (
        f"For {name_of(search.target)} at temperature 0, on {n_answers}. Columns: the speed-up "
        "over plain decoding, and the worst; tokens per second; the share of drafted tokens that "
        "the target accepted; tokens per pass of the target; milliseconds to draft a token, and to "
        "start, since a draft model needs a prefill too (not counted in the speed-up)."
    )
    for sentence in (explanation, *sentences):
        console.print(Text(sentence))


def _print_costs_and_acceptance(search: Search, console: Console) -> None:
    """Print why drafting pays here or not.

    The first table has the costs of decoding, and the second the acceptance rate of the best draft
    by kind of task.
    """
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
    """Return a table of costs: of decoding several tokens with the target, and one with the draft.

    Args:
        search: The result of a search.
        best: The best draft, if any draft was tried.
    """
    baseline = search.baseline
    table = _table("in one decode", "ms", "in tokens")

    def add(label: str, seconds: float) -> None:
        table.add_row(Text(label), f"{1000 * seconds:.1f}", _cell(seconds / baseline.token_s))

    for n_tokens in (1, 2, 4, 8):
        if n_tokens <= max(baseline.batch_s):
            label = f"{counted(n_tokens, 'token')} of {name_of(search.target)}"
            add(label, baseline.costs.seconds(n_tokens))
    if best is not None and best.figures.draft_token_s is not None:
        add(f"1 token of {name_of(best.draft)}", best.figures.draft_token_s)
    return table


def _figure_table(
    first_heading: str,
    columns: Sequence[_Column],
    rows: Sequence[tuple[str, Any]],
    console: Console,
) -> Table:
    """Return a table with as many columns as fit, the row of the best speed-up in bold.

    Args:
        first_heading: The heading of the names.
        columns: The columns with figures; the last ones are left out if they do not fit.
        rows: For each row its name, and the object from which `columns` take the figures.
        console: The console on which the table is printed.
    """
    max_name_length = max((len(name) for name, _ in rows), default=0)
    shown = _fitting_columns(columns, console.width - min(_NAME_COLUMNS, max_name_length))
    table = _table(first_heading, *(column.heading for column in shown))
    best_speedup = max((figures.speedup or 0.0 for _, figures in rows), default=0.0)
    for name, figures in rows:
        cells = [_cell(column.figure(figures), "-") for column in shown]
        style = "bold" if figures.speedup == best_speedup else ""
        table.add_row(Text(name), *cells, style=style)
    return table


def _fitting_columns(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Return the first columns that fit in the width; all if there is no room for any figure."""
    shown = [column for column in columns if column.heading]
    if width <= 0:
        return shown
    # Two spaces follow a heading.
    widths = [max(_MIN_FIGURE_COLUMNS, len(column.heading) + 2) for column in shown]
    while sum(widths[: len(shown)]) > width:
        shown.pop()
    return shown


def _table(first_heading: str, *headings: str) -> Table:
    """Return an empty table: names on the left, which may be wrapped, and figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first_heading, overflow="fold")
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table


# --- sentences


def totals(n_answers: int, answers: Sequence[FinishedEvent | BatchStats]) -> list[str]:
    """Return the totals of several answers, in words.

    Args:
        n_answers: The number of answers.
        answers: The figures of each answer, or of all of them together.
    """

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in answers)

    first_text = f"{counted(n_answers, 'answer')}, {counted(total('n_tokens'), 'token')}"
    if n_answers > 1:
        first_text += " in all"
    texts = [first_text]
    n_positions = total("n_positions")
    if n_positions:
        texts.append(f"{total('n_accepted') / n_positions:.0%} of the draft accepted")
    n_cached = total("n_cached_tokens")
    if n_cached:
        texts.append(f"{n_cached / total('n_prompt_tokens'):.0%} of the prompts from the cache")
    return texts


def batch_summary(
    stats: BatchStats,
    seconds: float,
    where: str,
) -> str:
    """Return a sentence about a finished batch.

    Args:
        stats: The totals of the batch.
        seconds: The time that it took.
        where: How the answers were generated, such as the number at once or of workers.
    """
    answers, *others = totals(stats.n_answers, [stats])
    time = seconds_text(seconds) if seconds < _SHORT_S else duration(seconds)
    speed = f"{time}: {stats.n_tokens / seconds:.1f} tokens/s"
    return ", ".join((answers, speed, where, *others))


def notes_on_figures(others_share: float | None) -> list[str]:
    """Return the notes to print with measurements: one if the machine was too busy for them.

    Args:
        others_share: The share of the cores that other programs used; None if unknown.
    """
    if others_share is None or not is_busy(others_share):
        return []
    return [f"{busy_text(others_share)}: run it again when the machine is idle"]
