"""The path of the Responses API, as OpenAI's own client sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.helpers.server import tiny_server
from tests.serve.test_server_tools import TEMPLATE, client, server

__all__ = ["client", "server"]

TEXT = "the cat is in the"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}


def test_a_text_whole_and_streamed_is_the_one_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": "any", "input": TEXT, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    chat = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": TEXT}], max_tokens=20
    )
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.error) == ("incomplete", None)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    final = events[-1].response
    assert final.output_text == whole.output_text
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens == 20


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_and_its_result(client: openai.OpenAI, streams: bool) -> None:
    asked: Any = {"model": "any", "tools": [TOOL], "temperature": 1.0, "seed": 2}
    extra = {"seed": asked.pop("seed")}
    turns: list[Any] = [
        {"role": "developer", "content": "Help."},
        {"role": "user", "content": TEXT},
    ]
    choice: Any = "required"
    if streams:
        with client.responses.stream(
            **asked, input=turns, tool_choice=choice, parallel_tool_calls=False, extra_body=extra
        ) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(
            **asked, input=turns, tool_choice=choice, parallel_tool_calls=False, extra_body=extra
        )
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["unit"] in ("C", "F")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    item: Any = {name: getattr(call, name) for name in ("type", "call_id", "name", "arguments")}
    second = client.responses.create(**asked, input=[*turns, item, result], max_output_tokens=9)
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > response.usage.input_tokens // 2


def test_a_form(client: openai.OpenAI) -> None:
    class Form(pydantic.BaseModel):
        colour: Literal["red", "blue"]

    found = client.responses.parse(model="any", input=TEXT, text_format=Form).output_parsed
    assert isinstance(found, Form)


def test_thoughts_are_apart(tmp_path: Path) -> None:
    """The template opens the thinking block, and this model never closes it."""
    template = TEMPLATE.replace("|im_start|>assistant\n", "|im_start|>assistant\n<think>\n")
    messages = [{"role": "user", "content": TEXT}]
    with tiny_server(tmp_path, chat_template=template) as server, server.client as client:
        chat = {"messages": messages, "max_tokens": 9}
        plain, split = (
            server.post("/v1/chat/completions", **chat, reasoning_format=form).json()
            for form in ("none", "auto")
        )
        thought = plain["choices"][0]["message"]["content"]
        message = split["choices"][0]["message"]
        assert message["reasoning_content"] == thought
        assert message["content"] == ""
        assert split["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9
        for streams in (False, True):
            asked: Any = {"model": "any", "input": TEXT, "max_output_tokens": 9}
            response: Any = client.responses.create(**asked, stream=streams)
            if streams:
                response = list(response)[-1].response
            (item,) = response.output
            assert item.type == "reasoning"
            assert item.content[0].text == thought
            assert response.usage.output_tokens_details.reasoning_tokens == 9
