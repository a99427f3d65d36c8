"""A terminal in memory, which shows what a user would see."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TypeAlias, cast

import pyte
from pyte.screens import StaticDefaultDict
from rich.console import Console
from wcwidth import wcwidth

_Row: TypeAlias = "StaticDefaultDict[int, pyte.screens.Char]"


@dataclass
class _Line:
    """A line of text, of one row or several that the terminal broke."""

    cells: list[pyte.screens.Char] = field(default_factory=list)
    #: The index of the cell under the cursor, if it is in this line.
    cursor: int | None = None


class _Screen(pyte.HistoryScreen):
    """pyte's screen, made stricter where it is more tolerant than terminals.

    Like most terminals, it can also show a sequence of code points as one character, and rewrap its
    lines when the window changes.
    """

    def __init__(self, columns: int, rows: int, *, joins_emoji: bool) -> None:
        self._joins_emoji = joins_emoji
        super().__init__(columns, rows, history=100_000)
        self.set_mode(pyte.modes.LNM)  # the line discipline makes CR LF of a line feed

    def draw(self, data: str) -> None:
        for character in data:
            width = wcwidth(character)
            before = self._cell_before()
            if width <= 0 or (self._joins_emoji and self._joins(before, character)):
                self._attach(before, character)
                continue
            if pyte.modes.DECAWM not in self.mode:  # long lines are not broken
                self.cursor.x = min(self.cursor.x, self.columns - width)
            elif self.cursor.x + width > self.columns:
                _set_wrapped(self.buffer[self.cursor.y], wrapped=True)
                self.cursor.x = self.columns
            super().draw(character)

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        self._leave_margin()
        _set_wrapped(self.buffer[self.cursor.y], wrapped=False)
        super().erase_in_line(how, private=private)

    def erase_in_display(self, how: int = 0, *args: object, **kwargs: object) -> None:
        self._leave_margin()
        for y in range(self.cursor.y, self.lines):
            _set_wrapped(self.buffer[y], wrapped=False)
        super().erase_in_display(how, *args, **kwargs)

    def reflow(self, columns: int) -> None:
        """Change the width as most terminals do.

        What was one line stays one line, and the cursor stays on its character.
        """
        # Leave out the empty rows after the last line and the cursor.
        cursor_row = len(self.history.top) + self.cursor.y
        rows = [*self.history.top, *(self.buffer[y] for y in range(self.lines))]
        while rows and not rows[-1] and len(rows) - 1 > cursor_row:
            rows.pop()

        # Rewrap each line.
        new_rows: list[_Row] = []
        cursor_x = 0
        cursor_y = 0
        for line in self._joined(rows, cursor_row):
            if line.cursor is not None:
                before = _split(line.cells[: line.cursor], columns, self.default_char)
                n_cells = max(before[-1], default=-1) + 1
                n_down, cursor_x = divmod(n_cells, columns)
                cursor_y = len(new_rows) + len(before) - 1 + n_down
            while line.cells and line.cells[-1] == self.default_char:
                line.cells.pop()
            new_rows += _split(line.cells, columns, self.default_char)

        # Scroll so far that the last rows are in the window, and the cursor.
        n_above = min(max(0, len(new_rows) - self.lines), cursor_y)
        self.columns = columns
        self.history.top.clear()
        self.history.top.extend(new_rows[:n_above])
        self.buffer.clear()
        for y, row in enumerate(new_rows[n_above : n_above + self.lines]):
            self.buffer[y] = row
        self.cursor.x = cursor_x
        self.cursor.y = cursor_y - n_above

    def _joined(self, rows: Sequence[_Row], cursor_row: int) -> Iterator[_Line]:
        """Yield lines, whose rows are joined."""
        line = _Line()
        for index, row in enumerate(rows):
            if index == cursor_row:
                line.cursor = len(line.cells) + min(self.cursor.x, self.columns - 1)
            width = self.columns if _wrapped(row) else max(row, default=-1) + 1
            line.cells += [row[x] for x in range(width)]
            if not _wrapped(row):
                yield line
                line = _Line()

    def _leave_margin(self) -> None:
        """After a character in the last column the cursor is still on it; erasing hits it."""
        self.cursor.x = min(self.cursor.x, self.columns - 1)

    def _cell_before(self) -> tuple[int, int] | None:
        """Return the column and the row of the character before the cursor."""
        x = self.cursor.x - 1
        y = self.cursor.y
        while x > 0 and self.buffer[y][x].data == "":
            x -= 1
        return (x, y) if x >= 0 else None

    def _attach(self, before: tuple[int, int] | None, character: str) -> None:
        """Add a character to the one in the cell before it."""
        if before is not None:
            x, y = before
            cell = self.buffer[y][x]
            self.buffer[y][x] = cell._replace(data=cell.data + character)

    def _joins(self, before: tuple[int, int] | None, character: str) -> bool:
        """Return whether an emoji and a character are shown as one."""
        if before is None:
            return False
        text = self.buffer[before[1]][before[0]].data
        is_flag = _is_flag_letter(character) and len(text) == 1 and _is_flag_letter(text)
        is_skin_tone = 0x1F3FB <= ord(character) <= 0x1F3FF
        return text.endswith("\u200d") or is_flag or is_skin_tone


class Terminal(io.TextIOBase):
    """A terminal window. Write to it as to standard output; its methods return what it shows."""

    encoding = "utf-8"

    def __init__(self, columns: int = 80, rows: int = 24, *, joins_emoji: bool = True) -> None:
        self.screen = _Screen(columns, rows, joins_emoji=joins_emoji)
        self._stream = pyte.Stream(self.screen)
        #: Everything that was written so far.
        self.written = ""
        self.console = Console(
            file=cast("IO[str]", self),
            force_terminal=True,
            color_system="standard",
            width=columns,
            height=rows,
            legacy_windows=False,
        )

    def write(self, text: str) -> int:
        self.written += text
        self._stream.feed(text)
        return len(text)

    def isatty(self) -> bool:
        return True

    def resize(self, columns: int, *, tell: bool = True) -> None:
        """Change the window's width. Programs may be notified of it later (`tell`)."""
        self.screen.reflow(columns)
        if tell:
            self.console.size = (self.screen.columns, self.screen.lines)

    @property
    def _buffer(self) -> list[_Row]:
        return [self.screen.buffer[y] for y in range(self.screen.lines)]

    @property
    def visible(self) -> list[str]:
        """The rows of the window, without the empty ones at its end."""
        return _without_end([self._row(row) for row in self._buffer])

    @property
    def rows(self) -> list[str]:
        """Everything that can be scrolled to."""
        return _without_end([self._row(row) for row in (*self.screen.history.top, *self._buffer)])

    @property
    def lines(self) -> list[str]:
        """What copying everything would give: rows that the terminal broke are joined."""
        joined = [""]
        for row in (*self.screen.history.top, *self._buffer):
            joined[-1] += self._row(row, strip=not _wrapped(row))
            if not _wrapped(row):
                joined.append("")
        return _without_end(joined)

    @property
    def cursor_hidden(self) -> bool:
        """Whether the cursor is not shown."""
        return bool(self.screen.cursor.hidden)

    def struck(self) -> str:
        """The text in the window that is struck through."""
        cells = [row[x] for row in self._buffer for x in range(self.screen.columns)]
        return "".join(cell.data for cell in cells if cell.strikethrough)

    def look(self, text: str) -> tuple[str, ...]:
        """The colour and the attributes of a word in the window."""
        for row in self._buffer:
            x = self._row(row).find(text)
            if x >= 0:
                cell = row[x]
                names = ("bold", "italics", "underscore", "strikethrough")
                return (cell.fg, *(name for name in names if getattr(cell, name)))
        raise AssertionError(f"{text!r} is not on the screen")

    def _row(self, row: _Row, *, strip: bool = True) -> str:
        text = "".join(row[x].data for x in range(self.screen.columns))
        return text.rstrip(" ") if strip else text


