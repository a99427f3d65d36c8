"""A context that skips some blocks (layers) of its model, without another file of weights.

llama.cpp computes all blocks, and calls back with their results. The callback replaces the result of a
block that is left out by the block's input. The other blocks then see what they would see in a model
without it: the logits are, bit for bit, those of a file from which `requantize` left it out. A batch
takes as long as with all blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.decoding.backend import Batch
from specgen.errors import BackendError
from specgen.llama.context import LlamaBackend
from specgen.llama.ggml_graph import copy_tensor
from specgen.llama.library import ggml, llama_cpp
from specgen.llama.model import LlamaModel
from specgen.options import ContextOptions
from specgen.system.arrays import Logits

#: llama.cpp's name for the result of a block, before the block's number.
_RESULT = b"l_out-"


class SkippingBackend(LlamaBackend):
    """A `LlamaBackend` that can decode without some blocks of its model, different ones in each batch.

    The cells of a batch stay as they were computed, with the blocks that were left out of that batch.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_sequences: int = 1,
        n_outputs: int = 1,
    ) -> None:
        self._skips = _Skips(model.n_embd)
        self._n_layer = model.n_layer
        super().__init__(
            model,
            options,
            n_ctx=n_ctx,
            clock=clock,
            n_sequences=n_sequences,
            n_outputs=n_outputs,
            on_tensor=self._skips.native,
        )

    def decode_without(self, batch: Batch, left_out: frozenset[int]) -> Logits:
        """Decode as `decode` does, but without the blocks of these numbers. Block 0 cannot be left out.

        Raise `BackendError`, also if llama.cpp does not report the results of this architecture's
        blocks.
        """
        if not all(0 < block < self._n_layer for block in left_out):
            raise BackendError(f"blocks 1 to {self._n_layer - 1} can be left out: {left_out}")
        self._skips.begin(left_out, batch.wants_logits)
        try:
            logits = self.decode(batch)
        finally:
            failure, missing = self._skips.end()
        if failure is not None:
            raise failure
        if missing:
            raise BackendError(
                f"{self.model.name}: llama.cpp does not tell what block {min(missing)} computes"
            )
        return logits


class _Skips:
    """The callback, and the blocks that it leaves out."""

    def __init__(self, n_embd: int) -> None:
        self._n_embd = n_embd
        self._left_out: frozenset[int] = frozenset()
        #: The rows of the batch that want logits; the last block computes only these.
        self._wanted: NDArray[np.intp] = np.zeros(0, np.intp)
        self._missing: set[int] = set()
        self._given: NDArray[np.float32] = np.zeros(0, np.float32)
        self._failure: BackendError | None = None
        self._name = ggml("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._size = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self.native = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def begin(self, left_out: frozenset[int], wants_logits: Sequence[bool]) -> None:
        self._left_out = left_out
        self._wanted = np.flatnonzero(wants_logits)
        self._missing = set(left_out)

    def end(self) -> tuple[BackendError | None, set[int]]:
        """Return the failure, if any, and the blocks that llama.cpp did not report. From now on no
        block is left out."""
        failure, missing = self._failure, self._missing
        self._left_out, self._missing, self._failure = frozenset(), set(), None
        return failure, missing

    def _on_tensor(self, tensor: Any, is_asked: bool, _data: Any) -> bool:
        """Replace a tensor; llama.cpp calls this twice: with `is_asked`, to ask whether the callback wants
        a tensor, and again when the tensor is computed."""
        name: bytes = self._name(tensor)
        if not self._left_out or not name.startswith(_RESULT):
            return not is_asked
        try:
            block = int(name.removeprefix(_RESULT))
            is_left_out = block in self._left_out
            if is_asked:
                return is_left_out or block + 1 in self._left_out
            if is_left_out:
                self._replace(tensor)
                self._missing.discard(block)
            else:
                self._given = np.empty(self._size(tensor) // 4, np.float32)
                copy_tensor("ggml_backend_tensor_get", tensor, self._given)
        except BackendError as error:  # an exception cannot pass through native code
            self._failure = error
        return True

    def _replace(self, tensor: Any) -> None:
        given = self._given
        if self._size(tensor) != given.nbytes:
            given = given.reshape(-1, self._n_embd)[self._wanted]
        copy_tensor("ggml_backend_tensor_set", tensor, np.ascontiguousarray(given))
