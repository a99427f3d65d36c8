"""Text for a terminal: cleaned, marked by where it comes from, and laid out in rows.

A `Cell` is what a reader takes for one character. Terminals disagree about the width of emoji
sequences, so a cell has the largest usual width, and a row never runs over the edge. Prose is
broken between words. Code, tables, and words longer than a row are broken where the terminal itself
would break them, so that it joins their rows when text is copied. No row depends on more than the
first cell of the next row: all rows of a growing text (`Flow`) but the last are settled.
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
#: Ranges of characters that are replaced: control characters beyond ASCII, those that reorder text
#: on the screen, and surrogates, which UTF-8 cannot encode.
_REPLACED = (
    range(0x80, 0xA0),
    range(0x202A, 0x202F),
    range(0x2066, 0x206A),
    range(0xD800, 0xE000),
)


def _signs() -> dict[int, str]:
    """Return what is shown instead of characters, by their code points."""
    # The signs of ASCII's control characters follow U+2400, the sign of NUL.
    signs = {code: chr(0x2400 + code) for code in range(0x20)}
    del signs[ord("\n")]
    del signs[ord("\t")]
    signs[0x7F] = "\N{SYMBOL FOR DELETE}"
    for codes in _REPLACED:
        signs.update(dict.fromkeys(codes, _REPLACEMENT))
    # The line and paragraph separators.
    signs[0x2028] = "\n"
    signs[0x2029] = "\n"
    return signs


_SIGNS = _signs()


class Cleaner:
    """Replaces characters that control a terminal, or that UTF-8 cannot encode, in a text stream.

    Line feeds and tabs pass; CR LF and the Unicode line and paragraph separators become line feeds.
    """

    def __init__(self) -> None:
        #: A carriage return at the end of the last piece, which a line feed may follow.
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the clean text; a carriage return at the end waits for the next piece."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        text = text.removesuffix("\r")
        if text.isprintable():  # translating is slow, and rarely needed
            return text
        return text.replace("\r\n", "\n").translate(_SIGNS)

    def finish(self) -> str:
        """Return what was held back."""
        held = self._held
        self._held = ""
        return held.translate(_SIGNS)


def clean(text: str) -> str:
    """Return a whole text as `Cleaner` cleans it."""
    cleaner = Cleaner()
    return cleaner.feed(text) + cleaner.finish()


def clean_line(text: str) -> str:
    """Return a clean text without line breaks and tabs."""
    newline = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    return clean(text).replace("\n", newline).replace("\t", "    ")


# --- marks

#: Where a piece of text comes from. An ``aside`` lists several rejected branches; ``faint`` text is
#: not part of the answer, such as thoughts.
Mark: TypeAlias = TokenKind | Literal["rejected", "aside", "faint"]
#: The marks in a legend: without forced tokens, which only grammars cause.
LEGEND: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "rejected")
#: Styles by mark. The colours are the terminal's sixteen, which suit dark and light backgrounds.
#: The most important difference is visible without colours too: accepted tokens are underlined, and
#: rejected ones struck through.
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
#: Escape codes before and after a stretch of text, by mark.
Pens: TypeAlias = Mapping[str, tuple[str, str]]


def styles_on(console: Console) -> Mapping[str, Style]:
    """Return the style of each mark on this console.

    Without colours (NO_COLOR) the attributes stay. The target's corrected and bonus tokens are then
    bold, and rejected text is also dimmed: not every terminal strikes text through.
    """
    if not console.no_color:
        return STYLES
    styles = dict(STYLES)
    for mark in ("corrected", "bonus"):
        styles[mark] += Style(bold=True)
    styles["rejected"] += STYLES["faint"]
    return {mark: style.without_color for mark, style in styles.items()}


def pens(console: Console) -> Pens:
    """Return the escape codes of each mark on this console; the empty mark has none."""
    system = None if console.color_system is None else ColorSystem.STANDARD
    codes = {"": ("", "")}
    for mark, style in styles_on(console).items():
        before, _, after = style.render("\0", color_system=system).partition("\0")
        codes[mark] = (before, after)
    return codes


def coded(text: str, pen: tuple[str, str]) -> str:
    """Return a text between escape codes; an empty text needs none."""
    if not text:
        return ""
    before, after = pen
    return f"{before}{text}{after}"


# --- rounds


class Run(NamedTuple):
    """A stretch of text with one mark."""

    text: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Round:
    """The events of one round."""

    committed: CommittedEvent
    #: The draft's nodes; empty in a round without a draft.
    nodes: tuple[DraftNode, ...] = ()
    #: Indices of the accepted nodes, which are one path.
    accepted: tuple[int, ...] = ()
    rejected: tuple[RejectedBranch, ...] = ()
    #: What a second draft guessed of the first, in words.
    guesses: str = ""

    def position_of(self, branch: RejectedBranch) -> int:
        """Return how many accepted tokens a rejected branch follows."""
        parent = self.nodes[branch.nodes[0]].parent
        if parent < 0:
            return 0
        return self.accepted.index(parent) + 1

    def runs(self, *, shows_all: bool) -> Iterator[Run]:
        """Yield the committed text in order.

        With `shows_all`, rejected branches come before the token that replaced them: a single one
        is struck through, several are listed in brackets.
        """
        for index, piece in enumerate(self.committed.pieces):
            if shows_all:
                yield from self._rejected_at(index, piece.kind)
            if piece.text:
                yield Run(piece.text, piece.kind)

    def _rejected_at(self, position: int, kind: TokenKind) -> Iterator[Run]:
        branches = [each for each in self.rejected if self.position_of(each) == position]
        texts = [branch.text for branch in branches if branch.text]
        if len(texts) == 1 and kind != "accepted":
            yield Run(texts[0], "rejected")
        elif texts:
            yield Run(f"[{'|'.join(texts)}]".replace("\n", "\\n"), "aside")


class RoundReader:
    """Combines the events of a round."""

    def __init__(self) -> None:
        self._drafted: DraftedEvent | None = None
        self._verified: VerifiedEvent | None = None

    def read(self, event: Event) -> Round | None:
        """Take the next event, and return the round that it completes."""
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

#: How many characters at the beginning of a line show whether it is code.
_N_BEGINNING = 16
#: Distance of the tab stops, in columns.
TAB_COLUMNS = 8
#: The most code points and columns of a cell. Longer graphemes are not writing, but letters with an
#: excess of combining marks; they are cut.
_MAX_CELL_LENGTH = 24
_MAX_CELL_WIDTH = 8


class Cell(NamedTuple):
    """A user-perceived character."""

    text: str
    #: The most columns that it may take.
    width: int
    #: Whether every terminal agrees on the width.
    exact: bool
    #: Its mark. A space has none unless it is rejected, so that words are underlined one by one.
    mark: str


def append_cells(cells: list[Cell], text: str, mark: str, *, join: bool = True) -> None:
    """Cut clean text without line feeds and tabs into cells.

    Args:
        cells: where to append them.
        text: the text.
        mark: the mark of the text.
        join: whether the beginning of the text may continue the last cell.
    """
    if not text:
        return
    first_mark = mark
    if cells and join:
        last = cells.pop()
        text = last.text + text
        first_mark = last.mark
    for grapheme in iter_graphemes(text):
        for piece in _pieces(grapheme):
            cells.append(_cell(piece, first_mark))
            first_mark = mark


@lru_cache(maxsize=4096)
def _pieces(grapheme: str) -> tuple[str, ...]:
    """Cut a grapheme that is too large. A combining mark without a letter gets a space."""
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
    if "\N{VARIATION SELECTOR-16}" in text:
        width = max(width, 2)
    return Cell(text, width, _has_exact_width(text, width), mark)


def _has_exact_width(text: str, width: int) -> bool:
    """Return whether a text is one character of a script whose widths are undisputed."""
    if len(text) != 1:
        return False
    code = ord(text)
    if width == 1:
        is_soft_hyphen = code == 0xAD
        # Latin, Greek and Cyrillic.
        return (0x20 <= code < 0x300 or 0x370 <= code < 0x483) and not is_soft_hyphen
    # Chinese, Japanese and Korean.
    return width == 2 and 0x3001 <= code < 0xFF61


def _width(character: str) -> int:
    is_emoji = 0x1F000 <= ord(character) < 0x1FB00
    return 2 if is_emoji else max(0, wcwidth(character))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen."""

    cells: tuple[Cell, ...]
    #: The most columns that its cells may take.
    width: int
    #: The next row follows without a line feed: the terminal itself breaks the line there.
    joined: bool = False
    #: Spaces between this row's last word and the next row's first, which are not drawn.
    gap: tuple[Cell, ...] = ()

    def runs(self) -> Iterator[tuple[str, str]]:
        """Yield each stretch of text with one mark, and the mark."""
        for mark, cells in groupby(self.cells, attrgetter("mark")):
            yield "".join(cell.text for cell in cells), mark

    def codes(self, pens: Pens) -> str:
        """Return the text with escape codes."""
        return "".join([coded(text, pens[mark]) for text, mark in self.runs()])


