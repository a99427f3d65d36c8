"""Text in rows of a terminal.

A `Cell` is what a reader takes for one character (a letter with its accents, an emoji of several code points).
Terminals disagree about the width of emoji sequences: a family of three takes two columns in one and six in
another. A cell's width is the largest that is usual, so that a row never runs over the edge.

Lines are broken where the terminal itself would break them, so that it joins their rows when text is copied. A row
never depends on anything after the first cell of the next row, so all rows of a growing text (`Flow`) except the
last are settled.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from wcwidth import iter_graphemes, wcwidth

from specgen.render.marks import Pens, Run, coded
from specgen.render.text import Cleaner, clean_line

#: Distance of the tab stops, in columns.
TAB_COLUMNS = 8
#: The most code points and columns of a cell. A longer one is cut: its rest is excessive marks, not writing,
#: and would not fit a narrow window.
_MAX_CELL_LENGTH, _MAX_CELL_WIDTH = 24, 8


class Cell(NamedTuple):
    """A user-perceived character."""

    text: str
    #: The most columns that it may take.
    width: int
    #: Whether every terminal agrees on the width.
    exact: bool
    #: The name of its style. A space has none unless it is rejected, so that underlining does not run from word
    #: to word.
    mark: str


def append_cells(cells: list[Cell], text: str, mark: str, *, join: bool = True) -> None:
    """Cut clean text without line feeds and tabs into cells, at the end of `cells`.

    The first characters may belong to the last cell that is there, unless `join` is false;
    such a cell keeps its mark.
    """
    if not text:
        return
    first_mark = mark
    if cells and join:
        begun = cells.pop()
        text, first_mark = begun.text + text, begun.mark
    for grapheme in iter_graphemes(text):
        for piece in _pieces(grapheme):
            cells.append(_cell(piece, first_mark))
            first_mark = mark


@lru_cache(maxsize=4096)
def _pieces(grapheme: str) -> tuple[str, ...]:
    """Cut a grapheme that is too large. A mark without a letter would climb onto whatever stands before it,
    so it gets a space."""
    if wcwidth(grapheme[0]) == 0 and unicodedata.category(grapheme[0]) != "Cf":
        grapheme = f" {grapheme}"
    for n in range(2, len(grapheme) + 1):
        if n > _MAX_CELL_LENGTH or sum(map(_width, grapheme[:n])) > _MAX_CELL_WIDTH:
            return (grapheme[: n - 1], *_pieces(grapheme[n - 1 :]))
    return (grapheme,)


@lru_cache(maxsize=4096)
def _cell(text: str, mark: str) -> Cell:
    width = sum(map(_width, text))
    if text == " " and mark != "rejected":
        mark = ""
    if "\N{VARIATION SELECTOR-16}" in text:
        width = max(width, 2)
    return Cell(text, width, len(text) == 1 and _is_exact(ord(text), width), mark)


def _width(character: str) -> int:
    return 2 if 0x1F000 <= ord(character) < 0x1FB00 else max(0, wcwidth(character))


def _is_exact(code: int, width: int) -> bool:
    """Return whether nobody disputes the width: Latin, Greek, Cyrillic; Chinese, Japanese and Korean."""
    is_european = 0x20 <= code < 0x300 or 0x370 <= code < 0x483
    return (width == 1 and is_european and code != 0xAD) or (width == 2 and 0x3001 <= code < 0xFF61)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen."""

    cells: tuple[Cell, ...]
    #: Columns of the cells, at most.
    width: int
    #: The next row goes on without a line feed: the terminal itself breaks the line there,
    #: and text copied from it comes out in one piece.
    joined: bool = False

    def runs(self) -> Iterator[tuple[str, str]]:
        """Yield (text, mark) for neighbouring cells that look the same."""
        for mark, cells in groupby(self.cells, attrgetter("mark")):
            yield "".join(cell.text for cell in cells), mark


EMPTY_ROW = Row((), 0)


