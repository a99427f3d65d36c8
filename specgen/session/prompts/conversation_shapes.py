"""Other arrangements of a conversation, for chat templates that do not take every one.

Conversations are cut off: users stop an answer, agents deny a call, programs begin with a greeting.
Many templates refuse what is left, since they were written for complete turns, and some have no
form for tools or for a system message. `template_fit.py` decides what to change for a template.

A change does not depend on the texts of messages, and leaves alone whatever is usual. So the prompt
of a conversation that goes on begins with the same tokens, which are in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from specgen.session.prompts.sandbox import to_json
from specgen.session.prompts.template import Message, ToolCall

#: The result of a call that has none.
CANCELLED = "The call was cancelled."
#: The text of an answer that is missing, for templates that refuse an empty one.
INTERRUPTED = "[interrupted]"

#: Returns the messages changed, or as they are if they have nothing to change.
Change: TypeAlias = Callable[[Sequence[Message]], list[Message]]


@dataclass(frozen=True, slots=True)
class Shape:
    """One of the arrangements of a conversation."""

    messages: list[Message]
    #: What was changed, in order. Another conversation of the same kind gets the same shape by
    #: these changes.
    changes: tuple[Change, ...] = ()


def shapes_of(messages: Sequence[Message], changes: Sequence[Change]) -> Iterator[Shape]:
    """Yield a conversation as it is, and then in other shapes, which differ from each other.

    Args:
        messages: The conversation.
        changes: What may be changed. Each change is applied to all earlier shapes, so that
            combinations come, too.
    """
    shapes = [Shape(list(messages))]
    yield shapes[0]
    for change in changes:
        for shape in list(shapes):
            turns = change(shape.messages)
            if any(turns == other.messages for other in shapes):
                continue
            new_shape = Shape(turns, (*shape.changes, change))
            shapes.append(new_shape)
            yield new_shape


def changed(messages: Sequence[Message], changes: Sequence[Change]) -> list[Message]:
    """Return the messages of a conversation after some changes."""
    turns = list(messages)
    for change in changes:
        turns = change(turns)
    return turns


def result_as_text(text: str) -> str:
    """Return the result of a call as a user's message, where it cannot be one of its own."""
    return f"[result of an earlier call]\n{text}"


def paragraphs(*texts: str | None) -> str:
    """Return the texts that are not empty, with an empty line between them."""
    return "\n\n".join(filter(None, texts))


# --- forms of messages ------------------------------------------------------------------------


def _with_texts_as_arguments(messages: Sequence[Message]) -> list[Message]:
    """Convert the arguments of calls to JSON texts, as Functionary's template expects them."""

    def with_text(call: ToolCall) -> ToolCall:
        return replace(call, arguments=to_json(call.arguments))

    return [replace(each, tool_calls=tuple(map(with_text, each.tool_calls))) for each in messages]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Give each call a turn of its own, followed by its result, for Llama 3's template."""
    separated: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.tool_calls) < 2:
            separated.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0].role == "tool":
            results.append(rest.pop(0))
        content = message.content
        for call in message.tool_calls:
            separated.append(replace(message, content=content, tool_calls=(call,)))
            content = ""  # only the first turn has the text
            separated += [each for each in results if _answers(each, call)]
            results = [each for each in results if not _answers(each, call)]
        separated += results  # those that belong to none of the calls
    return separated


