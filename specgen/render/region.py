"""The bottom of a terminal, repainted without flicker.

Rich's `Live` does this for any renderable, but it erases before it writes, and it forgets
its own height when the window changes. Here every row is written over the old one, and the
cursor rests at the region's upper left corner, where it stays however the terminal moves
text about when its window changes. Rows of the region are cut off at the edge rather than
wrapped, so that their number is known even if the window has just become narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_HIDE_CURSOR = "\x1b[?25l"
_SHOW_CURSOR = "\x1b[?25h"
_WRAP_ON = "\x1b[?7h"
_WRAP_OFF = "\x1b[?7l"
_ERASE_RIGHT = "\x1b[K"
_ERASE_BELOW = "\x1b[J"


class Line(NamedTuple):
    """One row of the screen, ready to be written."""

    codes: str
    #: It reaches the right edge; nothing is left to be erased there.
    full: bool = False
    #: The next line follows without a line feed, if both are settled at once. Only if `full`.
    joined: bool = False


class Region:
    """Writes rows that stay, and below them rows that are replaced the next time.

    `write` takes text with escape codes and must put it out at once.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._open = False

    def paint(self, settled: Sequence[Line], moving: Sequence[Line]) -> None:
        """Replace the region: `settled` rows scroll away for good, `moving` is the new region.

        Args:
            settled: further rows of the text.
            moving: at least one row, and fewer than the screen has.
        """
        parts = ["\r"] if self._open else [_HIDE_CURSOR, "\r"]
        if settled:
            parts += (_ERASE_BELOW, *_settled_codes(settled))
        parts.append(_WRAP_OFF)
        for line in moving[:-1]:
            # A row that reaches the edge leaves nothing to erase.
            parts += (line.codes, "" if line.full else _ERASE_RIGHT, "\n")
        last = moving[-1]
        # After a full row the cursor is still on its last column, and erasing would hit it.
        parts += (last.codes, "\n" if last.full else "", _ERASE_BELOW, _WRAP_ON)
        n_up = len(moving) - 1 + last.full
        parts.append(f"\x1b[{n_up}A\r" if n_up else "\r")
        self._open = True
        self._write("".join(parts))

    def erase(self) -> None:
        """Remove the region, so that something else can be printed in its place."""
        if self._open:
            self._write(f"\r{_ERASE_BELOW}")

    def close(self, settled: Sequence[Line]) -> None:
        """Write the last rows in the region's place and give the cursor back."""
        if self._open or settled:
            self._open = False
            parts = ("\r", _ERASE_BELOW, *_settled_codes(settled), _SHOW_CURSOR)
            self._write("".join(parts))


def _settled_codes(lines: Sequence[Line]) -> Iterator[str]:
    """Rows that stay. Nothing is erased after them, since a row that turns out to be too long
    ends somewhere else; between joined ones it is the terminal that breaks the line."""
    for line in lines[:-1]:
        yield line.codes
        if not line.joined:
            yield "\n"
    for line in lines[-1:]:
        # Never joined to the region: the terminal might make one row of both.
        yield f"{line.codes}\n"


__all__ = ["Line", "Region"]
