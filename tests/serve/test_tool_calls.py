"""Tool calls: in the text of a model, and in the grammars of calls."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from specgen.errors import UsageError
from specgen.events import FinishedEvent
from specgen.options import SamplerOptions
from specgen.serve.formats.answers import Answer
from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.messages import read_messages
from specgen.serve.formats.model_adaptation import with_call_form
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.serve.formats.responses import read_response_request
from specgen.serve.formats.single_request import read_request
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tool_calls.function import Function
from specgen.serve.formats.tool_calls.grammar import calls_grammar
from specgen.serve.formats.tool_calls.parser import ToolCallParser
from specgen.serve.formats.tool_calls.values import TypedValues
from tests.helpers.formats import FINISHED, written
from tests.helpers.sessions import answered, opened
from tests.helpers.templates import CONTROLS, FAMILIES, UNKNOWN, calls_as_written, made_of
from tests.tiny import TinyConfig, write_tiny_model

FORMS = {name: form_of(template) for name, template in FAMILIES.items()}


def form(name: str) -> CallForm:
    found = FORMS[name]
    assert found is not None
    return found


HERMES, LLAMA, MISTRAL, GRANITE, LFM = map(form, ("Hermes", "Llama", "Mistral", "Granite", "LFM"))
HARMONY = "{{ tools }}<|channel|>functions."
USER = {"role": "user", "content": "x"}
TEXT, NUMBERS = {"type": "string"}, {"type": "array"}
FUNCTIONS = [
    Function("weather", "", {"properties": {"city": TEXT, "days": {"type": "integer"}}}),
    Function("add", "", {"properties": {"numbers": NUMBERS}}),
    Function("add.more/far:away-", "", {"properties": {"note": TEXT}}),
]
CALL = '{"name": "weather", "arguments": {"city": "K\\u00f6ln } </tool_call>"}}'
ADD = '{"name": "add", "arguments": {"numbers": [1, 2.5, {"a": null}]}}'
WEATHER = ("weather", {"city": "Köln } </tool_call>"})
CUT_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K'
SUM = ("add", {"numbers": [1, 2.5, {"a": None}]})

#: Answers, what is content in them, and their calls.
ANSWERS: dict[str, tuple[CallForm, str, str | None, list[tuple[str, Any]]]] = {
    "one": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", None, [WEATHER]),
    "after text": (
        HERMES,
        f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n",
        "Let me see.",
        [WEATHER],
    ),
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
    # Qwen2.5-Coder copies the braces from its template's instructions.
    "in two braces": (HERMES, f"{{{ADD}}}", None, [SUM]),
    "in two braces, of which three are closed": (HERMES, f"{{{CALL}}}}}\n", None, [WEATHER]),
    "in two braces on their lines": (HERMES, f"{{\n {ADD}\n}}", None, [SUM]),
    "in two braces, fenced": (HERMES, f"```json\n{{{ADD}}}\n```", None, [SUM]),
    "in the tags of the tools": (
        HERMES,
        f"<tools>\n{ADD}\n{CALL}\n</tools>",
        None,
        [SUM, WEATHER],
    ),
    "in the tags of the tools, unclosed": (HERMES, f"<tools>{ADD}", None, [SUM]),
    "in the tags of the tools, then text": (
        HERMES,
        f"<tools>\n{ADD}\n</tools>\nSo.",
        "\nSo.",
        [SUM],
    ),
    "marked, in the tags of the tools": (LLAMA, f"<|python_tag|><tools>{ADD}</tools>", None, [SUM]),
    "marked, fenced": (LLAMA, f"<|python_tag|>```json\n{ADD}\n```", None, [SUM]),
    "in two braces, then text": (HERMES, f"{{{ADD}}}\n\nSo.", "\n\nSo.", [SUM]),
    "with a brace too many": (LLAMA, f"{ADD}}}", None, [SUM]),
    "with a brace too many, then text": (HERMES, f"{ADD}}}\n\nSo.", "\n\nSo.", [SUM]),
    "with a brace too many, fenced": (HERMES, f"```json\n{ADD}}}\n```", None, [SUM]),
    "in two braces, before a fence": (HERMES, f"{{{ADD}}}\n```", None, [SUM]),
    "before a fence and text": (HERMES, f"{ADD}\n```\nSo.", "\nSo.", [SUM]),
    "before the end of the tools": (HERMES, f"{ADD}{CALL}\n</tools>", None, [SUM, WEATHER]),
    "before code": (HERMES, f"{ADD}\n```py\nx\n```", "\n```py\nx\n```", [SUM]),
    "a template in two braces": (HERMES, "{{ name }}, {{ more }}", "{{ name }}, {{ more }}", []),
    "an object of objects": (HERMES, '{"a": {"b": {}}}', '{"a": {"b": {}}}', []),
    "a bare list": (HERMES, f"[{ADD}, {CALL}]", None, [SUM, WEATHER]),
    "a bare list of one": (LLAMA, f" [ {ADD} ]\n", None, [SUM]),
    "a bare list without its mark": (MISTRAL, f"[{ADD}, {CALL}]", None, [SUM, WEATHER]),
    "a bare list, fenced": (HERMES, f"```json\n[{ADD}]\n```", None, [SUM]),
    "a bare list where others are Python": (LFM, f"[{ADD}]", None, [SUM]),
    "Llama": (
        LLAMA,
        '{"name": "add", "parameters": {"numbers": []}}',
        None,
        [("add", {"numbers": []})],
    ),
    "Llama marked": (LLAMA, f"<|python_tag|>{CALL}", None, [WEATHER]),
    "Mistral": (MISTRAL, f"[TOOL_CALLS] [{CALL}, {ADD}]", None, [WEATHER, SUM]),
    "Granite": (GRANITE, f"So:<|tool_call|>[{ADD}]", "So:", [SUM]),
    "nothing between": (MISTRAL, f"[TOOL_CALLS] [{CALL}{ADD}]", None, [WEATHER, SUM]),
    "a line each": (
        HERMES,
        f"<tool_call>\n{CALL}\n{ADD}\n</tool_call> So.",
        " So.",
        [WEATHER, SUM],
    ),
    "bare, one by one": (LLAMA, f"{CALL}; {ADD},\n{ADD}", None, [WEATHER, SUM, SUM]),
    "bare, then text": (LLAMA, f'{ADD}; {{"a": 1}}', '; {"a": 1}', [SUM]),
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
    '<tool_call>\n{"name": "weather", "arguments": ',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": 1}</tool_call>',
    "<tool_call>[]</tool_call>",
    '{"a": 1}',
    ' {"a": ',
    "```json\n{}\n```\n",
    "```python\nprint({})\n```",
    "<tools>\n{}\n</tools>",
    "<tool",
    f"So: {ADD}",
    "``",
    '[{"a": 1}, 3]',
    " [ ",
    "<tool_call>" + "[" * 5_000,
    '<tool_call>{"name": "add", "arguments": "no object"}</tool_call>',
]


#: An argument that looks like the marks around it, as far as a form can still tell them apart.
CITY = 'Köln "} </tool_call>\n  <b> & \\ {x} '
WRITTEN: dict[str, str] = {
    "Devstral": '[TOOL_CALLS]weather[ARGS]{"city": "K", '
    '"days": 3}[TOOL_CALLS]add[ARGS]{"numbers": []}',
    "Kimi": '<|section|><|one|>functions.weather:0<|args|>{"city": "K", "days": 3}<|/one|>'
    '<|one|>functions.add:1<|args|>{"numbers": []}<|/one|><|/section|>',
    "Command": '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": {"city": "K", '
    '"days": 3}},{"tool_call_id": "1", "tool_name": "add", "parameters": {"numbers": []}}\n'
    "]<|END_ACTION|>",
    "Apertus": '<|tools|>[{"weather": {"city": "K", "days": 3}}, '
    '{"add": {"numbers": []}}]<|/tools|>',
    "Qwen-Coder": "<tool_call>\n<function=weather>\n<parameter=city>\nK\n</parameter>\n"
    "<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=numbers>\n"
    "[]\n</parameter>\n"
    "</function>\n</tool_call>",
    "GLM": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K</arg_value>\n"
    "<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add<arg_key>numbers</arg_key><arg_value>"
    "[]</arg_value></tool_call>",
    "MiniMax": '<calls>\n<invoke name="weather">\n<parameter name="city">K</parameter>\n'
    '<parameter name="days">3'
    '</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="numbers">[]</parameter>\n'
    "</invoke>\n</calls>",
    "DeepSeek": '<calls>\n<call name="weather">\n<arg name="city" string="true">K</arg>\n'
    '<arg name="days" string="false">'
    '3</arg>\n</call>\n<call name="add">\n<arg name="numbers" string="false">[]</arg>\n</call>\n'
    "</calls>",
    "R1": '<calls><one>weather\n```json\n{"city": "K", "days": 3}\n```</one>\n<one>add\n'
    '```json\n{"numbers": []}\n```'
    "</one></calls>",
    "LFM": "<|tool_call_start|>[weather(city='K', days=3), add(numbers=[])]<|tool_call_end|>",
}


#: Calls of which the first lacks its mark, as several families write them, and the second has it.
WITHOUT_MARK: dict[str, str] = {
    "Qwen-Coder": WRITTEN["Qwen-Coder"].removeprefix("<tool_call>\n"),
    "Kimi": WRITTEN["Kimi"].removeprefix("<|section|>").removesuffix("<|/section|>"),
    "MiniMax": WRITTEN["MiniMax"].removeprefix("<calls>\n"),
    "DeepSeek": WRITTEN["DeepSeek"].removeprefix("<calls>\n"),
}


#: Answers that are cut, with their content and calls: no part of an unfinished call is content.
CUT: dict[str, tuple[CallForm, str, str, list[tuple[str, Any]]]] = {
    "in the arguments": (HERMES, CUT_CALL, "", []),
    "after text": (HERMES, f"Let me see.\n\n{CUT_CALL}", "Let me see.", []),
    "in the second": (HERMES, f"<tool_call>{ADD}</tool_call>\n{CUT_CALL}", "", [SUM]),
    "in the closing mark": (HERMES, f"<tool_call>\n{ADD}\n</tool_c", "", [SUM]),
    "in the next mark": (HERMES, f"<tool_call>\n{ADD}\n</tool_call>\n<tool_", "", [SUM]),
    "after the mark": (HERMES, "Well <tool_call>\n", "Well", []),
    "in a bare call": (HERMES, '{"name": "add", "arguments": {"numbers": [1', "", []),
    "in a fence": (HERMES, '```json\n{"name": "add", "ar', "", []),
    "in a list": (MISTRAL, f"[TOOL_CALLS] [{ADD}, ", "", [SUM]),
    "broken before a call": (
        HERMES,
        f'<tool_call>{{"n", <tool_call>{ADD}</tool_call>',
        '<tool_call>{"n",',
        [SUM],
    ),
    "an object": (HERMES, '{"name": "Ann", "age": ', '{"name": "Ann", "age": ', []),
    "a text": (HERMES, "a < b, <tool", "a < b, <tool", []),
}  # fmt: skip


def with_tools(template: str) -> ParsedRequest:
    """A request with all functions, to a model with this template."""
    tools = [each.definition for each in FUNCTIONS]
    (asked,) = read_chat({"messages": [USER], "tools": tools})
    return with_call_form(asked, template)


def streamed(
    form: CallForm, pieces: list[str], *, one_only: bool = False, **how: bool
) -> tuple[str, list[tuple[str, str, bool]], list[str]]:
    """The content of an answer that comes in pieces, its calls with their arguments as they were
    sent, and whether these are whole, and the ids of the calls.
    """
    parser = ToolCallParser(form, FUNCTIONS, one_only=one_only)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(**how)
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    begun = [delta for delta in deltas if delta.kind == "call"]
    assert [call.number for call in begun] == list(range(parser.n_calls))
    calls = []
    for call in begun:
        added = [each for each in deltas if each.kind == "arguments" and each.number == call.number]
        assert not any(each.is_end for each in added[:-1])
        is_whole = bool(added) and added[-1].is_end
        calls.append((call.name, "".join(each.text for each in added), is_whole))
    return content, calls, [call.identity for call in begun]


def parsed(
    form: CallForm, pieces: list[str], **how: bool
) -> tuple[str, list[tuple[str, Any]], list[str]]:
    """The content, the complete calls and the ids of an answer that comes in pieces."""
    content, calls, ids = streamed(form, pieces, **how)
    return content, [(name, json.loads(text)) for name, text, is_whole in calls if is_whole], ids


def cuts(text: str) -> list[list[str]]:
    """The text in one piece, cut in two at every character, and in single characters."""
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
def test_a_partial_call_is_not_sent_as_content(name: str) -> None:
    form, text, content, calls = CUT[name]
    for pieces in cuts(text):
        assert parsed(form, pieces, is_cut=True)[:2] == (content, calls), pieces


def test_text_is_sent_as_soon_as_it_cannot_become_a_call() -> None:
    parser = ToolCallParser(HERMES, FUNCTIONS)
    assert parser.feed("Hi you ") == [Delta("content", "Hi you")]
    assert parser.feed("<tool") == []
    assert parser.feed("s> ") == [Delta("content", " <tools>")]
    assert parser.finish() == [Delta("content", " ")]


#: By family: a call up to the middle of a text, and what is known of its arguments there.
BEGUN: dict[str, tuple[str, str]] = {
    "Hermes": (CUT_CALL, '{"city": "K'),
    "Llama": ('{"name": "weather", "parameters": {"days": 3, "city": "K', '{"days": 3, "city": "K'),
    "Mistral": ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "K', '{"city": "K'),
    "Granite": ('<|tool_call|>[{"name": "weather", "arguments": {"city": "K', '{"city": "K'),
    **{name: (WRITTEN[name][: WRITTEN[name].index("K") + 1], '{"city": "K') for name in WRITTEN},
}


@pytest.mark.parametrize("name", BEGUN)
def test_a_call_is_streamed_while_it_is_written(name: str) -> None:
    text, known = BEGUN[name]
    parser = ToolCallParser(form(name), FUNCTIONS)
    begun, *added = [delta for piece in text for delta in parser.feed(piece)]
    assert (begun.kind, begun.name, begun.text) == ("call", "weather", "")
    assert {delta.kind for delta in added} == {"arguments"}
    assert "".join(delta.text for delta in added) == known
    assert [delta.text for delta in parser.feed("öln, so ") + parser.feed("far")] == [
        "öln, so ",
        "far",
    ]
    _, *ended = parser.feed(" &"), *parser.finish()  # the model ends its turn here
    assert (ended[-1].text, ended[-1].is_end) == ('"}', True)


#: Arguments that are not JSON, as models write them, and what they become.
MENDED: dict[str, Any] = {
    '{"a": NaN, "b": -Infinity, "c": 1e999}': ({"a": "NaN", "b": "-Infinity", "c": "1e999"}),
    '{"a": "C:\\path\\new \\u12"}': {"a": "C:\\path\new \\u12"},
    '{"a": "\\ud83d\\ude00 \\ud800"}': {"a": "😀 �"},
    '{"a": "two\nlines\tand a tab"}': {"a": "two\nlines\tand a tab"},
    '{"a": "say "hi" now", "b": 1}': {"a": 'say "hi" now', "b": 1},
    '{"a": 1, "b": [1, 2,],}': {"a": 1, "b": [1, 2]},
    '{"a": True, b: None, "c": }': {"a": True, "b": None},
    '{"a": {"b": "x"': {"a": {"b": "x"}},
    '{"a": ["x"': {"a": ["x"]},
    '{"a": {"b": [1}': {"a": {"b": [1]}},
    "{": {},
    '{"a': {},
}


@pytest.mark.parametrize("written", MENDED)
def test_broken_arguments_are_sent_as_json(written: str) -> None:
    for closing in ("}</tool_call>", "</tool_call>", ""):
        text = f'<tool_call>{{"name": "add", "arguments": {written}{closing}'
        for pieces in cuts(text):
            _, calls, _ = parsed(HERMES, pieces)
            assert calls == [("add", MENDED[written])], (text, pieces)


_WORDS = r"""
<tool_call> </tool_call> [TOOL_CALLS] [ARGS] <calls> </calls>
<function=weather> <parameter=city> </parameter> </function>
<![CDATA[ ]]> <arg_key> </arg_key> <arg_value> </arg_value>
<|tool_call_start|>[ ]<|tool_call_end|> ``` city days weather add " ' \ \u00e9 \ud83d
{ } [ ] ( ) , : = 3 NaN true é 😀
"""
_MARKS = [
    *_WORDS.split(),
    " ",
    "\n",
    "```json\n",
    "\n</parameter>\n",
    "<function=weather>\n",
    "<parameter=city>\n",
]
_MARKS += ['{"name": "weather", "arguments": ', '{"city": "']


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from([*BEGUN]),
    place=st.integers(0, 200),
    junk=st.lists(st.sampled_from(_MARKS), max_size=12).map("".join),
    has_rest=st.booleans(),
    data=st.data(),
    is_cut=st.booleans(),
)
def test_the_stream_does_not_depend_on_how_the_text_is_split(
    name: str, place: int, junk: str, has_rest: bool, data: st.DataObject, is_cut: bool
) -> None:
    """Whatever a model writes: once, in single characters, and in any pieces."""
    call = WRITTEN.get(name, BEGUN[name][0] + '"}}')
    text = call[:place] + junk + (call[place:] if has_rest else "")
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    content, calls, _ = streamed(form(name), [text], is_cut=is_cut)
    assert streamed(form(name), list(text), is_cut=is_cut)[:2] == (content, calls)
    assert streamed(form(name), pieces, is_cut=is_cut)[:2] == (content, calls)
    for _, arguments, is_whole in calls:
        assert is_whole or is_cut
        if is_whole:
            assert isinstance(from_json(arguments, allow_inf_nan=False), dict)


