"""Translates the messages and the system prompt of a Messages request into the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specgen.serving.openai_format.body import BodyError, shown

#: The start of a part that Claude Code puts first. It differs from request to request, so that no prefix of
#: the prompt would be in the cache.
_BILLING = "x-anthropic-billing-header"
_BETWEEN_TEXTS = "\n\n"
#: Blocks that no local model can read, with their names for users.
_UNREADABLE = {"document": "documents", "image": "images"}


class ConversationBuilder:
    """Builds the messages of a chat from the fields `system` and `messages`. Its methods raise `BodyError`.

    Consecutive turns of a user become one, as in Anthropic's API. So does a system message between them, since
    many chat templates accept one only at the beginning."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        #: Names of the chat's fields, with those that the request has for them.
        self.names: dict[str, str] = {}

    def add_system(self, value: Any) -> None:
        """Add the system prompt: None, a text or blocks of text."""
        if value is None:
            return
        texts = [_text(where, block) for where, block in _blocks("system", value)]
        if texts and texts[0].startswith(_BILLING):
            del texts[0]
        self._add_text("system", "system", texts)

    def add_messages(self, value: Any) -> None:
        """Add all turns. The last one must not be the model's."""
        if not isinstance(value, list):
            raise BodyError("messages", f"{shown(value)} is not a list of messages")
        if not value:
            raise BodyError("messages", "the list is empty: give at least one message")
        for number, each in enumerate(value):
            where = f"messages[{number}]"
            role = each.get("role") if isinstance(each, dict) else None
            if role not in ("assistant", "system", "user"):
                raise BodyError(
                    f"{where}.role", f"{shown(role)} is none of assistant, system, user"
                )
            blocks = list(_blocks(f"{where}.content", each.get("content")))
            if role == "assistant":
                self._add_answer(where, blocks)
            elif role == "user":
                self._add_user(where, blocks)
            else:
                known = {message["role"] for message in self.messages}
                texts = [_text(where, block) for where, block in blocks]
                self._add_text("system" if known <= {"system"} else "user", where, texts)
        if self.messages[-1]["role"] == "assistant":
            raise BodyError(
                "messages", "the last one is the assistant's: end with a user's message"
            )

    def _add_text(self, role: str, where: str, texts: list[str]) -> None:
        """Add texts to the last turn if it has this role, else as a new turn."""
        if not texts:
            return
        if self.messages and self.messages[-1]["role"] == role:
            texts = [self.messages[-1]["content"], *texts]
            self.messages[-1]["content"] = _BETWEEN_TEXTS.join(texts)
        else:
            self._add(where, {"role": role, "content": _BETWEEN_TEXTS.join(texts)})

    def _add(self, where: str, message: dict[str, Any]) -> str:
        """Add a turn, and return the name of its field."""
        name = f"messages[{len(self.messages)}]"
        self.names[name] = where
        self.messages.append(message)
        return name

    def _add_user(self, where: str, blocks: list[tuple[str, Mapping[str, Any]]]) -> None:
        texts: list[str] = []
        for at, block in blocks:
            if block["type"] != "tool_result":
                texts.append(_text(at, block))
                continue
            self._add_text("user", where, texts)
            texts = []
            identity = block.get("tool_use_id")
            result = {"role": "tool", "tool_call_id": identity, "content": _result(at, block)}
            name = self._add(where, result)
            self.names |= {
                f"{name}.content": f"{at}.content",
                f"{name}.tool_call_id": f"{at}.tool_use_id",
            }
        self._add_text("user", where, texts)

    def _add_answer(self, where: str, blocks: list[tuple[str, Mapping[str, Any]]]) -> None:
        """Add a turn of the model. The thoughts go to the template, which keeps those that it needs."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[str, dict[str, Any]]] = []
        for at, block in blocks:
            if block["type"] == "thinking":
                thoughts.append(_field(at, block, "thinking"))
            elif block["type"] == "tool_use":
                calls.append((at, _call(at, block)))
            elif block["type"] != "redacted_thinking":
                texts.append(_text(at, block))
        turn: dict[str, Any] = {"role": "assistant", "content": _BETWEEN_TEXTS.join(texts)}
        if calls:
            turn["tool_calls"] = [call for _, call in calls]
        if thoughts:
            turn["reasoning_content"] = _BETWEEN_TEXTS.join(thoughts)
        name = self._add(where, turn)
        for number, (at, _) in enumerate(calls):
            self.names |= {
                f"{name}.tool_calls[{number}]": at,
                f"{name}.tool_calls[{number}].function.name": f"{at}.name",
                f"{name}.tool_calls[{number}].function.arguments": f"{at}.input",
            }


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
    text = _BETWEEN_TEXTS.join(_text(at, part) for at, part in parts)
    return f"Error: {text}" if block.get("is_error") is True else text


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise BodyError(f"{where}.input", f"{shown(arguments)} is not an object")
    function = {"name": block.get("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}


__all__ = ["ConversationBuilder"]
