"""Anthropic's Messages API: reads its requests, and writes answers in its form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, Field, model_validator

from specgen.serve.formats.answers import BlockWriter, RequestError, own_figures
from specgen.serve.formats.request import (
    AS_PARTS,
    NO_DEFAULTS,
    BodyError,
    ChatBody,
    Conversation,
    Defaults,
    Fields,
    Json,
    Part,
    Requests,
    is_begun,
    parse,
    text_of,
)
from specgen.serve.formats.tool_calls import Delta
from specgen.session.prompts.template import Message

#: Claude Code's first part, which differs from request to request: no prefix would be in the cache.
_BILLING = "x-anthropic-billing-header"
#: What the result of a search for tools says of one.
_DEFINED = {"name", "description", "parameters"}

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
#: Types of errors that have another name in Anthropic's API.
_ERRORS = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}


class _Block(Part):
    thinking: str = ""
    id: str | None = None  # of a call, with its name and its input
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a call's result
    tool_name: str = ""  # of a deferred tool that a search has found
    content: _Blocks = []
    is_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_text(cls, value: Any) -> Any:
        """Give a document that is a text its text."""
        source = value.get("source") if isinstance(value, dict) else None
        if isinstance(source, dict) and source.get("type") == "text":
            return {"type": "text", "text": source.get("data")}
        return value


_Blocks = Annotated[list[_Block], AS_PARTS]


class _Message(Fields):
    role: Literal["assistant", "system", "user"]
    content: _Blocks = []


class _Body(ChatBody):
    system: _Blocks = []
    messages: Annotated[list[_Message], Field(min_length=1)]
    #: ``create`` keeps a conversation for ``continue``, which has only what is new.
    thread: str | None = Field(None, validation_alias=AliasPath("thread", "type"))

    form_field: ClassVar[str] = "output_config.format"


_Block.model_rebuild()


def read_messages(body: Json, defaults: Defaults = NO_DEFAULTS) -> Requests:
    asked = parse(_Body, body)
    if asked.thread == "continue":  # the client then sends the whole conversation
        raise RequestError(404, "threads are not kept: send all messages", "thread_not_found")
    late = _deferred(asked)
    tools = [tool for tool in asked.tools if late.get(tool.name, "") is not None]
    asked = asked.model_copy(update={"tools": tools})
    messages = _messages(asked, late)
    how: dict[str, Any] = {"splits_reasoning": True, "writer": MessageWriter}
    (request,) = asked.chat(messages, defaults, continues=is_begun(messages), **how)
    if late and request.tools is not None:
        shown = tuple(each for each in request.tools.functions if each.name not in late)
        request = replace(request, tools=replace(request.tools, functions=shown))
    return (request,)


def _deferred(asked: _Body) -> dict[str, str | None]:
    """Return the definitions of deferred tools that a search has found, and None for others. They
    are told in its result, so that the beginning of the prompt stays as it is.
    """
    if any("tool_search" in tool.type for tool in asked.tools):  # it would run at Anthropic
        return {}
    parts = [part for turn in asked.messages for block in turn.content for part in block.content]
    found = {part.tool_name for part in parts if part.type == "tool_reference"}
    return {
        tool.name: tool.model_dump_json(include=_DEFINED) if tool.name in found else None
        for tool in asked.tools
        if tool.defer_loading
    }


def _messages(asked: _Body, late: Mapping[str, str | None]) -> tuple[Message, ...]:
    found = Conversation()
    for number, block in enumerate(asked.system):
        text = text_of([block])
        if number or not text.startswith(_BILLING):
            found.join_text("system", text)
    for number, turn in enumerate(asked.messages):
        where = f"messages[{number}].content"
        if turn.role == "assistant":  # consecutive ones stay apart
            found.messages.append(Message("assistant", ""))
        for at, block in enumerate(turn.content):
            _add_block(found, turn, f"{where}[{at}]", block, late)
    if not found.messages:
        raise BodyError("messages", "they are empty")
    return tuple(found.messages)


def _add_block(
    found: Conversation,
    turn: _Message,
    where: str,
    block: _Block,
    late: Mapping[str, str | None],
) -> None:
    """Add a block to a turn. Thoughts go to the template, which keeps those that it needs."""
    match turn.role, block.type:
        case "user", "tool_result":
            told = [late.get(part.tool_name) or part.tool_name for part in block.content]
            parts = [Part(text=a) if a else b for a, b in zip(told, block.content, strict=True)]
            text = text_of(parts, "\n\n")
            # Chat templates have no field for errors: the text says so.
            text = f"Error: {text}" if block.is_error else text
            found.add_result(block.tool_use_id, text)
        case "assistant", "thinking":
            found.join_thought(block.thinking)
        case "assistant", "tool_use":
            found.join_call(where, block.id, block.name, block.input or {})
        case "assistant", _ if block.text is None:
            pass  # hidden thoughts, or what a tool at Anthropic did
        case _:
            found.join_text(turn.role, text_of([block]))


# --- answers --------------------------------------------------------------------------------------


class MessageWriter(BlockWriter):
    """Writes one answer, whole or as events."""

    alive = {"type": "ping"}

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._head = {
            "id": f"msg_{self._identity[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
        }

    def begin(self, n_prompt_tokens: int) -> list[Json]:
        """Return the events before the answer. How much of the prompt is cached is not known yet."""
        ending = {"stop_reason": None, "stop_sequence": None}
        usage = _usage(n_prompt_tokens, 0, 0)
        message: Json = {**self._head, "content": [], **ending, "usage": usage}
        return [{"type": "message_start", "message": message}, {**self.alive}]

    def fail(self, error: Json) -> list[Json]:
        return [error_body(error)]

    def whole(self) -> Json:
        return {**self._head, "content": self._blocks, **self._ending(), **self._api_figures()}

    def _opened(self, block: Delta) -> list[Json]:
        return [self._event("start", content_block=_block(replace(block, text="")))]

    def _added(self, block: Delta, text: str) -> list[Json]:
        if not text:
            return []
        told = {"type": "input_json_delta", "partial_json": text}
        if block.kind != "call":
            name = _block(block)["type"]
            told = {"type": f"{name}_delta", name: text}
        return [self._event("delta", delta=told)]

    def _closed(self, block: Delta, _status: str) -> list[Json]:
        events = [self._event("stop")]
        if block.kind != "call" or block.is_end:  # a whole answer has whole calls only
            self._blocks.append(_block(block))
        return events

    def _end(self, _number: int) -> list[Json]:
        last = {"type": "message_delta", "delta": self._ending(), **self._api_figures()}
        return [*self._close(), last, {"type": "message_stop"}]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"content_block_{kind}", "index": len(self._blocks), **fields}

    def _ending(self) -> Json:
        (answer,) = self._answers
        reason, stop = answer.finish_reason, answer.stop_string
        if stop is not None and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}

    def _api_figures(self) -> Json:
        found = self._figures()
        usage = found["usage"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = _usage(usage["prompt_tokens"], n_cached, usage["completion_tokens"])
        return {"usage": counts, **own_figures(found)}


def _block(block: Delta) -> Json:
    if block.kind == "call":
        arguments = json.loads(block.text) if block.is_end else {}
        identity = f"toolu_{block.identity.removeprefix('call_')}"
        return {"type": "tool_use", "id": identity, "name": block.name, "input": arguments}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def error_body(body: Json) -> Json:
    """Return the body of an error in Anthropic's form, from that in OpenAI's."""
    error = body["error"]
    kind, message, more = error["type"], error["message"], dict[str, Any]()
    if error["code"] == "request_too_large":
        kind = "request_too_large"
    elif error["code"] == "thread_not_found":
        more = {"details": {"error_code": error["code"]}}
    elif error["code"] == "context_length_exceeded":
        # Agents look for these words, and shorten the prompt.
        n, n_most = error["n_prompt_tokens"], error["n_ctx"]
        message = f"prompt is too long: {n} tokens > {n_most} maximum"
    return {"type": "error", "error": {"type": _ERRORS.get(kind, kind), "message": message, **more}}


def _usage(n_prompt: int, n_cached: int, n_answer: int) -> dict[str, int]:
    """Return the numbers of tokens. In Anthropic's API, cached ones do not count as `input_tokens`."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_answer,
    }
