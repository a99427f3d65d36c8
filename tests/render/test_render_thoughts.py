"""Thinking blocks in the live view: seen while they come, and a line in their place after that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.events import Event, PromptEvent
from specgen.options import Show
from specgen.render.live import LiveRenderer
from tests.helpers.events import Script
from tests.helpers.screen import Terminal

FOLDED = "thought for {} s, {} tokens (/think shows it)"


def play(
    terminal: Terminal, events: list[Event], show: Show = "accepted", *, folds: bool = True
) -> LiveRenderer:
    renderer = LiveRenderer(terminal.console, show, folds=folds)
    for event in events:
        renderer.handle(event)
    return renderer


def thinking(n_lines: int = 2) -> Script:
    """An answer that is still thinking."""
    script = Script().prompt().plain("<think>").plain("\n")
    for number in range(n_lines):
        script.round([f"line {number}", " of"], 1, " it\n")
    return script


def test_a_thought_is_seen_dim_while_it_comes() -> None:
    terminal = Terminal()
    play(terminal, thinking().plain("and").events)
    *thought, status = terminal.visible
    assert thought == ["line 0 it", "line 1 it", "and"]
    assert "tokens" in status
    assert "\x1b[2mline\x1b[0m" in terminal.written
    assert terminal.struck() == "rejected"  # of the legend


@pytest.mark.parametrize("show", ["accepted", "all", "none"])
def test_a_line_takes_its_place(show: Show) -> None:
    terminal = Terminal(rows=12)
    script = thinking(40).plain("</").plain("think>").plain("\n\n").plain("The").plain(" answer")
    play(terminal, script.finish().events, show)
    assert terminal.rows == [FOLDED.format("4.3", 84), "The answer"]
    assert not terminal.cursor_hidden


def test_a_thought_that_is_broken_off_leaves_its_line() -> None:
    terminal = Terminal()
    play(terminal, thinking().plain("</thi").finish("interrupted").events)
    assert terminal.rows == [FOLDED.format("0.4", 7)]


def test_a_thought_that_the_template_began() -> None:
    terminal = Terminal()
    script = Script().prompt().plain("why").plain(" not</think>").plain("So.").finish()
    first = script.events[0]
    assert isinstance(first, PromptEvent)
    events = [replace(first, text="<|assistant|>\n<think>\n"), *script.events[1:]]
    play(terminal, events)
    assert terminal.rows == [FOLDED.format("0.1", 2), "So."]


@pytest.mark.parametrize("text", ["<", "<thin", "<thinker>", "<p>", "a <think>b</think>", ""])
def test_what_only_looks_like_a_thought_is_the_answer(text: str) -> None:
    terminal = Terminal()
    script = Script().prompt()
    for character in text:
        script.plain(character)
    play(terminal, script.finish().events)
    assert terminal.rows == ([text] if text else [])


@given(
    pieces=st.lists(st.sampled_from(["a b", "\n", "word ", "<", "</think", ">", "é" * 9])),
    columns=st.lists(st.integers(8, 60), min_size=1, max_size=4),
    rows=st.integers(3, 12),
)
def test_whatever_is_thought_and_however_the_window_changes(
    pieces: list[str], columns: list[int], rows: int
) -> None:
    terminal = Terminal(columns[0], rows)
    script = Script().prompt().plain("<think>")
    renderer = play(terminal, script.events)
    for number, piece in enumerate(pieces):
        script.plain(piece)
        if "</think>" in script.text:
            break
        if number < len(columns):
            terminal.resize(columns[number])
        renderer.handle(script.events[-1])
    terminal.resize(60)
    if "</think>" not in script.text:
        renderer.handle(script.plain("</think>").events[-1])
        for event in script.plain("\nthe end").finish().events[-2:]:
            renderer.handle(event)
        assert terminal.lines[-1] == "the end"
        assert terminal.lines[-2].startswith("thought for")