def wrap(cells: Sequence[Cell], columns: int, first_columns: int | None = None) -> list[Row]:
    """Lay one line out in at least one row.

    The screen has at least 2 `columns`; the first row has room for `first_columns`, if that is less. A row is
    as wide as the screen only if all its cells have an exact width, otherwise one column less. A cell wider
    than the screen has a row of its own.
    """
    rows: list[Row] = []
    start, room = 0, columns if first_columns is None else first_columns
    while True:
        width, end, exact = 0, start, True
        for cell in cells[start:]:
            exact = exact and cell.exact
            if width + cell.width > (room if exact else room - 1):
                break
            width, end = width + cell.width, end + 1
        if end == start < len(cells) and room == columns:
            width, end = cells[start].width, end + 1
        row = Row(tuple(cells[start:end]), width, joined=width == columns and end < len(cells))
        rows.append(row)
        if end == len(cells):
            return rows
        start, room = end, columns


def row_codes(row: Row, codes: Pens) -> str:
    """Return a row with its codes, for a terminal."""
    return "".join([coded(text, codes[mark]) for text, mark in row.runs()])


class Flow:
    """Lays text out in rows and keeps those that may still change: the rows of the last line that
    `take_settled` has not handed out."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._cleaner = Cleaner()
        self._settled: list[Row] = []
        #: The last line's rows, at least one, which may be empty; the last of them is the one that grows.
        self.rows: list[Row] = [EMPTY_ROW]
        #: Columns of the last line before its last row; tab stops depend on it.
        self._columns_before = 0

    def feed(self, runs: Iterable[Run]) -> None:
        """Add text. Rejected text does not break lines: its line feeds are shown as signs."""
        cells = list(self.rows[-1].cells)
        for run in runs:
            if run.mark == "rejected":
                self._append(cells, clean_line(run.text), run.mark)
                continue
            first, *others = self._cleaner.feed(run.text).split("\n")
            self._append(cells, first, run.mark)
            for part in others:
                self._lay_out(cells)
                self._settled += self.rows
                self.rows, self._columns_before, cells = [EMPTY_ROW], 0, []
                self._append(cells, part, run.mark)
        self._lay_out(cells)

    def resize(self, columns: int) -> None:
        """Lay out the rows that were not handed out for another width."""
        self.columns = columns
        self._columns_before -= sum(row.width for row in self.rows[:-1])
        cells = [cell for row in self.rows for cell in row.cells]
        self.rows = [EMPTY_ROW]
        self._lay_out(cells)

    def take_settled(self, n_kept: int, n_most: int) -> list[Row]:
        """Hand out the rows of finished lines, and those of the last line except `n_kept`.

        Joined rows are handed out together, but at most `n_most` rows are kept.
        """
        n_rows = len(self.rows)
        n_taken = max(0, n_rows - n_kept)
        while n_taken and self.rows[n_taken - 1].joined:
            n_taken -= 1
        if n_rows - n_taken > n_most:
            n_taken = n_rows - n_kept
        settled, self._settled = self._settled + self.rows[:n_taken], []
        del self.rows[:n_taken]
        return settled

    def finish(self) -> list[Row]:
        """End the text and hand out the remaining rows."""
        self.feed([Run(self._cleaner.finish(), "plain")])
        is_line = self.rows != [EMPTY_ROW] or self._columns_before
        settled = self._settled + (self.rows if is_line else [])
        self._settled, self.rows, self._columns_before = [], [EMPTY_ROW], 0
        return settled

    def _append(self, cells: list[Cell], text: str, mark: str) -> None:
        rejected = mark == "rejected"
        join = not cells or (cells[-1].mark == "rejected") == rejected
        before, *others = text.split("\t")
        append_cells(cells, before, mark, join=join)
        for part in others:
            column = self._columns_before + sum(cell.width for cell in cells)
            append_cells(cells, " " * (TAB_COLUMNS - column % TAB_COLUMNS), mark)
            append_cells(cells, part, mark)

    def _lay_out(self, cells: list[Cell]) -> None:
        """Replace the growing row by these cells."""
        rows = wrap(cells, self.columns)
        self.rows[-1:] = rows
        self._columns_before += sum(row.width for row in rows[:-1])
