"""The results of a benchmark: tables on a terminal, tab-separated lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from specgen.bench.figures import CategoryFigures, ContenderFigures
    from specgen.bench.report import BenchReport

#: The category of figures over all categories.
OVERALL = "overall"
_HEADINGS = (
    "speed-up",
    "quartiles",
    "worst",
    "tokens/s",
    "accepted",
    "length",
    "first",
    "whole",
    "other",
)


def bench_lines(report: BenchReport) -> Iterator[str]:
    """Yield a line for each contender, followed by one for each of its categories if there are several. Tabs
    separate the columns, which are empty where there is no figure."""
    for each in report.figures:
        own = [f"{each.temperature:g}", each.contender]
        yield "\t".join([each.target, *own, OVERALL, *_overall(report, each)])
        if len(each.categories) > 1:
            for category in each.categories:
                cells = [category.category, *_of_category(category)]
                yield "\t".join([each.target, *own, *cells])


def _overall(report: BenchReport, each: ContenderFigures) -> list[str]:
    spread, worst = each.speedups, each.worst
    return [
        str(each.n_answers),
        _number(each.speedup),
        _number(spread.quartile if spread else None),
        _number(spread.third_quartile if spread else None),
        _number(worst.speedup if worst else None),
        _number(each.tokens_per_s.median if each.tokens_per_s else None),
        _number(each.acceptance_rate),
        _number(each.mean_accepted_length),
        _number(each.first_token),
        "" if each.n_different is None else str(each.n_different),
        _number(report.share_reached(each)),
        _number(each.whole),
    ]


def _of_category(each: CategoryFigures) -> list[str]:
    spread, speed = each.speedups, each.tokens_per_s
    return [
        str(each.n_answers),
        _number(each.speedup),
        _number(spread.quartile if spread else None),
        _number(spread.third_quartile if spread else None),
        _number(spread.low if spread else None),
        _number(speed.median if speed else None),
        *[""] * 6,
    ]


def print_bench_tables(report: BenchReport, console: Console) -> None:
    """Print the figures of each lineup, those by category, and an explanation."""
    from rich.text import Text

    has_foresight = False
    for target, temperature in report.lineups:
        every = report.of((target, temperature))
        console.print(Text(f"{target}, temperature {temperature:g}", style="bold"))
        reached = [report.share_reached(each) for each in every]
        has_foresight = has_foresight or any(share is not None for share in reached)
        console.print(_main_table(every, reached))
        if len(report.categories) > 1:
            console.print(_category_table(report.categories, every))
        console.print()
    console.print(Text(_explanation(report, has_foresight=has_foresight), style="dim"))


def _main_table(every: Sequence[ContenderFigures], reached: Sequence[float | None]) -> Table:
    from rich.text import Text

    shows_reached = any(share is not None for share in reached)
    table = _empty([*_HEADINGS, "of best"] if shows_reached else _HEADINGS)
    best = max((each.speedup or 0.0 for each in every), default=0.0)
    for each, share in zip(every, reached, strict=True):
        spread, worst = each.speedups, each.worst
        cells = [
            each.contender,
            _number(each.speedup, "-"),
            "-" if spread is None else f"{spread.quartile:.2f}-{spread.third_quartile:.2f}",
            _number(worst.speedup if worst else None, "-"),
            _number(each.tokens_per_s.median if each.tokens_per_s else None, "-"),
            _number(each.acceptance_rate, "-"),
            _number(each.mean_accepted_length, "-"),
            _number(each.first_token, "-"),
            _number(each.whole, "-"),
            "-" if each.n_different is None else str(each.n_different),
        ]
        if shows_reached:
            cells.append("-" if share is None else f"{share:.0%}")
        table.add_row(*map(Text, cells), style="bold" if each.speedup == best else "")
    return table


def _category_table(categories: Sequence[str], every: Sequence[ContenderFigures]) -> Table:
    from rich.text import Text

    from specgen.render.text import clean_line

    table = _empty([clean_line(category) for category in categories])
    for each in every:
        own = {category.category: category.speedup for category in each.categories}
        cells = [each.contender, *(_number(own.get(category), "-") for category in categories)]
        table.add_row(*map(Text, cells))
    return table


def _empty(headings: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("contender", overflow="fold")
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    return table


def _explanation(report: BenchReport, *, has_foresight: bool) -> str:
    from specgen.render.text import counted

    n_prompts = len({result.prompt for result in report.runs.results})
    text = (
        f"From {counted(n_prompts, 'prompt')}, each answered by all in turn: the speed-up over "
        "plain decoding of the same prompt (geometric means), its quartiles over the answers, and "
        "that of the worst prompt; tokens a second after the first (median); the share of drafted "
        "tokens that the target accepts; tokens a round; the time to the first token relative to "
        "plain decoding; how much sooner whole answers are there, prompts included; answers whose "
        "text is another than plain decoding's"
    )
    if has_foresight:
        text += "; the share of the speed that knowing in advance what is accepted could give"
    return f"{text}."


def _number(value: float | None, missing: str = "") -> str:
    return missing if value is None else f"{value:.2f}"
