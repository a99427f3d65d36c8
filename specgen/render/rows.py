"""Text for a terminal: cleaned, marked by where it comes from, and laid out in rows.

A `Cell` is what a reader sees as one character. Terminals disagree about the width of emoji
sequences, so a cell has the largest width in common use, and a row never runs over the edge. Prose
is broken between words. Code, tables, and words longer than a row are broken where the terminal
itself would break them, so that the terminal joins their rows when text is copied.

Where a row ends depends on no more text than the first cell of the next row. So in a growing text
(`Flow`) all rows but the last are settled: they can no longer change.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from wcwidth import iter_graphemes, wcwidth

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    DraftNode,
    Event,
    RejectedBranch,
    TokenKind,
    VerifiedEvent,
)

# --- text without characters that control a terminal

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Code points that are shown as `_REPLACEMENT`.
_REPLACED_RANGES = (
    range(0x80, 0xA0),  # control characters beyond ASCII
    range(0x202A, 0x202F),  # characters that reorder text on the screen
    range(0x2066, 0x206A),  # the same
    range(0xD800, 0xE000),  # surrogates, which UTF-8 cannot encode
    range(0xFFFE, 0x10000),  # no characters: XML, and with it an SVG, may not contain them
)


def _signs() -> dict[int, str]:
    """Return what to show instead of a character, by its code point."""
    # Unicode has signs for ASCII's control characters, in the same order, from U+2400 on.
    signs = {code: chr(0x2400 + code) for code in range(0x20)}
    del signs[ord("\n")]
    del signs[ord("\t")]
    signs[0x7F] = "\N{SYMBOL FOR DELETE}"
    for codes in _REPLACED_RANGES:
        signs.update(dict.fromkeys(codes, _REPLACEMENT))
    signs[0x2028] = "\n"  # the line separator
    signs[0x2029] = "\n"  # the paragraph separator
    return signs


_SIGNS = _signs()


class Cleaner:
    """Replaces characters in a text stream that control a terminal or that UTF-8 cannot encode.

    Line feeds and tabs are kept. CR LF, and Unicode's line and paragraph separators, become line
    feeds.
    """

    def __init__(self) -> None:
        #: A carriage return that is held back until it is known whether a line feed follows.
        self._held = ""

    def feed(self, text: str) -> str:
        """Clean the next piece of the stream; a carriage return at its end is held back."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix("\r")
        if text.isprintable():  # `translate` is slow, and rarely needed
            return text
        return text.replace("\r\n", "\n").translate(_SIGNS)

    def finish(self) -> str:
        """End the stream, and return what was held back, cleaned."""
        held = self._held
        self._held = ""
        return held.translate(_SIGNS)


def clean(text: str) -> str:
    """Clean a complete text, as `Cleaner` does."""
    cleaner = Cleaner()
    return cleaner.feed(text) + cleaner.finish()


def clean_line(text: str) -> str:
    """Clean a text, show its line breaks as signs, and replace its tabs with spaces."""
    newline = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    return clean(text).replace("\n", newline).replace("\t", "    ")


# --- marks

#: Where a piece of text comes from. An ``aside`` lists several rejected branches. ``faint`` text is
#: not part of the answer, for example thoughts.
Mark: TypeAlias = TokenKind | Literal["rejected", "aside", "faint"]
#: The marks in a legend. Forced tokens are left out, since they only occur with grammars.
LEGEND: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "rejected")
#: The style of each mark. The colours are among the terminal's sixteen, which users choose to suit
#: their background. The main difference is also visible without colours: accepted tokens are
#: underlined, and rejected ones struck through.
STYLES: Mapping[str, Style] = {
    "accepted": Style(color="green", underline=True),
    "corrected": Style(color="magenta"),
    "bonus": Style(color="cyan"),
    "plain": Style.null(),
    "forced": Style(color="bright_blue"),  # blue is hard to read on black
    "rejected": Style(color="red", strike=True),
    "aside": Style(color="red", dim=True),
    "faint": Style(dim=True),
}
#: What is added to a mark's style where there are no colours. Almost every terminal has bold and
#: underlined text; not every one can strike text through.
_ATTRIBUTES_FOR_COLOURS: Mapping[str, Style] = {
    "corrected": Style(bold=True),
    "bonus": Style(bold=True, underline=True),
    "forced": Style(italic=True),
    "rejected": Style(dim=True),
}
#: The escape codes before and after a stretch of text, by its mark.
Pens: TypeAlias = Mapping[str, tuple[str, str]]


