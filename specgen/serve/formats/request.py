"""A request as the rest of specgen knows it, whichever API it came from."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from specgen.events import FinishedEvent
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.fields import (
    AnswerBody,
    AnswerFormat,
    BodyError,
    Choice,
    Speculative,
    Tool,
    shown,
)
from specgen.serve.formats.tool_calls import (
    AnswerParser,
    CallForm,
    Function,
    ToolCallParser,
    calls_grammar,
    form_of,
)
from specgen.session.prompts import Prompt, Prompts
from specgen.session.prompts.infill import Gap
from specgen.session.prompts.template import Message, Role, ThoughtReader, ToolCall, is_thinking

#: The kinds of requests: ``chat`` continues a conversation, ``completion`` continues a text, and ``prompt``
#: answers a text as `specgen run` does.
Kind: TypeAlias = Literal["chat", "completion", "prompt"]

#: OpenAI's rule for names of functions.
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: The schema of a function without parameters; templates read the properties even of those.
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_PARAGRAPH = "\n\n"
#: Variables of chat templates that say how much is thought; few templates read both.
_THINKING = frozenset(["enable_thinking", "reasoning_effort"])


class AnswerWriter(Protocol):
    """Writes one answer in the form of its API, whole or as events. An event's name is its `type`."""

    def begin(self, n_prompt_tokens: int) -> list[dict[str, Any]]:
        """Return the events before the answer to a prompt of so many tokens."""

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a chunk of a chat completion, or for the body of an error. The chunk with the
        finish reason has the figures and is the last one."""

    def whole(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer, from the body of a chat completion."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model knows, and how it may call them."""

    functions: tuple[Function, ...]
    #: Those that it may call; only one if the request names it.
    callable: tuple[Function, ...]
    #: Whether the answer has to be a call.
    must_call: bool = False
    #: Whether an answer may call more than once.
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """A request: the prompt of an answer, how its tokens are sampled, and when it ends.

    A ``chat`` has `messages`; the others have a `text`, the `tokens` of one, or a `gap` in one.
    """

    kind: Kind
    sampling: SamplerOptions
    generation: GenerationOptions
    messages: tuple[Message, ...] = ()
    text: str = ""
    tokens: tuple[int, ...] | None = None
    gap: Gap | None = None
    tools: Tools | None = None
    #: How the model writes calls; known after `with_call_form`.
    call_form: CallForm | None = None
    #: More variables for the template.
    variables: Mapping[str, Any] = field(default_factory=dict)
    #: Whether a thinking block becomes `reasoning_content`, apart from the answer.
    splits_reasoning: bool = False
    #: What was ignored.
    warnings: tuple[str, ...] = ()
    #: How many answers are wanted, whether they are streamed, and whether a last chunk has only the usage.
    n: int = 1
    streams: bool = False
    has_usage_alone: bool = False
    speculative: Speculative = field(default_factory=Speculative)
    #: Makes a writer for another API's form, from the answer's identity, its time in seconds since 1970 and
    #: the model's name; None writes a chat completion or a text completion.
    writer: Callable[[str, int, str], AnswerWriter] | None = None

    @property
    def tool_definitions(self) -> tuple[dict[str, Any], ...]:
        return tuple(each.definition for each in self.tools.functions) if self.tools else ()

    def prompt(
        self,
        prompts: Prompts,
        now: datetime.datetime,
        *,
        chat: bool | None = None,
        system: str | None = None,
    ) -> Prompt:
        """Return the prompt of a request without a gap; `chat` and `system` are those of `Prompts.of_text`, for
        the kind ``prompt``. Raise `UsageError`, `PromptError`."""
        if self.kind == "chat":
            tools, variables = self.tool_definitions, self.variables
            return prompts.of_messages(self.messages, now=now, tools=tools, variables=variables)
        if self.tokens is not None:
            return prompts.of_tokens(self.tokens)
        if self.kind == "completion":
            return prompts.of_text(self.text, chat=False)
        return prompts.of_text(self.text, chat=chat, system=system, now=now)

    def parser(self, prompt: str = "") -> AnswerParser:
        """Return a parser for one answer to a rendered prompt. An answer that follows a grammar has no thoughts."""
        thoughts = calls = None
        if self.splits_reasoning and self.generation.grammar is None:
            thoughts = ThoughtReader(is_begun=is_thinking(prompt))
        if self.tools is not None and self.call_form is not None:
            calls = ToolCallParser(
                self.call_form,
                [function.name for function in self.tools.callable],
                one_only=not self.tools.is_parallel,
                calls_only=self.tools.must_call,
            )
        return AnswerParser(thoughts, calls)

    def stop_string(self, finished: FinishedEvent) -> str | None:
        """Return the stop string that ended an answer; None if something else did."""
        return finished.stopped_by if finished.stopped_by in self.generation.stop else None


