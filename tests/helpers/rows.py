"""Batches of the tokens of one text, and their logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from specgen.llama import LlamaBackend
from specgen.method.backend import Batch
from specgen.system.arrays import Logits

Wanted = Literal["all", "last", "none"]


def batch_of(
    tokens: Iterable[int], start: int = 0, sequence: int = 0, wanted: Wanted = "all"
) -> Batch:
    """A batch of the tokens of a text from a position on, with the requested logits."""
    batch = Batch()
    in_order = list(tokens)
    last = start + len(in_order) - 1
    for position, token in enumerate(in_order, start):
        has_logits = wanted == "all" or (wanted == "last" and position == last)
        batch.add(token, position, (sequence,), has_logits)
    return batch


def decoded(backend: LlamaBackend, tokens: Iterable[int], sequence: int = 0) -> Logits:
    """The logits after all tokens that continue a text, decoded in one batch."""
    start = backend.length(sequence)
    rows: Logits = backend.decode(batch_of(tokens, start, sequence)).copy()
    return rows


def decoded_last(backend: LlamaBackend, tokens: Iterable[int], sequence: int = 0) -> Logits:
    """The logits after the last of tokens that continue a text, decoded in one batch."""
    start = backend.length(sequence)
    row: Logits = backend.decode(batch_of(tokens, start, sequence, "last"))[0].copy()
    return row


def decoded_one_by_one(backend: LlamaBackend, tokens: Sequence[int], sequence: int = 0) -> Logits:
    """Decode tokens that continue a text, each in its own batch; return the last one's logits."""
    return [decoded_last(backend, [token], sequence) for token in tokens][-1]
