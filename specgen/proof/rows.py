"""Is a row of logits the one that plain decoding computes?

llama.cpp rounds a row of logits differently in a batch than alone, so two rows of the same text
are seldom equal bit for bit. A cache that holds what was refused moves a row too, but further.
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
    from specgen.session import Session

#: A row may move by this many times the most that batches alone were seen to move rows. What
#: drafting leaves in a cache was written in batches of several sizes, so more than one.
SLACK = 4.0
#: Rows closer than this are equal: the last bits of float32 at a scale of 30.
LAST_BITS = 1e-4
#: The largest batch that is tried.
_MAX_ROWS = 16


def movement(one: Logits, other: Logits) -> float:
    """How far two rows, float32[n_vocab], are apart: the standard deviation over the vocabulary
    of the difference of their logits. (What is added to all logits alike changes nothing.)

    One logit's difference is as good as random; that of all of them is much the same in each
    row that was rounded alike, so it can be compared.
    """
    return float(np.std(one - other, dtype=np.float64))


def is_moved(by: float, by_batches: float) -> bool:
    """Whether batches do not explain how far a row moved."""
    return by > SLACK * by_batches + LAST_BITS


def batch_sizes(session: Session) -> range:
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
    decoding, one token at a time, by the number of the answer's tokens before them."""
    sizes = batch_sizes(session)
    # Pairs, the largest batches, and those of which only one row is asked for: a recurrent
    # state that is brought up to date, or what a grammar forced. Kernels differ with these.
    ways = {(min(2, sizes[-1]), True), (sizes[-1], True), (max(2, sizes[-1]), False)}
    return max(
        movement(row, alone[n_before])
        for size, wants_all in ways
        for n_before, row in plain_rows(session, n_ctx, prompt, answer, size, wants_all=wants_all)
        if n_before in alone
    )


def plain_rows(
    session: Session,
    n_ctx: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int,
    *,
    wants_all: bool = True,
) -> Iterator[tuple[int, Logits]]:
    """Decode a text without drafts, the answer in batches of `n_rows`: how many of the
    answer's tokens come before a row, and the row, float32[n_vocab], valid until the next. The
    last row of each batch only, unless it `wants_all`."""
    with session.contexts(n_ctx, drafts=False) as (target, _):
        yield 0, decode(target, prompt, 0)[-1]
        for start in range(0, len(answer), n_rows):
            piece = answer[start : start + n_rows]
            rows = decode(target, piece, len(prompt) + start, wants_all=wants_all)
            end = start + len(piece)
            yield from zip(range(end - len(rows) + 1, end + 1), rows, strict=True)


def decode(
    backend: Backend, tokens: Sequence[int], position: int, *, wants_all: bool = False
) -> Logits:
    """Decode tokens, in as many batches as they need: the last row, float32[1, n_vocab], or
    all of them, if they are few enough for one batch."""
    logits: Logits | None = None
    for start in range(0, len(tokens), backend.n_batch):
        batch = Batch()
        for index in range(start, min(start + backend.n_batch, len(tokens))):
            is_last = index + 1 == len(tokens)
            batch.add(tokens[index], position + index, (0,), wants_all or is_last)
        logits = backend.decode(batch)
    assert logits is not None, "at least one token is decoded"
    return logits
