"""Thinking blocks, which some models write between tags before their answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specgen.render.marks import Run
from specgen.render.rows import Flow, Row
from specgen.render.text import counted

_BEGIN, _END = "<think>", "</think>"
#: Rows of a thinking block that are shown while it is generated.
_N_ROWS = 5


class ThoughtReader:
    """Separates the thinking block at the beginning of an answer from the rest, in text that comes in pieces.

    A model begins with it or has none; a tag further back is part of the answer. Some templates write the
    first tag themselves: `is_begun`.
    """

    def __init__(self, *, is_begun: bool = False) -> None:
        self._held = ""
        #: Whether the thinking block is open.
        self.is_open = is_begun
        #: Whether the text from here on is the answer.
        self.is_past = False
        self._is_space = True

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new parts of the thinking block and of the answer; empty lines between the two belong to
        neither. The beginning of a tag is held back."""
        if self.is_past:
            return "", self._answer(text)
        text, self._held = self._held + text, ""
        if not self.is_open:
            begun = text.lstrip()
            if len(begun) < len(_BEGIN) and _BEGIN.startswith(begun):
                self._held = text
                return "", ""
            if not begun.startswith(_BEGIN):
                self.is_past, self._is_space = True, False
                return "", text
            self.is_open, text = True, begun.removeprefix(_BEGIN)
        thought, end, answer = text.partition(_END)
        if end:
            self.is_open, self.is_past = False, True
            return thought, self._answer(answer)
        n_held = next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], ""

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, in the form of `feed`."""
        held, self._held = self._held, ""
        return (held, "") if self.is_open else ("", held)

    def _answer(self, text: str) -> str:
        if self._is_space:
            text = text.lstrip()
            self._is_space = not text
        return text


def is_thinking(prompt: str) -> bool:
    """Return whether a template has opened a thinking block at the end of a prompt."""
    return prompt.rstrip().endswith(_BEGIN)


def thought_of(prompt: str, text: str) -> str:
    """Return the thinking block at the beginning of an answer to a prompt; empty if there is none."""
    reader = ThoughtReader(is_begun=is_thinking(prompt))
    return (reader.feed(text)[0] + reader.finish()[0]).strip()


class FoldedThought:
    """The thinking block of one answer on a terminal: its last rows while it is generated, then one line in
    its place."""

    def __init__(self, columns: int, encoding: str, *, is_begun: bool) -> None:
        self._reader = ThoughtReader(is_begun=is_begun)
        self._flow = Flow(columns, encoding)
        self._rows: list[Row] = []
        self._is_blank = True
        self._first_s: float | None = None
        self._last_s = 0.0
        self._n_tokens = 0

    @property
    def is_open(self) -> bool:
        return self._reader.is_open

    def take(self, runs: Iterable[Run], time_s: float, n_tokens: int) -> Iterator[Run]:
        """Keep the thinking part of the text that a round added, at `time_s` with `n_tokens` tokens in all;
        yield the rest, after a line that stands for the block."""
        was_open = self._reader.is_open
        thoughts, answer = "", []
        for text, mark in runs:
            if mark in ("rejected", "aside", "faint") and not self._reader.is_past:
                continue
            thought, rest = self._reader.feed(text)
            thoughts += thought
            if rest:
                answer.append(Run(rest, mark))
        if was_open or self._reader.is_open or thoughts:
            if self._first_s is None:
                self._first_s = time_s
            if self._is_blank:
                thoughts = thoughts.lstrip()
                self._is_blank = not thoughts
            self._last_s, self._n_tokens = time_s, n_tokens
            self._flow.feed([Run(thoughts, "faint")])
        if self._first_s is not None and not self._reader.is_open:
            yield from self.fold()
        yield from answer

    def fold(self) -> Iterator[Run]:
        """Yield the line for the thinking block once, if there was one, and then text that was held back as a
        possible tag."""
        if self._first_s is not None:
            seconds = self._last_s - self._first_s
            tokens = counted(self._n_tokens, "token")
            self._first_s = None
            yield Run(f"thought for {seconds:.1f} s, {tokens} (/think shows it)\n", "faint")
        answer = self._reader.finish()[1]
        if answer:
            yield Run(answer, "plain")

    def resize(self, columns: int) -> None:
        """Lay out the rows that may still change for another width."""
        self._flow.resize(columns)

    def rows(self, n_most: int) -> list[Row]:
        """Return the last rows of the thinking block."""
        self._rows = (self._rows + self._flow.take_settled(1, 1))[-_N_ROWS:]
        return (self._rows + list(self._flow.rows))[-min(n_most, _N_ROWS) :]


__all__ = ["FoldedThought", "ThoughtReader", "is_thinking", "thought_of"]
