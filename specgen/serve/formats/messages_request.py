"""Reads requests in the form of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.fields import (
    AnswerBody,
    AnswerFormat,
    BodyError,
    Fields,
    Part,
    Schema,
    ToolChoice,
    parse,
    shown,
    text_of,
)
from specgen.serve.formats.messages_answer import MessageWriter
from specgen.serve.formats.request import Conversation, Functions, Request
from specgen.session.prompts.template import Message

#: The start of a part that Claude Code puts first. It differs from request to request, so that no prefix of
#: the prompt would be in the cache.
_BILLING = "x-anthropic-billing-header"


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


class _Tool(Fields):
    type: str = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: Schema | None = None


class _Thinking(Fields):
    type: str
    budget_tokens: int | None = None


class _OutputConfig(Fields):
    effort: str | None = None
    format: AnswerFormat | None = None


class _Body(AnswerBody):
    system: _Blocks = []
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] = []
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
    warnings = asked.warnings()
    functions = Functions()
    for number, tool in enumerate(asked.tools):
        where = f"tools[{number}]"
        if tool.type == "custom":
            functions.add(where, tool.name, tool.description, tool.input_schema, "input_schema")
        else:
            warnings.append(f"{where}: ignored, since {shown(tool.type)} does not run here")
    alone = asked.tool_choice is not None and asked.tool_choice.disable_parallel_tool_use
    thinking = asked.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        warnings.append("thinking.budget_tokens: ignored, since only max_tokens limits thoughts")
    # With other types, ``adaptive`` for example, the model decides.
    thinks = {"enabled": True, "disabled": False}.get(thinking.type if thinking else "")
    config = asked.output_config
    request = Request(
        "chat",
        asked.sampling(sampling),
        asked.generation(generation, config.format or asked.output_format),
        messages=_messages(asked),
        tools=functions.chosen(asked.tool_choice, is_parallel=not alone),
        variables=asked.variables(config.effort, thinks),
        splits_reasoning=True,
        warnings=tuple(warnings),
        streams=asked.stream,
        speculative=asked.speculative,
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
