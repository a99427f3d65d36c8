"""Calls of tools and responses through the server, as OpenAI's own client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.server import Running, serves, tiny_server
from tests.tiny.config import CHATML_TEMPLATE

#: ChatML that tells of tools, and writes calls between marks.
TEMPLATE = """{%- for tool in tools or [] -%}
TOOL {{ tool | tojson }}
{% endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
#: A server for calls. The marks are control tokens, which a text shows only where calls are looked for.
LARGE: dict[str, Any] = {
    "chat_template": TEMPLATE,
    "control_tokens": ("<tool_call>", "</tool_call>"),
    "n_ctx_train": 2048,
    "n_ctx": 1024,
    "max_tokens": 200,
}
MESSAGES: Any = [{"role": "user", "content": "the cat is in the"}]


def tool(name: str, *values: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": list(values)}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: Any = [tool("weather", "C", "F"), tool("length", "m", "ft")]


server = serves(**LARGE)


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client as client:
        yield client


def called(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_whole_and_streamed(client: openai.OpenAI, seed: int) -> None:
    asked: Any = {
        "model": "any",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": seed,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    ((name, arguments),) = called(choice.message.tool_calls)
    assert arguments["unit"] in {"weather": ("C", "F"), "length": ("m", "ft")}[name]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls = [call for each in chunks for call in each.choices[0].delta.tool_calls or []]
    assert (calls[0].function.name, calls[0].function.arguments) == (name, "")
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    pieces = [call.function.arguments for call in calls]
    assert (len(pieces) > 2, json.loads("".join(pieces))) == (True, arguments)
    assert not any(each.choices[0].delta.content for each in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_model_without_tools_says_so(tmp_path: Path) -> None:
    with tiny_server(tmp_path, chat_template=CHATML_TEMPLATE) as server, server.client as client:
        asked = {"model": "any", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 3}
        answer = server.http.post("/v1/chat/completions", json=asked).json()
        assert "calls stay text" in answer["warnings"][0]
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**asked, tool_choice="required")
        assert error.value.param == "tool_choice"


# --- the path of the Responses API

TEXT = "the cat is in the"
TOOL: Any = {"type": "function", "strict": True, **tool("weather", "C", "F")["function"]}


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
