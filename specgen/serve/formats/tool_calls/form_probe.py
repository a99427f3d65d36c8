"""Find the form of a model's tool calls by rendering its own chat template.

A template that is given a call writes it as the model was trained to. So a call of a function that
does not exist is rendered, with arguments of each type. The text before, between and after its name
and its arguments is the form, provided that a reader gets exactly that call back from it. A new
model family needs no code as long as this finds its form.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from specgen.errors import PromptError
from specgen.serve.formats.tool_calls.forms import (
    FORMS_BY_MARK,
    HARMONY,
    ArgumentPair,
    CallForm,
)
from specgen.serve.formats.tool_calls.literals import NoMatch, match
from specgen.serve.formats.tool_calls.readers import read_call
from specgen.serve.formats.tool_calls.values import Arguments, ArgumentsReader, Style
from specgen.session.prompts.template import Message, ToolCall, render
from specgen.session.prompts.thoughts import FAMILIES, without_marks
from specgen.text.grammar.free_text import ANY
from specgen.text.overlap import common_prefix_length

# --- the calls that are rendered ------------------------------------------------------------------

_NAME = "probe_tool_qz"
_SECOND_NAME = "second_tool_qz"
_IDS = ("qzid00001", "qzid00002")
_NUMBER = 42
#: The types of the first function's arguments, in their order.
_TYPES = {
    "text": "string",
    "number": "integer",
    "flag": "boolean",
    "items": "array",
    "fields": "object",
}
#: Texts for the first argument: an awkward one first, for templates that escape texts, and then
#: texts for those that do not.
_TEXTS = ("q\"<&\\\n'z {} </x>", 'a "quoted" <b> & {c}', "plain qz")
_PROBES: tuple[Arguments, ...] = tuple(
    {
        "text": text,
        "number": _NUMBER,
        "flag": True,
        "items": ["a", "b"],
        "fields": {"k": 1},
    }
    for text in _TEXTS
)
#: Fields that the template of Command R+ needs for each argument.
_NEEDED_FIELDS = {
    "description": "It.",
    "items": {"type": "string"},
    "additionalProperties": {"type": "string"},
}
_SCHEMA = {
    "type": "object",
    "properties": {key: {"type": kind, **_NEEDED_FIELDS} for key, kind in _TYPES.items()},
}
_FUNCTIONS = {_NAME: _SCHEMA, _SECOND_NAME: _SCHEMA}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": schema,
        },
    }
    for name, schema in _FUNCTIONS.items()
]
_CONTENT = "@@plain@@"

# --- patterns of what templates write -------------------------------------------------------------

_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
#: Marks of an empty thought before calls, and after them of the end of a turn, or of the beginning
#: of a result.
_AROUND_CALLS = re.compile(
    r"\A(?:\s*<[^<>]*think[^<>]*>)+"
    r"|(?:\s*(?:<\|calls?\|>"
    r"|<[^<>]*(?:eo[mst]|im_end|response|end\Wof\Wsentence|assistant)[^<>]*>))+\s*\Z",
    re.IGNORECASE,
)
#: The marks that a reader of thoughts takes away.
_THOUGHT_MARKS = [mark for family in FAMILIES for mark in family.around]
_READS_TOOLS = re.compile(r"\b(?:tools|functions|tool_calls)\b")
_ID_PATTERN = "|".join(_IDS)
_CALL_NUMBER_PATTERN = r'(?<=[:"])\d(?=[<"])'
_JSON_DECODER = json.JSONDecoder()


def form_of(
    template: str, has_token: Callable[[str], bool] = lambda _name: False
) -> CallForm | None:
    """Return the form of a model's calls.

    Args:
        template: The model's chat template.
        has_token: Whether the model has a control token of this name.

    Returns:
        None if the template takes no tools, or writes calls in a form that specgen cannot read.
    """
    if not _READS_TOOLS.search(template):
        return None
    if "<|channel|>" in template and "functions." in template:
        return HARMONY
    form = _probed_form(template)
    if form is not None or "tool_calls" in template:
        return form
    for mark, known_form in FORMS_BY_MARK.items():
        if has_token(mark) or mark in template:
            return known_form
    return None


@functools.lru_cache(maxsize=32)
def _probed_form(template: str) -> CallForm | None:
    for arguments in _PROBES:
        first_call = (_NAME, arguments)
        try:
            one = _rendered_calls(template, [first_call])
        except PromptError:
            continue
        try:
            two = _rendered_calls(template, [first_call, (_SECOND_NAME, {})])
        except PromptError:  # the template takes one call at a time
            two = None
        for form in _candidates(one, two, arguments):
            if _reads_back(form, one, two, arguments):
                return form
    return None


# --- rendering ------------------------------------------------------------------------------------


def _rendered_calls(template: str, calls: Sequence[tuple[str, Arguments]]) -> str:
    """Return the text of calls in a conversation, without what surrounds every answer."""
    made: list[ToolCall] = []
    results: list[Message] = []
    for identity, (name, arguments) in zip(_IDS, calls, strict=False):
        made.append(ToolCall(identity, name, arguments))
        results.append(Message("tool", "result", tool_call_id=identity, name=name))
    user = Message("user", "hello")
    plain = Message("assistant", _CONTENT)
    called = Message("assistant", "", tuple(made))
    with contextlib.suppress(PromptError):
        called_text = _render(template, [user, called])
        plain_text = _render(template, [user, plain])
        calls_text = _added_text(called_text, plain_text, has_results=False)
        if calls_text:
            return calls_text
    # Some templates write only calls that have results, and some need an answer after these.
    end = [plain, Message("user", "x")]
    called_text = _render(template, [user, called, *results, *end])
    plain_text = _render(template, [user, *end])
    return _added_text(called_text, plain_text, has_results=True)


def _render(template: str, messages: list[Message]) -> str:
    text = render(
        template,
        messages,
        bos_token="",
        eos_token="",
        now=datetime.datetime(2026, 1, 1),
        tools=_TOOLS,
        rearranges=False,
    )
    return without_marks(text, _THOUGHT_MARKS)


def _added_text(called: str, plain: str, *, has_results: bool) -> str:
    """Return the calls in a conversation, by comparing it with one without calls.

    Returns:
        An empty text if there are no calls.
    """
    # Leave out what both have in common, but no part of a tag.
    start = common_prefix_length(called, plain)
    if _ends_in_tag(called[:start]):
        start = called.rfind("<", 0, start)
    added = called[start:]
    if _NAME not in added:
        return ""
    n_common_end = common_prefix_length(added[::-1], plain[start:][::-1])
    end = len(added) - n_common_end
    if _ends_in_tag(added[:end]):
        end = added.find(">", end) + 1
    added = added[:end]
    # Results follow the tag that ends any answer.
    _, _, after_content = plain.partition(_CONTENT)
    answer_end = _TAG.search(after_content)
    if has_results and answer_end is not None:
        added, _, _ = added.partition(answer_end[0])
    return _AROUND_CALLS.sub("", added)


def _ends_in_tag(text: str) -> bool:
    return text.rfind("<") > text.rfind(">")


# --- candidates -----------------------------------------------------------------------------------


def _candidates(one: str, two: str | None, probe: Arguments) -> Iterator[CallForm]:
    """Yield possible forms, by what the template writes for one call and for two."""
    name_start = one.find(_NAME)
    if name_start < 0:
        return
    name_end = name_start + len(_NAME)
    for begin in re.finditer(r"[{(]", one[name_end:]):
        arguments_start = name_end + begin.start()
        for style in get_args(Style):
            read = ArgumentsReader(style).read(one[arguments_start:])
            if not read.is_over or json.loads(read.json) != probe:
                continue
            form = CallForm(
                opening=one[:name_start],
                after_name=one[name_end:arguments_start],
                closing=one[arguments_start + read.n_read :],
                style=style,
                keys=_object_keys(one, name_start),
            )
            if "<escape>" in one:  # FunctionGemma
                form = replace(form, quote="<escape>")
            yield _with_second_call(form, two)
    form_of_pairs = _pairs_form(one, name_start, probe)
    if form_of_pairs is not None:
        yield _with_second_call(form_of_pairs, two)


def _object_keys(text: str, name_start: int) -> tuple[str, str] | None:
    """Return the keys of the JSON object that is the call, if it is one."""
    for begin in re.finditer(r"\{", text[:name_start]):
        try:
            call, _ = _JSON_DECODER.raw_decode(text, begin.start())
        except ValueError:
            continue
        if list(call) == [_NAME]:
            return "", ""
        name_key = next((key for key, value in call.items() if value == _NAME), None)
        arguments_key = next((key for key, value in call.items() if isinstance(value, dict)), None)
        if name_key is not None and arguments_key is not None:
            return name_key, arguments_key
    return None


def _pairs_form(written: str, name_start: int, probe: Arguments) -> CallForm | None:
    """Return the form of a call with arguments that are written one by one.

    Such a call is ``NAME after_name (opening KEY middle VALUE closing)* closing``. What separates
    two calls is not known yet.
    """
    after = written[name_start + len(_NAME) :]
    keys = list(probe)
    key_starts = _places_in_order(keys, after)
    if key_starts is None:
        return None
    text = str(probe["text"])
    text_start = after.find(text, key_starts[0])
    number_start = after.find(str(_NUMBER), key_starts[1])
    if text_start < 0 or number_start < 0:
        return None

    # Between the first value and the second key are the end of a pair and the beginning of another.
    between = after[text_start + len(text) : key_starts[1]]
    closing, opening = _split_between_pairs(between, before=after[: key_starts[0]], key=keys[0])
    if not opening or not closing.strip():
        return None

    middles: dict[str, str] = {}
    value_starts = {"text": text_start, "number": number_start}
    for key, key_start in zip(keys, key_starts, strict=True):
        key_end = key_start + len(key)
        value_start = value_starts.get(key, after.find(closing.strip(), key_end))
        middles[_TYPES[key]] = after[key_end:value_start]
    pair = ArgumentPair(
        opening=opening,
        middles=_without_values(middles),
        closing=closing.replace(f"</{keys[0]}>", f"</{ANY}>"),
    )

    last_closing = pair.closing_of(keys[-1]).strip()
    arguments_end = after.rfind(last_closing) + len(last_closing)
    return CallForm(
        opening=written[:name_start],
        after_name=after[: key_starts[0] - len(opening)],
        closing=after[arguments_end:],
        style="pairs",
        pair=pair,
    )


def _without_values(middles: Mapping[str, str]) -> dict[str, str]:
    """Return the texts between keys and values without values at their ends.

    Templates write flags, lists and objects in several ways, so that their beginnings are not
    known. What comes before them is like what comes before a text.
    """
    text_middle = middles["string"]
    shape = re.escape(text_middle).replace("true", "(?:true|false)").replace("string", r"\w+")
    found = dict(middles)
    for kind in ("boolean", "array", "object"):
        alike = re.match(shape, middles[kind])
        found[kind] = text_middle if alike is None else alike[0]
    return found


def _places_in_order(keys: Sequence[str], text: str) -> list[int] | None:
    """Return where the keys are in a text, each after the one before; None if one is missing."""
    places: list[int] = []
    end = 0
    for key in keys:
        place = text.find(key, end)
        if place < 0:
            return None
        places.append(place)
        end = place + len(key)
    return places


def _split_between_pairs(between: str, *, before: str, key: str) -> tuple[str, str]:
    """Split the text between a value and the next key into the end of a pair and a beginning.

    Args:
        between: The text to split.
        before: The text before the first key, which ends with the beginning of a pair.
        key: The key of the value.
    """
    # Tags that end a value come before the tag that begins a key.
    closing_tag = f"</{key}>"
    if closing_tag in between:
        cut = between.find(closing_tag) + len(closing_tag)
    else:
        cut = max(between.rfind("<"), 0)
    while cut > 0 and not before.endswith(between[cut:]):
        cut -= 1
    # White space that also comes before the first key belongs to the beginning.
    while cut > 0 and before.endswith(between[cut - 1 :]):
        if not between[cut - 1].isspace():
            break
        cut -= 1
    return between[:cut], between[cut:]


def _with_second_call(form: CallForm, two: str | None) -> CallForm:
    """Return a form with the text between two calls, and `ANY` for what differs between calls."""
    form = _with_any(form, _ID_PATTERN)
    if two is None or _SECOND_NAME not in two:
        return form
    form = _with_any(form, _CALL_NUMBER_PATTERN)
    second_start = two.find(_SECOND_NAME)
    first_end = _end_of_first_call(form, two, second_start)
    if first_end is None:
        return form
    form = replace(form, between=two[first_end:second_start])
    return _with_any(form, f"{_ID_PATTERN}|{_CALL_NUMBER_PATTERN}")


def _end_of_first_call(form: CallForm, two: str, second_start: int) -> int | None:
    name_start = match(form.opening, two, 0)
    if isinstance(name_start, int):
        call = read_call(form, two, name_start, _FUNCTIONS, is_last=True)
        if not isinstance(call, NoMatch):
            return call.end
    if form.pair is None:
        return None
    # The end of pairs shows only with the text between two calls, so the last pair has to tell.
    last_closing = form.pair.closing_of(list(_TYPES)[-1]).strip()
    place = two.rfind(last_closing, 0, second_start)
    if place < 0 or not last_closing:
        return None
    return place + len(last_closing)


def _with_any(form: CallForm, pattern: str) -> CallForm:
    """Return a form with `ANY` in place of a pattern."""
    if form.between is not None:
        form = replace(form, between=re.sub(pattern, ANY, form.between))
    return replace(
        form,
        opening=re.sub(pattern, ANY, form.opening),
        after_name=re.sub(pattern, ANY, form.after_name),
        closing=re.sub(pattern, ANY, form.closing),
    )


# --- the test of a candidate ----------------------------------------------------------------------


def _reads_back(
    form: CallForm,
    one: str,
    two: str | None,
    probe: Arguments,
) -> bool:
    """Return whether a reader gets the calls back from what the template wrote."""
    first_call = (_NAME, probe)
    if _read_all(form, one) != [first_call]:
        return False
    if two is None or form.between is None:
        return True
    return _read_all(form, two) == [first_call, (_SECOND_NAME, {})]


def _read_all(form: CallForm, text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the calls in a text; none if the text does not end as the form wants it."""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    place = 0
    before_name = form.opening
    while isinstance(name_start := match(before_name, text, place), int):
        call = read_call(form, text, name_start, _FUNCTIONS)
        if isinstance(call, NoMatch):
            return calls
        calls.append((call.name, call.arguments))
        place = call.end
        before_name = form.between or form.closing
    if match(form.closing, text, place) is NoMatch.ABSENT:
        return []
    return calls