def test_the_first_call_may_end_the_answer() -> None:
    for pieces in cuts(f"So <tool_call>{CALL}</tool_call>\n<tool_call>{ADD}</tool_call> Z"):
        content, calls, _ = parsed(HERMES, pieces, one_only=True)
        assert (content, calls) == ("So", [WEATHER])
    _, calls, _ = parsed(MISTRAL, [f"[TOOL_CALLS] [{ADD}, {CALL}]"], one_only=True)
    assert calls == [SUM]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_is_found_by_rendering_the_template(name: str) -> None:
    assert FORMS[name] is not None


@pytest.mark.parametrize("template", ["", "{{ messages }}", UNKNOWN, "{{ tools.x.y }}", "{% tools"])
def test_a_template_with_an_unknown_form_has_none(template: str) -> None:
    assert form_of(template) is None


def test_a_template_may_only_say_how_calls_begin() -> None:
    for mark, name in (("<tool_call>", "Hermes"), ("<|tool_call|>", "Granite")):
        for found in (form_of("{{ tools }} " + mark), form_of("{{ tools }}", mark.__eq__)):
            assert found is not None
            assert found.opening == form(name).opening
            assert found.closing == form(name).closing
    described = with_tools("{{ tools }} " + FAMILIES["Hermes"])
    assert described.warnings == ()
    (told,) = with_tools(FAMILIES["Hermes"].replace("tools", "x")).warnings
    assert "does not describe them" in told


