"""The interface between specgen and a model that computes logits.

A backend is a model with a KV cache. The cache holds sequences. A cell belongs to one or more
sequences, so that the branches of a tree share the cells of their common tokens. The backend owns
the length of each sequence; nobody else keeps a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from specgen.system.arrays import Hidden, Logits

#: How a backend drops the end of a sequence. "cells": it drops single cells (attention, also with
#: sliding windows). "snapshots": it goes back to one of the states after the last few rows.
#: "states": it restores a copy of the state at the checkpoint, and decodes tokens again from there.
Rollback: TypeAlias = Literal["cells", "snapshots", "states"]


@dataclass(slots=True)
class Batch:
    """Rows to decode together; row i is one token.

    `positions[i]` is the token's position in the text. `sequences[i]` are all sequences that it belongs to;
    it sees their cells at smaller positions. `wants_logits[i]` says whether its logits will be read: for a
    large vocabulary a row of logits is most of a megabyte.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    wants_logits: list[bool] = field(default_factory=list)
    #: For MTP layers: the hidden state before each token, float32[n_embd], or None for zeros; else empty.
    hidden: list[Hidden | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, token: int, position: int, sequences: tuple[int, ...], wants_logits: bool
    ) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.sequences.append(sequences)
        self.wants_logits.append(wants_logits)

    def part(self, start: int, end: int) -> Batch:
        """Return the rows from `start` to `end`, exclusive."""
        rows = slice(start, end)
        return Batch(
            self.tokens[rows],
            self.positions[rows],
            self.sequences[rows],
            self.wants_logits[rows],
            self.hidden[rows],
        )

    def extend(self, other: Batch) -> None:
        """Add the rows of another batch."""
        self.tokens += other.tokens
        self.positions += other.positions
        self.sequences += other.sequences
        self.wants_logits += other.wants_logits
        self.hidden += other.hidden


class Vocabulary(Protocol):
    """The tokens of a model."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def add_bos(self) -> bool:
        """Whether prompts start with the beginning-of-text token."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return `text` as tokens. `add_special` adds the beginning-of-text token if the model
        wants one. `parse_special` turns the names of control tokens into these tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text; empty for control tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the token's entry in the token table, for comparisons and messages."""
        ...

    def special_tokens(self) -> dict[str, int]:
        """Return the tokens that begin a text (bos), end it (eos) and end a turn (eot); -1 for a
        token that the model does not have."""
        ...

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a text or a turn."""
        ...

    def end_tokens(self) -> Sequence[int]: ...


class Backend(Protocol):
    """A model and its KV cache.

    A row of logits has `n_vocab` values, and the cache `n_ctx` cells: the first position that cannot be
    decoded. At most `n_batch` rows of a prompt are decoded at once; at most `n_outputs` rows of a batch may
    want logits. The sequences are 0 to `n_sequences` - 1. They may share cells, which trees need, if
    `can_branch`: a recurrent state belongs to one sequence only. `decode_s` are the seconds spent in decoding
    so far, and in rollbacks where these take time; `n_decoded_rows` counts rows that a rollback decoded again,
    too.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def n_outputs(self) -> int: ...

    @property
    def n_sequences(self) -> int: ...

    @property
    def rollback(self) -> Rollback: ...

    @property
    def can_branch(self) -> bool: ...

    @property
    def decode_s(self) -> float: ...

    @property
    def n_decoded_rows(self) -> int: ...

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch and extend the cache by it.

        Return float32[n_wanted, n_vocab]: the logits of the rows that want them, in the order of
        the batch. This is a view without a copy; it is valid, and writable, until the next decode.
        Raise `BackendError` if the batch could not be decoded.
        """
        ...

    def length(self, sequence: int) -> int:
        """Return the number of tokens in a sequence, which is the position of its next token."""
        ...

    def text(self, sequence: int) -> Sequence[int]:
        """Return the tokens of a sequence. After a failed decode, perhaps only the first tokens are known.
        The caller must not change or keep the result."""
        ...

    def checkpoint(self, sequence: int) -> None:
        """Announce that tokens decoded from here on may be dropped again: `remove` from this position
        on must then succeed and be cheap. Call it before each draft is decoded."""
        ...

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """Let the cells of `source` from `start` to `end` (-1: to its end) belong to `destination`
        too. Raise `BackendError` if sequences cannot share cells (`can_branch`)."""
        ...

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from position `start` on.

        Raise `RollbackError` if the cache cannot drop them; the error may come only with the next
        decode of the sequence. The state of the cache is unknown then.
        """
        ...

    def close(self) -> None:
        """Free the cache. May be called twice."""
        ...


@runtime_checkable
class HiddenBackend(Backend, Protocol):
    """A backend that also returns a model's hidden states."""

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        """Decode as `decode` does, and also return hidden states, float32[n, n_embd], valid until the
        next decode. They are the final states of the rows that want logits or, with `all_rows`, the states
        of all rows that a draft reads: those for MTP layers, or inputs of the target's layers. Without
        `all_rows` the batch may have at most `n_outputs` rows. Also raise `BackendError` if the model gives
        no hidden states."""
        ...


class MtpBackend(Backend, Protocol):
    """The MTP layers of a target, with a cache of their own. Each row of a batch has a token and the
    hidden state before it (`Batch.hidden`)."""

    def state(self, sequence: int) -> Hidden:
        """Return the hidden state of the sequence's last row that wanted logits, float32[n_embd]. The
        row of the token that those logits predict reads it."""
        ...
