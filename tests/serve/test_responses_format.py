"""Requests and answers in the form of the Responses API: what becomes of them in a chat, and back."""

from __future__ import annotations

import json
from typing import Any

import openai.types.responses as api
import pytest
from pydantic import TypeAdapter

from specgen.serve.formats.request import BodyError, Request, with_call_form
from specgen.serve.formats.responses import read_response_request
from specgen.session.prompts.template import Message, ToolCall
from tests.helpers.formats import RESPONSES, written
from tests.helpers.templates import FAMILIES

TEMPLATE = FAMILIES["Hermes"] + "{{ enable_thinking }}"
EVENT: TypeAdapter[Any] = TypeAdapter(api.ResponseStreamEvent)


def read(**body: Any) -> Request:
    """The internal request, as the server makes it."""
    asked = {"input": "hi", **body}
    (request,) = read_response_request(asked)
    return with_call_form(request, TEMPLATE)


def warned(**body: Any) -> list[str]:
    """The fields that warnings name."""
    return [each.partition(":")[0] for each in read(**body).warnings]


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


def called(identity: str, name: str = "a", arguments: str = "{}") -> dict[str, Any]:
    head = {"type": "function_call", "id": f"fc_{identity}", "call_id": identity}
    return {**head, "name": name, "arguments": arguments}


def returned(identity: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": identity, "output": output}


def test_messages_of_one_role_are_joined() -> None:
    items = [
        said("developer", "b"),
        {"type": "message", **said("system", "c", "d")},
        said("user", "e"),
        {"role": "user", "content": "f"},
        said("assistant", "g"),
        said("developer", "late"),
        said("user", "h"),
    ]
    assert read(instructions="a", input=items).messages == (
        Message("system", "a\n\nb\n\nc\nd"),
        Message("user", "e\n\nf"),
        Message("assistant", "g"),
        Message("user", "late\n\nh"),
    )


def test_what_an_agent_sends() -> None:
    """Thoughts, a text and calls are one turn; what runs elsewhere is left out."""
    asked = read(**RESPONSES)
    look, patch = ToolCall("call_1", "exec_command", {"cmd": "cat a.txt"}), {"input": "+b"}
    assert asked.messages == (
        Message("system", "Be brief.\n\nYou may run commands."),
        Message("user", "Look."),
        Message("assistant", "I look.", (look,), reasoning="I have to look."),
        Message("tool", "b", tool_call_id="call_1", name="exec_command"),
        Message("assistant", "", (ToolCall("call_2", "patch", patch),)),
        Message("tool", "done", tool_call_id="call_2", name="patch"),
    )
    assert asked.tools is not None
    assert [each.name for each in asked.tools.functions] == ["exec_command", "patch"]
    assert asked.tools.functions[0].description == "Runs a command."
    assert asked.tools.functions[1].parameters["required"] == ["input"]
    assert [each.name for each in asked.tools.callable] == ["exec_command"]
    assert (asked.tools.must_call, asked.tools.is_parallel) == (False, True)
    assert (asked.generation.max_tokens, asked.variables) == (4, {"enable_thinking": False})
    names = [each.partition(":")[0] for each in asked.warnings]
    assert {"input[8]", "tools[1].format", "tools[2]", "tools[3]", "truncation"} <= set(names)


def test_what_no_model_reads_is_named_and_the_text_goes_on() -> None:
    image = {"type": "input_image", "image_url": "data:..."}
    items = [
        returned("gone", [image]),
        {"role": "user", "content": [image, {"type": "input_text", "text": None}]},
    ]
    left_out = "[image left out: this model reads text]"
    (turn,) = read(input=items).messages
    assert turn == Message("user", f"[result of an earlier call]\n{left_out}\n\n{left_out}")


def test_thoughts_without_an_answer_are_left_out() -> None:
    lone = {"type": "reasoning", "summary": [], "encrypted_content": "another server's!"}
    short = {**lone, "summary": [{"type": "summary_text", "text": "short"}]}
    assert read(input=[lone, said("user", "x"), short]).messages == (Message("user", "x"),)
    said_too = read(input=[short, said("assistant", "x")]).messages
    assert said_too == (Message("assistant", "x", reasoning="short"),)


def test_a_tool_that_has_to_be_called() -> None:
    tools = [{"type": "function", "name": "weather"}, {"type": "custom", "name": "patch"}]
    named = read(tools=tools, tool_choice={"type": "custom", "name": "patch"}).tools
    assert named is not None
    assert ([each.name for each in named.callable], named.must_call) == (["patch"], True)
    assert read(tools=[{"type": "web_search"}], tool_choice="auto").tools is None


def test_what_is_ignored_is_mentioned() -> None:
    asks: dict[str, Any] = {
        "client_metadata": {"a": 1},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "truncation": "auto",
        "store": True,
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "detailed"},
        "invented": 1,
        "background": True,
        "n": 2,
        "top_logprobs": 2,
    }
    unknown = {*asks} - {"client_metadata", "prompt_cache_key", "service_tier"}
    assert set(warned(**asks)) == unknown
    nothing = {**dict.fromkeys(asks), "store": False}
    assert warned(**nothing) == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{**called("c"), "call_id": None}]}, "input[0]"),
        (
            {"tools": [{"type": "web_search"}, {"type": "function", "name": "a", "parameters": 3}]},
            "tools[1].parameters",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
    ids=str,
)
def test_what_would_change_the_meaning_is_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BodyError) as error:
        read(**body)
    assert error.value.field == field


