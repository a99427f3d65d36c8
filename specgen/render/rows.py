"""Text in rows of a terminal.

A `Cell` is what a reader takes for one character (a letter with its accents, an emoji of several code points),
with the number of columns it may take. Terminals disagree about the width of emoji sequences: a family of three
takes two columns in one and six in another. A cell's width is the largest that is usual, so that a row never runs
over the edge, whichever terminal shows it.

Lines are broken where the terminal itself would break them, so that it joins their rows when text is copied. A row
never depends on anything after the first cell of the next row, so all rows of a growing text (`Flow`) except the
last are settled.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rich.cells import get_character_cell_size

from specgen.render.marks import Pens, Run, coded
from specgen.render.text import Cleaner, clean_line

#: Distance of the tab stops, in columns.
TAB_COLUMNS = 8

_ZERO_WIDTH_JOINER = 0x200D
_EMOJI_PRESENTATION = "\N{VARIATION SELECTOR-16}"

#: The most code points and columns of a cell. A longer one is cut: its rest is excessive marks, not writing,
#: and would not fit a narrow window.
_MAX_CELL_LENGTH = 24
_MAX_CELL_WIDTH = 8


# --- cells


class Cell(NamedTuple):
    """A user-perceived character."""

    text: str
    #: The most columns that it may take.
    width: int
    #: Whether every terminal agrees on the width.
    exact: bool
    #: The name of its style; cells with different marks may still form one word.
    mark: str

    @property
    def is_space(self) -> bool:
        return self.text == " "


def append_cells(cells: list[Cell], text: str, mark: str, *, join: bool = True) -> None:
    """Cut clean text without line feeds and tabs into cells, at the end of `cells`.

    The first characters may belong to the last cell that is there, unless `join` is false;
    such a cell keeps its mark.
    """
    for character in text:
        longer = _extended(cells[-1], character) if cells and join else None
        if longer is not None:
            cells[-1] = longer
        elif _is_mark(character) or _is_jamo_tail(ord(character)):
            # Without a letter it would climb onto whatever stands before it.
            cells.append(_cell(" " + character, mark))
        else:
            cells.append(_cell(character, mark))
        join = True


@lru_cache(maxsize=4096)
def _cell(text: str, mark: str) -> Cell:
    width = sum(_character_width(character) for character in text)
    if _EMOJI_PRESENTATION in text:
        width = max(width, 2)
    return Cell(text, width, len(text) == 1 and _is_exact(text), mark)


@lru_cache(maxsize=4096)
def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M"


@lru_cache(maxsize=4096)
def _character_width(character: str) -> int:
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return 1
    category = unicodedata.category(character)
    if category in ("Mn", "Me"):
        return 0
    if category == "Cf" and code != 0xAD and not 0x600 <= code < 0x900:
        return 0
    if _is_jamo_tail(code):
        return 0
    if 0x1F000 <= code < 0x1FB00 or unicodedata.east_asian_width(character) in ("W", "F"):
        return 2
    return max(1, get_character_cell_size(character))


#: Scripts whose widths nobody disputes (Latin, Greek and Cyrillic; then Chinese, Japanese
#: and Korean), as ranges of code points.
_EXACT = (
    (0x20, 0x7E),
    (0xA0, 0xAC),
    (0xAE, 0x2FF),
    (0x370, 0x482),
    (0x3041, 0x3096),
    (0x30A1, 0x30FA),
    (0x3001, 0x3015),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0xFF01, 0xFF60),
)


def _is_exact(character: str) -> bool:
    code = ord(character)
    return any(first <= code <= last for first, last in _EXACT)


def _is_jamo_tail(code: int) -> bool:
    """Return whether this is a Hangul vowel or final consonant, drawn into the syllable before it."""
    return 0x1160 <= code <= 0x11FF or 0xD7B0 <= code <= 0xD7FB


def _extended(cell: Cell, character: str) -> Cell | None:
    """Return the cell with one more character, if that belongs to it (after Unicode's UAX #29)."""
    last = ord(cell.text[-1])
    if character < "\u0300" and last != _ZERO_WIDTH_JOINER:  # the usual case
        return None
    if not _belongs(character, cell.text, last) or cell.width == 0:
        return None
    longer = _cell(cell.text + character, cell.mark)
    if len(longer.text) > _MAX_CELL_LENGTH or longer.width > _MAX_CELL_WIDTH:
        return None
    return longer


def _belongs(character: str, text: str, last: int) -> bool:
    """Return whether a character belongs to a cell with this text and last code point."""
    code = ord(character)
    if _is_mark(character) or code in (0x200C, _ZERO_WIDTH_JOINER):
        return True
    if 0x1F3FB <= code <= 0x1F3FF or 0xE0020 <= code <= 0xE007F:  # skin tones; tags
        return True
    if last == _ZERO_WIDTH_JOINER:
        return code >= 0x2000
    if 0x1F1E6 <= code <= 0x1F1FF:  # two regional indicators make a flag
        return len(text) == 1 and 0x1F1E6 <= last <= 0x1F1FF
    if _is_jamo_tail(code):
        return 0x1100 <= last <= 0x11FF or 0xAC00 <= last <= 0xD7FB
    return False


# --- rows


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen."""

    cells: tuple[Cell, ...]
    #: Columns of the cells, at most.
    width: int
    #: The next row goes on without a line feed: the terminal itself breaks the line there,
    #: and text copied from it comes out in one piece.
    joined: bool = False

    @property
    def text(self) -> str:
        return "".join(cell.text for cell in self.cells)

    def runs(self) -> Iterator[tuple[str, str]]:
        """Yield (text, mark) for neighbouring cells that look the same.

        Spaces have no mark, so that underlining does not run from word to word. Only a rejected space keeps
        its mark, so that it is struck through.
        """
        text, mark = "", ""
        for cell in self.cells:
            cell_mark = "" if cell.is_space and cell.mark != "rejected" else cell.mark
            if cell_mark != mark:
                if text:
                    yield text, mark
                text, mark = "", cell_mark
            text += cell.text
        if text:
            yield text, mark


EMPTY_ROW = Row((), 0)


def wrap(cells: Sequence[Cell], columns: int, first_columns: int | None = None) -> list[Row]:
    """Lay one line out in rows.

    Args:
        cells: the line, without its line feed.
        columns: width of the screen, at least 2.
        first_columns: room in the first row, if that is less; it may take nothing.

    Returns:
        At least one row; joined, their cells are `cells`. A row is as wide as the screen
        only if all its cells have an exact width, otherwise one column less.
    """
    rows: list[Row] = []
    start = 0
    while True:
        room = first_columns if first_columns is not None and not rows else columns
        end = _row_end(cells, start, room, n_least=0 if room < columns else 1)
        width = sum(cell.width for cell in cells[start:end])
        if end == len(cells):
            rows.append(Row(tuple(cells[start:end]), width))
            return rows
        rows.append(Row(tuple(cells[start:end]), width, joined=width == columns))
        start = end


def _row_end(cells: Sequence[Cell], start: int, room: int, *, n_least: int) -> int:
    """Return the index after the last cell of the row that begins at `start`, which takes at least
    `n_least` cells: a cell wider than the screen has its own row."""
    width = 0
    exact = True
    for index in range(start, len(cells)):
        width += cells[index].width
        exact = exact and cells[index].exact
        if width > (room if exact else room - 1):
            return max(index, start + n_least)
    return len(cells)


def row_codes(row: Row, codes: Pens) -> str:
    """Return a row with its codes, for a terminal."""
    return "".join([coded(text, codes[mark]) for text, mark in row.runs()])


# --- a growing text


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
        """Return the rows that were not handed out yet: at least one, which may be empty."""
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
