"""Translates the items of a request's input into the messages of a chat."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from specgen.serving.openai_format.body import BodyError, shown

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
#: Parts of a content that are text, and the field that has it.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
#: Items that stand for a text which this server does not have.
_ELSEWHERE = ("item_reference", "compaction", "compaction_summary", "context_compaction")
_PARAGRAPH = "\n\n"


class ConversationBuilder:
    """Joins items into the turns that templates know. An assistant's turn is one message, with its thoughts,
    its text and its calls. Messages of one role that follow one another are joined, since many templates want
    roles to alternate. They take a system message at the beginning only: further back it is a user's.

    `warnings` get the items that were left out.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings
        self._messages: list[dict[str, Any]] = []
        #: The fields of the chat's body, with those of the request.
        self._names: dict[str, str] = {}

    def finish(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the messages, and the names of their fields in the request."""
        return self._messages, self._names

    def add_instructions(self, value: Any) -> None:
        """Add the request's instructions, the first system message."""
        if value is not None:
            self._add_text("system", _text("instructions", value), "instructions")

    def add_input(self, value: Any) -> None:
        """Add the request's input: a text or a list of items. Raise `BodyError`."""
        if isinstance(value, str):
            self._add_text("user", value, "input")
        elif isinstance(value, list) and value:
            for number, item in enumerate(value):
                self._add_item(f"input[{number}]", item)
            self._drop_lone_thoughts()
        else:
            raise BodyError("input", f"{shown(value)} is not a text or a list of items")
        if not self._messages:
            raise BodyError("input", "it has no messages")

    def _add_item(self, where: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise BodyError(where, f"{shown(item)} is not an object")
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str) or role not in _ROLES:
                known = ", ".join(sorted(_ROLES))
                raise BodyError(f"{where}.role", f"{shown(role)} is none of {known}")
            text = _text(f"{where}.content", item.get("content"))
            self._add_text(_ROLES[role], text, where)
        elif kind == "reasoning":
            self._add_reasoning(where, item)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(where, item, is_custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._names[f"messages[{len(self._messages)}].tool_call_id"] = f"{where}.call_id"
            text = _text(f"{where}.output", item.get("output"))
            self._new({"role": "tool", "tool_call_id": item.get("call_id"), "content": text}, where)
        elif kind in _ELSEWHERE or not isinstance(kind, str):
            what = f"{shown(kind)} stands for items that are not kept here: send the items"
            raise BodyError(f"{where}.type", what)
        else:
            self._warnings.append(f"{where}: ignored, since {shown(kind)} does not run here")

    def _new(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        self._names[f"messages[{len(self._messages)}]"] = where
        self._messages.append(message)
        return message

    def _add_text(self, role: str, text: str, where: str) -> None:
        message = self._assistant(where) if role == "assistant" else self._turn(role, where)
        before = message.get("content")
        message["content"] = f"{before}{_PARAGRAPH}{text}" if before else text

    def _turn(self, role: str, where: str) -> dict[str, Any]:
        """Return the last message if it has this role, or else a new one."""
        self._drop_lone_thoughts()
        if role == "system" and any(message["role"] != "system" for message in self._messages):
            role = "user"
        if self._messages and self._messages[-1]["role"] == role:
            return self._messages[-1]
        return self._new({"role": role}, where)

    def _assistant(self, where: str) -> dict[str, Any]:
        if self._messages and self._messages[-1]["role"] == "assistant":
            return self._messages[-1]
        return self._new({"role": "assistant", "content": ""}, where)

    def _add_reasoning(self, where: str, item: dict[str, Any]) -> None:
        """Add thoughts: as they are, or as this server hid them, or else their summary."""
        thought = _parts(f"{where}.content", item.get("content") or [])
        thought = thought or thought_in(item.get("encrypted_content"))
        thought = thought or _parts(f"{where}.summary", item.get("summary") or [])
        if thought:
            message = self._assistant(where)
            before = message.get("reasoning_content")
            joined = f"{before}{_PARAGRAPH}{thought}" if before else thought
            message["reasoning_content"] = joined

    def _add_call(self, where: str, item: dict[str, Any], *, is_custom: bool) -> None:
        message = self._assistant(where)
        calls = message.setdefault("tool_calls", [])
        place = f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"
        self._names |= {place: where, f"{place}.function": where, f"{place}.id": f"{where}.call_id"}
        arguments = item.get("arguments")
        if is_custom:
            self._names[f"{place}.function.arguments"] = f"{where}.input"
            arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
        function = {"name": item.get("name"), "arguments": arguments}
        calls.append({"id": item.get("call_id"), "type": "function", "function": function})

    def _drop_lone_thoughts(self) -> None:
        """Drop a last turn that has only thoughts: its answer was left out."""
        if self._messages and self._messages[-1]["role"] == "assistant":
            message = self._messages[-1]
            if not message["content"] and not message.get("tool_calls"):
                del self._messages[-1]


def _text(where: str, value: Any) -> str:
    """Return a text, or the texts of a list of parts, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BodyError(where, f"{shown(value)} is not a text or a list of parts")
    return _parts(where, value)


def _parts(where: str, value: Any) -> str:
    if not isinstance(value, list):
        raise BodyError(where, f"{shown(value)} is not a list of parts")
    texts: list[str] = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise BodyError(
                f"{where}[{number}]", f"{shown(kind)}: only parts of text are supported"
            )
        texts.append(text)
    return "".join(texts)


def hidden_thought(thought: str) -> str:
    """Return thoughts in a form that clients send back, but do not show."""
    return base64.b64encode(thought.encode()).decode()


def thought_in(hidden: Any) -> str:
    """Return the thoughts in a text of `hidden_thought`; empty if it is none, but another server's."""
    if not isinstance(hidden, str):
        return ""
    try:
        return base64.b64decode(hidden.encode(), validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""


__all__ = ["ConversationBuilder", "hidden_thought", "thought_in"]