# --- answers

TOOLS = [{"type": "custom", "name": "patch"}, {"type": "function", "name": "a"}]
TOKENS = (
    "<think>I ",
    "see</think>",
    "So",
    " be it",
    '<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": "+x"}}</tool_call>',
)


def events_of(*tokens: str, finish_reason: str = "stop", **body: Any) -> list[dict[str, Any]]:
    events, whole = written(read(tools=TOOLS, **body), *tokens, finish_reason=finish_reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(json.loads(json.dumps(event)))
    assert events[-1]["response"] == whole
    return events


def test_the_events_of_an_answer() -> None:
    events = events_of(
        *TOKENS,
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        best_of=2,
        temperature=0,
    )
    kinds = [event["type"].removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "{0}.delta", "{0}.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*text, *["reasoning_text.delta"] * 2, "reasoning_text.done", *end),
        *(*text, *["output_text.delta"] * 2, "output_text.done", *end),
        *(each.format("function_call_arguments") for each in call),
        *(each.format("custom_tool_call_input") for each in call),
        "completed",
    ]
    response = events[-1]["response"]
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert response["output"] == done
    assert [item["type"] for item in done] == [
        *("reasoning", "message", "function_call", "custom_tool_call")
    ]
    assert done[0]["content"][0]["text"] == "I see"
    assert done[1]["content"][0]["text"] == "So be it"
    assert done[2]["arguments"] == '{"n": 1}'
    assert done[3]["input"] == "+x"
    assert len({item["id"] for item in done}) == 4
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    assert response["usage"] == {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    assert [each.partition(":")[0] for each in response["warnings"]] == ["best_of"]
    assert (response["metadata"], response["status"]) == ({"a": "b"}, "completed")
    assert (response["temperature"], response["parallel_tool_calls"]) == (0, True)
    # What a client sends back is the turn as it was.
    (turn,) = read(input=done).messages
    first, second = (item["call_id"] for item in done[2:])
    calls = (ToolCall(first, "a", {"n": 1}), ToolCall(second, "patch", {"input": "+x"}))
    assert turn == Message("assistant", "So be it", calls, reasoning="I see")
    hidden = [{**done[0], "content": None}, *done[1:]]
    assert read(input=hidden).messages == (turn,)


def test_an_answer_that_was_cut_is_incomplete() -> None:
    last = events_of("So", finish_reason="length")[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert api.Response.model_validate(last["response"]).output_text == "So"


def test_an_empty_answer_has_an_item() -> None:
    (item,) = events_of()[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""


def test_a_failure_ends_the_events() -> None:
    make: Any = read().writer
    writer = make([read()], [""], identity="7", created=17, model="m")
    writer.begin(7)
    (event,) = writer.fail({"error": {"message": "lost", "type": "server_error"}})
    EVENT.validate_python(event)
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["message"] == "lost"
