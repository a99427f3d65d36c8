"""Which renderer is taken, and the whole of it on a real terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from specgen.render.live import make_renderer
from specgen.render.streams import make_console
from tests.helpers.events import Script


class Stream(io.TextIOWrapper):
    """A standard stream, which may be a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        self.raw_bytes = io.BytesIO()
        self._terminal = terminal
        super().__init__(self.raw_bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        return self.raw_bytes.getvalue().decode()


def run(
    *, terminal: bool, environ: dict[str, str] | None = None, **options: Any
) -> tuple[str, str]:
    """What a short run writes to stdout and stderr."""
    stdout, stderr = Stream(terminal=terminal), Stream(terminal=False)
    environ = {"TERM": "xterm-256color", **(environ or {})}
    script = Script().prompt().plain("The").round([" cat", " sat"], 1, " lay")
    script.notice("hm", "because").finish()
    with make_renderer(stdout=stdout, stderr=stderr, environ=environ, **options) as renderer:
        for event in script.events:
            renderer.handle(event)
    return stdout.text, stderr.text


def test_a_pipe_gets_the_answer_and_stderr_the_rest() -> None:
    answer, rest = run(terminal=False)
    assert answer == "The cat lay"
    assert rest == "note: hm\n"


def test_a_log_has_a_line_every_few_seconds_while_a_prompt_is_read() -> None:
    script = Script().prompt(1000)
    for number in range(1, 9):
        script.reading(100 * number, 2.0 * number, 20 - 2.0 * number)
    lines = [f"reading the prompt: {n}0% of 1000 tokens, {20 - 2 * n} s left" for n in (3, 6)]
    for quiet, terminal, expected in (
        (False, False, lines),
        (True, False, []),
        (False, True, []),  # there the status line says it
    ):
        stdout, stderr = Stream(terminal=terminal), Stream(terminal=False)
        environ = {"TERM": "xterm-256color"}
        with make_renderer(
            stdout=stdout, stderr=stderr, environ=environ, quiet=quiet, stats=False
        ) as renderer:
            for event in script.events:
                renderer.handle(event)
        assert stderr.text.splitlines() == expected
        assert ("reading" in stdout.text) == terminal


def test_a_terminal_gets_the_live_view() -> None:
    answer, _ = run(terminal=True)
    assert "\x1b[?25l" in answer
    assert answer.endswith("\x1b[?25h")
    assert "\x1b[4;32mcat\x1b[0m" in answer
    assert "\x1b[9;31m sat\x1b[0m" in answer


def test_no_color_leaves_the_attributes() -> None:
    answer, _ = run(terminal=True, environ={"NO_COLOR": "1"})
    assert "\x1b[4mcat\x1b[0m" in answer
    assert "\x1b[2;9m sat\x1b[0m" in answer


@pytest.mark.parametrize("term", ["dumb", "unknown", "DUMB"])
def test_a_simple_terminal_gets_plain_text_and_a_line_feed(term: str) -> None:
    answer, rest = run(terminal=True, environ={"TERM": term})
    assert answer == "The cat lay\n"
    assert rest.startswith("note: hm\n")


@pytest.mark.parametrize("environ", [{"FORCE_COLOR": "1"}, {"COLUMNS": "7"}])
def test_a_pipe_gets_no_codes(environ: dict[str, str]) -> None:
    assert run(terminal=False, environ=environ)[0] == "The cat lay"


@pytest.mark.parametrize("text", ["", "a", "a\n"])
def test_in_a_conversation_each_answer_ends_its_line(text: str) -> None:
    stdout = Stream(terminal=False)
    streams: dict[str, Any] = {"stdout": stdout, "stderr": Stream(terminal=False)}
    with make_renderer(**streams, environ={}, stats=False, in_chat=True) as renderer:
        for event in Script().prompt().plain(text).finish().events:
            renderer.handle(event)
    assert stdout.text == text.rstrip("\n") + "\n"


def test_details_are_for_the_verbose() -> None:
    assert "because" not in run(terminal=False)[1]
    assert run(terminal=False, verbose=True)[1].startswith("note: hm\n  because\n")


def test_a_closed_pipe_does_not_end_the_program() -> None:
    class Gone(Stream):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        make_console(Gone(terminal=False), {}).print("text")


@pytest.mark.parametrize("terminal", [True, False])
def test_json_is_json_everywhere(terminal: bool) -> None:
    answer, _ = run(terminal=terminal, environ={"FORCE_COLOR": "1"}, json=True, stats=False)
    lines = answer.splitlines()
    assert lines[0].startswith('{"event": "prompt", ')
    assert lines[-1].startswith('{"event": "finished", ')
    assert "\x1b" not in answer