EMPTY_ROW = Row((), 0)


def wrap(
    cells: Sequence[Cell],
    columns: int,
    first_columns: int | None = None,
    *,
    between_words: bool = False,
) -> list[Row]:
    """Lay out one line, which gives at least one row.

    A row is as wide as the screen only if all its cells have an exact width, otherwise it is at
    least one column narrower.

    Args:
        cells: the line.
        columns: the width of the screen.
        first_columns: the width of the first row, if it is less.
        between_words: whether to break the line between words where possible.
    """
    rows: list[Row] = []
    start = 0
    room = columns if first_columns is None else first_columns
    while True:
        end = _end_of_row(cells, start, room)
        if end == start < len(cells) and room == columns:
            end += 1  # a cell wider than the screen has a row of its own
        is_last = end == len(cells)
        gap = None
        if between_words and not is_last:
            gap = _gap_between_words(cells, start, end)
        if gap is not None:
            words = tuple(cells[start : gap.start])
            spaces = tuple(cells[gap.start : gap.stop])
            rows.append(Row(words, _total_width(words), gap=spaces))
            start = gap.stop
        else:
            fitting = tuple(cells[start:end])
            width = _total_width(fitting)
            rows.append(Row(fitting, width, joined=width == columns and not is_last))
            if is_last:
                return rows
            start = end
        room = columns


