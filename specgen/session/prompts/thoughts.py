"""Thoughts: the thinking blocks that some models write, between marks, before their answer."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import replace

from specgen.options import GenerationOptions
from specgen.text.grammar.free_text import ANY, ThoughtMarks
from specgen.text.overlap import partial_match_length

#: The marks of each family of models. An answer begins, or the prompt ends, with one that opens a
#: thought.
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
#: The marks that an answer may begin with.
_FIRST_MARKS = tuple(mark for family in FAMILIES for mark in family.first)
#: Matches what looks like the name of a control token.
_CONTROL_NAME = re.compile(r"<[^<>]+>|\[/?[A-Z]+\]")


def _control_names() -> tuple[str, ...]:
    """Return the names of control tokens in the marks of all families, each once."""
    names: dict[str, None] = {}  # a set that keeps the order
    for family in FAMILIES:
        for mark in (family.begin, family.end, *family.around):
            names.update(dict.fromkeys(_CONTROL_NAME.findall(mark)))
    return tuple(names)


#: The names of the control tokens in marks. The text of an answer must show these tokens, or
#: a `ThoughtReader` cannot find the marks.
THOUGHT_CONTROLS = _control_names()


def showing_thoughts(options: GenerationOptions) -> GenerationOptions:
    """Return the options changed so that the text of an answer shows the marks of thoughts."""
    return replace(options, shown_controls=THOUGHT_CONTROLS)


def writes_thoughts(template: str) -> bool:
    """Return whether a chat template, or a grammar, contains a mark that opens thoughts."""
    return any(family.begin in template for family in FAMILIES)


def begun_in(prompt: str) -> ThoughtMarks | None:
    """Return the marks of the thoughts that the end of a prompt opens; None if it opens none."""
    prompt = prompt.rstrip()
    return next((family for family in FAMILIES if prompt.endswith(family.begin)), None)


def thoughts_after(prompt: str, template: str) -> ThoughtMarks | None:
    """Return the marks of the thoughts that an answer to a prompt may have.

    Args:
        prompt: The text of the prompt. It may already open thoughts, or close empty ones.
        template: The chat template that made the prompt.

    Returns:
        The marks; None if neither the prompt nor the template has any.
    """
    marks = begun_in(prompt)
    if marks is not None:
        return replace(marks, state="open")
    prompt = prompt.rstrip()
    for family in FAMILIES:
        if prompt.endswith(family.end):
            return replace(family, state="over")
    return next((family for family in FAMILIES if family.begin in template), None)


# --- a reader ---------------------------------------------------------------------------------


class _ReaderPlace(enum.Enum):
    """How far a reader has come in the text of an answer."""

    #: It is not known yet whether the text begins with a thought.
    BEGINNING = enum.auto()
    #: Within the thought.
    THOUGHT = enum.auto()
    #: After the thought, or there is none.
    ANSWER = enum.auto()


class ThoughtReader:
    """Separates the thought at the beginning of an answer from the rest, as the text arrives.

    Args:
        prompt: The text of the prompt, which may have opened the thought.
    """

    def __init__(self, prompt: str = "") -> None:
        #: The marks of the model's family; None until the text shows it, or if there are none.
        self._marks = begun_in(prompt)
        self._place = _ReaderPlace.BEGINNING if self._marks is None else _ReaderPlace.THOUGHT
        #: The end of the text so far that may be the beginning of a mark, so that it is not
        #: returned yet.
        self._held = ""
        #: Whether white space that comes next is dropped: it separates the thought from the answer.
        self._strips = True

    @classmethod
    def read(cls, text: str, prompt: str = "") -> tuple[str, str]:
        """Return the thought and the answer in the complete text of an answer.

        Args:
            text: The text with marks.
            prompt: The text of the prompt, which may have opened the thought.
        """
        reader = cls(prompt)
        thought, answer = reader.feed(text)
        last_thought, last_answer = reader.finish()
        return thought + last_thought, answer + last_answer

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends within a thought, which the prompt may have opened."""
        return self._place is _ReaderPlace.THOUGHT

    @property
    def is_past(self) -> bool:
        """Whether the thought is over, or there is none. No other thought can follow."""
        return self._place is _ReaderPlace.ANSWER

    def feed(self, text: str) -> tuple[str, str]:
        """Read the next piece of the text.

        Returns:
            The new part of the thought; the new part of the answer. They have no marks, and text
            that may be the beginning of a mark is held back for the next call.
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
        """End the text: return the parts of thought and answer that were held back, as `feed`."""
        held = self._held
        self._held = ""
        return (held, "") if self.is_open else ("", held)

    def _begin(self, text: str) -> str:
        """Decide whether the answer begins with a thought.

        While that cannot be decided, `_place` stays at the beginning.

        Args:
            text: All of the answer so far.

        Returns:
            The text after the mark that opens the thought; the whole text if there is none.
        """
        beginning = text.lstrip()
        if any(mark.startswith(beginning) and mark != beginning for mark in _FIRST_MARKS):
            return text  # it may become a mark
        self._marks = next((each for each in FAMILIES if beginning.startswith(each.first)), None)
        if self._marks is not None and beginning.startswith(self._marks.begin):
            self._place = _ReaderPlace.THOUGHT
            return beginning.removeprefix(self._marks.begin)
        self._place = _ReaderPlace.ANSWER
        # Without any mark, white space at the beginning belongs to the answer.
        self._strips = self._marks is not None
        return text

    def _thought(self, text: str) -> tuple[str, str]:
        """Read text within a thought; return the new parts of the thought and of the answer."""
        assert self._marks is not None, "a thought has marks"
        # The beginning of the answer ends a thought, too, even if the mark of its end is missing.
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
        """Read text after the thought; return the new part of the answer, without marks."""
        marks = self._marks.around if self._marks is not None else ()
        n_held = max((_held_length(text, mark) for mark in marks), default=0)
        text, self._held = _cut(text, n_held)
        text = without_marks(text, marks)
        if self._strips:
            text = text.lstrip()
            self._strips = text == ""
        return text


def split_thought(prompt: str, text: str) -> tuple[str, str]:
    """Return the thought, without white space around it, and the answer in a complete text.

    Args:
        prompt: The text of the prompt, which may have opened the thought.
        text: The text with marks.
    """
    thought, answer = ThoughtReader.read(text, prompt)
    return thought.strip(), answer


def without_marks(text: str, marks: Iterable[str]) -> str:
    """Return a text without the marks in it. `ANY` in a mark stands for any name."""
    for mark in marks:
        text = re.sub(re.escape(mark).replace(ANY, r"[^\s<>]+"), "", text)
    return text


def _cut(text: str, n_last: int) -> tuple[str, str]:
    """Split a text before its last `n_last` characters."""
    return text[: len(text) - n_last], text[len(text) - n_last :]


def _held_length(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a mark."""
    # A mark may be "<beginning>name<ending>" with any name.
    beginning, has_name, ending = mark.partition(ANY)
    if has_name:
        n_of_ending = partial_match_length(text, ending)
        before_ending = text[: len(text) - n_of_ending]
        # A name may contain the beginning of the mark, so the first place counts.
        begun = re.search(re.escape(beginning) + r"[^\s<>]*\Z", before_ending)
        if begun is not None:
            return len(text) - begun.start()
    return partial_match_length(text, beginning)


