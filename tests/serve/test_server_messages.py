"""Anthropic's Messages API through the server, as its own client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from specgen.serve.server.options import Limits, ServerOptions
from tests.helpers.server import Running, serves, tiny_server
from tests.serve.test_server_tools import LARGE, tool

TOOLS: Any = [
    {"name": each["name"], "description": "x", "input_schema": each["parameters"]}
    for each in (tool(name, "m", "ft")["function"] for name in ("weather", "length"))
]
TURNS: Any = [{"role": "user", "content": "the cat is in the"}]
#: What the template writes when the model may think, and when it may not.
THINKING = "{% if enable_thinking is not defined or enable_thinking %}<think>\n"
THINKING += "{% else %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATE = LARGE["chat_template"].replace(
    "assistant\n{% endif -%}", f"assistant\n{THINKING}{{% endif -%}}"
)
server = serves(**LARGE | {"chat_template": TEMPLATE})


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def client_of(server: Running, key: str = "none") -> anthropic.Anthropic:
    """A client that does not ask again by itself."""
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def text_of(answer: Message) -> str:
    """The text of an answer that is nothing else."""
    (block,) = answer.content
    assert block.type == "text"
    return block.text


def test_a_text_whole_and_streamed(client: anthropic.Anthropic, server: Running) -> None:
    asked: Any = {
        "model": "any",
        "max_tokens": 12,
        "messages": TURNS,
        "thinking": {"type": "disabled"},
    }
    whole = client.messages.create(**asked)
    assert whole.role == "assistant"
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
    assert whole.usage.output_tokens == 12
    with client.messages.stream(**asked) as stream:
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
        messages=TURNS,
        max_tokens=12,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert chat.json()["choices"][0]["message"]["content"] == text_of(whole)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "length"}])
def test_calls_whole_and_streamed(client: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {"model": "any", "max_tokens": 200, "messages": TURNS, "tools": TOOLS}
    asked["thinking"] = {"type": "disabled"}
    asked["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    whole = client.messages.create(**asked)
    (call,) = whole.content
    assert call.type == "tool_use"
    assert whole.stop_reason == "tool_use"
    assert call.name in (choice.get("name", "weather"), "length")
    assert call.input in ({"unit": "m"}, {"unit": "ft"})
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    (again,) = streamed.content
    assert again.type == "tool_use"
    assert (again.name, again.input) == (call.name, call.input)
    assert streamed.stop_reason == "tool_use"
    assert call.id != again.id
    # What came back goes in again, with a result.
    turns: Any = [*TURNS, {"role": "assistant", "content": whole.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7"}
    turns.append({"role": "user", "content": [result]})
    more = client.messages.create(model="any", max_tokens=4, tools=TOOLS, messages=turns)
    assert more.usage.output_tokens > 0


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "any",
        "max_tokens": 30,
        "messages": TURNS,
        "thinking": {"type": "disabled"},
    }
    text = text_of(client.messages.create(**asked))
    stop = text[5:8]
    whole = client.messages.create(**asked, stop_sequences=[stop, "never"])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", stop)
    assert text_of(whole) == text[: text.index(stop)]
    with client.messages.stream(**asked, stop_sequences=[stop]) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", stop)


def test_a_last_message_of_the_assistant_is_continued(
    server: Running, client: anthropic.Anthropic
) -> None:
    turns: Any = [*TURNS, {"role": "assistant", "content": "A b"}]
    (block,) = client.messages.create(model="any", max_tokens=6, messages=turns).content
    asked: dict[str, Any] = {"messages": turns, "max_tokens": 6}
    answer = server.post("/v1/chat/completions", **asked).json()
    assert answer["choices"][0]["message"]["content"] == block.text  # type: ignore[union-attr]
    prompt = server.post("/apply-template", messages=TURNS).json()["prompt"]
    continued = server.post("/apply-template", messages=turns).json()["prompt"]
    assert continued == f"{prompt}</think>\n\nA b"
    for how in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        other = server.post("/apply-template", **asked, **how).json()["prompt"]
        assert not other.endswith("A b")


def test_keys_and_other_errors(tmp_path: Path) -> None:
    options = ServerOptions(port=0, api_keys=("secret",), limits=Limits(body_bytes=2000))
    with tiny_server(tmp_path, options, chat_template=TEMPLATE) as server:
        with client_of(server, "secret") as client:
            assert client.messages.create(model="any", max_tokens=1, messages=TURNS).content
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
            client.messages.create(model="any", max_tokens=1, messages=TURNS)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        missing = server.http.get("/v1/messages/batches").json()
        assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
