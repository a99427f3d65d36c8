"""Thinking blocks, which some models write between marks before their answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from specgen.options import GenerationOptions
from specgen.text.grammar.free_text import ANY, ThoughtMarks
from specgen.text.overlap import partial_match_length

_GEMMA = ("<|channel>", "<channel|>")
#: By what an answer begins with, or a prompt ends with.
FAMILIES = (
    ThoughtMarks("<think>", "</think>"),
    ThoughtMarks("[THINK]", "[/THINK]"),  # Mistral
    ThoughtMarks("<seed:think>", "</seed:think>"),
    ThoughtMarks("<mm:think>", "</mm:think>", ("</mm:think>",)),  # MiniMax M3
    ThoughtMarks("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ThoughtMarks("<thinking>", "</thinking>"),  # Apriel
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    # Gemma 4 may repeat its marks behind the answer.
    ThoughtMarks("<|channel>thought", "<channel|>", (), ("<|channel>thought\n<channel|>", *_GEMMA)),
    ThoughtMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|START_TEXT|>"),
        ("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),  # Command
    ThoughtMarks(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>",),
        ("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),  # Kimi K3
    ThoughtMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        (
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
    ),  # gpt-oss
    ThoughtMarks(
        "<|think|>",
        "<|end|>",
        ("<|begin|>assistant<|content|>", "<|content|>", "<|begin|>assistant"),
    ),  # Solar
    ThoughtMarks(
        "to=self<|message|>",
        "<|eom|>",
        (f"<|start|>assistant to={ANY}<|message|>", f"to={ANY}<|message|>"),
        ("<|eom|>", "<|start|>assistant"),
    ),  # Muse Glimmer
    ThoughtMarks(
        "<|begin_assistant|>\nHere are my reasoning steps:", "[BEGIN FINAL RESPONSE]"
    ),  # Apriel 1.6
)
#: Names of control tokens among the marks: a reader sees them only if the text shows them.
THOUGHT_CONTROLS = tuple(
    dict.fromkeys(
        name
        for family in FAMILIES
        for text in (family.begin, family.end, *family.around)
        for name in re.findall(r"<[^<>]+>|\[/?[A-Z]+\]", text)
    )
)


def writes_thoughts(template: str) -> bool:
    return any(family.begin in template for family in FAMILIES)


def begun_in(prompt: str) -> ThoughtMarks | None:
    end = prompt.rstrip()
    return next((family for family in FAMILIES if end.endswith(family.begin)), None)


def thoughts_behind(prompt: str, template: str) -> ThoughtMarks | None:
    """Return the marks of the thoughts that an answer to a prompt may have; None if the template
    knows of none.
    """
    if (begun := begun_in(prompt)) is not None:
        return replace(begun, state="open")
    end = prompt.rstrip()
    over = next((family for family in FAMILIES if end.endswith(family.end)), None)
    if over is not None:
        return replace(over, state="over")
    return next((family for family in FAMILIES if family.begin in template), None)


# --- the reader

_FIRST = tuple(mark for family in FAMILIES for mark in family.first)


class ThoughtReader:
    """Separates the thinking block at an answer's beginning from the rest, in pieces. `is_open`: it
    began, perhaps in the prompt; `is_past`: it is over, or there is none, and later marks are the
    answer's.
    """

    def __init__(self, prompt: str = "") -> None:
        self._marks = begun_in(prompt)
        self.is_open, self.is_past = self._marks is not None, False
        self._held, self._is_beginning = "", True

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new parts of the thought and of the answer. The beginning of a mark is held
        back.
        """
        text, self._held = self._held + text, ""
        if not self.is_open and not self.is_past:
            begun = text.lstrip()
            if any(mark.startswith(begun) and mark != begun for mark in _FIRST):
                self._held = text
                return "", ""
            self._marks = next((each for each in FAMILIES if begun.startswith(each.first)), None)
            if self._marks is not None and begun.startswith(self._marks.begin):
                self.is_open, text = True, begun.removeprefix(self._marks.begin)
            else:
                self.is_past, self._is_beginning = True, self._marks is not None
        if self.is_past:
            return "", self._answer(text)
        assert self._marks is not None
        ends = [each for each in (self._marks.end, *self._marks.before) if ANY not in each]
        places = [place for each in ends if (place := text.find(each)) >= 0]
        if places:
            self.is_open, self.is_past = False, True
            answer = text[min(places) :].removeprefix(self._marks.end)
            return text[: min(places)], self._answer(answer)
        n_held = max(partial_match_length(text, each) for each in ends)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], ""

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, in the form of `feed`."""
        held, self._held = self._held, ""
        return (held, "") if self.is_open else ("", held)

    def _answer(self, text: str) -> str:
        around = self._marks.around if self._marks is not None else ()
        n_held = max((_n_held(text, mark) for mark in around), default=0)
        text, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        text = without_marks(text, around)
        if self._is_beginning:
            text = text.lstrip()
            self._is_beginning = not text
        return text


def without_marks(text: str, marks: Iterable[str]) -> str:
    for mark in marks:
        text = re.sub(re.escape(mark).replace(ANY, r"[^\s<>]+"), "", text)
    return text


def _n_held(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may begin a mark."""
    head, has_name, tail = mark.partition(ANY)
    place = text.rfind(head)
    if has_name and place >= 0:
        behind = re.sub(r"\A[^\s<>]*", "", text[place + len(head) :])
        if len(behind) < len(tail) and tail.startswith(behind):
            return len(text) - place
    return partial_match_length(text, head)


class ThoughtMarker:
    """Writes an answer with its thoughts between ``<think>`` and ``</think>``; one with a grammar
    has none.
    """

    def __init__(self, prompt: str = "", grammar: str | None = None) -> None:
        self._reader = ThoughtReader(prompt)
        self._drops = grammar is not None and not writes_thoughts(grammar)
        self._next = ["<think>", "</think>", "\n\n"]

    def feed(self, text: str) -> str:
        return self._marked(*self._reader.feed(text))

    def finish(self) -> str:
        return self._marked(*self._reader.finish())

    def _marked(self, thought: str, answer: str) -> str:
        if self._drops:
            return answer
        text = ""
        if (thought or self._reader.is_open) and len(self._next) == 3:
            text += self._next.pop(0)
        text += thought
        if self._reader.is_past and len(self._next) == 2:
            text += self._next.pop(0)
        if answer and len(self._next) == 1:
            text += self._next.pop(0)
        return text + answer


def showing_thoughts(options: GenerationOptions) -> GenerationOptions:
    return replace(options, shown_controls=THOUGHT_CONTROLS)


def split_thought(prompt: str, text: str) -> tuple[str, str]:
    reader = ThoughtReader(prompt)
    (thought, answer), (more_thought, more_answer) = reader.feed(text), reader.finish()
    return (thought + more_thought).strip(), answer + more_answer
