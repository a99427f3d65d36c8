"""Render a conversation with the model's own chat template, in a sandbox."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, SupportsIndex, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specgen.errors import PromptError

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

#: The variables of all templates.
OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
#: Templates that read the usual variable.
_TAKES_TOOLS = re.compile(r"\btools\b")
#: Mistral's templates, which write this mark, accept only call ids of nine letters and digits.
_NEEDS_SHORT_IDS = "[TOOL_CALLS]"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an earlier turn. `arguments` is an object of JSON, or that as a text."""

    identity: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """A turn; an assistant's may have calls and `reasoning`, a tool's is the result of
    `tool_call_id`.
    """

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
    rearranges: bool = True,
) -> str:
    """Return the conversation as the model expects it, up to where its answer begins. `template` is
    Jinja from a model file, which is not trusted. `tools` are as OpenAI's API describes them.
    `OWN_VARIABLES` keep their values. `marks_contents` marks all that is not the template's own
    text; `rearranges` says to try turns and calls in other shapes if the template refuses them, and
    to add calls to the text if it writes none. Raise `PromptError` if it does not accept the
    messages, or fails in any way.
    """
    mark: Callable[[Any], Any] = marked if marks_contents else lambda value: value
    # As llama.cpp: templates ask whether they are defined, and some have a date of long ago.
    given = {"enable_thinking": True, "date_string": now.strftime("%d %b %Y")}
    given |= {name: mark(value) for name, value in (variables or {}).items()}
    given |= {"add_generation_prompt": True, "bos_token": bos_token, "eos_token": eos_token}
    given["strftime_now"] = now.strftime
    given.pop("tools", None)
    if tools:  # templates ask whether it is defined
        given["tools"] = given["xml_tools"] = mark(list(tools))  # SmolLM3 has that name for them
    if not _TAKES_TOOLS.search(template):  # Firefunction has names of its own
        functions = mark(_to_json(tools, indent=4)) if tools else ""
        given |= {"functions": functions, "datetime": now.strftime("%b %d %Y")}
    failure: Exception | None = None
    for tried in _shapes(messages) if rearranges else [messages]:
        # The role is not the sender's text: templates make control tokens of it.
        turns = (_turn(message, template, adds_calls=rearranges) for message in tried)
        given["messages"] = [mark(turn) | {"role": turn["role"]} for turn in turns]
        try:
            return "".join(_compiled(template).generate(given))
        except Exception as error:  # noqa: BLE001 - a template's expressions can raise anything
            failure = failure or error
    reason = " ".join(str(failure).split()) or type(failure).__name__
    what = f"the model's chat template failed: {reason}"
    raise PromptError(what, "`specgen run --raw` uses no template") from failure


