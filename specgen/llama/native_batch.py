"""The arrays of a native batch."""

from __future__ import annotations

import ctypes
from typing import Any

from specgen.errors import BackendError
from specgen.llama.cache import KvCache
from specgen.llama.library import llama_cpp
from specgen.method.backend import Batch


class NativeBatch:
    """The arrays that llama.cpp's batch points to, allocated once."""

    def __init__(self, n_rows: int, n_sequences: int, n_outputs: int, cache: KvCache) -> None:
        self._n_outputs = n_outputs
        self._with_guards = with_guards = cache.with_guards
        # Plain ctypes arrays: NumPy is slower for the few numbers of a round.
        self._tokens: Any = (ctypes.c_int32 * n_rows)()
        self._positions: Any = (ctypes.c_int32 * n_rows)()
        self._n_sequences = (ctypes.c_int32 * n_rows)()
        n_most = len(with_guards(tuple(range(n_sequences))))
        self._sequences: list[Any] = [(ctypes.c_int32 * n_most)() for _ in range(n_rows)]
        self._wants_logits: Any = (ctypes.c_int8 * n_rows)()
        #: The current content of `_sequences`. The next batch mostly needs the same, so nothing is
        #: written.
        self._written: list[tuple[int, ...]] = [()] * n_rows
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self._pointers = (int32_p * n_rows)(
            *(ctypes.cast(sequences, int32_p) for sequences in self._sequences)
        )
        self.native = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._n_sequences,
            seq_id=self._pointers,
            logits=self._wants_logits,
        )

    def check(self, batch: Batch) -> int:
        n = len(batch.tokens)
        n_wanted = sum(batch.wants_logits)
        if not 0 < n <= len(self._tokens):
            raise BackendError(f"a batch of {n} rows; 1 to {len(self._tokens)} can be decoded")
        if n_wanted > self._n_outputs:
            what = f"{n_wanted} rows of logits; {self._n_outputs} at most"
            raise BackendError(f"a batch wants {what}")
        return n_wanted

    def fill(self, batch: Batch) -> int:
        n_wanted, n = self.check(batch), len(batch.tokens)
        self._tokens[:n] = batch.tokens
        self._positions[:n] = batch.positions
        self._wants_logits[:n] = batch.wants_logits
        for row, sequences in enumerate(batch.sequences):
            if sequences != self._written[row]:
                native = self._with_guards(sequences)
                self._sequences[row][: len(native)] = native
                self._n_sequences[row] = len(native)
                self._written[row] = sequences
        self.native.n_tokens = n
        return n_wanted
