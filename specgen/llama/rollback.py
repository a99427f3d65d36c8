"""Rollback: how the sequences of a context drop tokens again, such as rejected drafts.

`specgen.method.verifiers` decides what is rejected, `specgen.method.draft` asks for the rollback.
There are two kinds of caches:

- *Cells* (`CellSequences`): attention has a cell for each token, even with a sliding window. A
  rollback drops the cells of the last tokens immediately.
- *States* (`RecurrentSequences`): a recurrent model has one state per sequence, which every token
  changes; a hybrid model has such states and cells. A rollback must return to an earlier state.

An earlier state can come from four places. The first one that reaches the position is used (and of
a copy and an anchor, the later one):

1. llama.cpp's *snapshots*, which some architectures have: a decode of n rows of a sequence keeps
   the states after each of the last few rows. They go back to the state after the first of these
   rows, not to the state before it. The next decode replaces them.
2. A *copy* of the state, made at a checkpoint, that is, just before a draft is decoded. The tokens
   between the checkpoint and the new end of the sequence are decoded again.
3. An *anchor*: one of a few saved states that are kept for longer, such as that after an agent's
   instructions, and that at the end of a prompt.
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

    def __init__(
        self,
        cache: KvCache,
        decode_rows: DecodeRows,
        n_sequences: int,
    ) -> None:
        self._cache = cache
        self._decode_rows = decode_rows
        #: The tokens of each sequence. The cache has a cell for each token.
        self._texts: list[list[int]] = [[] for _ in range(n_sequences)]

    def text(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence."""
        return self._texts[sequence]

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch; if that fails, the sequences keep what they had before.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab].
        """
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
        batch_sequences = {sequence for row in batch.sequences for sequence in row}
        for sequence in batch_sequences:
            with contextlib.suppress(RollbackError):
                self._cache.remove(sequence, len(self._texts[sequence]))

    def restore(
        self,
        sequence: int,
        tokens: Sequence[int],
        state: NDArray[np.uint8],
    ) -> bool:
        """Give an empty sequence a text and its saved state; return whether llama.cpp took it."""
        if not self._cache.restore_whole(sequence, state, len(tokens)):
            return False
        self._texts[sequence] = list(tokens)
        return True

    def checkpoint(self, sequence: int) -> None:
        """Do nothing: cells can always be dropped."""

    def anchor(self, sequence: int) -> None:
        """Do nothing, as for a checkpoint."""

    def n_restorable(self, _sequence: int, n: int) -> int:
        """Return `n`: any number of tokens can be kept."""
        return n

    def copy(
        self,
        source: int,
        destination: int,
        start: int,
        end: int,
    ) -> None:
        """Let `destination` share the cells of `source` from `start` to `end`.

        A negative `end` means the end of `source`.

        Raises:
            RollbackError: If the sliding window before `end` is not in the cache any more.
        """
        if end > 0 and self._cache.n_window:
            self._cache.check_window(source, end)
        self._cache.copy(source, destination, start, end)
        source_text = self._texts[source]
        if end < 0:
            end = len(source_text)
        text = self._texts[destination]
        if start <= len(text):  # after a gap, tokens would be noted at wrong positions
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
        """Replace the copy with the current state of a sequence, which ends at `position`."""
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

    They hold only the recurrent part of a state. A hybrid model also has attention cells; those
    after the restored position are simply dropped.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._states: dict[int, NDArray[np.uint8]] = {}

    def save(self, sequence: int, _position: int) -> None:
        """Replace the copy with the current state of a sequence. The copy's memory is reused."""
        buffer = self._states.get(sequence)
        self._states[sequence] = self._cache.saved(sequence, RECURRENT_PART, buffer)

    def restore(self, sequence: int, position: int) -> None:
        """Return a sequence to its copy, saved at `position`; raise `RollbackError` if it fails."""
        self._cache.restore_recurrent_part(sequence, self._states[sequence], position)

    def forget(self, sequence: int) -> None:
        """Do nothing: the memory is kept for the next copy."""


# --- states

#: The maximum number of tokens that are decoded again in each round instead of copying the state.
#: Of more, the state is copied after decoding them once.
_MAX_REPEATED = 3
#: A sequence has at most this many anchors...
_MAX_ANCHORS = 8
#: ...of at most this total size; but one is always kept.
_MAX_ANCHOR_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The recurrent part of a sequence's state at a position."""

    #: The number of tokens that the state has read.
    position: int
    #: The state in llama.cpp's format, uint8[n_bytes].
    state: NDArray[np.uint8]


