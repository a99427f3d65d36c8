"""Calls of tools: the forms in which models write them, a grammar for each form, and their reader.

A model's form is that of its chat template. The families here write JSON objects with a name and arguments; they
differ in the text around them, and in whether they write a list of objects.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.text.grammar.json_schema import lenient_schema_grammar
from specgen.text.grammar.llguidance_grammar import JSON_FORM


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to an answer: to its thoughts or its content, or a whole call. The `text` of a call is its
    arguments, as JSON; it has a name, an id, and the number of calls before it."""

    kind: Literal["thought", "content", "call"]
    text: str
    name: str = ""
    identity: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def definition(self) -> dict[str, Any]:
        """The definition in the form that chat templates expect, with all fields that they may read."""
        function = {name: getattr(self, name) for name in ("name", "description", "parameters")}
        return {"type": "function", "function": function}


# --- forms ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a family's calls: `opening`, an object or a list of objects, `closing`."""

    opening: str
    closing: str = ""
    arguments: str = "arguments"  # the object's key for them
    is_list: bool = False
    is_bare: bool = False  # a call may have no `opening`

    @property
    def controls(self) -> tuple[str, ...]:
        """Texts that may be control tokens; they are found only if the text shows control tokens."""
        return tuple(text for text in (self.opening, self.closing) if text)


HERMES = CallForm("<tool_call>", "</tool_call>")
LLAMA = CallForm("<|python_tag|>", arguments="parameters", is_bare=True)
MISTRAL = CallForm("[TOOL_CALLS]", is_list=True)
GRANITE = CallForm("<|tool_call|>", is_list=True)


def form_of(template: str) -> CallForm | None:
    """Return the form of a template's calls; None if the template takes no tools, or writes calls in a form
    that specgen cannot read."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        # Since Mistral Small 3.2 the name stands before the object.
        return None if "[ARGS]" in template else MISTRAL
    if "<|tool_call|>" in template:
        return GRANITE
    if "<tool_call>" in template:
        # Qwen3-Coder's and GLM's calls have the same marks, with XML between them.
        is_xml = "<function=" in template or "<arg_key>" in template
        return None if is_xml else HERMES
    if "ipython" in template and '"parameters": ' in template:
        return LLAMA
    return None


# --- grammars --------------------------------------------------------------------------------------


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    is_parallel: bool,
    other: Grammar | None = None,
) -> tuple[Grammar, list[str]]:
    """Return a grammar for a call of one of `functions` in the model's form, for several if `is_parallel`,
    or else for text that conforms to the JSON schema `other`; and warnings that name what it cannot enforce
    of the parameters' schemas. Raise `UsageError` if no arguments conform to a function's parameters."""
    warnings: list[str] = []
    rules = [f"start: calls{' | other' if other is not None else ''}"]
    rules.append(f"calls: {_whole(form, is_parallel)}")
    rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(functions))))
    for number, function in enumerate(functions):
        try:
            schema, left_out = lenient_schema_grammar(json.dumps(function.parameters))
        except UsageError as error:
            raise UsageError(f"{function.name}: {error.message}") from None
        before = f'{{"name": "{function.name}", "{form.arguments}": '
        rules.append(f'call_{number}: {_literal(before)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {_json(schema)}")
        if left_out:
            names = ", ".join(left_out)
            warnings.append(f"no grammar can enforce {names} of {function.name}")
    if other is not None:
        rules.append(f"other: {_json(other)}")
    return Grammar("lark", "\n".join(rules)), warnings


def _whole(form: CallForm, is_parallel: bool) -> str:
    if form.is_list:
        more = ' (", " call)*' if is_parallel else ""
        return f'{_literal(form.opening)} " "? "[" call{more} "]"'
    if form.is_bare:  # these models write one call in an answer
        return "call"
    one = f'{_literal(form.opening)} "\\n" call "\\n" {_literal(form.closing)}'
    return f'{one} ("\\n" {one})*' if is_parallel else one


def _literal(text: str) -> str:
    """Return a text as a Lark literal, which has JSON's form."""
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Grammar) -> str:
    parsed = json.loads(schema.text)
    form = {**JSON_FORM, "lenient": parsed.get("x-guidance") == {"lenient": True}}
    return f"%json {json.dumps({**parsed, 'x-guidance': form})}"


# --- reading --------------------------------------------------------------------------------------

#: The text that may come before a bare call, and the beginnings of that text.
_BARE = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{)")
_BARE_BEGUN = re.compile(r"\s*(?:`{0,2}|```(?:j|js|jso|(?:json)?\s*))")
_FENCE = "```"
#: The beginning of an object that names a function.
_NAMED = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"]*)"')


