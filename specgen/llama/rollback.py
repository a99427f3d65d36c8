"""Rollback: how the sequences of a context drop tokens again, such as rejected drafts.

`specgen.method.verifiers` decides what is rejected, `specgen.method.draft` asks for the rollback.
There are two kinds of caches:

- *Cells* (`CellSequences`): attention has a cell for each token, also with a sliding window. A
  rollback drops the cells of the last tokens, at once.
- *States* (`RecurrentSequences`): a recurrent model has one state per sequence, which every token
  changes; a hybrid model has such states and cells. A rollback must return to an earlier state.

An earlier state can come from four places. The first one that reaches the position is used:

1. llama.cpp's *snapshots*, which some architectures have: a decode of n rows of a sequence keeps
   the states after each of the last few rows. They go back to the state after the first of these
   rows, not to the state before it. The next decode replaces them.
2. A *copy* of the state, made at a checkpoint, that is, just before a draft is decoded. The tokens
   between the checkpoint and the new end of the sequence are decoded again.
3. An *anchor*: a saved state that is kept for longer, such as that at the end of a prompt.
4. None: the whole sequence is decoded again.

`RecurrentSequences.remove` only changes the text that a sequence should have. The cache follows
before the next decode of that sequence, and tokens that must be decoded again come before the new
rows of the same batch:

    text     a b c d e          what the sequence should hold
    cache    a b c d x y z      n_valid = 4, n_cached = 7: x y z were dropped from the text
    cache    a b c              n_valid = n_cached = 3: a copy of the state after c was restored
    batch          d e f        d and e are decoded again, and f is new
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError, DecodeEndedError, RollbackError, WorkerLostError
from specgen.llama.cache import RECURRENT_PART, KvCache
from specgen.method.backend import Batch, Rollback
from specgen.system.arrays import Logits

#: Decodes a batch natively.
DecodeRows: TypeAlias = Callable[[Batch], Logits]


# --- cells


class CellSequences:
    """The sequences of a model with attention only: a rollback drops cells."""

    rollback: Rollback = "cells"

    def __init__(self, cache: KvCache, decode_rows: DecodeRows, n_sequences: int) -> None:
        self._cache = cache
        self._decode_rows = decode_rows
        #: The tokens of each sequence, for each of which the cache has a cell.
        self._texts: list[list[int]] = [[] for _ in range(n_sequences)]

    def text(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence."""
        return self._texts[sequence]

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch; if that fails, the sequences keep what they had before."""
        try:
            logits = self._decode_rows(batch)
        except WorkerLostError:  # and the cache is lost with the worker
            raise
        except BaseException:
            self._drop_partly_decoded(batch)
            raise
        for token, sequences in zip(batch.tokens, batch.sequences, strict=True):
            for sequence in sequences:
                self._texts[sequence].append(token)
        return logits

    def _drop_partly_decoded(self, batch: Batch) -> None:
        """Drop the cells of a failed batch: the cache may hold any part of it."""
        for sequence in {each for sequences in batch.sequences for each in sequences}:
            with contextlib.suppress(RollbackError):
                self._cache.remove(sequence, len(self._texts[sequence]))

    def restore(self, sequence: int, tokens: Sequence[int], state: NDArray[np.uint8]) -> bool:
        """Give an empty sequence a text and its saved state; return whether llama.cpp took it."""
        if not self._cache.restore_whole(sequence, state, len(tokens)):
            return False
        self._texts[sequence] = list(tokens)
        return True

    def checkpoint(self, sequence: int) -> None:
        """Do nothing: cells can always be dropped."""

    def anchor(self, sequence: int) -> None:
        """Do nothing, as for a checkpoint."""

    def way_back(self, _sequence: int, n: int) -> int:
        """Return `n`: any number of tokens can be kept."""
        return n

    def copy(
        self,
        source: int,
        destination: int,
        start: int,
        end: int,
    ) -> None:
        """Let `destination` share the cells of `source` from `start` to `end`; -1: to its end."""
        if end > 0 and self._cache.n_window:
            self._cache.check_window(source, end)
        self._cache.copy(source, destination, start, end)
        source_text = self._texts[source]
        if end < 0:
            end = len(source_text)
        text = self._texts[destination]
        if start <= len(text):
            text[start:] = source_text[start:end]

    def remove(self, sequence: int, start: int) -> None:
        """Drop the cells of a sequence from position `start` on."""
        if start > 0 and self._cache.n_window:
            self._cache.check_window(sequence, start)
        self._cache.remove(sequence, start)
        del self._texts[sequence][start:]


# --- copies of recurrent states


class StateCopiesInCache:
    """Copies that are second sequences of the cache: `n_sequences` + s has the copy of s.

    A copy shares the cell of its sequence, which gets another cell when it goes on. So copying
    costs only flags, but the cache needs twice the cells.
    """

    def __init__(self, cache: KvCache, n_sequences: int) -> None:
        self._cache = cache
        self._n_sequences = n_sequences

    def save(self, sequence: int, position: int) -> None:
        """Replace the copy by the current state of a sequence, which ends at `position`."""
        self.forget(sequence)
        self._cache.copy(sequence, self._n_sequences + sequence)
        self._cache.check_length(self._n_sequences + sequence, position)

    def restore(self, sequence: int, position: int) -> None:
        """Return a sequence to its copy, saved at `position`; raise `RollbackError` if it fails."""
        self._cache.remove(sequence)
        self._cache.copy(self._n_sequences + sequence, sequence)
        self._cache.check_length(sequence, position)

    def forget(self, sequence: int) -> None:
        """Drop the copy of a sequence, if there is one."""
        self._cache.remove(self._n_sequences + sequence)


class StateCopiesInMemory:
    """Copies in the memory of this process, for caches whose cells have snapshots.

    They hold only the recurrent part of a state: `restore` drops the later attention cells of a
    hybrid model.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._states: dict[int, NDArray[np.uint8]] = {}

    def save(self, sequence: int, _position: int) -> None:
        """Replace the copy by the current state of a sequence. Its memory is reused."""
        buffer = self._states.get(sequence)
        self._states[sequence] = self._cache.saved(sequence, RECURRENT_PART, buffer)

    def restore(self, sequence: int, position: int) -> None:
        """Return a sequence to its copy, saved at `position`; raise `RollbackError` if it fails."""
        self._cache.restore_recurrent_part(sequence, self._states[sequence], position)

    def forget(self, sequence: int) -> None:
        """Do nothing: the next copy needs the memory."""


