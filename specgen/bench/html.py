"""A benchmark as a page: one file without anything from elsewhere, light or dark as its reader
likes it. Whatever is a name or a text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from specgen.bench.figures import Figures
from specgen.bench.report import Report
from specgen.bench.style import N_COLOURS, STYLE
from specgen.bench.svg import Bar, Line, Stack, bars, lines, stacks

_HEADINGS = (
    "contender",
    "speed-up",
    "quartiles",
    "worst",
    "tokens/s",
    "accepted",
    "length",
    "rounds",
    "first token",
    "whole answer",
    "other text",
    "of foresight",
)
_MEANINGS = (
    "Speed-up: tokens a second after the first one, over plain decoding of the same prompt in "
    "the same run; the geometric mean over the categories, of the geometric means over their "
    "answers. Quartiles are over all answers, and the worst prompt has its number behind it. "
    "Accepted: the share of drafted tokens that the target keeps; length: tokens a round. First "
    "token: the time to it, relative to plain decoding. Whole answer: how much sooner it is there, "
    "the prompt included, which some programs let their draft read before the first token. Other "
    "text: answers that differ from plain decoding's at temperature 0, where rounding may turn a "
    "near-tie. Of foresight: the share of the speed that was possible with the same drafts and "
    "costs, if one knew in advance what will be accepted."
)


def to_html(report: Report) -> str:
    """The page."""
    body = "\n".join(_body(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>specgen bench</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _body(report: Report) -> Iterator[str]:
    yield "<h1>specgen bench</h1>"
    if report.is_interrupted:
        yield '<p class="notice">Interrupted: not everything was measured.</p>'
    n_prompts = len({result.prompt for result in report.runs.results})
    yield (
        f"<p>{n_prompts} prompts, {report.n_rounds} times each, answered by every contender in "
        "turn. Speeds are compared with plain decoding of the same prompt in the same run.</p>"
    )
    for lineup in report.lineups:
        yield from _lineup(report, lineup)
    yield from _costs(report)
    yield from _failures(report)
    yield f'<p class="note">{escape(_MEANINGS)}</p>'
    yield "<h2>Where and how</h2>"
    yield _table(("", ""), ((name, value) for name, value in _flat(report.about)), "about")


def _lineup(report: Report, lineup: tuple[str, float]) -> Iterator[str]:
    target, temperature = lineup
    every = report.of(lineup)
    colours = colours_of(every)
    yield f"<h2>{escape(target)}, temperature {temperature:g}</h2>"
    yield _table(_HEADINGS, (_row(report, each) for each in every), "figures")
    if any(each.speedup is not None and not each.is_plain for each in every):
        yield _figure("Speed-up by category (bars: geometric mean; whiskers: quartiles)",
                      _speedups(report, every, colours))  # fmt: skip
    shares = [each for each in every if each.shares is not None]
    if shares:
        legend = (("target", "target"), ("drafting", "draft"), ("specgen itself", "own"))
        yield _figure("Milliseconds a token, and where they go", _shares(shares), legend)
    drafted = [each for each in every if len(each.acceptance_by_position) > 1]
    if drafted:
        told = [(each.contender, colours[each.contender]) for each in drafted]
        points = [_acceptance(each, colours[each.contender]) for each in drafted]
        yield _figure(
            "Share of the drafted tokens that is accepted",
            lines(points, "position in the draft", "share", 1.0),
            told,
        )


def colours_of(every: Sequence[Figures]) -> dict[str, str]:
    """A class for each contender of a lineup: plain decoding is grey."""
    others = [each.contender for each in every if not each.is_plain]
    colours = {name: f"c{number % N_COLOURS}" for number, name in enumerate(others)}
    return colours | {each.contender: "plain" for each in every if each.is_plain}


def _speedups(report: Report, every: Sequence[Figures], colours: dict[str, str]) -> str:
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


def _shares(every: Sequence[Figures]) -> str:
    rows = []
    for each in every:
        shares = each.shares
        assert shares is not None, "chosen for having them"
        token_ms = 1000.0 * shares.token_s
        parts = (("target", shares.target), ("draft", shares.draft), ("own", shares.own))
        rows.append(Stack(each.contender, tuple((n, n, share * token_ms) for n, share in parts)))
    return stacks(rows, "ms")


def _acceptance(each: Figures, colour: str) -> Line:
    return Line(
        each.contender,
        colour,
        tuple((float(n), share) for n, share in enumerate(each.acceptance_by_position, 1)),
    )


def _costs(report: Report) -> Iterator[str]:
    for foresight in report.foresights:
        points = tuple(
            (float(size), 1000.0 * seconds) for size, seconds in sorted(foresight.batch_s.items())
        )
        yield f"<h2>{escape(foresight.target)}: costs</h2>"
        if len(points) > 1:
            line = Line(foresight.target, "c0", points)
            yield _figure(
                "What a batch costs", lines([line], "tokens in the batch", "milliseconds")
            )
        rows = [
            (name, f"{1000 * first:.2f}", f"{1000 * further:.2f}")
            for name, (first, further) in foresight.draft_s.items()
        ]
        yield _table(("draft", "ms for the first token", "ms for each further one"), rows, "costs")


def _failures(report: Report) -> Iterator[str]:
    rows = [
        (failure.contender, f"{failure.target} ({failure.temperature:g})", failure.message)
        for failure in report.runs.failures
    ]
    rows += [
        (f"prompt {skipped.prompt}", skipped.target, skipped.reason)
        for skipped in report.runs.skipped
    ]
    if rows:
        yield "<h2>Left out</h2>"
        yield _table(("what", "where", "why"), rows, "failures")


def _row(report: Report, each: Figures) -> list[str]:
    spread, worst, reached = each.speedups, each.worst, report.share_reached(each)
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
        "" if reached is None else f"{reached:.0%}",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _figure(caption: str, picture: str, legend: Iterable[tuple[str, str]] = ()) -> str:
    keys = "".join(
        f'<span><i class="swatch {colour}"></i>{escape(name)}</span>' for name, colour in legend
    )
    told = f'<div class="legend">{keys}</div>' if keys else ""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{told}{picture}</figure>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], style: str) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(headings) else ""
    return f'<div class="wide"><table class="{style}">{head}<tbody>{body}</tbody></table></div>'


def _flat(values: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of what is nested, line by line."""
    for name, value in values.items():
        whole = f"{before}{name}".replace("_", " ")
        if isinstance(value, dict):
            yield from _flat(value, f"{whole}: ")
        elif value not in (None, "", []):
            yield whole, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