@pytest.mark.parametrize(
    ("name", "written"), [*WRITTEN.items(), *WITHOUT_MARK.items()], ids=lambda each: each[:10]
)
def test_calls_of_each_family_are_read_however_they_are_cut(name: str, written: str) -> None:
    expected = [("weather", {"city": "K", "days": 3}), ("add", {"numbers": []})]
    for before, after in (("", ""), ("Let me see.", ""), ("", " Done")):
        text = before + written + after
        for pieces in cuts(text):
            content, calls, _ = parsed(form(name), pieces)
            assert (content.strip(), calls) == ((before + after).strip(), expected), pieces


def test_a_list_of_something_else_is_content() -> None:
    for pieces in cuts(text := '[TOOL_CALLS][[ 3 "a", {"name": "add"}]'):
        assert parsed(MISTRAL, pieces) == (text, [], [])


@pytest.mark.parametrize("name", WRITTEN)
def test_no_part_of_a_text_is_a_broken_call(name: str) -> None:
    text = WRITTEN[name]
    for end in range(len(text)):
        for is_cut in (True, False):
            content, calls, _ = parsed(form(name), [text[:end]], is_cut=is_cut)
            assert [call[0] for call in calls] == ["weather", "add"][: len(calls)]
            assert not is_cut or not calls or calls[0][1]["city"] == "K"
            assert is_cut or calls or content == text[:end]