def styles_on(console: Console) -> Mapping[str, Style]:
    """Return the style of each mark on this console.

    If colours are turned off (NO_COLOR), the other attributes remain, and those of
    `_ATTRIBUTES_FOR_COLOURS` are added, so that no two kinds of tokens look the same.
    """
    if not console.no_color:
        return STYLES
    styles = dict(STYLES)
    for mark, attributes in _ATTRIBUTES_FOR_COLOURS.items():
        styles[mark] += attributes
    return {mark: style.without_color for mark, style in styles.items()}


def pens(console: Console) -> Pens:
    """Return the escape codes of each mark on this console; the empty mark has none."""
    system = None if console.color_system is None else ColorSystem.STANDARD
    codes_by_mark = {"": ("", "")}
    for mark, style in styles_on(console).items():
        # Rich only renders text, so render a placeholder and take the codes around it.
        before, _, after = style.render("\0", color_system=system).partition("\0")
        codes_by_mark[mark] = (before, after)
    return codes_by_mark


def coded(text: str, pen: tuple[str, str]) -> str:
    """Return a text between escape codes; an empty text stays empty."""
    if not text:
        return ""
    before, after = pen
    return f"{before}{text}{after}"


# --- rounds


class Run(NamedTuple):
    """A stretch of text with one mark."""

    #: The text.
    text: str
    #: How it is shown.
    mark: Mark


@dataclass(frozen=True, slots=True)
class Round:
    """The events of one round."""

    #: The committed tokens.
    committed: CommittedEvent
    #: The draft's nodes; empty in a round without a draft.
    nodes: tuple[DraftNode, ...] = ()
    #: The indices of the accepted nodes: one path, from the root down.
    accepted: tuple[int, ...] = ()
    #: The rejected branches of the draft.
    rejected: tuple[RejectedBranch, ...] = ()
    #: What a second draft guessed of the first, in words; empty if there is no second draft.
    guesses: str = ""

    def position_of(self, branch: RejectedBranch) -> int:
        """Return the number of accepted tokens before a rejected branch."""
        parent = self.nodes[branch.nodes[0]].parent
        if parent < 0:
            return 0
        return self.accepted.index(parent) + 1

    def runs(self, *, shows_all: bool) -> Iterator[Run]:
        """Yield the committed text in order.

        Args:
            shows_all: Whether to include the rejected branches, each before the token that was
                committed instead of it. A single branch is a run of its own, several are listed
                in brackets.
        """
        for position, piece in enumerate(self.committed.pieces):
            if shows_all:
                yield from self._rejected_at(position, piece.kind)
            if piece.text:
                yield Run(piece.text, piece.kind)

    def _rejected_at(
        self,
        position: int,
        kind: TokenKind,
    ) -> Iterator[Run]:
        """Yield the text of the rejected branches at a position.

        Args:
            position: The number of accepted tokens before the branches.
            kind: The kind of the token that was committed there. A branch next to an accepted
                token was not replaced, so even a single one is listed in brackets.
        """
        branches = [each for each in self.rejected if self.position_of(each) == position]
        texts = [branch.text for branch in branches if branch.text]
        if len(texts) == 1 and kind != "accepted":
            yield Run(texts[0], "rejected")
        elif texts:
            yield Run(f"[{'|'.join(texts)}]".replace("\n", "\\n"), "aside")


