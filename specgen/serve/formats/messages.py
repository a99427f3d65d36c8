"""Anthropic's Messages API: ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, Field, model_validator

from specgen.serve.formats.answer_writer import AnswerContext, BlockWriter
from specgen.serve.formats.conversation_builder import (
    ConversationBuilder,
    ends_with_partial_answer,
)
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import AS_PARTS, Fields, Json, Part, parse, text_of
from specgen.serve.formats.figures import own_figures
from specgen.serve.formats.generation_request import ChatRequest, as_list
from specgen.serve.formats.parsed_request import NO_DEFAULTS, Defaults, ParsedRequests
from specgen.serve.formats.request_errors import BodyError, RequestError
from specgen.session.prompts.template import Message

#: The beginning of Claude Code's first system block. It differs from request to request, so that no
#: prefix would be found in the cache, and is dropped.
_BILLING = "x-anthropic-billing-header"
#: The fields of a tool's definition that the result of a tool search shows.
_SEARCH_RESULT_FIELDS = {"name", "description", "parameters"}

_STOP_REASONS = {
    "length": "max_tokens",
    "stop": "end_turn",
    "tool_calls": "tool_use",
}
#: The signature of thoughts, with which Anthropic recognises its own.
_SIGNATURE = ""
#: Types of errors that have another name in Anthropic's API.
_ERROR_TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}

# --- requests -------------------------------------------------------------------------------------


class ContentBlock(Part):
    """A block of a message: a text, a thought, a call, or the result of one."""

    #: The text of a thought.
    thinking: str = ""
    #: The id of a call.
    id: str | None = None
    #: The name of the called tool.
    name: str | None = None
    #: The arguments of a call.
    input: dict[str, Any] | None = None
    #: In a result: the id of the call.
    tool_use_id: str | None = None
    #: In a block within the result of a tool search: the name of a deferred tool that was found.
    tool_name: str = ""
    #: The blocks of a result.
    content: ContentBlocks = []
    #: Whether a result is an error.
    is_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_text(cls, value: Any) -> Any:
        """Turn a document that has plain text, or a search result, into a text block."""
        match value:
            case {"source": {"type": "text", **source}}:
                text = source.get("data")
            case {"source": {"type": "content", "content": content}}:
                text = _joined(content)
            case {"type": "search_result", "content": str() | list() as content, **fields}:
                text = _joined([fields.get("title"), fields.get("source"), *as_list(content)])
            case _:
                return value
        return {"type": "text", "text": text}


def _joined(content: Any) -> Any:
    """Return the text of a list of texts and blocks; anything else is returned as it is."""
    if not isinstance(content, list):
        return content
    parts: list[Part] = []
    for item in content:
        if isinstance(item, str):
            parts.append(Part(text=item))
        elif isinstance(item, dict):
            text = item.get("text")
            kind = str(item.get("type", "text"))
            parts.append(Part(type=kind, text=text if isinstance(text, str) else None))
    return text_of(parts)


ContentBlocks = Annotated[list[ContentBlock], AS_PARTS]


class AnthropicMessage(Fields):
    """A message of a conversation."""

    role: Literal["assistant", "system", "user"]
    content: ContentBlocks = []


class MessagesRequest(ChatRequest):
    """The body of a request for a message."""

    system: ContentBlocks = []
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    #: With ``create``, Anthropic's server keeps the conversation; a later ``continue`` has only the
    #: new messages. specgen keeps none.
    thread: str | None = Field(None, validation_alias=AliasPath("thread", "type"))

    form_field: ClassVar[str] = "output_config.format"


ContentBlock.model_rebuild()


def read_messages(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request for the next message of a conversation.

    Raises:
        BodyError: If a field cannot be honoured.
        RequestError: If the request continues a conversation that the server should have kept.
    """
    fields = parse(MessagesRequest, body)
    if fields.thread == "continue":  # the client then sends the whole conversation
        what = "this server does not store threads: send all messages"
        raise RequestError(404, what, "thread_not_found")
    not_found, definitions = _deferred_tools(fields)
    messages = _messages(fields, definitions)
    # A deferred tool may be called once a search has found it. Its description is part of that
    # search's result, never of the prompt before the conversation.
    usable = [tool for tool in fields.tools if tool.name not in not_found]
    fields = fields.model_copy(update={"tools": usable})
    request = fields.parsed_chat(messages, defaults, MessagesWriter)
    tools = request.tools
    if tools is not None:
        described = [function for function in tools.functions if function.name not in definitions]
        tools = replace(tools, functions=tuple(described))
    request = replace(
        request,
        tools=tools,
        continues=ends_with_partial_answer(messages),
        splits_reasoning=True,
    )
    return (request,)


def _deferred_tools(fields: MessagesRequest) -> tuple[set[str], dict[str, str]]:
    """Return the names of the deferred tools that no search has found, and the others' definitions.

    A definition is written into the search's result, so that the beginning of the prompt does not
    change, and stays in the cache.
    """
    if any("tool_search" in tool.type for tool in fields.tools):
        # This search would run at Anthropic. Without it, no tool can be deferred.
        return set(), {}
    found_names: set[str] = set()
    for message in fields.messages:
        for block in message.content:
            references = [part for part in block.content if part.type == "tool_reference"]
            found_names |= {part.tool_name for part in references}
    not_found: set[str] = set()
    definitions: dict[str, str] = {}
    for tool in fields.tools:
        if not tool.defer_loading:
            continue
        if tool.name in found_names:
            definitions[tool.name] = tool.model_dump_json(include=_SEARCH_RESULT_FIELDS)
        else:
            not_found.add(tool.name)
    return not_found, definitions