@pytest.mark.parametrize("name", ["Qwen-Coder", "GLM", "MiniMax", "DeepSeek", "Mistral"])
def test_the_last_value_of_a_call_may_lack_what_ends_it(name: str) -> None:
    text = WRITTEN.get(
        name, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "K", "days": 3'
    )
    text = text[: text.index("3") + 1]
    for pieces in cuts(text):
        expected = [("weather", {"city": "K", "days": 3})]
        assert parsed(form(name), pieces)[:2] == ("", expected), pieces


def test_texts_without_quotes_are_as_they_are_and_others_by_their_types() -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n"
        + CITY
        + "\n</parameter>\n<parameter=days>\n"
        "many\n</parameter>\n</function>\n</tool_call>"
    )
    for pieces in cuts(text):
        _, calls, _ = parsed(form("Qwen-Coder"), pieces)
        assert calls == [("weather", {"city": CITY, "days": "many"})]
    bare = "<tool_call>\n<function=weather>\n<parameter=city>\n42\n</parameter>\n</function>"
    assert parsed(form("Qwen-Coder"), [bare])[1] == [("weather", {"city": "42"})]
    for types, value, read in (
        (["string", "null"], "null", None),
        (["string", "null"], "7", "7"),
        (["string", "integer"], "7", 7),
        (["string", "integer"], "7.5", "7.5"),
        (["string", "object"], '{"a": 1}', {"a": 1}),
        (["object", "string"], "{no json", "{no json"),
    ):
        assert json.loads(TypedValues({}).json_of(value, {"type": types})) == read


