"""Find the shape of a conversation that a chat template takes, with all of its messages.

A template may refuse a conversation, or drop messages without a word. Both are found with a probe:
a conversation with messages of the same kinds and a marker in each. A shape fits if the template
renders it and all markers are in the result. What fits depends on the kinds of messages only, so
that it is the same in each request, and is found once.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specgen.errors import PromptError
from specgen.session.prompts.conversation_shapes import (
    FORMS,
    PLAIN_FORMS,
    REPAIRS,
    Change,
    Messages,
    changed,
    shapes_of,
)
from specgen.session.prompts.sandbox import to_json
from specgen.session.prompts.template import Message, Role, ToolCall, render

#: Renders messages with a template. Raises `PromptError` if the template fails.
Write: TypeAlias = Callable[[Sequence[Message]], str]

#: The number of shapes that are tried with texts that a template refuses.
_MAX_SHAPES = 100
#: The tool of probes. A number is added to the names of further tools.
_PROBED_NAME = "weather"
_PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBED_NAME,
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class FittedText:
    """A conversation as a template has rendered it."""

    #: The text that the template wrote.
    text: str
    #: The messages in the shape that was rendered.
    messages: Messages


def render_fitted(
    write: Write,
    template: str,
    messages: Sequence[Message],
    *,
    has_tools: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> FittedText:
    """Render a conversation in the first of its shapes that fits a template.

    If none fits, since the template drops some messages in all of them, it is the first shape that
    the template renders.

    Args:
        write: Renders messages with the template.
        template: The template.
        messages: The turns so far.
        has_tools: Whether `write` gives tools to the template.
        variables: The variables that `write` gives to the template.

    Raises:
        PromptError: If the template refuses all shapes.
    """
    variables_text = json.dumps(variables or {}, default=str)
    inputs = _TemplateInputs(template, has_tools, variables_text)
    first_failure: PromptError | None = None
    for candidate in _candidates(inputs, list(messages)):
        try:
            return FittedText(write(candidate), candidate)
        except PromptError as error:  # noqa: PERF203 - a rendering costs far more
            first_failure = first_failure or error
    assert first_failure is not None, "a conversation has at least one shape"
    raise first_failure


def _candidates(inputs: _TemplateInputs, messages: Messages) -> Iterator[Messages]:
    """Yield the shape that fits, and then others, since a template may refuse some texts."""
    changes = _fitting_changes(inputs, _kinds_of(messages))
    if changes is not None:
        yield changed(messages, changes)
    other_shapes = shapes_of(messages, (*FORMS, *REPAIRS))
    for shape in itertools.islice(other_shapes, _MAX_SHAPES):
        yield shape.messages


# --- kinds of messages ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CallKind:
    """What a template may treat differently about a call, apart from its arguments."""

    #: The number of its id among the ids of the conversation.
    identity: int
    #: The number of its name among the names of tools in the conversation.
    name: int
    #: Whether the arguments are a text.
    has_text: bool


@dataclass(frozen=True, slots=True)
class _MessageKind:
    """What a template may treat differently about a message, apart from its texts."""

    #: Who sends it.
    role: Role
    #: The content if it is empty or white space, else None.
    blank: str | None
    #: The kinds of its tool calls.
    calls: tuple[_CallKind, ...]
    #: In a result: the number of the id of its call.
    answered: int | None
    #: The number of the name of the tool or the sender; None if there is no name.
    name: int | None
    #: Whether it has thoughts.
    has_reasoning: bool


_Kinds: TypeAlias = tuple[_MessageKind, ...]


class _Numbers:
    """Numbers texts as they come, so that other texts in the same places have the same numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        """Return the number of a text."""
        return self._numbers.setdefault(text, len(self._numbers))


def _kinds_of(messages: Sequence[Message]) -> _Kinds:
    """Return the kinds of messages."""
    identities = _Numbers()
    names = _Numbers()
    kinds: list[_MessageKind] = []
    for message in messages:
        calls: list[_CallKind] = []
        for call in message.tool_calls:
            identity = identities.of(call.identity)
            has_text = isinstance(call.arguments, str)
            calls.append(_CallKind(identity, names.of(call.name), has_text))
        answered: int | None = None
        if message.role == "tool":
            answered = identities.of(message.tool_call_id or "")
        kind = _MessageKind(
            message.role,
            blank=None if message.content.strip() else message.content,
            calls=tuple(calls),
            answered=answered,
            name=None if message.name is None else names.of(message.name),
            has_reasoning=bool(message.reasoning),
        )
        kinds.append(kind)
    return tuple(kinds)


def _kinds_with(*turns: Message) -> _Kinds:
    """Return the kinds of some messages between ordinary turns."""
    return _kinds_of([*turns, Message("assistant", "x"), Message("user", "x")])


