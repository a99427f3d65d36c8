"""The self-test of the kernels.

Their operators must agree with GGML's, and be batch-invariant. It runs in a child process, since a
defect may end the process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.llama import operators
from specgen.llama.kernels.attached import Kernels, attach
from specgen.llama.kernels.verdicts import KernelVerdict
from specgen.llama.operators import SPECGEN_BUFFER, FloatArray, Matrix

#: The types of weights that the kernels multiply.
TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4", "f16", "bf16", "f32"),
)
#: The maximum error: the root mean square of the differences from GGML's results, relative to that
#: of the results. Rounding to 8 bits causes about 0.01.
TOLERANCE = 0.02

# The sizes of the products.
#: Several superblocks of 256 columns.
_N_COLUMNS = 768
#: Several groups of rows.
_N_ROWS = 96
#: A number of tokens that does not fill the kernels' tiles.
_N_TOKENS = 11
#: The same for AMX, whose tiles are larger.
_N_TOKENS_FOR_AMX = 43
_N_EXPERTS = 4
_N_EXPERTS_USED = 2

#: The types of keys and values, and their sizes, for which attention is tested.
_ATTENTIONS = (("f16", 64), ("f16", 128), ("q8_0", 64))
_N_HEADS = 8
_N_KV_HEADS = 2
_N_CELLS = 160

#: Computes some rows of a batch; the second argument is the number of threads.
_Compute: TypeAlias = Callable[[slice, int], FloatArray]
_ALL_ROWS = slice(None)
_FIRST_ROW = slice(0, 1)


class FailedTestError(Exception):
    """The kernels computed something wrong; the message names it."""


def self_test(library: Path) -> KernelVerdict:
    """Attach a library of kernels, and test everything that it computes.

    Returns:
        ``refused`` if GGML does not accept the library, else ``passed`` or ``failed``.
    """
    try:
        kernels = attach(library)
    except BackendError as error:
        return KernelVerdict("refused", error.message, hint=error.hint or "")
    n_attentions = 0
    try:
        for type_name in TYPES:
            _test_product(kernels, type_name)
        _test_expert_products(kernels)
        for cache_type, size in _ATTENTIONS:
            if _test_attention(kernels, cache_type, size):
                n_attentions += 1
    except (BackendError, FailedTestError) as error:
        return KernelVerdict("failed", str(error))
    tested = f"products of {len(TYPES)} types of weights"
    if n_attentions:
        tested += f" and {n_attentions} attentions"
    message = f"{tested} agree with llama.cpp's, and rows are the same in any batch"
    return KernelVerdict("passed", message, kernels.instructions)


# --- products -------------------------------------------------------------------------------------


def _test_product(kernels: Kernels, type_name: str) -> None:
    """Test products of weights of a type, in GGML's layout and in that of the kernels."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((_N_ROWS, _N_COLUMNS), dtype=np.float32)
    weights = operators.quantize(values, type_name)
    tokens = rng.standard_normal((_N_TOKENS_FOR_AMX, _N_COLUMNS), dtype=np.float32)

    def product_with(matrix: Matrix) -> _Compute:
        return lambda rows, n_threads: operators.multiply(matrix, tokens[rows], n_threads=n_threads)

    name = f"products of {type_name}"
    with Matrix(weights) as plain, Matrix(weights, SPECGEN_BUFFER) as packed:
        expected = _computed_by_ggml(kernels, product_with(plain))
        _compare(f"{name}, not packed", product_with(plain), expected)
        n_before = kernels.counts().n_products
        product_with(packed)(_FIRST_ROW, 1)
        if kernels.counts().n_products == n_before:
            raise FailedTestError(f"{name}: the kernels did not compute them")
        _compare(name, product_with(packed), expected)