class RoundReader:
    """Combines the events of each round into a `Round`."""

    def __init__(self) -> None:
        self._drafted: DraftedEvent | None = None
        self._verified: VerifiedEvent | None = None

    def read(self, event: Event) -> Round | None:
        """Take the next event, and return the round that it completes, if any."""
        if isinstance(event, DraftedEvent):
            self._drafted = event
        elif isinstance(event, VerifiedEvent):
            self._verified = event
        if not isinstance(event, CommittedEvent):
            return None
        drafted = self._drafted
        verified = self._verified
        self._drafted = None
        self._verified = None
        if drafted is None or verified is None:
            return Round(event)
        return Round(event, drafted.nodes, verified.accepted, verified.rejected, drafted.guesses)


# --- cells and rows

#: The number of cells at the beginning of a line that are looked at to tell whether it is code.
_N_BEGINNING = 16
#: The distance between tab stops, in columns.
TAB_COLUMNS = 8
#: The maximum number of code points in a cell. Longer graphemes do not occur in real writing, only
#: in text with excessive combining marks. They are cut.
_MAX_CELL_LENGTH = 24
#: The maximum number of columns of a cell, for the same reason.
_MAX_CELL_WIDTH = 8


class Cell(NamedTuple):
    """What a reader sees as one character: a grapheme, or a part of a very long one."""

    #: The characters.
    text: str
    #: The largest number of columns that a terminal may use for it.
    width: int
    #: Whether all terminals use this number of columns.
    exact: bool
    #: Its mark; empty for a space that is not rejected, so that words are underlined one by one.
    mark: str


def append_cells(
    cells: list[Cell],
    text: str,
    mark: str,
    *,
    join: bool = True,
) -> None:
    """Cut clean text without line feeds and tabs into cells, and append them.

    Args:
        cells: The cells to append to.
        text: The text.
        mark: The mark of the text.
        join: Whether the beginning of the text may continue the last cell, as a combining mark
            does.
    """
    if not text:
        return
    first_mark = mark
    if cells and join:
        # Cut the last cell again, together with the new text.
        last = cells.pop()
        text = last.text + text
        first_mark = last.mark
    for grapheme in iter_graphemes(text):
        for piece in _pieces(grapheme):
            cells.append(_cell(piece, first_mark))
            first_mark = mark


@lru_cache(maxsize=4096)
def _pieces(grapheme: str) -> tuple[str, ...]:
    """Return a grapheme, cut into several pieces if it is too long or too wide.

    A combining mark without a letter before it gets a space to combine with.
    """
    # Category Cf are invisible format characters, which have no width either.
    if wcwidth(grapheme[0]) == 0 and unicodedata.category(grapheme[0]) != "Cf":
        grapheme = f" {grapheme}"
    for n in range(2, len(grapheme) + 1):
        if n > _MAX_CELL_LENGTH or sum(map(_width, grapheme[:n])) > _MAX_CELL_WIDTH:
            return (grapheme[: n - 1], *_pieces(grapheme[n - 1 :]))
    return (grapheme,)


@lru_cache(maxsize=4096)
def _cell(text: str, mark: str) -> Cell:
    if text == " " and mark != "rejected":
        mark = ""
    width = sum(map(_width, text))
    # This selector turns the character before it into an emoji, which may be two columns wide.
    if "\N{VARIATION SELECTOR-16}" in text:
        width = max(width, 2)
    return Cell(text, width, _has_exact_width(text, width), mark)


def _has_exact_width(text: str, width: int) -> bool:
    """Return whether a text is one character of a script on whose widths all terminals agree."""
    if len(text) != 1:
        return False
    code = ord(text)
    if width == 1:
        is_latin = 0x20 <= code < 0x300
        is_greek_or_cyrillic = 0x370 <= code < 0x483
        is_soft_hyphen = code == 0xAD
        return (is_latin or is_greek_or_cyrillic) and not is_soft_hyphen
    is_east_asian = 0x3001 <= code < 0xFF61
    return width == 2 and is_east_asian


