"""Anthropic's Messages API: ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, Field, model_validator

from specgen.serve.formats.answer_writer import AnswerContext, BlockWriter
from specgen.serve.formats.conversation_builder import ConversationBuilder, is_begun
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import AS_PARTS, Fields, Json, Part, parse, text_of
from specgen.serve.formats.figures import own_figures
from specgen.serve.formats.generation_request import ChatRequest
from specgen.serve.formats.parsed_request import NO_DEFAULTS, Defaults, ParsedRequests
from specgen.serve.formats.request_errors import BodyError, RequestError
from specgen.session.prompts.template import Message

#: Claude Code's first part, which differs from request to request: no prefix would be cached.
_BILLING = "x-anthropic-billing-header"
#: The fields that the result of a search for tools has of each tool.
_SEARCH_RESULT_FIELDS = {"name", "description", "parameters"}

_STOP_REASONS = {
    "length": "max_tokens",
    "stop": "end_turn",
    "tool_calls": "tool_use",
}
#: Types of errors that have another name in Anthropic's API.
_ERROR_TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}

# --- requests -------------------------------------------------------------------------------------


class ContentBlock(Part):
    """A block of a message: a text, a thought, a call, or the result of one."""

    thinking: str = ""
    #: Of a call: its id, the name of the tool, and the arguments.
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    #: Of a call's result: the id of the call.
    tool_use_id: str | None = None
    #: The name of a deferred tool that a search has found.
    tool_name: str = ""
    content: ContentBlocks = []
    is_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_text(cls, value: Any) -> Any:
        """Turn a document that is a text into a text."""
        match value:
            case {"source": {"type": "text", **source}}:
                return {"type": "text", "text": source.get("data")}
        return value


ContentBlocks = Annotated[list[ContentBlock], AS_PARTS]


class AnthropicMessage(Fields):
    """A message of a conversation."""

    role: Literal["assistant", "system", "user"]
    content: ContentBlocks = []


class MessagesRequest(ChatRequest):
    """The body of a request for a message."""

    system: ContentBlocks = []
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    #: ``create`` keeps a conversation on the server for ``continue``, which has only what is new.
    thread: str | None = Field(None, validation_alias=AliasPath("thread", "type"))

    form_field: ClassVar[str] = "output_config.format"


ContentBlock.model_rebuild()


def read_messages(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request for the next message of a conversation.

    Raises:
        BodyError: A field cannot be honoured.
        RequestError: The conversation continues one that a server should have kept.
    """
    asked = parse(MessagesRequest, body)
    if asked.thread == "continue":  # the client then sends the whole conversation
        what = "this server keeps no threads: send all messages"
        raise RequestError(404, what, "thread_not_found")
    deferred = _deferred_tools(asked)
    messages = _messages(asked, deferred)
    # A tool may be called once it is found, and is never described before the conversation.
    usable = [tool for tool in asked.tools if deferred.get(tool.name, "") is not None]
    asked = asked.model_copy(update={"tools": usable})
    request = asked.parsed_chat(messages, defaults, MessagesWriter)
    tools = request.tools
    if tools is not None:
        described = [each for each in tools.functions if each.name not in deferred]
        tools = replace(tools, functions=tuple(described))
    request = replace(
        request,
        tools=tools,
        continues=is_begun(messages),
        splits_reasoning=True,
    )
    return (request,)


def _deferred_tools(asked: MessagesRequest) -> dict[str, str | None]:
    """Return the deferred tools: the definition of each that a search has found, None for others.

    A definition is written into the search's result, so that the beginning of the prompt stays as
    it is.
    """
    if any("tool_search" in tool.type for tool in asked.tools):  # it would run at Anthropic
        return {}
    found: set[str] = set()
    for message in asked.messages:
        for block in message.content:
            references = [part for part in block.content if part.type == "tool_reference"]
            found |= {part.tool_name for part in references}
    deferred: dict[str, str | None] = {}
    for tool in asked.tools:
        if not tool.defer_loading:
            continue
        deferred[tool.name] = None
        if tool.name in found:
            deferred[tool.name] = tool.model_dump_json(include=_SEARCH_RESULT_FIELDS)
    return deferred


def _messages(asked: MessagesRequest, deferred: Mapping[str, str | None]) -> tuple[Message, ...]:
    builder = ConversationBuilder()
    for number, block in enumerate(asked.system):
        text = text_of([block])
        if number > 0 or not text.startswith(_BILLING):
            builder.join_text("system", text)
    for number, message in enumerate(asked.messages):
        if message.role == "assistant":  # consecutive ones stay apart
            builder.messages.append(Message("assistant", ""))
        for index, block in enumerate(message.content):
            where = f"messages[{number}].content[{index}]"
            _add_block(builder, message.role, where, block, deferred)
    if not builder.messages:
        raise BodyError("messages", "they are empty")
    return tuple(builder.messages)