def test_a_text_may_be_allowed_without_being_the_type() -> None:
    """Pydantic describes an optional text as a choice of two schemas, and an enumeration may have
    no type.
    """
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    for value, schema, read in (
        ("1.10", optional, "1.10"),
        ("true", optional, "true"),
        ("null", optional, None),
        ("1.10", {"oneOf": [TEXT, {"enum": ["a"]}]}, "1.10"),
        ("1.10", {"enum": ["1.10", "1.2"]}, "1.10"),
        ("1", {"enum": ["1", 1]}, 1),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ('{"a": 1}', {"anyOf": [TEXT, {"$ref": "#/$defs/other"}]}, {"a": 1}),
        ("5", {"anyOf": [TEXT, {}]}, 5),
        ("<![CDATA[a]]>", optional, "a"),
        ("a <![CDATA[b]]>", optional, "a <![CDATA[b]]>"),
    ):
        assert json.loads(TypedValues({}).json_of(value, schema)) == read, (value, schema)


def test_values_have_the_types_of_the_definitions_that_their_schemas_refer_to() -> None:
    """Pydantic describes enumerations and nested objects as references."""
    parameters = {
        "$defs": {
            "Code": {"type": "string", "enum": ["1", "2"]},
            "Place": {"type": "object", "properties": {"code": {"$ref": "#/$defs/Code"}}},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
        }
    }
    code = {"$ref": "#/$defs/Code"}
    place = {"$ref": "#/$defs/Place"}
    null = {"type": "null"}
    for value, schema, read in (
        ("1", code, "1"),
        ("1", {"anyOf": [code, null]}, "1"),
        ("null", {"anyOf": [code, null]}, None),
        ("<code>1</code>", place, {"code": "1"}),
        ("<code>1</code>", {"anyOf": [place, null]}, {"code": "1"}),
        ("<item><code>1</code></item>", {"type": "array", "items": place}, [{"code": "1"}]),
        ("1", {"$ref": "#/$defs/Missing"}, 1),
        ("1", {"$ref": "#/$defs/Loop"}, "1"),
        ("1", {"type": [{}]}, "1"),
    ):
        assert json.loads(TypedValues(parameters, "<").json_of(value, schema)) == read, schema


