"""OpenAI's Responses API: reads its requests, and writes answers in its form.

Tools that run at OpenAI, and items about them, are left out with a warning. What stands for a text that this
server does not have is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specgen.events import CommittedEvent
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.answers import AnswerWriter, Json, own_figures
from specgen.serve.formats.request import (
    AnswerBody,
    AnswerFormat,
    BodyError,
    Conversation,
    Fields,
    Parts,
    Request,
    Schema,
    ToolChoice,
    ToolList,
    arguments_of,
    parse,
    read_tools,
    shown,
    text_of,
)
from specgen.serve.formats.tool_calls import Delta
from specgen.session.prompts.template import Message, Role

#: Items that stand for a text which this server does not have.
_ELSEWHERE = ("item_reference", "compaction", "compaction_summary", "context_compaction")
#: Fields of which the same holds.
_REFUSED = ("conversation", "previous_response_id", "prompt")
#: The parameters of a custom tool: a free text.
_FREE_TEXT: Schema = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
#: What requests may ask to include: thoughts in a form that clients send back, but do not show. Those of a local
#: model are no secret; a mark tells them from another server's.
_ENCRYPTED = "reasoning.encrypted_content"
_HIDDEN = "specgen:"
#: The fields of a response that repeat the request.
_ECHO: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}


class _Item(Fields):
    type: str = "message"
    role: Literal["assistant", "developer", "system", "user"] | None = None
    content: Parts = []
    #: Of thoughts.
    summary: Parts = []
    encrypted_content: str = ""
    #: Of calls, and of their results.
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    input: str = ""
    output: Parts = []


class _Text(Fields):
    format: AnswerFormat | None = None


class _Reasoning(Fields):
    effort: str | None = None


class _Body(AnswerBody):
    instructions: Parts = []
    input: Annotated[
        list[_Item],
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value
        ),
        Field(min_length=1),
    ]
    tools: ToolList = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    include: list[str] = []

    format_field: ClassVar[str] = "text.format"


def read_response_request(
    body: Mapping[str, Any], sampling: SamplerOptions, generation: GenerationOptions
) -> tuple[Request, ...]:
    """Read a body; `sampling` and `generation` give the defaults of its fields. Raise `BodyError`."""
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
    custom = {tool.name for tool in asked.tools if tool.type == "custom"}
    tools = [
        tool.model_copy(update={"parameters": _FREE_TEXT}) if tool.name in custom else tool
        for tool in asked.tools
    ]
    warnings += [
        f"tools[{number}].format: ignored, the input is a free text"
        for number, tool in enumerate(tools)
        if tool.name in custom and tool.format not in ({}, {"type": "text"})
    ]
    given = {name: body[name] for name in _ECHO if body.get(name) is not None}
    request = asked.request(
        "chat",
        sampling,
        generation,
        form=asked.text.format,
        messages=messages,
        tools=read_tools(tools, asked.tool_choice, warnings, is_parallel=asked.parallel_tool_calls),
        warnings=warnings,
        variables=asked.variables(asked.reasoning.effort),
        splits_reasoning=True,
        writer=functools.partial(
            ResponseWriter,
            echo={**_ECHO, **given},
            custom=custom,
            hides=_ENCRYPTED in asked.include,
        ),
    )
    return (request,)


# --- items ----------------------------------------------------------------------------------------


def _messages(asked: _Body, warnings: list[str]) -> tuple[Message, ...]:
    """Join items into the turns that templates know. An assistant's turn is one message, with its thoughts,
    its text and its calls."""
    found = Conversation()
    if asked.instructions:
        found.join_text("system", text_of("instructions", asked.instructions))
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
            found.join_text(role, text_of(f"{where}.content", item.content))
        case "reasoning":  # as it is, or as this server hid it, or else its summary
            thought = text_of(f"{where}.content", item.content)
            if not thought and item.encrypted_content.startswith(_HIDDEN):
                thought = item.encrypted_content.removeprefix(_HIDDEN)
            thought = thought or text_of(f"{where}.summary", item.summary)
            if thought:
                found.join_thought(thought)
        case "function_call":
            found.join_call(where, item.call_id, item.name, arguments_of(item.arguments))
        case "custom_tool_call":
            found.join_call(where, item.call_id, item.name, {"input": item.input})
        case "function_call_output" | "custom_tool_call_output":
            text = text_of(f"{where}.output", item.output)
            found.add_result(f"{where}.call_id", item.call_id, text)
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
    """Writes one response, whole or as events.

    `echo` are the fields that repeat the request. `custom` are the names of tools that take a free text. With
    `hides`, thoughts are also in the form that clients send back.
    """

    is_named = True

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
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }
        self._n_events = 0
        self._output: list[Json] = []
        #: The kind of the open item, to which deltas are added, and its text.
        self._kind: Literal["message", "reasoning"] | None = None
        self._text = ""
        self._whole: Json = {}

    def begin(self, _n_prompt_tokens: int) -> list[Json]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def fail(self, error: Json) -> list[Json]:
        what = {"code": "server_error", "message": error["error"]["message"]}
        response = {**self._response("failed"), "error": what}
        return [self._event("response.failed", response=response)]

    def whole(self) -> Json:
        return self._whole

    def _add(self, _number: int, deltas: list[Delta], _event: CommittedEvent | None) -> list[Json]:
        events: list[Json] = []
        for delta in deltas:
            if delta.kind == "call":
                events += self._add_call(delta)
                continue
            kind: Literal["message", "reasoning"] = "message"
            if delta.kind == "thought":
                kind = "reasoning"
            if self._kind != kind:
                events += [*self._close("completed"), *self._begin_item(kind)]
            self._text += delta.text
            events.append(self._text_event("delta", delta=delta.text))
        return events

    def _end(self, _number: int) -> list[Json]:
        is_whole = self._answers[0].finish_reason != "length"
        status = "completed" if is_whole else "incomplete"
        events: list[Json] = []
        if self._kind is None and not self._output:  # clients expect an item
            events += self._begin_item("message")
        events += self._close(status)
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
        return [*events, self._event(f"response.{status}", response=self._whole)]

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
        number = self._n_events
        self._n_events += 1
        return {"type": kind, "sequence_number": number, **fields}

    # --- items ----------------------------------------------------------------------------------

    def _begin_item(self, kind: Literal["message", "reasoning"]) -> list[Json]:
        self._kind, self._text = kind, ""
        item = {**self._item("in_progress"), "content": []}
        return [
            self._event("response.output_item.added", output_index=self._place, item=item),
            self._event("response.content_part.added", **self._part_place, part=self._part()),
        ]

    def _close(self, status: str) -> list[Json]:
        if self._kind is None:
            return []
        item = self._item(status)
        events = [
            self._text_event("done", text=self._text),
            self._event("response.content_part.done", **self._part_place, part=self._part()),
            self._event("response.output_item.done", output_index=self._place, item=item),
        ]
        self._output.append(item)
        self._kind = None
        return events

    def _item(self, status: str) -> Json:
        item = {"id": self._part_place["item_id"], "type": self._kind, "status": status}
        if self._kind == "message":
            return {**item, "role": "assistant", "content": [self._part()]}
        hidden = {"encrypted_content": f"{_HIDDEN}{self._text}"} if self._hides else {}
        return {**item, "summary": [], **hidden, "content": [self._part()]}

    def _part(self) -> Json:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _text_event(self, step: str, **fields: Any) -> Json:
        more: Json = {} if self._kind == "reasoning" else {"logprobs": []}
        kind = f"response.{self._part()['type']}.{step}"
        return self._event(kind, **self._part_place, **fields, **more)

    def _add_call(self, call: Delta) -> list[Json]:
        events = self._close("completed")
        name, arguments = call.name, call.text
        is_custom = name in self._custom
        text = _free_text(arguments) if is_custom else arguments
        field = "input" if is_custom else "arguments"
        item: Json = {
            "type": "custom_tool_call" if is_custom else "function_call",
            "id": f"{'ctc' if is_custom else 'fc'}_{self._identity}_{self._place}",
            "call_id": call.identity,
            "name": name,
            "status": "completed",
            field: text,
        }
        event = f"{item['type']}_{field}"
        place = {"item_id": item["id"], "output_index": self._place}
        begun = {**item, field: "", "status": "in_progress"}
        events += [
            self._event("response.output_item.added", output_index=self._place, item=begun),
            self._event(f"response.{event}.delta", **place, delta=text),
            self._event(f"response.{event}.done", **place, **{field: text, "name": name}),
            self._event("response.output_item.done", output_index=self._place, item=item),
        ]
        self._output.append(item)
        return events

    @property
    def _place(self) -> int:
        """The index of the next item in the output."""
        return len(self._output)

    @property
    def _part_place(self) -> Json:
        prefix = "rs" if self._kind == "reasoning" else "msg"
        identity = f"{prefix}_{self._identity}_{self._place}"
        return {"item_id": identity, "output_index": self._place, "content_index": 0}


def _free_text(arguments: str) -> str:
    """Return the input of a custom tool; if the model wrote other arguments, these."""
    value = json.loads(arguments).get("input")
    return value if isinstance(value, str) else arguments
