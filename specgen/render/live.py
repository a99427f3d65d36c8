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

_HIDE_CURSOR = "\x1b[?25l"
_SHOW_CURSOR = "\x1b[?25h"
_WRAP_ON = "\x1b[?7h"
_WRAP_OFF = "\x1b[?7l"
_ERASE_RIGHT = "\x1b[K"
_ERASE_BELOW = "\x1b[J"

#: How many rows of the unfinished line are repainted in each round, and laid out again when the
#: window changes. Earlier rows belong to the terminal.
_MOVING_ROWS = 3
#: The most such rows where the terminal joins rows of one line when they are copied.
_MOST_MOVING_ROWS = 12
#: Between the legend and the figures.
_GAP = "    "
#: The least height of a screen with a status line, in rows.
_STATUS_HEIGHT = 4
#: The least height of a screen with a spare row for rejected text.
_SPARE_ROW_HEIGHT = 6


class ScreenLine(NamedTuple):
    """One row of the screen, ready to be written."""

    codes: str
    #: Whether it reaches the right edge, so that nothing is left to be erased there.
    full: bool = False


class Region:
    """Writes rows that stay, and below them rows that are replaced the next time."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._open = False

    def paint(self, settled: str, moving: Sequence[ScreenLine]) -> None:
        """Replace the region.

        Args:
            settled: rows that scroll away for good.
            moving: the new region, with fewer rows than the screen.
        """
        parts = ["\r"]
        if not self._open:
            parts.insert(0, _HIDE_CURSOR)
        if settled:
            parts += (_ERASE_BELOW, settled)
        parts.append(_WRAP_OFF)
        for line in moving[:-1]:
            parts.append(line.codes)
            if not line.full:
                parts.append(_ERASE_RIGHT)
            parts.append("\n")
        n_up = len(moving) - 1
        last = moving[-1]
        parts.append(last.codes)
        if last.full:
            # The cursor is still on the last column, where erasing would hit the text.
            parts.append("\n")
            n_up += 1
        parts += (_ERASE_BELOW, _WRAP_ON)
        parts.append(f"\x1b[{n_up}A\r" if n_up else "\r")
        self._open = True
        self._write("".join(parts))

    def erase(self) -> None:
        """Remove the region, so that something else can be printed in its place."""
        if self._open:
            self._write(f"\r{_ERASE_BELOW}")

    def close(self, settled: str) -> None:
        """Replace the region by rows that stay, and show the cursor."""
        if self._open or settled:
            self._open = False
            self._write(f"\r{_ERASE_BELOW}{settled}{_SHOW_CURSOR}")


class LiveRenderer(Renderer):
    """Shows one generation on a terminal that understands escape codes.

    Text that can no longer change scrolls away. Below it, the end of the text is repainted in each
    round, followed by what this round rejected (if `show` is ``accepted``), and by a status line
    with the legend and the speed.

    Args:
        console: the terminal.
        show: which tokens to mark.
        notice: prints notices; without it they are not shown.
        thinks: whether the answer may start with a thinking block.
        folds: whether a line replaces the thinking block once it is complete.
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
        self._console = console
        self._show = show
        self._notice = notice
        self._thinks = thinks or folds
        self._folds = folds
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
        """Add the text of a round."""
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
        """Lay the text out again if the window's width has changed.

        This has to come before text is added, since that settles rows.
        """
        columns = max(2, self._console.width)
        flows = [self._flow]
        if self._thought is not None:
            flows.append(self._thought.flow)
        for flow in flows:
            if columns != flow.columns:
                flow.resize(columns)

    def _paint(self) -> None:
        self._fit()
        height = self._console.height
        has_status = self._show != "none" and height >= _STATUS_HEIGHT
        # It keeps the status line in place if rejected text needs a second row.
        has_spare_row = self._show != "none" and height >= _SPARE_ROW_HEIGHT
        n_below = [has_status, has_spare_row].count(True)
        room = max(1, height - 1 - n_below)
        last_column = self._flow.columns - 1
        status: list[ScreenLine] = []
        if has_status:
            status.append(ScreenLine(self._status.codes(last_column, self._pens)))
        if self._thought is not None and self._thought.is_open:
            thoughts = self._lines(self._thought.rows(room))
            self._region.paint("", [*thoughts, *status])
            return
        rows = self._flow.take_settled(min(room, _MOVING_ROWS), min(room, _MOST_MOVING_ROWS))
        moving = self._lines(self._flow.rows)
        same_row, next_row = self._rejected_codes(last_column, self._flow.rows[-1])
        if same_row:
            # At least one column stays free.
            moving[-1] = ScreenLine(moving[-1].codes + same_row)
        if has_spare_row:
            moving.append(ScreenLine(next_row))
        self._region.paint(self._settled(rows), [*moving, *status])

    def _lines(self, rows: Sequence[Row]) -> list[ScreenLine]:
        columns = self._flow.columns
        return [ScreenLine(row.codes(self._pens), full=row.width >= columns) for row in rows]

    def _settled(self, rows: Sequence[Row]) -> str:
        """Return the codes of rows that stay.

        The terminal itself breaks the line between joined rows, but the last row is never joined to
        the region. Nothing is erased: a row that turns out to be too long just continues.
        """
        text = ""
        for row in rows:
            text += row.codes(self._pens)
            if not row.joined or row is rows[-1]:
                text += "\n"
        return text

    def _rejected_codes(self, columns: int, last: Row) -> tuple[str, str]:
        """Return this round's rejected text: what fits after the `last` row, and the row below."""
        cells: list[Cell] = []
        for text in self._rejected:
            if cells:
                append_cells(cells, "  ", "plain", join=False)
            append_cells(cells, clean_line(text), "rejected", join=False)
        if not cells:
            return "", ""
        room = max(0, columns - last.width)
        first, *others = wrap(cells, max(1, columns - 1), first_columns=room)
        below = ""
        if others:
            below = others[0].codes(self._pens)
        if len(others) > 1:
            below += coded("…", self._pens["faint"])
        return first.codes(self._pens), below

    def _write(self, codes: str) -> None:
        encoding = self._console.encoding
        self._console.file.write(codes.encode(encoding, "replace").decode(encoding))
        self._console.file.flush()


