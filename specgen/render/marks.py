"""The mark of each piece of text: accepted, rejected, corrected, and so on.

The three events of a round are brought together here, so that the views need not know how
a draft's tree relates to the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    Event,
    Piece,
    RejectedBranch,
    TokenKind,
    VerifiedEvent,
)

#: How a stretch of text came about; ``faint`` is what is not the answer.
Mark: TypeAlias = TokenKind | Literal["rejected", "aside", "faint"]

#: In the order of a legend.
MARKS: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "forced", "rejected", "aside")
#: What a legend explains: all but what only a grammar brings about.
LEGEND: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "rejected")


class Run(NamedTuple):
    """A stretch of text with one mark."""

    text: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Round:
    """What one round added to the answer, and what it lost."""

    pieces: tuple[Piece, ...]
    #: (index of the piece that took its place, text) for each lost branch of the draft.
    rejected: tuple[tuple[int, str], ...]

    def runs(self, *, with_rejected: bool) -> Iterator[Run]:
        """The text in order; with the lost branches each where it was refused, if asked: struck
        out where it was the only one and nothing drafted took its place, else in brackets, for
        the text to stay legible."""
        for index, piece in enumerate(self.pieces):
            lost = [text for place, text in self.rejected if place == index and text]
            if with_rejected and lost:
                if len(lost) == 1 and piece.kind != "accepted":
                    yield Run(lost[0], "rejected")
                else:
                    notes = "|".join(text.replace("\n", "\\n") for text in lost)
                    yield Run(f"[{notes}]", "aside")
            if piece.text:
                yield Run(piece.text, piece.kind)


class RoundReader:
    """Puts the events of a round together."""

    def __init__(self) -> None:
        self._drafted: DraftedEvent | None = None
        self._verified: VerifiedEvent | None = None

    def read(self, event: Event) -> Round | None:
        """The round, with the event that completes it."""
        if isinstance(event, DraftedEvent):
            self._drafted = event
        elif isinstance(event, VerifiedEvent):
            self._verified = event
        elif isinstance(event, CommittedEvent):
            drafted, verified = self._drafted, self._verified
            self._drafted = self._verified = None
            rejected: tuple[tuple[int, str], ...] = ()
            if verified is not None:
                rejected = tuple(
                    (_position(branch, verified, drafted), branch.text)
                    for branch in verified.rejected
                )
            return Round(event.pieces, rejected)
        return None


def _position(branch: RejectedBranch, verified: VerifiedEvent, drafted: DraftedEvent | None) -> int:
    """Index of the committed piece at the place where a branch left the accepted path."""
    n_accepted = len(verified.accepted)
    if drafted is None or not branch.nodes:
        return n_accepted
    parent = drafted.nodes[branch.nodes[0]].parent
    if parent < 0:
        return 0
    return verified.accepted.index(parent) + 1 if parent in verified.accepted else n_accepted


__all__ = ["LEGEND", "MARKS", "Mark", "Round", "RoundReader", "Run"]
