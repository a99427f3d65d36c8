"""Render a conversation with the model's own chat template."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from specgen.errors import PromptError
from specgen.session.content_marks import MarkedEnvironment, marked
from specgen.session.template_sandbox import BoundedEnvironment

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]


#: The variables of all templates.
OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
#: Mistral's templates, which write this mark, accept only call ids of nine letters and digits.
_NEEDS_SHORT_IDS = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an earlier turn. `arguments` is an object from `json.loads`, or the text
    that the model wrote if that was no object."""

    identity: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. An assistant's turn may have `tool_calls`, and the `reasoning` before the
    answer, of which templates keep what the model needs. A tool's turn is the result of the call
    `tool_call_id`, and `name` is the name of the tool."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, with which templates made for training mark the assistant's
    text. The mark does not change the output."""

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
    variables: Mapping[str, Any] | None = None,
    marks_contents: bool = False,
) -> str:
    """Return the conversation as the model expects it, up to where its answer begins. `tools` are the
    tools that it may call, as OpenAI's API describes them; a template without tools ignores them.
    `variables` are more variables for the template, such as ``enable_thinking``; those that all templates
    have, `OWN_VARIABLES`, keep their values.
    `marks_contents` marks all that is not the template's own text (see `content_marks`).

    `template` is Jinja as Hugging Face's chat templates use it. It comes with the model file, which is not
    trusted, so it runs in a sandbox. Raise `PromptError` if the template does not accept the messages (some
    accept no system message, for example), fails in any way, or exceeds the limits of the sandbox.
    """
    environment = _environment(MarkedEnvironment if marks_contents else BoundedEnvironment)
    environment.globals["strftime_now"] = now.strftime
    has_short_ids = _NEEDS_SHORT_IDS in template
    turns = [_turn(message, has_short_ids) for message in messages]
    given = dict(variables or {})
    if marks_contents:
        # The role is not the sender's text: templates make control tokens of it.
        turns = [marked(turn) | {"role": turn["role"]} for turn in turns]
        given = {name: marked(value) for name, value in given.items()}
    known = {
        "messages": turns,
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    if tools:  # templates ask whether it is defined
        known["tools"] = marked(tools) if marks_contents else list(tools)
    try:
        return environment.rendered(_compiled(template), {**given, **known})
    # Compiling and evaluating a template's expressions can raise anything.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PromptError(
            f"the model's chat template failed: {reason}",
            hint="leave out --system if the template takes none; `specgen run --raw` uses no template",
        ) from error


def _environment(kind: type[BoundedEnvironment]) -> BoundedEnvironment:
    environment = kind(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> types.CodeType:
    """Compile a template, once for all conversations: that takes longer than to render it."""
    return _environment(BoundedEnvironment).compile(template)


def _turn(message: Message, has_short_ids: bool) -> dict[str, Any]:
    """Return a message as templates read it. They test which keys it has, so absent fields have none."""
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
    if message.reasoning is not None:
        turn["reasoning_content"] = message.reasoning
    return turn


def _short_id(identity: str) -> str:
    """Return the id if Mistral's templates accept it, else nine hexadecimal digits of its hash."""
    if len(identity) == 9 and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
