"""Calls of tools in what a model says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specgen.serve.formats.tool_calls import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    CallForm,
    Delta,
    ToolCallParser,
    form_of,
)

NAMES = ("weather", "add")
CALL = '{"name": "weather", "arguments": {"city": "K\\u00f6ln } </tool_call>"}}'
ADD = '{"name": "add", "arguments": {"numbers": [1, 2.5, {"a": null}]}}'
WEATHER = ("weather", {"city": "Köln } </tool_call>"})
CUT_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K'
SUM = ("add", {"numbers": [1, 2.5, {"a": None}]})

#: Answers, what is content in them, and their calls.
ANSWERS: dict[str, tuple[CallForm, str, str | None, list[tuple[str, Any]]]] = {
    "one": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", None, [WEATHER]),
    "behind text": (HERMES, f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [WEATHER]),
    "two": (
        HERMES,
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        None,
        [WEATHER, SUM],
    ),
    "text between": (
        HERMES,
        f"A <tool_call>{CALL}</tool_call> and <tool_call>{ADD}</tool_call> Z",
        "A and Z",
        [WEATHER, SUM],
    ),
    "not closed": (HERMES, f"<tool_call>{CALL}", None, [WEATHER]),
    "bare": (HERMES, f" {ADD}\n", None, [SUM]),
    "fenced": (HERMES, f"```json\n{ADD}\n```", None, [SUM]),
    "Llama": (LLAMA, '{"name": "add", "parameters": {"numbers": []}}', None, [("add", {"numbers": []})]),
    "Llama marked": (LLAMA, f"<|python_tag|>{CALL}", None, [WEATHER]),
    "Mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}, {ADD}]", None, [WEATHER, SUM]),
    "Granite": (GRANITE, f"So:<|tool_call|>[{ADD}]", "So:", [SUM]),
    "broken before a call": (
        HERMES,
        f'<tool_call>{{"name": "add", <tool_call>{ADD}</tool_call>',
        '<tool_call>{"name": "add",',
        [SUM],
    ),
}  # fmt: skip

#: Answers without a call: all of them is content.
TEXTS = [
    "",
    " \n",
    "Hello.\n\n",
    "a < b, <tool, <tool_call",
    "<tool_call>\nno object\n</tool_call> ",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "K',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": 1}</tool_call>',
    "<tool_call>[]</tool_call>",
    '{"a": 1}',
    ' {"a": ',
    "```json\n{}\n```\n",
    "```python\nprint({})\n```",
    f"So: {ADD}",
    "``",
    "<tool_call>" + "[" * 5_000,
]


#: Answers that are cut, with their content and calls: no part of an unfinished call is content.
CUT: dict[str, tuple[CallForm, str, str, list[tuple[str, Any]]]] = {
    "in the arguments": (HERMES, CUT_CALL, "", []),
    "behind text": (HERMES, f"Let me see.\n\n{CUT_CALL}", "Let me see.", []),
    "in the second": (HERMES, f"<tool_call>{ADD}</tool_call>\n{CUT_CALL}", "", [SUM]),
    "in the closing mark": (HERMES, f"<tool_call>\n{ADD}\n</tool_c", "", [SUM]),
    "in the next mark": (HERMES, f"<tool_call>\n{ADD}\n</tool_call>\n<tool_", "", [SUM]),
    "behind the mark": (HERMES, "Well <tool_call>\n", "Well", []),
    "in a bare call": (HERMES, '{"name": "add", "arguments": {"numbers": [1', "", []),
    "in a fence": (HERMES, '```json\n{"name": "add", "ar', "", []),
    "in a list": (MISTRAL, f"[TOOL_CALLS] [{ADD}, ", "", []),
    "broken before a call": (HERMES, f'<tool_call>{{"n", <tool_call>{ADD}</tool_call>', '<tool_call>{"n",', [SUM]),
    "an object": (HERMES, '{"name": "Ann", "age": ', '{"name": "Ann", "age": ', []),
    "a text": (HERMES, "a < b, <tool", "a < b, <tool", []),
}  # fmt: skip


def parsed(
    form: CallForm, pieces: list[str], *, one_only: bool = False, **how: bool
) -> tuple[str, list[tuple[str, Any]], list[str]]:
    """The content, the calls and the ids of an answer that comes in pieces."""
    parser = ToolCallParser(form, NAMES, one_only=one_only)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(**how)
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    told = [delta for delta in deltas if delta.kind == "call"]
    assert [call.number for call in told] == list(range(parser.n_calls))
    calls = [(call.name, json.loads(call.text)) for call in told]
    return content, calls, [call.identity for call in told]


def cuts(text: str) -> list[list[str]]:
    """The text whole, cut in two at every character, and in single characters."""
    two = [[text[:place], text[place:]] for place in range(1, len(text))]
    return [[text], *(two if len(text) < 1000 else []), list(text)]


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    form, text, content, calls = ANSWERS[name]
    for pieces in cuts(text):
        found, found_calls, ids = parsed(form, pieces)
        assert (found or None, found_calls) == (content, calls), pieces
        assert len(set(ids)) == len(calls)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_nothing_is_lost_of_a_text_without_calls(text: str) -> None:
    for pieces in cuts(text):
        assert parsed(HERMES, pieces) == (text, [], []), pieces[:2]


@pytest.mark.parametrize("name", CUT)
def test_what_there_is_of_a_call_is_no_content(name: str) -> None:
    form, text, content, calls = CUT[name]
    for pieces in cuts(text):
        assert parsed(form, pieces, is_cut=True)[:2] == (content, calls), pieces


def test_text_is_told_as_soon_as_it_cannot_become_a_call() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed("Hi you ") == [Delta("content", "Hi you")]
    assert parser.feed("<tool") == []
    assert parser.feed("s> ") == [Delta("content", " <tools>")]
    assert parser.finish() == [Delta("content", " ")]


def test_a_call_is_told_when_its_object_is_complete() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed(f"<tool_call>{ADD[:-1]}") == []
    (call,) = parser.feed("}")
    assert (call.kind, call.name) == ("call", "add")


def test_the_first_call_may_end_the_answer() -> None:
    for pieces in cuts(f"So <tool_call>{CALL}</tool_call>\n<tool_call>{ADD}</tool_call> Z"):
        content, calls, _ = parsed(HERMES, pieces, one_only=True)
        assert (content, calls) == ("So", [WEATHER])
    _, calls, _ = parsed(MISTRAL, [f"[TOOL_CALLS] [{ADD}, {CALL}]"], one_only=True)
    assert calls == [SUM]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", MISTRAL),
        ("{% if tools %}[TOOL_CALLS][ARGS]{% endif %}", None),
        ("{% if tools %}<|tool_call|>{% endif %}", GRANITE),
        ("{{ tools }}<tool_call><function=", None),
        ("""{{ tools }} ipython '"parameters": '""", LLAMA),
        ("{{ tools }} unknown", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_the_form_is_that_of_the_template(template: str, form: CallForm | None) -> None:
    assert form_of(template) == form
