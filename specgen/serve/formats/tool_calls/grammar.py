"""The grammar of tool calls: only functions that exist, with arguments that fit their schemas."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.serve.formats.tool_calls.forms import OPENING_FENCE, CallForm
from specgen.serve.formats.tool_calls.function import Function
from specgen.serve.formats.tool_calls.values import TypedValues
from specgen.text.grammar.free_text import ANY
from specgen.text.grammar.json_schema import lenient_schema_grammar
from specgen.text.grammar.llguidance_grammar import in_lark, literal
from specgen.text.overlap import common_prefix_length

#: The maximum number of calls in an answer: without it, some small models never stop calling.
_MAX_CALLS = 16
#: The maximum number of required arguments that may come in any order. Each order needs a rule, so
#: more arguments may only come in two orders.
_MAX_PERMUTED = 3
#: The number of tokens at the end of a forced text that llguidance may replace with others. Each
#: has at least one character.
_N_LOOKED_BACK = 4
_CONTROL_TOKEN = re.compile(r"<\|[^<>]+\|>")

#: The id or the number of a call, in place of `ANY`.
_ANY_RULE = "ANY: /[0-9A-Za-z]{1,12}/"
_WHITE_SPACE_RULE = "WHITE: /[ \\n\\t]{1,12}/"
_GEMMA_RULES = (
    "gemma: gemma_text | GEMMA_PLAIN | gemma_list | gemma_object",
    'gemma_list: "[" (gemma ("," gemma)*)? "]"',
    'gemma_object: "{" (gemma_pair ("," gemma_pair)*)? "}"',
    "GEMMA_PLAIN: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?|true|false|null/",
    "gemma_text: QUOTE gemma_string",
    "gemma_string[suffix=QUOTE]: /(?s:.*)/",
    'gemma_pair: /[A-Za-z_][A-Za-z0-9_]{0,63}/ ":" gemma',
)
_PYTHON_RULES = (
    "python: PYTHON_TEXT | PYTHON_PLAIN | python_list | python_dict",
    'python_list: "[" (python (", " python)*)? "]"',
    'python_dict: "{" (python_pair (", " python_pair)*)? "}"',
    "PYTHON_PLAIN: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?|True|False|None/",
    "PYTHON_TEXT: /'([^'\\\\\\x00-\\x1f]|\\\\.)*'/",
    'python_pair: PYTHON_TEXT ": " python',
)
#: Rules for the values of the styles that do not write JSON.
_VALUE_RULES: Mapping[str, tuple[str, ...]] = {"gemma": _GEMMA_RULES, "python": _PYTHON_RULES}
#: The Lark literals between two arguments.
_SEPARATORS = {
    "python": '", "',
    "gemma": '","',
    "pairs": "",
}


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    is_parallel: bool,
    must_call: bool = True,
    other: Grammar | None = None,
) -> tuple[Grammar, list[str]]:
    """Return a grammar for calls in a model's form.

    Args:
        form: The form of the model's calls.
        functions: The functions that may be called.
        is_parallel: Whether several calls are allowed.
        must_call: Whether the answer must be a call. If not, the text is free, and the grammar
            applies after the mark of each call.
        other: The grammar of a JSON schema, which the answer may follow instead of being a call.

    Returns:
        The grammar, and a warning for each part of the functions' schemas that it cannot enforce.

    Raises:
        UsageError: If no arguments conform to the schema of a function.
    """
    trigger, opening = _trigger_and_opening(
        form,
        is_parallel=is_parallel,
        must_call=must_call,
        other=other,
    )
    rules = _CallRules(form)

    # The calls themselves.
    call = rules.add(" | ".join(map(rules.call, functions)))
    calls = f"{rules.text(opening)} {call}"
    if is_parallel and form.between:
        calls += f" ({rules.text(form.between)} {call}){{0,{_MAX_CALLS - 1}}}"
    closing = rules.text(form.closing.rstrip())
    if _CONTROL_TOKEN.fullmatch(form.closing) and not form.between:
        # The token may end the answer, in which case it is not part of its text.
        closing = f"({closing})?"

    # What else the answer may be.
    lines = ["start: calls", f"calls: {calls} {closing}"]
    if other is not None:
        lines[0] += " | other"
        lines.append(f"other: {in_lark(other)}")
    # Models also write calls as JSON objects without the mark, at the beginning of a free answer.
    bare_call_pattern = ""
    if trigger and form.mark and not must_call and form.keys is not None and form.keys[0]:
        lines += rules.bare_call(form.keys[0])
        bare_call_pattern = _bare_call_pattern(form.keys[0], functions)
    if is_parallel and _ends_within_tag(form):
        # llguidance appends a text that is certain without asking the model. If that text ended
        # within the name of a control token, the model could not choose that token any more.
        lines.append('%llguidance {"no_forcing": true}')
    grammar = Grammar(
        "lark",
        "\n".join([*lines, *rules.lines]),
        is_call=must_call,
        mark=trigger,
        is_first=not form.mark,
        bare_start=bare_call_pattern,
    )
    return grammar, rules.warnings


def _trigger_and_opening(
    form: CallForm,
    *,
    is_parallel: bool,
    must_call: bool,
    other: Grammar | None,
) -> tuple[str, str]:
    """Return the mark after which the grammar applies, and the text between it and the first name.

    The mark is empty if the grammar applies from the beginning of the answer.
    """
    opening = form.opening.lstrip()
    if other is not None:
        return "", opening
    if not must_call:
        return form.trigger, opening.removeprefix(form.trigger)
    # If each of several calls has a mark, the answer is free after the last one, and the grammar
    # needs the mark to apply again.
    may_go_on = is_parallel and form.between is not None and not form.continues_after_closing
    trigger = form.trigger if may_go_on else ""
    return trigger, opening


def _bare_call_pattern(name_key: str, functions: Sequence[Function]) -> str:
    """Return a pattern for the beginning of a call that is a JSON object without a mark."""
    names = "|".join(re.escape(literal(function.name)) for function in functions)
    fence = rf"(?:{OPENING_FENCE}\s*)?"
    return rf"\s*{fence}(?:\{{\s*)?\{{\s*{literal(name_key)}\s*:\s*(?:{names})"


def _ends_within_tag(form: CallForm) -> bool:
    """Return whether the texts after a call and between two calls first differ within a tag.

    Only a tag with enough characters before that place for `_N_LOOKED_BACK` tokens counts.
    """
    n_common = common_prefix_length(form.closing, form.between or "")
    return re.search(rf"<[^<>\s]{{{_N_LOOKED_BACK},}}\Z", form.closing[:n_common]) is not None


@dataclass(frozen=True, slots=True)
class _Parameter:
    """An argument that a function takes."""

    function: Function
    key: str
    schema: Mapping[str, Any]
    #: The JSON types that its values may have; empty for any.
    types: set[str]

    @property
    def kind(self) -> str:
        """The JSON type of its values; empty if the schema has none or several."""
        kind = self.schema.get("type")
        if isinstance(kind, str):
            return kind
        return ""

    @property
    def choices(self) -> list[Any]:
        """The values of the schema's enumeration; empty if it is not one."""
        choices = self.schema.get("enum")
        if isinstance(choices, list):
            return choices
        return []


