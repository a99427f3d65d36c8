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
#: - "cells": it drops single cells (attention, also with sliding windows);
#: - "snapshots": it goes back to one of the states after the last few rows;
#: - "states": it restores a copy of the state at the checkpoint, and decodes tokens again from
#:   there.
Rollback: TypeAlias = Literal["cells", "snapshots", "states"]


@dataclass(slots=True)
class Batch:
    """Rows to decode together, one for each token."""

    tokens: list[int] = field(default_factory=list)
    #: The position of each token in its text.
    positions: list[int] = field(default_factory=list)
    #: The sequences that each token belongs to. It sees their cells at smaller positions.
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    #: Whether the logits of each row will be read.
    wants_logits: list[bool] = field(default_factory=list)
    #: For MTP layers: the state before each token, float32[n_embd], or None for zeros. Empty
    #: otherwise.
    hidden: list[Hidden | None] = field(default_factory=list)

    @staticmethod
    def of(
        tokens: Sequence[int],
        start: int,
        n_wanted: int = 0,
        sequence: int = 0,
    ) -> Batch:
        """Return rows of a text, from position `start` on; the last `n_wanted` want logits."""
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
        """Add a row."""
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

    #: The values of a row of logits.
    n_vocab: int
    #: The cells of the cache.
    n_ctx: int
    #: The most rows of a prompt that are decoded at once.
    n_batch: int
    #: The most rows of a batch that may want logits.
    n_outputs: int
    #: The sequences are 0 to `n_sequences` - 1. They may share cells, which trees need, if
    #: `rollback` is "cells".
    n_sequences: int
    rollback: Rollback
    #: All rows that were decoded so far, with those that a rollback decoded again.
    n_decoded_rows: int
    #: Whether decodes take less time while batches keep their size.
    replays_graphs: bool
    #: If it is set, it is asked during decodes, where that is possible (not on a GPU). If it
    #: returns True, the decode ends with a `DecodeEndedError`, and the text is as it was before.
    is_unwanted: Callable[[], bool] | None

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary."""

    @property
    def decode_s(self) -> float:
        """The seconds of all decodes and rollbacks so far."""

    def decode(self, batch: Batch) -> Logits:
        """Extend the cache by a batch.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab]: a view, valid and
            writable until the next decode.

        Raises:
            BackendError: If the batch could not be decoded.
        """

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        """Decode, and also return hidden states, float32[n, n_embd], valid until the next decode.

        Args:
            batch: The rows; at most `n_outputs` without `all_rows`.
            all_rows: Return the states of all rows, as a draft reads them; otherwise the final
                states of the rows that want logits.

        Raises:
            BackendError: If the batch could not be decoded, or if there are no hidden states.
        """

    def length(self, sequence: int) -> int:
        """Return the number of tokens in a sequence."""

    def text(self, sequence: int) -> Sequence[int]:
        """Return the tokens of a sequence, not to be kept.

        After a failed decode, these may be only the first ones.
        """

    def checkpoint(self, sequence: int) -> None:
        """Announce that tokens from here on may be dropped, so that `remove` must be cheap.

        It is called before a draft is decoded.
        """

    def anchor(self, sequence: int) -> None:
        """Keep the present state of a text until the next anchor: `remove` can go back to it."""

    def way_back(self, sequence: int, n: int) -> int:
        """Return the most of a text's first `n` tokens that `remove` can go back to for free.

        That is without decoding them again.
        """

    def copy(
        self,
        source: int,
        destination: int,
        start: int = 0,
        end: int = -1,
    ) -> None:
        """Let cells of `source` belong to `destination`, too: `start` to `end`, or to the end."""

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from position `start` on.

        Raises:
            RollbackError: If the cache cannot, perhaps only in the next decode. The state of the
                cache is unknown then.
        """

    def close(self) -> None:
        """Free the cache. It may be called twice."""
