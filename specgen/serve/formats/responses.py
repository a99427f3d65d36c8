"""OpenAI's Responses API. Tools that run at OpenAI are left out with a warning; what stands for a text that this server
does not have is refused."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from specgen.events import CommittedEvent
from specgen.serve.formats.answers import AnswerWriter, own_figures
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
#: What requests may ask to include: thoughts that clients send back unseen; a mark says that they are ours.
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


#: The kinds of items that are calls, with the field for what is passed, and what ids begin with.
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
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
    """Join items into turns: an assistant's is one message, with its thoughts, its text and its calls."""
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


class ResponseWriter(AnswerWriter):
    """Writes one response, whole or as events. `echo` repeats the request; `custom` tools take a free text. With
    `hides`, thoughts are also in the form that clients send back."""

    form = "named"

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
        self._output: list[Json] = []
        #: The open item: its kind (``message``, ``reasoning`` or one of `_CALLS`), id and text; the open call.
        self._kind: str | None = None
        self._item_id = ""
        self._text = ""
        self._call, self._arguments = Delta("call", ""), ""
        self._whole: Json = {}

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        response = self._response("in_progress")
        return [
            self._event("created", response=response),
            self._event("in_progress", response=response),
        ]

    def fail(self, error: Json) -> list[Json]:
        what = {"code": "server_error", "message": error["error"]["message"]}
        response = {**self._response("failed"), "error": what}
        return [self._event("failed", response=response)]

    def whole(self) -> Json:
        return self._whole

    def _add(self, _number: int, deltas: list[Delta], _event: CommittedEvent | None) -> list[Json]:
        events: list[Json] = []
        for delta in deltas:
            if delta.kind == "arguments":
                events += self._add_arguments(delta)
                continue
            kind = "message" if delta.kind == "content" else "reasoning"
            if delta.kind == "call":
                is_custom = delta.name in self._custom
                kind = "custom_tool_call" if is_custom else "function_call"
                self._arguments, self._call = "", delta
            if self._kind != kind or delta.kind == "call":
                events += [*self._close("completed"), *self._open(kind)]
            if delta.kind != "call":
                self._text += delta.text
                events.append(self._text_event("delta", delta=delta.text))
        return events

    def _end(self, _number: int) -> list[Json]:
        is_whole = self._answers[0].finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        events: list[Json] = []
        if self._kind is None and not self._output:  # clients expect an item
            events += self._open("message")
        events += self._close("incomplete" if self._kind in _CALLS else status)
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
            "output": list(self._output),
            "usage": None,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._n_events - 1, **fields}

    # --- items ----------------------------------------------------------------------------------

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the open item, the next of the output, and its only part."""
        place = {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _open(self, kind: str) -> list[Json]:
        self._kind, self._text = kind, ""
        self._item_id = f"{_IDS[kind]}_{self._identity}_{len(self._output)}"
        item = self._item("in_progress")
        if kind in _CALLS:
            return [self._item_event("output_item.added", item=item)]
        return [
            self._item_event("output_item.added", item={**item, "content": []}),
            self._item_event("content_part.added", part=self._part()),
        ]

    def _close(self, status: str) -> list[Json]:
        if self._kind is None:
            return []
        item = self._item(status)
        if (field := _CALLS.get(self._kind)) is not None:
            done = {field: self._text, "name": self._call.name}
            events = [self._item_event(f"{self._kind}_{field}.done", **done)]
        else:
            events = [
                self._text_event("done", text=self._text),
                self._item_event("content_part.done", part=self._part()),
            ]
        events.append(self._item_event("output_item.done", item=item))
        self._output.append(item)
        self._kind = None
        return events

    def _item(self, status: str) -> Json:
        item: Json = {"id": self._item_id, "type": self._kind, "status": status}
        if (field := _CALLS.get(self._kind or "")) is not None:
            call = self._call
            return {**item, "call_id": call.identity, "name": call.name, field: self._text}
        item["content"] = [self._part()]
        if self._kind == "message":
            return {**item, "role": "assistant"}
        hidden = {"encrypted_content": f"{_HIDDEN}{self._text}"} if self._hides else {}
        return {**item, "summary": [], **hidden}

    def _part(self) -> Json:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _text_event(self, step: str, **fields: Any) -> Json:
        return self._item_event(f"{self._part()['type']}.{step}", logprobs=[], **fields)

    def _add_arguments(self, delta: Delta) -> list[Json]:
        self._arguments += delta.text
        text = self._arguments
        if self._kind == "custom_tool_call":
            text = _free_text(text, is_end=delta.is_end)
        added, self._text = text[len(self._text) :], text
        kind = f"{self._kind}_{_CALLS[self._kind or '']}.delta"
        events = [self._item_event(kind, delta=added)] if added else []
        return events + (self._close("completed") if delta.is_end else [])


def _free_text(arguments: str, *, is_end: bool) -> str:
    """Return the input of a custom tool, as far as it is there; if the model wrote other arguments, these."""
    value = from_json(arguments, allow_partial="trailing-strings").get("input")
    return value if isinstance(value, str) else arguments if is_end else ""
