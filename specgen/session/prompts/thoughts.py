"""Thinking blocks, which some models write between marks before their answer."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import replace

from specgen.options import GenerationOptions
from specgen.text.grammar.free_text import ANY, ThoughtMarks
from specgen.text.overlap import partial_match_length

#: The marks of each family of models, by which an answer begins or a prompt ends.
FAMILIES = (
    ThoughtMarks("<think>", "</think>"),
    # Mistral
    ThoughtMarks("[THINK]", "[/THINK]"),
    ThoughtMarks("<seed:think>", "</seed:think>"),
    # MiniMax M3
    ThoughtMarks("<mm:think>", "</mm:think>", before=("</mm:think>",)),
    # Hunyuan 3
    ThoughtMarks("<think:opensource>", "</think:opensource>"),
    # Apriel
    ThoughtMarks("<thinking>", "</thinking>"),
    # Apertus
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    # Gemma 4, which may repeat its marks after the answer
    ThoughtMarks(
        "<|channel>thought",
        "<channel|>",
        after=("<|channel>thought\n<channel|>", "<|channel>", "<channel|>"),
    ),
    # Command
    ThoughtMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        before=("<|START_RESPONSE|>", "<|START_TEXT|>"),
        after=("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    # Kimi K3
    ThoughtMarks(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        before=("<|open|>response<|sep|>",),
        after=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    # gpt-oss
    ThoughtMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        before=(
            "<|start|>assistant<|channel|>final<|message|>",
            "<|channel|>final<|message|>",
            f"<|channel|>final <|constrain|>{ANY}<|message|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>commentary",
            "<|channel|>analysis",
            "<|start|>assistant",
            "<|end|>",
        ),
        final="<|message|>",
    ),
    # Solar
    ThoughtMarks(
        "<|think|>",
        "<|end|>",
        before=("<|begin|>assistant<|content|>", "<|content|>", "<|begin|>assistant"),
    ),
    # Muse Glimmer
    ThoughtMarks(
        "to=self<|message|>",
        "<|eom|>",
        before=(f"<|start|>assistant to={ANY}<|message|>", f"to={ANY}<|message|>"),
        after=("<|eom|>", "<|start|>assistant"),
    ),
    # Apriel 1.6
    ThoughtMarks("<|begin_assistant|>\nHere are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
#: What an answer with thoughts, or after thoughts, may begin with.
_FIRST_MARKS = tuple(mark for family in FAMILIES for mark in family.first)
_CONTROL_NAME = re.compile(r"<[^<>]+>|\[/?[A-Z]+\]")


def _control_names() -> tuple[str, ...]:
    names: dict[str, None] = {}  # a set that keeps the order
    for family in FAMILIES:
        for mark in (family.begin, family.end, *family.around):
            names.update(dict.fromkeys(_CONTROL_NAME.findall(mark)))
    return tuple(names)


#: Names of control tokens among the marks: a reader sees them only if the text shows them.
THOUGHT_CONTROLS = _control_names()


def showing_thoughts(options: GenerationOptions) -> GenerationOptions:
    """Return the options for an answer that shows the marks of thoughts in its text."""
    return replace(options, shown_controls=THOUGHT_CONTROLS)


def writes_thoughts(template: str) -> bool:
    """Return whether a chat template, or a grammar, knows of thoughts."""
    return any(family.begin in template for family in FAMILIES)


def begun_in(prompt: str) -> ThoughtMarks | None:
    """Return the marks of the thoughts that a prompt has opened; None if it has not."""
    end = prompt.rstrip()
    return next((family for family in FAMILIES if end.endswith(family.begin)), None)


def thoughts_after(prompt: str, template: str) -> ThoughtMarks | None:
    """Return the marks of the thoughts that an answer to a prompt may have.

    None if the template knows of none.
    """
    begun = begun_in(prompt)
    if begun is not None:
        return replace(begun, state="open")
    end = prompt.rstrip()
    for family in FAMILIES:
        if end.endswith(family.end):
            return replace(family, state="over")
    return next((family for family in FAMILIES if family.begin in template), None)


# --- a reader ---------------------------------------------------------------------------------


class _ReaderPlace(enum.Enum):
    """Where in an answer a reader is."""

    BEGINNING = enum.auto()
    THOUGHT = enum.auto()
    ANSWER = enum.auto()


class ThoughtReader:
    """Separates the thinking block at an answer's beginning from the rest, in pieces."""

    def __init__(self, prompt: str = "") -> None:
        self._marks = begun_in(prompt)
        self._place = _ReaderPlace.BEGINNING if self._marks is None else _ReaderPlace.THOUGHT
        #: The end of the text so far, which may be the beginning of a mark.
        self._held = ""
        #: Whether white space that comes next is between thought and answer.
        self._strips = True

    @property
    def is_open(self) -> bool:
        """Whether a thought has begun, perhaps in the prompt, and is not over."""
        return self._place is _ReaderPlace.THOUGHT

    @property
    def is_past(self) -> bool:
        """Whether the thought is over, or there is none: later marks are the answer's."""
        return self._place is _ReaderPlace.ANSWER

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new parts of the thought and of the answer.

        What may be the beginning of a mark is held back.
        """
        text = self._held + text
        self._held = ""
        if self._place is _ReaderPlace.BEGINNING:
            text = self._begin(text)
        if self._place is _ReaderPlace.BEGINNING:
            self._held = text
            return "", ""
        if self._place is _ReaderPlace.ANSWER:
            return "", self._answer(text)
        return self._thought(text)

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, in the form of `feed`."""
        held = self._held
        self._held = ""
        return (held, "") if self.is_open else ("", held)

    def _begin(self, text: str) -> str:
        """Decide whether the answer begins with a thought; return the text after its mark."""
        begun = text.lstrip()
        if any(mark.startswith(begun) and mark != begun for mark in _FIRST_MARKS):
            return text
        self._marks = next((each for each in FAMILIES if begun.startswith(each.first)), None)
        if self._marks is not None and begun.startswith(self._marks.begin):
            self._place = _ReaderPlace.THOUGHT
            return begun.removeprefix(self._marks.begin)
        self._place = _ReaderPlace.ANSWER
        self._strips = self._marks is not None
        return text

    def _thought(self, text: str) -> tuple[str, str]:
        assert self._marks is not None, "a thought has marks"
        ends = [mark for mark in (self._marks.end, *self._marks.before) if ANY not in mark]
        places = [text.find(mark) for mark in ends if mark in text]
        if not places:
            n_held = max(partial_match_length(text, mark) for mark in ends)
            thought, self._held = _cut(text, n_held)
            return thought, ""
        self._place = _ReaderPlace.ANSWER
        end = min(places)
        answer = text[end:].removeprefix(self._marks.end)
        return text[:end], self._answer(answer)

    def _answer(self, text: str) -> str:
        marks = self._marks.around if self._marks is not None else ()
        n_held = max((_held_length(text, mark) for mark in marks), default=0)
        text, self._held = _cut(text, n_held)
        text = without_marks(text, marks)
        if self._strips:
            text = text.lstrip()
            self._strips = text == ""
        return text


