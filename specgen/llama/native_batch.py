"""The arrays that llama.cpp reads a batch from."""

from __future__ import annotations

import ctypes
from typing import Any

from specgen.errors import BackendError
from specgen.llama.cache import KvCache
from specgen.llama.library import llama_cpp
from specgen.method.backend import Batch


class NativeBatch:
    """A `llama_batch` whose arrays are allocated once, for the largest batch."""

    def __init__(
        self,
        n_rows: int,
        n_sequences: int,
        n_outputs: int,
        cache: KvCache,
    ) -> None:
        """Allocate the arrays.

        Args:
            n_rows: The maximum number of rows of a batch.
            n_sequences: The number of sequences of the context, without guards.
            n_outputs: The maximum number of rows of a batch that may want logits.
            cache: Knows the guards of sequences, to which new cells also belong.
        """
        self._n_outputs = n_outputs
        self._with_guards = cache.with_guards
        # Plain ctypes arrays: NumPy is slower for the few numbers of a round.
        self._tokens: Any = (ctypes.c_int32 * n_rows)()
        self._positions: Any = (ctypes.c_int32 * n_rows)()
        self._wants_logits: Any = (ctypes.c_int8 * n_rows)()
        self._n_sequences = (ctypes.c_int32 * n_rows)()
        n_max = len(cache.with_guards(tuple(range(n_sequences))))
        #: The sequences of each row, guards included.
        self._sequences: list[Any] = [(ctypes.c_int32 * n_max)() for _ in range(n_rows)]
        #: The sequences that were last written to each row of `_sequences`. Mostly the next batch
        #: has the same, and nothing is written.
        self._written: list[tuple[int, ...]] = [()] * n_rows
        int32_pointer = ctypes.POINTER(ctypes.c_int32)
        self._sequence_pointers = (int32_pointer * n_rows)(
            *(ctypes.cast(sequences, int32_pointer) for sequences in self._sequences)
        )
        #: llama.cpp's batch, with pointers to these arrays.
        self.native = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._n_sequences,
            seq_id=self._sequence_pointers,
            logits=self._wants_logits,
        )

    def check(self, batch: Batch) -> int:
        """Check the size of a batch.

        Returns:
            The number of rows that want logits.

        Raises:
            BackendError: If there are no rows, too many, or too many that want logits.
        """
        n = len(batch.tokens)
        n_wanted = sum(batch.wants_logits)
        if not 0 < n <= len(self._tokens):
            raise BackendError(f"a batch of {n} rows; 1 to {len(self._tokens)} can be decoded")
        if n_wanted > self._n_outputs:
            raise BackendError(
                f"a batch wants {n_wanted} rows of logits; {self._n_outputs} at most"
            )
        return n_wanted

    def fill(self, batch: Batch) -> int:
        """Write a batch into the arrays, and return the number of rows that want logits.

        Raises:
            BackendError: As `check` does.
        """
        n_wanted = self.check(batch)
        n = len(batch.tokens)
        self._tokens[:n] = batch.tokens
        self._positions[:n] = batch.positions
        self._wants_logits[:n] = batch.wants_logits
        for row, sequences in enumerate(batch.sequences):
            if sequences != self._written[row]:
                owners = self._with_guards(sequences)
                self._sequences[row][: len(owners)] = owners
                self._n_sequences[row] = len(owners)
                self._written[row] = sequences
        self.native.n_tokens = n
        return n_wanted
