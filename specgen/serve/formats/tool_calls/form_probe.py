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
#: Texts for the first argument, the most difficult first: a template that does not escape texts can
#: only be read with one of the others.
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
#: Marks around calls that are not part of them: an empty thought before them, and the end of the
#: turn or the beginning of a result after them.
_AROUND_CALLS = re.compile(
    r"\A(?:\s*<[^<>]*think[^<>]*>)+"
    r"|(?:\s*(?:<\|calls?\|>"
    r"|<[^<>]*(?:eo[mst]|im_end|response|end\Wof\Wsentence|assistant)[^<>]*>))+\s*\Z",
    re.IGNORECASE,
)
#: The marks of thinking blocks, which are removed from answers before calls are read.
_THOUGHT_MARKS = [mark for family in FAMILIES for mark in family.around]
_READS_TOOLS = re.compile(r"\b(?:tools|functions|tool_calls)\b")
_ID_PATTERN = "|".join(_IDS)
_CALL_NUMBER_PATTERN = r'(?<=[:"])\d(?=[<"])'
_JSON_DECODER = json.JSONDecoder()


def form_of(
    template: str, has_token: Callable[[str], bool] = lambda _name: False
) -> CallForm | None:
    """Return the form in which a model writes tool calls.

    Args:
        template: The model's chat template.
        has_token: Tells whether the model has a control token of this name.

    Returns:
        None if the template does not support tools, or if specgen cannot read the calls that it
        writes.
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
    """Return the form of the calls that a template renders; None if no form reads them back."""
    for arguments in _PROBES:
        first_call = (_NAME, arguments)
        try:
            one_call = _rendered_calls(template, [first_call])
        except PromptError:
            continue
        try:
            two_calls = _rendered_calls(template, [first_call, (_SECOND_NAME, {})])
        except PromptError:  # the template takes one call at a time
            two_calls = None
        for form in _candidates(one_call, two_calls, arguments):
            if _reads_back(form, one_call, two_calls, arguments):
                return form
    return None


# --- rendering ------------------------------------------------------------------------------------


def _rendered_calls(template: str, calls: Sequence[tuple[str, Arguments]]) -> str:
    """Render calls in a conversation, and return their text without the marks of any answer.

    Args:
        template: The model's chat template.
        calls: The name and the arguments of each call.

    Raises:
        PromptError: If the template refuses these calls.
    """
    tool_calls: list[ToolCall] = []
    results: list[Message] = []
    for identity, (name, arguments) in zip(_IDS, calls, strict=False):
        tool_calls.append(ToolCall(identity, name, arguments))
        results.append(
            Message(
                "tool",
                "result",
                tool_call_id=identity,
                name=name,
            )
        )
    user = Message("user", "hello")
    plain_answer = Message("assistant", _CONTENT)
    calling_answer = Message("assistant", "", tuple(tool_calls))
    with contextlib.suppress(PromptError):
        text_with_calls = _render(template, [user, calling_answer])
        text_without = _render(template, [user, plain_answer])
        calls_text = _added_text(text_with_calls, text_without, has_results=False)
        if calls_text:
            return calls_text
    # Some templates write only calls that have results, and some need an answer after these.
    end = [plain_answer, Message("user", "x")]
    text_with_calls = _render(template, [user, calling_answer, *results, *end])
    text_without = _render(template, [user, *end])
    return _added_text(text_with_calls, text_without, has_results=True)


def _render(template: str, messages: list[Message]) -> str:
    """Render messages and tools, without the marks of thinking blocks."""
    text = render(
        template,
        messages,
        bos_token="",
        eos_token="",
        now=datetime.datetime(2026, 1, 1),
        tools=_TOOLS,
    )
    return without_marks(text, _THOUGHT_MARKS)


def _added_text(
    with_calls: str,
    without_calls: str,
    *,
    has_results: bool,
) -> str:
    """Return the text of the calls in a conversation, by comparing it with one without calls.

    Args:
        with_calls: The rendered conversation with calls.
        without_calls: The same conversation with the answer `_CONTENT` instead of the calls.
        has_results: Whether the results of the calls follow in `with_calls`.

    Returns:
        An empty text if the template does not write the calls.
    """
    # Leave out the common beginning and the common end, but never cut through a tag.
    start = common_prefix_length(with_calls, without_calls)
    if _ends_within_tag(with_calls[:start]):
        start = with_calls.rfind("<", 0, start)
    added = with_calls[start:]
    if _NAME not in added:
        return ""
    n_common_end = common_prefix_length(added[::-1], without_calls[start:][::-1])
    end = len(added) - n_common_end
    if _ends_within_tag(added[:end]):
        end = added.find(">", end) + 1
    added = added[:end]
    # Results follow the tag that ends any answer.
    _, _, after_content = without_calls.partition(_CONTENT)
    answer_end = _TAG.search(after_content)
    if has_results and answer_end is not None:
        added, _, _ = added.partition(answer_end[0])
    return _AROUND_CALLS.sub("", added)


def _ends_within_tag(text: str) -> bool:
    return text.rfind("<") > text.rfind(">")


# --- candidates -----------------------------------------------------------------------------------


def _candidates(
    one_call: str,
    two_calls: str | None,
    probe: Arguments,
) -> Iterator[CallForm]:
    """Yield the forms in which the template may have written the calls.

    Args:
        one_call: The text that the template writes for one call.
        two_calls: The text for two calls, the second one without arguments; None if the template
            refuses two calls.
        probe: The arguments of the first call.
    """
    name_start = one_call.find(_NAME)
    if name_start < 0:
        return
    name_end = name_start + len(_NAME)
    # If all arguments are one value, it begins at a bracket from which a reader gets the probe.
    for bracket in re.finditer(r"[{(]", one_call[name_end:]):
        arguments_start = name_end + bracket.start()
        for style in get_args(Style):
            parsed = ArgumentsReader(style).read(one_call[arguments_start:])
            if not parsed.is_over or json.loads(parsed.json) != probe:
                continue
            form = CallForm(
                opening=one_call[:name_start],
                after_name=one_call[name_end:arguments_start],
                closing=one_call[arguments_start + parsed.n_read :],
                style=style,
                keys=_object_keys(one_call, name_start),
            )
            if "<escape>" in one_call:  # FunctionGemma
                form = replace(form, quote="<escape>")
            yield _with_second_call(form, two_calls)
    pairs_form = _pairs_form(one_call, name_start, probe)
    if pairs_form is not None:
        yield _with_second_call(pairs_form, two_calls)


def _object_keys(text: str, name_start: int) -> tuple[str, str] | None:
    """Return the keys of the name and of the arguments if the call is a JSON object, or else None.

    The keys are empty if the name itself is the key of the arguments.
    """
    for bracket in re.finditer(r"\{", text[:name_start]):
        try:
            call, _ = _JSON_DECODER.raw_decode(text, bracket.start())
        except ValueError:
            continue
        if list(call) == [_NAME]:
            return "", ""
        name_key = next((key for key, value in call.items() if value == _NAME), None)
        arguments_key = next((key for key, value in call.items() if isinstance(value, dict)), None)
        if name_key is not None and arguments_key is not None:
            return name_key, arguments_key
    return None


def _pairs_form(
    one_call: str,
    name_start: int,
    probe: Arguments,
) -> CallForm | None:
    """Return the form of a call with arguments that are written one by one; None if they are not.

    Such a call is ``NAME after_name (opening KEY middle VALUE closing)* closing``. The text between
    two calls is not known yet.
    """
    after = one_call[name_start + len(_NAME) :]
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

    # The text between a key and its value may depend on the type of the value. Only the text and
    # the number are written as expected, so only their beginnings are known. For other types, take
    # everything up to `closing`, from which `_without_values` removes the value.
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
        opening=one_call[:name_start],
        after_name=after[: key_starts[0] - len(opening)],
        closing=after[arguments_end:],
        style="pairs",
        pair=pair,
    )


def _without_values(middles: Mapping[str, str]) -> dict[str, str]:
    """Remove the values from the ends of the texts between keys and values.

    Templates write flags, lists and objects in several ways, so the beginnings of these values are
    not known. The text before them is taken to look like the text before a string, except for the
    name of the type and a flag (some templates write ``type="string"`` or ``string="true"``).

    Args:
        middles: The texts by the JSON type of the value. Those of flags, lists and objects include
            the values.
    """
    text_middle = middles["string"]
    pattern = re.escape(text_middle).replace("true", "(?:true|false)").replace("string", r"\w+")
    clean_middles = dict(middles)
    for kind in ("boolean", "array", "object"):
        middle = re.match(pattern, middles[kind])
        clean_middles[kind] = text_middle if middle is None else middle[0]
    return clean_middles


def _places_in_order(keys: Sequence[str], text: str) -> list[int] | None:
    """Return the index of each key in a text, after the key before it; None if one is missing."""
    places: list[int] = []
    end = 0
    for key in keys:
        place = text.find(key, end)
        if place < 0:
            return None
        places.append(place)
        end = place + len(key)
    return places


def _split_between_pairs(
    between: str,
    *,
    before: str,
    key: str,
) -> tuple[str, str]:
    """Split the text between a value and the next key.

    Args:
        between: The text to split.
        before: The text before the first key, which ends with the beginning of a pair.
        key: The key of the value.

    Returns:
        The end of a pair, and the beginning of the next pair.
    """
    # Start at the last place where a tag may end the value, and move back until what follows also
    # comes before the first key.
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


def _with_second_call(form: CallForm, two_calls: str | None) -> CallForm:
    """Complete a form with the text between two calls, and replace ids and numbers with `ANY`."""
    form = _with_any(form, _ID_PATTERN)
    if two_calls is None or _SECOND_NAME not in two_calls:
        return form
    form = _with_any(form, _CALL_NUMBER_PATTERN)
    second_start = two_calls.find(_SECOND_NAME)
    first_end = _end_of_first_call(form, two_calls, second_start)
    if first_end is None:
        return form
    form = replace(form, between=two_calls[first_end:second_start])
    return _with_any(form, f"{_ID_PATTERN}|{_CALL_NUMBER_PATTERN}")


def _end_of_first_call(
    form: CallForm,
    two_calls: str,
    second_start: int,
) -> int | None:
    """Return the index at which the arguments of the first of two calls end; None if unknown."""
    name_start = match(form.opening, two_calls, 0)
    if isinstance(name_start, int):
        call = read_call(
            form,
            two_calls,
            name_start,
            _FUNCTIONS,
            is_last=True,
        )
        if not isinstance(call, NoMatch):
            return call.end
    if form.pair is None:
        return None
    # Pairs cannot be read while the text between two calls is unknown. They end at the end of the
    # last pair before the second call.
    last_closing = form.pair.closing_of(list(_TYPES)[-1]).strip()
    closing_start = two_calls.rfind(last_closing, 0, second_start)
    if closing_start < 0 or not last_closing:
        return None
    return closing_start + len(last_closing)


def _with_any(form: CallForm, pattern: str) -> CallForm:
    """Replace a pattern with `ANY` in all texts of a form."""
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
    one_call: str,
    two_calls: str | None,
    probe: Arguments,
) -> bool:
    """Return whether a reader gets the calls back from what the template wrote."""
    first_call = (_NAME, probe)
    if _read_all(form, one_call) != [first_call]:
        return False
    if two_calls is None or form.between is None:
        return True
    return _read_all(form, two_calls) == [first_call, (_SECOND_NAME, {})]


def _read_all(form: CallForm, text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and the arguments of all calls in a text, up to one that cannot be read.

    Returns:
        An empty list if all calls can be read, but the form's `closing` does not follow the last.
    """
    calls: list[tuple[str, Mapping[str, Any]]] = []
    place = 0
    before_name = form.opening
    while True:
        name_start = match(before_name, text, place)
        if isinstance(name_start, NoMatch):
            break
        call = read_call(form, text, name_start, _FUNCTIONS)
        if isinstance(call, NoMatch):
            return calls
        calls.append((call.name, call.arguments))
        place = call.end
        before_name = form.between or form.closing
    if match(form.closing, text, place) is NoMatch.ABSENT:
        return []
    return calls
