"""Text for a terminal: cleaned, marked by where it comes from, and laid out in rows.

A `Cell` is what a reader takes for one character. Terminals disagree about the width of emoji
sequences, so its width is the largest that is usual, and a row never runs over the edge. Prose is
broken between words. Code, tables, and words longer than a row are broken where the terminal itself
would break them, so that it joins their rows when text is copied. No row depends on more than the
next row's first cell: all but the last of a growing text (`Flow`) are settled.
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

# --- text that a terminal does not obey

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: What stands for control characters (U+2400 is the sign of NUL), for what would reorder the text
#: on the screen, and for what UTF-8 cannot express.
_SIGNS: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F)), _REPLACEMENT),
    **dict.fromkeys((*range(0x2066, 0x206A), *range(0xD800, 0xE000)), _REPLACEMENT),
    **dict.fromkeys((0x2028, 0x2029), "\n"),
}


class Cleaner:
    """Replaces characters that a terminal would obey, or UTF-8 cannot express, in a stream of text.
    Line feeds and tabs pass; CR LF and the Unicode line and paragraph separators become line feeds.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the clean text; a carriage return at the end waits for the next piece."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix("\r")
        # To translate is slow, and rarely needed.
        return text if text.isprintable() else text.replace("\r\n", "\n").translate(_SIGNS)

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held.translate(_SIGNS)


def clean(text: str) -> str:
    cleaner = Cleaner()
    return cleaner.feed(text) + cleaner.finish()


def clean_line(text: str) -> str:
    """Return a text cleaned for where it must not break the line."""
    newline = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    return clean(text).replace("\n", newline).replace("\t", "    ")


# --- marks

#: The origin of a piece of text; ``faint`` marks text that is not the answer, such as thoughts.
Mark: TypeAlias = TokenKind | Literal["rejected", "aside", "faint"]
#: The marks of a legend: all except those that only grammars cause.
LEGEND: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "rejected")
#: By mark. The colours are the terminal's own sixteen, which suit dark and light backgrounds. What
#: matters most is said without them, too: accepted tokens are underlined, and rejected ones struck
#: through.
STYLES: Mapping[str, Style] = {
    "accepted": Style(color="green", underline=True),
    "corrected": Style(color="magenta"),
    "bonus": Style(color="cyan"),
    "plain": Style.null(),
    "forced": Style(color="bright_blue"),  # blue is hardly seen on black
    "rejected": Style(color="red", strike=True),
    "aside": Style(color="red", dim=True),
    "faint": Style(dim=True),
}
#: Escape codes before and after a stretch of text, by mark.
Pens: TypeAlias = Mapping[str, tuple[str, str]]


def styles_on(console: Console) -> Mapping[str, Style]:
    """Return the style of each mark on this console. Without colours (NO_COLOR) the attributes
    stay, the target's own tokens are bold, and rejected text is also dimmed: not every terminal
    strikes text through.
    """
    if not console.no_color:
        return STYLES
    bold = {mark: STYLES[mark] + Style(bold=True) for mark in ("corrected", "bonus")}
    rejected = STYLES["rejected"] + STYLES["faint"]
    styles = {**STYLES, **bold, "rejected": rejected}
    return {mark: style.without_color for mark, style in styles.items()}


def pens(console: Console) -> Pens:
    system = None if console.color_system is None else ColorSystem.STANDARD
    found = {"": ("", "")}
    for mark, style in styles_on(console).items():
        before, _, after = style.render("\0", color_system=system).partition("\0")
        found[mark] = (before, after)
    return found


def coded(text: str, pen: tuple[str, str]) -> str:
    return f"{pen[0]}{text}{pen[1]}" if text else ""


