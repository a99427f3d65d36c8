"""What the checks read from finished answers, and from the target when it decodes them again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from specgen.errors import BackendError
from specgen.events import CommittedEvent, Event, NoticeEvent
from specgen.method.backend import Batch
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits

#: The number of answers generated at once. With three, the last may reuse the cache cells that the
#: first left while the second is still running.
N_AT_ONCE = 3


def raise_failure(request: Request) -> None:
    """Raise the error of an answer or of its drafter, if there is one.

    An answer whose drafter failed goes on without drafts, and proves nothing about them.
    """
    if request.failure is not None:
        raise request.failure
    for event in request.events:
        # Only the notice of a failed drafter has a detail.
        if isinstance(event, NoticeEvent) and event.detail:
            raise BackendError(event.message)


def tokens_of(events: Iterable[Event]) -> list[int]:
    """Return the tokens that the events commit."""
    committed = (event for event in events if isinstance(event, CommittedEvent))
    return [piece.token_id for event in committed for piece in event.pieces]


def plain_rows(
    session: Session,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int = 1,
    n_outputs: int | None = None,
) -> Iterator[Logits]:
    """Decode a known answer, and yield the logits after the prompt and after each of its tokens.

    Args:
        session: The session whose target decodes.
        prompt: The prompt's tokens.
        answer: The answer's tokens.
        n_rows: The size of the answer's batches.
        n_outputs: The number of last rows of each batch whose logits are computed and yielded;
            None for all rows.

    Yields:
        float32[n_vocab] for each row.
    """
    tokens = (*prompt, *answer)
    n_prompt = len(prompt)
    n_ctx = session.context_size(len(tokens))
    n_slots = math.ceil(n_rows / session.n_rows_max)
    with session.contexts(n_ctx, drafts=False, n_slots=n_slots) as (target, _):
        prompt_ends = [*range(target.n_batch, n_prompt, target.n_batch), n_prompt]
        # The last batch has to have `n_rows` rows, so the first one gets the remainder.
        first_end = n_prompt + (len(answer) % n_rows or n_rows)
        answer_ends = range(first_end, len(tokens) + 1, n_rows)
        start = 0
        for end in (*prompt_ends, *answer_ends):
            if end < n_prompt:
                n_logits = 0
            elif end == n_prompt:
                n_logits = 1
            else:
                n_logits = n_outputs or n_rows
            logits = target.decode(Batch.of(tokens[start:end], start, n_logits))
            yield from logits.copy()
            start = end
