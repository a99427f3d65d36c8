"""Compare rows of logits with those of plain decoding.

specgen's kernels are batch-invariant, so any difference is a defect. llama.cpp's own code rounds a row
differently in a batch than alone, so two rows of the same text are seldom equal bit for bit. A cache that
holds rejected tokens moves a row too, but further. A measurement distinguishes the two: the same texts are
decoded without drafts, in batches of the sizes that drafting uses, in a cache from which nothing was ever
dropped. This shows how far batches alone move rows of this model on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specgen.method.backend import Backend, Batch
from specgen.session.prefix_cache import Slot
from specgen.system.arrays import Logits

if TYPE_CHECKING:
    from specgen.session.session import Session

#: A row may move by this many times the largest movement that batches alone have caused. The factor is
#: above 1, because drafting fills a cache in batches of several sizes.
SLACK = 4.0
#: A movement up to this is always allowed: if a value in an f16 cache happens to round the other way,
#: it moves all rows after it, and that may happen in only one of two runs. A token that should not be
#: in the cache moved rows of tiny models by 3 to 41 %.
ALWAYS_ALLOWED = 0.01
#: The size of the largest batch that is measured.
_MAX_ROWS = 16


def movement(one: Logits, other: Logits) -> float:
    """Return the distance of row `one` from row `other`, float32[n_vocab] each: the standard deviation of
    the differences of their logits, divided by that of the other's logits. (A constant added to all
    logits changes nothing.)

    The difference of a single logit is almost random. The deviation over all logits is similar in all
    rows that were rounded in the same way, so it can be compared.
    """
    spread = float(np.std(other, dtype=np.float64))
    return float(np.std(one - other, dtype=np.float64)) / spread if spread else 0.0


def is_moved(by: float, by_batches: float, *, exact: bool = False) -> bool:
    """Return whether batches cannot explain how far a row moved. If rows are `exact` (batch-invariant),
    they explain no movement at all."""
    return by > (0.0 if exact else SLACK * by_batches + ALWAYS_ALLOWED)


def unequal_rows(loaded: Session, prompt: Sequence[int], *, are_moved: bool) -> str:
    """Return why rows of the target depend on their batch although specgen's kernels compute: the reason
    that is known of the model. Empty if they do not."""
    model = loaded.target
    if not model.has_kernels:
        return ""
    if model.row_exception or not are_moved or not prompt:
        return model.row_exception
    return "the reason is not known"


def drafting_batch_sizes(loaded: Session) -> range:
    """Return the sizes of the batches that drafting decodes, from 1 up to `_MAX_ROWS`."""
    return range(1, min(loaded.n_rows_max, _MAX_ROWS) + 1)


def batches_move(
    loaded: Session,
    n_ctx: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    alone: Mapping[int, Logits],
) -> float:
    """Return the largest movement that batches alone cause in the rows of an answer. `alone` are its rows
    by plain decoding, one token at a time; the key is the number of the answer's tokens before a row."""
    sizes = drafting_batch_sizes(loaded)
    largest = sizes[-1]
    ways = [
        plain_rows(loaded, n_ctx, prompt, answer, min(2, largest)),
        plain_rows(loaded, n_ctx, prompt, answer, largest),
    ]
    if loaded.target.has_recurrent_state or loaded.options.generation.grammar is not None:
        # Also measure batches in which only some rows want logits: batches with tokens that a grammar
        # forced, and the whole text if a recurrent state is computed again. Other kernels compute them,
        # with much coarser rounding, so they are not measured for models that never decode in this way.
        ways += [
            plain_rows(loaded, n_ctx, prompt, answer, max(2, largest), n_outputs=1),
            plain_rows(loaded, n_ctx, (*prompt, *answer), (), 1, n_outputs=largest),
        ]
    n_prompt = len(prompt)
    return max(
        movement(row, alone[n_before - n_prompt])
        for way in ways
        for n_before, row in way
        if n_before - n_prompt in alone
    )


def batches_at_once_move(
    loaded: Session,
    n_ctx: int,
    texts: Sequence[tuple[Sequence[int], Sequence[int], Mapping[int, Logits]]],
) -> float:
    """Return the largest movement that batches of several answers cause in their rows. `texts` are prompts
    and answers that are decoded side by side in one cache, without drafts, and the rows of the answers by
    plain decoding alone, as in `batches_move`."""
    moved = 0.0
    for n_rows in {1, drafting_batch_sizes(loaded)[-1]}:
        with loaded.contexts(n_ctx, drafts=False, n_slots=len(texts)) as (target, _):
            slots = [Slot(number, len(texts)).branches(target) for number in range(len(texts))]
            for slot, (prompt, _answer, alone) in zip(slots, texts, strict=True):
                for _, row in decode(target, prompt, 0, 1, slot.first):
                    moved = max(moved, movement(row, alone[0]) if 0 in alone else 0.0)
            longest = max(len(answer) for _, answer, _ in texts)
            for start in range(0, longest, n_rows):
                batch = Batch()
                expected: list[Logits | None] = []
                for slot, (prompt, answer, alone) in zip(slots, texts, strict=True):
                    for index in range(start, min(start + n_rows, len(answer))):
                        batch.add(answer[index], len(prompt) + index, (slot.first,), True)
                        expected.append(alone.get(index + 1))
                for row, other in zip(target.decode(batch), expected, strict=True):
                    moved = max(moved, movement(row, other) if other is not None else 0.0)
    return moved


def plain_rows(
    loaded: Session,
    n_ctx: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_rows: int,
    *,
    n_outputs: int | None = None,
) -> Iterator[tuple[int, Logits]]:
    """Decode a text without drafts, the answer in batches of `n_rows`. Yield the number of tokens before a
    row and the row, float32[n_vocab], valid until the next decode. The rows are those of the prompt's last
    token and of the last `n_outputs` tokens of each batch of the answer (None: all tokens). Without an
    answer they are those of the prompt's last `n_outputs` tokens (None: one)."""
    with loaded.contexts(n_ctx, drafts=False) as (target, _):
        yield from decode(target, prompt, 0, 1 if answer else n_outputs or 1)
        for start in range(0, len(answer), n_rows):
            piece = answer[start : start + n_rows]
            yield from decode(target, piece, len(prompt) + start, n_outputs or n_rows)


def decode(
    backend: Backend, tokens: Sequence[int], position: int, n_outputs: int, sequence: int = 0
) -> Iterator[tuple[int, Logits]]:
    """Decode tokens of a sequence, the first of them at `position`, in as many batches as they need. Yield the number of
    tokens before a row and the row, for the last `n_outputs` tokens of the last batch."""
    for start in range(0, len(tokens), backend.n_batch):
        end = min(start + backend.n_batch, len(tokens))
        batch = Batch()
        for index in range(start, end):
            wants_logits = end == len(tokens) and index >= end - n_outputs
            batch.add(tokens[index], position + index, (sequence,), wants_logits)
        logits = backend.decode(batch)
        yield from zip(
            range(position + end - len(logits) + 1, position + end + 1), logits, strict=True
        )