def _messages(fields: MessagesRequest, definitions: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the messages for the chat template; see `_add_block` for `definitions`."""
    builder = ConversationBuilder()
    for number, block in enumerate(fields.system):
        text = text_of([block])
        if number > 0 or not text.startswith(_BILLING):
            builder.join_text("system", text)
    for number, message in enumerate(fields.messages):
        if message.role == "assistant":  # consecutive ones stay apart
            builder.messages.append(Message("assistant", ""))
        for index, block in enumerate(message.content):
            where = f"messages[{number}].content[{index}]"
            _add_block(builder, message.role, where, block, definitions)
    if not builder.messages:
        raise BodyError("messages", "give at least one that is not empty")
    return tuple(builder.messages)


def _add_block(
    builder: ConversationBuilder,
    role: Literal["assistant", "system", "user"],
    where: str,
    block: ContentBlock,
    definitions: Mapping[str, str],
) -> None:
    """Add a block to a turn.

    Args:
        builder: The conversation so far.
        role: The role of the turn.
        where: The place of the block in the body, for errors.
        block: The block.
        definitions: The definitions of the deferred tools that a search has found, by name.
    """
    match role, block.type:
        case "user", "tool_result":
            builder.add_result(block.tool_use_id, _result_text(block, definitions))
        case "assistant", "thinking":  # the chat template drops the thoughts that it does not need
            builder.join_thought(block.thinking)
        case "assistant", "tool_use":
            builder.join_call(where, block.id, block.name, block.input or {})
        case "assistant", _ if block.text is None:
            pass  # hidden thoughts, or the work of a tool that runs at Anthropic
        case _:
            builder.join_text(role, text_of([block]))


def _result_text(block: ContentBlock, definitions: Mapping[str, str]) -> str:
    """Return the text of a call's result, in which found tools are replaced by definitions."""
    parts: list[Part] = []
    for part in block.content:
        if part.tool_name:
            parts.append(Part(text=definitions.get(part.tool_name, part.tool_name)))
        else:
            parts.append(part)
    text = text_of(parts, "\n\n")
    if block.is_error:  # chat templates have no field for that
        return f"Error: {text}"
    return text


# --- answers --------------------------------------------------------------------------------------


class MessagesWriter(BlockWriter):
    """Writes one message, whole or as events."""

    keep_alive_event = {"type": "ping"}

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._head = {
            "id": f"msg_{context.identity[:24]}",
            "type": "message",
            "role": "assistant",
            "model": context.model,
        }

    def begin(self, n_prompt_tokens: int) -> list[Json]:
        """Return the events before the answer, whose usage does not have cached tokens yet."""
        message: Json = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(n_prompt_tokens, 0, 0),
        }
        return [{"type": "message_start", "message": message}, dict(self.keep_alive_event)]

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

    def _open_block(self, block: Delta) -> list[Json]:
        return [self._event("start", content_block=_block_object(replace(block, text="")))]

    def _extend_block(self, block: Delta, text: str) -> list[Json]:
        if not text:
            return []
        if block.kind == "call":
            return [self._event("delta", delta={"type": "input_json_delta", "partial_json": text})]
        name = _block_object(block)["type"]
        return [self._event("delta", delta={"type": f"{name}_delta", name: text})]

    def _close_block(self, block: Delta, _status: str) -> list[Json]:
        events = [self._event("stop")]
        if block.kind == "thought":
            # Clients do not send back thoughts that have no signature.
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            events.insert(0, self._event("delta", delta=signature))
        if block.kind != "call" or block.is_end:  # a whole response has only complete calls
            self._blocks.append(_block_object(block))
        return events

    def _write_end(self, _number: int) -> list[Json]:
        last = {
            "type": "message_delta",
            "delta": self._ending(),
            **self._api_figures(),
        }
        return [*self._close_open_block(), last, {"type": "message_stop"}]

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
            "signature": _SIGNATURE,
        }
    return {"type": "text", "text": block.text}


def _usage(n_prompt: int, n_cached: int, n_answer: int) -> dict[str, int]:
    """Return the usage in Anthropic's form, whose ``input_tokens`` exclude cached tokens."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_answer,
    }


def error_body(body: Json) -> Json:
    """Return the body of an error in Anthropic's form.

    Args:
        body: The body in OpenAI's form.
    """
    error = body["error"]
    anthropic_error = {
        "type": _ERROR_TYPES.get(error["type"], error["type"]),
        "message": error["message"],
    }
    match error["code"]:
        case "request_too_large":
            anthropic_error["type"] = "request_too_large"
        case "thread_not_found":
            anthropic_error["details"] = {"error_code": error["code"]}
        case "context_length_exceeded":
            # Agents look for these words, and shorten the prompt.
            counts = f"{error['n_prompt_tokens']} tokens > {error['n_ctx']} maximum"
            anthropic_error["message"] = f"prompt is too long: {counts}"
    return {"type": "error", "error": anthropic_error}
