"""OpenAI's Responses API: ``/v1/responses``.

Tools that run at OpenAI are left out with a warning. References to something stored at OpenAI, such
as a previous response, are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasPath, BeforeValidator, Field
from pydantic_core import from_json

from specgen.serve.formats.answer_writer import AnswerContext, BlockWriter
from specgen.serve.formats.conversation_builder import ConversationBuilder
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.fields import Fields, Json, Parts, parse, text_of
from specgen.serve.formats.figures import own_figures
from specgen.serve.formats.generation_request import ChatRequest
from specgen.serve.formats.parsed_request import NO_DEFAULTS, Defaults, ParsedRequests
from specgen.serve.formats.request_errors import BodyError, shown
from specgen.serve.formats.tool_calls.values import arguments_of
from specgen.session.prompts.template import Message

#: Fields that refer to something stored at OpenAI, which this server does not have.
_REFUSED_FIELDS = ("conversation", "previous_response_id", "prompt")
#: Types of items that refer to something stored at OpenAI.
_REFUSED_ITEMS = ("item_reference", "compaction", "compaction_summary", "context_compaction")
#: The only value of ``include`` that specgen supports: thoughts in a form that clients send back
#: without reading it.
_ENCRYPTED_THOUGHTS = "reasoning.encrypted_content"
#: The prefix of such thoughts if they are from this server; they are not really encrypted.
_OWN_THOUGHT = "specgen:"
#: The fields of a response that repeat the request, with their defaults.
_ECHOED_FIELDS: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": None,
    "reasoning": None,
    "temperature": None,
    "text": None,
    "top_p": None,
    "user": None,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
#: The prefixes of the ids of items, by type.
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}

# --- requests -------------------------------------------------------------------------------------


class ResponseItem(Fields):
    """An item of a conversation: a message, a thought, a call, or the result of one."""

    type: str = "message"
    role: Literal["assistant", "developer", "system", "user"] | None = None
    content: Parts = []
    #: The summary of a thought.
    summary: Parts = []
    #: A thought in the form of `_ENCRYPTED_THOUGHTS`.
    encrypted_content: str = ""
    #: The id of a call, or of the call that a result belongs to.
    call_id: str | None = None
    #: The name of the called tool.
    name: str | None = None
    #: The arguments of a function call, as JSON.
    arguments: str = ""
    #: The free text of a custom tool's call.
    input: str = ""
    #: The text of a result.
    output: Parts = []


def _as_items(value: Any) -> Any:
    """Turn a text into an item, the user's message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value


class ResponsesRequest(ChatRequest):
    """The body of a request for a response."""

    #: The system message.
    instructions: Parts = []
    #: The conversation; a text is taken as the user's message.
    input: Annotated[list[ResponseItem], BeforeValidator(_as_items), Field(min_length=1)]
    #: How detailed a summary of the thoughts is wanted; None for no summary.
    summary: str | None = Field(None, validation_alias=AliasPath("reasoning", "summary"))
    #: Whether the oldest turns are left out if the conversation does not fit into the context.
    truncation: Literal["auto", "disabled"] = "disabled"
    #: Additional parts that the response should have; specgen supports only `_ENCRYPTED_THOUGHTS`.
    include: list[str] = []

    form_field: ClassVar[str] = "text.format"


