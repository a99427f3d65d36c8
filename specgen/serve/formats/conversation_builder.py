"""Build a conversation for chat templates from the messages of an API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specgen.serve.formats.request_errors import BodyError
from specgen.session.prompts.answered_calls import AnsweredMessages
from specgen.session.prompts.conversation_shapes import paragraphs, result_as_text
from specgen.session.prompts.template import Message, Role, ToolCall


def ends_with_partial_answer(messages: Sequence[Message]) -> bool:
    """Return whether the last message is an assistant's text, which the answer may continue."""
    last = messages[-1]
    return len(messages) > 1 and last.role == "assistant" and not last.tool_calls


class ConversationBuilder:
    """Collects the messages of a chat.

    The `join_...` methods add to the last message if it has the same role.
    """

    def __init__(self) -> None:
        #: The messages so far.
        self.messages: list[Message] = []
        #: The messages before the last result, with their calls.
        self._answered = AnsweredMessages()
        #: How many of `messages` were added to them.
        self._n_answered = 0

    def add_result(
        self,
        identity: str | None,
        text: str,
        name: str | None = None,
    ) -> None:
        """Add the result of a call.

        Agents shorten conversations: if the call is no longer there, the result becomes a text of
        the user's.

        Args:
            identity: The id of the call.
            text: The result.
            name: The name of the function, if the API repeats it.
        """
        result = Message("tool", text, tool_call_id=identity, name=name)
        call = self._call_of(result)
        if call is None:
            self.join_text("user", result_as_text(text))
        else:
            result = replace(result, tool_call_id=call.identity, name=call.name)
            self.messages.append(result)

    def join_text(self, role: Role, text: str) -> None:
        """Add a text to a role's turn.

        A system message after the beginning becomes the user's, because templates need that.
        """
        if role == "system" and any(message.role != "system" for message in self.messages):
            role = "user"
        last = self._open_turn(role)
        self.messages[-1] = replace(last, content=paragraphs(last.content, text))

    def join_thought(self, thought: str) -> None:
        """Add a thought to the assistant's turn."""
        last = self._open_turn("assistant")
        self.messages[-1] = replace(last, reasoning=paragraphs(last.reasoning, thought))

    def join_call(
        self,
        where: str,
        identity: str | None,
        name: str | None,
        arguments: Any,
    ) -> None:
        """Add a call to the assistant's turn.

        Args:
            where: The place of the call in the body, for the error.
            identity: The id of the call.
            name: The name of the function.
            arguments: The arguments, as an object.

        Raises:
            BodyError: If the id or the name is missing.
        """
        if not identity or not name:
            raise BodyError(where, "a call needs an id and a name")
        last = self._open_turn("assistant")
        calls = (*last.tool_calls, ToolCall(identity, name, arguments))
        self.messages[-1] = replace(last, tool_calls=calls)

    def _call_of(self, result: Message) -> ToolCall | None:
        """Return the call to which a result belongs; None if it is no longer there."""
        for message in self.messages[self._n_answered :]:
            self._answered.add(message)
        self._n_answered = len(self.messages)
        answered = self._answered.call_of(result)
        return None if answered is None else answered.call

    def _open_turn(self, role: Role) -> Message:
        """Return the last message if it has this role; otherwise add an empty one and return it."""
        if not self.messages or self.messages[-1].role != role:
            self.messages.append(Message(role, ""))
        return self.messages[-1]
