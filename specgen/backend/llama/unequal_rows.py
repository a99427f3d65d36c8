"""Find the operator of a model whose rows depend on the batch that they are decoded in.

llama.cpp calls back with the result of every operator (node of its graph). The same tokens are decoded one
by one and as one batch, and a row of the batch is compared with the same row alone, bit by bit. Operators
are compared in the order in which they are computed, so the first one that differs had equal inputs: it
is the cause.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.backend.base import Batch
from specgen.backend.llama.context import LlamaBackend
from specgen.backend.llama.ggml_graph import copy_tensor, ggml
from specgen.backend.llama.library import llama_cpp
from specgen.backend.llama.model import LlamaModel
from specgen.errors import BackendError
from specgen.options import ContextOptions

#: The sizes of the batches that are compared: llama.cpp has code of its own for 2 and more rows, for 8
#: and more, and for 32 and more.
BATCH_SIZES = (2, 3, 8, 16, 33)
#: Operators that compute nothing, or that store rows in the cache: their result is not a batch's rows.
_NO_ROWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CPY", "SET_ROWS"})
#: Where the numbers of elements lie in `ggml_tensor`.
_SHAPE_OFFSET = 16

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class UnequalOperator:
    """An operator with a row whose bits depend on the batch."""

    #: GGML's name of it, for example ``MUL_MAT``.
    operator: str
    #: llama.cpp's name of its result, for example ``kq-0`` in block 0.
    tensor: str
    #: The number of rows in the batch.
    n_rows: int

    def __str__(self) -> str:
        return f"{self.operator} ({self.tensor}), in a batch of {self.n_rows}"


def find_unequal_operator(
    model: LlamaModel,
    options: ContextOptions,
    tokens: Sequence[int],
    *,
    sizes: Sequence[int] = BATCH_SIZES,
    n_before: int = 5,
) -> UnequalOperator | None:
    """Return the first operator of the model with unequal rows; None if all rows are equal.

    For each size a batch of that many tokens is decoded behind the `n_before` first ones, in a cache that
    holds nothing else. Raise `ValueError` if there are too few tokens.
    """
    if len(tokens) < n_before + max(sizes):
        raise ValueError(f"{len(tokens)} tokens for batches of up to {max(sizes)}")
    n_ctx = n_before + max(sizes) + 1
    options = replace(options, n_batch=max(options.n_batch, max(sizes)))
    recorder = _Recorder()
    backend = LlamaBackend(
        model,
        options,
        n_ctx=n_ctx,
        clock=time.perf_counter,
        n_outputs=max(sizes),
        n_rollback=0,
        on_tensor=recorder.native,
    )
    try:
        alone = [
            recorder.decode(backend, tokens[at : at + 1], at)
            for at in range(n_before + max(sizes))
        ][n_before:]
        for size in sizes:
            backend.remove(0)
            for at in range(n_before):
                recorder.decode(backend, tokens[at : at + 1], at, keeps=False)
            together = recorder.decode(backend, tokens[n_before : n_before + size], n_before)
            found = _first_difference(alone[:size], together)
            if found is not None:
                return UnequalOperator(found.operator, found.name, size)
        return None
    finally:
        backend.close()


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of an operator: its shape as GGML has it, with the fastest dimension first, and its
    bytes."""

    operator: str
    name: str
    shape: tuple[int, ...]
    data: Bytes


class _Recorder:
    """The callback, and what it has seen in a decode."""

    def __init__(self) -> None:
        self._results: list[_Result] = []
        self._keeps = False
        self._failure: BackendError | None = None
        pointer = ctypes.c_void_p
        self._name = ggml("ggml_get_name", ctypes.c_char_p, pointer)
        self._operator = ggml("ggml_op_desc", ctypes.c_char_p, pointer)
        self._n_bytes = ggml("ggml_nbytes", ctypes.c_size_t, pointer)
        self._is_contiguous = ggml("ggml_is_contiguous", ctypes.c_bool, pointer)
        self.native = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def decode(
        self, backend: LlamaBackend, tokens: Sequence[int], at: int, *, keeps: bool = True
    ) -> list[_Result]:
        """Decode tokens from position `at` on, and return the results of all operators."""
        self._results, self._keeps = [], keeps
        batch = Batch()
        for i, token in enumerate(tokens):
            batch.add(token, at + i, (0,), True)
        backend.decode(batch)
        if self._failure is not None:
            raise self._failure
        return self._results

    def _on_tensor(self, tensor: Any, is_asked: bool, _data: Any) -> bool:
        operator = self._operator(tensor).decode()
        if not self._keeps or operator in _NO_ROWS or not self._is_contiguous(tensor):
            return not is_asked
        if is_asked:
            return True
        try:
            data = np.empty(self._n_bytes(tensor), np.uint8)
            copy_tensor("ggml_backend_tensor_get", tensor, data)
        except BackendError as error:  # an exception cannot pass through native code
            self._failure = error
            return False
        shape = tuple((ctypes.c_int64 * 4).from_address(tensor + _SHAPE_OFFSET))
        name = self._name(tensor).decode("utf-8", "replace")
        self._results.append(_Result(operator, name, shape, data))
        return True


def _first_difference(alone: Sequence[list[_Result]], together: list[_Result]) -> _Result | None:
    """Return the first result of a batch with a row that is not what it is alone."""
    by_key = [_numbered(results) for results in alone]
    for key, result in _numbered(together).items():
        rows = [results.get(key) for results in by_key]
        for i, row in enumerate(rows):
            if row is None:  # llama.cpp computes batches by another graph
                continue
            part = _row_of(result, row, i, len(rows))
            if part is not None and not np.array_equal(part, row.data):
                return result
    return None


def _numbered(results: Sequence[_Result]) -> dict[tuple[str, str, int], _Result]:
    """Return results by operator, name, and how many before had both."""
    found: dict[tuple[str, str, int], _Result] = {}
    for result in results:
        number = 0
        while (result.operator, result.name, number) in found:
            number += 1
        found[result.operator, result.name, number] = result
    return found


def _row_of(result: _Result, row: _Result, i: int, n_rows: int) -> Bytes | None:
    """Return the bytes of row i of a batch's result; None if it has no rows, or other ones than `row`."""
    differing = [axis for axis in range(4) if result.shape[axis] != row.shape[axis]]
    if len(differing) != 1:
        return None
    axis = differing[0]
    if result.shape[axis] != n_rows * row.shape[axis]:
        return None
    n_slower = int(np.prod(row.shape[axis + 1 :]))
    parts = result.data.reshape(n_slower, n_rows, -1)
    return np.ascontiguousarray(parts[:, i]).reshape(-1)


__all__ = ["BATCH_SIZES", "UnequalOperator", "find_unequal_operator"]
