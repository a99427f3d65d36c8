"""The live view on a terminal: the text, round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    PromptEvent,
    ReadingEvent,
    VerifiedEvent,
)
from specgen.options import Show
from specgen.render.rows import (
    LEGEND,
    Cell,
    Flow,
    Pens,
    Round,
    RoundReader,
    Row,
    Run,
    append_cells,
    clean_line,
    coded,
    pens,
    wrap,
)
from specgen.render.streams import Renderer, reading
from specgen.session.prompts.thoughts import ThoughtReader
from specgen.system.quantities import counted

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_WRAP_ON, _WRAP_OFF = "\x1b[?7h", "\x1b[?7l"
_ERASE_RIGHT, _ERASE_BELOW = "\x1b[K", "\x1b[J"

#: The rows of the unfinished line that are repainted in each round, and laid out again when the
#: window changes; there may be more if rows of one line are to be copied in one piece. Earlier rows
#: belong to the terminal.
_MOVING_ROWS, _MOST_MOVING_ROWS = 3, 12
_GAP = "    "


class Line(NamedTuple):
    """One row of the screen, ready to be written."""

    codes: str
    #: It reaches the right edge; nothing is left to be erased there.
    full: bool = False


class Region:
    """Writes rows that stay, and below them rows that are replaced the next time."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._open = False

    def paint(self, settled: str, moving: Sequence[Line]) -> None:
        """Let `settled` rows scroll away for good; `moving` is the new region, less than the
        screen.
        """
        parts = ["\r"] if self._open else [_HIDE_CURSOR, "\r"]
        if settled:
            parts += (_ERASE_BELOW, settled)
        parts.append(_WRAP_OFF)
        for line in moving[:-1]:
            # A row that reaches the edge leaves nothing to erase.
            parts += (line.codes, "" if line.full else _ERASE_RIGHT, "\n")
        last = moving[-1]
        # After a full row the cursor is still on its last column, and erasing would hit it.
        parts += (last.codes, "\n" if last.full else "", _ERASE_BELOW, _WRAP_ON)
        n_up = len(moving) - 1 + last.full
        parts.append(f"\x1b[{n_up}A\r" if n_up else "\r")
        self._open = True
        self._write("".join(parts))

    def erase(self) -> None:
        """Remove the region, so that something else can be printed in its place."""
        if self._open:
            self._write(f"\r{_ERASE_BELOW}")

    def close(self, settled: str) -> None:
        if self._open or settled:
            self._open = False
            self._write(f"\r{_ERASE_BELOW}{settled}{_SHOW_CURSOR}")


class LiveRenderer(Renderer):
    """Shows one generation on a terminal that understands escape codes. Text that can no longer
    change scrolls away. Below it, the end of the text is repainted in each round, followed by what
    this round rejected (if `show` is ``accepted``), and a line with the legend and the speed. With
    `thinks`, a thinking block may come first, which `folds`. `notice` prints notices; without it
    there are none.
    """

    def __init__(
        self,
        console: Console,
        show: Show = "accepted",
        notice: Callable[[NoticeEvent], None] | None = None,
        *,
        thinks: bool = False,
        folds: bool = False,
    ) -> None:
        self._console, self._show, self._notice = console, show, notice
        self._thinks, self._folds = thinks or folds, folds
        self._pens = pens(console)
        self._rounds = RoundReader()
        self._region = Region(self._write)
        self._flow = Flow(max(2, console.width))
        self._status = _Status()
        self._rejected: tuple[str, ...] = ()
        self._thought: Thought | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, FinishedEvent):
            self.close()
            return
        if isinstance(event, NoticeEvent):
            if self._notice is None:
                return
            self._region.erase()
            self._notice(event)
        self._status.update(event)
        if isinstance(event, PromptEvent) and self._thinks:
            self._thought = Thought(Flow(self._flow.columns), event.text, self._folds)
        completed = self._rounds.read(event)
        if completed is not None:
            self._add(completed)
        if not isinstance(event, (DraftedEvent, VerifiedEvent)):
            self._paint()

    def _add(self, completed: Round) -> None:
        self._fit()
        event = completed.committed
        runs = completed.runs(shows_all=self._show == "all")
        if self._show == "none":
            runs = (Run(text, "plain") for text, _ in runs)
        if self._thought is not None:
            runs = self._thought.take(runs, event.time_s, event.n_tokens)
        self._flow.feed(runs)
        if self._show == "accepted":
            self._rejected = tuple(branch.text for branch in completed.rejected if branch.text)

    def _finish(self) -> None:
        self._fit()
        if self._thought is not None:
            self._flow.feed(self._thought.fold())
        self._region.close(self._settled(self._flow.finish()))

    def _fit(self) -> None:
        """Lay the text out again if the window's width has changed: before text is added, which
        settles rows.
        """
        columns = max(2, self._console.width)
        for flow in (self._flow, *([self._thought.flow] if self._thought is not None else ())):
            if columns != flow.columns:
                flow.resize(columns)

    def _paint(self) -> None:
        self._fit()
        height = self._console.height
        # A spare row keeps the status line in place if rejected text needs a second row.
        n_spare, n_status = (0, 0) if self._show == "none" else (height >= 6, height >= 4)
        room, last_column = max(1, height - n_spare - n_status - 1), self._flow.columns - 1
        status = [Line(self._status.codes(last_column, self._pens))] if n_status else []
        if self._thought is not None and self._thought.is_open:
            self._region.paint("", [*self._lines(self._thought.rows(room)), *status])
            return
        rows = self._flow.take_settled(min(room, _MOVING_ROWS), min(room, _MOST_MOVING_ROWS))
        settled, moving = self._settled(rows), self._lines(self._flow.rows)
        first, second = self._rejected_codes(last_column, self._flow.rows[-1])
        if first:
            moving[-1] = Line(moving[-1].codes + first)
        if n_spare:
            moving.append(Line(second))
        self._region.paint(settled, [*moving, *status])

    def _lines(self, rows: Sequence[Row]) -> list[Line]:
        return [Line(row.codes(self._pens), row.width >= self._flow.columns) for row in rows]

    def _settled(self, rows: Sequence[Row]) -> str:
        """Return rows that stay. Between joined ones it is the terminal that breaks the line, but
        the last is not joined to the region. Nothing is erased: a row that turns out to be too long
        ends somewhere else.
        """
        ends = ["" if row.joined else "\n" for row in rows[:-1]] + ["\n"]
        return "".join(row.codes(self._pens) + end for row, end in zip(rows, ends, strict=False))

    def _rejected_codes(self, columns: int, last: Row) -> tuple[str, str]:
        """Return this round's rejected text: the part behind the `last` row, and the part in the
        row below.
        """
        cells: list[Cell] = []
        for text in self._rejected:
            append_cells(cells, "  " if cells else "", "plain", join=False)
            append_cells(cells, clean_line(text), "rejected", join=False)
        if not cells:
            return "", ""
        room = max(0, columns - last.width)
        first, *others = wrap(cells, max(1, columns - 1), first_columns=room)
        second = others[0].codes(self._pens) if others else ""
        if len(others) > 1:
            second += coded("…", self._pens["faint"])
        return first.codes(self._pens), second

    def _write(self, codes: str) -> None:
        encoding = self._console.encoding
        self._console.file.write(codes.encode(encoding, "replace").decode(encoding))
        self._console.file.flush()


