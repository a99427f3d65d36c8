"""A benchmark as an HTML page: one file that loads nothing, in the reader's light or dark scheme.

The page is `page.html.jinja`, which escapes all names and texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from specgen.measure.bench.figures import ContenderFigures
from specgen.measure.bench.report import BenchReport
from specgen.measure.bench.svg import Bar, ChartLine, Stack, bars, line_chart, stacks

#: The number of colours for contenders; then they repeat.
N_COLOURS = 8

#: A part of the report, by the names in the template.
_Part = Mapping[str, Any]


def to_html(report: BenchReport) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("specgen.measure.bench", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(
        report=report,
        n_prompts=len({result.prompt for result in report.runs.results}),
        lineups=[_lineup(report, lineup) for lineup in report.lineups],
        left_out=_left_out(report),
        about=list(_flat(report.about)),
    )


def _lineup(report: BenchReport, lineup: tuple[str, float]) -> _Part:
    target, temperature = lineup
    every = report.of(lineup)
    colours = colours_of(every)
    has_speedups = any(each.speedup is not None and not each.is_plain for each in every)
    shares = [each for each in every if each.shares is not None]
    drafted = [each for each in every if len(each.acceptance_by_position) > 1]
    points = [_acceptance(each, colours[each.contender]) for each in drafted]
    return {
        "target": target,
        "temperature": temperature,
        "rows": [_row(each) for each in every],
        "speedups": _speedups(report, every, colours) if has_speedups else None,
        "shares": _shares(shares) if shares else None,
        "acceptance": line_chart(points, "position in the draft", "share", 1.0)
        if drafted
        else None,
        "drafted": [(each.contender, colours[each.contender]) for each in drafted],
    }


def colours_of(every: Sequence[ContenderFigures]) -> dict[str, str]:
    """Return a class for each contender of a lineup: plain decoding is grey."""
    others = [each.contender for each in every if not each.is_plain]
    colours = {name: f"c{number % N_COLOURS}" for number, name in enumerate(others)}
    return colours | {each.contender: "plain" for each in every if each.is_plain}


def _speedups(
    report: BenchReport, every: Sequence[ContenderFigures], colours: dict[str, str]
) -> str:
    groups: list[tuple[str, list[Bar]]] = []
    for category in report.categories:
        group: list[Bar] = []
        for each in every:
            for own in each.categories:
                if own.category == category and own.speedup is not None and own.speedups:
                    low, high = own.speedups.quartile, own.speedups.third_quartile
                    name = each.contender
                    group.append(Bar(name, colours[name], own.speedup, low, high))
        if group:
            groups.append((category, group))
    return bars(groups, 1.0, "×")


def _shares(every: Sequence[ContenderFigures]) -> str:
    rows = []
    for each in every:
        shares = each.shares
        assert shares is not None, "chosen for having them"
        token_ms = 1000.0 * shares.token_s
        parts = (("target", shares.target), ("draft", shares.draft), ("own", shares.own))
        rows.append(Stack(each.contender, tuple((n, n, share * token_ms) for n, share in parts)))
    return stacks(rows, "ms")


def _acceptance(each: ContenderFigures, colour: str) -> ChartLine:
    return ChartLine(
        each.contender,
        colour,
        tuple((float(n), share) for n, share in enumerate(each.acceptance_by_position, 1)),
    )


def _left_out(report: BenchReport) -> list[tuple[str, str, str]]:
    """Return the parts that were left out, with their reasons."""
    failures = [
        (failure.contender, f"{failure.target} ({failure.temperature:g})", failure.message)
        for failure in report.runs.failures
    ]
    skipped = [
        (f"prompt {skipped.prompt}", skipped.target, skipped.reason)
        for skipped in report.runs.skipped
    ]
    return failures + skipped


def _row(each: ContenderFigures) -> list[str]:
    spread, worst = each.speedups, each.worst
    return [
        each.contender,
        _number(each.speedup),
        "" if spread is None else f"{spread.quartile:.2f} – {spread.third_quartile:.2f}",
        "" if worst is None else f"{worst.speedup:.2f} ({worst.prompt})",
        "" if each.tokens_per_s is None else f"{each.tokens_per_s.median:.2f}",
        _number(each.acceptance_rate),
        _number(each.mean_accepted_length),
        "" if each.n_rounds is None else str(each.n_rounds),
        _number(each.first_token),
        _number(each.whole),
        "" if each.n_different is None else f"{each.n_different} of {each.n_answers}",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _flat(values: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and values of nested values, line by line."""
    for name, value in values.items():
        whole = f"{before}{name}".replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{whole}: ")
        elif value not in (None, "", []):
            yield whole, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
