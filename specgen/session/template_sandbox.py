"""A sandbox for untrusted chat templates. It limits what they access, how much they write, and how long
they run.

Jinja's own sandbox hides unsafe attributes of Python's objects, and bounds `range`. This one also counts
each run of the body of a loop or a macro as a step, and limits the size of texts and lists.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: The most steps of a template: a hundred for each of ten thousand messages.
MOST_STEPS = 1_000_000
#: The most characters of the whole output, and of any text, or items of any list, on the way.
MOST_CHARACTERS = 16 * 1024 * 1024


class TemplateLimitError(Exception):
    """A template exceeds a limit of the sandbox."""


class _StepCounter(CodeGenerator):
    """Generates code that counts its steps, and that limits the length of joined texts."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: Frame) -> None:
        """Generate the body of a loop, a macro, a condition, and so on."""
        self.writeline("environment.count_step()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's
        """Generate the code for ``a ~ b``."""
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders one template, once. Its compiled code raises `TemplateLimitError` beyond the limits."""

    code_generator_class = _StepCounter
    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._n_steps = 0
        for name in _GROWING:
            if name in self.filters:
                self.filters[name] = _bounded(name, self.filters[name])

    def count_step(self) -> None:
        """Count a step; compiled templates call this."""
        self._n_steps += 1
        if self._n_steps > MOST_STEPS:
            raise TemplateLimitError(f"it takes more than {MOST_STEPS} steps")

    def joined(self, parts: Sequence[Any]) -> str:
        """Return values as one text; compiled templates call this."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check the size of the result, and compute a binary operation."""
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        elif operator == "*" and isinstance(left, Sized) and isinstance(right, int):
            _check_size(len(left) * right)
        elif operator == "*" and isinstance(right, Sized) and isinstance(left, int):
            _check_size(len(right) * left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > _MOST_BITS:
                raise TemplateLimitError("it computes a number of very many digits")
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", left, ())
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """Check the size of the result if the function is a method of a text, and call it."""
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _check_growth(method.__name__, text, (*arguments, *named.values()))
        return super().call(context, function, *arguments, **named)

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


#: Methods of texts, and filters, whose results may be of any length.
_GROWING = (
    *("center", "expandtabs", "format", "format_map", "indent", "join"),
    *("ljust", "replace", "rjust", "wordwrap", "zfill"),
)
_MOST_BITS = 100_000
#: A width in a format: of five digits or more, or one that is an argument.
_LARGE_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a check of its result's size."""

    @functools.wraps(function)  # keeps Jinja's marks, which say what else to pass to the filter
    def call(*arguments: Any, **named: Any) -> Any:
        is_marked = not isinstance(arguments[0], (str, list, tuple)) and len(arguments) > 1
        text, *others = arguments[1:] if is_marked else arguments
        _check_growth(name, text, (*others, *named.values()))
        return function(*arguments, **named)

    return call


def _check_growth(name: str, text: Any, arguments: Sequence[Any]) -> None:
    """Raise `TemplateLimitError` if the method or filter `name` could make a very long result of `text`.
    `arguments` are its other arguments."""
    if name not in _GROWING:
        return
    if isinstance(text, str) and name.startswith("format") and _LARGE_WIDTH.search(text):
        raise TemplateLimitError("it formats values with large widths")
    length = len(text) if isinstance(text, Sized) else 1
    longest = max((len(each) for each in arguments if isinstance(each, Sized)), default=0)
    widest = max((each for each in arguments if isinstance(each, int)), default=0)
    if name == "join":
        items = arguments[0] if isinstance(text, str) and arguments else text
        if isinstance(items, (list, tuple)):
            between = len(text) if items is not text else longest
            _check_size(sum(len(str(item)) + between for item in items))
    elif name == "replace":
        _check_size((length + 1) * max(1, longest))
    elif name in ("expandtabs", "indent"):
        _check_size(length * max(1, widest))
    else:
        _check_size(length + widest)


def _check_size(n: int) -> None:
    if n > MOST_CHARACTERS:
        raise TemplateLimitError(f"it makes a text or a list of more than {MOST_CHARACTERS}")
