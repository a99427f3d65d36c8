"""Translates the items of a request's input into the messages of a chat."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from specgen.serve.formats.openai.body import BodyError, shown
from specgen.serve.formats.openai.translation import ChatTurns

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


class ConversationBuilder(ChatTurns):
    """Joins items into the turns that templates know. An assistant's turn is one message, with its thoughts,
    its text and its calls. `warnings` get the items that were left out."""

    def __init__(self, warnings: list[str]) -> None:
        super().__init__()
        self._warnings = warnings

    def add_instructions(self, value: Any) -> None:
        """Add the request's instructions, the first system message."""
        if value is not None:
            self.add_text("instructions", "system", _text("instructions", value))

    def add_input(self, value: Any) -> None:
        """Add the request's input: a text or a list of items. Raise `BodyError`."""
        if isinstance(value, str):
            self.add_text("input", "user", value)
        elif isinstance(value, list) and value:
            for number, item in enumerate(value):
                self._add_item(f"input[{number}]", item)
            self._drop_lone_thoughts()
        else:
            raise BodyError("input", f"{shown(value)} is not a text or a list of items")
        if not self.messages:
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
            self.add_text(where, _ROLES[role], text)
        elif kind == "reasoning":
            self._add_reasoning(where, item)
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(where, item, is_custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = _text(f"{where}.output", item.get("output"))
            names = {"content": "output", "tool_call_id": "call_id"}
            self.add_result(where, item.get("call_id"), text, names)
        elif kind in _ELSEWHERE or not isinstance(kind, str):
            what = f"{shown(kind)} stands for items that are not kept here: send the items"
            raise BodyError(f"{where}.type", what)
        else:
            self._warnings.append(f"{where}: ignored, since {shown(kind)} does not run here")

    def turn(self, where: str, role: str) -> dict[str, Any]:
        """Return the last message if it has this role, else a new one."""
        if role != "assistant":
            self._drop_lone_thoughts()
        return super().turn(where, role)

    def _add_reasoning(self, where: str, item: dict[str, Any]) -> None:
        """Add thoughts: as they are, or as this server hid them, or else their summary."""
        thought = _parts(f"{where}.content", item.get("content") or [])
        thought = thought or thought_in(item.get("encrypted_content"))
        thought = thought or _parts(f"{where}.summary", item.get("summary") or [])
        if thought:
            self.add_text(where, "assistant", thought, "reasoning_content")

    def _add_call(self, where: str, item: dict[str, Any], *, is_custom: bool) -> None:
        field, arguments = "arguments", item.get("arguments")
        if is_custom:
            field, arguments = "input", json.dumps({"input": item.get("input")}, ensure_ascii=False)
        names = {"function.name": "name", "function.arguments": field, "id": "call_id"}
        self.add_call(where, item.get("call_id"), item.get("name"), arguments, names)

    def _drop_lone_thoughts(self) -> None:
        """Drop a last turn that has only thoughts: its answer was left out."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            message = self.messages[-1]
            if not message["content"] and not message.get("tool_calls"):
                del self.messages[-1]


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