def _end_of_row(cells: Sequence[Cell], start: int, room: int) -> int:
    """Return the end of the cells from `start` that fit into `room` columns."""
    width = 0
    n_spare = 0
    for end in range(start, len(cells)):
        width += cells[end].width
        if not cells[end].exact:
            n_spare = 1
        if width + n_spare > room:
            return end
    return len(cells)


def _total_width(cells: Iterable[Cell]) -> int:
    return sum(cell.width for cell in cells)


def _gap_between_words(cells: Sequence[Cell], start: int, end: int) -> range | None:
    """Return the spaces at which to end a row that has room for `cells[start:end]`.

    The range is empty between characters of a script without spaces. None if no word ends in the
    second half of the row.
    """
    for n in range(end, start + (end - start) // 2, -1):
        if cells[n].text == " ":
            before = n
            while before > start and cells[before - 1].text == " ":
                before -= 1
            return range(before, n + 1) if before > start else None
        if cells[n].width > 1 or cells[n - 1].width > 1:  # scripts without spaces
            return range(n, n) if n < end else None
    return None


class Flow:
    """Lays text out in rows, and keeps those that `take_settled` has not handed out."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._cleaner = Cleaner()
        #: Rows of finished lines.
        self._settled: list[Row] = []
        #: The last line's rows, at least one, which may be empty. Only the last of them can grow.
        self.rows: list[Row] = [EMPTY_ROW]
        #: Columns of the last line before its last row; tab stops depend on it.
        self._columns_before = 0
        #: Whether the text is in a block of code.
        self._in_code = False
        #: Whether the last line begins or ends a block of code.
        self._is_fence = False
        #: Whether the last line may be broken anywhere, since it is code or a table.
        self._is_literal = False

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
                self._start_line()
                cells = []
                self._append(cells, part, run.mark)
        self._lay_out(cells)

    def resize(self, columns: int) -> None:
        """Lay out the last line's rows again, for another width."""
        self.columns = columns
        self._columns_before -= sum(row.width for row in self.rows[:-1])
        cells = [cell for row in self.rows for cell in (*row.cells, *row.gap)]
        self.rows = [EMPTY_ROW]
        self._lay_out(cells)

    def take_settled(self, n_kept: int, n_most: int) -> list[Row]:
        """Hand out the rows of finished lines, and the first of the last line.

        Args:
            n_kept: how many rows of the last line to keep; more if rows that are joined would
                otherwise be separated.
            n_most: the most rows to keep even so.
        """
        n_rows = len(self.rows)
        n_taken = max(0, n_rows - n_kept)
        while n_taken and self.rows[n_taken - 1].joined:
            n_taken -= 1
        if n_rows - n_taken > n_most:
            n_taken = n_rows - n_kept
        settled = self._settled + self.rows[:n_taken]
        self._settled = []
        del self.rows[:n_taken]
        return settled

    def finish(self) -> list[Row]:
        """Hand out all rows that are left."""
        self.feed([Run(self._cleaner.finish(), "plain")])
        settled = self._settled
        if self.rows != [EMPTY_ROW] or self._columns_before:
            settled = settled + self.rows
        self._settled = []
        self.rows = [EMPTY_ROW]
        self._columns_before = 0
        return settled

    def _append(self, cells: list[Cell], text: str, mark: str) -> None:
        """Add the cells of a text, with spaces for tabs."""
        join = not cells or (cells[-1].mark == "rejected") == (mark == "rejected")
        before, *others = text.split("\t")
        append_cells(cells, before, mark, join=join)
        for part in others:
            column = self._columns_before + _total_width(cells)
            append_cells(cells, " " * (TAB_COLUMNS - column % TAB_COLUMNS), mark)
            append_cells(cells, part, mark)

    def _lay_out(self, cells: list[Cell]) -> None:
        """Replace the last row by these cells, which may need several rows."""
        is_first_row = self._columns_before == 0
        if is_first_row:
            beginning = "".join(cell.text for cell in cells[:_N_BEGINNING])
            self._is_fence = beginning.lstrip().startswith(("```", "~~~"))
            self._is_literal = self._in_code or beginning.startswith(("    ", "|"))
        rows = wrap(cells, self.columns, between_words=not self._is_literal)
        self.rows[-1:] = rows
        self._columns_before += sum(row.width for row in rows[:-1])

    def _start_line(self) -> None:
        if self._is_fence:
            self._in_code = not self._in_code
        self._settled += self.rows
        self.rows = [EMPTY_ROW]
        self._columns_before = 0
