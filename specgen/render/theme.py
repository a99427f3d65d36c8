"""The colours and styles of the marks.

The colours are the terminal's own sixteen, so that they suit dark and light backgrounds. The attributes mean
the same without colours: accepted tokens are underlined, tokens that the target chose itself are bold, and a
bonus token is both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from specgen.render.layout import Row
from specgen.render.marks import LEGEND

#: By mark.
STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "accepted": Style(color="green", underline=True),
        "corrected": Style(color="magenta", bold=True),
        "bonus": Style(color="cyan", bold=True, underline=True),
        "plain": Style.null(),
        "forced": Style(color="blue"),
        "rejected": Style(color="red", strike=True),
        "aside": Style(color="red", dim=True),
    }
)

#: The style of text that is not the answer: the status line, labels of the summary.
FAINT = Style(dim=True)

#: Escape codes before and after a stretch of text.
Pen: TypeAlias = tuple[str, str]
#: By mark; besides these, "faint" for what is not the answer.
Pens: TypeAlias = Mapping[str, Pen]


def pens(console: Console, *, forced: bool = False) -> Pens:
    """Return the escape codes for each mark on this console; none if it has none, unless `forced`.

    Without colours (NO_COLOR) the attributes stay, and rejected text is also dimmed: not every terminal
    strikes text through.
    """
    styles: dict[str, Style] = {**STYLES, "faint": FAINT}
    if console.no_color:
        styles["rejected"] += FAINT
        styles = {mark: style.without_color for mark, style in styles.items()}
    plain = console.color_system is None and not forced
    found = {"": ("", "")}
    for mark, style in styles.items():
        coded = style.render("\0", color_system=None if plain else ColorSystem.STANDARD)
        before, _, after = coded.partition("\0")
        found[mark] = (before, after)
    return MappingProxyType(found)


def coded(text: str, pen: Pen) -> str:
    """Return text with its codes; nothing for an empty text."""
    before, after = pen
    return f"{before}{text}{after}" if text else ""


def row_codes(row: Row, codes: Pens) -> str:
    """Return a row with its codes, for a terminal."""
    return "".join([coded(text, codes[mark]) for text, mark in row.runs()])


def row_text(row: Row) -> Text:
    """Return a row for Rich to print."""
    text = Text(no_wrap=True, end="")
    for part, mark in row.runs():
        text.append(part, STYLES.get(mark))
    return text


def legend() -> Text:
    """Return the names of the marks, each in its own style."""
    return Text("  ").join(Text(mark, STYLES[mark]) for mark in LEGEND)


__all__ = ["FAINT", "STYLES", "Pen", "Pens", "coded", "legend", "pens", "row_codes", "row_text"]
