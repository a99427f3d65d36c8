"""Races: the replay on a terminal, and the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.measure.race import Race
from specgen.render.picture import race_picture
from specgen.render.rows import clean
from specgen.render.side_by_side import replay
from tests.helpers.events import Script
from tests.helpers.races import raced, short_race
from tests.helpers.screen import Terminal, letters
from tests.render.test_render_text import TEXTS

LEGEND = "accepted  corrected  plain"


class Viewer:
    """Looks at a replay each time it waits, in virtual time."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.now_s = 10.0
        #: What was in the window, by the time since the start.
        self.seen: dict[float, list[str]] = {}
        #: The width of the window after the first look; 0 leaves it as it is.
        self.next_columns = 0
        #: What the first wait raises.
        self.error: BaseException | None = None

    def sleep(self, seconds: float) -> None:
        self.seen[round(self.now_s - 10.0, 3)] = self.terminal.visible
        self.now_s += seconds
        if self.error is not None:
            raise self.error
        if self.next_columns:
            self.terminal.resize(self.next_columns)

    def watch(self, race: Race, *, skips: bool = False) -> Viewer:
        replay(
            race,
            self.terminal.console,
            clock=lambda: self.now_s,
            sleep=self.sleep,
            interrupted=lambda: skips,
        )
        return self


@pytest.mark.parametrize(("columns", "start"), [(80, 41), (120, 61), (60, 31)])
def test_both_answers_grow_side_by_side_as_fast_as_they_were_generated(
    columns: int, start: int
) -> None:
    viewer = Viewer(Terminal(columns)).watch(short_race())

    def at(seconds: float) -> list[tuple[str, str]]:
        return [(row[:start].strip(), row[start:]) for row in viewer.seen[seconds][:3]]

    titles = ("without drafts", "drafts from draft.gguf")
    assert at(0.0) == [titles, ("", ""), ("prefill, 0.0 s", "prefill, 0.0 s")]
    assert at(1.5) == [titles, ("The", "The"), ("1 token, 1.5 s", "1 token, 1.5 s")]
    assert at(2.5) == [titles, ("The cat", "The cat <sat>"), ("2 tokens, 2.5 s", ended(2))]
    assert viewer.seen[2.5][3:] == ["", LEGEND, "replay at true speed, Ctrl-C skips it"]
    left = ["without drafts", "The cat <sat>", ended(3)]
    right = ["drafts from draft.gguf", "The cat <sat>", ended(2)]
    rows = [f"{one:<{start}}{other}" for one, other in zip(left, right, strict=True)]
    assert viewer.terminal.rows == [*rows, "", LEGEND]
    assert not viewer.terminal.cursor_hidden
    assert viewer.terminal.look("accepted") == ("green", "underscore")
    assert viewer.terminal.look("corrected") == ("magenta",)


def ended(seconds: int) -> str:
    return f"3 tokens in {seconds}.00 s"


def test_a_narrow_window_has_one_answer_above_the_other() -> None:
    viewer = Viewer(Terminal(40)).watch(short_race())
    assert viewer.seen[2.5][:7] == [
        *("without drafts", "The cat", "2 tokens, 2.5 s", ""),
        *("drafts from draft.gguf", "The cat <sat>", ended(2)),
    ]
    assert viewer.terminal.rows == [
        *("without drafts", "The cat <sat>", ended(3), ""),
        *("drafts from draft.gguf", "The cat <sat>", ended(2)),
        *("", LEGEND),
    ]


def test_a_skipped_replay_shows_the_end() -> None:
    viewer = Viewer(Terminal()).watch(short_race(), skips=True)
    assert not viewer.seen
    assert viewer.terminal.rows[1].split() == ["The", "cat", "<sat>"] * 2


def test_the_cursor_is_back_after_an_error() -> None:
    viewer = Viewer(Terminal())
    viewer.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        viewer.watch(short_race())
    assert not viewer.terminal.cursor_hidden
    assert viewer.terminal.rows[-1] == LEGEND


def long_race() -> Race:
    """A race to a text of 40 lines, of a token each."""
    scripts = Script(draft="none").prompt(), Script().prompt()
    for script in scripts:
        for number in range(40):
            script.plain(f"line {number}\n")
    return raced(*(script.finish() for script in scripts))


