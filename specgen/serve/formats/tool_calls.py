"""Calls of tools: a grammar for those that an answer must have, and the reader of those that it
has. Which form a model uses is found in `call_forms.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.serve.formats.call_forms import (
    UNCLEAR,
    CallForm,
    PairsReader,
    match,
    read_name,
    reader_of,
)
from specgen.serve.formats.call_values import ArgumentsReader
from specgen.text.grammar.free_text import ANY
from specgen.text.grammar.json_schema import lenient_schema_grammar
from specgen.text.grammar.llguidance_grammar import in_lark, literal
from specgen.text.overlap import common_prefix_length, partial_match_length


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to an answer: to its thoughts, its content, or the arguments of a call, which are
    JSON. A ``call`` begins one: it has a name, an id, and the number of calls before it. `is_end`
    says that the arguments are whole; those of a call that was cut never are.
    """

    kind: Literal["thought", "content", "call", "arguments"]
    text: str
    name: str = ""
    identity: str = ""
    number: int = 0
    is_end: bool = False

    def continues(self, block: Delta | None) -> bool:
        """Return whether this is a part of a block, and not the beginning of the next."""
        same = block is not None and block.kind == self.kind != "call"
        return same or self.kind == "arguments"

    def with_more(self, delta: Delta) -> Delta:
        return replace(self, text=self.text + delta.text, is_end=delta.is_end)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def definition(self) -> dict[str, Any]:
        """The definition in the form that chat templates expect, with all fields that they may
        read.
        """
        parameters = {"type": "object", "properties": {}, **self.parameters}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


# --- grammars --------------------------------------------------------------------------------------

#: Small models go on calling for ever.
_MOST_CALLS = 16
_CONTROL = re.compile(r"<\|[^<>]+\|>")
#: What a call's id or number may be.
_ANY_RULE = "ANY: /[0-9A-Za-z]{1,12}/"
_WHITE_RULE = "WHITE: /[ \\n\\t]{1,12}/"
#: Values as models write them in each style, beside JSON's.
_VALUES: Mapping[str, tuple[str, ...]] = {
    "gemma": (
        'gemma: gemma_text | GEMMA_PLAIN | "[" (gemma ("," gemma)*)? "]" | "{" (gemma_pair ("," gemma_pair)*)? "}"',
        "GEMMA_PLAIN: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?|true|false|null/",
        "gemma_text: QUOTE gemma_string",
        "gemma_string[suffix=QUOTE]: /(?s:.*)/",
        'gemma_pair: /[A-Za-z_][A-Za-z0-9_]{0,63}/ ":" gemma',
    ),
    "python": (
        'python: PYTHON_TEXT | PYTHON_PLAIN | "[" (python (", " python)*)? "]" | "{" (python_pair (", " python_pair)*)? "}"',
        "PYTHON_PLAIN: /-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?|True|False|None/",
        "PYTHON_TEXT: /'([^'\\\\\\x00-\\x1f]|\\\\.)*'/",
        'python_pair: PYTHON_TEXT ": " python',
    ),
}
#: So many tokens of a forced text, of a character or more, may be other tokens for llguidance.
_LOOKED_BACK = 4
#: So many required arguments may come in any order, which doubles the rules again and again; more
#: in two orders.
_MOST_PERMUTED = 3


