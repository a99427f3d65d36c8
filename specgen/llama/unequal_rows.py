"""Find the operator of a model whose rows depend on the batch that they are decoded in.

llama.cpp calls back with the result of every operator (node of its graph). The same tokens are decoded one
by one and as one batch, and a row of the batch is compared with the same row alone, bit by bit. Operators
are compared in the order in which they are computed, so the first one that differs had equal inputs: it
is the cause.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError
from specgen.llama.context import LlamaBackend
from specgen.llama.ggml_graph import copy_tensor
from specgen.llama.library import ggml, llama_cpp
from specgen.llama.model import LlamaModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Logits

#: The sizes of the batches that are compared: llama.cpp has code of its own for 2 and more rows, for 8
#: and more, and for 32 and more.
BATCH_SIZES = (2, 3, 8, 16, 33)
#: The number of tokens before a batch.
_N_BEFORE = 5
#: Operators that compute nothing, copy, or store rows in the cache: their rows may be others in a batch.
_NO_ROWS = frozenset(
    ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY", "GET_ROWS", "SET_ROWS")
)
#: Where `ggml_tensor` has the numbers of elements, and the addresses of an operator's sources.
_SHAPE_OFFSET, _SOURCES_OFFSET = 16, 152

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class UnequalOperator:
    """An operator with a row whose bits depend on the batch."""

    #: GGML's name of it, for example ``MUL_MAT``; empty if none was found, though logits differ.
    operator: str
    #: llama.cpp's names of its result and of its first source, for example ``kq-0`` and ``cache_k_l0``.
    tensor: str
    source: str
    #: The number of rows in the batch.
    n_rows: int

    def __str__(self) -> str:
        if not self.operator:
            return f"no single operator (in a batch of {self.n_rows})"
        return f"{self.operator} of {self.source} ({self.tensor}, in a batch of {self.n_rows})"


def find_unequal_operator(
    model: LlamaModel,
    options: ContextOptions,
    tokens: Sequence[int],
) -> UnequalOperator | None:
    """Return the first operator with unequal rows; None if the logits of all rows are equal.

    For each size a batch of that many tokens is decoded after the first `_N_BEFORE` ones. Raise
    `ValueError` if there are too few tokens, `BackendError` if llama.cpp fails.
    """
    n_tokens = _N_BEFORE + max(BATCH_SIZES)
    if len(tokens) < n_tokens:
        raise ValueError(f"{len(tokens)} tokens for batches of up to {max(BATCH_SIZES)}")
    recorder = _Recorder()
    backend = LlamaBackend(
        model,
        replace(options, n_batch=max(options.n_batch, n_tokens)),
        n_ctx=n_tokens,
        clock=lambda: 0.0,
        n_outputs=max(BATCH_SIZES),
        n_rollback=0,
        on_tensor=recorder.native,
    )
    try:
        # The first time fills the cells: attention also computes scores for cells that a row does not see.
        recorder.decode_one_by_one(backend, tokens[:n_tokens])
        alone = recorder.decode_one_by_one(backend, tokens[:n_tokens])[_N_BEFORE:]
        for size in BATCH_SIZES:
            recorder.decode_one_by_one(backend, tokens[:_N_BEFORE])
            together = recorder.decode(backend, tokens[_N_BEFORE : _N_BEFORE + size], _N_BEFORE)
            rows = np.concatenate([one.logits for one in alone[:size]])
            if not np.array_equal(together.logits, rows):
                found = _first_difference([one.results for one in alone[:size]], together.results)
                if found is None:
                    return UnequalOperator("", "", "", size)
                return UnequalOperator(found.operator, found.name, found.source, size)
        return None
    finally:
        backend.close()


def repeated(tokens: Sequence[int]) -> list[int]:
    """Return as many tokens as `find_unequal_operator` needs: these, over and over."""
    n_tokens = _N_BEFORE + max(BATCH_SIZES)
    return (list(tokens) * n_tokens)[:n_tokens]


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of an operator: its shape as GGML has it, with the fastest dimension first, and its
    bytes."""

    operator: str
    name: str
    source: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True, slots=True)
class _Decoded:
    """What llama.cpp computed for a batch: float32[n_rows, n_vocab], and the results of its operators."""

    logits: Logits
    results: list[_Result]


class _Recorder:
    """The callback, and what it has seen in a decode."""

    def __init__(self) -> None:
        self._results: list[_Result] = []
        self._failure: BackendError | None = None
        pointer = ctypes.c_void_p
        self._name = ggml("ggml_get_name", ctypes.c_char_p, pointer)
        self._operator = ggml("ggml_op_desc", ctypes.c_char_p, pointer)
        self._n_bytes = ggml("ggml_nbytes", ctypes.c_size_t, pointer)
        self._is_contiguous = ggml("ggml_is_contiguous", ctypes.c_bool, pointer)
        self.native = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def decode_one_by_one(self, backend: LlamaBackend, tokens: Sequence[int]) -> list[_Decoded]:
        """Empty the cache, and decode each token alone."""
        backend.remove(0)
        return [self.decode(backend, [token], at) for at, token in enumerate(tokens)]

    def decode(self, backend: LlamaBackend, tokens: Sequence[int], at: int) -> _Decoded:
        """Decode a batch of tokens from position `at` on."""
        self._results = []
        batch = Batch()
        for i, token in enumerate(tokens):
            batch.add(token, at + i, (0,), True)
        logits = backend.decode(batch).copy()
        if self._failure is not None:
            raise self._failure
        return _Decoded(logits, self._results)

    def _on_tensor(self, tensor: Any, is_asked: bool, _data: Any) -> bool:
        operator = self._operator(tensor).decode()
        if operator in _NO_ROWS or not self._is_contiguous(tensor):
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
        source = ctypes.c_void_p.from_address(tensor + _SOURCES_OFFSET).value
        self._results.append(
            _Result(operator, self._name_of(tensor), self._name_of(source), shape, data)
        )
        return True

    def _name_of(self, tensor: Any) -> str:
        name: bytes = self._name(tensor) if tensor else b""
        return name.decode("utf-8", "replace")


def _first_difference(alone: Sequence[list[_Result]], together: list[_Result]) -> _Result | None:
    """Return the first result of a batch with a row that is not what it is alone."""
    by_key = [_numbered(results) for results in alone]
    for key, result in _numbered(together).items():
        for i, results in enumerate(by_key):
            row = results.get(key)  # None: llama.cpp computes batches by another graph
            part = None if row is None else _row_of(result, row, i, len(by_key))
            if row is not None and part is not None and not np.array_equal(part, row.data):
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