@dataclass(slots=True)
class _RecurrentText:
    """The tokens of a sequence, and which of them its recurrent state has read."""

    #: The tokens that the sequence should hold.
    tokens: list[int] = field(default_factory=list)
    #: The number of tokens that the cache holds.
    n_cached: int = 0
    #: The number of cached tokens, from the first, that agree with `tokens`. It is smaller than
    #: `n_cached` after a rollback that the cache has not followed yet.
    n_valid: int = 0
    #: The earliest position that snapshots go back to; `n_cached` if there are none.
    snapshots_from: int = 0
    #: The position at which the state was copied; None if there is no copy.
    copied_at: int | None = None
    #: Saved states within the text, in the order of their positions.
    anchors: list[_Anchor] = field(default_factory=list)
    #: Whether a checkpoint was set and nothing has been decoded since.
    checkpoint_due: bool = False

    @property
    def n_missing(self) -> int:
        """The number of tokens that the cache lacks; it must have followed all rollbacks."""
        return len(self.tokens) - self.n_cached

    def last_anchor(self, n: int) -> _Anchor | None:
        """Return the last anchor within the first `n` tokens; None if there is none."""
        return next((each for each in reversed(self.anchors) if each.position <= n), None)

    def n_restorable(self, n: int) -> int:
        """Return the position of `last_anchor`; 0 if there is none."""
        anchor = self.last_anchor(n)
        return 0 if anchor is None else anchor.position

    def drop_dense_anchors(self) -> None:
        """Drop anchors until they are few and small enough; the last one always stays.

        Each time, the anchor with the smallest gap between its neighbours is dropped.
        """
        state_bytes = max(1, len(self.anchors[-1].state))
        n_max = max(1, min(_MAX_ANCHORS, _MAX_ANCHOR_BYTES // state_bytes))
        while len(self.anchors) > n_max:
            positions = [0, *(each.position for each in self.anchors)]
            gaps = [after - before for before, after in zip(positions, positions[2:], strict=False)]
            del self.anchors[gaps.index(min(gaps))]


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
            n_rows: The maximum number of rows of a batch.
            n_snapshots: The number of rows that llama.cpp's snapshots go back; 0 if it has none.
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

    def restore(
        self,
        sequence: int,
        tokens: Sequence[int],
        state: NDArray[np.uint8],
    ) -> bool:
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
        """Announce that the next rows may be dropped, so that `decode` can copy the state first."""
        self._texts[sequence].checkpoint_due = True

    def anchor(self, sequence: int) -> None:
        """Save the state of a sequence, unless the cache still has to follow a rollback."""
        text = self._texts[sequence]
        n = len(text.tokens)
        is_anchored = text.n_restorable(n) == n
        if text.n_valid == text.n_cached == n and not is_anchored:
            text.anchors.append(_Anchor(n, self._cache.saved(sequence, RECURRENT_PART)))
            text.drop_dense_anchors()

    def n_restorable(self, sequence: int, n: int) -> int:
        """Return the position of the last anchor in the first `n` tokens; 0 if there is none."""
        return self._texts[sequence].n_restorable(n)

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
        # States after `start` have read dropped tokens, so they can never be used again.
        text.anchors = [anchor for anchor in text.anchors if anchor.position <= start]
        if text.copied_at is not None and text.copied_at > start:
            self._copies.forget(sequence)
            text.copied_at = None

    def decode(self, batch: Batch) -> Logits:
        """Decode rows that continue the texts of their sequences, after any pending rollback.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab].

        Raises:
            BackendError: If llama.cpp fails, or a row is not at the end of its sequence.
            RollbackError: If the cache cannot follow a rollback.
        """
        n_new_rows = self._count_rows(batch)

        # 1. Let the cache drop what is not in the texts. It may then lack some of their tokens.
        for sequence in n_new_rows:
            self._follow_rollback(sequence)

        # 2. Copy the states at checkpoints, where snapshots would not be enough.
        n_decoded = Counter(
            {sequence: n + self._texts[sequence].n_missing for sequence, n in n_new_rows.items()}
        )
        for sequence, n_droppable in n_new_rows.items():
            text = self._texts[sequence]
            if text.checkpoint_due:
                text.checkpoint_due = False
                self._copy_if_needed(sequence, n_droppable, n_decoded)

        # 3. Put missing tokens before the new rows of the same batch, or, if they do not fit,
        #    decode them in batches of their own.
        rows = Batch()
        for sequence in n_new_rows:
            rows.extend(self._missing_rows(sequence))
        if len(rows) + len(batch) > self._n_rows:
            for sequence in n_new_rows:
                self._catch_up(sequence)
            rows = Batch()

        # 4. Decode the batch, and add the new tokens to the texts.
        rows.extend(batch)
        logits = self._run(rows)
        for token, (sequence,) in zip(batch.tokens, batch.sequences, strict=True):
            self._texts[sequence].tokens.append(token)
        return logits

    def _count_rows(self, batch: Batch) -> Counter[int]:
        """Return the number of rows of each sequence.

        Raises:
            BackendError: If a row belongs to several sequences, or is not at the end of its
                sequence (llama.cpp would only warn).
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
        """Let the cache drop tokens that are not in the text any more.

        The sources of an earlier state are tried in the order of the module's docstring. Afterwards
        the cache holds only valid tokens, but perhaps fewer than the text has.
        """
        text = self._texts[sequence]
        if text.n_valid == text.n_cached:
            return
        anchor = text.last_anchor(text.n_valid)
        copied_at = text.copied_at
        if anchor is not None and copied_at is not None and copied_at < anchor.position:
            copied_at = None  # the anchor is closer
        if text.n_valid >= text.snapshots_from:
            # llama.cpp returns to a snapshot by itself.
            self._cache.remove(sequence, text.n_valid)
            self._cache.check_length(sequence, text.n_valid)
        elif copied_at is not None and copied_at <= text.n_valid:
            self._copies.restore(sequence, copied_at)
            text.n_valid = copied_at
        elif anchor is not None:
            text.n_valid = anchor.position
            self._cache.restore_recurrent_part(sequence, anchor.state, anchor.position)
        else:
            self._cache.remove(sequence)
            text.n_valid = 0
        text.n_cached = text.n_valid
        # llama.cpp can use snapshots only once between two decodes, so none are left.
        text.snapshots_from = text.n_valid

    def _copy_if_needed(
        self,
        sequence: int,
        n_droppable: int,
        n_decoded: Counter[int],
    ) -> None:
        """Copy the state of a sequence before rows that may be dropped, unless that is needless.

        Args:
            sequence: The sequence. Its missing tokens are decoded before its state is copied.
            n_droppable: The number of its new rows, any of which may be dropped later.
            n_decoded: The number of rows of each sequence in the coming batch: the new ones, and
                those that are decoded again.
        """
        text = self._texts[sequence]
        reach = self._snapshot_reach(n_decoded[sequence], n_decoded)
        if reach >= n_droppable:
            # Snapshots of the coming batch will reach the state before all of these rows.
            return
        if reach == n_droppable - 1 and n_droppable > 1:
            # They will reach the state after the first of these rows. It is rare that this row is
            # dropped as well; more tokens are decoded again then.
            return
        has_copy = text.copied_at is not None
        if has_copy and 0 < text.n_missing <= _MAX_REPEATED:
            # The last copy is close: decoding a few tokens again is cheaper than a new copy.
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
        """Return rows for the tokens that the cache lacks, up to the maximum size of a batch."""
        text = self._texts[sequence]
        missing = text.tokens[text.n_cached : text.n_cached + self._n_rows]
        return Batch.of(missing, text.n_cached, sequence=sequence)

    def _run(self, batch: Batch) -> Logits:
        """Decode rows, and update what the cache holds and how far its snapshots go back.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab].
        """
        n_rows = Counter(sequence for (sequence,) in batch.sequences)
        try:
            logits = self._decode_rows(batch)
        except BaseException as error:
            # A decode that was ended on request leaves copies intact; another failure may not.
            was_ended = isinstance(error, DecodeEndedError)
            self._invalidate(n_rows, len(batch), keeps_copies=was_ended)
            raise
        for sequence, n in n_rows.items():
            text = self._texts[sequence]
            text.n_cached += n
            text.n_valid = text.n_cached
            text.snapshots_from = text.n_cached - self._snapshot_reach(n, n_rows)
        if len(n_rows) > 1:
            # Such a decode may move the cells of sequences outside the batch. Their states move
            # with the cells, but their snapshots are lost.
            for sequence, text in self._texts.items():
                if sequence not in n_rows:
                    text.snapshots_from = text.n_cached
        return logits

    def _invalidate(
        self,
        sequences: Iterable[int],
        n: int,
        *,
        keeps_copies: bool,
    ) -> None:
        """Note that the cache may hold any part of a failed batch of `n` rows.

        Only a copy, if it is kept, is known to be valid then.
        """
        for sequence in sequences:
            text = self._texts[sequence]
            if not keeps_copies:
                text.copied_at = None
            text.n_valid = text.copied_at or 0
            # An upper bound. It differs from `n_valid`, so that the next decode rolls back.
            text.n_cached = len(text.tokens) + n
            text.snapshots_from = text.n_cached

    def _snapshot_reach(self, n: int, n_rows: Counter[int]) -> int:
        """Return the number of rows that snapshots go back after a batch.

        Args:
            n: The number of rows of the sequence in question.
            n_rows: The number of rows of each sequence.
        """
        if len(n_rows) > 2 and len(set(n_rows.values())) > 1:
            # llama.cpp may split such a batch and move cells between its parts.
            return 0
        # They reach the state after the first of the `n` rows, but not the one before it.
        return min(n - 1, self._n_snapshots)