def letters(text: str) -> str:
    """Return a text without what wrapping and terminals may change.

    That is spaces, invisible signs, and code points that are not (yet) characters.
    """
    return "".join(
        character
        for character in text
        if not character.isspace() and unicodedata.category(character) not in ("Cf", "Cn")
    )


#: Where a row notes that the terminal itself broke the line at its end.
_WRAPPED = -1


def _wrapped(row: _Row) -> bool:
    return _WRAPPED in row


def _set_wrapped(row: _Row, *, wrapped: bool) -> None:
    if wrapped:
        row[_WRAPPED] = row.default
    else:
        row.pop(_WRAPPED, None)


def _is_flag_letter(character: str) -> bool:
    return 0x1F1E6 <= ord(character) <= 0x1F1FF


def _split(
    line: Sequence[pyte.screens.Char], columns: int, default: pyte.screens.Char
) -> list[_Row]:
    """Break a line into rows, but no wide character, which is a cell and an empty one."""
    rows: list[_Row] = [StaticDefaultDict(default)]
    x = 0
    for index, cell in enumerate(line):
        is_wide = index + 1 < len(line) and line[index + 1].data == ""
        width = 2 if is_wide else 1
        if x + width > columns and cell.data != "":
            _set_wrapped(rows[-1], wrapped=True)
            rows.append(StaticDefaultDict(default))
            x = 0
        rows[-1][x] = cell
        x += 1
    return rows


def _without_end(rows: list[str]) -> list[str]:
    while rows and not rows[-1]:
        rows.pop()
    return rows
