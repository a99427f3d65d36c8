"""Render a conversation with the model's own chat template, in a sandbox."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specgen.errors import PromptError
from specgen.session.prompts.marks import kept, marked

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

#: The variables of all templates.
OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
#: Mistral's templates, which write this mark, accept only call ids of nine letters and digits.
_NEEDS_SHORT_IDS = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an earlier turn. `arguments` is an object from `json.loads`, or the text
    that the model wrote if that was no object."""

    identity: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. An assistant's turn may have `tool_calls`, and the `reasoning` before the
    answer, of which templates keep what the model needs. A tool's turn is the result of the call
    `tool_call_id`, and `name` is the name of the tool."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


def render(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str,
    eos_token: str,
    now: datetime.datetime,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    marks_contents: bool = False,
) -> str:
    """Return the conversation as the model expects it, up to where its answer begins.

    `template` is Jinja as Hugging Face's chat templates use it. It comes with the model file, which is not
    trusted. `tools` are as OpenAI's API describes them. `variables` are more variables for the template,
    such as ``enable_thinking``; `OWN_VARIABLES` keep their values. `marks_contents` marks all that is not
    the template's own text (see `marks`). Raise `PromptError` if the template does not accept the messages
    (some accept no system message, for example), fails in any way, or exceeds the limits of the sandbox.
    """
    environment = _Sandbox()
    environment.globals["strftime_now"] = now.strftime
    has_short_ids = _NEEDS_SHORT_IDS in template
    turns = [_turn(message, has_short_ids) for message in messages]
    given = dict(variables or {})
    if marks_contents:
        # The role is not the sender's text: templates make control tokens of it.
        turns = [marked(turn) | {"role": turn["role"]} for turn in turns]
        given = {name: marked(value) for name, value in given.items()}
    known = {
        "messages": turns,
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    if tools:  # templates ask whether it is defined
        known["tools"] = marked(tools) if marks_contents else list(tools)
    try:
        return environment.rendered(_compiled(template), {**given, **known})
    except Exception as error:  # a template's expressions can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PromptError(
            f"the model's chat template failed: {reason}",
            hint="leave out --system if the template takes none; `specgen run --raw` uses no template",
        ) from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> types.CodeType:
    """Compile a template, once for all conversations: that takes longer than to render it."""
    return _Sandbox().compile(template)


def _turn(message: Message, has_short_ids: bool) -> dict[str, Any]:
    """Return a message as templates read it. They test which keys it has, so absent fields have none."""
    as_id = _short_id if has_short_ids else str
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": as_id(call.identity),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = as_id(message.tool_call_id)
    others = {"name": message.name, "reasoning_content": message.reasoning}
    return turn | {name: value for name, value in others.items() if value is not None}


def _short_id(identity: str) -> str:
    """Return the id if Mistral's templates accept it, else nine hexadecimal digits of its hash."""
    if len(identity) == 9 and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# --- the sandbox ------------------------------------------------------------------------------


#: The most steps of a template: a hundred for each of ten thousand messages.
_MOST_STEPS = 1_000_000
#: The most characters of the whole output, and of any text, or items of any list, on the way.
_MOST_CHARACTERS = 16 * 1024 * 1024
_MOST_BITS = 100_000
#: Methods of texts, and filters, whose results may be of any length.
_GROWING = (
    *("center", "expandtabs", "format", "format_map", "indent", "join"),
    *("ljust", "replace", "rjust", "wordwrap", "zfill"),
)
#: A width in a format: of five digits or more, or one that is an argument.
_LARGE_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{")


class TemplateLimitError(Exception):
    """A template exceeds a limit of the sandbox."""


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, with which templates made for training mark the assistant's
    text. The mark does not change the output."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _StepCounter(CodeGenerator):
    """Generates code that counts each run of the body of a loop or a macro, and limits joined texts."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: Frame) -> None:
        self.writeline("environment.count_step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Renders one template, once. Jinja's own sandbox hides unsafe attributes of Python's objects, and bounds
    `range`; this one also limits steps and sizes (`TemplateLimitError`), and keeps marks on texts."""

    code_generator_class = _StepCounter
    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
        )
        self._n_steps = 0
        self.filters["tojson"] = _to_json
        self.filters = {name: _checked(name, each) for name, each in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception

    def count_step(self) -> None:
        """Count a step; compiled templates call this."""
        self._n_steps += 1
        if self._n_steps > _MOST_STEPS:
            raise TemplateLimitError(f"it takes more than {_MOST_STEPS} steps")

    def concat(self, parts: Iterable[str]) -> str:
        """Return the output of a macro or a block as one text; compiled templates call this."""
        return str(kept("".join(parts)))

    def joined(self, parts: Sequence[Any]) -> str:
        """Return values as one text; compiled templates call this."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return self.concat(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result, and compute a binary operation."""
        n_left, n_right = (
            value if isinstance(value, int) else len(value) if isinstance(value, Sized) else 0
            for value in (left, right)
        )
        if isinstance(left, Sized) and operator == "+":
            _check_size(n_left + n_right)
        elif operator == "*" and (isinstance(left, Sized) or isinstance(right, Sized)):
            _check_size(n_left * n_right)
        elif operator == "**" and n_left.bit_length() * n_right > _MOST_BITS:
            raise TemplateLimitError("it computes a number of very many digits")
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", [left])
        return kept(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """Check the size of the result if the function is a method of a text, and call it."""
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _check_growth(method.__name__, [text, *arguments, *named.values()])
        return kept(super().call(context, function, *arguments, **named))

    def rendered(self, code: types.CodeType, variables: dict[str, Any]) -> str:
        """Return the output of a template that `compile` has compiled. Raise whatever its expressions raise."""
        template = jinja2.Template.from_code(self, code, self.make_globals(None))
        parts: list[str] = []
        n = 0
        for part in template.generate(variables):
            n += len(part)
            _check_size(n)
            parts.append(part)
        return "".join(parts)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with a check of its result's size, whose result keeps marks."""

    @functools.wraps(function)  # keeps Jinja's marks, which say what else to pass to the filter
    def call(*arguments: Any, **named: Any) -> Any:
        _check_growth(name, [*arguments, *named.values()])
        return kept(function(*arguments, **named))

    return call


def _check_growth(name: str, values: Sequence[Any]) -> None:
    """Raise `TemplateLimitError` if the method or filter `name` could make a very long result of these values,
    of which the first text or list is its subject."""
    sized = [value for value in values if isinstance(value, Sized)]
    if name not in _GROWING or not sized:
        return
    subject, *others = sized
    longest = max(map(len, others), default=0)
    widest = max((value for value in values if isinstance(value, int)), default=0)
    items = next((value for value in sized if isinstance(value, (list, tuple))), None)
    if name.startswith("format"):
        if isinstance(subject, str) and _LARGE_WIDTH.search(subject):
            raise TemplateLimitError("it formats values with large widths")
    elif name == "join" and items is not None:
        between = max(len(value) for value in (*sized, "") if isinstance(value, str))
        _check_size(sum(len(str(item)) + between for item in items))
    else:
        _check_size((len(subject) + 1) * max(1, longest, widest))


def _check_size(n: int) -> None:
    if n > _MOST_CHARACTERS:
        raise TemplateLimitError(f"it makes a text or a list of more than {_MOST_CHARACTERS}")
