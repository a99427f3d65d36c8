"""Jinja for the chat templates of model files: a sandbox, since they are not trusted.

Texts with marks (`marked_text.py`) keep them through all operations of a template.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specgen.session.prompts.marked_text import unmarked, with_marks_kept


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    """Compile a template. The result is cached, since compiling takes longer than rendering."""
    return _Sandbox().from_string(template)


def check_syntax(template: str) -> str:
    """Return a description of the first syntax error in a template; empty if there is none."""
    try:
        compiled(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return ""


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, keeping the marks of its texts. This is the filter `tojson`."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,  # some of Jinja's filters return iterators
    )
    # `json.dumps` itself would escape every mark, which is a surrogate, even those of ASCII.
    return re.sub("[^\x00-\x7f]", _escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    r"""Return a character as a JSON escape (``\u00e9``); marked ASCII is returned unchanged."""
    character = unmarked(match[0])
    if character.isascii():
        return match[0]
    return json.dumps(character)[1:-1]  # without the quotes


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _case_filter(name: str) -> Callable[[Any], Any]:
    """Return a filter that changes the case of any value, after converting it to text.

    Gemma 4's template uses that for the types of parameters, which may be lists.

    Args:
        name: The method of `str` that changes the case, such as "upper".
    """

    def call(value: Any) -> Any:
        return getattr(with_marks_kept(str(value)), name)()

    return call


def _keeping_marks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose results keep the marks of texts."""

    # `wraps` also copies the attributes with which Jinja's filters ask for its context.
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return with_marks_kept(function(*arguments, **named))

    return call


class _GenerationBlocks(jinja2.ext.Extension):
    """Accepts and ignores ``{% generation %}``, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Compiles the operator ``~`` to a call of `_Sandbox.joined`, which keeps marks."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's own sandbox, extended so that texts keep their marks.

    The sandbox hides unsafe attributes of Python objects, and limits the size of `range`.
    """

    code_generator_class = _CodeGenerator
    #: The operators that go through `call_binop`.
    intercepted_binops = frozenset(["*", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlocks, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = to_json
        self.filters["from_json"] = json.loads
        self.filters["fromjson"] = json.loads
        for name in ("upper", "lower", "title", "capitalize"):
            self.filters[name] = _case_filter(name)
        for name, function in self.filters.items():
            self.filters[name] = _keeping_marks(function)
        self.globals["raise_exception"] = _raise_exception

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the exception that is being handled.

        Jinja would first add the lines of the template to its traceback, which takes longer than
        rendering, and nobody reads them.
        """
        raise  # noqa: PLE0704 - Jinja calls it where it has caught the exception

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also allow templates to change lists, as llama.cpp does: Kimi K2's template needs it."""
        is_change = attr in ("append", "pop") and isinstance(obj, list)
        return is_change or super().is_safe_attribute(obj, attr, value)

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a macro or a block, as compiled templates do with this method."""
        return str(with_marks_kept("".join(parts)))

    def joined(self, parts: Sequence[Any]) -> str:
        """Return the operands of ``~`` as one text."""
        return self.concat(map(str, parts))

    def call_binop(
        self,
        context: Any,
        operator: str,
        left: Any,
        right: Any,
    ) -> Any:
        """Return the result of an intercepted operator, with its marks."""
        return with_marks_kept(super().call_binop(context, operator, left, right))

    def call(
        self,
        context: Any,
        function: Any,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Return the result of a call in a template, with its marks."""
        return with_marks_kept(super().call(context, function, *arguments, **named))