class _Rules:
    """The rules of a grammar in llguidance's form of Lark, for calls in a form."""

    def __init__(self, form: CallForm) -> None:
        self.form = form
        quote, values = literal(form.quote), _VALUES.get(form.style, ())
        values = tuple(each.replace("QUOTE", quote) for each in values)
        self.lines = [_ANY_RULE, _WHITE_RULE, *values]
        #: What cannot be enforced.
        self.warnings: list[str] = []
        #: Calls as objects of JSON, from the name to the arguments, in which white space is free.
        self.bare: list[str] = []

    def call(self, function: Function) -> str:
        """Return the name of a rule for a call, from its name to its arguments."""
        rule = f"call_{len(self.lines)}"
        if self.form.style == "json":
            arguments = self._schema(function.parameters, function.name, function.name)
        else:
            arguments = self._arguments(function)
        after = " | ".join(map(self.text, self.form.after_names))
        self.lines.append(f"{rule}: {literal(function.name)} ({after}) {arguments}")
        keys = {'"arguments"', '"parameters"', literal((self.form.keys or ("", "arguments"))[1])}
        key = " | ".join(map(literal, sorted(keys)))
        comma, colon = 'WHITE? "," WHITE?', 'WHITE? ":" WHITE?'
        self.bare.append(f"{literal(literal(function.name))} {comma} ({key}) {colon} {arguments}")
        return rule

    def _schema(self, schema: Mapping[str, Any], where: str, name: str) -> str:
        """Return a rule for the JSON that conforms to a schema."""
        try:
            grammar, left_out = lenient_schema_grammar(json.dumps(schema))
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}") from None
        if left_out:
            self.warnings.append(f"no grammar can enforce {', '.join(left_out)} of {name}")
        return self._new(in_lark(grammar))

    def text(self, text: str) -> str:
        """Return a part of the form. Not all models write the line breaks of their template around
        pairs.
        """
        breaks = r"\s*\n\s*" if self.form.style == "pairs" else "(?!)"
        parts = re.split(f"({breaks}|{ANY})", text)
        written = (
            "ANY" if part == ANY else f"{literal(part)}{'?' if number % 2 else ''}"
            for number, part in enumerate(parts)
            if part
        )
        return " ".join(written) or '""'

    def _new(self, text: str) -> str:
        rule = f"rule_{len(self.lines)}"
        self.lines.append(f"{rule}: {text}")
        return rule

    def _arguments(self, function: Function) -> str:
        """Return arguments one by one: all that are required, with others before, between and
        behind them.
        """
        properties = function.parameters.get("properties", {})
        required = function.parameters.get("required") or ()
        pairs = {key: self._pair(key, schema, function) for key, schema in properties.items()}
        keys = [key for key in properties if key in required]
        others = [pairs[key] for key in properties if key not in required]
        between = {"python": '", "', "gemma": '","', "pairs": ""}[self.form.style]
        before = after = text = ""
        if others:
            other, most = self._new(" | ".join(others)), len(others)
            before = f"({other} {between}){{0,{most}}}"
            after = f"({between} {other}){{0,{most}}}"
            text = f"({other} {after})?"
        if keys:
            orders = [keys, sorted(keys)]
            if len(keys) <= _MOST_PERMUTED:
                orders = [[*order] for order in itertools.permutations(keys)]
            text = " | ".join(
                f"{before} {f' {after} {between} '.join(pairs[key] for key in order)} {after}"
                for order in orders
            )
        if self.form.style == "pairs":
            return self._new(text or '""')
        brackets = "()" if self.form.style == "python" else "{}"
        return self._new(f'"{brackets[0]}" ({text}) "{brackets[1]}"')

    def _pair(self, key: str, schema: Any, function: Function) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        choices, kind = schema.get("enum"), schema.get("type")
        choices = choices if isinstance(choices, list) else []
        kind = kind if isinstance(kind, str) else ""
        if self.form.style == "gemma":
            value = "gemma_text" if kind == "string" else "gemma"
            if kind in ("integer", "number", "boolean"):
                value = self._value(schema, function, key)
            elif choices:
                value = _one_of(choices, self.form.quote)
            return self._new(f"{literal(key + ':')} {value}")
        if self.form.style == "python":
            plain = {"string": "PYTHON_TEXT", "boolean": '"True" | "False"'}
            value = "" if kind in ("integer", "number") else plain.get(kind, "python")
            if choices:
                value = " | ".join(literal(repr(each)) for each in choices)
            values = f"{self._value(schema, function, key)}{' | ' if value else ''}{value}"
            return self._new(f"{literal(key + '=')} ({values})")
        pair = self.form.pair
        assert pair is not None
        middle = pair.middles.get(kind, pair.middles["string"])
        before = f"{self.text(pair.opening)} {literal(key)} {self.text(middle)}"
        closing = self.text(pair.closing_of(key))
        is_json = not _may_be_text(schema)
        if is_json and pair.nests and kind not in ("integer", "number", "boolean"):
            is_json = False  # tags within tags
            self.warnings.append(f"no grammar can enforce {key} of {function.name}")
        if is_json:
            value = self._value(schema, function, key)
        elif choices:
            value = _one_of(choices)
        else:  # it holds also the line breaks around it
            before = f"{self.text(pair.opening)} {literal(key)} {self.text(middle.rstrip())}"
            value = f"rule_{len(self.lines)}"
            end = pair.closing_of(key)
            self.lines.append(f"{value}[suffix={literal(end.strip())}]: /(?s:.*)/")
            closing = self.text(end[len(end.rstrip()) :])
        return self._new(f"{before} {value} {closing}")

    def _value(self, schema: Mapping[str, Any], function: Function, key: str) -> str:
        named = ("$defs", "definitions")
        outer = {name: each for name, each in function.parameters.items() if name in named}
        schema = {**outer, **(schema or {"type": "string"})}
        return self._schema(schema, f"{function.name}: {key}", function.name)