def _width(character: str) -> int:
    """Return the number of columns of a character, for an emoji the largest number in use."""
    is_emoji = 0x1F000 <= ord(character) < 0x1FB00
    return 2 if is_emoji else max(0, wcwidth(character))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen."""

    #: What it shows, from left to right.
    cells: tuple[Cell, ...]
    #: The largest number of columns that a terminal may use for its cells.
    width: int
    #: Whether the next row follows without a line feed: the terminal itself breaks the line there.
    joined: bool = False
    #: The spaces between this row's last word and the next row's first, which are not drawn.
    gap: tuple[Cell, ...] = ()

    def runs(self) -> Iterator[tuple[str, str]]:
        """Yield the row's text in stretches of one mark, each with its mark."""
        for mark, cells in groupby(self.cells, attrgetter("mark")):
            yield "".join(cell.text for cell in cells), mark

    def codes(self, pens: Pens) -> str:
        """Return the row's text with escape codes."""
        return "".join([coded(text, pens[mark]) for text, mark in self.runs()])


EMPTY_ROW = Row((), 0)


def wrap(
    cells: Sequence[Cell],
    columns: int,
    first_columns: int | None = None,
    *,
    between_words: bool = False,
) -> list[Row]:
    """Lay out one line in rows; even an empty line has one.

    A row only fills the screen's width if all its cells have an exact width. Otherwise at least one
    column stays free.

    Args:
        cells: The line's cells.
        columns: The width of the screen.
        first_columns: The width of the first row; None if it is the same.
        between_words: Whether to break the line between words where possible.
    """
    rows: list[Row] = []
    start = 0
    row_columns = columns if first_columns is None else first_columns
    while True:
        end = _end_of_row(cells, start, row_columns)
        if end == start < len(cells) and row_columns == columns:
            end += 1  # a cell wider than the screen gets a row of its own
        is_last = end == len(cells)
        gap = None
        if between_words and not is_last:
            gap = _gap_between_words(cells, start, end)
        if gap is not None:
            # End the row between words, and drop the spaces there.
            words = tuple(cells[start : gap.start])
            spaces = tuple(cells[gap.start : gap.stop])
            rows.append(Row(words, _total_width(words), gap=spaces))
            start = gap.stop
        else:
            # End the row where it is full. If it fills the screen's width, no line feed follows.
            fitting = tuple(cells[start:end])
            width = _total_width(fitting)
            rows.append(Row(fitting, width, joined=width == columns and not is_last))
            if is_last:
                return rows
            start = end
        row_columns = columns


def _end_of_row(cells: Sequence[Cell], start: int, columns: int) -> int:
    """Return the end of the cells from `start` on that fit in a row of `columns` columns."""
    width = 0
    n_spare_columns = 0
    for end in range(start, len(cells)):
        width += cells[end].width
        if not cells[end].exact:
            n_spare_columns = 1
        if width + n_spare_columns > columns:
            return end
    return len(cells)


def _total_width(cells: Iterable[Cell]) -> int:
    return sum(cell.width for cell in cells)


def _gap_between_words(
    cells: Sequence[Cell],
    start: int,
    end: int,
) -> range | None:
    """Return the range of spaces at which to end a row that has room for `cells[start:end]`.

    Returns:
        The indices of the last spaces in the row or right after it. The range is empty where a row
        can end without spaces, next to a wide character. None if there is no good place in the
        second half of the row, or if the row can simply end at `end`.
    """
    middle = start + (end - start) // 2
    for n in range(end, middle, -1):
        if cells[n].text == " ":
            first_space = n
            while first_space > start and cells[first_space - 1].text == " ":
                first_space -= 1
            return range(first_space, n + 1) if first_space > start else None
        # Scripts with wide characters have no spaces.
        if cells[n].width > 1 or cells[n - 1].width > 1:
            return range(n, n) if n < end else None
    return None


def _columns_of(rows: Iterable[Row]) -> int:
    """Return the number of columns of rows on one line, with the spaces that are not drawn."""
    return sum(row.width + _total_width(row.gap) for row in rows)


