"""The live view, as it looks on a terminal after each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.events import Event, PromptEvent
from specgen.options import Show
from specgen.render.live import LiveRenderer
from specgen.render.rounds import RoundsRenderer
from specgen.render.rows import clean
from specgen.render.streams import print_notice
from tests.helpers.events import Script
from tests.helpers.screen import Terminal, letters
from tests.render.test_render_text import DIFFICULT, TEXTS

pytestmark = pytest.mark.slow

LEGEND = "accepted  corrected  bonus  plain  rejected"


def play(
    terminal: Terminal,
    events: Sequence[Event],
    show: Show = "accepted",
    *,
    folds: bool = False,
    thinks: bool = False,
) -> LiveRenderer:
    """Show events, and leave the view as it is after the last of them."""
    notice = partial(print_notice, terminal.console, verbose=True)
    renderer = LiveRenderer(terminal.console, show, notice, thinks=thinks, folds=folds)
    for event in events:
        renderer.handle(event)
    return renderer


def test_rejected_tokens_are_shown_after_the_text_or_where_they_were_rejected() -> None:
    terminal, other = Terminal(), Terminal()
    script = Script().prompt().plain("The").round([" cat", " sat", " on"], 1, " lay")
    play(terminal, script.events)
    status = LEGEND + "    20.0/s  3 tokens  33% accepted"
    assert terminal.visible == ["The cat lay sat on", "", status]
    assert terminal.struck() == " sat onrejected"
    play(other, script.plain(" down").finish().events, "all")
    assert other.visible == ["The cat sat on lay down"]
    assert other.struck() == " sat on"


@pytest.mark.parametrize(
    ("show", "row", "struck"),
    [("all", "x[ b] a[ a2] a1 a11 own", " a11"), ("accepted", "x a a1 own b   a2   a11", None)],
)
def test_branches_of_a_tree_are_distinguishable(show: Show, row: str, struck: str | None) -> None:
    terminal = Terminal()
    drafted = [" a", " b", " a1", " a2", " a11"]
    script = Script().plain("x").tree(drafted, (-1, -1, 0, 0, 2), (0, 2), " own")
    play(terminal, script.events, show)
    assert terminal.visible[0] == row
    if struck is not None:
        assert terminal.struck() == f"{struck}rejected"


def test_a_long_prompt_shows_the_progress_of_its_prefill() -> None:
    script = Script().prompt(4000).prefill(1024, 10.0, 29.4)
    shown = "prefilling the prompt: 26% of 4000 tokens, 29 s left"
    terminal = Terminal()
    play(terminal, script.events)
    assert terminal.visible == ["", "", shown]
    for columns, text in (
        (len(shown), "prefilling 4000 prompt tokens"),
        (12, "prefilling"),
        (5, None),
    ):
        narrow = Terminal(columns, 24)
        play(narrow, script.events)
        assert [row for row in narrow.visible if row] == ([text] if text else [])
    play(terminal, script.plain("a").events)
    assert not any("prefilling" in row for row in terminal.visible)


@pytest.mark.parametrize(
    ("columns", "status"),
    [
        (80, LEGEND + "    20.0/s  3 tokens  33% accepted"),
        (60, LEGEND + "    20.0/s"),
        (40, "20.0/s  3 tokens  33% accepted"),
        (5, "3"),
        (2, "3"),
    ],
)
def test_the_status_line_shows_as_much_as_fits(columns: int, status: str) -> None:
    terminal = Terminal(columns)
    script = Script().prompt().plain("a").round(["b", "c", "d"], 1, "e")
    play(terminal, script.events)
    assert terminal.visible[-1] == status


@pytest.mark.parametrize("show", ["accepted", "all", "none"])
def test_at_the_end_only_the_text_remains_with_the_cursor_below_it(show: Show) -> None:
    whole = Script().prompt().plain("The").round([" cat", " sat"], 2, "\nEnd").finish()
    for script, rows in ((whole, ["The cat sat", "End"]), (Script().prompt().finish(), [])):
        terminal = Terminal()
        play(terminal, script.events, show)
        assert terminal.visible == rows
        assert (terminal.screen.cursor.y, terminal.screen.cursor.x) == (len(rows), 0)
        assert not terminal.cursor_hidden


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_the_text_and_the_cursor(error: type[BaseException]) -> None:
    terminal = Terminal()
    script = Script().prompt().plain("so far").round([" so", " good"], 0, ",")
    renderer = play(terminal, script.events)
    assert terminal.cursor_hidden
    with pytest.raises(error), renderer:
        raise error
    assert terminal.visible == ["so far,"]
    assert not terminal.cursor_hidden


def test_words_that_the_window_splits_are_copied_in_one_piece() -> None:
    terminal = Terminal(20)
    address = "https://example.org/" + "/".join(f"part{n}" for n in range(20))
    script = Script().prompt().plain("See ")
    for start in range(0, len(address), 7):
        script.plain(address[start : start + 7])
    script.plain(" there.\n").plain("漢字" * 40).finish()
    play(terminal, script.events)
    assert terminal.lines == [f"See {address} there.", "漢字" * 40]


def test_a_notice_is_shown_above_the_unfinished_line() -> None:
    terminal, script = Terminal(), Script().prompt().plain("one\ntwo")
    script.notice("[b]drafting\nfailed\x1b[2J", "why\nexactly").plain(" words")
    play(terminal, script.events)
    note = ["note: [b]drafting↵failed␛[2J", "  why", "  exactly"]
    assert terminal.visible[:5] == ["one", *note, "two words"]
    assert terminal.look("drafting") == ("default",)


@given(
    st.lists(st.tuples(TEXTS, st.integers(10, 60), st.booleans()), max_size=12),
    st.sampled_from(["accepted", "none"]),
)
def test_resizing_a_window_that_reflows_text_loses_nothing(
    rounds: list[tuple[str, int, bool]], show: Show
) -> None:
    terminal = Terminal(30, 30)
    script = Script().prompt()
    renderer = play(terminal, script.events, show)
    for text, columns, tell in rounds:
        script.round([text, " refused"], 1, " and")
        for event in script.events[-3:]:
            renderer.handle(event)
        terminal.resize(columns, tell=tell)
    renderer.close()
    assert letters("".join(terminal.rows)) == letters(clean(script.text))


ROUNDS = st.lists(
    st.tuples(st.lists(TEXTS | DIFFICULT, max_size=4), st.integers(0, 4), TEXTS), max_size=10
)


@given(ROUNDS, st.integers(10, 60), st.integers(2, 12), st.sampled_from(["accepted", "none"]))
def test_the_screen_ends_up_with_the_answer(
    rounds: list[tuple[list[str], int, str]], columns: int, rows: int, show: Show
) -> None:
    terminal = Terminal(columns, rows)
    script = Script().prompt()
    renderer = play(terminal, script.events, show)
    for drafted, n_accepted, own in rounds:
        n_events = len(script.events)
        script.round(drafted, min(n_accepted, len(drafted)), own)
        for event in script.events[n_events:]:
            renderer.handle(event)
        if show == "none":
            # A carriage return at the end waits for what follows.
            shown = letters("".join(terminal.rows))
            assert shown == letters(clean(script.text.rstrip("\r"))) or "\r" in script.text
    renderer.handle(script.finished())
    answer = clean(script.text)
    assert letters("".join(terminal.rows)) == letters(answer)
    # Line feeds are where they were, too: no line is both kept and broken.
    assert len(terminal.rows) >= len(answer.rstrip("\n \t").split("\n")) or not letters(answer)
    assert not terminal.cursor_hidden


def test_a_round_writes_little_however_long_the_answer_is() -> None:
    terminal = Terminal(80, 24)
    renderer = LiveRenderer(terminal.console)
    script = Script().prompt()
    sizes = []
    for _ in range(300):
        script.round([" some", " words", " here"], 2, " too")
        before = len(terminal.written)
        for event in script.events[-3:]:
            renderer.handle(event)
        sizes.append(len(terminal.written) - before)
    assert max(sizes[100:]) < 6000
    assert max(sizes[200:]) <= max(sizes[100:200]) + 100


# --- thinking blocks: seen while they come, and a line in their place after that

FOLDED = "thought for {} s, {} tokens (/think shows it)"


def thinking(n_lines: int = 2) -> Script:
    """An answer that is still thinking."""
    script = Script().prompt().plain("<think>").plain("\n")
    for number in range(n_lines):
        script.round([f"line {number}", " of"], 1, " it\n")
    return script


def test_a_thought_is_seen_dim_while_it_comes() -> None:
    terminal = Terminal()
    play(terminal, thinking().plain("and").events, folds=True)
    *thought, status = terminal.visible
    assert thought == ["line 0 it", "line 1 it", "and"]
    assert "tokens" in status
    assert "\x1b[2mline\x1b[0m" in terminal.written
    assert terminal.struck() == "rejected"  # of the legend


@pytest.mark.parametrize("show", ["accepted", "all", "none"])
def test_a_line_takes_its_place(show: Show) -> None:
    terminal = Terminal(rows=12)
    script = thinking(40).plain("</").plain("think>").plain("\n\n").plain("The").plain(" answer")
    play(terminal, script.finish().events, show, folds=True)
    assert terminal.rows == [FOLDED.format("4.3", 84), "The answer"]
    assert not terminal.cursor_hidden


def test_a_thought_that_is_broken_off_leaves_its_line_and_so_does_one_of_the_template() -> None:
    terminal = Terminal()
    play(terminal, thinking().plain("</thi").finish("interrupted").events, folds=True)
    assert terminal.rows == [FOLDED.format("0.4", 7)]
    terminal = Terminal()
    script = Script().prompt().plain("why").plain(" not</think>").plain("So.").finish()
    first = script.events[0]
    assert isinstance(first, PromptEvent)
    events = [replace(first, text="<|assistant|>\n<think>\n"), *script.events[1:]]
    play(terminal, events, folds=True)
    assert terminal.rows == [FOLDED.format("0.1", 2), "So."]


def test_a_round_may_end_within_the_mark_of_an_answer() -> None:
    script = Script().prompt().plain("<|channel|>analysis<|message|>").plain("why not")
    script.round(["<|end|>", "<|start|>"], 2, "assistant").plain("<|channel|>final<|message|>")
    events = script.plain("So.").finish().events
    for folds, thoughts in ((True, [FOLDED.format("0.2", 5)]), (False, ["why not", ""])):
        terminal = Terminal(rows=12)
        play(terminal, events, thinks=True, folds=folds)
        assert terminal.rows == [*thoughts, "So."]


@pytest.mark.parametrize("folds", [False, True])
def test_an_empty_thought_is_not_shown_however_it_was_drafted(folds: bool) -> None:
    by_tokens = Script().prompt().plain("<think>").plain("\n\n").plain("</think>").plain("So.")
    in_a_round = Script().prompt().round(["<think>", "\n\n", "</think>"], 3, "So.")
    for script in (by_tokens, in_a_round):
        terminal = Terminal(rows=12)
        play(terminal, script.finish().events, thinks=True, folds=folds)
        assert terminal.rows == ["So."]


def test_the_end_of_a_thought_that_is_broken_off_is_shown() -> None:
    terminal = Terminal()
    script = Script().prompt().plain("<think>").plain("if a ").plain("<").finish("interrupted")
    play(terminal, script.events, thinks=True)
    assert terminal.rows == ["if a <"]


def test_a_thought_stays_dim_where_nothing_shows_it_again() -> None:
    terminal = Terminal(rows=12)
    script = Script().prompt().plain("[THINK]").plain("why ").plain("not[/THINK]").plain("So.")
    play(terminal, script.finish().events, thinks=True)
    assert terminal.rows == ["why not", "", "So."]
    assert "\x1b[2mwhy" in terminal.written


def test_rounds_fit_a_narrow_terminal_and_have_probabilities_if_they_are_wanted() -> None:
    terminal = Terminal(50)
    script = Script().prompt().because("model", "it pays")
    script.round([" one", " two", " three"], 2, " ten").finish()
    with RoundsRenderer(terminal.console, verbose=True) as renderer:
        for event in script.events:
            renderer.handle(event)
    assert terminal.visible[-5:] == [
        "round      ms  tokens",
        "    1   100.0       3  ✓ one 50|–  ✓ two 50|–",
        "                       ✗ three 50|–  → ten",
        "                       by model",
        "                       it pays",
    ]
    assert terminal.look("three") == ("red", "strikethrough")


@pytest.mark.parametrize("columns", [40, 80])
def test_the_legend_of_the_rounds_is_broken_between_words(columns: int) -> None:
    terminal = Terminal(columns)
    with RoundsRenderer(terminal.console) as renderer:
        for event in Script().prompt().plain("one").finish().events:
            renderer.handle(event)
    heading = terminal.visible.index("round      ms  tokens")
    legend = terminal.visible[:heading]
    assert len(legend) == {40: 6, 80: 3}[columns]
    words = " ".join(legend).split()
    assert {"target's", "draft", "grammar"} <= set(words)
