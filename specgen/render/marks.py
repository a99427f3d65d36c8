"""The mark of each piece of text (accepted, rejected, corrected, and so on), and its style.

The colours are the terminal's own sixteen, so that they suit dark and light backgrounds. The attributes mean the
same without colours: accepted tokens are underlined, tokens that the target chose itself are bold, and a bonus
token is both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from specgen.events import CommittedEvent, DraftedEvent, Event, Piece, TokenKind, VerifiedEvent

#: The origin of a piece of text; ``faint`` marks text that is not the answer,
#: such as the reason of a round.
Mark: TypeAlias = TokenKind | Literal["rejected", "aside", "faint"]

#: The marks of a legend: all except those that only grammars cause.
LEGEND: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "rejected")
#: The style of text that is not the answer: the status line, labels of the summary.
FAINT = Style(dim=True)
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
        "faint": FAINT,
    }
)
#: Escape codes before and after a stretch of text, by mark.
Pens: TypeAlias = Mapping[str, tuple[str, str]]


class Run(NamedTuple):
    """A stretch of text with one mark."""

    text: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Round:
    """The text that one round added to the answer, and the branches that it rejected."""

    pieces: tuple[Piece, ...]
    #: (index of the piece that took its place, text) for each rejected branch of the draft.
    rejected: tuple[tuple[int, str], ...]
    #: Why the round drafted what it drafted, in words; empty if the round before had the same reason.
    reason: str = ""

    def runs(self, *, shows_all: bool) -> Iterator[Run]:
        """Yield the text in order, and with `shows_all` each rejected branch at its position, and the
        reason at the end of the round's last line. A branch is struck out if it was the only one and no
        drafted token took its place; otherwise it is in brackets, so that the text stays legible."""
        for index, piece in enumerate(self.pieces):
            lost = [text for place, text in self.rejected if place == index and text]
            if shows_all and lost:
                if len(lost) == 1 and piece.kind != "accepted":
                    yield Run(lost[0], "rejected")
                else:
                    notes = "|".join(text.replace("\n", "\\n") for text in lost)
                    yield Run(f"[{notes}]", "aside")
            has_reason = shows_all and self.reason and index == len(self.pieces) - 1
            line = piece.text.rstrip("\n") if has_reason else piece.text
            if line:
                yield Run(line, piece.kind)
            if has_reason:
                yield Run(f" [{self.reason}]", "faint")
            if line != piece.text:
                yield Run(piece.text.removeprefix(line), piece.kind)


class RoundReader:
    """Combines the events of a round, so that views need not know how a draft's tree relates to the text."""

    def __init__(self) -> None:
        self._drafted: DraftedEvent | None = None
        self._verified: VerifiedEvent | None = None
        self._reason: str | None = None

    def read(self, event: Event) -> Round | None:
        """Return the round at its last event; None at the others."""
        if isinstance(event, DraftedEvent):
            self._drafted = event
        elif isinstance(event, VerifiedEvent):
            self._verified = event
        if not isinstance(event, CommittedEvent):
            return None
        rejected = tuple(self._rejected())
        self._drafted = self._verified = None
        reason = event.reason_text or "" if event.reason != self._reason else ""
        self._reason = event.reason or self._reason
        return Round(event.pieces, rejected, reason)

    def _rejected(self) -> Iterator[tuple[int, str]]:
        """Yield for each rejected branch the index of the committed piece at the position where it left the
        accepted path, and its text."""
        verified, drafted = self._verified, self._drafted
        for branch in verified.rejected if verified is not None else ():
            assert verified is not None
            place = len(verified.accepted)
            if drafted is not None and branch.nodes:
                parent = drafted.nodes[branch.nodes[0]].parent
                if parent < 0:
                    place = 0
                elif parent in verified.accepted:
                    place = verified.accepted.index(parent) + 1
            yield place, branch.text


def pens(console: Console) -> Pens:
    """Return the escape codes for each mark on this console; none if it has none.

    Without colours (NO_COLOR) the attributes stay, and rejected text is also dimmed: not every terminal
    strikes text through.
    """
    styles: dict[str, Style] = dict(STYLES)
    if console.no_color:
        styles["rejected"] += FAINT
        styles = {mark: style.without_color for mark, style in styles.items()}
    system = None if console.color_system is None else ColorSystem.STANDARD
    found = {"": ("", "")}
    for mark, style in styles.items():
        before, _, after = style.render("\0", color_system=system).partition("\0")
        found[mark] = (before, after)
    return found


def coded(text: str, pen: tuple[str, str]) -> str:
    """Return text with its codes; nothing for an empty text."""
    return f"{pen[0]}{text}{pen[1]}" if text else ""


def legend() -> Text:
    """Return the names of the marks, each in its own style."""
    return Text("  ").join(Text(mark, STYLES[mark]) for mark in LEGEND)