def test_gpt_oss_names_the_channel_of_a_call_anywhere() -> None:
    for head in (
        "<|channel|>commentary to=functions.weather <|constrain|>json",
        " to=functions.weather<|channel|>analysis",
        " to=functions.weather<|channel|>analysis <|constrain|>json",
        "<|channel|>analysis to=functions.weather",
    ):
        for pieces in cuts(f'{head}<|message|>{{"city": "K"}}<|call|>'):
            answer = Answer(with_tools(HARMONY), "<|start|>assistant")
            answer.feed(pieces)
            answer.finish(FINISHED)
            assert [(each.name, each.text) for each in answer.calls] == [
                ("weather", '{"city": "K"}')
            ]


#: What a model writes in open thoughts, and the thoughts and the calls of that.
IN_THOUGHTS: dict[str, tuple[str, str, int]] = {
    "at the end": (f"Why. <tool_call>{CALL}</tool_call>\n", "Why.", 1),
    "two": (f"<tool_call>{CALL}</tool_call>\n<tool_call>{ADD}</tool_call>", "", 2),
    "text after it": (
        f"A <tool_call>{CALL}</tool_call> B",
        f"A <tool_call>{CALL}</tool_call> B",
        0,
    ),
    "the end of thoughts after it": (
        f"A <tool_call>{CALL}</tool_call></think>Hi",
        f"A <tool_call>{CALL}</tool_call>",
        0,
    ),
    "one, and one at the end": (
        f"<tool_call>{CALL}</tool_call> B <tool_call>{ADD}</tool_call>",
        f"<tool_call>{CALL}</tool_call> B",
        1,
    ),
    "a broken one": ("A <tool_call>{", "A <tool_call>{", 0),
}


@pytest.mark.parametrize("name", IN_THOUGHTS)
def test_a_call_at_the_end_of_open_thoughts_is_one(name: str) -> None:
    text, thought, n_calls = IN_THOUGHTS[name]
    for pieces in cuts(text):
        answer = Answer(with_tools(FAMILIES["Hermes"]), "<think>\n")
        told = [delta for piece in pieces for delta in answer.feed([piece])]
        told += answer.finish(FINISHED)
        assert sum(delta.kind == "call" for delta in told) == n_calls
        assert (answer.text("thought").strip(), len(answer.calls)) == (thought, n_calls), pieces
        assert answer.text("content") == ("Hi" if "Hi" in text else "")