@pytest.mark.parametrize(
    ("columns", "rows", "lines"),
    [(80, 10, ["line 17", "line 18", "line 19"]), (40, 14, ["line 19", "line 19"])],
)
def test_of_a_long_text_the_end_is_replayed_and_all_of_it_stays(
    columns: int, rows: int, lines: list[str]
) -> None:
    viewer = Viewer(Terminal(columns, rows)).watch(long_race())
    shown = viewer.seen[2.05]
    assert len(shown) < rows
    assert shown[0].startswith("without drafts")
    assert [row[:20].strip() for row in shown if row.startswith("line")] == lines
    text = " ".join(viewer.terminal.rows)
    assert all(text.count(f"line {number} ") == 2 for number in range(40))


def test_a_window_that_changes_has_the_answers_in_its_new_width() -> None:
    viewer = Viewer(Terminal(80))
    viewer.next_columns = 40
    viewer.watch(short_race())
    assert viewer.terminal.rows[-9:-1] == [
        *("without drafts", "The cat <sat>", ended(3), ""),
        *("drafts from draft.gguf", "The cat <sat>", ended(2), ""),
    ]


@given(st.lists(TEXTS, max_size=4), st.sampled_from([2, 5, 17, 40]), st.sampled_from([3, 24]))
def test_any_text_is_whole_at_the_end(texts: list[str], columns: int, rows: int) -> None:
    plain = Script(draft="none").prompt()
    drafted = Script().prompt()
    for text in texts:
        plain.plain(text)
        drafted.round([text], 1, "")
    terminal = Terminal(columns, rows)
    Viewer(terminal).watch(raced(plain.finish(), drafted.finish()))
    whole = letters(clean(plain.text))
    assert letters("".join(terminal.rows)).count(whole) >= 2


# --- the picture


def test_each_token_appears_when_it_came() -> None:
    svg = race_picture(short_race())
    texts = [(each.get("class"), each.text) for each in ET.fromstring(svg).iter() if each.get("x")]
    by_text: dict[str, list[list[str]]] = {}
    for classes, text in texts:
        by_text.setdefault(text or "", []).append((classes or "").split())
    plain, drafted = by_text["cat"]
    assert (plain[0], drafted[0]) == ("plain", "accepted")
    # What came at the same time appears at the same time: the second round of both answers.
    assert plain[1] == drafted[1]
    last, corrected = by_text["<sat>"]
    assert corrected == ["corrected", drafted[1]]
    assert by_text[ended(2)] == [["faint", drafted[1]]]
    assert by_text[ended(3)] == [["faint", last[1]]]
    assert by_text["1.5 times as fast, identical text"] == [["verdict", last[1]]]
    assert "dog" not in by_text  # it was rejected
    assert f"@keyframes {last[1]}{{0%,{100 * 3 / 7:.2f}%{{opacity:0}}" in svg
    assert "prefers-reduced-motion" in svg
    assert "url(" not in svg  # nothing is loaded from elsewhere


@pytest.mark.parametrize("text", ["\uffff", "\ufffe", "\0", "\x1b[2J", "\ud800", "]]>", "</text>"])
def test_any_text_is_valid_in_the_picture(text: str) -> None:
    answer = Script(draft="none").prompt().plain(f"The {text}").finish()
    ET.fromstring(race_picture(raced(answer, answer)).encode())


def test_lines_of_code_stay_lines_in_the_picture() -> None:
    scripts = Script(draft="none").prompt(), Script().prompt()
    for script in scripts:
        script.plain("if x:\n").plain("\ty\r").plain("\n").plain("z\x1b" + " word" * 20).finish()
    svg = race_picture(raced(*scripts))
    found = [each for each in ET.fromstring(svg).iter() if "plain" in each.get("class", "")]
    places = {each.text: (float(each.get("x", "")), float(each.get("y", ""))) for each in found}
    (if_x, if_y), (y_x, y_y), (z_x, z_y) = (places[word] for word in ("if", "y", "z␛"))
    assert if_x == z_x < y_x  # those of the answer on the right
    assert y_y - if_y == z_y - y_y > 0
    # Nothing is outside its half.
    for each in found:
        left = float(each.get("x", ""))
        right = left + float(each.get("textLength", ""))
        assert right < 420 or left > 430
