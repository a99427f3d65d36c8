"""The page that shows a benchmark."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.measure.bench.html import N_COLOURS, to_html
from specgen.measure.bench.report import BenchReport
from specgen.measure.bench.runs import Failure, Runs, SkippedPrompt
from specgen.measure.bench.svg import Bar, ChartLine, Stack, bars, line_chart, stacks
from tests.helpers.bench import outcome, report_of, result

#: Names that a page must not take for its own.
NASTY = ('<script>alert("1")</script>', "a & b", "'quoted' \"name\"", "</title></svg>", "]]>")
_VOID = {"meta"}


class Page(HTMLParser):
    """Checks that elements are closed as they were opened, and keeps what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        for name, value in attrs:
            if name == "class" and value:
                self.classes |= set(value.split())
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def full_report(names: tuple[str, ...] = NASTY) -> BenchReport:
    results = []
    for prompt, category in enumerate(("<b>code</b>", "prose", "prose"), 1):
        for temperature in (0.0, 0.8):
            where = {"temperature": temperature, "category": category, "target": "<t>.gguf"}
            results.append(result("plain", prompt, 10.0, **where))
            results += [result(name, prompt, 5.0 + prompt, **where) for name in names]
    return report_of(
        results,
        runs=Runs(
            results,
            [Failure("<t>.gguf", 0.0, "<failed>", 2, "it <broke>")],
            [SkippedPrompt("<t>.gguf", 9, "too <long>")],
        ),
        about={"command": "specgen bench -m '<t>.gguf'", "machine": {"cpu": "<cpu>"}},
        is_interrupted=True,
    )


def test_everything_is_told_and_all_names_are_escaped() -> None:
    page = parsed(to_html(full_report()))
    text = "".join(page.text)
    for name in (*NASTY, "plain", "<t>.gguf", "<b>code</b>", "<failed>", "it <broke>",
                 "too <long>", "<cpu>", "prompt 9", "Interrupted"):  # fmt: skip
        assert name in text, name
    assert not page.tags.keys() & {"script", "b", "t", "cpu", "failed", "link", "img", "iframe"}
    # Of each of the two temperatures: speed-ups, time, and acceptance.
    assert page.tags["svg"] == 2 * 3


def test_nothing_comes_from_elsewhere() -> None:
    text = to_html(full_report())
    page = parsed(text)
    assert not [each for each in page.attributes if each[1] in ("src", "href", "srcset")]
    assert not re.search(r"url\(|@import", text)
    own = {value for _, name, value in page.attributes if name == "xmlns"}
    assert set(re.findall(r"https?://[^\"'<\s]+", text)) == own


def test_every_colour_is_there_for_light_and_for_dark() -> None:
    text = to_html(full_report(tuple(f"number {n}" for n in range(N_COLOURS + 2))))
    style = text[text.index("<style>") : text.index("</style>")]
    used = {name for name in parsed(text).classes if re.fullmatch(r"c\d+", name)}
    assert used == {f"c{n}" for n in range(N_COLOURS)}
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for name in (*used, "paper", "ink", "faint", "line", "plain"):
        assert f"--{name}:#" in light
        assert f"--{name}:#" in dark
    for name in (*used, "plain", "target", "draft", "own"):
        assert f".{name}{{--own:" in style


def test_without_results_there_is_still_a_page() -> None:
    page = parsed(to_html(report_of([], is_interrupted=True)))
    assert "Interrupted" in "".join(page.text)
    assert "svg" not in page.tags


def test_what_is_not_told_is_no_picture() -> None:
    silent = outcome(None, target_s=None, drafted_by_depth=(), accepted_by_depth=())
    results = [result("plain", 1, None, outcome=silent), result("a", 1, None, outcome=silent)]
    page = parsed(to_html(report_of(results)))
    assert "svg" not in page.tags
    assert "a" in page.text


VALUES = st.floats(0.0, 1e6)


@given(st.lists(st.tuples(st.text(), VALUES), min_size=1), st.text())
def test_pictures_hold_any_names_and_values(given_: list[tuple[str, float]], name: str) -> None:
    rows = [Bar(label, "c0", value, value / 2, value * 2) for label, value in given_]
    points = tuple((float(n), value) for n, (_, value) in enumerate(given_))
    for picture in (
        bars([(name, rows), ("none", [])], 1.0, "×"),
        stacks([Stack(label, (("x", "c0", value), (name, "c1", 0.0))) for label, value in given_],
               "ms"),
        line_chart([ChartLine(name, "c0", points)], name, name),
    ):  # fmt: skip
        parsed(picture)
        assert not re.search(r"\b(nan|inf)\b", re.sub(r"<title>.*?</title>|>[^<]*<", "", picture))


def test_bars_end_at_their_values() -> None:
    picture = bars([("", [Bar("a", "c0", 2.0, 2.0, 2.0), Bar("b", "c1", 1.0, 1.0, 1.0)])], 1.0, "×")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', picture)]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert "whisker" not in picture