def test_lists_and_objects_may_be_tags_within_tags() -> None:
    edit = {"properties": {"old": TEXT, "line": {"type": "integer"}, "notes": {"items": TEXT}}}
    numbers = {"type": "array", "items": {"items": {"type": "number"}}}
    optional = {"anyOf": [{"type": "null"}, {"type": "array", "items": TEXT}]}
    properties = {
        "path": TEXT,
        "edits": {"items": edit},
        "table": numbers,
        "none": NUMBERS,
        "labels": optional,
        "no_labels": optional,
        "no_options": {"type": ["object", "null"]},
        "any_options": {"type": "object", "properties": None},
    }
    found = form("MiniMax-3")
    given: dict[str, Any] = {
        "path": "a </item> b",
        "edits": [{"old": "12\n", "line": 3, "notes": ["5", "x"]}, {"line": 4}],
        "table": [[1, 2.5], [3]],
        "none": [],
        "labels": ["5", "x"],
        "no_labels": [],
        "no_options": {},
        "any_options": {"k": 1},
        "other": {"k": {"j": "v"}, "b": True},
    }
    text = calls_as_written(FAMILIES["MiniMax-3"], ("edit", given), ("edit", {}))
    for pieces in ([text], list(text)):
        parser = ToolCallParser(found, [Function("edit", "", {"properties": properties})])
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        assert not [delta for delta in deltas if delta.kind == "content"]
        arguments = ["".join(each.text for each in deltas if each.number == n) for n in (0, 1)]
        assert [json.loads(each) for each in arguments] == [given, {}]


def test_names_of_tools_may_have_dots_and_slashes() -> None:
    text = (
        "<tool_call>add.more/far:away-<arg_key>note</arg_key><arg_value>7</arg_value></tool_call>"
    )
    for pieces in cuts(text):
        assert parsed(form("GLM"), pieces)[1] == [("add.more/far:away-", {"note": "7"})]


def test_an_id_may_be_left_out() -> None:
    template = FAMILIES["Devstral"].replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
    found = form_of(template)
    assert found is not None
    for between in ("[CALL_ID]abc12[ARGS]", "[ARGS]"):
        for pieces in cuts(f'[TOOL_CALLS]weather{between}{{"city": "K"}}'):
            assert parsed(found, pieces)[1] == [("weather", {"city": "K"})]


# --- streams

PIECES = (
    '<tool_call>{"name": "a", "arguments": {"input": "',
    "one",
    "\\ntwo",
    '"}',
    "}</tool_call>",
)


def sent(chunk: dict[str, Any]) -> tuple[str, str]:
    """The part of a call in a chunk of any API: its name, and a piece of its arguments."""
    if "choices" in chunk:
        calls = chunk["choices"][0]["delta"].get("tool_calls", [{"function": {}}])
        found = calls[0]["function"]
        return found.get("name", ""), found.get("arguments", "")
    if chunk["type"] in ("content_block_start", "response.output_item.added"):
        return (chunk.get("content_block") or chunk["item"])["name"], ""
    if chunk["type"] == "content_block_delta":
        return "", chunk["delta"]["partial_json"]
    return "", chunk["delta"] if chunk["type"].endswith(("arguments.delta", "input.delta")) else ""


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("read", "asked", "is_custom"),
    [
        (
            read_chat,
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a"}}]},
            False,
        ),
        (read_messages, {"messages": [USER], "tools": [{"name": "a"}]}, False),
        (
            read_response_request,
            {"input": "x", "tools": [{"type": "function", "name": "a"}]},
            False,
        ),
        (read_response_request, {"input": "x", "tools": [{"type": "custom", "name": "a"}]}, True),
    ],
)
def test_calls_stream_on_all_apis(read: Any, asked: Any, is_custom: bool, is_cut: bool) -> None:
    """A call that was cut off is never complete, so nobody can run it by mistake."""
    (request,) = read(asked)
    request = with_call_form(request, FAMILIES["Hermes"])
    tokens, reason = (PIECES[:3], "length") if is_cut else (PIECES, "stop")
    chunks, whole = written(request, *tokens, finish_reason=reason)
    told = [each for each in map(sent, chunks) if any(each)]
    pieces = (
        ["one", "\ntwo"]
        if is_custom
        else ['{"input": "', "one", "\\ntwo", *([] if is_cut else ['"}'])]
    )
    assert told == [("a", ""), *(("", piece) for piece in pieces)]
    text = json.dumps(whole)
    if is_cut:
        assert '"length"' in text or '"max_tokens"' in text or '"max_output_tokens"' in text
        assert '"a"' not in text or '"status": "incomplete"' in text
    else:
        assert "one\\\\ntwo" in text or "one\\ntwo" in text


# --- grammars of calls: tiny models write at random what these allow

#: Templates, and the control tokens of their models.
TEMPLATES = {name: (FAMILIES[name], CONTROLS.get(name, ())) for name in FAMILIES}
TEMPLATES["not control"] = (FAMILIES["Hermes"], ())
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}


def request(template: str, **body: Any) -> ParsedRequest:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
        for name in ("weather", "heat")
    ]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **body}
    read = read_request("chat", {"max_tokens": 400, **asked})
    return with_call_form(read, template)