def _one_of(choices: list[Any], quote: str = "") -> str:
    texts = (f"{quote}{n}{quote}" if isinstance(n, str) else json.dumps(n) for n in choices)
    return f"({' | '.join(map(literal, texts))})"


def _may_be_text(schema: Any) -> bool:
    """Return whether a text conforms to a schema, as far as that is said in place."""
    if not isinstance(schema, Mapping):
        return True
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list):
        return any(map(_may_be_text, options))
    return "string" in str(schema.get("type", "" if "$ref" in schema else "string"))


def calls_grammar(
    form: CallForm,
    functions: Sequence[Function],
    *,
    is_parallel: bool,
    must_call: bool = True,
    other: Grammar | None = None,
) -> tuple[Grammar, list[str]]:
    """Return a grammar for a call of one of `functions` in the model's form, for several if
    `is_parallel`, or else for text that conforms to the JSON schema `other`; and warnings that name
    what it cannot enforce of the parameters' schemas. Unless the model `must_call`, it holds from
    each call's mark on, in a text that is free. Raise `UsageError` if no arguments conform to a
    function's parameters.
    """
    rules = _Rules(form)
    calls = rules._new(" | ".join(map(rules.call, functions)))  # noqa: SLF001
    more = ""
    if is_parallel and form.between:
        more = f" ({rules.text(form.between)} {calls}){{0,{_MOST_CALLS - 1}}}"
    opening, mark = form.opening.lstrip(), form.trigger if other is None else ""
    closing = rules.text(form.closing.rstrip())
    if _CONTROL.fullmatch(form.closing) and not form.between:  # it may end the answer
        closing = f"({closing})?"
    if not must_call:
        opening = opening.removeprefix(mark)
    elif not is_parallel or form.between is None or form.goes_on_behind_closing:
        mark = ""
    lines = [
        f"start: calls{' | other' if other is not None else ''}",
        f"calls: {rules.text(opening)} {calls}{more} {closing}",
    ]
    if other is not None:
        lines.append(f"other: {in_lark(other)}")
    head = ""
    if mark and form.mark and not must_call and form.keys is not None and form.keys[0]:
        name = literal(form.keys[0])
        lead = 'WHITE? (("```json" | "```") WHITE?)? "{" WHITE?'
        lines.append(f'bare: {lead} {literal(name)} WHITE? ":" WHITE? bare_call WHITE? "}}"')
        lines.append(f"bare_call: {' | '.join(rules.bare)}")
        names = "|".join(re.escape(literal(function.name)) for function in functions)
        head = rf"\s*(?:```(?:json)?\s*)?\{{\s*{name}\s*:\s*(?:{names})"
    same = form.closing[: common_prefix_length(form.closing, form.between or "")]
    if is_parallel and re.search(rf"<[^<>\s]{{{_LOOKED_BACK},}}\Z", same):
        # A text forced up to the middle of a control token's name would exclude that token.
        lines.append('%llguidance {"no_forcing": true}')
    text = "\n".join([*lines, *rules.lines])
    return Grammar("lark", text, must_call, mark, not form.mark, head), rules.warnings


# --- reading --------------------------------------------------------------------------------------

#: The text that may come before a bare call, and the beginnings of that text.
_BARE = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?:```(?:json)?\s*)?(?=\{|\[\s*\{)")
_BARE_BEGUN = re.compile(
    r"\s*(?:<\|python_tag\|>\s*)?(?:`{0,2}|```(?:j|js|jso)|(?:```(?:json)?\s*)?(?:\[\s*)?)"
)
_PYTHON_TAG = "<|python_tag|>"
_FENCE = "```"
#: What some models write between two objects, whatever their template does.
_BETWEEN = " \n\t\r,;"
#: The beginning of an object that names a function.
_NAMED = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"]*)"')
#: The first mark of a closing text.
_FIRST_TAG = re.compile(r"\s*(?:\]<\]\S+?\[>\[)?<[^<>]*>")
#: The most characters of an object before the arguments.
_MOST_HEAD = 1000