class ToolCallParser:
    """Splits an answer into content and calls. `names` are the functions that may be called.

    A call is reported when its object is complete. An answer may also begin with a bare object, perhaps in a code
    fence: small models write calls so, whatever their template says. A broken call, or one of an unknown function,
    is content. White space around calls is left out, and with `one_only` everything after the first. With
    `calls_only`, a grammar makes sure that the answer is nothing but calls.
    """

    def __init__(
        self,
        form: CallForm,
        names: Collection[str],
        *,
        one_only: bool = False,
        calls_only: bool = False,
    ) -> None:
        self._form, self._names = form, frozenset(names)
        self._one_only, self._calls_only = one_only, calls_only
        self.n_calls = 0
        self._rest = ""  # neither content nor a call yet
        self._is_beginning = True
        self._closing = ""  # what may end the last call
        self._is_incomplete = False  # the rest begins with an incomplete object

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of the answer; return what is certain now."""
        self._rest += text
        if self._is_incomplete and "}" not in text and "]" not in text:
            return []
        return self._read(is_last=False)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the rest, at the end of the answer. What there is of a call is left out if the answer
        `is_cut`: it is no content, and no client can use it."""
        return self._read(is_last=True, is_cut=is_cut)

    def _read(self, *, is_last: bool, is_cut: bool = False) -> list[Delta]:
        deltas: list[Delta] = []
        content = ""
        while True:
            if self._one_only and self.n_calls:
                self._rest = ""
            if not self._skip_closing(is_last):
                break
            start, begin = self._call_begins()
            if start < 0:
                n_told = len(self._rest) if is_last else self._n_certain()
                content += self._rest[:n_told]
                self._rest = self._rest[n_told:]
                break
            content += self._rest[:start]
            self._rest, begin = self._rest[start:], begin - start
            end, calls = self._calls(begin)
            self._is_incomplete = end < 0 and not is_last
            if self._is_incomplete:
                break
            if calls:
                calls = calls[:1] if self._one_only else calls
                deltas += _content(content) + [self._delta(*call) for call in calls]
                content = ""
                is_fenced = self._rest.lstrip().startswith(_FENCE)
                self._closing = _FENCE if is_fenced else self._form.closing
                self._rest = self._rest[end:]
            elif is_cut and end < 0 and self._is_cut_call(begin):
                self._rest = ""
                break
            else:  # not all of it: behind a broken call there may be another one
                content += self._rest[: max(1, begin)]
                self._rest = self._rest[max(1, begin) :]
            self._is_beginning = False
        if is_cut and self._calls_only:
            content = ""
        elif is_cut and self.n_calls:
            content = content[: len(content) - self._n_begun(content)]
        if is_last and self.n_calls:
            content = content.rstrip()
        return deltas + _content(content)

    def _is_cut_call(self, begin: int) -> bool:
        """Return whether the rest is the beginning of a call, and of no other one behind it."""
        if self._form.opening in self._rest[:begin]:
            return self._form.opening not in self._rest[begin:]
        named = _NAMED.match(self._rest, begin)
        return named is not None and named[1] in self._names

    def _skip_closing(self, is_last: bool) -> bool:
        """Skip the closing text of a call; return False if only more text can show whether it is there."""
        if not self._closing:
            return True
        text = self._rest.lstrip()
        if len(text) < len(self._closing) and self._closing.startswith(text):
            if is_last:
                self._rest = ""
            return is_last
        if text.startswith(self._closing):
            self._rest = text[len(self._closing) :]
        self._closing = ""
        return True

    def _call_begins(self) -> tuple[int, int]:
        """Return where the next call begins in the rest, white space before it included, and where its JSON
        begins; -1, -1 if there is no call."""
        bare = _BARE.match(self._rest) if self._is_beginning else None
        if bare is not None:
            return 0, bare.end()
        opening = self._form.opening
        place = self._rest.find(opening)
        if place < 0:
            return -1, -1
        return len(self._rest[:place].rstrip()), place + len(opening)

    def _calls(self, begin: int) -> tuple[int, list[tuple[str, str]]]:
        """Return the end of the JSON that begins here, and its calls as names and arguments. The end is -1 if
        the JSON is incomplete."""
        text = self._rest
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        if begin == len(text):
            return -1, []
        if text[begin] not in "{[":
            return begin, []
        try:
            value, end = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return -1, []
        calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        return end, [call for call in calls if call is not None] if None not in calls else []

    def _call(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        try:  # Python's reader also takes NaN, and half surrogate pairs
            from_json(text.encode(), allow_inf_nan=False)
        except ValueError:
            return None
        return name, text

    def _n_certain(self) -> int:
        """Return how many characters of the rest are content, whatever follows."""
        if self._is_beginning and _BARE_BEGUN.fullmatch(self._rest):
            return 0
        text = self._rest
        n_certain = len(text[: len(text) - self._n_begun(text)].rstrip())
        self._is_beginning = self._is_beginning and n_certain == 0
        return n_certain

    def _n_begun(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of the opening mark."""
        opening = self._form.opening
        return next((n for n in range(len(opening) - 1, 0, -1) if text.endswith(opening[:n])), 0)

    def _delta(self, name: str, arguments: str) -> Delta:
        number, self.n_calls = self.n_calls, self.n_calls + 1
        return Delta("call", arguments, name, f"call_{uuid.uuid4().hex[:24]}", number)


def _content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []


_DECODER = json.JSONDecoder()
