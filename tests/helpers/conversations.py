"""Conversations of every shape, with a different text in each message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from specgen.session.prompts.template import Message, ToolCall, render
from specgen.session.prompts.template_fit import FittedText, render_fitted
from tests.helpers.common import NOW

#: The kinds of messages: system, user, assistant, empty answer, tool call, and tool result.
LETTERS = "SUAECT"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "description": "The place."}},
            },
        },
    }
]


def fitted(template: str, messages: Sequence[Message], tools: Any = ()) -> FittedText:
    """The prompt of a model with this template."""

    def write(turns: Sequence[Message]) -> str:
        return render(template, turns, bos_token="", eos_token="", now=NOW, tools=tools)

    return render_fitted(write, template, messages, has_tools=bool(tools))


def fitted_turns(template: str, letters: str) -> FittedText:
    """The same for a conversation of `letters`."""
    tools = TOOLS if set("CT") & set(letters) else []
    return fitted(template, conversation(letters), tools)


def conversation(letters: str) -> list[Message]:
    """A message for each letter. A tool result belongs to the last tool call, if there is one."""
    messages: list[Message] = []
    identity = "none"
    for place, letter in enumerate(letters):
        text = text_at(place)
        match letter:
            case "S":
                messages.append(Message("system", text))
            case "U":
                messages.append(Message("user", text))
            case "A":
                messages.append(Message("assistant", text))
            case "E":
                messages.append(Message("assistant", ""))
            case "C":
                identity = f"call_{place}"
                call = ToolCall(identity, "look", {"where": text})
                messages.append(Message("assistant", "", (call,)))
            case "T":
                messages.append(Message("tool", text, tool_call_id=identity, name="look"))
    return messages


def text_at(place: int) -> str:
    """The text of the message at this place."""
    return f"text{place}z"


def orders(longest: int, letters: str = LETTERS) -> Iterator[str]:
    """All orders of up to `longest` messages."""
    for length in range(1, longest + 1):
        yield from map("".join, itertools.product(letters, repeat=length))


def lost(letters: str, text: str) -> str:
    """The letters of the messages that are missing in a prompt."""
    return "".join(
        letter
        for place, letter in enumerate(letters)
        if letter != "E" and text_at(place) not in text
    )
