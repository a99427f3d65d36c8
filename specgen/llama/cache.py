"""The KV cache of a context, with checks of every native result. Recurrent states go back by `recurrent_rollback`; what is
rejected is decided in `method/verify.py` and dropped by `method/draft.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError, RollbackError
from specgen.llama.library import forget_log, last_error, llama_cpp
from specgen.llama.model import LlamaModel

#: The part of a state that llama.cpp can separate from attention cells.
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class Cache:
    """llama.cpp's memory of a native `context` of a model: the cells or states of each sequence.

    llama.cpp gives cells outside the sliding window of their sequence's end to any sequence that asks for some. A
    rollback moves the end back, and may then need them. But llama.cpp never takes a cell that belongs to two sequences.
    So `guards` names a second sequence, with the same cells, for each sequence whose cells must stay.
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
        if not self._guards:
            return sequences
        guards = (self._guards[each] for each in sequences if each in self._guards)
        return (*sequences, *guards)

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        for each in self.with_guards((destination,)):
            llama_cpp.llama_memory_seq_cp(self._memory, source, each, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        for each in self.with_guards((sequence,)):
            if not llama_cpp.llama_memory_seq_rm(self._memory, each, start, -1):
                raise RollbackError(
                    f"{self.name}: the cache cannot drop sequence {sequence} from position {start} on"
                )

    def saved(
        self, sequence: int, flags: int = 0, buffer: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Return the state of a sequence, in `buffer` if it is large enough: uint8[n_bytes]. `flags` are llama.cpp's;
        0 is the whole state. Raise `BackendError`."""
        size = llama_cpp.llama_state_seq_get_size_ext
        n_bytes = int(self.call(size, self.context, sequence, flags))
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
        """Give a sequence a state that `saved` returned; return whether llama.cpp took it. The sequence then has no
        guard, since llama.cpp frees the cells of its sliding window, and restores them elsewhere."""
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
        """Raise `RollbackError` if a token decoded at `start` would miss a part of its sliding window: a sequence without
        a guard can have lost cells. It sees nothing in a model with a recurrent state."""
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


class StateCopies:
    """Keeps at most one copy of the recurrent state of each sequence.

    With `n_shared` sequences, copies are inside the cache: sequence `n_shared` + s shares the cell of the state of s.
    When s goes on, it leaves the shared cell and writes its new state to a free one. It has to write this state anyway,
    so a copy costs only a few flags, but the cache needs twice the cells.

    With 0, copies are outside the cache, in the memory of the process. They are read from the device and written back,
    and hold only the recurrent part of the state where llama.cpp can separate it: the attention cells of a hybrid model
    stay in the cache, and `restore` drops the later ones.
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
        elif self.cache.put(sequence, self._states[sequence], _PARTIAL):
            self.cache.remove(sequence, position)  # the later attention cells of a hybrid model
            self.cache.renew_guard(sequence)
        else:
            raise RollbackError(
                f"{self.cache.name}: the state of sequence {sequence} at position {position} "
                f"could not be restored: {last_error()}"
            )
        self.cache.check_length(sequence, position)

    def forget(self, sequence: int) -> None:
        if self._n_shared:
            self.cache.remove(self._n_shared + sequence)
