"""GGML's own operators agree with NumPy, because the kernels are compared with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specgen.llama.kernels.attached import Kernels
from specgen.llama.operators import FloatArray, Matrix, Weights, attend, multiply, quantize
from tests.llama.test_kernel_products import error, normal

#: The error that rounding to 16 bits makes, as a root mean square.
HALF = 0.004


@pytest.fixture(autouse=True)
def _without_kernels(attached_kernels: Kernels | None) -> None:
    """Let GGML's own code compute."""
    if attached_kernels is not None:
        attached_kernels.enable(products=False, attention=False)


def test_shapes_that_do_not_fit_are_errors() -> None:
    with (
        Matrix(quantize(normal(4, 64), "q8_0")) as matrix,
        pytest.raises(ValueError, match="times a matrix"),
    ):
        multiply(matrix, normal(2, 32))
    with pytest.raises(ValueError, match="not a multiple of 256"):
        quantize(normal(4, 64), "q4_k")
    with pytest.raises(ValueError, match="q9: not one of"):
        quantize(normal(4, 64), "q9")
    with pytest.raises(ValueError, match="bytes of weights"):
        Weights("q8_0", (4, 64), np.zeros(3, np.uint8))


# --- attention ------------------------------------------------------------------------------


def reference(
    queries: FloatArray, keys: FloatArray, values: FloatArray, mask: Any = 0.0
) -> FloatArray:
    """Compute attention by its formula."""
    n_heads, size = queries.shape[2:]
    group = n_heads // keys.shape[2]
    keys = np.repeat(keys, group, axis=2)
    values = np.repeat(values, group, axis=2)
    scores = np.einsum("srhk,schk->shrc", queries, keys).astype(np.float64) * size**-0.5 + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    outputs: FloatArray = np.einsum("shrc,schv->srhv", weights, values).astype(np.float32)
    return outputs


@pytest.mark.parametrize(
    ("cache_type", "tolerance"), [("f32", 1e-4), ("f16", HALF), ("bf16", 0.02), ("q8_0", 0.02)]
)
def test_attention_over_every_usual_cache(cache_type: str, tolerance: float) -> None:
    """5 rows and 96 cells, a third of them hidden; 8 heads share 2 heads of keys and values."""
    queries = normal(1, 5, 8, 64)
    keys = normal(1, 96, 2, 64)
    values = normal(1, 96, 2, 64, seed=3)
    hidden = np.random.default_rng(4).random((1, 1, 5, 96)) < 1 / 3
    mask = np.where(hidden, -np.inf, 0).astype(np.float16)
    computed = attend(queries, keys, values, mask, cache_type=cache_type, n_threads=2)
    assert error(computed, reference(queries, keys, values, mask)) < tolerance