def read_response_request(body: Json, defaults: Defaults = NO_DEFAULTS) -> ParsedRequests:
    """Read a request for a response.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    for name in _REFUSED_FIELDS:
        if body.get(name):
            raise BodyError(
                name, "this server does not store conversations: send all items as input"
            )
    fields = parse(ResponsesRequest, body)
    warnings = [
        f"include: ignored {shown(part)}, which responses do not have"
        for part in fields.include
        if part != _ENCRYPTED_THOUGHTS
    ]
    messages = _messages(fields, warnings)
    given_fields = {name: body[name] for name in _ECHOED_FIELDS if body.get(name) is not None}
    writer = functools.partial(
        ResponsesWriter,
        echo=_ECHOED_FIELDS | given_fields,
        custom_tools={tool.name for tool in fields.tools if tool.type == "custom"},
        encrypts_thoughts=_ENCRYPTED_THOUGHTS in fields.include,
        summarizes_thoughts=fields.summary is not None,
    )
    request = fields.parsed_chat(messages, defaults, writer, warnings)
    leaves_out_turns = fields.truncation == "auto"
    return (replace(request, splits_reasoning=True, leaves_out_turns=leaves_out_turns),)


def _messages(fields: ResponsesRequest, warnings: list[str]) -> tuple[Message, ...]:
    """Join items into turns: consecutive thoughts, texts and calls are one message.

    Args:
        fields: The fields of the body.
        warnings: A list to which warnings about ignored items are added.
    """
    builder = ConversationBuilder()
    if fields.instructions:
        builder.join_text("system", text_of(fields.instructions))
    for number, item in enumerate(fields.input):
        _add_item(builder, f"input[{number}]", item, warnings)
    _drop_lone_thoughts(builder)
    if not builder.messages:
        raise BodyError("input", "give at least one message")
    return tuple(builder.messages)


def _add_item(
    builder: ConversationBuilder,
    where: str,
    item: ResponseItem,
    warnings: list[str],
) -> None:
    """Add an item at the place `where` of the body to the conversation, or a warning about it."""
    match item.type:
        case "message":
            if item.role is None:
                raise BodyError(f"{where}.role", "it is missing")
            if item.role != "assistant":
                _drop_lone_thoughts(builder)
            text = text_of(item.content)
            if item.role == "developer":
                builder.join_text("system", text)
            else:
                builder.join_text(item.role, text)
        case "reasoning":
            thought = _thought(item)
            if thought:
                builder.join_thought(thought)
        case "function_call":
            builder.join_call(where, item.call_id, item.name, arguments_of(item.arguments))
        case "custom_tool_call":
            builder.join_call(where, item.call_id, item.name, {"input": item.input})
        case "function_call_output" | "custom_tool_call_output":
            builder.add_result(item.call_id, text_of(item.output))
        case kind if kind in _REFUSED_ITEMS:
            reason = (
                f"{shown(kind)} refers to items that this server has not stored: send the items"
            )
            raise BodyError(f"{where}.type", reason)
        case kind:
            warnings.append(f"{where}: ignored, since specgen has no items of type {shown(kind)}")


def _thought(item: ResponseItem) -> str:
    """Return the text of a thought: as it is, from this server's hidden form, or its summary."""
    thought = text_of(item.content)
    if not thought and item.encrypted_content.startswith(_OWN_THOUGHT):
        thought = item.encrypted_content.removeprefix(_OWN_THOUGHT)
    return thought or text_of(item.summary)


def _drop_lone_thoughts(builder: ConversationBuilder) -> None:
    """Drop the last turn if it has only thoughts, since its answer was not sent."""
    if not builder.messages:
        return
    last = builder.messages[-1]
    if last.role == "assistant" and not last.content and not last.tool_calls:
        del builder.messages[-1]


# --- answers --------------------------------------------------------------------------------------