class Run(NamedTuple):
    """A stretch of text with one mark."""

    text: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Round:
    """A round: its draft's nodes, what became of them, what it added to the answer, and what a
    second draft guessed.
    """

    committed: CommittedEvent
    nodes: tuple[DraftNode, ...] = ()
    accepted: tuple[int, ...] = ()
    rejected: tuple[RejectedBranch, ...] = ()
    guesses: str = ""

    def place(self, branch: RejectedBranch) -> int:
        # It begins at the root, or at the accepted node that is its first node's parent.
        return (-1, *self.accepted).index(self.nodes[branch.nodes[0]].parent)

    def runs(self, *, shows_all: bool) -> Iterator[Run]:
        """Yield the text in order, and with `shows_all` each rejected branch at its position: one
        alone is struck out.
        """
        for index, piece in enumerate(self.committed.pieces):
            branches = [each for each in self.rejected if self.place(each) == index]
            lost = [each.text for each in branches if each.text]
            if shows_all and len(lost) == 1 and piece.kind != "accepted":
                yield Run(lost[0], "rejected")
            elif shows_all and lost:
                yield Run(f"[{'|'.join(lost)}]".replace("\n", "\\n"), "aside")
            if piece.text:
                yield Run(piece.text, piece.kind)


class RoundReader:
    """Combines the events of a round."""

    def __init__(self) -> None:
        self._drafted: DraftedEvent | None = None
        self._verified: VerifiedEvent | None = None

    def read(self, event: Event) -> Round | None:
        if isinstance(event, DraftedEvent):
            self._drafted = event
        elif isinstance(event, VerifiedEvent):
            self._verified = event
        if not isinstance(event, CommittedEvent):
            return None
        drafted, verified = self._drafted, self._verified
        self._drafted = self._verified = None
        if drafted is None or verified is None:
            return Round(event)
        return Round(event, drafted.nodes, verified.accepted, verified.rejected, drafted.guesses)


# --- cells and rows

#: Characters that show whether a line is code.
_N_BEGINNING = 16
#: Distance of the tab stops, in columns.
TAB_COLUMNS = 8
#: The most code points and columns of a cell. A longer one is cut: its rest is excessive marks, not
#: writing.
_MAX_CELL_LENGTH, _MAX_CELL_WIDTH = 24, 8


class Cell(NamedTuple):
    """A user-perceived character."""

    text: str
    #: The most columns that it may take, and whether every terminal agrees on them.
    width: int
    exact: bool
    #: Its style. A space has none unless it is rejected, so that underlining does not run from word
    #: to word.
    mark: str


def append_cells(cells: list[Cell], text: str, mark: str, *, join: bool = True) -> None:
    """Cut clean text without line feeds and tabs into cells; with `join`, the first may belong to
    the last one there.
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
    """Cut a grapheme that is too large. A mark without a letter gets a space to stand on."""
    if wcwidth(grapheme[0]) == 0 and unicodedata.category(grapheme[0]) != "Cf":
        grapheme = f" {grapheme}"
    for n in range(2, len(grapheme) + 1):
        if n > _MAX_CELL_LENGTH or sum(map(_width, grapheme[:n])) > _MAX_CELL_WIDTH:
            return (grapheme[: n - 1], *_pieces(grapheme[n - 1 :]))
    return (grapheme,)


@lru_cache(maxsize=4096)
def _cell(text: str, mark: str) -> Cell:
    width, code = sum(map(_width, text)), ord(text[0])
    if text == " " and mark != "rejected":
        mark = ""
    if "\N{VARIATION SELECTOR-16}" in text:
        width = max(width, 2)
    # Nobody disputes the width of Latin, Greek and Cyrillic, nor of Chinese, Japanese and Korean.
    is_european = (0x20 <= code < 0x300 or 0x370 <= code < 0x483) and code != 0xAD
    exact = (width == 1 and is_european) or (width == 2 and 0x3001 <= code < 0xFF61)
    return Cell(text, width, exact and len(text) == 1, mark)


def _width(character: str) -> int:
    return 2 if 0x1F000 <= ord(character) < 0x1FB00 else max(0, wcwidth(character))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen, of at most `width` columns."""

    cells: tuple[Cell, ...]
    width: int
    #: The next row goes on without a line feed: the terminal itself breaks the line there.
    joined: bool = False
    #: Spaces between this row's last word and the next row's first, which are not drawn.
    gap: tuple[Cell, ...] = ()

    def runs(self) -> Iterator[tuple[str, str]]:
        for mark, cells in groupby(self.cells, attrgetter("mark")):
            yield "".join(cell.text for cell in cells), mark

    def codes(self, pens: Pens) -> str:
        return "".join([coded(text, pens[mark]) for text, mark in self.runs()])


