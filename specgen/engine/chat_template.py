"""The prompt of a chat, written by the model's own template."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from specgen.engine.template_sandbox import BoundedEnvironment
from specgen.errors import PromptError

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


#: What the templates write that take ids of calls of nine letters and digits only: Mistral's.
_NEEDS_SHORT_IDS = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an earlier turn. `arguments` is an object as `json.loads` makes it, or a
    text if the model wrote no object."""

    identity: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. An assistant's may have calls of tools; a tool's answers the
    call `tool_call_id`, and `name` is that of the tool."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class _GenerationBlocks(jinja2.ext.Extension):
    """Templates made for training mark the assistant's text with ``{% generation %}``; the
    mark changes nothing in what is written."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str,
    eos_token: str,
    now: datetime.datetime,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The conversation as the model expects it, ending where its answer begins. `tools` are what it
    may call, as OpenAI's API describes them; a template that does not know them leaves them out.

    `template` is Jinja as Hugging Face's chat templates use it; it comes with the model file,
    from whoever made that, so it runs in a sandbox. Raises `PromptError` if the template does
    not accept the messages (some know no system message, for example), is broken, whatever
    goes wrong in it, or does without end.
    """
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    has_short_ids = _NEEDS_SHORT_IDS in template
    variables = {
        "messages": [_turn(message, has_short_ids) for message in messages],
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    if tools:  # templates ask whether it is defined
        variables["tools"] = list(tools)
    try:
        return environment.rendered(template, variables)
    # What a template's expressions raise can be anything, as can what compiling them raises.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PromptError(
            f"the model's chat template failed: {reason}",
            hint="leave out --system if the template takes none; `specgen run --raw` uses no template",
        ) from error


def _turn(message: Message, has_short_ids: bool) -> dict[str, Any]:
    """A message as templates read it. They ask which keys it has."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    as_id = _short_id if has_short_ids else str
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": as_id(call.identity),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = as_id(message.tool_call_id)
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _short_id(identity: str) -> str:
    """The id itself if a template of Mistral's takes it, else one that stands for it."""
    if len(identity) == 9 and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
