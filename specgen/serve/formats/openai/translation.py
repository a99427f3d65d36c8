"""A request of another API as the body of a chat completion, its turns as messages, and the answer back in that API's
form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from specgen.serve.formats.openai.body import BodyError

_PARAGRAPH = "\n\n"


class AnswerWriter(Protocol):
    """Writes one answer in the form of its API, whole or as events. An event's name is its `type`."""

    def begin(self, n_prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events before the answer to a prompt of so many tokens."""

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a chunk of a chat completion, or for the body of an error. The chunk with the
        finish reason has the figures and is the last one."""

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer, from the body of a chat completion."""


def own_figures(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a chat completion that only specgen has; clients skip fields that they do not know."""
    return {name: body[name] for name in ("speculative", "timings", "warnings") if name in body}


@dataclass(frozen=True, slots=True)
class Translation:
    """A translated request: the body `chat` of a chat completion with one answer, and a maker of the
    `writer` for its answer, from the answer's identity, its time in seconds since 1970 and the model's name.
    """

    chat: dict[str, Any]
    writer: Callable[[str, int, str], AnswerWriter]
    #: What was ignored.
    warnings: tuple[str, ...] = ()
    #: Names of the chat's fields, with those that the request has for them.
    names: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, error: BodyError) -> BodyError:
        """Return an error about the chat's body with the name of the field in the request."""
        return BodyError(self.field_of(error.field), error.what)

    def warnings_of(self, warnings: tuple[str, ...]) -> tuple[str, ...]:
        """Return all warnings, those about the chat's body too, with the names of the request's fields."""
        told = (warning.partition(":") for warning in warnings)
        return (*self.warnings, *(f"{self.field_of(name)}:{rest}" for name, _, rest in told))

    def field_of(self, name: str) -> str:
        """Return the field of the request that a field of the chat's body stands for."""
        for known in sorted(self.names, key=len, reverse=True):
            rest = name.removeprefix(known)
            if name.startswith(known) and (not rest or rest[0] in ".["):
                return self.names[known] + rest
        return name


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
