"""The replay of a race on a terminal: two answers, which grow as fast as they were generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

from rich.console import Console

from specgen.measure.race import Race, RacedAnswer
from specgen.render.live import Region, ScreenLine, write_codes
from specgen.render.rows import (
    EMPTY_ROW,
    Cell,
    Flow,
    Row,
    Run,
    append_cells,
    clean_line,
    pens,
    wrap,
)
from specgen.system.quantities import counted

#: On narrower terminals, the answers are not side by side, but one above the other.
_MIN_COLUMNS = 60
#: The space between the answers.
_GUTTER = "   "
#: The time between two looks at the clock.
_FRAME_S = 0.05
#: What the replay is labelled with while it runs.
_LABEL = "replay at true speed, Ctrl-C skips it"


def replay(
    race: Race,
    console: Console,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    interrupted: Callable[[], bool],
) -> None:
    """Replay a race on a terminal that understands escape codes, and leave the whole answers there.

    Args:
        race: The race, which was not interrupted.
        console: The terminal.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.
        interrupted: Whether to skip the rest of the replay.
    """
    screen = _ReplayScreen(race, console)
    end_s = max(answer.seconds for answer in race.answers)
    started_s = clock()
    try:
        while not interrupted():
            now_s = clock() - started_s
            if now_s >= end_s:
                break
            screen.paint(now_s)
            sleep(_FRAME_S)
    finally:
        screen.close()


class _ReplayScreen:
    """What is shown of a race, at any time of its replay."""

    def __init__(self, race: Race, console: Console) -> None:
        self._race = race
        self._console = console
        self._pens = pens(console)
        self._region = Region(partial(write_codes, console))
        #: The number of columns for which the answers are laid out; 0 before the first time.
        self._n_columns = 0
        #: The answers as far as they are shown.
        self._sides: list[_Side] = []
        #: The whole answers.
        self._whole_sides: list[_Side] = []
        #: What is on the screen.
        self._painted: list[ScreenLine] = []

    def paint(self, now_s: float) -> None:
        """Show the answers as they were `now_s` seconds after their start."""
        self._fit()
        n_text_rows = self._n_text_rows()
        blocks = []
        for side in self._sides:
            side.advance(now_s)
            blocks.append(side.block(now_s, n_text_rows))
        label = _faint_row(_LABEL, self._n_columns - 1)
        rows = [*self._joined(blocks), *self._legend(), label.codes(self._pens)]
        lines = [ScreenLine(row) for row in rows[-self._max_height :]]
        if lines != self._painted:
            self._painted = lines
            self._region.paint("", lines)

    def close(self) -> None:
        """Replace the replay with the whole answers."""
        self._fit()
        blocks = [side.block(math.inf) for side in self._whole_sides]
        rows = [*self._joined(blocks), *self._legend()]
        self._region.close("".join(f"{row}\n" for row in rows))

    @property
    def _is_wide(self) -> bool:
        """Whether the answers are side by side."""
        return self._n_columns >= _MIN_COLUMNS

    @property
    def _max_height(self) -> int:
        """The number of rows that can be repainted."""
        return max(1, self._console.height - 1)

    @property
    def _side_columns(self) -> int:
        """The width of an answer."""
        if self._is_wide:
            return (self._n_columns - 1 - len(_GUTTER)) // 2  # the last column stays free
        return self._n_columns - 1

    def _fit(self) -> None:
        """Lay out the answers again if the window's width has changed."""
        n_columns = max(2, self._console.width)
        if n_columns == self._n_columns:
            return
        self._n_columns = n_columns
        self._sides = [_Side(answer, self._side_columns) for answer in self._race.answers]
        self._whole_sides = [_Side(answer, self._side_columns) for answer in self._race.answers]
        for side in self._whole_sides:
            side.advance(math.inf)

    def _n_text_rows(self) -> int:
        """Return the number of rows for the text of each answer, which is the same at all times."""
        n_blocks = 1 if self._is_wide else len(self._sides)
        n_rows_below = len(self._legend()) + 1
        # Each text has a row above it and one below it. Blocks are separated by an empty row.
        n_rows_around = 3 * n_blocks - 1
        n_rows = (self._max_height - n_rows_below - n_rows_around) // n_blocks
        n_needed = max(len(side.rows) for side in self._whole_sides)
        return max(1, min(n_rows, n_needed))

    def _joined(self, blocks: Sequence[Sequence[Row]]) -> Iterator[str]:
        """Yield the rows of both answers, side by side or one above the other."""
        if not self._is_wide:
            for n, block in enumerate(blocks):
                if n > 0:
                    yield ""
                yield from (row.codes(self._pens) for row in block)
            return
        for left, right in zip_longest(*blocks, fillvalue=EMPTY_ROW):
            padding = " " * max(0, self._side_columns - left.width)
            yield left.codes(self._pens) + padding + _GUTTER + right.codes(self._pens)

    def _legend(self) -> list[str]:
        """Return rows with the kinds of tokens in their colours, after an empty row."""
        cells: list[Cell] = []
        for kind in self._race.kinds:
            if cells:
                append_cells(cells, "  ", "")
            append_cells(cells, kind, kind, join=False)
        rows = wrap(cells, self._n_columns - 1, between_words=True)
        return ["", *(row.codes(self._pens) for row in rows)]


