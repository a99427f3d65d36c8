"""Tool calls, responses and messages of the server, with OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from specgen.serve.server.options import Limits, ServerOptions
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
#: A server for calls. The marks are control tokens, which a text shows only where calls are looked
#: for.
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


@pytest.mark.parametrize("choice", [{"name": "weather"}, "auto"])
def test_functions_are_called_in_their_older_form(client: openai.OpenAI, choice: Any) -> None:
    """The form in which clients from before `tools` send and read calls, complete and streamed."""
    asked: Any = {
        "model": "any",
        "messages": MESSAGES,
        "functions": [each["function"] for each in TOOLS],
        "function_call": choice,
    }
    if choice == "auto":
        asked["extra_body"] = {"grammar": ""}
        answer = client.chat.completions.create(**asked, max_tokens=2)
        assert answer.choices[0].message.content
        return
    (given,) = client.chat.completions.create(**asked).choices
    assert given.finish_reason == "function_call"
    assert (given.message.content, given.message.tool_calls) == (None, None)
    assert given.message.function_call is not None
    assert given.message.function_call.name == "weather"
    arguments = given.message.function_call.arguments
    assert json.loads(arguments)["unit"] in ("C", "F")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls = [each.choices[0].delta.function_call for each in chunks]
    first, *others = filter(None, calls)
    assert (first.name, first.arguments) == ("weather", "")
    assert "".join(each.arguments or "" for each in others) == arguments
    assert chunks[-1].choices[0].finish_reason == "function_call"
    told = [
        *MESSAGES,
        {"role": "assistant", "function_call": given.message.function_call.model_dump()},
        {"role": "function", "name": "weather", "content": "hot"},
    ]
    asked["messages"] = told
    assert client.chat.completions.create(**asked).choices[0].message.function_call


GUIDES: list[tuple[str, Any, set[str]]] = [
    ("regex", "[ab]/[cd]", {"a/c", "a/d", "b/c", "b/d"}),
    ("regex", "^x$", {"x"}),
    ("choice", ["a cat", 'a "dog"\n'], {"a cat", 'a "dog"\n'}),
    ("json", {"enum": [7, 8]}, {"7", "8"}),
    ("grammar", 'root ::= "a" | "b"', {"a", "b"}),
]


@pytest.mark.parametrize(("kind", "value", "texts"), GUIDES)
def test_guided_answers_follow_their_guide(
    server: Running, kind: str, value: Any, texts: set[str]
) -> None:
    for body in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
        asked = {**body, "temperature": 1.0, "seed": 3}
        chat = server.post("/v1/chat/completions", messages=MESSAGES, **asked).json()
        assert chat["choices"][0]["message"]["content"] in texts
        assert "warnings" not in chat
        text = server.post("/v1/completions", prompt="the cat", **asked).json()
        assert text["choices"][0]["text"] in texts


def test_a_schema_without_end_is_refused_or_ignored_in_words(server: Running) -> None:
    schema: Any = {"$ref": "#"}
    found = server.post("/v1/chat/completions", messages=MESSAGES, json_schema=schema)
    assert found.status_code == 400
    assert "$ref leads back to it" in found.json()["error"]["message"]
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"messages": MESSAGES, "response_format": form, "max_tokens": 2}
    assert "without end" in server.post("/v1/chat/completions", **asked).json()["warnings"][0]


def test_a_model_without_tools_is_a_clear_error(tmp_path: Path) -> None:
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
        thought = plain["choices"][0]["message"]["content"].strip()
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


# --- Anthropic's messages

SCHEMAS: Any = [
    {"name": each["name"], "description": "x", "input_schema": each["parameters"]}
    for each in (tool(name, "m", "ft")["function"] for name in ("weather", "length"))
]


@pytest.fixture
def messaging(server: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def client_of(server: Running, key: str = "none") -> anthropic.Anthropic:
    """A client that does not retry."""
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def text_of(answer: anthropic.types.Message) -> str:
    """The text of an answer that is nothing else."""
    (block,) = answer.content
    assert block.type == "text"
    return block.text


def test_a_text_whole_and_streamed(messaging: anthropic.Anthropic, server: Running) -> None:
    asked: Any = {"model": "any", "max_tokens": 12, "messages": MESSAGES}
    whole = messaging.messages.create(**asked)
    assert whole.role == "assistant"
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == 12
    with messaging.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert text_of(streamed) == text_of(whole)
    assert streamed.stop_reason == "max_tokens"
    # The prompt is in the cache now, but for its last token at least.
    cached = streamed.usage.cache_read_input_tokens or 0
    assert cached > 0
    assert cached + streamed.usage.input_tokens == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    chat = server.post(
        "/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=12,
    )
    assert chat.json()["choices"][0]["message"]["content"] == text_of(whole)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "length"}])
def test_calls_whole_and_streamed(messaging: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {"model": "any", "max_tokens": 200, "messages": MESSAGES, "tools": SCHEMAS}
    asked["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = messaging.messages.create(**asked)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert whole.stop_reason == "tool_use"
    assert call.name in (choice.get("name", "weather"), "length")
    assert call.input in ({"unit": "m"}, {"unit": "ft"})
    with messaging.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    (again,) = streamed.content
    assert again.type == "tool_use"
    assert (again.name, again.input) == (call.name, call.input)
    assert streamed.stop_reason == "tool_use"
    assert call.id != again.id
    # What came back goes in again, with a result.
    turns: Any = [*MESSAGES, {"role": "assistant", "content": whole.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    turns.append({"role": "user", "content": [result]})
    more = messaging.messages.create(model="any", max_tokens=4, tools=SCHEMAS, messages=turns)
    assert more.usage.output_tokens > 0


def test_a_stop_sequence_is_named(messaging: anthropic.Anthropic) -> None:
    asked: Any = {"model": "any", "max_tokens": 30, "messages": MESSAGES}
    text = text_of(messaging.messages.create(**asked))
    stop = text[5:8]
    whole = messaging.messages.create(**asked, stop_sequences=[stop, "never"])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert text_of(whole) == text[: text.index(stop)]
    with messaging.messages.stream(**asked, stop_sequences=[stop]) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)


def test_a_last_message_of_the_assistant_is_continued(
    server: Running, messaging: anthropic.Anthropic
) -> None:
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "A b"}]
    (block,) = messaging.messages.create(model="any", max_tokens=6, messages=turns).content
    asked: dict[str, Any] = {"messages": turns, "max_tokens": 6}
    answer = server.post("/v1/chat/completions", **asked).json()
    assert answer["choices"][0]["message"]["content"] == block.text  # type: ignore[union-attr]
    prompt = server.post("/apply-template", messages=MESSAGES).json()["prompt"]
    continued = server.post("/apply-template", messages=turns).json()["prompt"]
    assert continued == f"{prompt}A b"
    for how in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        other = server.post("/apply-template", **asked, **how).json()["prompt"]
        assert not other.endswith("A b")


def test_a_thread_that_is_not_kept_is_sent_again_whole(server: Running) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
    assert server.post("/v1/messages", **asked, thread={"type": "create"}).status_code == 200
    going_on = {"type": "continue", "previous_message_id": "msg_1"}
    refused = server.post("/v1/messages", **asked, thread=going_on)
    assert refused.status_code == 404
    # The package looks for this code.
    assert refused.json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_models_in_its_form(messaging: anthropic.Anthropic, server: Running) -> None:
    """Its SDK has the same paths for models as OpenAI's."""
    listed = messaging.models.list(limit=1, after_id="target")
    (model,) = listed
    assert (listed.first_id, listed.last_id, listed.has_more) == ("target", "target", False)
    # The SDK itself does not check what it receives.
    assert anthropic.types.ModelInfo.model_validate(model.to_dict()) == model
    assert (model.id, model.display_name, model.type) == ("target", "target", "model")
    assert model.max_input_tokens == server.engine.n_ctx
    for name in ("target", "claude-opus-4-8", "org/claude:latest"):
        assert messaging.models.retrieve(name) == model
    found = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").models.retrieve("gpt-6")
    assert (found.id, found.object) == ("target", "model")


def test_keys_and_other_errors(tmp_path: Path) -> None:
    options = ServerOptions(port=0, api_keys=("secret",), limits=Limits(body_bytes=2000))
    with tiny_server(tmp_path, options, chat_template=TEMPLATE) as server:
        with client_of(server, "secret") as client:
            assert client.messages.create(model="any", max_tokens=1, messages=MESSAGES).content
            long: Any = [{"role": "user", "content": "x" * 3000}]
            with pytest.raises(anthropic.APIStatusError) as error:
                client.messages.create(model="any", max_tokens=1, messages=long)
            assert error.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
            long = [{"role": "user", "content": "x " * 700}]
            with pytest.raises(
                anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 256 "
            ):
                client.messages.create(model="any", max_tokens=1, messages=long)
        with (
            client_of(server, "wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            client.messages.create(model="any", max_tokens=1, messages=MESSAGES)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with (
            client_of(server, "wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            client.models.list()
        assert refused.value.body["type"] == "error"  # type: ignore[index]
        missing = server.http.get("/v1/messages/batches").json()
        assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
