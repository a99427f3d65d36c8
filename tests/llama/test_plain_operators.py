"""Operators on tensors that are not packed: the same bits in any batch, and as exact as GGML's own."""

from __future__ import annotations

import numpy as np
import pytest

from specgen.llama import operators
from specgen.llama.operators import SPECGEN_BUFFER, Matrix
from tests.llama.test_kernel_products import FLOAT_TYPES, TYPES, error, exact, normal

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_rows", [1, 5, 64])
def test_rows_are_the_same_bits_in_any_batch(type_name: str, n_rows: int) -> None:
    weights = operators.quantize(normal(n_rows, 768), type_name)
    tokens = normal(40, 768, seed=1)
    with Matrix(weights) as matrix:
        alone = np.concatenate([operators.multiply(matrix, row[None]) for row in tokens])
        for n_tokens in (*range(1, 10), 16, 31, 33, 40):
            for n_threads in (1, 3):
                together = operators.multiply(matrix, tokens[:n_tokens], n_threads=n_threads)
                assert np.array_equal(together, alone[:n_tokens]), (n_tokens, n_threads)


@pytest.mark.parametrize("type_name", FLOAT_TYPES)
@pytest.mark.parametrize("n_inputs", [1, 7, 16, 100, 1024])
def test_floats_of_any_length(type_name: str, n_inputs: int) -> None:
    weights = operators.quantize(normal(19, n_inputs), type_name)
    tokens = normal(6, n_inputs, seed=1)
    with Matrix(weights) as matrix:
        computed = operators.multiply(matrix, tokens, n_threads=2)
    assert error(computed, exact(weights, tokens)) < 3e-7


@pytest.mark.parametrize("buffer_type", [operators.CPU_BUFFER, SPECGEN_BUFFER])
@pytest.mark.parametrize("type_name", ["f32", "f16", "q4_k", "q8_0"])
def test_stacks_of_matrices(type_name: str, buffer_type: str) -> None:
    """Packed (Gemma 3n's `altup_proj`, a matrix for each head in MLA) and not."""
    n_matrices, n_tokens = 3, 21
    weights = operators.quantize(normal(n_matrices, 37, 256), type_name)
    tokens = normal(2, 2 * n_matrices, n_tokens, 256, seed=1)
    with Matrix(weights, buffer_type) as stack:
        together = operators.multiply(stack, tokens, n_threads=2)
        for i in range(n_tokens):
            alone = operators.multiply(stack, tokens[:, :, i : i + 1])
            assert np.array_equal(alone[:, :, 0], together[:, :, i])
    values = np.repeat(operators.dequantize(weights), 2, axis=0)
    assert error(together, np.einsum("sbtk,brk->sbtr", tokens, values)) < 0.015