def _with_texts_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Move the text of turns with calls and thoughts into the thoughts, for gpt-oss's template."""

    def with_text_in_thoughts(message: Message) -> Message:
        if not (message.tool_calls and message.reasoning and message.content):
            return message
        thoughts = paragraphs(message.reasoning, message.content)
        return replace(message, content="", reasoning=thoughts)

    return [with_text_in_thoughts(message) for message in messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Make the system message the beginning of the user's first turn, for Gemma 2's template."""
    if not messages or messages[0].role != "system":
        return list(messages)
    system, *others = messages
    first = replace(system, role="user")
    if others and others[0].role == "user":
        first = _joined(first, others.pop(0))
    return [first, *others]


def _with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write calls as JSON, one per line, at the end of the text of their turns."""

    def with_text(message: Message) -> Message:
        lines = [_call_as_text(call) for call in message.tool_calls]
        if message.content:
            lines.insert(0, message.content)
        return replace(message, content="\n".join(lines), tool_calls=())

    return [with_text(message) if message.tool_calls else message for message in messages]


def _call_as_text(call: ToolCall) -> str:
    return to_json({"name": call.name, "arguments": call.arguments})


def _with_results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Turn the results of calls into messages of the user's."""
    return [
        Message("user", result_as_text(message.content)) if message.role == "tool" else message
        for message in messages
    ]


# --- what is missing, and what is there twice -----------------------------------------------------


def _with_later_systems_as_user(messages: Sequence[Message]) -> list[Message]:
    """Turn system messages after the beginning into the user's, as most templates expect."""
    beginning = list(itertools.takewhile(_is_system, messages))
    later = messages[len(beginning) :]
    return [
        *beginning,
        *(replace(message, role="user") if _is_system(message) else message for message in later),
    ]


def _is_system(message: Message) -> bool:
    return message.role == "system"


def _with_paired_results(messages: Sequence[Message]) -> list[Message]:
    """Put results right after their calls, and give calls without a result one that says so.

    A result without a call becomes a message of the user's.
    """
    # Find the turn of each result.
    results_by_turn: dict[int, list[Message]] = {}
    lone_results: set[int] = set()
    for place, message in enumerate(messages):
        if message.role != "tool":
            continue
        turn = _turn_that_called(messages[:place], message)
        if turn is None:
            lone_results.add(place)
        else:
            results_by_turn.setdefault(turn, []).append(message)

    # Write each turn with its results.
    paired: list[Message] = []
    for place, message in enumerate(messages):
        if place in lone_results:
            paired.append(Message("user", result_as_text(message.content)))
        elif message.role != "tool":
            results = results_by_turn.get(place, [])
            paired.append(message)
            paired += results
            paired += _cancelled_results(message, results)
    return paired


def _turn_that_called(messages: Sequence[Message], result: Message) -> int | None:
    """Return the place of the last turn with the call of this result; None if there is none."""
    for place in reversed(range(len(messages))):
        if any(_answers(result, call) for call in messages[place].tool_calls):
            return place
    return None


def _answers(result: Message, call: ToolCall) -> bool:
    """Return whether a message is the result of a call. Clients of Ollama give calls no ids."""
    return call.identity == (result.tool_call_id or "") and result.name in (None, call.name)


def _cancelled_results(message: Message, results: Sequence[Message]) -> list[Message]:
    """Return a result for each call of a turn that is not among those of its results."""
    return [
        Message("tool", CANCELLED, tool_call_id=call.identity, name=call.name)
        for call in message.tool_calls
        if not any(_answers(result, call) for result in results)
    ]


def _without_empty_answers(messages: Sequence[Message]) -> list[Message]:
    """Leave out answers that were stopped before their first token."""
    return [message for message in messages if not _is_answer(message) or message.content.strip()]


def _with_joined_turns(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive turns of the same role."""
    joined: list[Message] = []
    for message in messages:
        if joined and _can_be_joined(joined[-1], message):
            joined[-1] = _joined(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _can_be_joined(first: Message, second: Message) -> bool:
    """Return whether two messages are of the same role. Those about calls stay apart."""
    if first.role != second.role or first.role == "tool":
        return False
    return not first.tool_calls and not second.tool_calls


def _joined(first: Message, second: Message) -> Message:
    return replace(
        first,
        content=paragraphs(first.content, second.content),
        reasoning=paragraphs(first.reasoning, second.reasoning) or None,
    )


def _with_missing_questions(messages: Sequence[Message]) -> list[Message]:
    """Insert an empty turn of the user where the assistant begins, or calls after its answer."""
    complete: list[Message] = []
    previous: Message | None = None
    for message in messages:
        if message.role == "assistant" and _lacks_question(message, previous):
            complete.append(Message("user", ""))
        complete.append(message)
        previous = message
    return complete or [Message("user", "")]


def _lacks_question(message: Message, previous: Message | None) -> bool:
    """Return whether a turn of the user is missing before a turn of the assistant.

    Args:
        message: The turn of the assistant.
        previous: The message before it; None if it is the first one.
    """
    if previous is None or _is_system(previous):
        return True
    return bool(message.tool_calls) and _is_answer(previous)


def _with_missing_answers(messages: Sequence[Message], text: str = "") -> list[Message]:
    """Insert a turn of the assistant with this text between a result and a turn of the user."""
    complete: list[Message] = []
    for message in messages:
        if message.role == "user" and complete and complete[-1].role == "tool":
            complete.append(Message("assistant", text))
        complete.append(message)
    return complete


def _with_texts_as_missing_answers(messages: Sequence[Message]) -> list[Message]:
    """Say where an answer is missing, for Ministral's template, which refuses empty ones."""
    return _with_missing_answers(messages, INTERRUPTED)


def _is_answer(message: Message) -> bool:
    """Return whether a message is a text of the assistant's without calls."""
    return message.role == "assistant" and not message.tool_calls


# --- all changes --------------------------------------------------------------------------------

#: Changes for templates that write some messages in a form of their own, or have no form for them.
FORMS: tuple[Change, ...] = (
    _with_texts_as_arguments,
    _with_single_calls,
    _with_texts_in_thoughts,
    _without_system,
    _with_calls_as_text,
    _with_results_as_text,
)
#: With these, only turns of the user and of the assistant are left, which all templates know.
PLAIN_FORMS: tuple[Change, ...] = (_without_system, _with_calls_as_text, _with_results_as_text)
#: Changes of what is not complete. Those that take away the most come last.
REPAIRS: tuple[Change, ...] = (
    _with_later_systems_as_user,
    _with_paired_results,
    _without_empty_answers,
    _with_joined_turns,
    _with_missing_questions,
    _with_missing_answers,
    _with_texts_as_missing_answers,
    _without_system,
)