def split_thought(prompt: str, text: str) -> tuple[str, str]:
    """Return the thought and the answer of a whole text."""
    reader = ThoughtReader(prompt)
    thought, answer = reader.feed(text)
    more_thought, more_answer = reader.finish()
    return (thought + more_thought).strip(), answer + more_answer


def without_marks(text: str, marks: Iterable[str]) -> str:
    """Return a text without the marks in it."""
    for mark in marks:
        text = re.sub(re.escape(mark).replace(ANY, r"[^\s<>]+"), "", text)
    return text


def _cut(text: str, n_last: int) -> tuple[str, str]:
    """Return a text without its last characters, and these."""
    return text[: len(text) - n_last], text[len(text) - n_last :]


def _held_length(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    beginning, has_name, ending = mark.partition(ANY)
    place = text.rfind(beginning)
    if has_name and place >= 0:
        after_name = re.sub(r"\A[^\s<>]*", "", text[place + len(beginning) :])
        if len(after_name) < len(ending) and ending.startswith(after_name):
            return len(text) - place
    return partial_match_length(text, beginning)


# --- a writer ---------------------------------------------------------------------------------


class _LastWritten(enum.Enum):
    """What a marker has written last."""

    NOTHING = enum.auto()
    BEGIN = enum.auto()
    END = enum.auto()
    GAP = enum.auto()


class ThoughtMarker:
    """Writes an answer with its thoughts between ``<think>`` and ``</think>``, whatever the model.

    Thoughts before an answer that follows a grammar are left out, unless the grammar has them.
    """

    def __init__(self, prompt: str = "", grammar: str | None = None) -> None:
        self._reader = ThoughtReader(prompt)
        self._drops = grammar is not None and not writes_thoughts(grammar)
        self._written = _LastWritten.NOTHING

    def feed(self, text: str) -> str:
        """Return the new part of the answer."""
        return self._marked(*self._reader.feed(text))

    def finish(self) -> str:
        """Return the rest."""
        return self._marked(*self._reader.finish())

    def _marked(self, thought: str, answer: str) -> str:
        if self._drops:
            return answer
        text = ""
        if (thought or self._reader.is_open) and self._written is _LastWritten.NOTHING:
            text += "<think>"
            self._written = _LastWritten.BEGIN
        text += thought
        if self._reader.is_past and self._written is _LastWritten.BEGIN:
            text += "</think>"
            self._written = _LastWritten.END
        if answer and self._written is _LastWritten.END:
            text += "\n\n"
            self._written = _LastWritten.GAP
        return text + answer
