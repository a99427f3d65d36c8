"""The answer as a stream: for pipes, for simple terminals, and with forced colours."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specgen.errors import OutputError
from specgen.events import NoticeEvent, ReadingEvent
from specgen.render.streams import Renderer, TextRenderer, print_notice
from tests.helpers.events import Script
from tests.render.test_render_text import TEXTS


class Recorder(io.BytesIO):
    """A stream that knows what was flushed."""

    flushed = b""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def notes() -> tuple[Callable[[NoticeEvent | ReadingEvent], None], io.StringIO]:
    errors = io.StringIO()
    return partial(print_notice, Console(file=errors, width=80)), errors


def play(renderer: Renderer, script: Script) -> None:
    with renderer:
        for event in script.events:
            renderer.handle(event)


@given(st.lists(st.tuples(st.lists(TEXTS, max_size=3), st.integers(0, 3), TEXTS), max_size=6))
def test_a_pipe_gets_exactly_the_answer(rounds: list[tuple[list[str], int, str]]) -> None:
    script = Script().prompt()
    for drafted, n_accepted, own in rounds:
        script.round(drafted, min(n_accepted, len(drafted)), own)
    stream = io.BytesIO()
    play(TextRenderer(stream), script.finish())
    assert stream.getvalue() == script.text.encode("utf-8", "replace")


def test_a_pipe_gets_each_round_at_once() -> None:
    stream = Recorder()
    renderer = TextRenderer(stream)
    for event in Script().prompt().plain("one").round([" two", " x"], 1, " three").events:
        renderer.handle(event)
    assert stream.flushed == b"one two three"


def test_a_simple_terminal_gets_no_control_characters() -> None:
    stream = io.BytesIO()
    script = Script().plain("a\x1b[2J").plain("\r").plain("\nb\tc\x07 漢").finish()
    play(TextRenderer(stream, encoding="latin-1", is_terminal=True), script)
    assert stream.getvalue() == b"a?[2J\nb\tc? ?\n"


def test_a_notice_does_not_tear_a_line_on_a_simple_terminal() -> None:
    where, errors = notes()
    stream = io.BytesIO()
    renderer = TextRenderer(stream, where, is_terminal=True)
    play(renderer, Script().plain("a").notice("one").notice("two").plain("b").finish())
    assert stream.getvalue() == b"a\nb\n"
    assert errors.getvalue() == "note: one\nnote: two\n"


class Failing(io.RawIOBase):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise self._error


def test_a_full_disk_is_reported_in_one_line() -> None:
    stream = Failing(OSError(28, "No space left on device"))
    buffer = io.BufferedWriter(stream)
    with pytest.raises(OutputError) as caught:
        play(TextRenderer(buffer), Script().plain("text"))
    assert caught.value.message == "the answer could not be written: No space left on device"
    assert caught.value.hint == "make room on the disk"
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.flush()
