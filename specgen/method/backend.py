"""The interface between specgen and a model that computes logits, and whose KV cache holds
sequences. A cell belongs to one or more of these, so that the branches of a tree share the cells of
their common tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from specgen.system.arrays import Hidden, Logits

if TYPE_CHECKING:
    from specgen.text.vocabulary import Vocabulary

#: How a backend drops the end of a sequence. "cells": it drops single cells (attention, also with
#: sliding windows). "snapshots": it goes back to one of the states after the last few rows.
#: "states": it restores a copy of the state at the checkpoint, and decodes tokens again from there.
Rollback: TypeAlias = Literal["cells", "snapshots", "states"]


@dataclass(slots=True)
class Batch:
    """Rows to decode together, one for each token. `sequences[i]` are all that token i belongs to;
    it sees their cells at smaller positions. `wants_logits[i]` says whether its logits will be
    read. `hidden` is for MTP layers: the state before each token, float32[n_embd], or None for
    zeros; else it is empty.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    wants_logits: list[bool] = field(default_factory=list)
    hidden: list[Hidden | None] = field(default_factory=list)

    @staticmethod
    def of(tokens: Sequence[int], start: int, n_wanted: int = 0, sequence: int = 0) -> Batch:
        """Return rows of a text from position `start` on, of which the last `n_wanted` want logits."""
        n, n_silent = len(tokens), len(tokens) - n_wanted
        wants = [row >= n_silent for row in range(n)]
        return Batch([*tokens], [*range(start, start + n)], [(sequence,)] * n, wants)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, position: int, sequences: tuple[int, ...], wants: bool) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.sequences.append(sequences)
        self.wants_logits.append(wants)

    def part(self, start: int, end: int) -> Batch:
        return Batch(*(getattr(self, each.name)[start:end] for each in fields(self)))

    def extend(self, other: Batch) -> None:
        for each in fields(self):
            getattr(self, each.name).extend(getattr(other, each.name))


class Backend(Protocol):
    """A model and its KV cache. A row of logits has `n_vocab` values, and the cache `n_ctx` cells.
    At most `n_batch` rows of a prompt are decoded at once; at most `n_outputs` rows of a batch may
    want logits. The sequences are 0 to `n_sequences` - 1; they may share cells, which trees need,
    if `rollback` is "cells". `decode_s` are the seconds of all decodes so far, and of rollbacks;
    `n_decoded_rows` counts rows that a rollback decoded again, too.
    """

    n_vocab: int
    n_ctx: int
    n_batch: int
    n_outputs: int
    n_sequences: int
    rollback: Rollback
    n_decoded_rows: int
    #: Whether decodes take less time while batches keep their size.
    replays_graphs: bool
    #: If it is set, it is asked during decodes, where that is possible (not on a GPU). If it
    #: returns True, the decode ends with a `DecodeEndedError`, and the text is as it was before.
    is_unwanted: Callable[[], bool] | None

    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def decode_s(self) -> float: ...

    def decode(self, batch: Batch) -> Logits:
        """Extend the cache by a batch. Return float32[n_wanted, n_vocab], the logits of the rows
        that want them: a view, valid and writable until the next decode. Raise `BackendError` if
        the batch could not be decoded.
        """

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        """Decode, and also return hidden states, float32[n, n_embd], valid until the next decode:
        with `all_rows` those of all rows, as a draft reads them; else the final states of the rows
        that want logits, in a batch of at most `n_outputs` rows. Raise `BackendError` also if there
        are none.
        """

    def length(self, sequence: int) -> int: ...

    def text(self, sequence: int) -> Sequence[int]:
        """Return the tokens of a sequence, not to be kept; after a failed decode, perhaps only the
        first ones.
        """

    def checkpoint(self, sequence: int) -> None:
        """Announce, before a draft is decoded, that tokens from here on may be dropped: `remove`
        must then be cheap.
        """

    def anchor(self, sequence: int) -> None:
        """Keep the state of a text as it is now, until the next anchor, so that `remove` can go
        back to it.
        """

    def way_back(self, sequence: int, n: int) -> int:
        """Return the most of a text's first `n` tokens that `remove` can go back to without
        decoding them again.
        """

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """Let the cells of `source` from `start` to `end` (-1: its end) belong to `destination`
        too.
        """

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from position `start` on. Raise `RollbackError` if the cache
        cannot, perhaps only in the next decode; the state of the cache is unknown then.
        """

    def close(self) -> None:
        """Free the cache. May be called twice."""
