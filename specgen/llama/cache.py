"""The KV cache of a native context: cells and states, copied, dropped, saved and restored.

llama.cpp calls it the memory of a context. `specgen.llama.rollback` builds on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError, RollbackError
from specgen.llama.library import forget_log, last_error, llama_cpp
from specgen.llama.model import LlamaModel

#: The whole state of a sequence.
WHOLE_STATE = 0
#: Only its recurrent part, without attention cells.
RECURRENT_PART = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class KvCache:
    """The cells, or recurrent states, of the sequences of a native context.

    With a sliding window, llama.cpp reuses cells that are outside the window at the end of their
    sequence. But a rollback moves that end back, and may need them again. So a sequence may have a
    *guard*: a second sequence that shares all of its cells. llama.cpp never reuses a cell that
    belongs to two sequences.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: Any,
        guards: Mapping[int, int],
    ) -> None:
        """Wrap the cache of a native context.

        Args:
            model: The model of the context.
            context: llama.cpp's pointer to the context.
            guards: The guard of each guarded sequence.
        """
        self.name = model.name
        self.n_window = model.n_window
        self._call = model.call
        self._context = context
        self._guards = guards
        self._memory = llama_cpp.llama_get_memory(context)

    def __bool__(self) -> bool:
        """Whether the model has a cache: encoders have none."""
        return bool(self._memory)

    # --- cells

    def length(self, sequence: int) -> int:
        """Return the number of positions of a sequence, up to its last cell."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def with_guards(self, sequences: tuple[int, ...]) -> tuple[int, ...]:
        """Return sequences, followed by the guards of those that have one."""
        guards = (self._guards[sequence] for sequence in sequences if sequence in self._guards)
        return (*sequences, *guards)

    def copy(
        self,
        source: int,
        destination: int,
        start: int = 0,
        end: int = -1,
    ) -> None:
        """Let `destination` share the cells of `source` from `start` to `end`.

        An `end` of -1 means the end of `source`.
        """
        for sequence in self.with_guards((destination,)):
            llama_cpp.llama_memory_seq_cp(self._memory, source, sequence, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop the cells of a sequence from position `start` on.

        Raises:
            RollbackError: If llama.cpp cannot drop them.
        """
        owners = self.with_guards((sequence,)) if self._guards else (sequence,)
        for owner in owners:
            if not llama_cpp.llama_memory_seq_rm(self._memory, owner, start, -1):
                raise RollbackError(
                    f"{self.name}: the cache cannot drop sequence {sequence} "
                    f"from position {start} on"
                )

    # --- states

    def saved_bytes(self, sequence: int, part: int = WHOLE_STATE) -> int:
        """Return the size of a sequence's state."""
        get_size = llama_cpp.llama_state_seq_get_size_ext
        return int(self._call(get_size, self._context, sequence, part))

    def saved(
        self,
        sequence: int,
        part: int = WHOLE_STATE,
        buffer: NDArray[np.uint8] | None = None,
    ) -> NDArray[np.uint8]:
        """Return the state of a sequence, uint8[n_bytes].

        Args:
            sequence: The sequence.
            part: `WHOLE_STATE` or `RECURRENT_PART`.
            buffer: Memory that is reused if it is large enough. The result is a view of it.

        Raises:
            BackendError: If llama.cpp cannot save the state.
        """
        n_bytes = self.saved_bytes(sequence, part)
        if buffer is None or len(buffer) < n_bytes:
            buffer = np.empty(n_bytes, np.uint8)
        forget_log()
        get_data = llama_cpp.llama_state_seq_get_data_ext
        n_saved = self._call(
            get_data,
            self._context,
            _bytes_pointer(buffer),
            len(buffer),
            sequence,
            part,
        )
        if not n_saved:
            raise BackendError(
                f"{self.name}: the state of sequence {sequence} could not be saved: {last_error()}"
            )
        return buffer[: int(n_saved)]

    def restore_whole(
        self,
        sequence: int,
        state: NDArray[np.uint8],
        n_tokens: int,
    ) -> bool:
        """Give an empty sequence the saved state of a text with `n_tokens` tokens.

        Returns:
            Whether llama.cpp took the state. If not, the sequence may hold any part of it.
        """
        is_restored = self._write(sequence, state, WHOLE_STATE)
        if not is_restored or self.length(sequence) != n_tokens:
            return False
        self._renew_guard(sequence)
        return True

    def restore_recurrent_part(
        self,
        sequence: int,
        state: NDArray[np.uint8],
        position: int,
    ) -> None:
        """Return a sequence to a position at which its recurrent state was saved.

        Raises:
            RollbackError: If llama.cpp cannot restore the state.
        """
        if not self._write(sequence, state, RECURRENT_PART):
            raise RollbackError(
                f"{self.name}: the state of sequence {sequence} at position {position} "
                f"could not be restored: {last_error()}"
            )
        self.remove(sequence, position)  # the later attention cells of a hybrid model
        self._renew_guard(sequence)
        self.check_length(sequence, position)

    def _write(
        self,
        sequence: int,
        state: NDArray[np.uint8],
        part: int,
    ) -> bool:
        """Write a saved state, and return whether llama.cpp took it.

        llama.cpp writes attention cells to new places. The guard, which would keep the old ones
        occupied, is emptied first.
        """
        if sequence in self._guards:
            llama_cpp.llama_memory_seq_rm(self._memory, self._guards[sequence], 0, -1)
        forget_log()
        set_data = llama_cpp.llama_state_seq_set_data_ext
        n_read = self._call(
            set_data,
            self._context,
            _bytes_pointer(state),
            len(state),
            sequence,
            part,
        )
        return int(n_read) == len(state)

    def _renew_guard(self, sequence: int) -> None:
        """Let the guard of a sequence, if it has one, share all of its cells again."""
        if sequence in self._guards:
            guard = self._guards[sequence]
            llama_cpp.llama_memory_seq_cp(self._memory, sequence, guard, 0, -1)

    # --- checks

    def check_window(self, sequence: int, start: int) -> None:
        """Check that the cache still has the sliding window of a token at `start`.

        Raises:
            RollbackError: If llama.cpp has reused cells of it, since the sequence has no guard.
        """
        # A window of w tokens includes the token itself, so it begins at start + 1 - w.
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, sequence))
        if self.n_window and first > max(0, start + 1 - self.n_window):
            raise RollbackError(
                f"{self.name}: sequence {sequence} cannot go back to position {start}: of its "
                f"sliding window of {self.n_window} tokens, the cache has only those "
                f"from position {first} on"
            )

    def check_length(self, sequence: int, expected: int) -> None:
        """Check that a sequence ends at the position that it was rolled back to.

        Raises:
            RollbackError: If it ends elsewhere.
        """
        length = self.length(sequence)
        if length != expected:
            raise RollbackError(
                f"{self.name}: sequence {sequence} was rolled back to position {expected}, "
                f"but its cache ends at {length}"
            )


def _bytes_pointer(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
