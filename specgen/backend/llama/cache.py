"""The cache of a context, with every native result checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from specgen.backend.llama.library import forget_log, last_error, llama_cpp
from specgen.errors import BackendError, RollbackError


class Cache:
    """llama.cpp's memory of a context: what each sequence holds.

    `name` is the model's, for messages, `n_window` the tokens that a layer with a sliding
    window sees, 0 if none has one. `call` makes native calls that may wait for other machines.
    """

    def __init__(
        self,
        name: str,
        context: Any,
        n_window: int = 0,
        call: Callable[..., Any] = lambda function, *arguments: function(*arguments),
    ) -> None:
        self.name = name
        self.call = call
        self.context = context
        self.n_window = n_window
        self._memory = llama_cpp.llama_get_memory(context)

    def __bool__(self) -> bool:
        """False for models that keep no cache."""
        return bool(self._memory)

    def length(self, sequence: int) -> int:
        """The position after the last token of a sequence."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """Let cells belong to another sequence too. No data moves."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, destination, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        """Drop a sequence's cells from `start` on. Raises `RollbackError`."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise RollbackError(
                f"{self.name}: the cache cannot drop sequence {sequence} from position {start} on"
            )

    def check_window(self, sequence: int, start: int) -> None:
        """Before a removal: raise `RollbackError` if a token that is then decoded at `start`
        would miss some of its window.

        Even a cache with room for all gives up cells that have left the window of their
        sequence's end, when it finds no free one before them: where several sequences share
        it, or branches have left gaps.
        """
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, sequence))
        if self.n_window and first > max(0, start + 1 - self.n_window):
            raise RollbackError(
                f"{self.name}: sequence {sequence} cannot go back to position {start}: its "
                f"sliding window of {self.n_window} tokens is in the cache from {first} on only"
            )

    def check_length(self, sequence: int, expected: int) -> None:
        """Raise `RollbackError` if a rolled back sequence is not as long as it should be."""
        found = self.length(sequence)
        if found != expected:
            raise RollbackError(
                f"{self.name}: sequence {sequence} was rolled back to position {expected}, "
                f"its cache ends at {found}"
            )


class StateCopies(Protocol):
    """Keeps for each sequence one copy of its recurrent state, with its position."""

    def save(self, sequence: int, position: int) -> None:
        """Replace the copy by the state as it is now, at the end of the cache."""
        ...

    def restore(self, sequence: int, position: int) -> None:
        """Roll the sequence back to its copy, which stays. Raises `RollbackError`."""
        ...

    def forget(self, sequence: int) -> None:
        """Drop the copy, if there is one."""
        ...


class SharedStates:
    """Copies within the cache: a second sequence shares the state's cell.

    A sequence that goes on leaves a cell that it shares and takes a free one, to which it
    has to write its new state anyway, so that a copy costs no more than a few flags. It takes
    twice the cells: the copy of sequence s belongs to sequence `n_sequences` + s.
    """

    def __init__(self, cache: Cache, n_sequences: int) -> None:
        self._cache = cache
        self._n_sequences = n_sequences

    def save(self, sequence: int, position: int) -> None:
        self.forget(sequence)
        self._cache.copy(sequence, self._n_sequences + sequence)
        self._cache.check_length(self._n_sequences + sequence, position)

    def restore(self, sequence: int, position: int) -> None:
        self._cache.remove(sequence)
        self._cache.copy(self._n_sequences + sequence, sequence)
        self._cache.check_length(sequence, position)

    def forget(self, sequence: int) -> None:
        self._cache.remove(self._n_sequences + sequence)


class SavedStates:
    """Copies outside of the cache, in the process's memory.

    Each is read from the device and written back, and only the recurrent part of it where
    llama.cpp can tell it apart: the cells of a hybrid model's attention stay, and are cut.
    The buffers are kept from one copy to the next.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._buffers: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}

    def save(self, sequence: int, position: int) -> None:
        context, flags = self._cache.context, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        call = self._cache.call
        needed = int(call(llama_cpp.llama_state_seq_get_size_ext, context, sequence, flags))
        buffer = self._buffers.get(sequence)
        if buffer is None or len(buffer) < needed:
            buffer = self._buffers[sequence] = (ctypes.c_uint8 * needed)()
        forget_log()
        written = int(
            call(
                llama_cpp.llama_state_seq_get_data_ext,
                context,
                buffer,
                len(buffer),
                sequence,
                flags,
            )
        )
        if written == 0 or written != needed:
            raise BackendError(
                f"{self._cache.name}: the state of sequence {sequence} at position {position} "
                f"could not be saved ({written} of {needed} bytes): {last_error()}"
            )
        self._sizes[sequence] = written

    def restore(self, sequence: int, position: int) -> None:
        size = self._sizes[sequence]
        forget_log()
        read = int(
            self._cache.call(
                llama_cpp.llama_state_seq_set_data_ext,
                self._cache.context,
                self._buffers[sequence],
                size,
                sequence,
                llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY,
            )
        )
        if read != size:
            raise RollbackError(
                f"{self._cache.name}: the state of sequence {sequence} at position {position} "
                f"could not be restored ({read} of {size} bytes): {last_error()}"
            )
        self._cache.remove(sequence, position)  # what a hybrid's attention holds beyond
        self._cache.check_length(sequence, position)

    def forget(self, sequence: int) -> None:
        self._sizes.pop(sequence, None)  # the buffer will be used again


__all__ = ["Cache", "SavedStates", "SharedStates", "StateCopies"]