# --- a writer ---------------------------------------------------------------------------------


class _LastWritten(enum.Enum):
    """How much a `ThoughtMarker` has written."""

    #: No thought so far.
    NOTHING = enum.auto()
    #: The mark that opens the thought.
    BEGIN = enum.auto()
    #: The mark that closes the thought.
    END = enum.auto()
    #: The empty line between the thought and the answer.
    GAP = enum.auto()


class ThoughtMarker:
    """Rewrites answers of any model so that thoughts are between ``<think>`` and ``</think>``.

    Thoughts before an answer with a grammar are left out, unless the grammar includes them.

    Args:
        prompt: The text of the prompt, which may have opened the thought.
        grammar: The text of the grammar that the answer follows; None if there is none.
    """

    def __init__(
        self,
        prompt: str = "",
        grammar: str | None = None,
    ) -> None:
        self._reader = ThoughtReader(prompt)
        self._drops = grammar is not None and not writes_thoughts(grammar)
        self._written = _LastWritten.NOTHING

    def feed(self, text: str) -> str:
        """Read the next piece of an answer, and return the next piece of the rewritten text."""
        return self._marked(*self._reader.feed(text))

    def finish(self) -> str:
        """End the answer, and return the last piece of the rewritten text."""
        return self._marked(*self._reader.finish())

    def _marked(self, thought: str, answer: str) -> str:
        """Return new parts of the thought and the answer, with the marks that are due."""
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
