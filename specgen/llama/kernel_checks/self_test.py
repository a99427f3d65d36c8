"""The kernels' self-test, which runs in a child process: `python -m specgen.llama.kernel_checks.self_test LIBRARY`.

It attaches the library and compares a few operators of every kind with GGML's own: matrix products of every
type of weights that the kernels take, a product with the matrices of experts, and attentions. A row must
also be bit-identical alone and in a batch. The result is one line of JSON. If the process ends without it,
the exit code or signal is the result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import BackendError

if TYPE_CHECKING:
    from specgen.llama.kernels import Kernels
    from specgen.llama.operators import FloatArray, HalfArray

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


def self_test(library: Path) -> dict[str, str]:
    """Attach a library, test it, and return the result as `specgen.llama.kernel_checks.test_results` reads it."""
    from specgen.llama.kernels import attach

    try:
        kernels = attach(library)
    except BackendError as error:
        return {"outcome": "refused", "message": error.message, "hint": error.hint or ""}
    try:
        n_types = _test_products(kernels)
        _test_experts()
        n_attentions = _test_attentions(kernels)
    except (BackendError, FailedTestError) as error:
        return {"outcome": "failed", "message": str(error)}
    tested = f"products of {n_types} types of weights"
    if n_attentions:
        tested += f" and {n_attentions} attentions"
    return {
        "outcome": "passed",
        "message": f"{tested} agree with llama.cpp's, and rows are the same alone and in a batch",
        "instructions": kernels.instructions,
    }


def _test_products(kernels: Kernels) -> int:
    """Test a product of every type that the kernels take; return the number of types."""
    from specgen.llama import operators

    shape = (_N_ROWS, _N_COLUMNS)
    taken = [
        name
        for name in operators.TYPE_NUMBERS
        if operators.takes(name, shape, operators.SPECGEN_BUFFER)
    ]
    if not taken:
        raise FailedTestError("the kernels take no type of weights")
    for type_name in taken:
        _test_type(kernels, type_name)
    return len(taken)


def _test_type(kernels: Kernels, type_name: str) -> None:
    import numpy as np

    from specgen.llama import operators

    rng = np.random.default_rng(0)
    values = rng.standard_normal((_N_ROWS, _N_COLUMNS), dtype=np.float32)
    tokens = rng.standard_normal((_N_TOKENS_OF_LARGE, _N_COLUMNS), dtype=np.float32)
    weights = operators.quantize(values, type_name)
    what = f"products of {type_name}"
    with (
        operators.Matrix(weights) as plain,
        operators.Matrix(weights, operators.SPECGEN_BUFFER) as packed,
    ):
        kernels.enable(products=True, attention=False)
        expected = operators.multiply(plain, tokens)
        kernels.enable(products=True, attention=True)
        unpacked = operators.multiply(plain, tokens, n_threads=2)
        _compare(f"{what}, not packed", unpacked, expected)
        _compare_rows(
            f"{what}, not packed",
            unpacked,
            lambda row: operators.multiply(plain, tokens[row : row + 1])[0],
        )
        n_before = kernels.counts().n_products
        computed = operators.multiply(packed, tokens, n_threads=2)
        if kernels.counts().n_products == n_before:
            raise FailedTestError(f"{what}: the kernels did not compute them")
        _compare(what, computed, expected)
        _compare_rows(
            what, computed, lambda row: operators.multiply(packed, tokens[row : row + 1])[0]
        )
        small = operators.multiply(packed, tokens[:_N_TOKENS], n_threads=2)
        _compare_rows(what, small, lambda row: computed[row])


def _test_experts() -> None:
    """Test a product with the matrices of experts, of the first common type that the kernels take."""
    import numpy as np

    from specgen.llama import operators

    rng = np.random.default_rng(1)
    shape = (_N_EXPERTS, _N_ROWS, _N_COLUMNS)
    taken = (
        name
        for name in ("q4_k", "q4_0", "q8_0", "f16")
        if operators.takes(name, shape, operators.SPECGEN_BUFFER)
    )
    type_name = next(taken, None)
    if type_name is None:
        return
    weights = operators.quantize(rng.standard_normal(shape, dtype=np.float32), type_name)
    n_tokens = _N_TOKENS_OF_LARGE
    tokens = rng.standard_normal((n_tokens, 1, _N_COLUMNS), dtype=np.float32)
    experts = np.argsort(rng.random((n_tokens, _N_EXPERTS)), axis=1)[:, :_N_USED].astype(np.int32)
    with (
        operators.Matrix(weights, n_experts_used=_N_USED) as plain,
        operators.Matrix(weights, operators.SPECGEN_BUFFER, n_experts_used=_N_USED) as packed,
    ):
        expected = operators.multiply_experts(plain, tokens, experts)
        computed = operators.multiply_experts(packed, tokens, experts, n_threads=2)
        _compare("products with experts", computed, expected)
        _compare_rows(
            "products with experts",
            computed,
            lambda row: operators.multiply_experts(
                packed, tokens[row : row + 1], experts[row : row + 1]
            )[0],
        )


def _test_attentions(kernels: Kernels) -> int:
    """Test some attentions; return how many of them the kernels computed."""
    return sum(_test_attention(kernels, *attention) for attention in _ATTENTIONS)


def _test_attention(kernels: Kernels, cache_type: str, size: int) -> bool:
    """Test an attention; return whether the kernels computed it. (llama.cpp computes those that they do
    not cover.)"""
    import numpy as np

    from specgen.llama import operators

    rng = np.random.default_rng(2)
    queries = rng.standard_normal((1, _N_TOKENS, _N_HEADS, size), dtype=np.float32)
    shape = (1, _N_CELLS, _N_KV_HEADS, size)
    keys, values = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    mask = _causal_mask()

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

    whole = slice(0, _N_TOKENS)
    kernels.enable(products=True, attention=False)
    expected = attend(whole, 1)
    kernels.enable(products=True, attention=True)
    n_before = kernels.counts().n_attentions
    computed = attend(whole, 2)
    if kernels.counts().n_attentions == n_before:
        return False
    what = f"attention over {cache_type}"
    _compare(what, computed, expected)
    _compare_rows(what, computed, lambda row: attend(slice(row, row + 1), 1)[0])
    return True


def _causal_mask() -> HalfArray:
    """Return the mask for the last rows of a text: a row sees all cells before it, and its own."""
    import numpy as np

    rows, cells = np.arange(_N_TOKENS)[:, None], np.arange(_N_CELLS)[None]
    hidden = cells > rows + _N_CELLS - _N_TOKENS
    mask: HalfArray = np.where(hidden, -np.inf, 0).astype(np.float16)[None, None]
    return mask


def _compare(what: str, computed: FloatArray, expected: FloatArray) -> None:
    """Raise `FailedTestError` if a result differs from GGML's by `TOLERANCE` or more."""
    import numpy as np

    if not np.isfinite(computed).all():
        raise FailedTestError(f"{what} are not all numbers")
    difference = computed.astype(np.float64) - expected
    error = np.sqrt(np.square(difference).mean() / np.square(expected).mean())
    if error >= TOLERANCE:
        raise FailedTestError(f"{what} differ from llama.cpp's by {error:.1%}")


def _compare_rows(what: str, computed: FloatArray, alone: Callable[[int], FloatArray]) -> None:
    """Raise `FailedTestError` if a row of a batch differs from the same row alone."""
    for row in range(0, len(computed), 5):
        if computed[row].tobytes() != alone(row).tobytes():
            raise FailedTestError(f"{what}: row {row} of a batch is not what it is alone")


def main(arguments: list[str]) -> None:
    """Test the library at the given path, and print the result."""
    answer: dict[str, Any] = self_test(Path(arguments[0]))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
