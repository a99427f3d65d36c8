"""OpenAI's Responses API. Tools that run at OpenAI are left out with a warning; what stands for a
text that this server does not have is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from specgen.serve.formats.answers import BlockWriter, own_figures
from specgen.serve.formats.call_values import arguments_of
from specgen.serve.formats.request import (
    NO_DEFAULTS,
    BodyError,
    ChatBody,
    Conversation,
    Defaults,
    Fields,
    Json,
    Parts,
    Requests,
    parse,
    shown,
    text_of,
)
from specgen.serve.formats.tool_calls import Delta
from specgen.session.prompts.template import Message, Role

#: Items that stand for a text which this server does not have.
_ELSEWHERE = ("item_reference", "compaction", "compaction_summary", "context_compaction")
#: Fields of which the same holds.
_REFUSED = ("conversation", "previous_response_id", "prompt")
#: What requests may ask to include: thoughts that clients send back unseen; a mark says that they
#: are ours.
_ENCRYPTED = "reasoning.encrypted_content"
_HIDDEN = "specgen:"
#: The fields of a response that repeat the request.
_ECHO: Json = {
    **dict.fromkeys(["instructions", "max_output_tokens", "metadata", "reasoning", "temperature"]),
    **dict.fromkeys(["text", "top_p", "user"]),
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


#: What ids of items begin with.
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class _Item(Fields):
    type: str = "message"
    role: Literal["assistant", "developer", "system", "user"] | None = None
    content: Parts = []
    summary: Parts = []  # of thoughts
    encrypted_content: str = ""
    call_id: str | None = None  # of calls, and of their results
    name: str | None = None
    arguments: str = ""
    input: str = ""
    output: Parts = []


class _Body(ChatBody):
    instructions: Parts = []
    input: Annotated[
        list[_Item],
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value
        ),
        Field(min_length=1),
    ]
    include: list[str] = []

    form_field: ClassVar[str] = "text.format"


def read_response_request(body: Json, defaults: Defaults = NO_DEFAULTS) -> Requests:
    for name in _REFUSED:
        if body.get(name):
            raise BodyError(name, "nothing is kept here: send all items as input")
    asked = parse(_Body, body)
    warnings = [
        f"include: ignored {shown(what)}, which responses do not have"
        for what in asked.include
        if what != _ENCRYPTED
    ]
    messages = _messages(asked, warnings)
    writer = functools.partial(
        ResponseWriter,
        echo=_ECHO | {name: body[name] for name in _ECHO if body.get(name) is not None},
        custom={tool.name for tool in asked.tools if tool.type == "custom"},
        hides=_ENCRYPTED in asked.include,
    )
    return asked.chat(messages, defaults, warnings, splits_reasoning=True, writer=writer)


# --- items ----------------------------------------------------------------------------------------


def _messages(asked: _Body, warnings: list[str]) -> tuple[Message, ...]:
    """Join items into turns: an assistant's is one message, with its thoughts, its text and its
    calls.
    """
    found = Conversation()
    if asked.instructions:
        found.join_text("system", text_of(asked.instructions))
    for number, item in enumerate(asked.input):
        _add_item(found, f"input[{number}]", item, warnings)
    _drop_lone_thoughts(found)
    if not found.messages:
        raise BodyError("input", "it has no messages")
    return tuple(found.messages)


def _add_item(found: Conversation, where: str, item: _Item, warnings: list[str]) -> None:
    match item.type:
        case "message":
            if item.role is None:
                raise BodyError(f"{where}.role", "it is missing")
            role: Role = "system" if item.role == "developer" else item.role
            if role != "assistant":
                _drop_lone_thoughts(found)
            found.join_text(role, text_of(item.content))
        case "reasoning":  # as it is, or as this server hid it, or else its summary
            thought = text_of(item.content)
            if not thought and item.encrypted_content.startswith(_HIDDEN):
                thought = item.encrypted_content.removeprefix(_HIDDEN)
            thought = thought or text_of(item.summary)
            if thought:
                found.join_thought(thought)
        case "function_call":
            found.join_call(where, item.call_id, item.name, arguments_of(item.arguments))
        case "custom_tool_call":
            found.join_call(where, item.call_id, item.name, {"input": item.input})
        case "function_call_output" | "custom_tool_call_output":
            found.add_result(item.call_id, text_of(item.output))
        case kind if kind in _ELSEWHERE:
            what = f"{shown(kind)} stands for items that are not kept here: send the items"
            raise BodyError(f"{where}.type", what)
        case kind:
            warnings.append(f"{where}: ignored, since {shown(kind)} does not run here")


def _drop_lone_thoughts(found: Conversation) -> None:
    """Drop a last turn that has only thoughts: its answer was left out."""
    last = found.messages[-1] if found.messages else None
    if last and last.role == "assistant" and not last.content and not last.tool_calls:
        del found.messages[-1]


# --- answers --------------------------------------------------------------------------------------


class ResponseWriter(BlockWriter):
    """Writes one response, whole or as events. `echo` repeats the request; `custom` tools take a
    free text. With `hides`, thoughts are also in the form that clients send back.
    """

    def __init__(
        self,
        *args: Any,
        echo: Mapping[str, Any],
        custom: Collection[str],
        hides: bool,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._custom, self._hides = custom, hides
        self._head = {
            "id": f"resp_{self._identity}",
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            **echo,
            "store": False,
        }
        self._n_events = 0
        #: Of the open block: the id of its item, and what is told of a call.
        self._item_id = self._told = ""
        self._whole: Json = {}

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("created", "in_progress")]

    def fail(self, error: Json) -> list[Json]:
        what = {"code": "server_error", "message": error["error"]["message"]}
        response = {**self._response("failed"), "error": what}
        return [self._event("failed", response=response)]

    def whole(self) -> Json:
        return self._whole

    def _end(self, _number: int) -> list[Json]:
        is_whole = self._answers[0].finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        events: list[Json] = []
        if self._block is None and not self._blocks:  # clients expect an item
            self._block = Delta("content", "")
            events += self._opened(self._block)
        is_call = self._block is not None and self._block.kind == "call"
        events += self._close("incomplete" if is_call else status)
        figures = self._figures()
        usage = figures["usage"]
        # OpenAI charges for writing to its cache.
        details = {**usage["prompt_tokens_details"], "cache_write_tokens": 0}
        self._whole = {
            **self._response(status),
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": details,
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
            **own_figures(figures),
        }
        return [*events, self._event(status, response=self._whole)]

    def _response(self, status: str) -> Json:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._blocks),
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._n_events - 1, **fields}

    # --- items ----------------------------------------------------------------------------------

    def _opened(self, block: Delta) -> list[Json]:
        block, self._told = replace(block, text=""), ""
        self._item_id = f"{_IDS[self._kind(block)]}_{self._identity}_{len(self._blocks)}"
        item = self._item(block, "in_progress")
        if block.kind == "call":
            return [self._item_event("output_item.added", item=item)]
        return [
            self._item_event("output_item.added", item={**item, "content": []}),
            self._item_event("content_part.added", part=_part(block)),
        ]

    def _added(self, block: Delta, text: str) -> list[Json]:
        if block.kind != "call":
            kind = f"{_part(block)['type']}.delta"
            return [self._item_event(kind, logprobs=[], delta=text)]
        field, passed = self._passed(block)
        added, self._told = passed[len(self._told) :], passed
        kind = f"{self._kind(block)}_{field}.delta"
        return [self._item_event(kind, delta=added)] if added else []

    def _closed(self, block: Delta, status: str) -> list[Json]:
        if block.kind == "call":
            field, passed = self._passed(block)
            done = {field: passed, "name": block.name}
            events = [self._item_event(f"{self._kind(block)}_{field}.done", **done)]
        else:
            part = _part(block)
            events = [
                self._item_event(f"{part['type']}.done", logprobs=[], text=block.text),
                self._item_event("content_part.done", part=part),
            ]
        item = self._item(block, status)
        events.append(self._item_event("output_item.done", item=item))
        self._blocks.append(item)
        return events

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the open item, the next of the output, and its only part."""
        place = {"item_id": self._item_id, "output_index": len(self._blocks), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _kind(self, block: Delta) -> str:
        if block.kind == "call":
            return "custom_tool_call" if block.name in self._custom else "function_call"
        return "message" if block.kind == "content" else "reasoning"

    def _item(self, block: Delta, status: str) -> Json:
        item: Json = {"id": self._item_id, "type": self._kind(block), "status": status}
        if block.kind == "call":
            field, passed = self._passed(block)
            return {**item, "call_id": block.identity, "name": block.name, field: passed}
        item["content"] = [_part(block)]
        if block.kind == "content":
            return {**item, "role": "assistant"}
        hidden = {"encrypted_content": f"{_HIDDEN}{block.text}"} if self._hides else {}
        return {**item, "summary": [], **hidden}

    def _passed(self, block: Delta) -> tuple[str, str]:
        """Return the field of a call for what is passed, and that as far as it is there."""
        if block.name in self._custom:
            return "input", _free_text(block.text, is_end=block.is_end)
        return "arguments", block.text


def _part(block: Delta) -> Json:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _free_text(arguments: str, *, is_end: bool) -> str:
    """Return the input of a custom tool, as far as it is there; if the model wrote other arguments,
    these.
    """
    value = from_json(arguments or "{}", allow_partial="trailing-strings").get("input")
    return value if isinstance(value, str) else arguments if is_end else ""