class _Status:
    """The status line: how far the prefill is, then the legend and the speed."""

    def __init__(self) -> None:
        #: Texts about the prefill, the longest first.
        self._reading = ["reading", ""]
        self._has_draft = True
        self._first: CommittedEvent | None = None
        self._last: CommittedEvent | None = None
        self._n_drafted = 0
        self._n_accepted = 0

    def update(self, event: Event) -> None:
        """Take the next event."""
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
            if self._first is None:
                self._first = event
            self._last = event

    def codes(self, columns: int, pens: Pens) -> str:
        """Return the fullest line that fits: with the legend, or with fewer figures."""
        if self._first is None or self._last is None:
            return coded(_first_fitting(self._reading, columns), pens["faint"])
        texts = self._figures(self._first, self._last)
        legend = ""
        room = columns - len("  ".join(LEGEND))
        if self._has_draft and room >= 0:
            legend = "  ".join(coded(mark, pens[mark]) for mark in LEGEND)
            texts = [_GAP + text for text in texts]
            columns = room
        else:
            texts.append(str(self._last.n_tokens))
        return legend + coded(_first_fitting(texts, columns), pens["faint"])

    def _figures(self, first: CommittedEvent, last: CommittedEvent) -> list[str]:
        """Return texts with all figures and with fewer of them, the longest first."""
        figures = [f"{last.n_tokens} tokens"]
        seconds = last.time_s - first.time_s
        if seconds > 0:
            figures.insert(0, f"{(last.n_tokens - first.n_tokens) / seconds:.1f}/s")
        if self._n_drafted:
            figures.append(f"{self._n_accepted / self._n_drafted:.0%} accepted")
        return ["  ".join(figures[:n]) for n in range(len(figures), 0, -1)]


def _first_fitting(texts: Iterable[str], columns: int) -> str:
    return next((text for text in texts if len(text) <= columns), "")


# --- thoughts

#: Rows of a thinking block that are shown while it is generated.
_THOUGHT_ROWS = 5


class Thought:
    """The thinking block of one answer, shown dim.

    Args:
        flow: lays out the last rows of the block while it is open.
        prompt: the prompt's text, which may open the block.
        folds: whether only the last rows are shown while the block is generated, and then one line
            in their place.
    """

    def __init__(self, flow: Flow, prompt: str, folds: bool) -> None:
        self.flow = flow
        self._folds = folds
        self._reader = ThoughtReader(prompt)
        self._rows: list[Row] = []
        #: Whether only white space has come so far, which is not shown.
        self._is_blank = True
        #: When the first and the last thought came, and how many tokens there were then.
        self._first_s: float | None = None
        self._last_s = 0.0
        self._n_tokens = 0

    @property
    def is_open(self) -> bool:
        """Whether the last rows of the block are shown instead of the answer."""
        return self._folds and self._reader.is_open

    def take(self, runs: Iterable[Run], time_s: float, n_tokens: int) -> Iterator[Run]:
        """Take the text that a round added, and yield what to show of it.

        Args:
            runs: the text.
            time_s: when the round ended.
            n_tokens: the length of the answer so far.
        """
        was_open = self._reader.is_open
        thoughts, answer = self._split(runs)
        if was_open or self._reader.is_open or thoughts:
            if self._first_s is None:
                self._first_s = time_s
            self._last_s = time_s
            self._n_tokens = n_tokens
            if self._is_blank:
                thoughts = thoughts.lstrip()
                self._is_blank = not thoughts
            run = Run(thoughts, "faint")
            if self._folds:
                self.flow.feed([run])
            else:
                yield run
        if self._first_s is not None and not self._reader.is_open:
            yield from self.fold()
        yield from answer

    def _split(self, runs: Iterable[Run]) -> tuple[str, list[Run]]:
        """Return the thoughts in a text, and what belongs to the answer."""
        thoughts = ""
        answer: list[Run] = []
        for text, mark in runs:
            # Rejected text is not shown among thoughts.
            if mark in ("rejected", "aside", "faint") and not self._reader.is_past:
                continue
            thought, rest = self._reader.feed(text)
            thoughts += thought
            if rest:
                answer.append(Run(rest, mark))
        return thoughts, answer

    def fold(self) -> Iterator[Run]:
        """Yield the end of the thinking block, once, and text held back as a possible tag."""
        if self._first_s is not None:
            end = "\n\n"
            if self._folds:
                seconds = self._last_s - self._first_s
                n_tokens = counted(self._n_tokens, "token")
                end = f"thought for {seconds:.1f} s, {n_tokens} (/think shows it)\n"
            self._first_s = None
            yield Run(end, "faint")
        _, answer = self._reader.finish()
        if answer:
            yield Run(answer, "plain")

    def rows(self, n_most: int) -> list[Row]:
        """Return the last rows of the block, at most `n_most`."""
        self._rows += self.flow.take_settled(1, 1)
        del self._rows[:-_THOUGHT_ROWS]
        return (self._rows + self.flow.rows)[-min(n_most, _THOUGHT_ROWS) :]
