"""Split an answer into content and tool calls, while it is being generated."""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specgen.serve.formats.delta import Delta
from specgen.serve.formats.tool_calls.forms import OPENING_FENCE, PYTHON_TAG, TOOLS_TAG, CallForm
from specgen.serve.formats.tool_calls.function import Function
from specgen.serve.formats.tool_calls.literals import NoMatch, longest_match, match, skip_space
from specgen.serve.formats.tool_calls.readers import PairsReader, arguments_reader, read_name
from specgen.serve.formats.tool_calls.values import ArgumentsReader
from specgen.text.overlap import partial_match_length

#: What closes the fence around calls that are bare JSON objects, by what opens it.
_FENCES = {"```": "```", TOOLS_TAG: "</tools>"}
#: What may come before a call that is a bare JSON object, up to its bracket. The chat template of
#: Qwen2.5-Coder shows calls in two braces in its instructions, and the model may copy that.
_BEFORE_BARE_CALL = re.compile(
    rf"\s*(?:<\|python_tag\|>\s*)?(?:{OPENING_FENCE}\s*)?"
    r"(?:\{\s*)?(?=\{\s*[^\s{]|\[\s*\{)"
)
#: The beginning of such a text, unless it ends within a tag.
_MAY_COME_BEFORE_BARE_CALL = re.compile(
    r"\s*(?:<\|python_tag\|>\s*)?"
    rf"(?:`{{0,2}}|```(?:j|js|jso)|(?:{OPENING_FENCE}\s*)?(?:\[\s*|(?:\{{\s*){{0,2}}))"
)
#: The braces after a bare call: those of a call in two braces, and those written by mistake.
_EXTRA_BRACES = re.compile(r"(?:\s*\})*")
#: The characters that some models write between two JSON objects, whatever their template does.
_BETWEEN_OBJECTS = " \n\t\r,;"
#: The beginning of an object that names a function.
_NAMED_OBJECT = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"]*)"')
#: The first tag of a closing text, with the namespace that some models put before their tags.
_FIRST_TAG = re.compile(r"\s*(?:\]<\]\S+?\[>\[)?<[^<>]*>")
#: The maximum number of characters of a JSON object before its arguments.
_MAX_OBJECT_HEAD = 1000


class _NewCall(NamedTuple):
    """A call whose beginning has been read."""

    #: The name of the function.
    name: str
    #: The arguments as JSON; None if they are still to be read.
    arguments: str | None


@dataclass(frozen=True, slots=True)
class _NewCalls:
    """Calls that were read at one place: several if they are a list of JSON objects."""

    calls: list[_NewCall]
    #: The index in the text at which to go on reading.
    end: int


class _CallStart(NamedTuple):
    """A place at which a call may begin, as indices in the text."""

    #: The end of the content before it.
    content_end: int
    #: The beginning of its name or its JSON object, or of what follows its mark.
    begin: int


@dataclass(slots=True)
class _WholeObject:
    """A JSON value that must be complete before it is known to be a call."""

    reader: ArgumentsReader = field(default_factory=lambda: ArgumentsReader("json"))
    #: The number of its characters that were read.
    n_read: int = 0
    #: The JSON that the reader has made of them.
    json: str = ""


@dataclass(slots=True)
class _OpenPart:
    """A part of the open call that is still to be read."""

    reader: ArgumentsReader | PairsReader
    #: Whether it is the arguments, which are passed on. Otherwise it is the rest of a JSON object
    #: after the arguments, which is dropped.
    is_arguments: bool = True


