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
class Turn:
    """A message, and the results of its calls. A result without a call is a turn of its own."""

    #: The message.
    message: Message
    #: Its calls, with their results.
    calls: list[AnsweredCall]


class Turns:
    """The turns of a conversation, to which messages are added in their order."""

    def __init__(self) -> None:
        #: The turns so far.
        self.turns: list[Turn] = []

    def add(self, message: Message) -> None:
        """Add a result to its call, which may be long before it, or any other message."""
        answered = None
        if message.role == "tool":
            answered = self.call_of(message)
        if answered is not None:
            answered.results.append(message)
        else:
            calls = [AnsweredCall(call, []) for call in message.tool_calls]
            self.turns.append(Turn(message, calls))

    def call_of(self, result: Message) -> AnsweredCall | None:
        """Return the call to which a result belongs; None if it is not in the conversation.

        It is in the last turn with a call of that id and name. Several calls of a turn may have no
        ids, as those of Ollama's clients: their results come in the order of the calls.
        """
        for turn in reversed(self.turns):
            calls = [each for each in turn.calls if _may_answer(result, each.call)]
            if calls:
                return min(calls, key=_n_results)
        return None


def turns_of(messages: Iterable[Message]) -> list[Turn]:
    """Return the turns of a conversation."""
    turns = Turns()
    for message in messages:
        turns.add(message)
    return turns.turns


def _may_answer(result: Message, call: ToolCall) -> bool:
    has_same_id = (result.tool_call_id or "") == call.identity
    return has_same_id and result.name in (None, call.name)


def _n_results(answered: AnsweredCall) -> int:
    return len(answered.results)
