"""Translates the messages and the system prompt of a Messages request into the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specgen.serve.formats.openai.body import BodyError, messages_of, shown
from specgen.serve.formats.openai.translation import ChatTurns

#: The start of a part that Claude Code puts first. It differs from request to request, so that no prefix of
#: the prompt would be in the cache.
_BILLING = "x-anthropic-billing-header"
#: Blocks that no local model can read, with their names for users.
_UNREADABLE = {"document": "documents", "image": "images"}


class ConversationBuilder(ChatTurns):
    """Builds the messages of a chat from the fields `system` and `messages`. Its methods raise `BodyError`."""

    def add_system(self, value: Any) -> None:
        """Add the system prompt: None, a text or blocks of text."""
        if value is None:
            return
        texts = [_text(where, block) for where, block in _blocks("system", value)]
        if texts and texts[0].startswith(_BILLING):
            del texts[0]
        for text in texts:
            self.add_text("system", "system", text)

    def add_messages(self, value: Any) -> None:
        """Add all turns. The last one must not be the model's."""
        for number, each in enumerate(messages_of(value)):
            where = f"messages[{number}]"
            role = each.get("role") if isinstance(each, dict) else None
            if role not in ("assistant", "system", "user"):
                raise BodyError(
                    f"{where}.role", f"{shown(role)} is none of assistant, system, user"
                )
            if role == "assistant":  # consecutive ones stay apart
                self.add(where, {"role": role, "content": ""})
            for at, block in _blocks(f"{where}.content", each.get("content")):
                self._add_block(where, role, at, block)
        if not self.messages:
            raise BodyError("messages", "they are empty")
        if self.messages[-1]["role"] == "assistant":
            raise BodyError(
                "messages", "the last one is the assistant's: end with a user's message"
            )

    def _add_block(self, where: str, role: str, at: str, block: Mapping[str, Any]) -> None:
        """Add a block to a turn. Thoughts go to the template, which keeps those that it needs."""
        match role, block["type"]:
            case "user", "tool_result":
                names = {"content": "content", "tool_call_id": "tool_use_id"}
                self.add_result(at, block.get("tool_use_id"), _result(at, block), names)
            case "assistant", "thinking":
                self.add_text(where, role, _field(at, block, "thinking"), "reasoning_content")
            case "assistant", "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise BodyError(f"{at}.input", f"{shown(arguments)} is not an object")
                text = json.dumps(arguments, ensure_ascii=False)
                names = {"function.name": "name", "function.arguments": "input"}
                self.add_call(at, block.get("id"), block.get("name"), text, names)
            case "assistant", "redacted_thinking":
                pass
            case _:
                self.add_text(where, role, _text(at, block))


def _blocks(where: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the blocks of a content, each with its field; a text is one block."""
    if isinstance(value, str):
        yield where, {"type": "text", "text": value}
        return
    if not isinstance(value, list):
        raise BodyError(where, f"{shown(value)} is not a text, or a list of blocks")
    for number, block in enumerate(value):
        at = f"{where}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise BodyError(at, f"{shown(block)} is not a block with a type")
        yield at, block


def _text(where: str, block: Mapping[str, Any]) -> str:
    kind = block["type"]
    if kind != "text":
        what = _UNREADABLE.get(kind, f"blocks of type {shown(kind)}")
        raise BodyError(where, f"{what} are not supported here")
    return _field(where, block, "text")


def _field(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BodyError(f"{where}.{name}", f"{shown(value)} is not a text")
    return value


def _result(where: str, block: Mapping[str, Any]) -> str:
    """Return the text of a tool's result. Chat templates have no field for errors: the text says so."""
    content = block.get("content")
    parts = [] if content is None else _blocks(f"{where}.content", content)
    text = "\n\n".join(_text(at, part) for at, part in parts)
    return f"Error: {text}" if block.get("is_error") is True else text