EMPTY_ROW = Row((), 0)


def wrap(
    cells: Sequence[Cell],
    columns: int,
    first_columns: int | None = None,
    *,
    between_words: bool = False,
) -> list[Row]:
    """Lay one line out in at least one row, the first with room for `first_columns`, if that is
    less than `columns`. A row is as wide as the screen only if all its cells have an exact width,
    otherwise one column less.
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
        if end < len(cells) and between_words and (cut := _last_word(cells, start, end)):
            end, after = cut
            width = sum(cell.width for cell in cells[start:end])
            rows.append(Row(tuple(cells[start:end]), width, gap=tuple(cells[end:after])))
            start, room = after, columns
            continue
        rows.append(Row(tuple(cells[start:end]), width, width == columns and end < len(cells)))
        if end == len(cells):
            return rows
        start, room = end, columns


def _last_word(cells: Sequence[Cell], start: int, end: int) -> tuple[int, int] | None:
    """Return where a row with room for `cells[start:end]` ends between words, if in its second
    half, and the next begins.
    """
    for n in range(end, start + (end - start) // 2, -1):
        if cells[n].text == " ":
            before = n
            while before > start and cells[before - 1].text == " ":
                before -= 1
            return (before, n + 1) if before > start else None
        if cells[n].width > 1 or cells[n - 1].width > 1:  # scripts without spaces
            return (n, n) if n < end else None
    return None


class Flow:
    """Lays text out in rows and keeps those of the last line that `take_settled` has not handed
    out.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._cleaner = Cleaner()
        self._settled: list[Row] = []
        #: The last line's rows, at least one, which may be empty; the last of them is the one that
        #: grows.
        self.rows: list[Row] = [EMPTY_ROW]
        #: Columns of the last line before its last row; tab stops depend on it.
        self._columns_before = 0
        #: Whether the text is in a block of code; whether its last line is the edge of one, or is
        #: broken anywhere.
        self._in_code = self._is_fence = self._is_literal = False

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
                self._in_code ^= self._is_fence
                self._settled += self.rows
                self.rows, self._columns_before, cells = [EMPTY_ROW], 0, []
                self._append(cells, part, run.mark)
        self._lay_out(cells)

    def resize(self, columns: int) -> None:
        """Lay out the rows that were not handed out for another width."""
        self.columns = columns
        self._columns_before -= sum(row.width for row in self.rows[:-1])
        cells = [cell for row in self.rows for cell in (*row.cells, *row.gap)]
        self.rows = [EMPTY_ROW]
        self._lay_out(cells)

    def take_settled(self, n_kept: int, n_most: int) -> list[Row]:
        """Hand out the rows of finished lines, and those of the last line except `n_kept`; joined
        rows are handed out together, but at most `n_most` rows are kept.
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
        self.feed([Run(self._cleaner.finish(), "plain")])
        is_line = self.rows != [EMPTY_ROW] or self._columns_before
        settled = self._settled + (self.rows if is_line else [])
        self._settled, self.rows, self._columns_before = [], [EMPTY_ROW], 0
        return settled

    def _append(self, cells: list[Cell], text: str, mark: str) -> None:
        join = not cells or (cells[-1].mark == "rejected") == (mark == "rejected")
        before, *others = text.split("\t")
        append_cells(cells, before, mark, join=join)
        for part in others:
            column = self._columns_before + sum(cell.width for cell in cells)
            append_cells(cells, " " * (TAB_COLUMNS - column % TAB_COLUMNS), mark)
            append_cells(cells, part, mark)

    def _lay_out(self, cells: list[Cell]) -> None:
        if not self._columns_before:  # it is the line's first
            beginning = "".join(cell.text for cell in cells[:_N_BEGINNING])
            self._is_fence = beginning.lstrip().startswith(("```", "~~~"))
            self._is_literal = self._in_code or beginning.startswith(("    ", "|"))
        rows = wrap(cells, self.columns, between_words=not self._is_literal)
        self.rows[-1:] = rows
        self._columns_before += sum(row.width for row in rows[:-1])
