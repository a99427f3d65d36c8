"""The kernels' self-test, which runs in a child process: `python -m specgen.llama.kernels.self_test LIBRARY`.

It attaches the library and compares a few operators of every kind with GGML's own: matrix products of every
type of weights that the kernels take, a product with the matrices of experts, and attentions. A row must
also be bit-identical alone and in a batch. The result is one line of JSON. If the process ends without it,
the exit code or signal is the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from specgen.errors import BackendError
from specgen.llama import operators
from specgen.llama.kernels.admission import SelfTest
from specgen.llama.kernels.attached import Kernels, attach
from specgen.llama.operators import SPECGEN_BUFFER, FloatArray, Matrix

#: The largest allowed deviation: the root mean square of the differences divided by that of the values.
#: Both sides round activations to 8 bits in different ways, which causes 0.01.
TOLERANCE = 0.02

#: The sizes of the products. A row has several superblocks of 256 columns. The rows make several groups
#: of any width. The numbers of tokens do not fill the tiles of the kernels; the larger one is enough
#: for AMX.
_N_COLUMNS, _N_ROWS, _N_TOKENS, _N_TOKENS_OF_LARGE = 768, 96, 11, 43
_N_EXPERTS, _N_USED = 4, 2
#: (key and value type, size of keys and values).
_ATTENTIONS = (("f16", 64), ("f16", 128), ("q8_0", 64))
_N_HEADS, _N_KV_HEADS, _N_CELLS = 8, 2, 160


class FailedTestError(Exception):
    """The kernels computed something wrong; the message names it."""


def self_test(library: Path) -> SelfTest:
    """Attach a library, test it, and return the result."""
    try:
        kernels = attach(library)
    except BackendError as error:
        return SelfTest("refused", error.message, hint=error.hint or "")
    try:
        taken = [name for name in operators.TYPE_NUMBERS if _takes(name, (_N_ROWS, _N_COLUMNS))]
        if not taken:
            raise FailedTestError("the kernels take no type of weights")
        for type_name in taken:
            _test_product(kernels, type_name)
        _test_experts()
        n_attentions = sum(_test_attention(kernels, *attention) for attention in _ATTENTIONS)
    except (BackendError, FailedTestError) as error:
        return SelfTest("failed", str(error))
    tested = f"products of {len(taken)} types of weights"
    if n_attentions:
        tested += f" and {n_attentions} attentions"
    message = f"{tested} agree with llama.cpp's, and rows are the same alone and in a batch"
    return SelfTest("passed", message, kernels.instructions)


def _takes(type_name: str, shape: tuple[int, ...]) -> bool:
    return operators.takes(type_name, shape, SPECGEN_BUFFER)


def _test_product(kernels: Kernels, type_name: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((_N_ROWS, _N_COLUMNS), dtype=np.float32)
    tokens = rng.standard_normal((_N_TOKENS_OF_LARGE, _N_COLUMNS), dtype=np.float32)
    weights = operators.quantize(values, type_name)
    what = f"products of {type_name}"
    with Matrix(weights) as plain, Matrix(weights, SPECGEN_BUFFER) as packed:
        kernels.enable(products=True, attention=False)
        expected = operators.multiply(plain, tokens)
        kernels.enable(products=True, attention=True)
        for matrix, name in ((plain, f"{what}, not packed"), (packed, what)):
            n_before = kernels.counts().n_products
            computed = operators.multiply(matrix, tokens, n_threads=2)
            if matrix is packed and kernels.counts().n_products == n_before:
                raise FailedTestError(f"{what}: the kernels did not compute them")
            _compare(name, computed, expected)
            for n_tokens in (1, _N_TOKENS):
                multiply = partial(_first_row, matrix, tokens, n_tokens)
                _compare_rows(name, computed, multiply)


def _first_row(matrix: Matrix, tokens: FloatArray, n_tokens: int, row: int) -> FloatArray:
    """Return the product of a token, computed with those after it."""
    product: FloatArray = operators.multiply(matrix, tokens[row : row + n_tokens])[0]
    return product


def _test_experts() -> None:
    """Test a product with the matrices of experts, of the first common type that the kernels take."""
    rng = np.random.default_rng(1)
    shape = (_N_EXPERTS, _N_ROWS, _N_COLUMNS)
    type_name = next(
        (name for name in ("q4_k", "q4_0", "q8_0", "f16") if _takes(name, shape)), None
    )
    if type_name is None:
        return
    weights = operators.quantize(rng.standard_normal(shape, dtype=np.float32), type_name)
    tokens = rng.standard_normal((_N_TOKENS_OF_LARGE, 1, _N_COLUMNS), dtype=np.float32)
    shuffled = np.argsort(rng.random((len(tokens), _N_EXPERTS)), axis=1)
    experts = shuffled[:, :_N_USED].astype(np.int32)
    with (
        Matrix(weights, n_experts_used=_N_USED) as plain,
        Matrix(weights, SPECGEN_BUFFER, n_experts_used=_N_USED) as packed,
    ):

        def product(matrix: Matrix, rows: slice, n_threads: int = 1) -> FloatArray:
            return operators.multiply_experts(
                matrix, tokens[rows], experts[rows], n_threads=n_threads
            )

        computed = product(packed, slice(None), 2)
        _compare("products with experts", computed, product(plain, slice(None)))
        _compare_rows(
            "products with experts",
            computed,
            lambda row: product(packed, slice(row, row + 1))[0],
        )


def _test_attention(kernels: Kernels, cache_type: str, size: int) -> bool:
    """Test an attention; return whether the kernels computed it. (llama.cpp computes those that they do
    not cover.)"""
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((1, _N_TOKENS, _N_HEADS, size), dtype=np.float32)
    shape = (1, _N_CELLS, _N_KV_HEADS, size)
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    # The last rows of a text: a row sees all cells before it, and its own.
    seen = np.arange(_N_TOKENS)[:, None] + _N_CELLS - _N_TOKENS
    mask = np.where(np.arange(_N_CELLS) > seen, -np.inf, 0).astype(np.float16)[None, None]

    def attend(rows: slice, n_threads: int) -> FloatArray:
        computed = operators.attend(
            queries[:, rows],
            keys,
            values,
            mask[:, :, rows],
            key_type=cache_type,
            value_type=cache_type,
            n_threads=n_threads,
        )
        return computed.reshape(-1, _N_HEADS, size)

    kernels.enable(products=True, attention=False)
    expected = attend(slice(None), 1)
    kernels.enable(products=True, attention=True)
    n_before = kernels.counts().n_attentions
    computed = attend(slice(None), 2)
    if kernels.counts().n_attentions == n_before:
        return False
    what = f"attention over {cache_type}"
    _compare(what, computed, expected)
    _compare_rows(what, computed, lambda row: attend(slice(row, row + 1), 1)[0])
    return True


def _compare(what: str, computed: FloatArray, expected: FloatArray) -> None:
    """Raise `FailedTestError` if a result differs from GGML's by `TOLERANCE` or more."""
    if not np.isfinite(computed).all():
        raise FailedTestError(f"{what} are not all numbers")
    difference = computed.astype(np.float64) - expected
    error = np.sqrt(np.square(difference).mean() / np.square(expected).mean())
    if error >= TOLERANCE:
        raise FailedTestError(f"{what} differ from llama.cpp's by {error:.1%}")


def _compare_rows(what: str, computed: FloatArray, alone: Callable[[int], FloatArray]) -> None:
    """Raise `FailedTestError` if a row of a batch differs from the same row in a smaller one."""
    for row in range(0, len(computed), 5):
        if computed[row].tobytes() != alone(row).tobytes():
            raise FailedTestError(f"{what}: row {row} of a batch is not what it is alone")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(self_test(Path(sys.argv[1])))) + "\n")
