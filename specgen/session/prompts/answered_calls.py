"""Find the call to which each result in a conversation belongs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specgen.session.prompts.template import Message, ToolCall


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call, and its results: usually one, none if the call was denied."""

    #: The call.
    call: ToolCall
    #: The tools' messages that answer it.
    results: list[Message]


@dataclass(frozen=True, slots=True)
class AnsweredMessage:
    """A message, and the results of its calls. A result without a call is such a message, too."""

    #: The message.
    message: Message
    #: Its calls, with their results.
    calls: list[AnsweredCall]


class AnsweredMessages:
    """The messages of a conversation, added in order, with each result assigned to its call."""

    def __init__(self) -> None:
        #: The messages so far, without results that belong to a call.
        self.messages: list[AnsweredMessage] = []

    def add(self, message: Message) -> None:
        """Add a result to its call, which may be long before it, or any other message."""
        answered = None
        if message.role == "tool":
            answered = self.call_of(message)
        if answered is not None:
            answered.results.append(message)
        else:
            calls = [AnsweredCall(call, []) for call in message.tool_calls]
            self.messages.append(AnsweredMessage(message, calls))

    def call_of(self, result: Message) -> AnsweredCall | None:
        """Return the call to which a result belongs; None if it is not in the conversation.

        It is in the last message with a call of that id and name. Ollama's clients may leave out
        the id of a call or of its result: such results come in the order of the calls.
        """
        for answered in reversed(self.messages):
            calls = [call for call in answered.calls if _may_answer(result, call.call)]
            if calls:
                return min(calls, key=_n_results)
        return None


def answered_messages(messages: Iterable[Message]) -> list[AnsweredMessage]:
    """Return the messages of a conversation, each with the results of its calls."""
    answered = AnsweredMessages()
    for message in messages:
        answered.add(message)
    return answered.messages


def _may_answer(result: Message, call: ToolCall) -> bool:
    if result.tool_call_id and call.identity and result.tool_call_id != call.identity:
        return False
    return result.name in (None, call.name)


def _n_results(answered: AnsweredCall) -> int:
    return len(answered.results)
