"""Make a model's text safe for a terminal, and split it into visible characters.

A model may write anything, escape sequences included. `Cleaner` lets through what prints
and replaces the rest by visible signs. `Cells` cuts clean text into cells: a cell is what
a reader takes for one character (a letter with its accents, an emoji of several code
points), with the number of terminal columns it may take.

Terminals disagree about the width of emoji sequences: a family of three takes two columns
in one and six in another. A cell's width is the largest that is usual, so that a row laid
out with it never runs over the edge, whichever terminal shows it.
"""

from __future__ import annotations

import codecs
import unicodedata
from functools import lru_cache
from typing import NamedTuple

from rich.cells import get_character_cell_size

#: Distance of the tab stops, in columns.
TAB_COLUMNS = 8

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ZERO_WIDTH_JOINER = 0x200D
_EMOJI_PRESENTATION = "\N{VARIATION SELECTOR-16}"

#: The most code points and columns of a cell. A longer one is cut: its rest is excessive marks, not writing,
#: and would not fit a narrow window.
_MAX_CELL_LENGTH = 24
_MAX_CELL_WIDTH = 8


def _signs() -> dict[int, str]:
    """Return the sign for each character that must not reach a terminal."""
    signs = {code: chr(0x2400 + code) for code in range(0x20)}  # U+2400 is the sign of NUL
    signs[0x7F] = "\N{SYMBOL FOR DELETE}"
    signs |= dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)  # C1, CSI among them
    # Overrides of the writing direction would reorder the text on the screen.
    signs |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT)
    signs |= dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
    signs |= {0x2028: "\n", 0x2029: "\n"}
    del signs[ord("\n")], signs[ord("\t")]
    return signs


_SIGNS = _signs()


class Cleaner:
    """Replaces characters that a terminal would obey, or cannot show, in a stream of text.

    Line feeds and tabs pass; CR LF and the Unicode line and paragraph separators become line feeds. Control
    characters become their signs (U+2400 and up) or U+FFFD; characters that `encoding` lacks become question
    marks.
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        name = codecs.lookup(encoding).name
        self._encoding = None if name.startswith("utf-8") else name
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the clean text; a carriage return at the end waits for the next piece."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        if self._held:
            text = text[:-1]
        return self._clean(text.replace("\r\n", "\n"))

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return self._clean(held)

    def _clean(self, text: str) -> str:
        if not text.isprintable():  # str.translate is slow, and rarely needed
            text = text.translate(_SIGNS)
        if self._encoding is not None:
            text = text.encode(self._encoding, "replace").decode(self._encoding)
        return text


def clean(text: str, encoding: str = "utf-8") -> str:
    """Return a whole text, cleaned."""
    cleaner = Cleaner(encoding)
    return cleaner.feed(text) + cleaner.finish()


def clean_line(text: str, encoding: str = "utf-8") -> str:
    """Return a text cleaned for a place where it must not break the line."""
    newline = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    if not can_encode(newline, encoding):
        newline = "\\n"
    return clean(text, encoding).replace("\n", newline).replace("\t", "    ")


def can_encode(text: str, encoding: str) -> bool:
    """Return whether an encoding has all of these characters."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


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

    @property
    def is_ideograph(self) -> bool:
        """Whether it is so wide that a row may end before or after it without a space."""
        return self.width > 1


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


def text_width(text: str) -> int:
    """Return the most columns that clean text may take."""
    if text.isascii():
        return len(text)
    cells: list[Cell] = []
    append_cells(cells, text, "")
    return sum(cell.width for cell in cells)


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
    """A Hangul vowel or final consonant, drawn into the syllable before it."""
    return 0x1160 <= code <= 0x11FF or 0xD7B0 <= code <= 0xD7FB


def _extended(cell: Cell, character: str) -> Cell | None:
    """The cell with one more character, if that belongs to it (after Unicode's UAX #29)."""
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
    """Whether a character belongs to a cell with this text and last code point."""
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


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


__all__ = [
    "TAB_COLUMNS",
    "Cell",
    "Cleaner",
    "append_cells",
    "can_encode",
    "clean",
    "clean_line",
    "counted",
    "text_width",
]