class ToolCallParser:
    """Splits an answer into content and calls.

    A call is reported when its arguments begin, and its arguments as they arrive. Nothing that was
    reported can be taken back, so broken arguments are mended. An answer may also begin with a bare
    JSON object, perhaps in a code fence or in ``<tools>``: small models write calls like that,
    whatever their template says. A call of an unknown function, or one that is broken before its
    arguments, is content, but may be held back until the end of the answer. White space around
    calls is left out. The result does not depend on how the text is cut into pieces.

    Args:
        form: The form of the model's calls.
        functions: The functions that may be called.
        one_only: Whether everything after the first call is left out.
        calls_only: Whether everything but calls is left out.
        is_beginning: Whether the text is the beginning of an answer.
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
        #: The text that has arrived and is neither content nor a call yet.
        self._rest = ""
        #: Whether only white space came so far, so that a bare call may begin.
        self._is_beginning = is_beginning
        #: The parts of the open call that are still to be read; empty outside of calls.
        self._open_parts: list[_OpenPart] = []
        #: Whether a call was the last thing that was read.
        self._is_after_call = False
        #: The text that ends that call, if it is in one of `_FENCES`.
        self._closing_fence = ""
        #: Whether that call is a JSON object without the mark of its form.
        self._is_bare_object = False
        #: The JSON value that may be a call, as far as it is read.
        self._object = _WholeObject()
        #: Whether no more text will come.
        self._is_last = False
        #: Whether that is because the answer was cut off.
        self._is_cut = False

    def feed(self, text: str) -> list[Delta]:
        """Add a piece of the answer, and return the deltas that are certain now."""
        self._rest += text
        return self._read()

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Return the remaining deltas, at the end of the answer.

        Args:
            is_cut: Whether the answer was cut off. An unfinished call is left out then: it is not
                content, and no client can use it.
        """
        self._is_last = True
        self._is_cut = is_cut
        return self._read()

    @property
    def _is_end(self) -> bool:
        """Whether the model has ended the answer here."""
        return self._is_last and not self._is_cut

    def _read(self) -> list[Delta]:
        """Read as much of the rest as is unambiguous, and return its deltas."""
        deltas: list[Delta] = []
        while True:
            deltas += self._read_open_call()
            if self._open_parts:
                if self._is_cut:
                    self._rest = ""
                return deltas
            content, new_calls = self._read_to_call()
            if content and not self._calls_only:
                deltas.append(Delta("content", content))
            if not new_calls:
                return deltas
            if self._one_only:
                del new_calls[1:]
            for call in new_calls:
                deltas += self._call_deltas(call)

    def _call_deltas(self, call: _NewCall) -> list[Delta]:
        """Return the deltas of a new call, which gets the next number."""
        number = self.n_calls
        self.n_calls += 1
        identity = f"call_{uuid.uuid4().hex[:24]}"
        deltas = [
            Delta(
                "call",
                "",
                call.name,
                identity,
                number,
            )
        ]
        if call.arguments is not None:
            deltas.append(
                Delta(
                    "arguments",
                    call.arguments,
                    number=number,
                    is_end=True,
                )
            )
        return deltas

    def _take(self, n: int) -> str:
        """Remove the first characters of the rest, and return them."""
        taken = self._rest[:n]
        self._rest = self._rest[n:]
        return taken

    def _read_open_call(self) -> list[Delta]:
        """Read on in the open call, if there is one, and return the deltas of its arguments."""
        deltas: list[Delta] = []
        while self._open_parts:
            part = self._open_parts[0]
            parsed = part.reader.read(self._rest, is_last=self._is_end)
            self._take(parsed.n_read)
            if part.is_arguments and (parsed.json or parsed.is_over):
                number = self.n_calls - 1
                deltas.append(
                    Delta(
                        "arguments",
                        parsed.json,
                        number=number,
                        is_end=parsed.is_over,
                    )
                )
            if not parsed.is_over:
                break
            del self._open_parts[0]
        return deltas

    # --- up to the next call ----------------------------------------------------------------------

    def _read_to_call(self) -> tuple[str, list[_NewCall]]:
        """Read up to the arguments of the next call.

        Returns:
            The content that is certain, and the calls after it; no calls if none has begun yet.
        """
        content = ""
        #: The index in the content at which an unfinished call begins.
        unfinished_start: int | None = None
        while True:
            if self._one_only and self.n_calls:
                self._rest = ""
            start = self._seek_next_start()
            if start is NoMatch.UNCLEAR:
                break
            if start is NoMatch.ABSENT:
                content += self._take_certain()
                break
            content += self._take(start.content_end)
            begin = start.begin - start.content_end
            new_calls = self._read_calls(begin)
            if new_calls is NoMatch.UNCLEAR and not self._is_last:
                break
            was_after_call = self._is_after_call
            self._is_beginning = False
            self._is_after_call = isinstance(new_calls, _NewCalls)
            self._object = _WholeObject()
            if isinstance(new_calls, _NewCalls):
                self._take(new_calls.end)
                return content, new_calls.calls

            # There is no call here. Take only the mark as content, or one character without a mark:
            # the broken text after it may contain another call.
            is_call_begun = was_after_call or self._is_call_begun(begin)
            if new_calls is NoMatch.UNCLEAR and unfinished_start is None and is_call_begun:
                unfinished_start = len(content)
            content += self._take(max(1, min(begin, len(self._form.mark) or 1)))
        return self._end_content(content, unfinished_start), []

    def _end_content(
        self,
        content: str,
        unfinished_start: int | None,
    ) -> str:
        """Remove an unfinished call and marks without a call from the end of the content.

        Args:
            content: The content so far, which no call follows.
            unfinished_start: The index at which an unfinished call begins; None if there is none.
        """
        if self._is_cut:
            content = content[:unfinished_start]
            if self.n_calls:
                n_partial_mark = partial_match_length(content, self._form.mark)
                content = content[: len(content) - n_partial_mark]
        if self._is_last and self.n_calls:
            content = content.rstrip().removesuffix(self._form.mark).rstrip()
        return content

    def _is_call_begun(self, begin: int) -> bool:
        """Return whether a mark comes before `begin`, or an object that names a function there."""
        if self._form.mark and self._form.mark in self._rest[:begin]:
            return True
        named = _NAMED_OBJECT.match(self._rest, begin)
        return named is not None and named[1] in self._schemas

    def _take_certain(self) -> str:
        """Remove the part of the rest that is content whatever follows, and return it.

        The rest keeps what may be the beginning of a bare call, a partial mark, and white space at
        its end.
        """
        text = self._rest
        if self._is_last:
            return self._take(len(text))
        if self._is_beginning and _may_come_before_bare_call(text):
            return ""
        marks = (self._form.mark, self._form.inner_mark)
        n_partial_mark = max(partial_match_length(text, mark) for mark in marks)
        n_certain = len(text[: len(text) - n_partial_mark].rstrip())
        if n_certain:
            self._is_beginning = False
        return self._take(n_certain)

    # --- where a call begins ----------------------------------------------------------------------

    def _seek_next_start(self) -> _CallStart | NoMatch:
        """Remove the text that ends the last call, and find the next place of a call.

        Returns:
            The place; `ABSENT` if the rest has none, `UNCLEAR` if more text is needed.
        """
        if self._is_after_call:
            # The next call may follow the last one without a mark.
            begin = self._skip_closing()
            if begin is NoMatch.UNCLEAR:
                return begin
            if isinstance(begin, int):
                return _CallStart(0, begin)
        if self._is_beginning:
            before_bare = _BEFORE_BARE_CALL.match(self._rest)
            if before_bare is not None:
                return _CallStart(0, before_bare.end())
        marks = [mark for mark in (self._form.mark, self._form.inner_mark) if mark]
        mark_starts = [self._rest.find(mark) for mark in marks]
        mark_start = min((start for start in mark_starts if start >= 0), default=None)
        if mark_start is None:
            return NoMatch.ABSENT
        # `mark` is skipped; `inner_mark` is read with the call.
        begin = mark_start
        if self._rest.startswith(marks[0], mark_start):
            begin += len(marks[0])
        return _CallStart(len(self._rest[:mark_start].rstrip()), begin)

    def _skip_closing(self) -> int | NoMatch:
        """Remove the text that ends a call from the rest, unless another call follows directly.

        Returns:
            The index at which the next call's name or object begins, if one follows directly;
            `ABSENT` if not, after the text was removed; `UNCLEAR` if more text is needed.
        """
        if self._is_bare_object and not self._drop_extra_braces():
            return NoMatch.UNCLEAR
        # An object right after an object is the next call, whatever separates them.
        if self._form.keys is not None:
            n_between = len(self._rest) - len(self._rest.lstrip(_BETWEEN_OBJECTS))
            if self._rest.startswith("{", n_between):
                return n_between
            if n_between == len(self._rest) and not self._is_last:
                return NoMatch.UNCLEAR

        # Otherwise either the text between two calls follows, or the text that ends the last one.
        next_call_start = self._match(self._form.separator)
        closing_end = self._match_closing()
        if NoMatch.UNCLEAR in (next_call_start, closing_end) and not self._is_last:
            return NoMatch.UNCLEAR
        if isinstance(next_call_start, int):
            if not isinstance(closing_end, int):
                return next_call_start
            # Both match, so the longer one is meant, except at the end of the answer.
            is_end = self._is_last and not self._rest[next_call_start:].strip()
            if next_call_start >= closing_end and not is_end:
                return next_call_start
        self._is_after_call = False
        if closing_end is NoMatch.UNCLEAR:  # the answer ends within the closing text
            self._rest = ""
        elif isinstance(closing_end, int):
            self._take(closing_end)
        return NoMatch.ABSENT

    def _drop_extra_braces(self) -> bool:
        """Remove the braces after a bare call; return whether all of them have arrived."""
        self._rest = _EXTRA_BRACES.sub("", self._rest, count=1)
        return self._is_last or bool(self._rest.strip())

    def _match(self, literal: str) -> int | NoMatch:
        """Match a literal with the rest; an empty one does not match."""
        if not literal:
            return NoMatch.ABSENT
        return match(literal, self._rest, 0)

    def _match_closing(self) -> int | NoMatch:
        """Match the text that ends a call; all but its first mark may be missing."""
        closing = self._closing_fence or self._form.terminator
        closing_end = self._match(closing)
        first_tag = _FIRST_TAG.match(closing)
        if closing_end is NoMatch.ABSENT and first_tag is not None:
            closing_end = self._match(first_tag[0])
        if closing_end is NoMatch.ABSENT and self._is_bare_object and not self._closing_fence:
            closing_end = self._match_unopened_fence()
        return closing_end

    def _match_unopened_fence(self) -> int | NoMatch:
        """Match the end of a fence that the model has not opened before its call."""
        fence_end = longest_match((f"\n{end}" for end in _FENCES.values()), self._rest, 0)
        if isinstance(fence_end, NoMatch):
            return fence_end
        if fence_end == len(self._rest):
            return fence_end if self._is_last else NoMatch.UNCLEAR
        # A name after the fence means that it opens a block of code.
        return fence_end if self._rest[fence_end].isspace() else NoMatch.ABSENT

    # --- calls ------------------------------------------------------------------------------------

    def _read_calls(self, begin: int) -> _NewCalls | NoMatch:
        """Read a call up to its arguments, or whole calls if they are JSON objects.

        Args:
            begin: The index of the text after the call's mark.

        Returns:
            `ABSENT` if there is no call, or it is broken; `UNCLEAR` if more text is needed.
        """
        text = self._rest
        # The first of several calls decides whether they are in a fence.
        if not self._is_after_call:
            self._closing_fence = ""
            after_python_tag = text.lstrip().removeprefix(PYTHON_TAG).lstrip()
            for opening, closing in _FENCES.items():
                if after_python_tag.startswith(opening):
                    self._closing_fence = f"\n{closing}"
            self._is_bare_object = False
        # If calls are objects, skip the rest of the opening. A bare object has no opening.
        if self._form.keys is not None and not self._is_after_call:
            object_start = self._object_start(begin)
            if object_start is NoMatch.UNCLEAR:
                return object_start
            if isinstance(object_start, int):
                begin = max(begin, object_start)
        start = skip_space(text, begin)
        if start == len(text):
            return NoMatch.UNCLEAR
        before = text[:begin].strip()
        is_bare = before in ("", "{") or any(fence in before for fence in _FENCES)
        may_be_object = self._form.keys is not None or is_bare
        if text[start] in "{[" and may_be_object:
            if not self._is_after_call:
                self._is_bare_object = not self._form.mark or self._form.mark not in before
            return self._read_objects(start)
        return self._read_named_call(begin)

    def _object_start(self, begin: int) -> int | NoMatch:
        """Return the index after the part of the opening before a call's object.

        Args:
            begin: The index of the text after the call's mark.
        """
        form = self._form
        before_object = form.opening[: form.opening.find("{")].strip()
        mark_start = len(self._rest[:begin].rstrip()) - len(form.mark)
        return match(before_object, self._rest, max(0, mark_start))

    def _read_named_call(self, begin: int) -> _NewCalls | NoMatch:
        """Read a call that begins with the name of its function, up to its arguments."""
        form = self._form
        text = self._rest
        name_start: int | NoMatch = skip_space(text, begin)
        # The opening of the first call continues after its mark, which is where `begin` is.
        if not self._is_after_call:
            before = text[:begin].rstrip()
            if before.endswith(form.mark):
                name_start = match(form.opening, text, len(before) - len(form.mark))
            else:
                name_start = match(form.inner_mark, text, len(before))
        if isinstance(name_start, NoMatch):
            return name_start
        head = read_name(
            form,
            text,
            name_start,
            self._schemas,
            is_last=self._is_end,
        )
        if isinstance(head, NoMatch):
            return head
        self._open_parts = [_OpenPart(arguments_reader(form, self._schemas[head.name]))]
        return _NewCalls([_NewCall(head.name, None)], head.end)

    def _read_objects(self, begin: int) -> _NewCalls | NoMatch:
        """Read a JSON object that is a call, or a list of them, up to the first arguments.

        Objects whose name does not come before their arguments are read as a whole.
        """
        text = self._rest
        is_list_of_form = self._form.keys is not None and "[" in self._form.opening
        if text[begin] == "[" and is_list_of_form:  # its calls are read one by one
            begin = skip_space(text, begin + 1)
            if begin == len(text):
                return NoMatch.UNCLEAR
            if text[begin] != "{":
                return NoMatch.ABSENT

        if self._object.n_read < _MAX_OBJECT_HEAD:
            head = _object_head(self._form.keys).match(text, begin, begin + _MAX_OBJECT_HEAD)
            if head is not None and head[1] in self._schemas:
                # After the arguments, the object may have other fields.
                closing = self._closing_fence or self._form.terminator
                rest_of_object = ArgumentsReader("json", closing, is_open=True)
                self._open_parts = [
                    _OpenPart(ArgumentsReader("json", closing)),
                    _OpenPart(rest_of_object, is_arguments=False),
                ]
                return _NewCalls([_NewCall(head[1], None)], head.end())
        return self._read_whole_objects(begin)

    def _read_whole_objects(self, begin: int) -> _NewCalls | NoMatch:
        """Read on in a JSON value, and return the calls in it when it is complete.

        Returns:
            `UNCLEAR` until it is complete; `ABSENT` if anything in it is not a call.
        """
        unread_text = self._rest[begin + self._object.n_read :]
        parsed = self._object.reader.read(unread_text)
        self._object.n_read += parsed.n_read
        self._object.json += parsed.json
        if not parsed.is_over:
            return NoMatch.UNCLEAR
        values = json.loads(self._object.json or "null")
        if not isinstance(values, list):
            values = [values]
        calls: list[_NewCall] = []
        for value in values:
            call = self._call_of(value)
            if call is None:
                return NoMatch.ABSENT
            calls.append(call)
        if not calls:
            return NoMatch.ABSENT
        return _NewCalls(calls, begin + self._object.n_read)

    def _call_of(self, value: Any) -> _NewCall | None:
        """Return the call in a JSON value; None if it is not a call of a known function."""
        if not isinstance(value, dict):
            return None
        name_key, arguments_key = self._form.keys or ("name", "arguments")
        if (name_key, arguments_key) == ("", "") and len(value) == 1:
            ((name, arguments),) = value.items()
        else:
            # Besides the keys of the form, models use the customary ones.
            name = value.get(name_key, value.get("name"))
            customary_arguments = value.get("arguments", value.get("parameters"))
            arguments = value.get(arguments_key, customary_arguments)
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):  # JSON in a string
            parsed = ArgumentsReader("json").read(arguments, is_last=True)
            arguments = json.loads(parsed.json)
        if not isinstance(name, str) or name not in self._schemas:
            return None
        if not isinstance(arguments, dict):
            return None
        return _NewCall(name, json.dumps(arguments, ensure_ascii=False))


