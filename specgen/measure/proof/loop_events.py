"""Read committed tokens, drafters and failures from a loop's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from specgen.errors import BackendError
from specgen.events import CommittedEvent, DraftedEvent, Event, NoticeEvent


def check_drafting(events: Sequence[Event]) -> None:
    """Raise `BackendError` if the drafter failed: the answer continues without drafts, which proves
    nothing."""
    for event in events:
        if isinstance(event, NoticeEvent):
            raise BackendError(event.message)


def drafted_by(events: Iterable[Event]) -> Counter[str]:
    """Return the number of verified draft tokens for each drafter, by its name."""
    return Counter(
        node.origin for event in events if isinstance(event, DraftedEvent) for node in event.nodes
    )


def tokens_told(events: Sequence[Event], *, loses_bonus: bool = False) -> Iterator[int]:
    """Yield the tokens that events commit to the text; with `loses_bonus`, without bonus tokens."""
    for event in events:
        if isinstance(event, CommittedEvent):
            for piece in event.pieces:
                if not (loses_bonus and piece.kind == "bonus"):
                    yield piece.token_id
