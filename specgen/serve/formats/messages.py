"""Anthropic's Messages API: reads its requests, and writes answers in its form from those of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.chat_answer import own_figures
from specgen.serve.formats.fields import (
    AnswerBody,
    AnswerFormat,
    Body,
    BodyError,
    Fields,
    Part,
    Tool,
    ToolChoice,
    parse,
    shown,
    text_of,
)
from specgen.serve.formats.request import Conversation, Request, read_tools, request_of
from specgen.session.prompts.template import Message

#: The start of a part that Claude Code puts first. It differs from request to request, so that no prefix of
#: the prompt would be in the cache.
_BILLING = "x-anthropic-billing-header"

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
#: Types of errors that have another name in Anthropic's API.
_ERRORS = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
PING: Mapping[str, str] = {"type": "ping"}


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Block(Part):
    type: str
    thinking: str = ""
    #: A call.
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    #: The result of a call.
    tool_use_id: str | None = None
    content: _Blocks = []
    is_error: bool = False


_Blocks = Annotated[list[_Block], BeforeValidator(_as_blocks)]


class _Message(Fields):
    role: Literal["assistant", "system", "user"]
    content: _Blocks


class _Thinking(Body):
    type: str


class _OutputConfig(Body):
    effort: str | None = None
    format: AnswerFormat | None = None


class _Body(AnswerBody):
    system: _Blocks = []
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = _OutputConfig()
    #: An older place for the format.
    output_format: AnswerFormat | None = None

    format_field: ClassVar[str] = "output_config.format"


_Block.model_rebuild()


def read_messages(
    body: Mapping[str, Any], sampling: SamplerOptions, generation: GenerationOptions
) -> tuple[Request, ...]:
    """Read a body; `sampling` and `generation` give the defaults of its fields. Raise `BodyError`."""
    asked = parse(_Body, body)
    warnings: list[str] = []
    choice, thinking, config = asked.tool_choice, asked.thinking, asked.output_config
    alone = choice is not None and choice.disable_parallel_tool_use
    # With other types, ``adaptive`` for example, the model decides.
    thinks = {"enabled": True, "disabled": False}.get(thinking.type if thinking else "")
    request = request_of(
        "chat",
        asked,
        sampling,
        generation,
        form=config.format or asked.output_format,
        messages=_messages(asked),
        tools=read_tools(asked.tools, choice, warnings, is_parallel=not alone),
        warnings=warnings,
        variables=asked.variables(config.effort, thinks),
        splits_reasoning=True,
        writer=MessageWriter,
    )
    return (request,)


def _messages(asked: _Body) -> tuple[Message, ...]:
    found = Conversation()
    for number, block in enumerate(asked.system):
        text = text_of("system", [block])
        if number or not text.startswith(_BILLING):
            found.join_text("system", text)
    for number, turn in enumerate(asked.messages):
        where = f"messages[{number}].content"
        if turn.role == "assistant":  # consecutive ones stay apart
            found.add(Message("assistant", ""))
        for at, block in enumerate(turn.content):
            _add_block(found, turn, f"{where}[{at}]", block)
    if not found.messages:
        raise BodyError("messages", "they are empty")
    if found.messages[-1].role == "assistant":
        raise BodyError("messages", "the last one is the assistant's: end with a user's message")
    return tuple(found.messages)


def _add_block(found: Conversation, turn: _Message, where: str, block: _Block) -> None:
    """Add a block to a turn. Thoughts go to the template, which keeps those that it needs."""
    match turn.role, block.type:
        case "user", "tool_result":
            text = text_of(f"{where}.content", block.content, "\n\n")
            # Chat templates have no field for errors: the text says so.
            text = f"Error: {text}" if block.is_error else text
            found.add_result(f"{where}.tool_use_id", block.tool_use_id, text)
        case "assistant", "thinking":
            found.join_thought(block.thinking)
        case "assistant", "tool_use":
            if block.input is None:
                raise BodyError(f"{where}.input", "it is missing")
            found.join_call(where, block.id, block.name, block.input)
        case "assistant", "redacted_thinking":
            pass
        case _:
            if block.text is None:
                what = f"blocks of type {shown(block.type)} are not supported here"
                raise BodyError(where, what)
            found.join_text(turn.role, block.text)


# --- answers --------------------------------------------------------------------------------------


class MessageWriter:
    """Writes one answer, whole or as events. The model's name and the answer's identity are in it."""

    def __init__(self, identity: str, _created: int, model: str) -> None:
        self._head = {
            "id": f"msg_{identity[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        #: The number of blocks so far, and the type of the open one.
        self._n_blocks = 0
        self._open: str | None = None

    def begin(self, n_prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events before the answer. How much of the prompt is cached is not known yet."""
        usage = _usage(n_prompt_tokens, 0, 0)
        message = {**self._head, "content": [], **_ending(None, None), "usage": usage}
        return [{"type": "message_start", "message": message}, {**PING}]

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "error" in chunk:
            return [error_body(chunk)]
        (choice,) = chunk["choices"]
        events: list[dict[str, Any]] = []
        for block in _content(choice["delta"]):
            events += self._add(block)
        if choice["finish_reason"] is not None:
            events += self._close()
            ending = _ending(choice["finish_reason"], choice.get("stop_reason"))
            last = {"type": "message_delta", "delta": ending, **_figures(chunk)}
            events += [last, {"type": "message_stop"}]
        return events

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        (choice,) = body["choices"]
        ending = _ending(choice["finish_reason"], choice.get("stop_reason"))
        content = _content(choice["message"])
        return {**self._head, "content": content, **ending, **_figures(body)}

    def _add(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        kind = block["type"]
        events: list[dict[str, Any]] = []
        if kind != self._open or kind == "tool_use":
            events = self._close()
            empty: dict[str, Any] = {"input": {}} if kind == "tool_use" else {kind: ""}
            start = {"type": "content_block_start", "content_block": {**block, **empty}}
            events.append({**start, "index": self._n_blocks})
            self._open = kind
        if kind == "tool_use":
            told = json.dumps(block["input"], ensure_ascii=False)
            delta = {"type": "input_json_delta", "partial_json": told}
        else:
            delta = {"type": f"{kind}_delta", kind: block[kind]}
        events.append({"type": "content_block_delta", "index": self._n_blocks, "delta": delta})
        return events

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        self._n_blocks += 1
        return [{"type": "content_block_stop", "index": self._n_blocks - 1}]


def error_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an error in Anthropic's form, from that in OpenAI's."""
    error = body["error"]
    kind, message = error["type"], error["message"]
    if error["code"] == "request_too_large":
        kind = "request_too_large"
    elif error["code"] == "context_length_exceeded":
        # Agents look for these words, and shorten the prompt.
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": _ERRORS.get(kind, kind), "message": message}}


def _content(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks of a chat's message, or of an addition to one."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thought = message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": f"toolu_{call['id'].removeprefix('call_')}",
                "name": function["name"],
                "input": json.loads(function["arguments"]),
            }
        )
    return blocks


def _ending(finish_reason: str | None, stop_string: str | None) -> dict[str, Any]:
    if stop_string is not None and finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    reason = None if finish_reason is None else _STOP_REASONS[finish_reason]
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(n_prompt: int, n_cached: int, n_answer: int) -> dict[str, int]:
    """Return the numbers of tokens. In Anthropic's API, cached ones do not count as `input_tokens`."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_answer,
    }


def _figures(body: Mapping[str, Any]) -> dict[str, Any]:
    usage = body["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "usage": _usage(usage["prompt_tokens"], n_cached, usage["completion_tokens"]),
        **own_figures(body),
    }
