"""The live view on a terminal, which shows the text growing round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from rich.console import Console

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    PrefillEvent,
    PromptEvent,
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
from specgen.render.streams import Renderer, prefill_progress
from specgen.session.prompts.thoughts import ThoughtReader
from specgen.system.quantities import counted

_HIDE_CURSOR = "\x1b[?25l"
_SHOW_CURSOR = "\x1b[?25h"
_WRAP_ON = "\x1b[?7h"
_WRAP_OFF = "\x1b[?7l"
_ERASE_RIGHT = "\x1b[K"
_ERASE_BELOW = "\x1b[J"

#: The number of rows of the unfinished line that are repainted in each round, and laid out again
#: when the window's width changes. The rows above have scrolled away and belong to the terminal.
_REPAINTED_ROWS = 3
#: The maximum number of such rows if more are kept because the terminal joins them when copying.
_MAX_REPAINTED_ROWS = 12
#: The space between the legend and the figures.
_GAP = "    "
#: The minimum height of a screen with a status line, in rows.
_MIN_STATUS_HEIGHT = 4
#: The minimum height of a screen with a spare row for rejected text, in rows.
_MIN_SPARE_ROW_HEIGHT = 6


class ScreenLine(NamedTuple):
    """One row of the screen, ready to be written."""

    #: Its text with escape codes.
    codes: str
    #: Whether it reaches the right edge, so that nothing is left to be erased after it.
    full: bool = False


class Region:
    """The rows at the bottom of the output that are repainted in place.

    Between two calls the cursor is hidden and at the start of the region's first row.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        #: Whether there are rows on the screen that will be repainted.
        self._open = False

    def paint(self, settled: str, lines: Sequence[ScreenLine]) -> None:
        """Replace the region's rows.

        Args:
            settled: The codes of rows to write above the region, which then scroll away for good.
            lines: The new rows of the region, at least one and fewer than the screen has.
        """
        parts = ["\r"]
        if not self._open:
            parts.insert(0, _HIDE_CURSOR)
        if settled:
            parts += (_ERASE_BELOW, settled)
        # Without wrapping, a row that turns out to be too wide cannot move the rows below it.
        parts.append(_WRAP_OFF)
        for line in lines[:-1]:
            parts.append(line.codes)
            if not line.full:
                parts.append(_ERASE_RIGHT)
            parts.append("\n")
        n_up = len(lines) - 1
        last = lines[-1]
        parts.append(last.codes)
        if last.full:
            # The cursor is still on the last column, where erasing would remove a character.
            parts.append("\n")
            n_up += 1
        parts += (_ERASE_BELOW, _WRAP_ON)
        # Return to the start of the region's first row.
        if n_up:
            parts.append(f"\x1b[{n_up}A")
        parts.append("\r")
        self._open = True
        self._write("".join(parts))

    def erase(self) -> None:
        """Remove the region's rows, so that something else can be printed in their place."""
        if self._open:
            self._write(f"\r{_ERASE_BELOW}")

    def close(self, settled: str) -> None:
        """Replace the region with rows that stay, and show the cursor."""
        if self._open or settled:
            self._open = False
            self._write(f"\r{_ERASE_BELOW}{settled}{_SHOW_CURSOR}")


def write_codes(console: Console, codes: str) -> None:
    """Write text with escape codes; what the encoding lacks becomes question marks."""
    encoding = console.encoding
    console.file.write(codes.encode(encoding, "replace").decode(encoding))
    console.file.flush()


