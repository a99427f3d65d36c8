"""The interface between specgen and whatever computes logits.

A backend is a model with a KV cache. The cache holds sequences; a cell belongs to one or
more of them, so that branches of a tree share what they have in common. The backend owns
the length of each sequence: nobody else keeps a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from specgen.arrays import Hidden, Logits

#: How the end of a sequence is dropped: cell by cell (attention, with sliding windows too),
#: by going back to one of the states after the last few rows, or to a copy of the state at
#: the checkpoint, from where tokens are decoded again.
Rollback: TypeAlias = Literal["cells", "snapshots", "states"]


@dataclass(slots=True)
class Batch:
    """Rows to decode together; row i is one token.

    `positions[i]` is its place in the text, `sequences[i]` every sequence that it belongs to
    (it sees the cells of these at smaller positions), and `wants_logits[i]` whether its
    logits will be read: for a large vocabulary a row of them is most of a megabyte.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    wants_logits: list[bool] = field(default_factory=list)

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
        """The rows from `start` to `end`, exclusive."""
        rows = slice(start, end)
        return Batch(
            self.tokens[rows], self.positions[rows], self.sequences[rows], self.wants_logits[rows]
        )


class Vocabulary(Protocol):
    """The tokens of a model."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def add_bos(self) -> bool:
        """Whether prompts of this model begin with its beginning-of-text token."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """`text` as tokens. `add_special` adds the beginning-of-text token where the model
        wants one; `parse_special` reads the names of control tokens as these tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; empty for control tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token's entry in the table, for comparing and for messages."""
        ...

    def special_tokens(self) -> dict[str, int]:
        """The tokens that begin a text (bos), end it (eos) and end a turn (eot); -1 for one
        that there is not."""
        ...

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends a text or a turn."""
        ...

    def end_tokens(self) -> Sequence[int]:
        """All tokens that end a text or a turn."""
        ...


class Backend(Protocol):
    """A model and its KV cache."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def n_vocab(self) -> int:
        """Length of a row of logits."""
        ...

    @property
    def n_ctx(self) -> int:
        """Cells in the cache; the first position that cannot be decoded."""
        ...

    @property
    def n_batch(self) -> int:
        """The most rows of a prompt to decode at once."""
        ...

    @property
    def n_outputs(self) -> int:
        """The most rows of a batch that may want logits."""
        ...

    @property
    def n_sequences(self) -> int:
        """Sequence ids run from 0 to this, exclusive."""
        ...

    @property
    def rollback(self) -> Rollback:
        """How the end of a sequence is dropped."""
        ...

    @property
    def can_branch(self) -> bool:
        """Whether sequences may share cells, as a tree needs. A recurrent state is one
        sequence's alone."""
        ...

    @property
    def decode_s(self) -> float:
        """Seconds spent in decoding so far, and in rolling back where that takes time."""
        ...

    @property
    def n_decoded_rows(self) -> int:
        """Rows decoded so far, those included that a rollback made to be decoded again."""
        ...

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch and extend the cache by it.

        Returns float32[n_wanted, n_vocab]: the logits of the rows that want them, in the
        order of the batch, without a copy; valid, and writable, until the next decode.
        Raises `BackendError` if the batch could not be decoded.
        """
        ...

    def length(self, sequence: int) -> int:
        """The number of tokens in a sequence: the position of its next one."""
        ...

    def text(self, sequence: int) -> Sequence[int]:
        """The tokens of a sequence, as far as that is known for certain: after a decode that failed,
        a beginning of them. Read it, do not keep it."""
        ...

    def checkpoint(self, sequence: int) -> None:
        """What is decoded from here on may be dropped again: `remove` has to succeed, and be
        cheap, from this position on. To be said again before each draft is decoded."""
        ...

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """Let the cells of `source` from `start` to `end` (-1: the end) belong to
        `destination` too. Raises `BackendError` if sequences cannot share (`can_branch`)."""
        ...

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from position `start` on.

        Raises `RollbackError` if the cache cannot, now or in the next decode of the sequence;
        it is then in no known state.
        """
        ...

    def close(self) -> None:
        """Free the cache. May be called twice."""
        ...


@runtime_checkable
class HiddenBackend(Backend, Protocol):
    """A backend that tells a model's hidden states too."""

    def decode_hidden(self, batch: Batch) -> tuple[Logits, Hidden]:
        """As `decode`, with the final hidden states of the rows that want logits:
        float32[n_wanted, n_embd], valid until the next decode. The batch has `n_outputs` rows at
        most. Raises `BackendError` too where a model gives no hidden states."""
        ...
