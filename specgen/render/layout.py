"""Breaks lines into rows of a terminal.

Lines break at spaces and beside ideographs; a word longer than a row is cut. A row never depends on anything
after the first cell of the next row, so all rows of a growing text except the last are settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specgen.render.text import Cell

#: Characters that must not begin a row, and characters that must not end one.
_CLOSING = frozenset(
    "、。，．：；？！）］｝」』】〉》〕ゝゞーァィゥェォッャュョぁぃぅぇぉっゃゅょ々"
)
_OPENING = frozenset("（［｛「『【〈《〔")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen."""

    #: All cells of the row, including the spaces that hang over its end.
    cells: tuple[Cell, ...]
    #: How many of the cells are painted.
    n_painted: int
    #: Columns of the painted cells, at most.
    width: int
    #: The next row goes on without a line feed: the terminal itself breaks the line there,
    #: and text copied from it comes out in one piece.
    joined: bool = False

    @property
    def text(self) -> str:
        return "".join(cell.text for cell in self.cells[: self.n_painted])

    def runs(self) -> Iterator[tuple[str, str]]:
        """Yield (text, mark) for neighbouring cells that look the same.

        Spaces have no mark, so that underlining does not run from word to word. Only a rejected space keeps
        its mark, so that it is struck through.
        """
        text, mark = "", ""
        for cell in self.cells[: self.n_painted]:
            cell_mark = "" if cell.is_space and cell.mark != "rejected" else cell.mark
            if cell_mark != mark:
                if text:
                    yield text, mark
                text, mark = "", cell_mark
            text += cell.text
        if text:
            yield text, mark


EMPTY_ROW = Row((), 0, 0)


def wrap(cells: Sequence[Cell], columns: int, first_columns: int | None = None) -> list[Row]:
    """Lay one line out in rows.

    Args:
        cells: the line, without its line feed.
        columns: width of the screen, at least 2.
        first_columns: room in the first row, if that is less; nothing is cut to fit there.

    Returns:
        At least one row; joined, their cells are `cells`. A row is as wide as the screen
        only if all its cells have an exact width, otherwise one column less.
    """
    rows: list[Row] = []
    start = 0
    while True:
        partial = first_columns is not None and not rows
        room = first_columns if first_columns is not None and not rows else columns
        end = _row_end(cells, start, room, cut=not partial)
        row = _row(cells[start:end], room)
        if end == len(cells):
            rows.append(row)
            return rows
        if row.n_painted == len(row.cells) and row.width == columns:
            row = Row(row.cells, row.n_painted, row.width, joined=True)
        rows.append(row)
        start = end


def _row_end(cells: Sequence[Cell], start: int, room: int, *, cut: bool) -> int:
    """Index after the last cell of the row that begins at `start`.

    The row may take nothing when a word may not be cut (`cut`) and does not fit.
    """
    width = 0
    exact = True
    break_at = start
    for index in range(start, len(cells)):
        cell = cells[index]
        if cell.is_space:  # spaces hang over the end
            width += 1
            continue
        if index > start and _may_break(cells[index - 1], cell):
            break_at = index
        width += cell.width
        exact = exact and cell.exact
        if width > (room if exact else room - 1):
            if break_at > start or not cut:
                return break_at
            return max(index, start + 1)  # a cell wider than the screen has its own row
    return len(cells)


def _may_break(before: Cell, after: Cell) -> bool:
    if before.is_space:
        return True
    if before.is_ideograph or after.is_ideograph:
        return before.text[0] not in _OPENING and after.text[0] not in _CLOSING
    return False


def _row(cells: Sequence[Cell], room: int) -> Row:
    n_painted = len(cells)
    width = sum(cell.width for cell in cells)
    if not all(cell.exact for cell in cells):
        room -= 1
    while width > room and n_painted and cells[n_painted - 1].is_space:
        n_painted -= 1
        width -= 1
    return Row(tuple(cells), n_painted, width)


__all__ = ["EMPTY_ROW", "Row", "wrap"]
