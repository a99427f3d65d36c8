"""Reads requests in the form of OpenAI's Responses API.

Tools that run at OpenAI, and items about them, are left out with a warning. What stands for a text that this
server does not have is refused.
"""

from __future__ import annotations

import base64
import binascii
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.fields import (
    AnswerBody,
    AnswerFormat,
    BodyError,
    Fields,
    Parts,
    Schema,
    ToolChoice,
    parse,
    shown,
    text_of,
)
from specgen.serve.formats.request import Conversation, Functions, Request, Tools, arguments_of
from specgen.serve.formats.responses_answer import ResponseWriter
from specgen.session.prompts.template import Message, Role

_ROLES: dict[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
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
#: What requests may ask to include. The thoughts of a local model are no secret.
_ENCRYPTED = "reasoning.encrypted_content"
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
    role: str | None = None
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


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _Tool(Fields):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Schema | None = None
    format: dict[str, Any] | None = None


class _Text(Fields):
    format: AnswerFormat | None = None
    verbosity: str = "medium"


class _Reasoning(Fields):
    effort: str | None = None
    summary: str = "auto"


class _Body(AnswerBody):
    instructions: Parts = []
    input: Annotated[list[_Item], BeforeValidator(_as_items), Field(min_length=1)]
    tools: list[_Tool] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    include: list[str] = []

    format_field: ClassVar[str] = "text.format"

    def warnings(self) -> list[str]:
        """Return what was ignored, in nested fields too."""
        found = super().warnings()
        if self.text.verbosity != "medium":
            found.append("text.verbosity: ignored, since the model has no such setting")
        if self.reasoning.summary != "auto":
            found.append("reasoning.summary: ignored, since thoughts come back as they are")
        found += [
            f"include: ignored {shown(what)}, which responses do not have"
            for what in self.include
            if what != _ENCRYPTED
        ]
        return found


def read_response_request(
    body: Mapping[str, Any], sampling: SamplerOptions, generation: GenerationOptions
) -> tuple[Request, ...]:
    """Read a body; `sampling` and `generation` give the defaults of its fields. Raise `BodyError`."""
    for name in _REFUSED:
        if body.get(name):
            raise BodyError(name, "nothing is kept here: send all items as input")
    asked = parse(_Body, body)
    warnings = asked.warnings()
    messages = _messages(asked, warnings)
    tools, custom = _tools(asked, warnings)
    writer = functools.partial(
        ResponseWriter,
        echo={
            name: default if body.get(name) is None else body[name]
            for name, default in _ECHO.items()
        },
        custom=custom,
        hides=hidden_thought if _ENCRYPTED in asked.include else None,
    )
    request = Request(
        "chat",
        asked.sampling(sampling),
        asked.generation(generation, asked.text.format),
        messages=messages,
        tools=tools,
        variables=asked.variables(asked.reasoning.effort),
        splits_reasoning=True,
        warnings=tuple(warnings),
        streams=asked.stream,
        speculative=asked.speculative,
        writer=writer,
    )
    return (request,)


def _tools(asked: _Body, warnings: list[str]) -> tuple[Tools | None, set[str]]:
    """Return the tools that run at the client, and the names of those that take a free text."""
    found, custom = Functions(), set()
    for number, tool in enumerate(asked.tools):
        where, parameters = f"tools[{number}]", tool.parameters
        if tool.type not in ("function", "custom"):
            warnings.append(f"{where}: ignored, since {shown(tool.type)} does not run here")
            continue
        if tool.type == "custom":
            parameters = _FREE_TEXT
            custom.add(tool.name or "")
            if tool.format not in (None, {"type": "text"}):
                warnings.append(f"{where}.format: ignored, the input is a free text")
        found.add(where, tool.name, tool.description, parameters)
    return found.chosen(asked.tool_choice, is_parallel=asked.parallel_tool_calls), custom


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
            if item.role not in _ROLES:
                known = ", ".join(sorted(_ROLES))
                raise BodyError(f"{where}.role", f"{shown(item.role)} is none of {known}")
            role = _ROLES[item.role]
            if role != "assistant":
                _drop_lone_thoughts(found)
            found.join_text(role, text_of(f"{where}.content", item.content))
        case "reasoning":  # as it is, or as this server hid it, or else its summary
            thought = text_of(f"{where}.content", item.content)
            thought = thought or _thought_in(item.encrypted_content)
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


def hidden_thought(thought: str) -> str:
    """Return thoughts in a form that clients send back, but do not show."""
    return base64.b64encode(thought.encode()).decode()


def _thought_in(hidden: str) -> str:
    """Return the thoughts in a text of `hidden_thought`; empty if it is none, but another server's."""
    try:
        return base64.b64decode(hidden.encode(), validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""