class _Side:
    """One of the answers, laid out in rows as far as it is shown."""

    def __init__(self, answer: RacedAnswer, n_columns: int) -> None:
        """Begin with no text.

        Args:
            answer: The answer.
            n_columns: The width of its rows.
        """
        self._answer = answer
        self._rounds = answer.rounds
        self._n_columns = n_columns
        self._flow = Flow(n_columns)
        #: The rows that can no longer change.
        self._settled_rows: list[Row] = []
        #: The number of rounds that are shown.
        self._n_rounds = 0
        #: The number of tokens that are shown.
        self._n_tokens = 0

    @property
    def rows(self) -> list[Row]:
        """All rows of the text that is shown."""
        if self._n_rounds == len(self._rounds):
            return self._settled_rows
        return [*self._settled_rows, *self._flow.rows]

    def advance(self, now_s: float) -> None:
        """Show the tokens of all rounds that had ended `now_s` seconds after the start."""
        for event in self._rounds[self._n_rounds :]:
            if event.time_s > now_s:
                break
            self._n_rounds += 1
            self._n_tokens = event.n_tokens
            self._flow.feed(Run(piece.text, piece.kind) for piece in event.pieces)
        if self._n_rounds == len(self._rounds):
            self._settled_rows += self._flow.finish()
        else:
            self._settled_rows += self._flow.take_settled(1, 1)

    def block(
        self,
        now_s: float,
        n_text_rows: int | None = None,
    ) -> list[Row]:
        """Return the rows of the answer's title, of the end of its text, and of its figures.

        Args:
            now_s: The seconds that have passed.
            n_text_rows: The number of rows of the text; None: as many as it has.
        """
        rows = self.rows
        if n_text_rows is not None:
            rows = rows[-n_text_rows:]
            rows += [EMPTY_ROW] * (n_text_rows - len(rows))
        title = _faint_row(self._answer.title, self._n_columns)
        figures = _faint_row(self._figures(now_s), self._n_columns)
        return [title, *rows, figures]

    def _figures(self, now_s: float) -> str:
        if now_s >= self._answer.seconds:
            return self._answer.length
        if self._n_tokens == 0:
            return f"prefill, {now_s:.1f} s"
        return f"{counted(self._n_tokens, 'token')}, {now_s:.1f} s"


def _faint_row(text: str, n_columns: int) -> Row:
    """Return a row with as much of a text as fits."""
    cells: list[Cell] = []
    append_cells(cells, clean_line(text), "faint")
    return wrap(cells, max(1, n_columns))[0]
