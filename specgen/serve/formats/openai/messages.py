"""Reads the messages of a chat: texts, tool calls, and results of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specgen.serve.formats.openai.body import BodyError, messages_of, shown, text_of, utf8
from specgen.session.prompts.template import Message, Role, ToolCall

_ROLES: dict[str, Role] = {
    "assistant": "assistant",
    "developer": "system",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
#: Fields that messages of every role may have. A user's name is not passed to the model.
_FIELDS = frozenset(["role", "content", "name"])
_MORE_FIELDS: dict[Role, frozenset[str]] = {
    "assistant": frozenset(["tool_calls", "reasoning_content"]),
    "tool": frozenset(["tool_call_id"]),
}


def read_messages(value: Any) -> tuple[Message, ...]:
    """Read the messages of a body. Raise `BodyError` for one that does not fit."""
    messages: list[Message] = []
    #: The tools that were called so far, by the ids of the calls.
    called: dict[str, str] = {}
    for number, each in enumerate(messages_of(value)):
        message = _message(f"messages[{number}]", each, called)
        called |= {call.identity: call.name for call in message.tool_calls}
        messages.append(message)
    return tuple(messages)


def _message(where: str, value: Any, called: Mapping[str, str]) -> Message:
    if not isinstance(value, dict):
        raise BodyError(where, f"{shown(value)} is not an object with a role and a content")
    given = value.get("role")
    if not isinstance(given, str) or given not in _ROLES:
        raise BodyError(f"{where}.role", f"{shown(given)} is none of {', '.join(sorted(_ROLES))}")
    role = _ROLES[given]
    known = _FIELDS | _MORE_FIELDS.get(role, frozenset())
    for name in value:
        if name not in known and value[name] not in (None, []):
            raise BodyError(f"{where}.{name}", "it is not supported")
    calls = _calls(f"{where}.tool_calls", value.get("tool_calls"))
    content = value.get("content")
    # A turn with calls only has no text. Templates read an empty text as none.
    text = "" if content is None and calls else _content(f"{where}.content", content)
    if role != "tool":
        reasoning = value.get("reasoning_content")
        if reasoning is not None:
            reasoning = _content(f"{where}.reasoning_content", reasoning)
        return Message(role, text, calls, reasoning=reasoning)
    identity = value.get("tool_call_id")
    if not isinstance(identity, str) or identity not in called:
        where = f"{where}.tool_call_id"
        raise BodyError(where, f"{shown(identity)} is the id of no call in an earlier message")
    return Message(role, text, tool_call_id=identity, name=called[identity])


def _content(where: str, value: Any) -> str:
    """Return a text, or the texts of a list of parts, joined."""
    if isinstance(value, str):
        return utf8(where, value)
    if not isinstance(value, list):
        raise BodyError(where, f"{shown(value)} is not a text")
    texts: list[str] = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise BodyError(f"{where}[{number}]", "only parts of type text are supported")
        texts.append(text)
    return utf8(where, "".join(texts))


def _calls(where: str, value: Any) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BodyError(where, f"{shown(value)} is not a list of calls")
    return tuple(_call(f"{where}[{number}]", each) for number, each in enumerate(value))


def _call(where: str, value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise BodyError(where, f"{shown(value)} is not a call of a function")
    identity = _word(f"{where}.id", value.get("id"))
    name = _word(f"{where}.function.name", function.get("name"))
    arguments = function.get("arguments")
    return ToolCall(identity, name, _arguments(text_of(f"{where}.function.arguments", arguments)))


def _word(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BodyError(where, f"{shown(value)} is not a text")
    return utf8(where, value)


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Return the arguments as an object for templates; if a model wrote no object, return its text, so that
    it sees what it did."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # an escape can make half a surrogate pair, too
        return text
    return value if isinstance(value, dict) else text
