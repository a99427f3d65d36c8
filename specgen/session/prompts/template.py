"""Render a conversation with the model's own chat template."""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from specgen.errors import PromptError
from specgen.session.prompts.marked_text import marked
from specgen.session.prompts.sandbox import compiled, to_json

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

#: The variables that specgen sets for all templates.
OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
#: Templates that read the usual variable for tools.
_TAKES_TOOLS = re.compile(r"\btools\b")
#: Where a template takes the thoughts of a turn from.
_THOUGHTS_FIELD = re.compile(r"message(?:\.|\[['\"])(thinking|reasoning|thought)\b")
#: Mistral's templates, which write this mark, accept only call ids of nine letters and digits.
_NEEDS_SHORT_IDS = "[TOOL_CALLS]"
_SHORT_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an earlier turn."""

    identity: str
    name: str
    #: An object of JSON, or that as a text.
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a conversation."""

    role: Role
    content: str
    #: An assistant's calls of tools.
    tool_calls: tuple[ToolCall, ...] = ()
    #: The call of which a tool's message is the result.
    tool_call_id: str | None = None
    name: str | None = None
    #: An assistant's thoughts.
    reasoning: str | None = None


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
    """Return the conversation as the model expects it, up to where its answer begins.

    Args:
        template: Jinja from a model file, which is not trusted.
        messages: The turns so far.
        bos_token: The name of the token that begins a text.
        eos_token: The name of the token that ends a text.
        now: The time, for templates that write it.
        tools: The tools that the model may call, as OpenAI's API describes them.
        variables: More variables for the template. They do not replace `OWN_VARIABLES`.
        marks_contents: Whether all text that is not the template's own is marked (`marked`).
        rearranges: Whether other shapes of turns and calls are tried if the template refuses these,
            and calls are added to the text if the template writes none.

    Raises:
        PromptError: The template does not accept the messages, or fails in any way.
    """
    mark: Callable[[Any], Any] = marked if marks_contents else _unchanged
    # As in llama.cpp: templates ask whether these are defined, and some have a date of long ago.
    given: dict[str, Any] = {"enable_thinking": True, "date_string": now.strftime("%d %b %Y")}
    for name, value in (variables or {}).items():
        given[name] = mark(value)
    given["add_generation_prompt"] = True
    given["bos_token"] = bos_token
    given["eos_token"] = eos_token
    given["strftime_now"] = now.strftime
    given.pop("tools", None)
    if tools:  # templates ask whether it is defined
        given["tools"] = mark(list(tools))
        given["xml_tools"] = given["tools"]  # SmolLM3's name for them
    if not _TAKES_TOOLS.search(template):  # Firefunction has names of its own
        given["functions"] = mark(to_json(tools, indent=4)) if tools else ""
        given["datetime"] = now.strftime("%b %d %Y")

    failure: Exception | None = None
    for shape in _shapes(messages) if rearranges else [messages]:
        turns = [_turn(message, template, adds_calls=rearranges) for message in shape]
        # The role is not the sender's text: templates make control tokens of it.
        given["messages"] = [mark(turn) | {"role": turn["role"]} for turn in turns]
        try:
            return "".join(compiled(template).generate(given))
        except Exception as error:  # noqa: BLE001 - a template's expressions can raise anything
            failure = failure or error
    reason = " ".join(str(failure).split()) or type(failure).__name__
    message = f"the model's chat template failed: {reason}"
    raise PromptError(message, "`specgen run --raw` uses no template") from failure


def _unchanged(value: Any) -> Any:
    return value


# --- shapes of a conversation ---------------------------------------------------------------------


def _shapes(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation as it is, and then changed for templates that refuse it so.

    Each change is tried on all shapes so far.
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
    """Join turns of the user that follow each other, which some templates refuse."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = replace(message, content=f"{found[-1].content}\n\n{message.content}")
        else:
            found.append(message)
    return found


def _with_texts_as_arguments(messages: Sequence[Message]) -> list[Message]:
    """Write the arguments of calls as texts of JSON, as Functionary's template wants them."""

    def written(call: ToolCall) -> ToolCall:
        return replace(call, arguments=to_json(call.arguments))

    return [replace(each, tool_calls=tuple(map(written, each.tool_calls))) for each in messages]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Give each call a turn of its own, with its result after it, for Llama 3's template."""
    found: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0].role == "tool":
            results.append(rest.pop(0))
        content = message.content
        for call in message.tool_calls:
            found.append(replace(message, content=content, tool_calls=(call,)))
            content = ""
            found += [each for each in results if each.tool_call_id == call.identity]
            results = [each for each in results if each.tool_call_id != call.identity]
        found += results
    return found


def _with_texts_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Move the text of turns with calls and thoughts into the thoughts, for gpt-oss's template."""

    def changed(message: Message) -> Message:
        if not (message.tool_calls and message.reasoning and message.content):
            return message
        thoughts = f"{message.reasoning}\n\n{message.content}"
        return replace(message, content="", reasoning=thoughts)

    return [changed(message) for message in messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Begin the user's first turn with the system message, as Gemma 2's template wants it."""
    first, *others = messages
    if first.role != "system" or not others or others[0].role != "user":
        return list(messages)
    joined = replace(others[0], content=f"{first.content}\n\n{others[0].content}")
    return [joined, *others[1:]]


# --- turns as templates read them -----------------------------------------------------------------


def _turn(
    message: Message,
    template: str,
    *,
    adds_calls: bool,
) -> dict[str, Any]:
    """Return a message as templates read it: they test which keys it has."""
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
    """Return the text of a turn with its calls as JSON after it."""
    calls = [
        to_json({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls
    ]
    return "\n".join(filter(None, [message.content, *calls]))


@functools.lru_cache(maxsize=16)
def _name_of_thoughts(template: str) -> str:
    """Return the field in which a template looks for thoughts: gpt-oss and Solar have their own."""
    found = _THOUGHTS_FIELD.search(template)
    if found is None or "reasoning_content" in template:
        return "reasoning_content"
    return found[1]


def _short_id(identity: str) -> str:
    """Return an id that Mistral's templates accept: this one, or digits of its hash."""
    if len(identity) == _SHORT_ID_LENGTH and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:_SHORT_ID_LENGTH]
