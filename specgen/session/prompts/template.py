"""Render a conversation with the model's own chat template."""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

    role: Role
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
    rearranges: bool = True,
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
        rearranges: Whether to help templates that do not support everything: if a template refuses
            the messages, other arrangements are tried (`_shapes`); if it writes no tool calls,
            they are added to the text.

    Raises:
        PromptError: If the template refuses the messages, or fails in any other way.
    """
    mark: Callable[[Any], Any] = marked if marks_contents else _unchanged
    # Defaults as in llama.cpp. Without a `date_string`, some templates write an outdated date.
    context: dict[str, Any] = {"enable_thinking": True, "date_string": now.strftime("%d %b %Y")}
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
        context["functions"] = mark(to_json(tools, indent=4)) if tools else ""
        context["datetime"] = now.strftime("%b %d %Y")

    first_failure: Exception | None = None
    for shape in _shapes(messages) if rearranges else [messages]:
        turns = [_turn(message, template, adds_calls=rearranges) for message in shape]
        # Roles stay unmarked: templates write control tokens with them.
        context["messages"] = [mark(turn) | {"role": turn["role"]} for turn in turns]
        try:
            return "".join(compiled(template).generate(context))
        except Exception as error:  # noqa: BLE001 - a template's expressions can raise anything
            first_failure = first_failure or error
    reason = " ".join(str(first_failure).split()) or type(first_failure).__name__
    message = f"the model's chat template failed: {reason}"
    raise PromptError(message, "`specgen run --raw` uses no template") from first_failure


def _unchanged(value: Any) -> Any:
    return value


# --- shapes of a conversation ---------------------------------------------------------------------


def _shapes(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as it is, and then in other arrangements, for templates that refuse it.

    Each change is applied to all earlier arrangements, so that combinations are tried, too. Those
    that do not differ from an earlier one are not yielded.
    """
    shapes = [list(messages)]
    yield shapes[0]
    for change in (
        _with_joined_turns,
        _with_texts_as_arguments,
        _with_single_calls,
        _with_texts_in_thoughts,
        _without_system,
    ):
        for shape in list(shapes):
            changed = change(shape)
            if changed not in shapes:
                shapes.append(changed)
                yield changed


def _with_joined_turns(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive turns of the user, which some templates refuse."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == "user":
            joined[-1] = replace(message, content=f"{joined[-1].content}\n\n{message.content}")
        else:
            joined.append(message)
    return joined


def _with_texts_as_arguments(messages: Sequence[Message]) -> list[Message]:
    """Convert the arguments of calls to JSON texts, as Functionary's template expects them."""

    def with_text(call: ToolCall) -> ToolCall:
        return replace(call, arguments=to_json(call.arguments))

    return [replace(each, tool_calls=tuple(map(with_text, each.tool_calls))) for each in messages]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Give each call a turn of its own, followed by its result, for Llama 3's template."""
    separated: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.tool_calls) < 2:
            separated.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0].role == "tool":
            results.append(rest.pop(0))
        content = message.content
        for call in message.tool_calls:
            separated.append(replace(message, content=content, tool_calls=(call,)))
            content = ""  # only the first turn has the text
            separated += [each for each in results if each.tool_call_id == call.identity]
            results = [each for each in results if each.tool_call_id != call.identity]
        separated += results  # those that belong to none of the calls
    return separated


def _with_texts_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Move the text of turns with calls and thoughts into the thoughts, for gpt-oss's template."""

    def with_text_in_thoughts(message: Message) -> Message:
        if not (message.tool_calls and message.reasoning and message.content):
            return message
        thoughts = f"{message.reasoning}\n\n{message.content}"
        return replace(message, content="", reasoning=thoughts)

    return [with_text_in_thoughts(message) for message in messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Put the system message at the beginning of the user's first turn, for Gemma 2's template."""
    first, *others = messages
    if first.role != "system" or not others or others[0].role != "user":
        return list(messages)
    joined = replace(others[0], content=f"{first.content}\n\n{others[0].content}")
    return [joined, *others[1:]]


# --- messages as templates read them --------------------------------------------------------------


def _turn(
    message: Message,
    template: str,
    *,
    adds_calls: bool,
) -> dict[str, Any]:
    """Return a message as a dictionary for a template.

    It has no keys without a value, since templates test which keys a message has.

    Args:
        message: The message.
        template: The template, on which the form of some fields depends.
        adds_calls: Whether to add tool calls to the text if the template does not write them.
    """
    as_id: Callable[[str], str] = _short_id if _NEEDS_SHORT_IDS in template else str
    text = message.content
    if message.tool_calls and adds_calls and "tool_calls" not in template:
        text = _with_calls(message)
    content: Any = text
    if message.reasoning and "block['thinking']" in template:  # Ministral 3
        content = [
            {"type": "thinking", "thinking": message.reasoning},
            {"type": "text", "text": text},
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


def _with_calls(message: Message) -> str:
    """Return the text of a message followed by its tool calls as JSON, one per line."""
    calls = [
        to_json({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls
    ]
    return "\n".join(filter(None, [message.content, *calls]))


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
