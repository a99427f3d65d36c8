"""Other arrangements of a conversation, for chat templates that refuse some.

Conversations are cut off: users stop an answer, agents deny a call, programs begin with a greeting.
Many templates refuse what is left, since they were written for complete turns, and some have no
form for tools or for a system message. `template_fit.py` decides what to change for a template.

A change does not depend on the texts of messages, and leaves usual conversations as they are. So
the prompt of a conversation that goes on begins with the same tokens, which are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from specgen.session.prompts.answered_calls import answered_messages
from specgen.session.prompts.sandbox import to_json
from specgen.session.prompts.template import Message, ToolCall

#: The result of a call that has none.
CANCELLED = "The call was cancelled."
#: The text of an answer that is missing, for templates that refuse an empty one.
INTERRUPTED = "[interrupted]"

Messages: TypeAlias = list[Message]
#: Returns the messages changed, or as they are if they have nothing to change.
Change: TypeAlias = Callable[[Messages], Messages]


@dataclass(frozen=True, slots=True)
class Shape:
    """One of the arrangements of a conversation."""

    #: The messages in this arrangement.
    messages: Messages
    #: What was changed, in order. Another conversation of the same kind gets the same shape by
    #: these changes.
    changes: tuple[Change, ...] = ()


def shapes_of(messages: Messages, changes: Sequence[Change]) -> Iterator[Shape]:
    """Yield a conversation as it is, and then in other shapes, which differ from each other.

    Args:
        messages: The conversation.
        changes: What may be changed. Each change is applied to all earlier shapes, so
            combinations are tried as well.
    """
    original = Shape(messages)
    yield original
    shapes = [original]
    for change in changes:
        for shape in tuple(shapes):
            new_messages = change(shape.messages)
            if any(new_messages == other.messages for other in shapes):
                continue
            new_shape = Shape(new_messages, (*shape.changes, change))
            yield new_shape
            shapes.append(new_shape)


def changed(messages: Messages, changes: Sequence[Change]) -> Messages:
    """Return the messages of a conversation after some changes."""
    for change in changes:
        messages = change(messages)
    return messages


def result_as_text(text: str) -> str:
    """Return the result of a call as a user's message, where it cannot be one of its own."""
    return f"[result of an earlier call]\n{text}"


def paragraphs(*texts: str | None) -> str:
    """Return the texts that are not empty, with an empty line between them."""
    return "\n\n".join(filter(None, texts))


# --- forms of messages ------------------------------------------------------------------------


def _with_texts_as_arguments(messages: Messages) -> Messages:
    """Convert the arguments of calls to JSON texts, as Functionary's template expects them."""
    return [_with_text_arguments(message) for message in messages]


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.tool_calls:
        arguments = to_json(call.arguments)
        calls.append(replace(call, arguments=arguments))
    return replace(message, tool_calls=tuple(calls))


def _with_single_calls(messages: Messages) -> Messages:
    """Give each call a turn of its own, followed by its results, for Llama 3's template."""
    new_messages: Messages = []
    for answered in answered_messages(messages):
        turn = answered.message
        for call in answered.calls:
            single_call = replace(turn, tool_calls=(call.call,))
            new_messages.append(single_call)
            new_messages += call.results
            # Only the first of them has the text and the thoughts.
            turn = replace(turn, content="", reasoning=None)
        if not answered.calls:
            new_messages.append(answered.message)
    return new_messages


def _with_texts_in_thoughts(messages: Messages) -> Messages:
    """Move the text of turns with calls and thoughts into the thoughts, for gpt-oss's template."""
    return [_with_text_in_thoughts(message) for message in messages]


def _with_text_in_thoughts(message: Message) -> Message:
    has_all = message.tool_calls and message.reasoning and message.content
    if not has_all:
        return message
    thoughts = paragraphs(message.reasoning, message.content)
    return replace(message, content="", reasoning=thoughts)


def _without_system(messages: Messages) -> Messages:
    """Make the system message the beginning of the user's first turn, for Gemma 2's template."""
    if not messages or messages[0].role != "system":
        return messages
    system, *others = messages
    beginning = replace(system, role="user")
    if not others or others[0].role != "user":
        return [beginning, *others]
    question, *others = others
    return [_joined(beginning, question), *others]


def _with_calls_as_text(messages: Messages) -> Messages:
    """Write calls as JSON, one per line, at the end of the text of their turns."""
    return [_with_calls_in_text(message) for message in messages]


