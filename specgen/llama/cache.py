"""The KV cache of a context, with checks of every native result. What is
rejected is decided in `method/verifiers.py` and dropped by `method/draft.py`.
"""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError, DecodeEndedError, RollbackError
from specgen.llama.library import forget_log, last_error, llama_cpp
from specgen.llama.model import LlamaModel
from specgen.method.backend import Batch
from specgen.system.arrays import Logits

#: The part of a state that llama.cpp can separate from attention cells.
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class Cache:
    """llama.cpp's memory of a native `context` of a model: the cells or states of each sequence.
    llama.cpp gives cells outside the sliding window of their sequence's end to others. A rollback
    may need them, so `guards` names a second sequence for each whose cells must stay: cells of two
    sequences are never taken.
    """

    def __init__(self, model: LlamaModel, context: Any, guards: Mapping[int, int]) -> None:
        self.name, self.n_window, self.call = model.name, model.n_window, model.call
        self.context = context
        self._guards = guards
        self._memory = llama_cpp.llama_get_memory(context)

    def __bool__(self) -> bool:
        return bool(self._memory)

    def length(self, sequence: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def with_guards(self, sequences: tuple[int, ...]) -> tuple[int, ...]:
        guards = (self._guards[each] for each in sequences if each in self._guards)
        return (*sequences, *guards)

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        for each in self.with_guards((destination,)):
            llama_cpp.llama_memory_seq_cp(self._memory, source, each, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        for each in self.with_guards((sequence,)) if self._guards else (sequence,):
            if not llama_cpp.llama_memory_seq_rm(self._memory, each, start, -1):
                raise RollbackError(
                    f"{self.name}: the cache cannot drop sequence {sequence} from position {start} on"
                )

    def saved_bytes(self, sequence: int, flags: int = 0) -> int:
        size = llama_cpp.llama_state_seq_get_size_ext
        return int(self.call(size, self.context, sequence, flags))

    def saved(
        self, sequence: int, flags: int = 0, buffer: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Return the state of a sequence, in `buffer` if it is large enough: uint8[n_bytes]. Raise
        `BackendError`.
        """
        n_bytes = self.saved_bytes(sequence, flags)
        if buffer is None or len(buffer) < n_bytes:
            buffer = np.empty(n_bytes, np.uint8)
        forget_log()
        get = llama_cpp.llama_state_seq_get_data_ext
        n = int(self.call(get, self.context, _pointer(buffer), len(buffer), sequence, flags))
        if n == 0:
            raise BackendError(
                f"{self.name}: the state of sequence {sequence} could not be saved: {last_error()}"
            )
        return buffer[:n]

    def put(self, sequence: int, state: NDArray[np.uint8], flags: int = 0) -> bool:
        """Give a sequence a state that `saved` returned; return whether llama.cpp took it. The
        sequence then has no guard, since llama.cpp frees the cells of its sliding window, and
        restores them elsewhere.
        """
        if (guard := self._guards.get(sequence)) is not None:
            llama_cpp.llama_memory_seq_rm(self._memory, guard, 0, -1)
        forget_log()
        write = llama_cpp.llama_state_seq_set_data_ext
        n = self.call(write, self.context, _pointer(state), len(state), sequence, flags)
        return int(n) == len(state)

    def restore(self, sequence: int, state: NDArray[np.uint8], n_tokens: int) -> bool:
        is_taken = self.put(sequence, state) and self.length(sequence) == n_tokens
        if is_taken:
            self.renew_guard(sequence)
        return is_taken

    def renew_guard(self, sequence: int) -> None:
        if (guard := self._guards.get(sequence)) is not None:
            llama_cpp.llama_memory_seq_cp(self._memory, sequence, guard, 0, -1)

    def check_window(self, sequence: int, start: int) -> None:
        """Raise `RollbackError` if a token at `start` would miss cells of its window, which a guard
        would have kept.
        """
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, sequence))
        if self.n_window and first > max(0, start + 1 - self.n_window):
            raise RollbackError(
                f"{self.name}: sequence {sequence} cannot go back to position {start}: its "
                f"sliding window of {self.n_window} tokens is in the cache from {first} on only"
            )

    def check_length(self, sequence: int, expected: int) -> None:
        found = self.length(sequence)
        if found != expected:
            raise RollbackError(
                f"{self.name}: sequence {sequence} was rolled back to position {expected}, "
                f"its cache ends at {found}"
            )


def _pointer(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def restore_part(cache: Cache, sequence: int, state: NDArray[np.uint8], position: int) -> None:
    """Let a sequence go back to a position, with the recurrent part of its state there. Raise
    `RollbackError`.
    """
    if not cache.put(sequence, state, _PARTIAL):
        raise RollbackError(
            f"{cache.name}: the state of sequence {sequence} at position {position} "
            f"could not be restored: {last_error()}"
        )
    cache.remove(sequence, position)  # the later attention cells of a hybrid model
    cache.renew_guard(sequence)
    cache.check_length(sequence, position)


class StateCopies:
    """Keeps at most one copy of the recurrent state of each sequence. With `n_shared` sequences,
    sequence `n_shared` + s of the cache shares the cell of the state of s, which leaves the cell
    when it goes on: a copy costs only flags, but the cache needs twice the cells. With 0, copies
    are in the process's memory, and hold only the recurrent part of the state: `restore` drops the
    later attention cells of a hybrid model.
    """

    def __init__(self, cache: Cache, n_shared: int) -> None:
        self.cache = cache
        self._n_shared = n_shared
        self._states: dict[int, NDArray[np.uint8]] = {}

    def save(self, sequence: int, position: int) -> None:
        """Replace the copy by the current state, which is that at `position`, the sequence's end."""
        if not self._n_shared:
            buffer = self._states.get(sequence)
            self._states[sequence] = self.cache.saved(sequence, _PARTIAL, buffer)
            return
        self.forget(sequence)
        self.cache.copy(sequence, self._n_shared + sequence)
        self.cache.check_length(self._n_shared + sequence, position)

    def restore(self, sequence: int, position: int) -> None:
        if self._n_shared:
            self.cache.remove(sequence)
            self.cache.copy(self._n_shared + sequence, sequence)
            self.cache.check_length(sequence, position)
        else:
            restore_part(self.cache, sequence, self._states[sequence], position)

    def forget(self, sequence: int) -> None:
        if self._n_shared:
            self.cache.remove(self._n_shared + sequence)


# --- rollback of recurrent and hybrid models

# A recurrent model has one state for each sequence, and every token changes it. A rollback must go
# back to an earlier state. There are three ways; the first one that is possible is used:
#
# - llama.cpp's *snapshots*, for some architectures: a decode of n rows of a sequence keeps the
# states
#   after each of the last few rows. They reach back to the state after the first row of the last decode,
#   not to the state before it. The next decode replaces them.
# - A *copy* of the state (`StateCopies`), made at a checkpoint. The tokens between the checkpoint
# and the
#   new end of the sequence are decoded again.
# - The whole sequence is decoded again from its beginning.
#
# A removal only changes the remembered text of the sequence. Before the sequence's next decode, the
# cache is made to agree with the text: tokens that must be decoded again come before the new rows
# in the same batch.

#: The most tokens decoded again in each round; more of them are decoded once, and the state is
#: copied.
_MAX_REPEATED = 3


@dataclass(slots=True)
class _Text:
    """A sequence: its tokens, and how many of them the cache holds."""

    tokens: list[int] = field(default_factory=list)
    #: The number of tokens that the cache holds, and how many of the first are still those of the
    #: text.
    n_cached: int = 0
    n_agreed: int = 0
    #: The earliest position that snapshots go back to; `n_cached` if there are none.
    snapshots_from: int = 0
    #: The position of the state's copy; None if there is no copy.
    copied_at: int | None = None
    #: A position, at most the end of the text, and the recurrent part of the state there.
    anchor: tuple[int, NDArray[np.uint8]] | None = None
    #: Whether a checkpoint was set and nothing has been decoded since.
    checkpoint_due: bool = False

    @property
    def n_missing(self) -> int:
        """The number of tokens of the text that the cache does not hold. Valid after `_agree`."""
        return len(self.tokens) - self.n_cached


class Rewinder:
    """Decodes, at most `n_rows` rows at once, for a context with recurrent states, and rolls these
    back.
    """

    def __init__(
        self, copies: StateCopies, decode: Callable[[Batch], Logits], n_rows: int, n_snapshots: int
    ) -> None:
        self._cache, self._copies = copies.cache, copies
        self._decode_rows = decode
        self._n_rows = n_rows
        self._n_snapshots = n_snapshots
        self._texts: defaultdict[int, _Text] = defaultdict(_Text)

    def text(self, sequence: int) -> list[int]:
        return self._texts[sequence].tokens

    def restore(self, sequence: int, tokens: Sequence[int], state: NDArray[np.uint8]) -> bool:
        """Give an empty sequence a text and its whole state; return whether llama.cpp took it."""
        n = len(tokens)
        if not self._cache.restore(sequence, state, n):
            return False
        self._texts[sequence] = _Text(list(tokens), n_cached=n, n_agreed=n, snapshots_from=n)
        return True

    def checkpoint(self, sequence: int) -> None:
        self._texts[sequence].checkpoint_due = True

    def anchor(self, sequence: int) -> None:
        text = self._texts[sequence]
        if text.n_agreed == text.n_cached == len(text.tokens):
            text.anchor = len(text.tokens), self._cache.saved(sequence, _PARTIAL)

    def way_back(self, sequence: int, n: int) -> int:
        anchor = self._texts[sequence].anchor
        return anchor[0] if anchor is not None and anchor[0] <= n else 0

    def remove(self, sequence: int, start: int) -> None:
        text = self._texts[sequence]
        if start <= 0:
            self._copies.forget(sequence)
            self._cache.remove(sequence)
            self._texts.pop(sequence)
            return
        del text.tokens[start:]
        text.n_agreed = min(text.n_agreed, start)
        if text.anchor is not None and text.anchor[0] > start:
            text.anchor = None
        if text.copied_at is not None and text.copied_at > start:
            self._copies.forget(sequence)
            text.copied_at = None

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch behind the texts of its sequences, after any pending rollback. Raise
        `BackendError`.
        """
        n_rows = self._check(batch)
        for sequence in n_rows:
            self._agree(sequence)
        n_whole = Counter({s: n + self._texts[s].n_missing for s, n in n_rows.items()})
        for sequence, n in n_rows.items():
            self._copy_if_due(sequence, n, n_whole)
        missing = Batch()
        for sequence in n_rows:
            self._add_missing(missing, sequence)
        if len(missing) + len(batch) > self._n_rows:
            for sequence in n_rows:
                self._catch_up(sequence)
            missing = Batch()
        missing.extend(batch)
        logits = self._run(missing)
        for token, (sequence,) in zip(batch.tokens, batch.sequences, strict=True):
            self._texts[sequence].tokens.append(token)
        return logits

    def _check(self, batch: Batch) -> Counter[int]:
        """Return the rows of each sequence. Raise `BackendError` for a wrong position: llama.cpp
        would only warn.
        """
        n_rows: Counter[int] = Counter()
        for position, sequences in zip(batch.positions, batch.sequences, strict=True):
            if len(sequences) != 1:
                what = f"a row of sequences {sequences}; a recurrent state belongs to one"
                raise BackendError(f"{self._cache.name}: {what}")
            sequence = sequences[0]
            expected = len(self.text(sequence)) + n_rows[sequence]
            if position != expected:
                raise BackendError(
                    f"{self._cache.name}: a row at position {position}; sequence {sequence} "
                    f"goes on at {expected}"
                )
            n_rows[sequence] += 1
        return n_rows

    def _agree(self, sequence: int) -> None:
        """Drop tokens from the cache that are not in the text. It may then hold fewer tokens than
        the text.
        """
        text = self._texts[sequence]
        if text.n_agreed == text.n_cached:
            return
        if text.n_agreed >= text.snapshots_from:
            self._cache.remove(sequence, text.n_agreed)
            self._cache.check_length(sequence, text.n_agreed)
        elif text.copied_at is not None and text.copied_at <= text.n_agreed:
            self._copies.restore(sequence, text.copied_at)
            text.n_agreed = text.copied_at
        elif text.anchor is not None and text.anchor[0] <= text.n_agreed:
            text.n_agreed, state = text.anchor
            restore_part(self._cache, sequence, state, text.n_agreed)
        else:
            self._cache.remove(sequence)
            text.n_agreed = 0
        # llama.cpp can go back only once between two decodes, so no snapshot can be used any more.
        text.n_cached = text.snapshots_from = text.n_agreed

    def _copy_if_due(self, sequence: int, n: int, n_whole: Counter[int]) -> None:
        """Copy the state before n rows that may be dropped, unless snapshots (of `n_whole` rows)
        will be enough.
        """
        text = self._texts[sequence]
        if not text.checkpoint_due:
            return
        text.checkpoint_due = False
        reach = self._reach(n_whole[sequence], n_whole)
        if reach >= n or (reach == n - 1 and n > 1):
            # In the second case the text is decoded again if all n rows are dropped, which is rare.
            return
        if text.n_missing and text.copied_at is not None and text.n_missing <= _MAX_REPEATED:
            return
        self._catch_up(sequence)
        if text.copied_at != len(text.tokens):
            self._copies.save(sequence, len(text.tokens))
            text.copied_at = len(text.tokens)

    def _catch_up(self, sequence: int) -> None:
        text = self._texts[sequence]
        while text.n_missing:
            batch = Batch()
            self._add_missing(batch, sequence)
            self._run(batch)

    def _add_missing(self, batch: Batch, sequence: int) -> None:
        text = self._texts[sequence]
        missing = text.tokens[text.n_cached :][: self._n_rows]
        batch.extend(Batch.of(missing, text.n_cached, sequence=sequence))

    def _run(self, batch: Batch) -> Logits:
        n_rows = Counter(sequence for (sequence,) in batch.sequences)
        try:
            logits = self._decode_rows(batch)
        except BaseException as error:
            # The cache may hold any part of the batch: keep nothing of it but a copy that is good
            # still.
            for sequence in n_rows:
                text = self._texts[sequence]
                if not isinstance(error, DecodeEndedError):
                    text.copied_at = None
                text.n_agreed = text.copied_at or 0
                text.n_cached = text.snapshots_from = len(text.tokens) + len(batch)
            raise
        for sequence, n in n_rows.items():
            text = self._texts[sequence]
            text.n_cached += n
            text.n_agreed = text.n_cached
            text.snapshots_from = text.n_cached - self._reach(n, n_rows)
        if len(n_rows) > 1:
            # If llama.cpp moves the cell of another sequence, its state moves too, but its
            # snapshots do not.
            for sequence, text in self._texts.items():
                if sequence not in n_rows:
                    text.snapshots_from = text.n_cached
        return logits

    def _reach(self, n: int, n_rows: Counter[int]) -> int:
        """Return how far snapshots go back after n rows; 0 where parts of unequal sequences may
        move cells.
        """
        if len(n_rows) > 2 and len(set(n_rows.values())) > 1:
            return 0
        return min(n - 1, self._n_snapshots)
