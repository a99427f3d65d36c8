"""Small SVG pictures for a page: bars, lines and shares.

Text and marks have classes. The page (`html`) defines the colours, so that they suit light and dark screens.
Every mark has its value in a `title`. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: The width of the pictures, in the page's units.
WIDTH = 760
_ROW = 20
_BAR = 12
_LABELS = 230
_VALUES = 60
#: The longest label beside a bar, in characters.
_N_LABEL = 30
#: The most values on a horizontal axis for which all are labelled.
_N_TOLD = 24
#: Values that differ by less count as equal.
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with whiskers; `colour` is a class of the page."""

    label: str
    colour: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of parts: the name, class and value of each, in a common unit."""

    label: str
    parts: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Points in one colour, from left to right."""

    label: str
    colour: str
    points: tuple[tuple[float, float], ...]


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], reference: float, unit: str) -> str:
    """Draw horizontal bars from 0, in groups with headings, with a line at `reference`."""
    every = [bar for _, group in groups for bar in group]
    scale = _Scale(0.0, max([reference, *(max(bar.value, bar.high) for bar in every)]))
    parts: list[str] = []
    y = 0.0
    for heading, group in groups:
        parts.append(_text(0, y + 15, heading, "heading"))
        y += 24
        for bar in group:
            parts += _bar(bar, y, scale, unit)
            y += _ROW
        y += 10
    x = scale.at(reference)
    parts.insert(0, f'<line class="reference" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{y:.1f}"/>')
    parts += _axis(scale, y, unit)
    return _svg(y + 24, parts)


def _bar(bar: Bar, y: float, scale: _Scale, unit: str) -> list[str]:
    x, end, middle = scale.at(0.0), scale.at(bar.value), y + _ROW / 2
    told = (
        f"{bar.label}: {bar.value:.2f}{unit} (half of the answers {bar.low:.2f} to {bar.high:.2f})"
    )
    low, high = scale.at(bar.low), scale.at(bar.high)
    parts = [_label(bar.label, middle)]
    parts.append(
        f'<g><title>{escape(told)}</title><rect class="fill {bar.colour}" x="{x:.1f}" '
        f'y="{middle - _BAR / 2:.1f}" width="{max(1.0, end - x):.1f}" height="{_BAR}" rx="2"/>'
    )
    if bar.high > bar.low:
        parts.append(
            f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{high:.1f}'
            f'M{low:.1f} {middle - 4:.1f}v8M{high:.1f} {middle - 4:.1f}v8"/>'
        )
    parts.append("</g>")
    parts.append(_text(WIDTH, middle + 4, f"{bar.value:.2f}{unit}", "value"))
    return parts


def stacks(rows: Sequence[Stack], unit: str) -> str:
    """Draw horizontal bars of several parts, all at the same scale."""
    scale = _Scale(0.0, max((sum(part[2] for part in row.parts) for row in rows), default=1.0))
    parts: list[str] = []
    y = 0.0
    for row in rows:
        middle, whole, done = y + _ROW / 2, sum(part[2] for part in row.parts), 0.0
        parts.append(_label(row.label, middle))
        for name, colour, value in row.parts:
            x, end = scale.at(done), scale.at(done + value)
            done += value
            told = f"{row.label}, {name}: {value:.2f} {unit} ({value / (whole or 1.0):.0%})"
            parts.append(
                f'<rect class="fill part {colour}" x="{x:.1f}" y="{middle - _BAR / 2:.1f}" '
                f'width="{max(0.0, end - x):.1f}" height="{_BAR}"><title>{escape(told)}</title></rect>'
            )
        parts.append(_text(WIDTH, middle + 4, f"{whole:.2f}", "value"))
        y += _ROW
    return _svg(y + 24, [*parts, *_axis(scale, y, f" {unit}")])


def line_chart(
    every: Sequence[ChartLine], x_name: str, y_name: str, y_max: float | None = None
) -> str:
    """Draw lines over a common scale that begins at 0; without `y_max` the largest value is its end."""
    height = 220.0
    xs = [x for line in every for x, _ in line.points]
    across = _Scale(min(xs), max(xs), 40.0, WIDTH - 12.0)
    largest = max(y for line in every for _, y in line.points) if y_max is None else y_max
    up = _Scale(0.0, largest, height, 12.0)
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line class="grid" x1="40" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}"/>')
        parts.append(_text(34, y + 4, f"{tick:g}", "value"))
    told = sorted(set(xs)) if len(set(xs)) <= _N_TOLD else across.ticks()
    parts += [_text(across.at(x), height + 16, f"{x:g}", "tick") for x in told]
    for line in every:
        parts += _line(line, across, up)
    parts.append(_text(40, height + 34, f"{y_name}, by {x_name}", "note"))
    return _svg(height + 40, parts)


def _line(line: ChartLine, across: _Scale, up: _Scale) -> Iterable[str]:
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path class="line {line.colour}" d="M{path}"/>'
    for (x, y), (across_value, value) in zip(places, line.points, strict=True):
        told = f"{line.label}: {value:.3g} at {across_value:g}"
        yield (
            f'<circle class="fill {line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{escape(told)}</title></circle>"
        )


class _Scale:
    """Maps values to positions."""

    def __init__(
        self,
        low: float,
        high: float,
        start: float = _LABELS,
        end: float = WIDTH - _VALUES,
    ) -> None:
        self._low, self._high = low, high if high - low > _TINY else low + 1.0
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return about five round values."""
        rough = (self._high - self._low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
        first = math.ceil(self._low / step)
        return [n * step for n in range(first, math.floor(self._high / step * 1.000001) + 1)]


def _axis(scale: _Scale, y: float, unit: str) -> list[str]:
    return [_text(scale.at(tick), y + 14, f"{tick:g}{unit}", "tick") for tick in scale.ticks()]


def _label(text: str, middle: float) -> str:
    # Names differ at their ends.
    half = _N_LABEL // 2
    shown = text if len(text) <= _N_LABEL else f"{text[: half - 1]}…{text[-half:]}"
    return _text(_LABELS - 8, middle + 4, shown, "label")


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(height: float, parts: Iterable[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">\n{inside}\n</svg>'
    )
