"""Answers in pipes, files and simple terminals, as text and as JSON Lines; and the choice of a
renderer.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.cli.output import Output
from specgen.events import EVENT_TYPES, DraftedEvent, Event, TokenKind, to_json_object
from specgen.render.rows import pens
from specgen.render.streams import TextRenderer, make_console
from specgen.system.files import to_line
from tests.helpers.events import Script
from tests.render.test_render_text import TEXTS


class Stream(io.TextIOWrapper):
    """A standard stream, which may be a terminal."""

    def __init__(self, *, terminal: bool = False, encoding: str = "utf-8") -> None:
        self.raw_bytes = io.BytesIO()
        self._terminal = terminal
        super().__init__(self.raw_bytes, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        return self.raw_bytes.getvalue().decode(self.encoding)


def script() -> Script:
    """A short run."""
    made = Script().prompt().plain("The").round([" cat", " sat"], 1, " lay")
    return made.notice("hm", "because").finish()


def run(
    played: Script,
    *,
    terminal: bool = False,
    encoding: str = "utf-8",
    environ: dict[str, str] | None = None,
    **options: Any,
) -> tuple[str, str]:
    """What a run writes to stdout and stderr."""
    stdout, stderr = Stream(terminal=terminal, encoding=encoding), Stream()
    environ = {"TERM": "xterm-256color", **(environ or {})}
    in_chat = options.pop("in_chat", False)
    with Output(**options).renderer(stdout, stderr, environ, in_chat=in_chat) as renderer:
        for event in played.events:
            renderer.handle(event)
    return stdout.text, stderr.text


@given(st.lists(st.tuples(st.lists(TEXTS, max_size=3), st.integers(0, 3), TEXTS), max_size=6))
def test_a_pipe_gets_exactly_the_answer(rounds: list[tuple[list[str], int, str]]) -> None:
    played = Script().prompt()
    for drafted, n_accepted, own in rounds:
        played.round(drafted, min(n_accepted, len(drafted)), own)
    answer, rest = run(played.finish())
    assert answer == played.text.encode("utf-8", "replace").decode()
    assert rest == ""


def test_a_pipe_gets_each_round_at_once() -> None:
    class Recorder(io.BytesIO):
        flushed = b""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Recorder()
    renderer = TextRenderer(stream)
    for event in Script().prompt().plain("one").round([" two", " x"], 1, " three").events:
        renderer.handle(event)
    assert stream.flushed == b"one two three"


def test_a_pipe_gets_no_codes_and_stderr_the_rest() -> None:
    assert run(script()) == ("The cat lay", "note: hm\n")
    assert run(script(), verbose=True)[1] == "note: hm\n  because\n"
    assert run(script(), quiet=True)[1] == ""
    for environ in ({"FORCE_COLOR": "1"}, {"COLUMNS": "7"}, {"COLUMNS": "0"}, {"COLUMNS": "²"}):
        assert run(script(), environ=environ)[0] == "The cat lay"


def test_a_log_has_a_line_every_few_seconds_during_a_prefill() -> None:
    prefill = Script().prompt(1000)
    for number in range(1, 9):
        prefill.prefill(100 * number, 2.0 * number, 20 - 2.0 * number)
    lines = [f"prefilling the prompt: {n}0% of 1000 tokens, {20 - 2 * n} s left" for n in (3, 6)]
    assert run(prefill) == ("", "".join(f"{line}\n" for line in lines))
    assert run(prefill, quiet=True) == ("", "")
    answer, rest = run(prefill, terminal=True)  # there the status line says it
    assert rest == ""
    assert "prefilling" in answer


def test_a_terminal_gets_the_live_view() -> None:
    answer, _ = run(script(), terminal=True)
    assert "\x1b[?25l" in answer
    assert answer.endswith("\x1b[?25h")
    assert "\x1b[4;32mcat\x1b[0m" in answer
    assert "\x1b[9;31m sat\x1b[0m" in answer
    plain, _ = run(script(), terminal=True, environ={"NO_COLOR": "1"})  # the attributes stay
    assert "\x1b[4mcat\x1b[0m" in plain
    assert "\x1b[2;9m sat\x1b[0m" in plain


@pytest.mark.parametrize("columns", ["", "0", "00", "-1", "²", "many"])
def test_a_width_that_cannot_be_is_ignored(columns: str) -> None:
    stream = Stream()
    make_console(stream, {"COLUMNS": columns}).print("some words")
    assert stream.text == "some words\n"


def test_without_colours_no_two_kinds_of_tokens_look_the_same() -> None:
    console = make_console(Stream(terminal=True), {"NO_COLOR": "1", "TERM": "xterm"})
    assert console.no_color
    codes = pens(console)
    kinds = [*get_args(TokenKind), "rejected"]
    assert len({codes[kind] for kind in kinds}) == len(kinds) == 6
    assert not any(re.search(r"\b(3|9)\d\b", before) for before, _ in codes.values())


@pytest.mark.parametrize("term", ["dumb", "unknown", "DUMB"])
def test_a_simple_terminal_gets_plain_text_and_a_line_feed(term: str) -> None:
    simple: dict[str, Any] = {"terminal": True, "environ": {"TERM": term}}
    assert run(script(), **simple) == ("The cat lay\n", "note: hm\n")
    told = Script().plain("a").notice("one").notice("two").plain("b").finish()
    assert run(told, **simple) == ("a\nb\n", "note: one\nnote: two\n")
    odd = Script().plain("a\x1b[2J").plain("\r").plain("\nb\tc\x07 漢").finish()
    assert run(odd, encoding="latin-1", **simple)[0] == "a?[2J\nb\tc? ?\n"


# --- JSON Lines


def whole_run() -> list[Event]:
    made = Script().prompt().prefill(8, 0.1, 0.05).plain("x").notice("note", "why")
    made.tree(["a", "b", "c"], (-1, -1, 0), (0,), " own").round(["y"], 1, "z")
    return made.finish("stop", "</s>").events


@pytest.mark.parametrize("terminal", [True, False])
def test_every_event_is_a_line_and_comes_back_the_same(terminal: bool) -> None:
    events = whole_run()
    assert {type(event) for event in events} == set(EVENT_TYPES)
    options: dict[str, Any] = {"environ": {"FORCE_COLOR": "1"}, "json": True, "stats": False}
    answer, _ = run(Script(events=events), terminal=terminal, **options)
    told = [json.loads(line) for line in answer.splitlines()]
    assert told == [json.loads(json.dumps(to_json_object(event))) for event in events]


@given(TEXTS)
def test_any_text_is_one_line_of_json(text: str) -> None:
    line = to_line({"text": text})
    assert line.decode().splitlines() == [line.decode()[:-1]]
    assert json.loads(line) == {"text": text}
    assert not {"\x1b", "\x9b", "\x07", "\x7f"} & set(line.decode())


@given(st.floats())
def test_numbers_that_json_lacks_become_null(number: float) -> None:
    line = to_line({"a": number, "b": (number, {"c": [number]})})
    expected = number if abs(number) < float("inf") else None
    value = json.loads(line, parse_constant=pytest.fail)
    assert value == {"a": expected, "b": [expected, {"c": [expected]}]}


# --- rounds


def test_rounds_have_a_line_each_in_a_pipe() -> None:
    made = (
        Script().prompt().because("prefill", "the draft must read for 1 s").plain("The").plain(" ")
    )
    drafted, parents = [" cat", " dog", " sat", " lay"], (-1, -1, 0, 0)
    made.because("model", "it pays").round([" big", " red"], 1, " old")
    made.tree(drafted, parents, (0,), " ran").round(["\n"], 1, "").finish()
    written, _ = run(made, show="rounds")
    assert written.split("\n")[3:] == [
        "round      ms  tokens",
        "    1   100.0       1  · The",
        "                       nothing drafted: the draft must read for 1 s",
        "    2   100.0       1  · ␣",
        "    3   100.0       2  ✓ big  ✗ red  → old  by model",
        "    4   100.0       2  ✓ cat  ✗ sat  → ran",
        "                       └ ✗ dog",
        "                         └ ✗ lay",
        "    5   100.0       2  ✓ ↵  + (token 99, no text)",
        "",
    ]


def test_rounds_show_the_bound_the_second_draft_and_drafts_that_agree() -> None:
    made = Script().prompt().because("threshold", "a draft's probability must be at least 0.30")
    made.round([" a"], 1, " b").because("threshold", "a draft's probability must be at least 0.27")
    made.tree([" c", " d", " e"], (-1, 0, 0), (0,), " f").finish()
    n_walks = iter((1, 3, 2, 1))
    events = [
        replace(
            event,
            nodes=tuple(replace(node, n_walks=next(n_walks)) for node in event.nodes),
            guesses="the second draft guessed 2 of the draft's tokens, 1 of them right",
        )
        if isinstance(event, DraftedEvent)
        else event
        for event in made.events
    ]
    made.events = events
    assert run(made, show="rounds")[0].split("\n")[4:] == [
        "    1   100.0       2  ✓ a  + b  a draft's probability must be at least 0.30  by model",
        "                       the second draft guessed 2 of the draft's tokens, 1 of them right",
        "    2   100.0       2  ✓ c (3 drafts)  ✗ d (2 drafts)  → f  ≥ 0.27",
        "                         └ ✗ e",
        "",
    ]
