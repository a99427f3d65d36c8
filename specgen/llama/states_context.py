"""Contexts of drafts that read a hidden state beside each token: MTP layers, EAGLE-3, Gemma 4 assistants."""

from __future__ import annotations

import ctypes

import numpy as np

from specgen.llama.context import LlamaBackend
from specgen.method.backend import Batch
from specgen.system.arrays import Hidden, Logits


class StatesContext(LlamaBackend):
    """A context whose rows have a token and the hidden state before it (`Batch.hidden`); where none is given, they read
    zeros. A subclass calls `_take_states` when it is made, and keeps in `_states` what its rows computed."""

    def _take_states(self, n_values: int) -> None:
        """Let each row of a batch have a state of `n_values` float32."""
        n_rows = max(self.n_batch, self.n_outputs)
        memory = (ctypes.c_float * (n_rows * n_values))()
        self._rows.native.embd = memory
        self._inputs = np.ctypeslib.as_array(memory).reshape(n_rows, n_values)
        #: The draft's hidden state after each sequence's last row that wanted logits.
        self._states: dict[int, Hidden] = {}

    def state(self, sequence: int) -> Hidden:
        """Return the draft's hidden state after the sequence's last row that wanted logits."""
        return self._states[sequence]

    def decode_rows(self, batch: Batch) -> Logits:
        self._rows.check(batch)
        inputs = self._inputs[: len(batch)]
        for row, state in enumerate(batch.hidden or [None] * len(batch)):
            inputs[row] = 0.0 if state is None else state
        return super().decode_rows(batch)
