"""Compare rows of logits with those of plain decoding

specgen's kernels compute a row to the same bits in a batch as alone: there any difference is a
defect. llama.cpp's own code rounds a row differently in a batch than alone, so that two rows of the
same text are seldom equal bit for bit. A cache that holds what was refused moves a row too, but further.
The two are told apart by measurement: the same texts are decoded without drafts, in batches of
the sizes that drafting uses, from a cache from which nothing was ever dropped. That is how far
batches alone move rows of this model on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch

if TYPE_CHECKING:
    from specgen.engine.session import Session

#: A row may move by this many times the most that batches alone were seen to move rows. What
#: drafting leaves in a cache was written in batches of several sizes, so more than one.
SLACK = 4.0
#: What is always allowed: a value in a cache of f16 that rounds the other way by chance moves
#: all rows after it, and may happen in one run of two. A token that should not be in the cache
#: moved rows of tiny models by 3 to 41 %.
ALWAYS_ALLOWED = 0.01
#: The largest batch that is tried.
_MAX_ROWS = 16


def movement(one: Logits, other: Logits) -> float:
    """How far `one` row is from the `other`, float32[n_vocab]: the standard deviation over the
    vocabulary of the difference of their logits, as a share of that of the other's logits.
    (What is added to all logits alike changes nothing.)

    One logit's difference is as good as random; that of all of them is much the same in each
    row that was rounded alike, so it can be compared.
    """
    spread = float(np.std(other, dtype=np.float64))
    return float(np.std(one - other, dtype=np.float64)) / spread if spread else 0.0


def is_moved(by: float, by_batches: float, *, exact: bool = False) -> bool:
    """Whether batches do not explain how far a row moved. Where rows are `exact` (the same bits in
    batches as alone), nothing explains any movement."""
    return by > (0.0 if exact else SLACK * by_batches + ALWAYS_ALLOWED)


def drafting_batch_sizes(session: Session) -> range:
    """The sizes of the batches in which drafting decodes, from 1 on."""
    return range(1, min(session.n_rows_max, _MAX_ROWS) + 1)


def batches_move(
    session: Session,
    n_ctx: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    alone: Mapping[int, Logits],
) -> float:
    """How far batches alone move the rows of an answer, at most. `alone` are its rows by plain
    decoding, one token at a time, by how many of the answer's tokens come before them."""
    sizes = drafting_batch_sizes(session)
    largest = sizes[-1]
    ways = [
        plain_rows(session, n_ctx, prompt, answer, min(2, largest)),
        plain_rows(session, n_ctx, prompt, answer, largest),
    ]
    if session.target_model.has_recurrent_state or session.options.generation.grammar is not None:
        # Batches of which only some rows are asked for: of what a grammar forced, or of all the
        # text, where a recurrent state is computed anew. Other kernels round those, much more
        # coarsely, so they must not excuse a model that never decodes so.
        ways += [
            plain_rows(session, n_ctx, prompt, answer, max(2, largest), n_outputs=1),
            plain_rows(session, n_ctx, (*prompt, *answer), (), 1, n_outputs=largest),
        ]
    n_prompt = len(prompt)
    return max(
        movement(row, alone[n_before - n_prompt])
        for way in ways
        for n_before, row in way
        if n_before - n_prompt in alone
    )


def plain_rows(
    session: Session,
    n_ctx: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int,
    *,
    n_outputs: int | None = None,
) -> Iterator[tuple[int, Logits]]:
    """Decode a text without drafts, the answer in batches of `n_rows`: how many tokens come
    before a row, and the row, float32[n_vocab], valid until the next. There are rows of the
    prompt's last token and of the last `n_outputs` tokens of each batch of the answer (None:
    all); without an answer, of the prompt's last `n_outputs`."""
    with session.contexts(n_ctx, drafts=False) as (target, _):
        yield from decode(target, prompt, 0, 1 if answer else n_outputs or 1)
        for start in range(0, len(answer), n_rows):
            piece = answer[start : start + n_rows]
            yield from decode(target, piece, len(prompt) + start, n_outputs or n_rows)


def decode(
    backend: Backend, tokens: Sequence[int], position: int, n_outputs: int
) -> Iterator[tuple[int, Logits]]:
    """Decode tokens, in as many batches as they need: how many tokens come before a row, and
    the row, of the last `n_outputs` tokens of the last batch."""
    for start in range(0, len(tokens), backend.n_batch):
        end = min(start + backend.n_batch, len(tokens))
        batch = Batch()
        for index in range(start, end):
            wants_logits = end == len(tokens) and index >= end - n_outputs
            batch.add(tokens[index], position + index, (0,), wants_logits)
        logits = backend.decode(batch)
        yield from zip(
            range(position + end - len(logits) + 1, position + end + 1), logits, strict=True
        )