def request_of(
    kind: Kind,
    asked: AnswerBody,
    sampling: SamplerOptions,
    generation: GenerationOptions,
    *,
    form: AnswerFormat | None = None,
    warnings: Sequence[str] = (),
    **more: Any,
) -> Request:
    """Return the request of a body with these defaults, with `more` fields. `form` is where its API has the form
    of the answer. Raise `BodyError`."""
    return Request(
        kind,
        asked.sampling(sampling),
        asked.generation(generation, form),
        warnings=(*asked.warnings(), *warnings),
        streams=asked.stream,
        speculative=asked.speculative,
        **more,
    )


def with_call_form(request: Request, template: str | None) -> Request:
    """Return the request for a model with this chat template: with the form of its calls, a grammar if one
    is needed, and the variables that the template reads. Raise `BodyError` if the request has tools, but the
    template writes no calls that specgen can read."""
    request = _with_read_variables(request, template or "")
    form, tools, generation = form_of(template or ""), request.tools, request.generation
    has_calls = any(message.role == "tool" or message.tool_calls for message in request.messages)
    if form is None and (tools is not None or has_calls):
        what = "the model's chat template takes no tools, or writes calls in an unknown form"
        raise BodyError("messages" if tools is None else "tools", what)
    if form is None or tools is None:
        return request
    if generation.grammar is not None and generation.grammar.form == "gbnf":
        raise BodyError("grammar", "it excludes tools; a JSON schema does not")
    if tools.must_call or generation.grammar is not None:
        if generation.ignore_eos:
            raise BodyError("ignore_eos", "a text that follows a grammar has an end")
        other = None if tools.must_call else generation.grammar
        grammar, warnings = calls_grammar(
            form, tools.callable, is_parallel=tools.is_parallel, other=other
        )
        generation = replace(generation, grammar=grammar)
        request = replace(request, warnings=(*request.warnings, *warnings))
    generation = replace(generation, shown_controls=form.controls)
    return replace(request, generation=generation, call_form=form)


def _with_read_variables(request: Request, template: str) -> Request:
    read = {
        name: value
        for name, value in request.variables.items()
        if re.search(rf"\b{re.escape(name)}\b", template)
    }
    unread = request.variables.keys() - read.keys()
    if _THINKING & read.keys():
        unread -= _THINKING
    ignored = [f"{name}: ignored, since the chat template does not read it" for name in unread]
    return replace(request, variables=read, warnings=(*request.warnings, *sorted(ignored)))


def check_tokens(request: Request, n_tokens: int) -> None:
    """Raise `BodyError` if a bias or the prompt names a token that a vocabulary of `n_tokens` lacks."""
    biased = [("logit_bias", token) for token, _ in request.sampling.logit_bias]
    for name, token in [*biased, *(("prompt", token) for token in request.tokens or ())]:
        if not 0 <= token < n_tokens:
            raise BodyError(name, f"there is no token {token}: the model has {n_tokens} tokens")


# --- tools ----------------------------------------------------------------------------------------


def read_tools(
    asked: Sequence[Tool], choice: Choice | None, warnings: list[str], *, is_parallel: bool
) -> Tools | None:
    """Return the functions that run at the client, and which of them a choice allows; None if the model may call
    none. Raise `BodyError`."""
    found: dict[str, Function] = {}
    for number, tool in enumerate(asked):
        where = f"tools[{number}]"
        if tool.type not in ("function", "custom"):
            warnings.append(f"{where}: ignored, since {shown(tool.type)} does not run here")
            continue
        if tool.function is not None:
            where, tool = f"{where}.function", tool.function  # noqa: PLW2901
        name, is_input = tool.name, tool.input_schema is not None
        if name is None or not _NAME.fullmatch(name):
            rule = "is not a name of 1 to 64 letters, digits, _ and -"
            raise BodyError(f"{where}.name", f"{shown(name)} {rule}")
        if name in found:
            raise BodyError(f"{where}.name", f"{shown(name)} is given twice")
        schema = {**_NO_PARAMETERS, **(tool.parameters or tool.input_schema or {})}
        field = f"{where}.{'input_schema' if is_input else 'parameters'}"
        found[name] = Function(name, tool.description or "", schema, field)
    return _chosen(found, choice, is_parallel)