def _with_calls_in_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    lines = [message.content] if message.content else []
    for call in message.tool_calls:
        described_call = {"name": call.name, "arguments": call.arguments}
        lines.append(to_json(described_call))
    return replace(message, content="\n".join(lines), tool_calls=())


def _with_results_as_text(messages: Messages) -> Messages:
    """Turn the results of calls into messages of the user's."""
    return [_with_result_in_text(message) for message in messages]


def _with_result_in_text(message: Message) -> Message:
    if message.role != "tool":
        return message
    return Message("user", result_as_text(message.content))


# --- calls and their results ----------------------------------------------------------------------


def _with_paired_results(messages: Messages) -> Messages:
    """Put results right after their calls, and give calls without a result one that says so.

    A result without a call becomes a message of the user's.
    """
    new_messages: Messages = []
    for answered in answered_messages(messages):
        new_messages.append(_with_result_in_text(answered.message))
        for call in answered.calls:
            cancelled = _cancelled_result(call.call)
            new_messages += call.results or [cancelled]
    return new_messages


def _cancelled_result(call: ToolCall) -> Message:
    return Message("tool", CANCELLED, tool_call_id=call.identity, name=call.name)


# --- what is missing, and what is there twice -----------------------------------------------------


def _with_later_systems_as_user(messages: Messages) -> Messages:
    """Turn system messages after the beginning into the user's, as most templates expect."""
    new_messages: Messages = []
    is_beginning = True
    for message in messages:
        is_beginning = is_beginning and message.role == "system"
        if message.role == "system" and not is_beginning:
            new_messages.append(replace(message, role="user"))
        else:
            new_messages.append(message)
    return new_messages


def _is_answer(message: Message) -> bool:
    """Return whether a message is a text of the assistant's without calls."""
    return message.role == "assistant" and not message.tool_calls


def _without_empty_answers(messages: Messages) -> Messages:
    """Leave out answers that were stopped before their first token."""
    new_messages: Messages = []
    for message in messages:
        is_empty = not message.content.strip()
        if not (is_empty and _is_answer(message)):
            new_messages.append(message)
    return new_messages


def _with_joined_turns(messages: Messages) -> Messages:
    """Join consecutive turns of the same role."""
    new_messages: Messages = []
    for message in messages:
        previous = new_messages[-1] if new_messages else None
        if previous is not None and _can_be_joined(previous, message):
            new_messages[-1] = _joined(previous, message)
        else:
            new_messages.append(message)
    return new_messages


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


def _with_missing_questions(messages: Messages) -> Messages:
    """Insert an empty turn of the user where the assistant begins, or calls after its answer."""
    new_messages: Messages = []
    for message in messages:
        if _lacks_question(message, new_messages):
            new_messages.append(Message("user", ""))
        new_messages.append(message)
    if not new_messages:  # all messages were empty answers, which were left out
        new_messages.append(Message("user", ""))
    return new_messages


def _lacks_question(message: Message, earlier: Messages) -> bool:
    """Return whether a turn of the user is missing between some messages and the next one."""
    if message.role != "assistant":
        return False
    if not earlier:
        return True
    previous = earlier[-1]
    if previous.role == "system":
        return True
    return bool(message.tool_calls) and _is_answer(previous)


def _with_empty_missing_answers(messages: Messages) -> Messages:
    """Insert an empty turn of the assistant between a result and a turn of the user."""
    return _with_missing_answers(messages, "")


def _with_interrupted_missing_answers(messages: Messages) -> Messages:
    """Insert a turn with a text there, for Ministral's template, which refuses empty ones."""
    return _with_missing_answers(messages, INTERRUPTED)


def _with_missing_answers(messages: Messages, text: str) -> Messages:
    new_messages: Messages = []
    previous_role = ""
    for message in messages:
        if message.role == "user" and previous_role == "tool":
            new_messages.append(Message("assistant", text))
        new_messages.append(message)
        previous_role = message.role
    return new_messages


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
PLAIN_FORMS: tuple[Change, ...] = (
    _without_system,
    _with_calls_as_text,
    _with_results_as_text,
)
#: Changes of what is not complete. Those that take away the most come last.
REPAIRS: tuple[Change, ...] = (
    _with_later_systems_as_user,
    _with_paired_results,
    _without_empty_answers,
    _with_joined_turns,
    _with_missing_questions,
    _with_empty_missing_answers,
    _with_interrupted_missing_answers,
    _without_system,
)