def _test_expert_products(kernels: Kernels) -> None:
    """Test products in which each token is multiplied with the weights of its own experts."""
    rng = np.random.default_rng(0)
    shape = (_N_EXPERTS, _N_ROWS, _N_COLUMNS)
    weights = operators.quantize(rng.standard_normal(shape, dtype=np.float32), "q4_k")
    tokens = rng.standard_normal((_N_TOKENS_FOR_AMX, 1, _N_COLUMNS), dtype=np.float32)
    shuffled = np.argsort(rng.random((_N_TOKENS_FOR_AMX, _N_EXPERTS)), axis=1)
    experts = shuffled[:, :_N_EXPERTS_USED].astype(np.int32)

    def product_with(matrix: Matrix) -> _Compute:
        return lambda rows, n_threads: operators.multiply(
            matrix,
            tokens[rows],
            experts[rows],
            n_threads=n_threads,
        )

    with Matrix(weights) as plain, Matrix(weights, SPECGEN_BUFFER) as packed:
        expected = _computed_by_ggml(kernels, product_with(plain))
        _compare("products with experts", product_with(packed), expected)


# --- attention ------------------------------------------------------------------------------------


def _test_attention(kernels: Kernels, cache_type: str, size: int) -> bool:
    """Test attention over keys and values of a type and a size.

    Returns:
        Whether the kernels compute it.
    """
    rng = np.random.default_rng(2)
    queries = rng.standard_normal((1, _N_TOKENS, _N_HEADS, size), dtype=np.float32)
    shape = (1, _N_CELLS, _N_KV_HEADS, size)
    keys = rng.standard_normal(shape, dtype=np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    # The rows are the last of a text: each sees the cells before it, and its own.
    last_cell = np.arange(_N_CELLS - _N_TOKENS, _N_CELLS)[:, None]
    is_hidden = np.arange(_N_CELLS) > last_cell
    mask = np.where(is_hidden, -np.inf, 0).astype(np.float16)[None, None]

    def attend(rows: slice, n_threads: int) -> FloatArray:
        computed = operators.attend(
            queries[:, rows],
            keys,
            values,
            mask[:, :, rows],
            cache_type=cache_type,
            n_threads=n_threads,
        )
        return computed.reshape(-1, _N_HEADS, size)

    expected = _computed_by_ggml(kernels, attend)
    n_before = kernels.counts().n_attentions
    attend(_FIRST_ROW, 1)
    if kernels.counts().n_attentions == n_before:
        return False
    _compare(f"attention over {cache_type}", attend, expected)
    return True


# --- comparisons ----------------------------------------------------------------------------------


def _computed_by_ggml(kernels: Kernels, compute: _Compute) -> FloatArray:
    """Return all rows as GGML's own code computes them; then switch the kernels on.

    `attention=False` also turns off the kernels' products with weights that are not packed.
    """
    kernels.enable(products=True, attention=False)
    computed = compute(_ALL_ROWS, 1)
    kernels.enable(products=True, attention=True)
    return computed


def _compare(
    name: str,
    compute: _Compute,
    expected: FloatArray,
) -> None:
    """Compare the kernels' rows with GGML's, and with the same rows in smaller batches.

    Args:
        name: What is computed, for the message of an error.
        compute: Computes rows with the kernels.
        expected: All rows as GGML computes them.

    Raises:
        FailedTestError: If rows differ from GGML's by more than rounding, or if a row differs
            between batches at all.
    """
    batch = compute(_ALL_ROWS, 2)
    if not np.isfinite(batch).all():
        raise FailedTestError(f"{name} contain NaN or infinity")
    difference = batch.astype(np.float64) - expected
    error = np.sqrt(np.square(difference).mean() / np.square(expected).mean())
    if error >= TOLERANCE:
        raise FailedTestError(f"{name} differ from llama.cpp's by {error:.1%}")
    for n_rows in (1, _N_TOKENS):
        for row in range(0, len(batch), 5):  # a sample of the rows is enough
            smaller_batch = compute(slice(row, row + n_rows), 1)
            if smaller_batch[0].tobytes() != batch[row].tobytes():
                raise FailedTestError(f"{name}: row {row} differs between batches")