def _chosen(
    found: Mapping[str, Function], choice: Choice | None, is_parallel: bool
) -> Tools | None:
    functions, kind = tuple(found.values()), "auto" if choice is None else choice.type
    if kind == "none" or (not functions and kind == "auto"):
        return None
    if not functions:
        raise BodyError("tool_choice", f"{shown(kind)} needs tools")
    if choice is None or kind in ("auto", "required", "any"):
        return Tools(functions, functions, kind != "auto", is_parallel)
    if kind in ("function", "custom", "tool"):
        return Tools(functions, (_named(found, choice),), must_call=True, is_parallel=False)
    if kind != "allowed_tools":
        raise BodyError("tool_choice", f"{shown(kind)} is not a choice that specgen knows")
    allowed = choice.allowed_tools or choice
    if not allowed.tools:
        raise BodyError("tool_choice", "it allows no tools")
    named = [_named(found, each) for each in allowed.tools if each.type in ("function", "custom")]
    some = tuple({each.name: each for each in named}.values())
    return Tools(functions, some, allowed.mode == "required", is_parallel) if some else None


def _named(found: Mapping[str, Function], choice: Choice) -> Function:
    name = choice.name if choice.function is None else choice.function.name
    if name is None or name not in found:
        raise BodyError("tool_choice", f"there is no function {shown(name)} among tools")
    return found[name]


# --- messages -------------------------------------------------------------------------------------


class Conversation:
    """The messages of a chat, as they grow."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        #: The tools that were called so far, by the ids of the calls.
        self._called: dict[str, str] = {}

    def add(self, message: Message) -> None:
        self._called |= {call.identity: call.name for call in message.tool_calls}
        self.messages.append(message)

    def add_result(self, where: str, identity: str | None, text: str) -> None:
        """Add the result of a call, whose id is in the field `where`. Raise `BodyError` if there was none."""
        if identity is None or identity not in self._called:
            raise BodyError(where, f"{shown(identity)} is the id of no call in an earlier message")
        name = self._called[identity]
        self.messages.append(Message("tool", text, tool_call_id=identity, name=name))

    def join_text(self, role: Role, text: str) -> None:
        """Add a text to the turn of a role. Texts of one role that follow one another are one message, since many
        templates want roles to alternate. They take a system message at the beginning only: further back it is a
        user's."""
        if role == "system" and any(message.role != "system" for message in self.messages):
            role = "user"
        last = self._turn(role)
        self.messages[-1] = replace(last, content=_joined(last.content, text))

    def join_thought(self, thought: str) -> None:
        last = self._turn("assistant")
        self.messages[-1] = replace(last, reasoning=_joined(last.reasoning or "", thought))

    def join_call(self, where: str, identity: str | None, name: str | None, arguments: Any) -> None:
        """Add a call to the model's turn. Raise `BodyError` if it has no id or no name."""
        if not identity or not name:
            raise BodyError(where, "a call needs an id and a name")
        last = self._turn("assistant")
        calls = (*last.tool_calls, ToolCall(identity, name, arguments))
        self.messages[-1] = replace(last, tool_calls=calls)
        self._called[identity] = name

    def _turn(self, role: Role) -> Message:
        if not self.messages or self.messages[-1].role != role:
            self.messages.append(Message(role, ""))
        return self.messages[-1]


def _joined(before: str, text: str) -> str:
    return f"{before}{_PARAGRAPH}{text}" if before else text


def arguments_of(text: str) -> Mapping[str, Any] | str:
    """Return the arguments as an object for templates; if a model wrote no object, return its text, so that
    it sees what it did."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # an escape can make half a surrogate pair, too
        return text
    return value if isinstance(value, dict) else text
