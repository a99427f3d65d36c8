"""A growing text, laid out in rows."""

from __future__ import annotations

from collections.abc import Iterable

from specgen.render.layout import EMPTY_ROW, Row, wrap
from specgen.render.marks import Run
from specgen.render.text import TAB_COLUMNS, Cell, Cleaner, append_cells, clean_line


class Flow:
    """Lays text out in rows and keeps the rows that may still change.

    Whatever the text's length, it holds only the rows of the last line that `take_settled` has not handed
    out.
    """

    def __init__(self, columns: int, encoding: str = "utf-8") -> None:
        self._columns = columns
        self._encoding = encoding
        self._cleaner = Cleaner(encoding)
        self._settled: list[Row] = []
        #: The last line's rows; the last of them is the one that grows.
        self._rows: list[Row] = [EMPTY_ROW]
        #: Columns of the last line before its last row; tab stops depend on it.
        self._columns_before = 0

    @property
    def columns(self) -> int:
        return self._columns

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows that were not handed out yet: at least one, which may be empty."""
        return tuple(self._rows)

    def feed(self, runs: Iterable[Run]) -> None:
        """Add text. Rejected text does not break lines: its line feeds are shown as signs."""
        cells = list(self._rows[-1].cells)
        for run in runs:
            if run.mark == "rejected":
                self._append(cells, clean_line(run.text, self._encoding), run.mark)
                continue
            first, *others = self._cleaner.feed(run.text).split("\n")
            self._append(cells, first, run.mark)
            for part in others:
                self._end_line(cells)
                cells = []
                self._append(cells, part, run.mark)
        self._lay_out(cells)

    def resize(self, columns: int) -> None:
        """Lay out the rows that were not handed out for another width."""
        self._columns = columns
        cells = [cell for row in self._rows for cell in row.cells]
        self._columns_before -= _columns_of(cells) - _columns_of(self._rows[-1].cells)
        self._rows = [EMPTY_ROW]
        self._lay_out(cells)

    def take_settled(self, n_kept: int, n_most: int) -> list[Row]:
        """Hand out the rows of finished lines, and those of the last line except `n_kept`.

        Joined rows are handed out together, but at most `n_most` rows are kept.
        """
        n_rows = len(self._rows)
        n_taken = max(0, n_rows - n_kept)
        while n_taken and self._rows[n_taken - 1].joined:
            n_taken -= 1
        if n_rows - n_taken > n_most:
            n_taken = n_rows - n_kept
        settled = self._settled + self._rows[:n_taken]
        self._settled = []
        del self._rows[:n_taken]
        return settled

    def finish(self) -> list[Row]:
        """End the text and hand out the remaining rows."""
        self.feed([Run(self._cleaner.finish(), "plain")])
        if self._rows == [EMPTY_ROW] and self._columns_before == 0:
            self._rows = []
        settled = self._settled + self._rows
        self._settled, self._rows = [], [EMPTY_ROW]
        self._columns_before = 0
        return settled

    def _append(self, cells: list[Cell], text: str, mark: str) -> None:
        rejected = mark == "rejected"
        join = not cells or (cells[-1].mark == "rejected") == rejected
        before, *others = text.split("\t")
        append_cells(cells, before, mark, join=join)
        for part in others:
            column = self._columns_before + _columns_of(cells)
            append_cells(cells, " " * (TAB_COLUMNS - column % TAB_COLUMNS), mark)
            append_cells(cells, part, mark)

    def _end_line(self, cells: list[Cell]) -> None:
        self._lay_out(cells)
        self._settled += self._rows
        self._rows = [EMPTY_ROW]
        self._columns_before = 0

    def _lay_out(self, cells: list[Cell]) -> None:
        """Replace the growing row by these cells."""
        rows = wrap(cells, self._columns)
        self._rows[-1:] = rows
        self._columns_before += sum(_columns_of(row.cells) for row in rows[:-1])


def _columns_of(cells: Iterable[Cell]) -> int:
    return sum(cell.width for cell in cells)


__all__ = ["Flow"]