# --- states

#: The most tokens decoded again in each round. If there are more, they are decoded once, and the
#: state is copied.
_MAX_REPEATED = 3


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The recurrent part of a sequence's state at a position."""

    position: int
    state: NDArray[np.uint8]


@dataclass(slots=True)
class _RecurrentText:
    """The tokens of a sequence, and which of them its recurrent state has read."""

    #: The tokens that the sequence should hold.
    tokens: list[int] = field(default_factory=list)
    #: The number of tokens that the cache holds.
    n_cached: int = 0
    #: How many of these, from the first, still are those of `tokens`: fewer than `n_cached` after a
    #: rollback that the cache has not followed yet.
    n_valid: int = 0
    #: The earliest position that snapshots go back to; `n_cached` if there are none.
    snapshots_from: int = 0
    #: The position of the state's copy; None if there is no copy.
    copied_at: int | None = None
    #: A state within the text, which is kept until the next anchor.
    anchor: _Anchor | None = None
    #: Whether a checkpoint was set, and nothing has been decoded since.
    checkpoint_due: bool = False

    @property
    def n_missing(self) -> int:
        """The number of tokens that the cache lacks, if all that it holds are valid."""
        return len(self.tokens) - self.n_cached


class RecurrentSequences:
    """The sequences of a recurrent or hybrid model: a rollback returns to an earlier state."""

    def __init__(
        self,
        cache: KvCache,
        decode_rows: DecodeRows,
        *,
        n_sequences: int,
        n_rows: int,
        n_snapshots: int,
    ) -> None:
        """Start with empty sequences.

        Args:
            cache: The cache.
            decode_rows: Decodes a batch natively.
            n_sequences: The number of sequences.
            n_rows: The most rows of a batch.
            n_snapshots: How many rows llama.cpp's snapshots go back; 0: there are none.
        """
        self._cache = cache
        self._decode_rows = decode_rows
        self.rollback: Rollback = "snapshots" if n_snapshots else "states"
        #: At most one copy of the state of each sequence.
        self._copies: StateCopiesInMemory | StateCopiesInCache
        if n_snapshots:
            self._copies = StateCopiesInMemory(cache)
        else:
            self._copies = StateCopiesInCache(cache, n_sequences)
        self._n_rows = n_rows
        self._n_snapshots = n_snapshots
        self._texts: defaultdict[int, _RecurrentText] = defaultdict(_RecurrentText)

    def text(self, sequence: int) -> list[int]:
        """Return the tokens that a sequence should hold."""
        return self._texts[sequence].tokens

    def restore(self, sequence: int, tokens: Sequence[int], state: NDArray[np.uint8]) -> bool:
        """Give an empty sequence a text and its saved state; return whether llama.cpp took it."""
        n = len(tokens)
        if not self._cache.restore_whole(sequence, state, n):
            return False
        self._texts[sequence] = _RecurrentText(
            list(tokens),
            n_cached=n,
            n_valid=n,
            snapshots_from=n,
        )
        return True

    def checkpoint(self, sequence: int) -> None:
        """Announce that the next rows may be dropped: a copy of the state may be needed."""
        self._texts[sequence].checkpoint_due = True

    def anchor(self, sequence: int) -> None:
        """Save the state of a sequence, if the cache agrees with its text."""
        text = self._texts[sequence]
        n = len(text.tokens)
        if text.n_valid == text.n_cached == n:
            text.anchor = _Anchor(n, self._cache.saved(sequence, RECURRENT_PART))

    def way_back(self, sequence: int, n: int) -> int:
        """Return the position of the anchor, if it is within the first `n` tokens; else 0."""
        anchor = self._texts[sequence].anchor
        if anchor is None or anchor.position > n:
            return 0
        return anchor.position

    def copy(
        self,
        source: int,
        _destination: int,
        _start: int,
        _end: int,
    ) -> None:
        """Raise `BackendError`: a recurrent state belongs to one sequence."""
        raise BackendError(
            f"{self._cache.name}: sequence {source} has a recurrent state, which cannot be shared"
        )

    def remove(self, sequence: int, start: int) -> None:
        """Drop tokens of a sequence; the cache follows before the next decode."""
        if start <= 0:
            self._copies.forget(sequence)
            self._cache.remove(sequence)
            self._texts.pop(sequence, None)
            return
        text = self._texts[sequence]
        del text.tokens[start:]
        text.n_valid = min(text.n_valid, start)
        # Later states are those of other texts from now on.
        if text.anchor is not None and text.anchor.position > start:
            text.anchor = None
        if text.copied_at is not None and text.copied_at > start:
            self._copies.forget(sequence)
            text.copied_at = None

    def decode(self, batch: Batch) -> Logits:
        """Decode rows that continue the texts of their sequences, after any pending rollback.

        Raises:
            BackendError: If that is not possible.
            RollbackError: If the cache cannot follow a rollback.
        """
        n_new = self._count_rows(batch)

        # 1. Let the cache drop what is not in the texts. It may then lack some of their tokens.
        for sequence in n_new:
            self._follow_rollback(sequence)

        # 2. Copy the states at checkpoints, where snapshots would not be enough.
        n_decoded = Counter({s: n + self._texts[s].n_missing for s, n in n_new.items()})
        for sequence, n in n_new.items():
            text = self._texts[sequence]
            if text.checkpoint_due:
                text.checkpoint_due = False
                self._copy_if_needed(sequence, n, n_decoded)

        # 3. Decode missing tokens in the same batch, or in batches of their own if they are many.
        rows = Batch()
        for sequence in n_new:
            rows.extend(self._missing_rows(sequence))
        if len(rows) + len(batch) > self._n_rows:
            for sequence in n_new:
                self._catch_up(sequence)
            rows = Batch()

        # 4. Decode the new rows.
        rows.extend(batch)
        logits = self._run(rows)
        for token, (sequence,) in zip(batch.tokens, batch.sequences, strict=True):
            self._texts[sequence].tokens.append(token)
        return logits

    def _count_rows(self, batch: Batch) -> Counter[int]:
        """Return the number of rows of each sequence.

        Raises:
            BackendError: If a row is not at the end of its sequence: llama.cpp would only warn.
        """
        n_rows: Counter[int] = Counter()
        for position, sequences in zip(batch.positions, batch.sequences, strict=True):
            if len(sequences) != 1:
                raise BackendError(
                    f"{self._cache.name}: a row of sequences {sequences}; "
                    "a recurrent state belongs to one"
                )
            sequence = sequences[0]
            expected = len(self.text(sequence)) + n_rows[sequence]
            if position != expected:
                raise BackendError(
                    f"{self._cache.name}: a row at position {position}; "
                    f"sequence {sequence} goes on at {expected}"
                )
            n_rows[sequence] += 1
        return n_rows

    def _follow_rollback(self, sequence: int) -> None:
        """Drop tokens from the cache that are not in the text any more."""
        text = self._texts[sequence]
        if text.n_valid == text.n_cached:
            return
        if text.n_valid >= text.snapshots_from:
            self._cache.remove(sequence, text.n_valid)
            self._cache.check_length(sequence, text.n_valid)
        elif text.copied_at is not None and text.copied_at <= text.n_valid:
            self._copies.restore(sequence, text.copied_at)
            text.n_valid = text.copied_at
        elif text.anchor is not None and text.anchor.position <= text.n_valid:
            text.n_valid = text.anchor.position
            self._cache.restore_recurrent_part(sequence, text.anchor.state, text.anchor.position)
        else:
            self._cache.remove(sequence)
            text.n_valid = 0
        text.n_cached = text.n_valid
        # llama.cpp goes back only once between two decodes, so no snapshot is left.
        text.snapshots_from = text.n_valid

    def _copy_if_needed(self, sequence: int, n_new: int, n_decoded: Counter[int]) -> None:
        """Copy the state before `n_new` rows that may be dropped.

        Nothing is copied if snapshots of the batch, of `n_decoded` rows of each sequence, will be
        enough, or if the last copy is only a few tokens back.
        """
        text = self._texts[sequence]
        reach = self._snapshot_reach(n_decoded[sequence], n_decoded)
        if reach >= n_new:
            return
        if reach == n_new - 1 and n_new > 1:
            # Only if all rows are dropped, which is rare, the text is decoded again.
            return
        has_copy = text.copied_at is not None
        if has_copy and 0 < text.n_missing <= _MAX_REPEATED:
            return
        self._catch_up(sequence)
        if text.copied_at != len(text.tokens):
            self._copies.save(sequence, len(text.tokens))
            text.copied_at = len(text.tokens)

    def _catch_up(self, sequence: int) -> None:
        """Decode all tokens of a text that the cache lacks."""
        while self._texts[sequence].n_missing:
            self._run(self._missing_rows(sequence))

    def _missing_rows(self, sequence: int) -> Batch:
        """Return rows of tokens that the cache lacks, at most those of a whole batch."""
        text = self._texts[sequence]
        missing = text.tokens[text.n_cached : text.n_cached + self._n_rows]
        return Batch.of(missing, text.n_cached, sequence=sequence)

    def _run(self, batch: Batch) -> Logits:
        """Decode rows, and note what the cache holds then."""
        n_rows = Counter(sequence for (sequence,) in batch.sequences)
        try:
            logits = self._decode_rows(batch)
        except BaseException as error:
            was_ended = isinstance(error, DecodeEndedError)
            self._invalidate(n_rows, len(batch), keeps_copies=was_ended)
            raise
        for sequence, n in n_rows.items():
            text = self._texts[sequence]
            text.n_cached += n
            text.n_valid = text.n_cached
            text.snapshots_from = text.n_cached - self._snapshot_reach(n, n_rows)
        if len(n_rows) > 1:
            # If llama.cpp moves the cell of another sequence, its state moves along, but its
            # snapshots do not.
            for sequence, text in self._texts.items():
                if sequence not in n_rows:
                    text.snapshots_from = text.n_cached
        return logits

    def _invalidate(self, sequences: Iterable[int], n: int, *, keeps_copies: bool) -> None:
        """Note that the cache may hold any part of a failed batch of `n` rows."""
        for sequence in sequences:
            text = self._texts[sequence]
            if not keeps_copies:
                text.copied_at = None
            text.n_valid = text.copied_at or 0
            text.n_cached = len(text.tokens) + n
            text.snapshots_from = text.n_cached

    def _snapshot_reach(self, n: int, n_rows: Counter[int]) -> int:
        """Return how many rows snapshots go back, after `n` rows of a sequence in a batch.

        llama.cpp may split a batch of unequal sequences and move cells in between: then none.
        """
        if len(n_rows) > 2 and len(set(n_rows.values())) > 1:
            return 0
        return min(n - 1, self._n_snapshots)