class LiveRenderer(Renderer):
    """Shows one generation on a terminal that understands escape codes.

    Rows that can no longer change are settled: they are written once and scroll away. Below them,
    the end of the text is repainted in each round. It is followed by the text that this round
    rejected (if `show` is ``accepted``), and by a status line with the legend and the speed.

    Args:
        console: The terminal.
        show: Which tokens to mark.
        notice: Prints notices; None to not show them.
        thinks: Whether the answer may start with a thinking block.
        folds: Whether to replace a finished thinking block with one line; implies `thinks`.
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
        self._region = Region(partial(write_codes, console))
        self._flow = Flow(max(2, console.width))
        self._status = _Status()
        #: The texts of the branches that the last round rejected, if they are shown after the text.
        self._rejected: tuple[str, ...] = ()
        #: The thinking block, if the answer may have one.
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
        round_events = self._rounds.read(event)
        if round_events is not None:
            self._add(round_events)
        # After these two events the round's committed text follows at once.
        if not isinstance(event, (DraftedEvent, VerifiedEvent)):
            self._paint()

    def _add(self, round_events: Round) -> None:
        """Add the text of a round to the flow."""
        self._fit()
        event = round_events.committed
        runs = round_events.runs(shows_all=self._show == "all")
        if self._show == "none":
            runs = (Run(text, "plain") for text, _ in runs)
        if self._thought is not None:
            runs = self._thought.take(runs, event.time_s, event.n_tokens)
        self._flow.feed(runs)
        if self._show == "accepted":
            self._rejected = tuple(branch.text for branch in round_events.rejected if branch.text)

    def _finish(self) -> None:
        self._fit()
        if self._thought is not None:
            self._flow.feed(self._thought.finish())
        self._region.close(self._settled_codes(self._flow.finish()))

    def _fit(self) -> None:
        """Lay out the text again if the window's width has changed.

        This has to happen before text is added, since rows that are settled keep their width.
        """
        columns = max(2, self._console.width)
        flows = [self._flow]
        if self._thought is not None:
            flows.append(self._thought.flow)
        for flow in flows:
            if columns != flow.columns:
                flow.resize(columns)

    def _paint(self) -> None:
        """Write the rows that are settled now, and repaint the end of the text and the status."""
        self._fit()
        height = self._console.height
        has_status = self._show != "none" and height >= _MIN_STATUS_HEIGHT
        # The spare row keeps the status line in place if rejected text needs a second row.
        has_spare_row = self._show != "none" and height >= _MIN_SPARE_ROW_HEIGHT
        n_rows_below_text = [has_status, has_spare_row].count(True)
        max_text_rows = max(1, height - 1 - n_rows_below_text)
        n_columns = self._flow.columns - 1  # the last column stays free
        status: list[ScreenLine] = []
        if has_status:
            status.append(ScreenLine(self._status.codes(n_columns, self._pens)))

        if self._thought is not None and self._thought.is_open:
            thoughts = self._lines(self._thought.rows(max_text_rows))
            self._region.paint("", [*thoughts, *status])
            return

        settled_rows = self._flow.take_settled(
            min(max_text_rows, _REPAINTED_ROWS),
            min(max_text_rows, _MAX_REPAINTED_ROWS),
        )
        lines = self._lines(self._flow.rows)
        same_row, next_row = self._rejected_codes(n_columns, self._flow.rows[-1])
        if same_row:
            # The line is not full: the last column stays free.
            lines[-1] = ScreenLine(lines[-1].codes + same_row)
        if has_spare_row:
            lines.append(ScreenLine(next_row))
        self._region.paint(self._settled_codes(settled_rows), [*lines, *status])

    def _lines(self, rows: Sequence[Row]) -> list[ScreenLine]:
        columns = self._flow.columns
        return [ScreenLine(row.codes(self._pens), full=row.width >= columns) for row in rows]

    def _settled_codes(self, rows: Sequence[Row]) -> str:
        """Return the codes of settled rows, with line feeds.

        Joined rows have no line feed between them, since the terminal itself breaks the line there;
        but the last row is never joined to the region. Unlike in the region, nothing is erased and
        wrapping is on: a row that turns out to be too wide continues on the next one.
        """
        text = ""
        for row in rows:
            text += row.codes(self._pens)
            if not row.joined or row is rows[-1]:
                text += "\n"
        return text

    def _rejected_codes(self, columns: int, last: Row) -> tuple[str, str]:
        """Return the codes of the text that this round rejected.

        Args:
            columns: The number of columns to use.
            last: The last row of the committed text.

        Returns:
            The text that fits after `last`, and the text for the row below it. The second ends with
            an ellipsis if some text does not fit there. Each may be empty.
        """
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


class _Status:
    """The status line: the progress of the prefill, and later the legend and the speed."""

    def __init__(self) -> None:
        #: Texts about the prefill, from the longest to the shortest. The first that fits is shown.
        self._prefill_texts = ["prefilling"]
        #: The progress of the prefill, which is shown instead if it fits; none before it is known.
        self._progress_texts: list[str] = []
        self._has_draft = True
        self._first: CommittedEvent | None = None
        self._last: CommittedEvent | None = None
        #: Drafted tokens; of a tree only those along its longest branch.
        self._n_drafted = 0
        self._n_accepted = 0

    def update(self, event: Event) -> None:
        """Update the figures with the next event."""
        if isinstance(event, PromptEvent):
            self._prefill_texts.insert(0, f"prefilling {event.n_prompt_tokens} prompt tokens")
            self._has_draft = event.draft != "none"
        elif isinstance(event, PrefillEvent):
            self._progress_texts = [prefill_progress(event)]
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
        """Return the status line, with the legend and as many figures as fit.

        Args:
            columns: The number of columns that the line may have.
            pens: The escape codes of each mark.
        """
        if self._first is None or self._last is None:
            texts = [*self._progress_texts, *self._prefill_texts]
            return coded(_first_fitting(texts, columns), pens["faint"])
        figure_texts = self._figure_texts(self._first, self._last)
        legend = ""
        columns_after_legend = columns - len("  ".join(LEGEND))
        if self._has_draft and columns_after_legend >= 0:
            legend = "  ".join(coded(mark, pens[mark]) for mark in LEGEND)
            figure_texts = [_GAP + text for text in figure_texts]
            columns = columns_after_legend
        else:
            # On the narrowest screens only the number of tokens fits.
            figure_texts.append(str(self._last.n_tokens))
        return legend + coded(_first_fitting(figure_texts, columns), pens["faint"])

    def _figure_texts(
        self,
        first: CommittedEvent,
        last: CommittedEvent,
    ) -> list[str]:
        """Return a text with all figures, and then shorter ones with fewer and fewer of them."""
        figures = [f"{last.n_tokens} tokens"]
        seconds = last.time_s - first.time_s
        if seconds > 0:
            figures.insert(0, f"{(last.n_tokens - first.n_tokens) / seconds:.1f}/s")
        if self._n_drafted:
            figures.append(f"{self._n_accepted / self._n_drafted:.0%} accepted")
        return ["  ".join(figures[:n]) for n in range(len(figures), 0, -1)]


def _first_fitting(texts: Iterable[str], columns: int) -> str:
    """Return the first text that fits in the columns; empty if none does."""
    return next((text for text in texts if len(text) <= columns), "")


# --- thoughts

#: The maximum number of rows of a thinking block that are shown while it is generated.
_MAX_THOUGHT_ROWS = 5


class Thought:
    """The thinking block of one answer, shown dim.

    Args:
        flow: Lays out the rows of a block that is folded.
        prompt: The prompt's text, which may open the block.
        folds: Whether to show only the last rows while the block is generated, and then to replace
            them with one line.
    """

    def __init__(
        self,
        flow: Flow,
        prompt: str,
        folds: bool,
    ) -> None:
        self.flow = flow
        self._folds = folds
        self._reader = ThoughtReader(prompt)
        #: The last settled rows of a block that is folded.
        self._settled_rows: list[Row] = []
        #: Whether the block only has white space so far, which is not shown.
        self._is_blank = True
        #: When the first round with thoughts ended; None before it, and after the block.
        self._first_s: float | None = None
        #: When the last round with thoughts ended, and the answer's number of tokens then.
        self._last_s = 0.0
        self._n_tokens = 0

    @property
    def is_open(self) -> bool:
        """Whether the last rows of the block are to be shown instead of the answer."""
        return self._folds and self._reader.is_open

    def take(
        self,
        runs: Iterable[Run],
        time_s: float,
        n_tokens: int,
    ) -> Iterator[Run]:
        """Take the text that a round added, and yield the text to add to the answer's flow.

        Thoughts that are folded go to the block's own flow instead.

        Args:
            runs: The text that the round added.
            time_s: When the round ended.
            n_tokens: The number of the answer's tokens so far.
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
        if self._first_s is not None and not self._reader.is_open:  # the block has just ended
            yield from self._end_block()
        yield from answer

    def _split(self, runs: Iterable[Run]) -> tuple[str, list[Run]]:
        """Separate the thoughts in a text from what belongs to the answer."""
        thoughts = ""
        answer: list[Run] = []
        for text, mark in runs:
            # Rejected text is only shown after the thoughts.
            if mark in ("rejected", "aside", "faint") and not self._reader.is_past:
                continue
            thought, rest = self._reader.feed(text)
            thoughts += thought
            if rest:
                answer.append(Run(rest, mark))
        return thoughts, answer

    def _end_block(self) -> Iterator[Run]:
        """Yield what follows the thinking block: an empty line, or the line that replaces it.

        Nothing follows a blank block, which is not shown.
        """
        assert self._first_s is not None, "the block has begun"
        end = "\n\n"
        if self._folds:
            seconds = self._last_s - self._first_s
            n_tokens = counted(self._n_tokens, "token")
            end = f"thought for {seconds:.1f} s, {n_tokens} (/think shows it)\n"
        self._first_s = None
        if not self._is_blank:
            yield Run(end, "faint")

    def finish(self) -> Iterator[Run]:
        """End the answer, and yield the rest of it, which was held back as a possible mark."""
        thought, answer = self._reader.finish()
        if thought and not self._folds:
            yield Run(thought, "faint")
        if self._first_s is not None:  # the answer was stopped within the block
            yield from self._end_block()
        if answer:
            yield Run(answer, "plain")

    def rows(self, n_max: int) -> list[Row]:
        """Return the last rows of a block that is folded, at most `n_max`."""
        self._settled_rows += self.flow.take_settled(1, 1)
        del self._settled_rows[:-_MAX_THOUGHT_ROWS]
        all_rows = self._settled_rows + self.flow.rows
        return all_rows[-min(n_max, _MAX_THOUGHT_ROWS) :]
