"""Render a conversation with the model's own chat template."""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from specgen.errors import PromptError, UsageError
from specgen.option_values import shown_value
from specgen.session.prompts.marked_text import marked
from specgen.session.prompts.sandbox import compiled, to_json

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[Role, ...] = get_args(Role)

#: The variables that specgen sets for all templates.
OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
#: Matches templates that read tools from the usual variable.
_TAKES_TOOLS = re.compile(r"\btools\b")
#: Matches where a template reads the thoughts of a message.
_THOUGHTS_FIELD = re.compile(r"message(?:\.|\[['\"])(thinking|reasoning|thought)\b")
#: Templates that contain this (Mistral's) accept only tool call ids of nine letters and digits.
_NEEDS_SHORT_IDS = "[TOOL_CALLS]"
_SHORT_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an earlier turn."""

    #: The id that the tool's result refers to.
    identity: str
    #: The name of the tool.
    name: str
    #: A JSON object, or the text of one.
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation."""

    #: Who sends it.
    role: Role
    #: Its text.
    content: str
    #: The tool calls of an assistant.
    tool_calls: tuple[ToolCall, ...] = ()
    #: In a tool's message: the id of the call that it answers.
    tool_call_id: str | None = None
    #: The name of the sender, or of the tool.
    name: str | None = None
    #: The thoughts of an assistant.
    reasoning: str | None = None

    def __post_init__(self) -> None:
        """Check the role and the content.

        Raises:
            UsageError: If there is no such role, or the content is not a text.
        """
        if self.role not in _ROLES:
            roles = ", ".join(_ROLES)
            raise UsageError(f"role: give one of {roles}, not {shown_value(self.role)}")
        if not isinstance(self.content, str):
            raise UsageError(f"content: give a text, not {shown_value(self.content)}")


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
    """Return the text of a conversation as a model expects it, up to where its answer begins.

    Args:
        template: The Jinja template from a model file, which is not trusted.
        messages: The turns so far.
        bos_token: The text of the beginning-of-text token.
        eos_token: The text of the end-of-text token.
        now: The current time, for templates that write it.
        tools: The tools that the model may call, in the format of OpenAI's API.
        variables: More variables for the template. They do not replace `OWN_VARIABLES`.
        marks_contents: Whether to mark all text that does not come from the template (`marked`).

    Raises:
        PromptError: If the template refuses the messages, or fails in any other way.
    """
    mark: Callable[[Any], Any] = marked if marks_contents else _unchanged
    # Defaults as in llama.cpp. Without a `date_string`, some templates write an outdated date.
    context: dict[str, Any] = {}
    context["enable_thinking"] = True
    context["date_string"] = now.strftime("%d %b %Y")
    for name, value in (variables or {}).items():
        context[name] = mark(value)
    context["add_generation_prompt"] = True
    context["bos_token"] = bos_token
    context["eos_token"] = eos_token
    context["strftime_now"] = now.strftime
    # A user's variable must not pass for tools. Without tools, the name stays undefined, because
    # templates test for that.
    context.pop("tools", None)
    if tools:
        context["tools"] = mark(list(tools))
        context["xml_tools"] = context["tools"]  # SmolLM3's name for them
    # A template that does not mention `tools` may be Firefunction's, which requires these names.
    if not _TAKES_TOOLS.search(template):
        functions = to_json(tools, indent=4) if tools else ""
        context["functions"] = mark(functions)
        context["datetime"] = now.strftime("%b %d %Y")

    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = mark(_turn(message, template))
        turn["role"] = message.role  # unmarked: templates write control tokens with it
        turns.append(turn)
    context["messages"] = turns
    return _written(template, context)


def _written(template: str, context: Mapping[str, Any]) -> str:
    """Return what a template writes, with the variables of a context.

    Raises:
        PromptError: If it fails.
    """
    try:
        return "".join(compiled(template).generate(context))
    except Exception as error:  # a template's expressions can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"the model's chat template failed: {reason}"
        raise PromptError(message, "`specgen run --raw` uses no template") from error


def _unchanged(value: Any) -> Any:
    return value


# --- messages as templates read them --------------------------------------------------------------


def _turn(message: Message, template: str) -> dict[str, Any]:
    """Return a message as a dictionary for a template, on which the form of some fields depends.

    It has no keys without a value, since templates test which keys a message has.
    """
    as_id: Callable[[str], str] = _short_id if _NEEDS_SHORT_IDS in template else str
    content: Any = message.content
    if message.reasoning and "block['thinking']" in template:  # Ministral 3
        content = [
            {"type": "thinking", "thinking": message.reasoning},
            {"type": "text", "text": message.content},
        ]
    calls = [
        {
            "id": as_id(call.identity),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    turn: dict[str, Any] = {
        "role": message.role,
        "content": content,
        "tool_calls": calls or None,
        "tool_call_id": None if message.tool_call_id is None else as_id(message.tool_call_id),
        "name": message.name,
        _name_of_thoughts(template): message.reasoning,
    }
    return {name: value for name, value in turn.items() if value is not None}


@functools.lru_cache(maxsize=16)
def _name_of_thoughts(template: str) -> str:
    """Return the name of the field from which a template reads the thoughts of a message.

    It is "reasoning_content" for most templates; those of gpt-oss and Solar have other names.
    """
    match = _THOUGHTS_FIELD.search(template)
    if match is None or "reasoning_content" in template:
        return "reasoning_content"
    return match[1]


def _short_id(identity: str) -> str:
    """Return a tool call id that Mistral's templates accept: the same, or a part of its hash."""
    if len(identity) == _SHORT_ID_LENGTH and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:_SHORT_ID_LENGTH]
