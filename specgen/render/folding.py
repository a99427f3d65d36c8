"""The thinking block of an answer on a terminal: dim, and in a conversation replaced by one line when it is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specgen.render.rows import Flow, Row, Run
from specgen.session.prompts.thought_reader import ThoughtReader
from specgen.system.progress import counted

#: Rows of a thinking block that are shown while it is generated.
_N_ROWS = 5


class Thought:
    """The thinking block of one answer, dim above the rest of it."""

    def __init__(self, flow: Flow, prompt: str) -> None:
        self.flow = flow  # of rows that stand for the answer while the block is open
        self._reader = ThoughtReader(prompt)
        self._rows: list[Row] = []
        self._is_blank = True
        self._first_s: float | None = None
        self._last_s, self._n_tokens = 0.0, 0

    @property
    def is_open(self) -> bool:
        """Whether the last rows of the block are shown in place of the answer."""
        return False

    def take(self, runs: Iterable[Run], time_s: float, n_tokens: int) -> Iterator[Run]:
        """Take the text that a round added, at `time_s` with `n_tokens` tokens in all; yield what is shown of it."""
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
            yield from self._shown(Run(thoughts, "faint"))
        if self._first_s is not None and not self._reader.is_open:
            yield from self.fold()
        yield from answer

    def fold(self) -> Iterator[Run]:
        """Yield what ends the thinking block once, if there was one, and then text that was held back as a possible
        tag."""
        if self._first_s is not None:
            about = f"{self._last_s - self._first_s:.1f} s, {counted(self._n_tokens, 'token')}"
            self._first_s = None
            yield Run(self._end(about), "faint")
        if answer := self._reader.finish()[1]:
            yield Run(answer, "plain")

    def rows(self, n_most: int) -> list[Row]:
        """Return the last rows of the thinking block."""
        self._rows = (self._rows + self.flow.take_settled(1, 1))[-_N_ROWS:]
        return (self._rows + self.flow.rows)[-min(n_most, _N_ROWS) :]

    def _shown(self, run: Run) -> Iterator[Run]:
        yield run

    def _end(self, _about: str) -> str:
        return "\n\n"


class FoldedThought(Thought):
    """The thinking block of one answer: its last rows while it is generated, then one line in its place."""

    @property
    def is_open(self) -> bool:
        return self._reader.is_open

    def _shown(self, run: Run) -> Iterator[Run]:
        self.flow.feed([run])
        yield from ()

    def _end(self, about: str) -> str:
        return f"thought for {about} (/think shows it)\n"