class ToolCallParser:
    """Splits an answer into content and calls. `functions` are those that may be called.

    A call is reported when its arguments begin, and they as they come; what is broken in them is
    mended, since nothing that was reported can be taken back. An answer may also begin with a bare
    object, perhaps in a code fence: small models write calls so, whatever their template says. A
    call of an unknown function, or one that is broken before its arguments, is content, but may be
    held back until the end of the answer. The result does not depend on how the text is cut into
    pieces. White space around calls is left out. With `one_only`, everything after the first call
    is left out too, with `calls_only` what is no call.
    """

    def __init__(
        self,
        form: CallForm,
        functions: Sequence[Function],
        *,
        one_only: bool = False,
        calls_only: bool = False,
        is_beginning: bool = True,
    ) -> None:
        self._form = form
        self._schemas = {function.name: function.parameters for function in functions}
        self._one_only = one_only
        self._calls_only = calls_only
        #: The number of reported calls.
        self.n_calls = 0
        #: Text that is neither content nor a call yet.
        self._rest = ""
        self._is_beginning = is_beginning
        #: What reads the arguments of the open call, which are told, and then what is left of its
        #: object.
        self._readers: list[tuple[ArgumentsReader | PairsReader, bool]] = []
        #: Whether a call was the last that was read, and what may end it where it was bare.
        self._is_behind_call = False
        self._fence = ""
        #: What reads an object that may be a call as a whole, how much it has read, and the JSON of
        #: that.
        self._whole, self._n_whole, self._written = ArgumentsReader("json"), 0, ""

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of the answer; return what is certain now."""
        self._rest += text
        return self._read(is_last=False)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the rest, at the end of the answer. What there is of a call is left out if the
        answer `is_cut`: it is no content, and no client can use it.
        """
        return self._read(is_last=True, is_cut=is_cut)

    def _read(self, *, is_last: bool, is_cut: bool = False) -> list[Delta]:
        deltas, is_call = list[Delta](), True
        while is_call:
            deltas += self._arguments(is_last=is_last and not is_cut)
            if self._readers:
                self._rest = "" if is_cut else self._rest
                break
            more, is_call = self._to_call(is_last=is_last, is_cut=is_cut)
            deltas += [each for each in more if each.kind != "content" or not self._calls_only]
        return deltas

    def _to_call(self, *, is_last: bool, is_cut: bool) -> tuple[list[Delta], bool]:
        """Read up to the arguments of the next call. Return what is certain, and whether there is
        one.
        """
        content = ""
        #: Where in the content a call begins that has no end.
        begun: int | None = None
        while True:
            if self._one_only and self.n_calls:
                self._rest = ""
            begin = self._behind_call(is_last=is_last) if self._is_behind_call else None
            if begin == UNCLEAR:
                break
            start = 0
            if begin is None:
                start, begin = self._call_begins()
            if start < 0:
                n_told = len(self._rest) if is_last else self._n_certain()
                content += self._rest[:n_told]
                self._rest = self._rest[n_told:]
                break
            content += self._rest[:start]
            self._rest, begin = self._rest[start:], begin - start
            if not self._is_behind_call:
                self._fence = "\n" + _FENCE if self._rest.lstrip().startswith(_FENCE) else ""
            end, calls = self._calls(begin, is_last=is_last and not is_cut)
            if end == UNCLEAR and not is_last:
                break
            self._whole, self._n_whole, self._written = ArgumentsReader("json"), 0, ""
            self._is_beginning, was_behind_call = False, self._is_behind_call
            self._is_behind_call = bool(calls)
            if calls:
                self._rest = self._rest[end:]
                calls = calls[:1] if self._one_only else calls
                return _content(content) + [
                    each for call in calls for each in self._deltas(*call)
                ], True
            is_begun = was_behind_call or self._is_call_begun(begin)
            if end == UNCLEAR and begun is None and is_begun:
                begun = len(content)
            # Not all of it: behind a broken call there may be another one.
            n_text = max(1, min(begin, len(self._form.mark) or 1))
            content += self._rest[:n_text]
            self._rest = self._rest[n_text:]
        if is_cut:
            content = self._without_call(content, begun)
        if is_last and self.n_calls:
            content = content.rstrip().removesuffix(self._form.mark).rstrip()
        return _content(content), False

    def _is_call_begun(self, begin: int) -> bool:
        if self._form.mark and self._form.mark in self._rest[:begin]:
            return True
        named = _NAMED.match(self._rest, begin)
        return named is not None and named[1] in self._schemas

    def _without_call(self, content: str, begun: int | None) -> str:
        """Return the content of an answer that was cut, without what there is of a call at its end."""
        content = content[:begun]
        return (
            content[: len(content) - partial_match_length(content, self._form.mark)]
            if self.n_calls
            else content
        )

    def _behind_call(self, *, is_last: bool) -> int | None:
        """Skip the text that ends a call. Return where the next one begins if it follows at once
        (its name, or its object); `UNCLEAR` if only more text can show that, None if something else
        follows.
        """
        if self._form.keys is not None:
            n_between = len(self._rest) - len(self._rest.lstrip(_BETWEEN))
            if self._rest.startswith("{", n_between):
                return n_between
            if n_between == len(self._rest) and not is_last:
                return UNCLEAR
        between, closing = self._form.ends
        closing = self._fence or closing
        if match(closing, self._rest, 0) is None:  # its last marks may be missing
            first = _FIRST_TAG.match(closing)
            closing = first[0] if first is not None else ""
        found = [
            match(literal, self._rest, 0) if literal else None for literal in (between, closing)
        ]
        if UNCLEAR in found and not is_last:
            return UNCLEAR
        place, end = (-1 if each is None else each for each in found)
        is_closed = end >= 0 and is_last and not self._rest[place:].strip()
        if place >= max(0, end) and not is_closed:
            return place
        self._is_behind_call = False
        if found[1] == UNCLEAR:
            self._rest = ""
        elif found[1] is not None:
            self._rest = self._rest[found[1] :]
        return None

    def _call_begins(self) -> tuple[int, int]:
        """Return where the next call begins in the rest, white space before it included, and where
        its JSON or its mark begins; -1, -1 if there is no call.
        """
        bare = _BARE.match(self._rest) if self._is_beginning else None
        if bare is not None:
            return 0, bare.end()
        marks = [mark for mark in (self._form.mark, self._form.inner) if mark]
        places = [place for mark in marks if (place := self._rest.find(mark)) >= 0]
        if not places:
            return -1, -1
        place = min(places)
        n_mark = len(marks[0]) if self._rest.startswith(marks[0], place) else 0
        return len(self._rest[:place].rstrip()), place + n_mark

    def _calls(self, begin: int, *, is_last: bool) -> tuple[int, list[tuple[str, str | None]]]:
        """Return the end of the calls that begin here, and their names and arguments. The end is
        `UNCLEAR` if the text may go on so.
        """
        text, form = self._rest, self._form
        if form.keys is not None and not self._is_behind_call:
            lead = form.opening[: form.opening.find("{")].strip()
            found_lead = match(lead, text, len(text[:begin].rstrip()) - len(form.mark))
            if found_lead == UNCLEAR:
                return UNCLEAR, []
            begin = found_lead or begin
        start = begin + len(text[begin:]) - len(text[begin:].lstrip())
        if start == len(text):
            return UNCLEAR, []
        if text[start] in "{[" and (
            form.keys is not None or not text[:begin].strip() or _FENCE in text[:begin]
        ):
            return self._objects(start)
        place: int | None = start
        if not self._is_behind_call:
            is_marked = text[:begin].rstrip().endswith(form.mark)
            n_mark = len(form.mark) if is_marked else 0
            opening = form.opening if is_marked else form.inner
            place = match(opening, text, len(text[:begin].rstrip()) - n_mark)
        found: tuple[int, str] | int | None = place
        if place is not None and place != UNCLEAR:
            found = read_name(form, text, place, self._schemas, is_last=is_last)
        if not isinstance(found, tuple):
            return (UNCLEAR, []) if found == UNCLEAR else (start, [])
        self._readers = [(reader_of(form, self._schemas[found[1]]), True)]
        return found[0], [(found[1], None)]

    def _objects(self, begin: int) -> tuple[int, list[tuple[str, str | None]]]:
        """Read an object of JSON that is a call, up to its arguments, or a whole one, or a list of
        them.
        """
        is_listed = self._form.keys is not None and "[" in self._form.opening
        if self._rest[begin] == "[" and is_listed:  # one after the other
            begin += 1 + len(self._rest[begin + 1 :]) - len(self._rest[begin + 1 :].lstrip())
            if begin == len(self._rest):
                return UNCLEAR, []
            if self._rest[begin] != "{":
                return begin, []
        found = None
        if self._n_whole < _MOST_HEAD:
            head = _object_head(self._form.keys)
            found = head.match(self._rest, begin, begin + _MOST_HEAD)
        if found is not None and found[1] in self._schemas:
            closing = self._fence or self._form.ends[1]
            rest = ArgumentsReader("json", closing, is_open=True)
            self._readers = [(ArgumentsReader("json", closing), True), (rest, False)]
            return found.end(), [(found[1], None)]
        n, written, is_over = self._whole.read(self._rest[begin + self._n_whole :])
        self._n_whole, self._written = self._n_whole + n, self._written + written
        if not is_over:
            return UNCLEAR, []
        value = json.loads(self._written or "null")
        calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        whole = [call for call in calls if call is not None]
        return begin + self._n_whole, [*whole] if len(whole) == len(calls) else []

    def _call(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, dict):
            return None
        keys = self._form.keys or ("name", "arguments")
        if keys == ("", "") and len(value) == 1:
            value = dict(zip(("name", "arguments"), *value.items(), strict=True))
        name = value.get(keys[0], value.get("name"))
        arguments = value.get(keys[1], value.get("arguments", value.get("parameters")))
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):  # a text of JSON
            _, written, _ = ArgumentsReader("json").read(arguments, is_last=True)
            arguments = json.loads(written)
        if not isinstance(name, str) or name not in self._schemas:
            return None
        is_object = isinstance(arguments, dict)
        return (name, json.dumps(arguments, ensure_ascii=False)) if is_object else None

    def _arguments(self, *, is_last: bool) -> list[Delta]:
        """Read on in the open call, if there is one."""
        deltas: list[Delta] = []
        while self._readers:
            reader, is_told = self._readers[0]
            n, text, is_over = reader.read(self._rest, is_last=is_last)
            self._rest = self._rest[n:]
            if is_told and (text or is_over):
                number = self.n_calls - 1
                deltas.append(Delta("arguments", text, number=number, is_end=is_over))
            if not is_over:
                break
            del self._readers[0]
        return deltas

    def _n_certain(self) -> int:
        """Return how many characters of the rest are content, whatever follows."""
        if self._is_beginning and (
            _BARE_BEGUN.fullmatch(self._rest) or _PYTHON_TAG.startswith(self._rest.strip())
        ):
            return 0
        text = self._rest
        n_held = max(
            partial_match_length(text, mark) for mark in (self._form.mark, self._form.inner)
        )
        n_certain = len(text[: len(text) - n_held].rstrip())
        self._is_beginning = self._is_beginning and n_certain == 0
        return n_certain

    def _deltas(self, name: str, arguments: str | None) -> list[Delta]:
        """Begin a call; it is whole if there are arguments."""
        number, self.n_calls = self.n_calls, self.n_calls + 1
        begun = Delta("call", "", name, f"call_{uuid.uuid4().hex[:24]}", number)
        whole = Delta("arguments", arguments or "", number=number, is_end=True)
        return [begun] if arguments is None else [begun, whole]


@functools.lru_cache(maxsize=16)
def _object_head(keys: tuple[str, str] | None) -> re.Pattern[str]:
    """Return a pattern for an object that is a call with these keys, from its beginning up to its
    arguments.
    """
    if keys == ("", ""):
        return re.compile(r'\{\s*"([^"\\]+)"\s*:\s*(?=\{)')
    name, arguments = map(re.escape, keys or ("name", "arguments"))
    text = r'"(?:[^"\\]|\\.)*"'
    others = rf"(?:{text}\s*:\s*(?:{text}|[-+.\w]+)\s*,\s*)*?"
    return re.compile(
        rf'\{{\s*{others}"(?:{name}|name)"\s*:\s*"([^"\\]+)"\s*,\s*'
        rf'{others}"(?:{arguments}|arguments|parameters)"\s*:\s*(?=\{{)'
    )


def _content(text: str) -> list[Delta]:
    return [Delta("content", text)] if text else []