def _shapes(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation, and then in the shapes that a template may want which refuses it."""
    shapes = [list(messages)]
    yield shapes[0]
    for change in (_joined, _with_texts, _one_by_one, _with_all_in_thoughts, _without_system):
        for shape in [*shapes]:
            if (changed := change(shape)) not in shapes:
                shapes.append(changed)
                yield changed


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation without two turns of the user one behind the other, which some
    templates refuse.
    """
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = replace(message, content=f"{found[-1].content}\n\n{message.content}")
        else:
            found.append(message)
    return found


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which a turn has one call, and its result follows, as Llama 3's
    template wants it.
    """
    found, rest = list[Message](), list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.tool_calls) < 2:
            found.append(message)
            continue
        n_results = next((n for n, each in enumerate(rest) if each.role != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        for n, call in enumerate(message.tool_calls):
            found.append(replace(message, content="" if n else message.content, tool_calls=(call,)))
            found += [each for each in results if each.tool_call_id == call.identity]
            results = [each for each in results if each.tool_call_id != call.identity]
        found += results
    return found


def _with_texts(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose arguments are texts of JSON, as Functionary's template wants
    them.
    """

    def written(call: ToolCall) -> ToolCall:
        return replace(call, arguments=_to_json(call.arguments))

    return [replace(each, tool_calls=tuple(map(written, each.tool_calls))) for each in messages]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose system message begins the user's first turn, as Gemma 2's
    template wants it.
    """
    first, *others = messages
    if first.role != "system" or not others or others[0].role != "user":
        return list(messages)
    joined = replace(others[0], content=f"{first.content}\n\n{others[0].content}")
    return [joined, *others[1:]]


def _with_all_in_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which turns with calls have thoughts or a text, as gpt-oss's
    template wants them.
    """
    return [
        replace(each, content="", reasoning=f"{each.reasoning}\n\n{each.content}")
        if each.tool_calls and each.reasoning and each.content
        else each
        for each in messages
    ]


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """Compile a template, once for all conversations: that takes longer than to render it."""
    return _Sandbox().from_string(template)


def check_syntax(template: str) -> str:
    try:
        _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def _turn(message: Message, template: str, *, adds_calls: bool) -> dict[str, Any]:
    """Return a message as templates read it. They test which keys it has, so absent fields have
    none.
    """
    as_id = _short_id if _NEEDS_SHORT_IDS in template else str
    content: Any = message.content
    if message.tool_calls and adds_calls and "tool_calls" not in template:
        calls_made = (
            {"name": call.name, "arguments": call.arguments} for call in message.tool_calls
        )
        content = "\n".join([content] * bool(content) + list(map(_to_json, calls_made)))
    if message.reasoning and "block['thinking']" in template:  # Ministral 3
        thought = {"type": "thinking", "thinking": message.reasoning}
        content = [thought, {"type": "text", "text": content}]
    calls = [
        {
            "id": as_id(call.identity),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    turn: dict[str, Any] = {
        "role": message.role,
        "content": content,
        "tool_calls": calls or None,
        "tool_call_id": None if message.tool_call_id is None else as_id(message.tool_call_id),
        "name": message.name,
        _name_of_thoughts(template): message.reasoning,
    }
    return {name: value for name, value in turn.items() if value is not None}


@functools.lru_cache(maxsize=16)
def _name_of_thoughts(template: str) -> str:
    """Return the field of a turn that has its thoughts: a few templates (gpt-oss, Solar) have names
    of their own.
    """
    found = re.search(r"message(?:\.|\[['\"])(thinking|reasoning|thought)\b", template)
    return "reasoning_content" if found is None or "reasoning_content" in template else found[1]


def _short_id(identity: str) -> str:
    """Return an id that Mistral's templates accept: this one if they do, else digits of its hash."""
    if len(identity) == 9 and identity.isascii() and identity.isalnum():
        return identity
    return hashlib.sha256(identity.encode()).hexdigest()[:9]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Filters make iterators.
    form: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    text = json.dumps(value, ensure_ascii=False, default=list, **form)
    return re.sub("[^\x00-\x7f]", _escaped, text) if ensure_ascii else text


def _escaped(found: re.Match[str]) -> str:
    """Return a character as JSON escapes it; one of ASCII keeps its mark."""
    character = unmarked(found[0])
    return found[0] if character.isascii() else json.dumps(character)[1:-1]


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# --- marks ------------------------------------------------------------------------------------

# A name of a control token in a message stays plain text, whatever a template does with the
# message: it may cut it, join it to text of its own and write it as JSON. So each character of a
# content carries a mark: code points from U+0021 to U+07FF, of which every control token has some,
# become lone surrogates, which no valid text contains. White space, `"` and the backslash stay,
# since templates strip the one and JSON escapes the others.
_MARKS = {
    code: 0xD800 + code
    for code in range(0x21, 0x800)
    if not chr(code).isspace() and chr(code) not in '"\\'
}
_CHARACTERS = {mark: code for code, mark in _MARKS.items()}
_MARKED = re.compile("[\ud800-\udfff]")


def marked(value: Any) -> Any:
    """Return a text, or a list or an object of JSON, with all of its texts marked, also the keys."""
    if isinstance(value, str):
        return MarkedText(value.translate(_MARKS))
    if isinstance(value, Mapping):
        return {marked(key): marked(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(each) for each in value]
    return value


def unmarked(text: str) -> str:
    return text.translate(_CHARACTERS)


def _kept(value: Any) -> Any:
    """Return the result of an operation, whose texts become `MarkedText` again if they have marks."""
    if isinstance(value, list) and value and type(value[0]) is str:
        value[:] = map(_kept, value)  # it stays the same list, to which a template may add
    return MarkedText(value) if type(value) is str and _MARKED.search(value) else value


def _plain(text: Any) -> Any:
    if isinstance(text, str):
        return unmarked(text)
    return tuple(map(unmarked, text)) if isinstance(text, tuple) else text


class MarkedText(str):
    """A text with marks, which compares, splits and replaces like the text without marks, since
    templates compare contents with texts of their own (``'</think>' in content``).
    """

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return repr(unmarked(self)).translate(_MARKS)

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        return MarkedText(super().__getitem__(index))

    def __iter__(self) -> Iterator[str]:
        return map(MarkedText, super().__iter__())

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        pieces = self.split(old, count) if old else list(self)
        return MarkedText(str.join(new, pieces))

    def strip(self, characters: str | None = None, /) -> str:
        return self.rstrip(characters).lstrip(characters)

    def rstrip(self, characters: str | None = None, /) -> str:
        return self[: len(str.rstrip(unmarked(self), _plain(characters)))]

    def lstrip(self, characters: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(unmarked(self), _plain(characters))) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def removeprefix(self, prefix: str, /) -> str:
        return self[self.startswith(prefix) * len(prefix) :]


def _like_plain(name: str) -> Callable[..., Any]:
    method = getattr(str, name)
    return lambda text, *arguments: method(unmarked(text), *map(_plain, arguments))


def _recased(name: str) -> Callable[..., Any]:
    return lambda text: MarkedText(getattr(str, name)(unmarked(text)).translate(_MARKS))


def _cased(name: str) -> Callable[..., Any]:
    """Return a filter that knows the marks of a list's texts, too: Gemma 4's template writes types
    in upper case.
    """
    return lambda value: getattr(_kept(str(value)), name)()


def _pieces(name: str) -> Callable[..., Any]:
    """Return a method of which the results are pieces of the text, in their order."""
    method = _like_plain(name)

    def call(text: str, separator: str | None = None, *most: SupportsIndex) -> list[str]:
        found, plain, start = [], unmarked(text), 0
        n_between = len(separator) if separator is not None and name.endswith("split") else 0
        for piece in method(text, separator, *most):
            start = plain.index(piece, start)  # after white space
            found.append(text[start : start + len(piece)])
            start += len(piece) + n_between
        return found

    return call


for _make, _names in (
    (_like_plain, "__hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __contains__"),
    (_like_plain, "startswith endswith find rfind index rindex count"),
    (_recased, "lower upper capitalize title"),
    (_pieces, "split rsplit partition rpartition"),
):
    for _name in _names.split():
        setattr(MarkedText, _name, _make(_name))


# --- the sandbox ------------------------------------------------------------------------------


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, with which templates for training mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Generates code that joins texts by a method of the environment."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's own sandbox, which hides unsafe attributes of Python's objects and bounds `range`,
    with marks on texts.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(["*", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.filters["from_json"] = self.filters["fromjson"] = json.loads
        self.filters |= {name: _cased(name) for name in ("upper", "lower", "title", "capitalize")}
        self.filters = {name: _keeping_marks(each) for name, each in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow templates to change their own lists, as llama.cpp does: Kimi K2's takes ids from
        one.
        """
        is_change = attr in ("append", "pop") and isinstance(obj, list)
        return is_change or super().is_safe_attribute(obj, attr, value)

    def concat(self, parts: Iterable[str]) -> str:
        """Return the output of a macro or a block as one text; compiled templates call this."""
        return str(_kept("".join(parts)))

    def joined(self, parts: Sequence[Any]) -> str:
        return self.concat(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _kept(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        return _kept(super().call(context, function, *arguments, **named))


def _keeping_marks(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks, which say what else to pass to the filter
    def call(*arguments: Any, **named: Any) -> Any:
        return _kept(function(*arguments, **named))

    return call