def _may_come_before_bare_call(text: str) -> bool:
    """Return whether a text may be the beginning of what comes before a bare call."""
    stripped = text.strip()
    after_python_tag = stripped.removeprefix(PYTHON_TAG).lstrip()
    is_tag_begun = PYTHON_TAG.startswith(stripped) or TOOLS_TAG.startswith(after_python_tag)
    return is_tag_begun or _MAY_COME_BEFORE_BARE_CALL.fullmatch(text) is not None


@functools.lru_cache(maxsize=16)
def _object_head(keys: tuple[str, str] | None) -> re.Pattern[str]:
    """Return a pattern for a JSON object that is a call, up to its arguments.

    Its first group is the name. Other fields may come before the name and the arguments if their
    values are neither lists nor objects.

    Args:
        keys: The keys of the name and of the arguments; see `CallForm.keys`.
    """
    if keys == ("", ""):
        return re.compile(r'\{\s*"([^"\\]+)"\s*:\s*(?=\{)')
    name_key, arguments_key = map(re.escape, keys or ("name", "arguments"))
    string = r'"(?:[^"\\]|\\.)*"'
    other_fields = rf"(?:{string}\s*:\s*(?:{string}|[-+.\w]+)\s*,\s*)*?"
    return re.compile(
        rf'\{{\s*{other_fields}"(?:{name_key}|name)"\s*:\s*"([^"\\]+)"\s*,\s*'
        rf'{other_fields}"(?:{arguments_key}|arguments|parameters)"\s*:\s*(?=\{{)'
    )