_USER = Message("user", "x")
_CALLS = (ToolCall("1", "x", {}), ToolCall("2", "x", {}))
_RESULTS = [Message("tool", "x", tool_call_id=call.identity, name=call.name) for call in _CALLS]
#: A conversation that every template should take.
_PLAIN = _kinds_with(_USER)
#: Complete conversations with messages that not all templates take.
_WITH_FORMS = (
    _kinds_with(Message("system", "x"), _USER),
    _kinds_with(_USER, Message("assistant", "", _CALLS[:1]), _RESULTS[0]),
    _kinds_with(_USER, Message("assistant", "", _CALLS), *_RESULTS),
    _kinds_with(_USER, Message("assistant", "x", _CALLS[:1], reasoning="x"), _RESULTS[0]),
)


# --- probes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Probe:
    """A conversation with messages of given kinds, and the markers in them."""

    #: The messages of the conversation.
    messages: Messages
    #: The texts that have to be in the prompt. Thoughts have none, since templates drop them on
    #: purpose; nor has the text before a call, which many templates have no place for.
    markers: list[str]


def _probe_of(kinds: _Kinds) -> _Probe:
    """Return a conversation of these kinds."""
    messages: Messages = []
    markers: list[str] = []
    for place, kind in enumerate(kinds):
        content = f"content{place}x"
        if kind.blank is not None:
            content = kind.blank
        elif not kind.calls:
            markers.append(content)
        calls: list[ToolCall] = []
        for number, call_kind in enumerate(kind.calls):
            marker = f"call{place}x{number}x"
            markers.append(marker)
            calls.append(_probed_call(call_kind, marker))
        message = Message(
            kind.role,
            content,
            tuple(calls),
            tool_call_id=None if kind.answered is None else _identity(kind.answered),
            name=None if kind.name is None else _name(kind.name),
            reasoning="why" if kind.has_reasoning else None,
        )
        messages.append(message)
    return _Probe(messages, markers)


def _probed_call(kind: _CallKind, marker: str) -> ToolCall:
    """Return a call of this kind with a marker in its arguments."""
    arguments: Mapping[str, Any] | str = {"city": marker}
    if kind.has_text:
        arguments = to_json(arguments)
    return ToolCall(_identity(kind.identity), _name(kind.name), arguments)


def _name(number: int) -> str:
    if number == 0:
        return _PROBED_NAME
    return f"{_PROBED_NAME}{number}"


def _identity(number: int) -> str:
    return f"call_{number}"


@dataclass(frozen=True, slots=True)
class _TemplateInputs:
    """A template, and its inputs other than messages, as far as these matter for their shape."""

    #: The template.
    template: str
    #: Whether it is given tools.
    has_tools: bool
    #: The variables for the template, as JSON.
    variables: str


@functools.lru_cache(maxsize=512)
def _fitting_changes(inputs: _TemplateInputs, kinds: _Kinds) -> tuple[Change, ...] | None:
    """Return what to change in a conversation with messages of these kinds so that it fits.

    Returns:
        The changes; None if no shape fits, or if the template cannot be judged, because it does
        not even show all messages of a plain conversation.
    """
    probe = _probe_of(kinds)
    if _fits(inputs, probe.messages, probe.markers):
        return ()
    plain = _probe_of(_PLAIN)
    if not _fits(inputs, plain.messages, plain.markers):
        return None
    for forms in (_needed_forms(inputs), PLAIN_FORMS):
        messages = changed(probe.messages, forms)
        for shape in shapes_of(messages, REPAIRS):
            if _fits(inputs, shape.messages, probe.markers):
                return (*forms, *shape.changes)
    return None


@functools.lru_cache(maxsize=64)
def _needed_forms(inputs: _TemplateInputs) -> tuple[Change, ...]:
    """Return the forms in which a template takes system messages, calls and results."""
    needed: set[Change] = set()
    for kinds in _WITH_FORMS:
        probe = _probe_of(kinds)
        for shape in shapes_of(probe.messages, FORMS):
            if _fits(inputs, shape.messages, probe.markers):
                needed.update(shape.changes)
                break
    return tuple(change for change in FORMS if change in needed)


def _fits(
    inputs: _TemplateInputs,
    messages: Messages,
    markers: Sequence[str],
) -> bool:
    """Return whether a template renders the messages of a probe with all of its markers."""
    try:
        text = render(
            inputs.template,
            messages,
            bos_token="",
            eos_token="",
            now=datetime.datetime(2026, 1, 1),
            tools=[_PROBED_TOOL] if inputs.has_tools else [],
            variables=json.loads(inputs.variables),
        )
    except PromptError:
        return False
    return all(marker in text for marker in markers)
