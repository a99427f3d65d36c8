"""The interface between specgen and a model that computes logits, with its KV cache.

The cache holds sequences. A cell belongs to one or more of them, so that the branches of a tree
share the cells of their common tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from specgen.system.arrays import Hidden, Logits

if TYPE_CHECKING:
    from specgen.text.vocabulary import Vocabulary

#: How a backend drops the end of a sequence.
#:
#: - "cells": it drops single cells (attention, even with sliding windows);
#: - "snapshots": it goes back to the state after one of the last few rows;
#: - "states": it restores a copy of the state at the checkpoint, and decodes the tokens after it
#:   again.
Rollback: TypeAlias = Literal["cells", "snapshots", "states"]


@dataclass(slots=True)
class Batch:
    """Rows to decode together, one for each token."""

    #: The token of each row.
    tokens: list[int] = field(default_factory=list)
    #: The position of each token in its sequences.
    positions: list[int] = field(default_factory=list)
    #: The sequences that each token belongs to. It sees their cells at smaller positions.
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    #: Whether the logits of each row will be read.
    wants_logits: list[bool] = field(default_factory=list)
    #: For MTP layers only: the hidden state before each token, float32[n_embd], or None for zeros.
    hidden: list[Hidden | None] = field(default_factory=list)

    @staticmethod
    def of(
        tokens: Sequence[int],
        start: int,
        n_wanted: int = 0,
        sequence: int = 0,
    ) -> Batch:
        """Return rows for tokens of one sequence.

        Args:
            tokens: The tokens.
            start: The position of the first one.
            n_wanted: The number of rows, at the end of the batch, whose logits will be read.
            sequence: The sequence.
        """
        n = len(tokens)
        wants_logits = [row >= n - n_wanted for row in range(n)]
        return Batch([*tokens], [*range(start, start + n)], [(sequence,)] * n, wants_logits)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        token: int,
        position: int,
        sequences: tuple[int, ...],
        wants: bool,
    ) -> None:
        """Add a row; `wants` is whether its logits will be read."""
        self.tokens.append(token)
        self.positions.append(position)
        self.sequences.append(sequences)
        self.wants_logits.append(wants)

    def part(self, start: int, end: int) -> Batch:
        """Return the rows from `start` to `end`, exclusive."""
        return Batch(*(getattr(self, column.name)[start:end] for column in fields(self)))

    def extend(self, other: Batch) -> None:
        """Add the rows of another batch."""
        for column in fields(self):
            getattr(self, column.name).extend(getattr(other, column.name))


class Backend(Protocol):
    """A model and its KV cache."""

    #: The number of values in a row of logits.
    n_vocab: int
    #: The number of cells in the cache.
    n_ctx: int
    #: The maximum number of prompt rows in a batch.
    n_batch: int
    #: The maximum number of rows in a batch that may want logits.
    n_outputs: int
    #: The sequences are 0 to `n_sequences` - 1. They can share cells, as trees require, only if
    #: `rollback` is "cells".
    n_sequences: int
    #: How the end of a sequence is dropped.
    rollback: Rollback
    #: The number of rows that were decoded so far, including those that a rollback decoded again.
    n_decoded_rows: int
    #: Whether decodes are faster as long as the size of batches does not change.
    replays_graphs: bool
    #: If set, it is called during decodes where that is possible (not on a GPU). Once it returns
    #: True, the decode ends with a `DecodeEndedError`, and the text is as it was before.
    is_unwanted: Callable[[], bool] | None

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""

    @property
    def decode_s(self) -> float:
        """The total seconds of all decodes and rollbacks so far."""

    def decode(self, batch: Batch) -> Logits:
        """Extend the cache by a batch.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab]: a view, valid and
            writable until the next decode.

        Raises:
            BackendError: If the batch could not be decoded.
        """

    def decode_hidden(
        self,
        batch: Batch,
        *,
        all_rows: bool = False,
    ) -> tuple[Logits, Hidden]:
        """Decode, and also return hidden states, float32[n, n_embd], valid until the next decode.

        Args:
            batch: The rows. Without `all_rows` there may be at most `n_outputs`.
            all_rows: Whether to return the states of all rows, in the form that draft models read.
                Otherwise the final states of the rows that want logits are returned.

        Raises:
            BackendError: If the batch could not be decoded, or if there are no hidden states.
        """

    def length(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""

    def text(self, sequence: int) -> Sequence[int]:
        """Return the tokens of a sequence, a view that later decodes change.

        After a failed decode, tokens at the end may be missing.
        """

    def checkpoint(self, sequence: int) -> None:
        """Announce that the tokens to come may be dropped again, so that `remove` should be cheap.

        The loop calls it before it decodes a draft.
        """

    def anchor(self, sequence: int) -> None:
        """Keep the current state of a sequence, so that `remove` can go back to it.

        Only a few are kept for each sequence: the latest, and others at some distance.
        """

    def n_restorable(self, sequence: int, n: int) -> int:
        """Return how many of a sequence's first `n` tokens can be kept without decoding any again.

        `remove` can go back to that length at once, and to any other length only by decoding.
        """

    def copy(
        self,
        source: int,
        destination: int,
        start: int = 0,
        end: int = -1,
    ) -> None:
        """Let the cells of `source` from `start` to `end` also belong to `destination`.

        The default `end` is the end of the sequence.
        """

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from position `start` on.

        Raises:
            RollbackError: If the cache cannot drop them. The error may come only with the next
                decode. The state of the cache is undefined then.
        """

    def close(self) -> None:
        """Free the cache. It may be called twice."""