class _Status:
    def __init__(self) -> None:
        self._reading = ["reading", ""]
        self._has_draft = True
        self._first: CommittedEvent | None = None
        self._last: CommittedEvent | None = None
        self._n_drafted = self._n_accepted = 0

    def update(self, event: Event) -> None:
        if isinstance(event, PromptEvent):
            self._reading.insert(0, f"reading {event.n_prompt_tokens} prompt tokens")
            self._has_draft = event.draft != "none"
        elif isinstance(event, ReadingEvent):
            self._reading = [reading(event), *self._reading[-3:]]
        elif isinstance(event, DraftedEvent):
            depths: list[int] = []
            for node in event.nodes:
                depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
            self._n_drafted += max(depths, default=0)
        elif isinstance(event, VerifiedEvent):
            self._n_accepted += len(event.accepted)
        elif isinstance(event, CommittedEvent):
            self._first = self._first or event
            self._last = event

    def codes(self, columns: int, pens: Pens) -> str:
        """Return the fullest line that fits: with the legend, or with fewer figures."""
        texts, narrow = self._reading, list[str]()
        if self._first is not None and self._last is not None:
            n, seconds = self._last.n_tokens, self._last.time_s - self._first.time_s
            figures, narrow = [f"{n} tokens"], [str(n), ""]
            if seconds > 0:
                figures.insert(0, f"{(n - self._first.n_tokens) / seconds:.1f}/s")
            if self._n_drafted:
                figures.append(f"{100 * self._n_accepted / self._n_drafted:.0f}% accepted")
            texts = ["  ".join(figures[:n]) for n in range(len(figures), 0, -1)]
            room = columns - len("  ".join(LEGEND))
            if self._has_draft and room >= 0:
                legend = "  ".join(coded(mark, pens[mark]) for mark in LEGEND)
                text = next((f"{_GAP}{text}" for text in texts if len(_GAP + text) <= room), "")
                return legend + coded(text, pens["faint"])
        fitting = next((text for text in [*texts, *narrow] if len(text) <= columns), "")
        return coded(fitting, pens["faint"])


# --- thoughts

#: Rows of a thinking block that are shown while it is generated.
_THOUGHT_ROWS = 5


class Thought:
    """The thinking block of one answer, dim above the rest of it. If it `folds`, its last rows are
    shown while it is generated, then one line in its place.
    """

    def __init__(self, flow: Flow, prompt: str, folds: bool) -> None:
        self.flow = flow  # of rows that stand for the answer while the block is open
        self._folds, self._reader = folds, ThoughtReader(prompt)
        self._rows: list[Row] = []
        self._is_blank = True
        self._first_s: float | None = None
        self._last_s, self._n_tokens = 0.0, 0

    @property
    def is_open(self) -> bool:
        return self._folds and self._reader.is_open

    def take(self, runs: Iterable[Run], time_s: float, n_tokens: int) -> Iterator[Run]:
        """Take the text that a round added, at `time_s` with `n_tokens` tokens in all; yield what
        is shown of it.
        """
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
            run = Run(thoughts, "faint")
            if self._folds:
                self.flow.feed([run])
            else:
                yield run
        if self._first_s is not None and not self._reader.is_open:
            yield from self.fold()
        yield from answer

    def fold(self) -> Iterator[Run]:
        """Yield what ends the thinking block once, and then text that was held back as a possible
        tag.
        """
        if self._first_s is not None:
            about = f"{self._last_s - self._first_s:.1f} s, {counted(self._n_tokens, 'token')}"
            self._first_s = None
            end = f"thought for {about} (/think shows it)\n" if self._folds else "\n\n"
            yield Run(end, "faint")
        if answer := self._reader.finish()[1]:
            yield Run(answer, "plain")

    def rows(self, n_most: int) -> list[Row]:
        self._rows = (self._rows + self.flow.take_settled(1, 1))[-_THOUGHT_ROWS:]
        return (self._rows + self.flow.rows)[-min(n_most, _THOUGHT_ROWS) :]