class ResponsesWriter(BlockWriter):
    """Writes one response, whole or as events.

    Args:
        context: The context of all writers.
        echo: The fields of the response that repeat the request.
        custom_tools: The names of the tools that take a free text.
        encrypts_thoughts: Whether thoughts are also written in the form that clients send back.
        summarizes_thoughts: Whether thoughts are written in place of their summary, which many
            clients show, rather than as the content of their item, which few do.
    """

    def __init__(
        self,
        context: AnswerContext,
        *,
        echo: Mapping[str, Any],
        custom_tools: Collection[str],
        encrypts_thoughts: bool,
        summarizes_thoughts: bool,
    ) -> None:
        super().__init__(context)
        self._custom_tools = custom_tools
        self._encrypts_thoughts = encrypts_thoughts
        self._summarizes_thoughts = summarizes_thoughts
        self._head = {
            "id": f"resp_{context.identity}",
            "object": "response",
            "created_at": context.created,
            "model": context.model,
            **echo,
            "store": False,
        }
        #: The number of events so far, which numbers the next one.
        self._n_events = 0
        #: The id of the open block's item.
        self._item_id = ""
        #: The part of the open call's input that was already sent in events.
        self._sent_input = ""
        #: The whole response, at the end of the answer.
        self._whole: Json = {}

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        """Return the events before the answer."""
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("created", "in_progress")]

    def fail(self, error: Json) -> list[Json]:
        """Return the last event of a failed answer."""
        response_error = {"code": "server_error", "message": error["error"]["message"]}
        response = {**self._response("failed"), "error": response_error}
        return [self._event("failed", response=response)]

    def whole(self) -> Json:
        """Return the whole response."""
        return self._whole

    def _write_end(self, _number: int) -> list[Json]:
        """Close the last item, and return its events and the one with the whole response."""
        events: list[Json] = []
        if self._block is None and not self._blocks:  # clients expect an item
            self._block = Delta("content", "")
            events += self._open_block(self._block)
        status = "completed"
        details = None
        if self._answers[0].finish_reason == "length":
            status = "incomplete"
            details = {"reason": "max_output_tokens"}
        if self._block is not None and self._block.kind == "call":  # complete calls are closed
            events += self._close_open_block("incomplete")
        else:
            events += self._close_open_block(status)
        figures = self._figures()
        self._whole = {
            **self._response(status),
            "incomplete_details": details,
            "usage": _usage(figures["usage"]),
            **own_figures(figures),
        }
        return [*events, self._event(status, response=self._whole)]

    def _response(self, status: str) -> Json:
        """Return the response as far as it is written."""
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._blocks),
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        """Return an event with the next sequence number."""
        self._n_events += 1
        return {
            "type": f"response.{kind}",
            "sequence_number": self._n_events - 1,
            **fields,
        }

    # --- items ------------------------------------------------------------------------------------

    def _open_block(self, block: Delta) -> list[Json]:
        """Return the events at the beginning of an item, and give the item an id."""
        block = replace(block, text="")
        self._sent_input = ""
        prefix = _ID_PREFIXES[self._item_type(block)]
        self._item_id = f"{prefix}_{self._context.identity}_{len(self._blocks)}"
        item = self._item(block, "in_progress")
        if block.kind == "call":
            return [self._item_event("output_item.added", item=item)]
        field = self._part_field(block)
        return [
            self._item_event("output_item.added", item={**item, field: []}),
            self._part_event(block, "part.added", part=self._part(block)),
        ]

    def _extend_block(self, block: Delta, text: str) -> list[Json]:
        """Return the event for an addition to an item; none if a call's input has not grown."""
        if block.kind != "call":
            return [self._part_event(block, "text.delta", logprobs=[], delta=text)]
        call_input = self._call_input(block)
        added = call_input[len(self._sent_input) :]
        self._sent_input = call_input
        if not added:
            return []
        kind = f"{self._item_type(block)}_{self._input_field(block)}.delta"
        return [self._item_event(kind, delta=added)]

    def _close_block(self, block: Delta, status: str) -> list[Json]:
        """Add a finished item to the output, and return the events at its end."""
        if block.kind == "call":
            field = self._input_field(block)
            kind = f"{self._item_type(block)}_{field}.done"
            done = {field: self._call_input(block), "name": block.name}
            events = [self._item_event(kind, **done)]
        else:
            part = self._part(block)
            events = [
                self._part_event(block, "text.done", logprobs=[], text=block.text),
                self._part_event(block, "part.done", part=part),
            ]
        item = self._item(block, status)
        events.append(self._item_event("output_item.done", item=item))
        self._blocks.append(item)
        return events

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the open item, whose index is the number of closed blocks."""
        place = {"item_id": self._item_id, "output_index": len(self._blocks)}
        return self._event(kind, **place, **fields)

    def _part_event(
        self,
        block: Delta,
        kind: str,
        **fields: Any,
    ) -> Json:
        """Return an event about the only part of the open item, or about the text of that part."""
        field = self._part_field(block)
        prefix = field
        if field == "summary":
            prefix = "reasoning_summary"
        elif kind.startswith("text"):
            prefix = self._part(block)["type"].removesuffix("_text")
        return self._item_event(f"{prefix}_{kind}", **{f"{field}_index": 0}, **fields)

    def _item(self, block: Delta, status: str) -> Json:
        """Return an item as far as it is written, with the fields of its type."""
        item: Json = {
            "id": self._item_id,
            "type": self._item_type(block),
            "status": status,
        }
        match block.kind:
            case "call":
                item["call_id"] = block.identity
                item["name"] = block.name
                item[self._input_field(block)] = self._call_input(block)
            case "content":
                item["content"] = [self._part(block)]
                item["role"] = "assistant"
            case _:
                item["content"] = []
                item["summary"] = []
                item[self._part_field(block)] = [self._part(block)]
                if self._encrypts_thoughts:
                    item["encrypted_content"] = f"{_OWN_THOUGHT}{block.text}"
        return item

    def _part_field(self, block: Delta) -> str:
        """Return the field of an item that has the text of a block as its part."""
        if block.kind == "thought" and self._summarizes_thoughts:
            return "summary"
        return "content"

    def _part(self, block: Delta) -> Json:
        """Return the text of a block as the part of an item."""
        if block.kind == "content":
            return {
                "type": "output_text",
                "text": block.text,
                "annotations": [],
                "logprobs": [],
            }
        kind = "summary" if self._summarizes_thoughts else "reasoning"
        return {"type": f"{kind}_text", "text": block.text}

    def _item_type(self, block: Delta) -> str:
        """Return the type of the item that a block becomes."""
        match block.kind:
            case "content":
                return "message"
            case "thought":
                return "reasoning"
        if block.name in self._custom_tools:
            return "custom_tool_call"
        return "function_call"

    def _input_field(self, call: Delta) -> str:
        """Return the name of the field that has the input of a call."""
        if call.name in self._custom_tools:
            return "input"
        return "arguments"

    def _call_input(self, call: Delta) -> str:
        """Return the input that a call passes to its tool, as far as it has arrived.

        A custom tool gets the text in the field ``input`` of the arguments.
        """
        if call.name not in self._custom_tools:
            return call.text
        value = from_json(call.text or "{}", allow_partial="trailing-strings").get("input")
        if isinstance(value, str):
            return value
        if call.is_end:  # there is no such text, so the tool gets the arguments as they are
            return call.text
        return ""


def _usage(usage: Json) -> Json:
    """Return the usage in the Responses API's form, from that of chat completions."""
    return {
        "input_tokens": usage["prompt_tokens"],
        # Clients expect the field, with which OpenAI charges for writing to its cache.
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
