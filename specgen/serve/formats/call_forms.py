"""The forms in which models write calls of tools, each found by rendering the model's own chat
template.

A template that is given a call writes it as the model was trained to. So a call of a function that
nobody has is rendered, with arguments of each type; what stands before, between and behind its name
and its arguments is the form, if a reader gives the call back exactly from it. So a new family of
models needs no code if `_forms` can find its form.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from specgen.errors import PromptError
from specgen.serve.formats.call_values import Arguments, ArgumentsReader, Style, typed_json
from specgen.session.prompts.template import Message, ToolCall, render
from specgen.session.prompts.thoughts import FAMILIES, without_marks
from specgen.text.grammar.free_text import ANY
from specgen.text.overlap import common_prefix_length, partial_match_length

#: A text ends before it is clear whether it has the form.
UNCLEAR: Final = -1
_MARKED_ID = re.compile(rf"\[[A-Z_]+\]{ANY}")
_ANY_TEXT = re.compile(r"[\w.\-]*")
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"(?!/)[^\s<>\"'=:,(){}]+")
_MARK = re.compile(r"\]<\]\S+?\[>\[<[^<>\s]*>|\[[A-Z_]+\]|<[^<>\s]*>|<[^<>\s]+|[^\s{\[]+")
#: Names of control tokens.
_CONTROL = re.compile(r"\]<\][^<>\s]+\[>\[|<[^<>\s]+>|\[/?[A-Z_]+\]")
_DECODER = json.JSONDecoder()
_CDATA = "<![CDATA["


@dataclass(frozen=True, slots=True)
class Pair:
    """How one argument is written: `opening`, key, `middles` by the type of its value, value,
    `closing`. If that has `ANY` for the key, lists and objects are tags within tags.
    """

    opening: str
    middles: Mapping[str, str]
    closing: str

    def closing_of(self, key: str) -> str:
        return self.closing.replace(ANY, key)

    @property
    def nests(self) -> str:
        """What tags within tags begin with; empty if values are JSON."""
        return self.opening.lstrip() if ANY in self.closing else ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """`opening`, name, `after_name`, arguments, `closing`; with `between` in place of `closing` and
    `opening` before another call, or None if the template takes one call only.
    """

    opening: str
    after_name: str
    closing: str
    between: str | None = None
    #: Arguments are an object of JSON, pairs of key and value, Python's arguments, or Gemma's
    #: object.
    style: Style | Literal["pairs"] = "json"
    pair: Pair | None = None
    #: What begins and ends a text in Gemma's object.
    quote: str = '<|"|>'
    #: What else may stand behind a name.
    others: tuple[str, ...] = ()
    #: A call is an object of JSON with these keys for the name and the arguments; an empty one: the
    #: name is the key.
    keys: tuple[str, str] | None = None

    @property
    def mark(self) -> str:
        """What shows that a call begins; empty if a call is a bare object."""
        found = _MARK.match(self.opening.strip())
        return found[0] if found is not None else ""

    @property
    def inner(self) -> str:
        """What a call begins with if the model leaves out the first mark; empty if nothing shows it
        then.
        """
        rest = self.opening.strip()[len(self.mark) :].lstrip()
        return rest if rest.startswith(("<", "]<]")) else ""

    @property
    def trigger(self) -> str:
        """What only calls begin with: the mark, or all of the opening if other texts may have the
        mark too.
        """
        own = re.search(r"(?i)(?:tool|call|func|action).*[>\]=]$", self.mark)
        return self.mark if own else self.opening.strip().partition(ANY)[0]

    @property
    def goes_on_behind_closing(self) -> bool:
        """Whether another call may follow the closing text without a mark of its own."""
        between = self.between or ""
        return between.startswith(self.closing.rstrip()) and self.mark not in between

    @property
    def after_names(self) -> tuple[str, ...]:
        """What may stand behind a name: some models leave out the id that their template writes."""
        without_id = _MARKED_ID.sub("", self.after_name)
        return tuple(dict.fromkeys((self.after_name, without_id, *self.others)))

    @property
    def ends(self) -> tuple[str, str]:
        """What stands between two calls up to the next one's name, and behind the last one; of
        objects of JSON, what stands between the objects.
        """
        between = "" if self.between is None else self.between or " "
        closing = self.closing.rstrip()
        if self.keys is not None:
            between, closing = between.partition("}")[2], closing.partition("}")[2]
            between = (between[: between.rfind("{")] or " ") if "{" in between else ""
        return between, closing

    @property
    def controls(self) -> tuple[str, ...]:
        """Texts that may be control tokens; they are found only if the text shows control tokens."""
        texts = [self.opening, self.after_name, self.closing, self.between or "", self.quote]
        if self.pair is not None:
            texts += [self.pair.opening, *self.pair.middles.values(), self.pair.closing]
        if not self.mark:
            texts.append("<|python_tag|>")  # Llama's own mark, which its template does not write
        return tuple(dict.fromkeys(name for text in texts for name in _CONTROL.findall(text)))


# --- reading ------------------------------------------------------------------------------------


def match(literal: str, text: str, start: int) -> int | None:
    """Return where a literal ends that a text has at `start`, with any white space where the
    literal has some, or a tag or a closing bracket begins; `UNCLEAR` if the text ends before that,
    None if it is not there.
    """
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


def read_name(
    form: CallForm, text: str, start: int, names: Iterable[str], *, is_last: bool = False
) -> tuple[int, str] | int | None:
    """Return where the arguments of a call begin whose name begins at `start`, and the name, one of
    `names`; `UNCLEAR` if the text ends before, None if no such call begins there.
    """
    names = [name for name in names if name.startswith(text[start : start + len(name)])]
    whole = [name for name in names if text.startswith(name, start)]
    if not whole or (not is_last and len(text) - start < max(map(len, names))):
        return UNCLEAR if names else None
    name = max(whole, key=len)
    places = [match(after, text, start + len(name)) for after in form.after_names]
    begin = next((each for each in places if each is not None), None)
    if begin is None or begin == UNCLEAR:
        return begin
    if form.pair is None:
        begin = _skip(text, begin)
        begins = [match("(" if form.style == "python" else "{", text, begin)]
    else:
        begins = [match(literal, text, begin) for literal in (form.pair.opening, *_endings(form))]
    if any(each is not None and each != UNCLEAR for each in begins):
        return begin, name
    return UNCLEAR if UNCLEAR in begins else None


def reader_of(form: CallForm, schema: Mapping[str, Any]) -> ArgumentsReader | PairsReader:
    """Return a reader for the arguments of a function with this schema."""
    if form.style == "pairs":
        return PairsReader(form, schema)
    return ArgumentsReader(form.style, form.ends[1])


def read_call(
    form: CallForm,
    text: str,
    start: int,
    functions: Mapping[str, Mapping[str, Any]],
    *,
    is_last: bool = False,
) -> tuple[int, str, Arguments] | int | None:
    """Read a call as `read_name`; return also its arguments, and where they end."""
    found = read_name(form, text, start, functions, is_last=is_last)
    if not isinstance(found, tuple):
        return found
    begin, name = found
    n, written, is_over = reader_of(form, functions[name]).read(text[begin:], is_last=is_last)
    return (begin + n, name, json.loads(written)) if is_over else UNCLEAR


class PairsReader:
    """Reads arguments that are written as pairs of key and value, as an `ArgumentsReader` does: a
    text piece by piece, another value when it is complete.
    """

    def __init__(self, form: CallForm, schema: Mapping[str, Any]) -> None:
        assert form.pair is not None
        self._pair, self._ends = form.pair, _endings(form)
        self._properties = schema.get("properties", {})
        #: Lines of their own hold the values.
        self._has_lines = any(middle.endswith("\n") for middle in form.pair.middles.values())
        self._before, self._is_text, self._closing = "{", False, ""

    def read(self, text: str, *, is_last: bool = False) -> tuple[int, str, bool]:
        place, written, is_over = 0, "", False
        while not is_over:
            if self._is_text:
                place, piece, is_end = self._value(text, place, is_last)
                written += json.dumps(piece, ensure_ascii=False)[1:-1]
                if not is_end:
                    break
                written, self._is_text = written + '"', False
            found = self._pair_at(text, place, is_last)
            if found == UNCLEAR:
                break
            is_over = found is None
            if isinstance(found, tuple):
                place, written = found[0], written + found[1]
        if is_over or is_last:
            written += ('"' if self._is_text else "") + self._before.strip(", ") + "}"
        return place, written, is_over or is_last

    def _pair_at(self, text: str, place: int, is_last: bool) -> tuple[int, str] | int | None:
        """Read a pair, or up to its value if that is a text. Return its end, and what it adds; None
        if there is none.
        """
        begins = [match(literal, text, place) for literal in (*self._ends, self._pair.opening)]
        begin = begins.pop()
        if any(end is not None and end != UNCLEAR for end in begins):
            return None
        if begin is None or begin == UNCLEAR:
            return UNCLEAR if UNCLEAR in (begin, *begins) and not is_last else None
        if (key := _KEY.match(text, begin)) is None:
            return UNCLEAR if begin == len(text) else None
        middles = {middle.rstrip() for middle in self._pair.middles.values()}
        after = max(match(middle, text, key.end()) or UNCLEAR - 1 for middle in middles)
        if after < 0:
            return UNCLEAR if after == UNCLEAR else None
        if self._has_lines and text.startswith("\n", after):
            after += 1
        self._closing = self._pair.closing_of(key[0]).strip()
        n_begun_value = len(text) - after
        if n_begun_value < len(_CDATA) and _CDATA.startswith(text[after:]) and not is_last:
            return UNCLEAR
        schema = self._properties.get(key[0], {})
        schema = schema if isinstance(schema, Mapping) else {}
        written = f"{self._before}{json.dumps(key[0], ensure_ascii=False)}: "
        if schema.get("type") == "string" and not text.startswith(_CDATA, after):
            self._before, self._is_text = ", ", True
            return after, written + '"'
        end, raw, is_end = self._value(text, after, is_last)
        if not is_end:
            return UNCLEAR
        self._before = ", "
        return end, written + typed_json(raw, schema, self._pair.nests)

    def _value(self, text: str, start: int, is_last: bool) -> tuple[int, str, bool]:
        """Return how far a value is read, what of it is certain, and whether it ends there: where
        its closing mark is followed by what may follow it.
        """
        closing, place = self._closing, start
        is_end, line = False, "\n" if self._has_lines else ""
        while (end := text.find(closing, place)) >= 0:
            place = end + len(closing)
            following = [match(each, text, place) for each in (self._pair.opening, *self._ends)]
            is_end = is_last or any(each is not None and each != UNCLEAR for each in following)
            if is_end or UNCLEAR in following:
                break
        else:
            end = len(text) - partial_match_length(text[place:], closing)
        value = text[start:end].removesuffix(line)
        return place if is_end else start + len(value), value, is_end


def _endings(form: CallForm) -> list[str]:
    """Return what ends the arguments of a call; where they are pairs, all but its last mark may be
    missing.
    """
    marks = _CONTROL.findall(form.closing)[-1:] if form.style == "pairs" else []
    return [literal for literal in (form.between, form.closing, *marks) if literal]


# --- finding ------------------------------------------------------------------------------------

_NAME, _OTHER = "probe_tool_qz", "second_tool_qz"
_IDS = ("qzid00001", "qzid00002")
#: The types and the values of its arguments.
_GIVEN: dict[str, tuple[str, Any]] = {
    "text": ("string", "plain qz"),
    "number": ("integer", 42),
    "flag": ("boolean", True),
    "items": ("array", ["a", "b"]),
    "fields": ("object", {"k": 1}),
}
_TYPES = {key: kind for key, (kind, _) in _GIVEN.items()}
_PLAIN: Arguments = {key: value for key, (_, value) in _GIVEN.items()}
#: The awkward text, and one for templates that write texts without escapes.
_PROBES = tuple(
    {**_PLAIN, "text": text} for text in ("q\"<&\\\n'z {} </x>", 'a "quoted" <b> & {c}', "plain qz")
)
#: What Command R+ wants of each argument.
_WANTED = {
    "description": "It.",
    "items": {"type": "string"},
    "additionalProperties": {"type": "string"},
}
_PROPERTIES = {key: {"type": kind, **_WANTED} for key, kind in _TYPES.items()}
_SCHEMA = {"type": "object", "properties": _PROPERTIES}
_CONTENT = "@@plain@@"
_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
#: Marks of an empty thought before calls, and of the end of a turn or the beginning of a result
#: behind them.
_AROUND = re.compile(
    r"\A(?:\s*<[^<>]*think[^<>]*>)+"
    r"|(?:\s*(?:<\|calls?\|>|<[^<>]*(?:eo[mst]|im_end|response|end\Wof\Wsentence|assistant)[^<>]*>))+\s*\Z",
    re.IGNORECASE,
)
#: What a reader of thoughts takes away.
_MARKS = [mark for family in FAMILIES for mark in family.around]
_ABOUT = {"description": "A tool.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": {"name": name, **_ABOUT}} for name in (_NAME, _OTHER)]
#: Forms of templates that offer tools and write no call of their own, by what the calls begin with:
#: a token that the model has, or a text of the template's instructions.
_BY_MARK = {
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
    "<tool_call>": CallForm(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        keys=("name", "arguments"),
    ),
}
#: gpt-oss writes the channel before the name of the function, or as its template behind it.
_HARMONY = CallForm(
    "to=functions.",
    " <|constrain|>json<|message|>",
    "<|call|>",
    others=tuple(
        channel + kind + "<|message|>"
        for channel in ("", f"<|channel|>{ANY}")
        for kind in (" <|constrain|>json", " json", "")
    ),
)


def form_of(
    template: str, has_token: Callable[[str], bool] = lambda _name: False
) -> CallForm | None:
    """Return the form of a template's calls; None if the template takes no tools, or writes calls
    in a form that specgen cannot read. `has_token` says whether the model has a control token of
    this name.
    """
    if not re.search(r"\b(?:tools|functions|tool_calls)\b", template):
        return None
    if "<|channel|>" in template and "functions." in template:
        return _HARMONY
    found = _found(template)
    if found is None and "tool_calls" not in template:
        marks = (mark for mark in _BY_MARK if has_token(mark) or mark in template)
        found = _BY_MARK.get(next(marks, ""))
    return found


@functools.lru_cache(maxsize=32)
def _found(template: str) -> CallForm | None:
    for probe in _PROBES:
        written = two = None
        with contextlib.suppress(PromptError):
            written = _written(template, [(_NAME, probe)])
            two = _written(template, [(_NAME, probe), (_OTHER, {})])
        if written is None:
            continue
        for form in _forms(written, two, probe):
            if _gives_back(form, written, two, probe):
                return form
    return None


def _written(template: str, calls: list[tuple[str, Arguments]]) -> str:
    """Return what the template writes for an answer with calls, without what it writes around any
    answer.
    """
    given = [
        ToolCall(identity, name, arguments)
        for identity, (name, arguments) in zip(_IDS, calls, strict=False)
    ]
    user, more = Message("user", "hello"), Message("user", "x")
    plain, called = Message("assistant", _CONTENT), Message("assistant", "", tuple(given))
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
        start = common_prefix_length(called_text, plain_text)
        if _is_open(called_text[:start]):
            start = called_text.rfind("<", 0, start)
        if called_text.find(_NAME, start) < 0:
            continue
        n_same = common_prefix_length(called_text[start:][::-1], plain_text[start:][::-1])
        end = len(called_text) - n_same
        if _is_open(called_text[start:end]):
            end = called_text.find(">", end) + 1
        behind = _TAG.search(plain_text[plain_text.find(_CONTENT) + len(_CONTENT) :])
        if len(without) > 1 and behind is not None:
            place = called_text.find(behind[0], start, end)
            end = place if place >= 0 else end
        return _AROUND.sub("", called_text[start:end])
    return ""


def _is_open(text: str) -> bool:
    """Return whether a text ends inside of a tag."""
    return text.rfind("<") > text.rfind(">")


def _render(template: str, messages: list[Message]) -> str:
    now = datetime.datetime(2026, 1, 1)
    how: dict[str, Any] = {"bos_token": "", "eos_token": "", "rearranges": False}
    text = render(template, messages, now=now, tools=_TOOLS, **how)
    return without_marks(text, _MARKS)


def _forms(written: str, two: str | None, probe: Arguments) -> Iterator[CallForm]:
    """Yield what the form may be, by what the template writes for one call and for two."""
    place = written.find(_NAME)
    if place < 0:
        return
    after = written[place + len(_NAME) :]
    for begin in (found.start() for found in re.finditer(r"[{(]", after)):
        for style in get_args(Style):
            end, value, is_over = ArgumentsReader(style).read(after[begin:])
            if not is_over or json.loads(value) != probe:
                continue
            form = CallForm(written[:place], after[:begin], after[begin + end :], style=style)
            quote = "<escape>" if "<escape>" in written else form.quote  # of FunctionGemma
            form = replace(form, keys=_keys(written, place), quote=quote)
            yield _with_two(form, two)
    yield from _forms_of_pairs(written, place, two, probe)


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
    starts, at = list[int](), 0
    for key in keys:
        starts.append(after.find(key, at))
        if starts[-1] < 0:
            return
        at = starts[-1] + len(key)
    if (value := after.find(str(probe["text"]), starts[0])) < 0:
        return
    behind_text = value + len(str(probe["text"]))
    between = after[behind_text : starts[1]]  # the end of a value, and the beginning of a key
    number = after.find("42", starts[1])
    own_end = between.find(f"</{keys[0]}>")
    cut = between.find(">", own_end) + 1 if own_end >= 0 else max(between.rfind("<"), 0)
    # Tags that end a value come before the tag that begins a key.
    before = after[: starts[0]]
    while cut > 0 and not before.endswith(between[cut:]):
        cut -= 1
    while cut > 0 and before.endswith(between[cut - 1 :]) and between[cut - 1].isspace():
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
    pair = Pair(opening, middles, closing.replace(f"</{keys[0]}>", f"</{ANY}>"))
    last_closing = pair.closing_of(keys[-1]).strip()
    last = after.rfind(last_closing) + len(last_closing)
    after_name = after[: starts[0] - len(opening)]
    form = CallForm(written[:place], after_name, after[last:], style="pairs", pair=pair)
    yield _with_two(form, two)


def _with_any(form: CallForm, pattern: str) -> CallForm:
    texts = {name: getattr(form, name) for name in ("opening", "after_name", "closing", "between")}
    changed: Any = {name: text and re.sub(pattern, ANY, text) for name, text in texts.items()}
    return replace(form, **changed)


def _with_two(form: CallForm, two: str | None) -> CallForm:
    """Return a form with what stands between two calls, and `ANY` for what differs from call to
    call.
    """
    ids, numbers = "|".join(_IDS), r'(?<=[:"])\d(?=[<"])'
    form = _with_any(form, ids)
    if two is None or (other := two.find(_OTHER)) < 0:
        return form
    form = _with_any(form, numbers)
    functions = {_NAME: _SCHEMA, _OTHER: _SCHEMA}
    begin, found = match(form.opening, two, 0), None
    if begin is not None and begin != UNCLEAR:
        found = read_call(form, two, begin, functions, is_last=True)
    if isinstance(found, tuple):
        end = found[0]
    else:  # what ends one call of pairs shows only with what is between two
        last = "" if form.pair is None else form.pair.closing_of([*_TYPES][-1]).strip()
        if not last or (place := two.rfind(last, 0, other)) < 0:
            return form
        end = place + len(last)
    return _with_any(replace(form, between=two[end:other]), f"{ids}|{numbers}")


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
