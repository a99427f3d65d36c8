"""Joins the turns of a request in another API's form into the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARAGRAPH = "\n\n"


class ChatTurns:
    """The messages of a chat, as they grow. Texts of one role that follow one another are one message, since many
    templates want roles to alternate. They take a system message at the beginning only: further back it is a
    user's."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        #: The fields of the chat's body, with those that the request has for them.
        self.names: dict[str, str] = {}

    def add(self, where: str, message: dict[str, Any]) -> dict[str, Any]:
        """Add a message, and return it. `where` is its field in the request."""
        self.names[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)
        return message

    def turn(self, where: str, role: str) -> dict[str, Any]:
        """Return the last message if it has this role, else a new one."""
        if role == "system" and any(message["role"] != "system" for message in self.messages):
            role = "user"
        if self.messages and self.messages[-1]["role"] == role:
            return self.messages[-1]
        return self.add(where, {"role": role, "content": ""})

    def add_text(self, where: str, role: str, text: str, field: str = "content") -> None:
        """Add a text to the turn of a role."""
        message = self.turn(where, role)
        before = message.get(field)
        message[field] = f"{before}{_PARAGRAPH}{text}" if before else text

    def add_call(
        self, where: str, identity: Any, name: Any, arguments: Any, names: Mapping[str, str]
    ) -> None:
        """Add a call of a tool to the model's turn. `names` are fields of a chat's call, with those that the
        request has in `where`."""
        calls = self.turn(where, "assistant").setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names[place] = where
        self.names |= {f"{place}.{known}": f"{where}.{own}" for known, own in names.items()}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": identity, "type": "function", "function": function})

    def add_result(self, where: str, identity: Any, text: str, names: Mapping[str, str]) -> None:
        """Add the result of a call. `names` are fields of a chat's message, with those in `where`."""
        place = f"messages[{len(self.messages)}]"
        self.names |= {f"{place}.{known}": f"{where}.{own}" for known, own in names.items()}
        self.add(where, {"role": "tool", "tool_call_id": identity, "content": text})
