"""The mark of each piece of text: accepted, rejected, corrected, and so on.

This module combines the three events of a round, so that views need not know how a draft's tree relates to
the text.
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

#: The origin of a piece of text; ``faint`` marks text that is not the answer.
Mark: TypeAlias = TokenKind | Literal["rejected", "aside", "faint"]

#: In the order of a legend.
MARKS: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "forced", "rejected", "aside")
#: The marks of a legend: all except those that only grammars cause.
LEGEND: tuple[Mark, ...] = ("accepted", "corrected", "bonus", "plain", "rejected")


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

    def runs(self, *, with_rejected: bool) -> Iterator[Run]:
        """Yield the text in order, and with `with_rejected` each rejected branch at its place. A branch is
        struck out if it was the only one and no drafted token took its place; otherwise it is in brackets, so
        that the text stays legible."""
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
    """Combines the events of a round."""

    def __init__(self) -> None:
        self._drafted: DraftedEvent | None = None
        self._verified: VerifiedEvent | None = None

    def read(self, event: Event) -> Round | None:
        """Return the round at its last event; None at the others."""
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
    """Return the index of the committed piece at the place where a branch left the accepted path."""
    n_accepted = len(verified.accepted)
    if drafted is None or not branch.nodes:
        return n_accepted
    parent = drafted.nodes[branch.nodes[0]].parent
    if parent < 0:
        return 0
    return verified.accepted.index(parent) + 1 if parent in verified.accepted else n_accepted


__all__ = ["LEGEND", "MARKS", "Mark", "Round", "RoundReader", "Run"]
