"""Events as JSON Lines, and back."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.make_picture import read_events
from specgen.events import EVENT_TYPES, Event, to_json_object
from specgen.render.streams import JsonlRenderer, json_line
from tests.helpers.events import Script
from tests.render.test_render_text import TEXTS


def whole_run() -> list[Event]:
    script = Script().prompt().reading(8, 0.1, 0.05).plain("x").notice("note", "why")
    script.tree(["a", "b", "c"], (-1, -1, 0), (0,), " own").round(["y"], 1, "z")
    return script.finish("stop", "</s>").events


def test_every_event_is_a_line_and_comes_back_the_same() -> None:
    events = whole_run()
    assert {type(event) for event in events} == set(EVENT_TYPES)
    stream = io.BytesIO()
    with JsonlRenderer(stream) as renderer:
        for event in events:
            renderer.handle(event)
    lines = stream.getvalue().decode().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [event.event for event in events]
    assert list(read_events(lines)) == events


@given(TEXTS)
def test_any_text_is_one_line_of_json(text: str) -> None:
    line = json_line({"text": text})
    assert line.decode().splitlines() == [line.decode()[:-1]]
    assert json.loads(line) == {"text": text}
    assert not {"\x1b", "\x9b", "\x07", "\x7f"} & set(line.decode())


@given(st.floats())
def test_numbers_that_json_lacks_become_null(number: float) -> None:
    value = json.loads(
        json_line({"a": number, "b": (number, {"c": [number]})}),
        parse_constant=pytest.fail,
    )
    expected = number if abs(number) < float("inf") else None
    assert value == {"a": expected, "b": [expected, {"c": [expected]}]}


def test_a_line_that_holds_no_event_is_named() -> None:
    lines = [json_line(to_json_object(whole_run()[0])).decode(), "", "{}"]
    with pytest.raises(ValueError, match="line 3: not an event"):
        list(read_events(lines))
    with pytest.raises(ValueError, match="line 1: "):
        list(read_events(["no json"]))
