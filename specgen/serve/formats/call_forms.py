"""The forms in which models write calls of tools, each found by rendering the model's own chat template.

A template that is given a call writes it as the model was trained to. So a call of a function that nobody has is
rendered, with arguments of each type; what stands before, between and behind its name and its arguments is the form,
if a reader gives the call back exactly from it. A family of tomorrow works, or is said to have no known form.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from specgen.errors import PromptError
from specgen.serve.formats.call_values import (
    Arguments,
    gemma_value,
    python_arguments,
    raw_json,
    typed,
)
from specgen.session.prompts.template import Message, ToolCall, render
from specgen.text.prefix import n_common

#: Stands in a form for what differs from call to call: an id, or the number of the call.
ANY: Final = "\ufffc"
#: A text ends before it is clear whether it has the form.
UNCLEAR: Final = -1
_MARKED_ID = re.compile(rf"\[[A-Z_]+\]{ANY}")
_ANY_TEXT = re.compile(r"[\w.\-]*")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"[^\s<>\"'=:,(){}]+")
_MARK = re.compile(r"\[[A-Z_]+\]|<[^<>\s]*>|<[^<>\s]+|[^\s{\[]+")
#: Names of control tokens.
_CONTROL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Pair:
    """How one argument is written: `opening`, key, `middles` by the type of its value, value, `closing`."""

    opening: str
    middles: Mapping[str, str]
    closing: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """`opening`, name, `after_name`, arguments, `closing`; with `between` in place of `closing` and `opening` before
    another call, or None if the template takes one call only."""

    opening: str
    after_name: str
    closing: str
    between: str | None = None
    #: Arguments are an object of JSON, pairs of key and value, Python's arguments, or Gemma's object.
    style: Literal["json", "pairs", "python", "gemma"] = "json"
    pair: Pair | None = None
    #: A call is an object of JSON with these keys for the name and the arguments; an empty one: the name is the key.
    keys: tuple[str, str] | None = None

    @property
    def mark(self) -> str:
        """What shows that a call begins; empty if a call is a bare object."""
        found = _MARK.match(self.opening.strip())
        return found[0] if found is not None else ""

    @property
    def trigger(self) -> str:
        """What only calls begin with: the mark, or all of the opening if other texts may have the mark too."""
        own = re.search(r"(?i)(?:tool|call|func|action).*[>\]=]$", self.mark)
        return self.mark if own else self.opening.strip().partition(ANY)[0]

    @property
    def ends(self) -> tuple[str, str]:
        """What stands between two calls up to the next one's name, and behind the last one; of objects of JSON, what
        stands between the objects."""
        between, closing = self.between or "", self.closing
        if self.keys is not None:
            between, closing = between.partition("}")[2], closing.partition("}")[2]
            between = between[: between.rfind("{")] if "{" in between else ""
        return between, closing

    @property
    def controls(self) -> tuple[str, ...]:
        """Texts that may be control tokens; they are found only if the text shows control tokens."""
        texts = [self.opening, self.after_name, self.closing, self.between or "", '<|"|>']
        if self.pair is not None:
            texts += [self.pair.opening, *self.pair.middles.values(), self.pair.closing]
        if not self.mark:
            texts.append("<|python_tag|>")  # Llama's own mark, which its template does not write
        return tuple(dict.fromkeys(name for text in texts for name in _CONTROL.findall(text)))


# --- reading ------------------------------------------------------------------------------------


def match(literal: str, text: str, start: int) -> int | None:
    """Return where a literal ends that a text has at `start`, with any white space where the literal has some, or
    a tag or a closing bracket begins; `UNCLEAR` if the text ends before that, None if it is not there."""
    for part in _parts(literal):
        if part.isspace() or part[0] in "<]}":
            start = _skip(text, start)
        if part == ANY:
            start += len(_ANY_TEXT.match(text, start)[0])  # type: ignore[index]
        elif text.startswith(part, start):
            start += len(part)
        elif not part.isspace():
            return UNCLEAR if part.startswith(text[start:]) else None
    return start


@functools.lru_cache(maxsize=256)
def _parts(literal: str) -> list[str]:
    return re.findall(rf"\s+|{ANY}|<?[^\s{ANY}<]+|<", literal)


def _skip(text: str, start: int) -> int:
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def read_call(
    form: CallForm,
    text: str,
    start: int,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    is_last: bool = False,
) -> tuple[int, str, Arguments] | int | None:
    """Read a call, from its name on. `functions` are the schemas of the arguments by the functions' names.

    Return where its arguments end, the name, and the arguments; `UNCLEAR` if the text ends before, None if no call of
    one of the functions begins there."""
    names = [name for name in functions if name.startswith(text[start : start + len(name)])]
    whole = [name for name in names if text.startswith(name, start)]
    if not whole or (not is_last and len(text) - start < max(map(len, names))):
        return UNCLEAR if names else None
    name = max(whole, key=len)
    # Some models leave out the id that their template writes.
    places = [
        match(after, text, start + len(name))
        for after in (form.after_name, _MARKED_ID.sub("", form.after_name))
    ]
    begin = next((each for each in places if each is not None), None)
    if begin is None or begin == UNCLEAR:
        return begin
    found = _arguments(form, text, begin, functions[name], is_last=is_last)
    return (found[0], name, found[1]) if isinstance(found, tuple) else found


def _arguments(
    form: CallForm, text: str, start: int, schema: Mapping[str, Any], *, is_last: bool
) -> tuple[int, Arguments] | int | None:
    if form.style == "pairs":
        return _read_pairs(form, text, start, schema, is_last=is_last)
    start = _skip(text, start)
    if start >= len(text):
        return UNCLEAR
    try:
        if form.style == "gemma":
            end, value = gemma_value(text, start)
        elif form.style == "python":
            end, value = python_arguments(text, start)
        else:
            value, end = raw_json(text, start)
    except IndexError:
        return UNCLEAR
    except (ValueError, RecursionError, SyntaxError):
        return UNCLEAR if text[start] in "{(" else None
    return (end, value) if isinstance(value, dict) else None


def _read_pairs(
    form: CallForm, text: str, start: int, schema: Mapping[str, Any], *, is_last: bool
) -> tuple[int, Arguments] | int | None:
    assert form.pair is not None
    pair, found, place = form.pair, dict[str, Any](), start
    while True:
        ends = [match(literal, text, place) for literal in _endings(form)]
        if any(end is not None and end != UNCLEAR for end in ends):
            return place, found
        begin = match(pair.opening, text, place)
        if begin is None or begin == UNCLEAR:
            if UNCLEAR not in (begin, *ends):
                return None
            if is_last:  # the closing mark may be missing
                return (place, found) if found else None
            return UNCLEAR
        key = _KEY.match(text, begin)
        if key is None:
            return UNCLEAR if begin == len(text) else None
        middles = [match(middle.rstrip(), text, key.end()) for middle in set(pair.middles.values())]
        after = max((end for end in middles if end is not None), default=None)
        if after is None or after == UNCLEAR:
            return after
        value = _value_end(form, text, after, is_last=is_last)
        if value is None:
            return UNCLEAR
        place, raw = value
        if any(middle.endswith("\n") for middle in pair.middles.values()):
            raw = raw.removeprefix("\n").removesuffix("\n")
        kind = schema.get("properties", {}).get(key[0], {})
        found[key[0]] = typed(raw, kind if isinstance(kind, Mapping) else {})


def _endings(form: CallForm) -> list[str]:
    return [literal for literal in (form.between, form.closing) if literal]


def _value_end(form: CallForm, text: str, start: int, *, is_last: bool) -> tuple[int, str] | None:
    """Return where an argument ends, and its text: where its closing mark is followed by what may follow it."""
    assert form.pair is not None
    closing, place = form.pair.closing.strip(), start
    while (place := text.find(closing, place)) >= 0:
        end = place + len(closing)
        following = [match(each, text, end) for each in (form.pair.opening, *_endings(form))]
        if any(each is not None and each != UNCLEAR for each in following) or is_last:
            return end, text[start:place]
        if UNCLEAR in following:
            return None
        place = end
    return None


# --- finding ------------------------------------------------------------------------------------

_NAME, _OTHER = "probe_tool_qz", "second_tool_qz"
_IDS = ("qzid00001", "qzid00002")
_TYPES = {
    "text": "string",
    "number": "integer",
    "flag": "boolean",
    "items": "array",
    "fields": "object",
}
_PLAIN: Arguments = {
    "text": "plain qz",
    "number": 42,
    "flag": True,
    "items": ["a", "b"],
    "fields": {"k": 1},
}
#: The awkward text, and one for templates that write texts without escapes.
_PROBES = tuple(
    {**_PLAIN, "text": text} for text in ("q\"<&\\\n'z {} </x>", 'a "quoted" <b> & {c}', "plain qz")
)
_SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in _TYPES.items()}}
_CONTENT = "@@plain@@"
_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
#: Marks of an empty thought before calls, and of the end of a turn or the beginning of a result behind them.
_AROUND = re.compile(
    r"\A(?:\s*<[^<>]*think[^<>]*>)+|\s*(?:<\|calls?\|>|<[^<>]*(?:eo[mst]|im_end|response)[^<>]*>)\s*\Z",
    re.IGNORECASE,
)
_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "A tool.", "parameters": _SCHEMA},
    }
    for name in (_NAME, _OTHER)
]
#: Forms of templates that offer tools and write no call of their own, by a token that the calls begin with.
_BY_TOKEN = {
    "<|tool_call_start|>": CallForm(
        "<|tool_call_start|>[", "", "]<|tool_call_end|>", ", ", style="python"
    ),
    "<|tool_call|>": CallForm(
        '<|tool_call|>[{"name": "',
        '", "arguments": ',
        "}]",
        '}, {"name": "',
        keys=("name", "arguments"),
    ),
}
#: gpt-oss writes the channel before the name of the function, and its template behind it.
_HARMONY = CallForm(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"
)


def form_of(
    template: str, has_token: Callable[[str], bool] = lambda _name: False
) -> CallForm | None:
    """Return the form of a template's calls; None if the template takes no tools, or writes calls in a form that
    specgen cannot read. `has_token` says whether the model has a control token of this name."""
    if not re.search(r"\btools\b", template):
        return None
    if "<|channel|>" in template and "functions." in template:
        return _HARMONY
    found = _found(template)
    if found is None:
        found = next((form for token, form in _BY_TOKEN.items() if has_token(token)), None)
    return found


@functools.lru_cache(maxsize=32)
def _found(template: str) -> CallForm | None:
    for probe in _PROBES:
        try:
            written = _written(template, [(_NAME, probe)])
            two = _written(template, [(_NAME, probe), (_OTHER, {})])
        except PromptError:
            two = None
            try:
                written = _written(template, [(_NAME, probe)])
            except PromptError:
                continue
        for form in _forms(written, two, probe):
            if _gives_back(form, written, two, probe):
                return form
    return None


def _written(template: str, calls: list[tuple[str, Arguments]]) -> str:
    """Return what the template writes for an answer with calls, without what it writes around any answer."""
    given = [
        ToolCall(identity, name, arguments)
        for identity, (name, arguments) in zip(_IDS, calls, strict=False)
    ]
    user, plain, more = (
        Message("user", "hello"),
        Message("assistant", _CONTENT),
        Message("user", "x"),
    )
    called = Message("assistant", "", tool_calls=tuple(given))
    results = [
        Message("tool", "result", tool_call_id=each.identity, name=each.name) for each in given
    ]
    # Some write calls that have results only, and some want an answer behind the results.
    for with_calls, without in (
        ([called], [plain]),
        ([called, *results, plain, more], [plain, more]),
    ):
        try:
            called_text = _render(template, [user, *with_calls])
            plain_text = _render(template, [user, *without])
        except PromptError:
            if len(without) > 1:
                raise
            continue
        start = _whole_tags(called_text[: n_common(called_text, plain_text)])
        if called_text.find(_NAME, start) < 0:
            continue
        n_same = n_common(called_text[start:][::-1], plain_text[start:][::-1])
        end = len(called_text) - n_same
        if _is_open(called_text[start:end]):
            end = called_text.find(">", end) + 1
        behind = _TAG.search(plain_text[plain_text.find(_CONTENT) + len(_CONTENT) :])
        if len(without) > 1 and behind is not None:
            end = (
                called_text.find(behind[0], start, end)
                if behind[0] in called_text[start:end]
                else end
            )
        return _AROUND.sub("", called_text[start:end])
    return ""


def _is_open(text: str) -> bool:
    """Return whether a text ends inside of a tag."""
    return text.rfind("<") > text.rfind(">")


def _whole_tags(text: str) -> int:
    """Return the length of a text without a tag that it ends in."""
    return text.rfind("<") if _is_open(text) else len(text)


def _render(template: str, messages: list[Message]) -> str:
    now = datetime.datetime(2026, 1, 1)
    return render(template, messages, bos_token="", eos_token="", now=now, tools=_TOOLS)


def _forms(written: str, two: str | None, probe: Arguments) -> Iterator[CallForm]:
    """Yield what the form may be, by what the template writes for one call and for two."""
    place = written.find(_NAME)
    if place < 0:
        return
    after = written[place + len(_NAME) :]
    for begin in (found.start() for found in re.finditer(r"[{(]", after)):
        for style, read in _STYLES.items():
            try:
                end, value = read(after, begin)
            except (ValueError, IndexError, RecursionError, SyntaxError):
                continue
            if value != probe:
                continue
            form = CallForm(written[:place], after[:begin], after[end:], style=style)
            form = replace(form, keys=_keys(written, place))
            yield _with_two(form, two)
    yield from _forms_of_pairs(written, place, two, probe)


_STYLES: dict[Any, Callable[[str, int], tuple[int, Any]]] = {
    "json": lambda text, start: _DECODER.raw_decode(text, start)[::-1],
    "gemma": gemma_value,
    "python": python_arguments,
}


def _keys(written: str, place: int) -> tuple[str, str] | None:
    """Return the keys of the object of JSON that is the call, if it is one."""
    for begin in (found.start() for found in re.finditer(r"\{", written[:place])):
        try:
            value, _ = _DECODER.raw_decode(written, begin)
        except ValueError:
            continue
        if list(value) == [_NAME]:
            return "", ""
        name = next((key for key, each in value.items() if each == _NAME), None)
        arguments = next((key for key, each in value.items() if isinstance(each, dict)), None)
        if name is not None and arguments is not None:
            return name, arguments
    return None


def _forms_of_pairs(
    written: str, place: int, two: str | None, probe: Arguments
) -> Iterator[CallForm]:
    """Find what stands between the keys and the values of arguments that are written one by one."""
    after, keys = written[place + len(_NAME) :], list(probe)
    starts, at = [], 0
    for key in keys:
        at = after.find(key, at)
        if at < 0:
            return
        starts.append(at)
        at += len(key)
    if (value := after.find(str(probe["text"]), starts[0])) < 0:
        return
    behind_text = value + len(str(probe["text"]))
    between = after[behind_text : starts[1]]  # the end of a value, and the beginning of a key
    number = after.find("42", starts[1])
    cut = max(between.rfind("<"), 0)
    # Tags that end a value come before the tag that begins a key.
    while cut > 0 and after[: starts[0]].endswith(between[cut:]) is False:
        cut -= 1
    while (
        cut > 0 and after[: starts[0]].endswith(between[cut - 1 :]) and between[cut - 1].isspace()
    ):
        cut -= 1
    closing, opening = between[:cut], between[cut:]
    if not opening or number < 0 or not closing.strip():
        return
    starts_of_values = {"text": value, "number": number}
    middles = {}
    for key, start in zip(keys, starts, strict=True):
        begin = start + len(key)
        end = starts_of_values.get(key, after.find(closing.strip(), begin))
        middles[_TYPES[key]] = after[begin:end]
    text_middle = middles["string"]
    for key in ("flag", "items", "fields"):  # their values may be written in several ways
        kind = _TYPES[key]
        shape = re.escape(text_middle).replace("true", "(?:true|false)").replace("string", r"\w+")
        found = re.match(shape, middles[kind])
        middles[kind] = found[0] if found else text_middle
    last = after.rfind(closing.strip()) + len(closing.strip())
    after_name = after[: starts[0] - len(opening)]
    pair = Pair(opening, middles, closing)
    form = CallForm(written[:place], after_name, after[last:], style="pairs", pair=pair)
    yield _with_two(form, two)


def _with_two(form: CallForm, two: str | None) -> CallForm:
    """Return a form with what stands between two calls, and `ANY` for what differs from call to call."""
    any_id = functools.partial(re.compile("|".join(_IDS)).sub, ANY)
    form = replace(
        form,
        opening=any_id(form.opening),
        after_name=any_id(form.after_name),
        closing=any_id(form.closing),
    )
    if two is None or (other := two.find(_OTHER)) < 0:
        return form
    numbers = functools.partial(re.compile(r'(?<=[:"])\d(?=[<"])').sub, ANY)
    form = replace(
        form,
        opening=numbers(form.opening),
        after_name=numbers(form.after_name),
        closing=numbers(form.closing),
    )
    functions = {_NAME: _SCHEMA, _OTHER: _SCHEMA}
    begin, found = match(form.opening, two, 0), None
    if begin is not None and begin != UNCLEAR:
        found = read_call(form, two, begin, functions, is_last=True)
    if not isinstance(found, tuple):
        # What ends one call of pairs shows only with what is between two.
        if form.pair is None or (place := two.rfind(form.pair.closing.strip(), 0, other)) < 0:
            return form
        place += len(form.pair.closing.strip())
        return replace(form, between=numbers(any_id(two[place:other])))
    return replace(form, between=numbers(any_id(two[found[0] : other])))


def _gives_back(form: CallForm, written: str, two: str | None, probe: Arguments) -> bool:
    """Return whether a reader gives the calls back from what the template wrote."""
    functions = {_NAME: _SCHEMA, _OTHER: _SCHEMA}

    def read(text: str) -> Iterator[tuple[str, Arguments]]:
        place, literal = 0, form.opening
        while True:
            begin = match(literal, text, place)
            if begin is None or begin == UNCLEAR:
                break
            found = read_call(form, text, begin, functions)
            if not isinstance(found, tuple):
                return
            place, literal = found[0], form.between or form.closing
            yield found[1:]
        if match(form.closing, text, place) is None:
            yield "", {}

    wanted = [(_NAME, probe)]
    is_read = list(read(written)) == wanted
    if two is None or form.between is None:
        return is_read
    return is_read and list(read(two)) == [*wanted, (_OTHER, {})]