class _CallRules:
    """Collects the rules for calls in a form, in llguidance's dialect of Lark."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        quote = literal(form.quote)
        value_rules = _VALUE_RULES.get(form.style, ())
        #: The rules so far; their number makes the names of new rules unique.
        self.lines = [_ANY_RULE, _WHITE_SPACE_RULE]
        self.lines += [rule.replace("QUOTE", quote) for rule in value_rules]
        #: Warnings about what cannot be enforced.
        self.warnings: list[str] = []
        #: An expression for each function: its call as a JSON object without a mark and with free
        #: white space, from the name to the arguments.
        self._bare_calls: list[str] = []

    def add(self, text: str) -> str:
        """Add a rule, and return its name."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}: {text}")
        return name

    def call(self, function: Function) -> str:
        """Add a rule for a call from its name to its arguments, and return the rule's name."""
        rule = f"call_{len(self.lines)}"
        if self._form.style == "json":
            arguments = self._json(function.parameters, function.name, function.name)
        else:
            arguments = self._arguments(function)
        after_name = " | ".join(map(self.text, self._form.after_names))
        self.lines.append(f"{rule}: {literal(function.name)} ({after_name}) {arguments}")

        # Keys and names are quoted twice: as JSON strings within Lark literals.
        argument_keys = {"arguments", "parameters"}
        if self._form.keys is not None:
            argument_keys.add(self._form.keys[1])
        keys = " | ".join(literal(literal(key)) for key in sorted(argument_keys))
        name = literal(literal(function.name))
        self._bare_calls.append(f'{name} WHITE? "," WHITE? ({keys}) WHITE? ":" WHITE? {arguments}')
        return rule

    def bare_call(self, name_key: str) -> list[str]:
        """Return the rules for a call as a JSON object without a mark, perhaps in a fence.

        The fence is that of a code block, or ``<tools>`` (see `OPENING_FENCE`). The object may be
        in two braces. `call` must have been called for every function.
        """
        fence = '(("```json" | "```" | "<tools>") WHITE?)?'
        key = literal(literal(name_key))
        return [
            f'bare: WHITE? {fence} (bare_object | "{{" WHITE? bare_object WHITE? "}}")',
            f'bare_object: "{{" WHITE? {key} WHITE? ":" WHITE? bare_call WHITE? "}}"',
            f"bare_call: {' | '.join(self._bare_calls)}",
        ]

    def text(self, text: str) -> str:
        """Return an expression for a fixed text of the form.

        Some models omit line breaks around pairs of key and value, so these are optional there.
        """
        may_lack_line_breaks = self._form.style == "pairs"
        pattern = ANY
        if may_lack_line_breaks:
            pattern = rf"\s*\n\s*|{ANY}"
        expressions: list[str] = []
        for part in re.split(f"({pattern})", text):
            if part == ANY:
                expressions.append("ANY")
            elif may_lack_line_breaks and "\n" in part:
                expressions.append(f"{literal(part)}?")
            elif part:
                expressions.append(literal(part))
        return " ".join(expressions) or '""'

    def _json(
        self,
        schema: Mapping[str, Any],
        where: str,
        function_name: str,
    ) -> str:
        """Add a rule for the JSON that conforms to a schema, and return its name.

        Args:
            schema: The JSON schema. Its unsupported parts are left out with a warning.
            where: What begins an error message.
            function_name: The function that a warning names.

        Raises:
            UsageError: If nothing conforms to the schema.
        """
        try:
            grammar, left_out = lenient_schema_grammar(json.dumps(schema))
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}") from None
        if left_out:
            parts = ", ".join(left_out)
            self.warnings.append(f"no grammar can enforce {parts} of {function_name}")
        return self.add(in_lark(grammar))

    # --- arguments that are written one by one ----------------------------------------------------

    def _arguments(self, function: Function) -> str:
        """Add a rule for the arguments of a function, and return its name.

        All required arguments must be there. Optional ones may come before, between and after them.
        """
        properties = function.parameters.get("properties", {})
        required = function.parameters.get("required") or ()
        pair_rules = {key: self._pair(key, schema, function) for key, schema in properties.items()}
        required_keys = [key for key in properties if key in required]
        optional_rules = [pair_rules[key] for key in properties if key not in required]
        separator = _SEPARATORS[self._form.style]

        #: Optional arguments before a required one, each with a separator after it.
        before = ""
        #: Optional arguments after another one, each with a separator before it.
        after = ""
        arguments = ""
        if optional_rules:
            optional = self.add(" | ".join(optional_rules))
            before = f"({optional} {separator}){{0,{len(optional_rules)}}}"
            after = f"({separator} {optional}){{0,{len(optional_rules)}}}"
            arguments = f"({optional} {after})?"
        if required_keys:
            between = f" {after} {separator} "
            arguments = " | ".join(
                f"{before} {between.join(pair_rules[key] for key in order)} {after}"
                for order in _orders(required_keys)
            )
        if self._form.style == "pairs":
            return self.add(arguments or '""')
        if self._form.style == "python":
            return self.add(f'"(" ({arguments}) ")"')
        return self.add(f'"{{" ({arguments}) "}}"')

    def _pair(
        self,
        key: str,
        schema: Any,
        function: Function,
    ) -> str:
        """Add a rule for the key and the value of one argument, and return its name."""
        values = TypedValues(function.parameters)
        parameter = _Parameter(function, key, values.resolved(schema), values.types_of(schema))
        if self._form.style == "gemma":
            return self._gemma_pair(parameter)
        if self._form.style == "python":
            return self._python_pair(parameter)
        return self._tagged_pair(parameter)

    def _gemma_pair(self, parameter: _Parameter) -> str:
        """Add a rule for ``KEY:VALUE``, with a value in Gemma's style, and return its name."""
        if parameter.kind in ("integer", "number", "boolean"):
            value = self._json_value(parameter)
        elif parameter.choices:
            value = _one_of(parameter.choices, self._form.quote)
        elif parameter.kind == "string":
            value = "gemma_text"
        else:
            value = "gemma"
        return self.add(f"{literal(parameter.key + ':')} {value}")

    def _python_pair(self, parameter: _Parameter) -> str:
        """Add a rule for ``KEY=VALUE``, with a JSON or Python value, and return its name."""
        values = [self._json_value(parameter)]
        if parameter.choices:
            values += [literal(repr(choice)) for choice in parameter.choices]
        elif parameter.kind == "string":
            values.append("PYTHON_TEXT")
        elif parameter.kind == "boolean":
            values += ['"True"', '"False"']
        elif parameter.kind not in ("integer", "number"):
            values.append("python")
        return self.add(f"{literal(parameter.key + '=')} ({' | '.join(values)})")

    def _tagged_pair(self, parameter: _Parameter) -> str:
        """Add a rule for an argument in the texts of `ArgumentPair`, and return its name."""
        pair = self._form.pair
        assert pair is not None
        middle = pair.middles.get(parameter.kind, pair.middles["string"])
        closing = pair.closing_of(parameter.key)
        before = f"{self.text(pair.opening)} {literal(parameter.key)}"

        is_json = bool(parameter.types) and "string" not in parameter.types
        if is_json and pair.tag_prefix and parameter.types & {"array", "object"}:
            # Lists and objects are tags within tags, for which there are no rules.
            self.warnings.append(
                f"no grammar can enforce {parameter.key} of {parameter.function.name}"
            )
            is_json = False
        if is_json:
            value = self._json_value(parameter)
        elif parameter.choices:
            value = _one_of(parameter.choices)
        else:
            # A free text goes up to the closing tag, so the line breaks around it are part of it.
            value = f"rule_{len(self.lines)}"
            self.lines.append(f"{value}[suffix={literal(closing.strip())}]: /(?s:.*)/")
            middle = middle.rstrip()
            closing = closing[len(closing.rstrip()) :]
        return self.add(f"{before} {self.text(middle)} {value} {self.text(closing)}")

    def _json_value(self, parameter: _Parameter) -> str:
        """Add a rule for the JSON value of an argument, and return its name."""
        function = parameter.function
        # The schema of an argument may refer to definitions of the function's whole schema.
        definitions = {
            name: value
            for name, value in function.parameters.items()
            if name in ("$defs", "definitions")
        }
        value_schema = parameter.schema or {"type": "string"}
        schema = {**definitions, **value_schema}
        return self._json(schema, f"{function.name}: {parameter.key}", function.name)


def _orders(keys: list[str]) -> list[list[str]]:
    """Return the orders in which required arguments may come.

    If there are too many for all, these are the order of the schema and the alphabetical order.
    """
    if len(keys) <= _MAX_PERMUTED:
        return [list(order) for order in itertools.permutations(keys)]
    return [keys, sorted(keys)]


def _one_of(choices: list[Any], quote: str = "") -> str:
    """Return an expression for one of these values; strings are put in `quote`."""
    values: list[str] = []
    for choice in choices:
        text = json.dumps(choice)
        if isinstance(choice, str):
            text = f"{quote}{choice}{quote}"
        values.append(literal(text))
    return f"({' | '.join(values)})"
