"""Anthropic's Messages API: what becomes of its bodies, and of answers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from specgen.serve.formats.answers import Answer
from specgen.serve.formats.messages import error_body, read_messages
from specgen.serve.formats.openai import read_chat
from specgen.serve.formats.request import BodyError, Request, with_call_form
from specgen.serve.formats.responses import read_response_request
from specgen.session.prompts.template import Message, ToolCall
from tests.helpers.formats import CHAT, MESSAGES, RESPONSES, written
from tests.helpers.templates import FAMILIES
from tests.long_runs.mutated_json import mutated

HERMES_TEMPLATE = FAMILIES["Hermes"] + "{{ enable_thinking }}"
USER = {"role": "user", "content": "Hi"}


def read(body: dict[str, Any]) -> Request:
    """The request that a body is for a model with tools."""
    (asked,) = read_messages(body)
    return with_call_form(asked, HERMES_TEMPLATE)


def turns(*messages: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    """The roles and the texts of the chat for these messages."""
    asked = read({"messages": [*messages], **more})
    return [(message.role, message.content) for message in asked.messages]


def test_what_an_agent_sends() -> None:
    asked = read(MESSAGES)
    calls = tuple(
        ToolCall(f"toolu_{n}", "Read", {"path": f"{name}.txt"}) for n, name in ((1, "a"), (2, "b"))
    )
    assert asked.messages == (
        Message("system", "Be short.\n\nUse tools."),
        Message("user", "Read a.txt\n\nAgent types: none"),
        Message("assistant", "I read it.", calls, reasoning="A file."),
        Message("tool", "7", tool_call_id="toolu_1", name="Read"),
        Message("tool", "Error: no file", tool_call_id="toolu_2", name="Read"),
        Message("user", "Go on."),
    )
    assert asked.tools is not None
    assert [function.name for function in asked.tools.functions] == ["Read"]
    assert (asked.tools.must_call, asked.tools.is_parallel) == (True, False)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.top_p) == (0.5, 5, 0.9)
    assert asked.generation.stop == ("\n\n", "END")
    assert asked.variables == {"enable_thinking": True}
    assert asked.splits_reasoning
    assert asked.warnings == (
        'tools[1]: ignored, since "web_search_20250305" does not run here',
        "tools: no grammar can enforce propertyNames of Read",
    )


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        ([USER], [], [("user", "Hi")]),
        ([USER, USER], None, [("user", "Hi\n\nHi")]),
        (
            [USER],
            "I read x-anthropic-billing-header",
            [("system", "I read x-anthropic-billing-header"), ("user", "Hi")],
        ),
        ([{"role": "system", "content": "T"}, USER], "S", [("system", "S\n\nT"), ("user", "Hi")]),
        (
            [USER, {"role": "assistant", "content": "A"}, {"role": "system", "content": "T"}],
            None,
            [("user", "Hi"), ("assistant", "A"), ("user", "T")],
        ),
    ],
)
def test_turns_of_one_role_become_one(
    messages: Any, system: Any, expected: list[tuple[str, str]]
) -> None:
    assert turns(*messages, system=system) == expected


def test_what_no_model_reads_is_named_and_the_text_goes_on() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    document = {"type": "document", "source": {"type": "text", "data": "a letter"}}
    result = {"type": "tool_result", "tool_use_id": "gone", "content": [image]}
    blocks = [result, image, document]
    call = {"type": "tool_use", "id": "1", "name": "a", "input": None}
    hosted = {"type": "server_tool_use", "id": "2", "name": "web_search", "input": {}}
    found = turns(
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [hosted, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
        {"role": "user", "content": None},
    )
    left_out = "[image left out: this model reads text]"
    first = f"[result of an earlier call]\n{left_out}\n\n{left_out}\n\na letter"
    assert found == [("user", first), ("assistant", ""), ("tool", "")]


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {}),
        ({"type": "of the next version"}, {}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: Any, variables: dict[str, bool]) -> None:
    assert read({"messages": [USER], "thinking": thinking}).variables == variables


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_becomes_a_grammar(field: str) -> None:
    form: Any = {"type": "json_schema", "schema": {"const": 7}}
    asked = read(
        {"messages": [USER], field: {"format": form} if field == "output_config" else form}
    )
    assert asked.generation.grammar is not None
    assert json.loads(asked.generation.grammar.text)["const"] == 7


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}]}, USER]},
            "messages[0].content[0].input",
        ),
        ({"tools": [{"type": "bash_20250124"}, {"name": "a", "input_schema": 1}]}, "tools[1].input_schema"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_that_it_has(change: Any, field: str) -> None:
    with pytest.raises(BodyError) as error:
        read({"messages": [USER], **change})
    assert error.value.field == field


def test_blocks_of_all_kinds_whole_and_as_events() -> None:
    asked = read({"messages": [USER], "tools": [{"name": "a"}]})
    call = '<tool_call>{"name": "a", "arguments": {"x": "é"}}</tool_call>'
    events, whole = written(asked, "<think>Th", "en</think>", "Yes", call, call)
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "told": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (told,) = (value for name, value in event["delta"].items() if name != "type")
            blocks[-1]["told"] += told
    assert [(block["type"], block["told"]) for block in blocks] == [
        ("thinking", "Then"),
        ("text", "Yes"),
        ("tool_use", '{"x": "é"}'),
        ("tool_use", '{"x": "é"}'),
    ]
    assert [block["id"] for block in blocks[2:]] == [block["id"] for block in whole["content"][2:]]
    assert len({block["id"] for block in blocks[2:]}) == 2
    assert [block.get("text", block.get("thinking")) for block in whole["content"][:2]] == [
        *("Then", "Yes")
    ]
    assert [block["input"] for block in whole["content"][2:]] == [{"x": "é"}] * 2
    assert sum(event["type"] == "content_block_stop" for event in events) == len(blocks)
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["input_tokens"] == 4
    assert last["usage"]["cache_read_input_tokens"] == 8
    assert last["usage"]["output_tokens"] == 2
    assert {name: whole[name] for name in last if name not in ("type", "delta")} == {
        name: value for name, value in last.items() if name not in ("type", "delta")
    }


@pytest.mark.parametrize(
    ("kind", "code", "told"),
    [
        ("server_error", "bug", "api_error"),
        ("service_unavailable_error", None, "overloaded_error"),
        ("rate_limit_error", "queue_full", "rate_limit_error"),
        ("invalid_request_error", "request_too_large", "request_too_large"),
    ],
)
def test_errors_have_the_types_of_the_api(kind: str, code: str | None, told: str) -> None:
    error = {"error": {"type": kind, "code": code, "message": "no", "param": None}}
    assert error_body(error) == {"type": "error", "error": {"type": told, "message": "no"}}


@pytest.mark.parametrize(
    ("read_body", "agent"),
    [(read_messages, MESSAGES), (read_response_request, RESPONSES), (read_chat, CHAT)],
)
@given(seed=st.integers(0, 10**9))
def test_any_body_is_read_or_refused(read_body: Any, agent: dict[str, Any], seed: int) -> None:
    """No other exception leaves a reader: it would be a 500."""
    try:
        body = from_json(mutated(agent, random.Random(seed)), allow_inf_nan=False)
    except ValueError:
        return
    if not isinstance(body, dict):
        return
    try:
        (asked,) = read_body(body)
        Answer(with_call_form(asked, HERMES_TEMPLATE))
        written(asked, "x")
    except BodyError as error:
        error.message.encode()
