"""The KV cache of a context, with checks of every native result. What is
rejected is decided in `method/verifiers.py` and dropped by `method/draft.py`.
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

#: The part of a state that llama.cpp can separate from attention cells.
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class KvCache:
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