def _add_block(
    builder: ConversationBuilder,
    role: Literal["assistant", "system", "user"],
    where: str,
    block: ContentBlock,
    deferred: Mapping[str, str | None],
) -> None:
    """Add a block to a turn. Thoughts go to the template, which keeps those that it needs."""
    match role, block.type:
        case "user", "tool_result":
            builder.add_result(block.tool_use_id, _result_text(block, deferred))
        case "assistant", "thinking":
            builder.join_thought(block.thinking)
        case "assistant", "tool_use":
            builder.join_call(where, block.id, block.name, block.input or {})
        case "assistant", _ if block.text is None:
            pass  # hidden thoughts, or what a tool at Anthropic did
        case _:
            builder.join_text(role, text_of([block]))


def _result_text(block: ContentBlock, deferred: Mapping[str, str | None]) -> str:
    """Return the text of a call's result, with the definitions of tools that it has found."""
    parts: list[Part] = []
    for part in block.content:
        if part.tool_name:
            definition = deferred.get(part.tool_name)
            parts.append(Part(text=definition or part.tool_name))
        else:
            parts.append(part)
    text = text_of(parts, "\n\n")
    if block.is_error:  # chat templates have no field for that
        return f"Error: {text}"
    return text


# --- answers --------------------------------------------------------------------------------------


class MessagesWriter(BlockWriter):
    """Writes one message, whole or as events."""

    alive = {"type": "ping"}

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._head = {
            "id": f"msg_{context.identity[:24]}",
            "type": "message",
            "role": "assistant",
            "model": context.model,
        }

    def begin(self, n_prompt_tokens: int) -> list[Json]:
        """Return the events before the answer, when cached tokens are not known yet."""
        message: Json = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(n_prompt_tokens, 0, 0),
        }
        return [{"type": "message_start", "message": message}, dict(self.alive)]

    def fail(self, error: Json) -> list[Json]:
        """Return the last event of a failed answer."""
        return [error_body(error)]

    def whole(self) -> Json:
        """Return the whole response."""
        return {
            **self._head,
            "content": self._blocks,
            **self._ending(),
            **self._api_figures(),
        }

    def _opened(self, block: Delta) -> list[Json]:
        return [self._event("start", content_block=_block_object(replace(block, text="")))]

    def _added(self, block: Delta, text: str) -> list[Json]:
        if not text:
            return []
        if block.kind == "call":
            return [self._event("delta", delta={"type": "input_json_delta", "partial_json": text})]
        name = _block_object(block)["type"]
        return [self._event("delta", delta={"type": f"{name}_delta", name: text})]

    def _closed(self, block: Delta, _status: str) -> list[Json]:
        events = [self._event("stop")]
        if block.kind != "call" or block.is_end:  # a whole answer has complete calls only
            self._blocks.append(_block_object(block))
        return events

    def _end(self, _number: int) -> list[Json]:
        last = {
            "type": "message_delta",
            "delta": self._ending(),
            **self._api_figures(),
        }
        return [*self._close(), last, {"type": "message_stop"}]

    def _event(self, kind: str, **fields: Any) -> Json:
        return {
            "type": f"content_block_{kind}",
            "index": len(self._blocks),
            **fields,
        }

    def _ending(self) -> Json:
        (answer,) = self._answers
        if answer.finish_reason == "stop" and answer.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
        return {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}

    def _api_figures(self) -> Json:
        figures = self._figures()
        usage = figures["usage"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = _usage(usage["prompt_tokens"], n_cached, usage["completion_tokens"])
        return {"usage": counts, **own_figures(figures)}


def _block_object(block: Delta) -> Json:
    """Return a block in Anthropic's form."""
    if block.kind == "call":
        arguments = {}
        if block.is_end:
            arguments = json.loads(block.text)
        return {
            "type": "tool_use",
            "id": f"toolu_{block.identity.removeprefix('call_')}",
            "name": block.name,
            "input": arguments,
        }
    if block.kind == "thought":
        return {
            "type": "thinking",
            "thinking": block.text,
            "signature": "",
        }
    return {"type": "text", "text": block.text}


def _usage(n_prompt: int, n_cached: int, n_answer: int) -> dict[str, int]:
    """Return numbers of tokens. In Anthropic's API, ``input_tokens`` are those not cached."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_answer,
    }


def error_body(body: Json) -> Json:
    """Return the body of an error in Anthropic's form, from that in OpenAI's."""
    error = body["error"]
    found = {
        "type": _ERROR_TYPES.get(error["type"], error["type"]),
        "message": error["message"],
    }
    match error["code"]:
        case "request_too_large":
            found["type"] = "request_too_large"
        case "thread_not_found":
            found["details"] = {"error_code": error["code"]}
        case "context_length_exceeded":
            # Agents look for these words, and shorten the prompt.
            n_tokens = error["n_prompt_tokens"]
            found["message"] = f"prompt is too long: {n_tokens} tokens > {error['n_ctx']} maximum"
    return {"type": "error", "error": found}