class Flow:
    """Lays out a growing text in rows, and keeps the rows that were not handed out yet."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._cleaner = Cleaner()
        #: Rows of finished lines that were not handed out yet.
        self._settled: list[Row] = []
        #: The rows of the last line that were not handed out yet; at least one, which may be empty.
        #: Only the last of them can still change.
        self.rows: list[Row] = [EMPTY_ROW]
        #: The number of columns of the last line before its last row, with the spaces between rows;
        #: tab stops depend on it.
        self._columns_before = 0
        #: Whether the last line is in a block of code.
        self._in_code = False
        #: Whether the last line is the fence that begins or ends a block of code.
        self._is_fence = False
        #: Whether the last line is code or a table, which is broken anywhere, not between words.
        self._is_literal = False

    def feed(self, runs: Iterable[Run]) -> None:
        """Add text. Line feeds in rejected text are shown as signs, and do not break lines."""
        # Only the last row can change, so it is laid out again with the new text.
        cells = list(self.rows[-1].cells)
        for run in runs:
            if run.mark == "rejected":
                self._append(cells, clean_line(run.text), run.mark)
                continue
            first, *others = self._cleaner.feed(run.text).split("\n")
            self._append(cells, first, run.mark)
            for part in others:
                self._lay_out(cells)
                self._start_line()
                cells = []
                self._append(cells, part, run.mark)
        self._lay_out(cells)

    def resize(self, columns: int) -> None:
        """Lay out the rows of the last line again, for another width of the screen."""
        self.columns = columns
        self._columns_before -= _columns_of(self.rows[:-1])
        cells = [cell for row in self.rows for cell in (*row.cells, *row.gap)]
        self.rows = [EMPTY_ROW]
        self._lay_out(cells)

    def take_settled(self, n_kept: int, n_max_kept: int) -> list[Row]:
        """Hand out the rows of finished lines, and the first rows of the last line.

        Args:
            n_kept: The number of rows of the last line to keep. More are kept if the last row that
                is handed out would be joined to the next one, since a line feed has to follow it.
            n_max_kept: If more rows than this would be kept, joined rows are separated anyway.
        """
        n_rows = len(self.rows)
        n_taken = max(0, n_rows - n_kept)
        while n_taken and self.rows[n_taken - 1].joined:
            n_taken -= 1
        if n_rows - n_taken > n_max_kept:
            n_taken = n_rows - n_kept
        settled = self._settled + self.rows[:n_taken]
        self._settled = []
        del self.rows[:n_taken]
        return settled

    def finish(self) -> list[Row]:
        """End the text, and hand out all rows that are left."""
        self.feed([Run(self._cleaner.finish(), "plain")])
        settled = self._settled
        if self.rows != [EMPTY_ROW] or self._columns_before:
            settled = settled + self.rows
        self._settled = []
        self.rows = [EMPTY_ROW]
        self._columns_before = 0
        return settled

    def _append(self, cells: list[Cell], text: str, mark: str) -> None:
        """Append the cells of a text without line feeds; tabs become spaces."""
        # Rejected text is never joined with other text: it is not part of the same word.
        join = not cells or (cells[-1].mark == "rejected") == (mark == "rejected")
        before_first_tab, *others = text.split("\t")
        append_cells(cells, before_first_tab, mark, join=join)
        for part in others:
            column = self._columns_before + _total_width(cells)
            n_spaces = TAB_COLUMNS - column % TAB_COLUMNS
            append_cells(cells, " " * n_spaces, mark)
            append_cells(cells, part, mark)

    def _lay_out(self, cells: list[Cell]) -> None:
        """Replace the last row with these cells, which may need several rows."""
        is_first_row = self._columns_before == 0
        if is_first_row:
            # The beginning of a Markdown line tells whether it is a fence, code or a table.
            beginning = "".join(cell.text for cell in cells[:_N_BEGINNING])
            self._is_fence = beginning.lstrip().startswith(("```", "~~~"))
            self._is_literal = self._in_code or beginning.startswith(("    ", "|"))
        rows = wrap(cells, self.columns, between_words=not self._is_literal)
        self.rows[-1:] = rows
        self._columns_before += _columns_of(rows[:-1])

    def _start_line(self) -> None:
        """Settle the rows of the last line, and start another one."""
        if self._is_fence:
            self._in_code = not self._in_code
        self._settled += self.rows
        self.rows = [EMPTY_ROW]
        self._columns_before = 0