def answers(
    folder: Path, asked: ParsedRequest, controls: tuple[str, ...], n: int = 3
) -> list[FinishedEvent]:
    """Answers of a model that chooses at random."""
    config = TinyConfig(
        logit_scale=1.0, control_scale=1.0, n_ctx_train=2048, control_tokens=controls
    )
    target = write_tiny_model(folder / "target.gguf", config)
    found: list[FinishedEvent] = []
    for seed in range(n):
        sampler = SamplerOptions(temperature=1.0, seed=seed)
        with opened(target, "ngram", sampler=sampler, generation=asked.generation) as loaded:
            found.append(answered(loaded, "the cat"))
    return found


def said(asked: ParsedRequest, text: str) -> dict[str, Any]:
    message: dict[str, Any] = written(asked, text)[1]["choices"][0]["message"]
    return message


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_required_call_is_a_call(tmp_path: Path, name: str) -> None:
    template, controls = TEMPLATES[name]
    asked = request(template, tool_choice="required", parallel_tool_calls=False)
    for answer in answers(tmp_path, asked, controls):
        message = said(asked, answer.text)
        assert message["content"] is None, answer.text
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in ("weather", "heat")
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["unit"] in ("C", "F")
        assert isinstance(arguments["exact"], bool)
        assert answer.finish_reason == "stop"


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_schemas_of_arguments_do_not_crash(name: str) -> None:
    odd: list[Any] = [
        3,
        None,
        True,
        {"type": 5},
        {"enum": 3},
        {"type": ["string", 1]},
        {"anyOf": [7]},
    ]
    for schema in odd:
        parameters = {"properties": {"a": schema, "b": {}}, "required": None}
        with contextlib.suppress(UsageError):
            grammar, _ = calls_grammar(
                form(name), [Function("f", "", parameters)], is_parallel=True
            )
            assert grammar.text


def test_an_answer_is_a_call_or_follows_its_own_grammar(tmp_path: Path) -> None:
    template, controls = TEMPLATES["Hermes"]
    schema = {"enum": ["yes", "no"]}
    asked = request(template, json_schema=schema, parallel_tool_calls=False)
    # Six answers are enough for both to occur.
    messages = [said(asked, answer.text) for answer in answers(tmp_path, asked, controls, n=6)]
    contents = {message["content"] for message in messages if not message.get("tool_calls")}
    assert any(message.get("tool_calls") for message in messages)
    assert contents
    assert contents <= {'"yes"', '"no"'}


def test_the_text_after_a_repaired_one_is_complete() -> None:
    call = '{"name": "weather", "arguments": {"city": "a\\\\p and C:\\p"}}'
    for before in ("", "See C:\\q. "):
        for pieces in cuts(f"{before}<tool_call>{call}</tool_call> Done"):
            content, calls, _ = parsed(HERMES, pieces)
            assert (content, calls) == (
                f"{before.rstrip()} Done",
                [("weather", {"city": "a\\p and C:\\p"})],
            )


MARKS = ["<a>", "[CALLS]", "<|x|>", "<x:call>", "functools["]
AFTER = st.lists(st.sampled_from([*MARKS[:3], "\n", " ", ":", "functions.", "é"]), max_size=3)
ENDS = st.lists(st.sampled_from(["</a>", "[/CALLS]", "<|/x|>", "\n", "]"]), max_size=2).map("".join)
AROUND = [
    ("", ""),
    ("<b>", "</b>"),
    ("<b>\n", "\n</b>"),
    ("[C]", ""),
    ("functions.", ""),
    ("<i=", "</i>"),
]


@settings(max_examples=100, deadline=None)
@given(
    opening=st.tuples(st.sampled_from(MARKS), AFTER.map("".join)).map("".join),
    between=st.sampled_from(["", "\n", ", ", "<|n|>", ";"]),
    closing=ENDS,
    around=st.sampled_from(AROUND),
    after=AFTER.map("".join),
    kind=st.sampled_from(["object", "json", "pairs"]),
)
def test_a_detected_form_parses_what_its_template_writes(
    around: tuple[str, str], kind: str, **marks: str
) -> None:
    assume(kind != "json" or marks["after"])
    template = made_of({**marks, "before": around[0], "last": around[1]}, kind)
    found = form_of(template)
    if found is None:
        return
    wanted: list[tuple[str, Any]] = [
        ("weather", {"city": "Köln & <b>", "days": 3}),
        ("add", {"numbers": [1, [2]]}),
    ]
    text = calls_as_written(template, *wanted)
    for pieces in ([text], list(text)):
        content, read, _ = parsed(found, pieces)
        assert (content.strip(), read) == ("", wanted)
