"""The kernels' self-test, which runs in a child process: `python -m specgen.llama.kernels.self_test LIBRARY`.

It attaches the library and compares a few operators of every kind with GGML's own: matrix products of every
type of weights that the kernels take, a product with the matrices of experts, and attentions. A row must
also be bit-identical alone and in a batch. The result is one line of JSON. If the process ends without it,
the exit code or signal is the result.
"""

from __future__ import annotations

import itertools
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
        of_experts = (_N_EXPERTS, _N_ROWS, _N_COLUMNS)
        usual = (name for name in ("q4_k", "q4_0", "q8_0", "f16") if _takes(name, of_experts))
        for type_name in itertools.islice(usual, 1):
            _test_experts(kernels, type_name)
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

    def product(matrix: Matrix, rows: slice, n_threads: int) -> FloatArray:
        return operators.multiply(matrix, tokens[rows], n_threads=n_threads)

    with Matrix(weights) as plain, Matrix(weights, SPECGEN_BUFFER) as packed:
        kernels.enable(products=True, attention=False)
        expected = operators.multiply(plain, tokens)
        kernels.enable(products=True, attention=True)
        _compare(f"{what}, not packed", partial(product, plain), expected)
        n_before = kernels.counts().n_products
        product(packed, slice(0, 1), 1)
        if kernels.counts().n_products == n_before:
            raise FailedTestError(f"{what}: the kernels did not compute them")
        _compare(what, partial(product, packed), expected)


def _test_experts(kernels: Kernels, type_name: str) -> None:
    rng = np.random.default_rng(1)
    shape = (_N_EXPERTS, _N_ROWS, _N_COLUMNS)
    weights = operators.quantize(rng.standard_normal(shape, dtype=np.float32), type_name)
    tokens = rng.standard_normal((_N_TOKENS_OF_LARGE, 1, _N_COLUMNS), dtype=np.float32)
    shuffled = np.argsort(rng.random((len(tokens), _N_EXPERTS)), axis=1)
    experts = shuffled[:, :_N_USED].astype(np.int32)

    def product(matrix: Matrix, rows: slice, n_threads: int) -> FloatArray:
        chosen = tokens[rows], experts[rows]
        return operators.multiply_experts(matrix, *chosen, n_threads=n_threads)

    with (
        Matrix(weights, n_experts_used=_N_USED) as plain,
        Matrix(weights, SPECGEN_BUFFER, n_experts_used=_N_USED) as packed,
    ):
        kernels.enable(products=True, attention=False)
        expected = product(plain, slice(None), 1)
        kernels.enable(products=True, attention=True)
        _compare("products with experts", partial(product, packed), expected)


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
    types = {"key_type": cache_type, "value_type": cache_type}

    def attend(rows: slice, n_threads: int) -> FloatArray:
        inputs = queries[:, rows], keys, values, mask[:, :, rows]
        return operators.attend(*inputs, **types, n_threads=n_threads).reshape(-1, _N_HEADS, size)  # type: ignore[arg-type]

    kernels.enable(products=True, attention=False)
    expected = attend(slice(None), 1)
    kernels.enable(products=True, attention=True)
    n_before = kernels.counts().n_attentions
    attend(slice(0, 1), 1)
    if kernels.counts().n_attentions == n_before:
        return False
    _compare(f"attention over {cache_type}", attend, expected)
    return True


def _compare(what: str, compute: Callable[[slice, int], FloatArray], expected: FloatArray) -> None:
    """Raise `FailedTestError` if all rows together differ from GGML's by `TOLERANCE` or more, or if a row differs in a
    smaller batch. `compute` gets the rows and the number of threads."""
    computed = compute(slice(None), 2)
    if not np.isfinite(computed).all():
        raise FailedTestError(f"{what} are not all numbers")
    difference = computed.astype(np.float64) - expected
    error = np.sqrt(np.square(difference).mean() / np.square(expected).mean())
    if error >= TOLERANCE:
        raise FailedTestError(f"{what} differ from llama.cpp's by {error:.1%}")
    for n_rows, row in itertools.product((1, _N_TOKENS), range(0, len(computed), 5)):
        if computed[row].tobytes() != compute(slice(row, row + n_rows), 1)[0].tobytes():
            raise FailedTestError(f"{what}: row {row} of a batch is not what it is alone")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(self_test(Path(sys.argv[1])))) + "\n")
