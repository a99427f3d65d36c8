"""What a loop's events tell the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.errors import BackendError
from specgen.events import CommittedEvent, Event, NoticeEvent


def check_drafting(events: Sequence[Event]) -> None:
    """Raise `BackendError` if the drafter failed: what goes on without it proves nothing."""
    for event in events:
        if isinstance(event, NoticeEvent):
            raise BackendError(event.message)


def tokens_told(events: Sequence[Event], *, loses_bonus: bool = False) -> Iterator[int]:
    """The tokens that events commit to the text."""
    for event in events:
        if isinstance(event, CommittedEvent):
            for piece in event.pieces:
                if not (loses_bonus and piece.kind == "bonus"):
                    yield piece.token_id
