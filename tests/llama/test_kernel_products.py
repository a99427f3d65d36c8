"""The kernels' products are right and batch-invariant for all weight types and instruction sets."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.llama import operators
from specgen.llama.kernels.self_test import TYPES
from specgen.llama.operators import SPECGEN_BUFFER, FloatArray, Matrix, Weights

FLOAT_TYPES = ("f16", "bf16", "f32")
#: The most rows of weights in a group.
MOST_ROWS = 16
#: The most columns that are multiplied at once.
MOST_COLUMNS = 12
#: The same with AMX.
MOST_COLUMNS_OF_TILES = 96

pytestmark = pytest.mark.usefixtures("kernels")


def normal(*shape: int, seed: int = 0) -> FloatArray:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def block(type_name: str) -> int:
    """Return what the length of a row is a multiple of."""
    return next(n for n in (1, 32, 256) if _fits(type_name, n))


def _fits(type_name: str, n: int) -> bool:
    try:
        operators.row_bytes(type_name, n)
    except ValueError:
        return False
    return True


def exact(weights: Weights, tokens: FloatArray) -> FloatArray:
    """Multiply in double precision."""
    product = tokens.astype(np.float64) @ operators.dequantize(weights).astype(np.float64).T
    return product.astype(np.float32)


def error(computed: FloatArray, expected: FloatArray) -> float:
    """Return the root mean square of the error, relative to that of the numbers."""
    assert computed.shape == expected.shape
    return float(np.sqrt(np.square(computed - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("type_name", TYPES)
def test_errors_are_not_larger_than_ggmls(type_name: str) -> None:
    weights = operators.quantize(normal(75, 1536), type_name)
    tokens = normal(64, 1536, seed=1)
    expected = exact(weights, tokens)
    with Matrix(weights) as plain, Matrix(weights, SPECGEN_BUFFER) as packed:
        ggmls = error(operators.multiply(plain, tokens), expected)
        ours = error(operators.multiply(packed, tokens, n_threads=2), expected)
    # With float32 weights both only round sums, each in another order.
    assert ours < (3e-7 if type_name == "f32" else 1.005 * ggmls)


@pytest.mark.parametrize("type_name", TYPES)
def test_a_row_has_the_same_bits_in_any_batch(type_name: str) -> None:
    """In batches of every size, and in a prompt cut into any pieces."""
    n_tokens = 2 * MOST_COLUMNS_OF_TILES + 7
    weights = operators.quantize(normal(50, 1024), type_name)
    tokens = normal(n_tokens, 1024, seed=2)
    pieces = [(0, n) for n in (*range(1, MOST_COLUMNS + 2), 16, 17, 23, 25, 32, 40)]
    for n in (48, 49, 65, 80, 81, 95, 96, 97, n_tokens):
        pieces += [(0, n), (n_tokens - n, n)]
    with Matrix(weights, SPECGEN_BUFFER) as packed:
        alone = np.concatenate([operators.multiply(packed, row[None]) for row in tokens])
        for first, n in pieces:
            for n_threads in (1, 2, 3) if n <= 40 else (2,):
                piece = slice(first, first + n)
                together = operators.multiply(packed, tokens[piece], n_threads=n_threads)
                assert np.array_equal(together, alone[piece]), (first, n, n_threads)


@given(
    type_name=st.sampled_from(TYPES),
    n_rows=st.integers(1, 3 * MOST_ROWS + 1),
    n_blocks=st.integers(1, 5),
    n_tokens=st.integers(1, 5 * MOST_COLUMNS),
    n_threads=st.integers(1, 4),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_shapes_and_scales(
    type_name: str,
    n_rows: int,
    n_blocks: int,
    n_tokens: int,
    n_threads: int,
    exponent: int,
    seed: int,
) -> None:
    n_inputs = block(type_name) * n_blocks * (7 if block(type_name) == 1 else 1)
    weights = operators.quantize(normal(n_rows, n_inputs, seed=seed), type_name)
    tokens = normal(n_tokens, n_inputs, seed=seed + 1) * np.float32(2.0**exponent)
    with Matrix(weights, SPECGEN_BUFFER) as packed:
        computed = operators.multiply(packed, tokens, n_threads=n_threads)
    sizes = np.abs(tokens) @ np.abs(operators.dequantize(weights)).T
    bound = 1e-6 if type_name in FLOAT_TYPES else 0.02
    assert (np.abs(computed - exact(weights, tokens)) <= bound * sizes).all()


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_tokens", [5, 26])
def test_a_number_that_is_not_finite_affects_only_its_own_row(
    type_name: str, poison: float, n_tokens: int
) -> None:
    weights = operators.quantize(normal(33, 512), type_name)
    tokens = normal(n_tokens, 512, seed=3)
    with Matrix(weights, SPECGEN_BUFFER) as packed:
        clean = operators.multiply(packed, tokens)
        tokens[2, 300] = poison
        spoilt = operators.multiply(packed, tokens, n_threads=2)
    assert not np.isfinite(spoilt[2]).any()
    others = np.delete(np.arange(n_tokens), 2)
    assert np.array_equal(spoilt[others], clean[others])


@pytest.mark.parametrize("type_name", TYPES)
def test_zeros_and_denormal_numbers(type_name: str) -> None:
    weights = operators.quantize(normal(20, 256), type_name)
    tokens = np.zeros((3, 256), np.float32)
    tokens[1] = 1e-42
    tokens[2, 7] = 1e37
    with Matrix(weights, SPECGEN_BUFFER) as packed:
        computed = operators.multiply(packed, tokens)
    assert not computed[0].any()
    assert np.abs(computed[1]).max() < 1e-38
    assert np.allclose(computed[2], exact(weights, tokens)[2], rtol=0.01, atol=1e30)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("broadcast", [True, False])
def test_experts(type_name: str, broadcast: bool) -> None:
    n_experts = 6
    n_used = 3
    n_tokens = 29
    weights = operators.quantize(normal(n_experts, 35, 512), type_name)
    tokens = normal(n_tokens, 1 if broadcast else n_used, 512, seed=4)
    rng = np.random.default_rng(5)
    experts = np.argsort(rng.random((n_tokens, n_experts)), axis=1)[:, :n_used].astype(np.int32)
    experts[experts == 4] = 5  # one that no token uses, and one that a token uses twice
    with Matrix(weights, SPECGEN_BUFFER) as packed:
        together = operators.multiply(packed, tokens, experts, n_threads=2)
        for row in (0, 7, 28):
            alone = operators.multiply(packed, tokens[row : row + 1], experts[row : row + 1])
            assert np.array_equal(alone[0], together[row])
    chosen = operators.dequantize(weights)[experts]
    expected = np.einsum("tuk,turk->tur", np.broadcast_to(tokens, (n_tokens, n_used, 512)), chosen)
    assert error(together, expected) < 0.015


@pytest.mark.parametrize("type_name", [name for name in TYPES if name not in FLOAT_TYPES])
def test_sums_of_the_largest_codes_do_not_overflow(type_name: str) -> None:
    """With the largest codes of weights and activations, every sum has its largest value."""
    signs = np.where(normal(32, 1) < 0, -1, 1).astype(np.float32)
    weights = operators.quantize(np.repeat(signs, 512, axis=1), type_name)
    tokens = np.ones((26, 512), np.float32)
    tokens[1::2] *= -1
    with Matrix(weights, SPECGEN_BUFFER) as packed:
        computed = operators.multiply(packed, tokens, n_threads=2)
        assert np.array_equal(computed[:1], operators.multiply(packed, tokens[:1]))
        assert np.array_equal(computed[1:2], operators.multiply(packed, tokens[1:2]))
    assert error(computed, exact(weights, tokens)) < 1e-5


def test_llama_cpps_own_tiles_are_left_as_they_were() -> None:
    """llama.cpp's code for AMX configures the tiles of a thread once, and relies on that."""
    if "AMX" not in operators.buffer_types():
        pytest.skip("llama.cpp has no code for AMX here")
    weights = operators.quantize(normal(64, 512), "q4_k")
    tokens = normal(40, 512, seed=6)
    with Matrix(weights, "AMX") as theirs, Matrix(weights, SPECGEN_BUFFER) as ours:
        before = operators.multiply(theirs, tokens)
        for _ in range(2):
            operators.multiply(ours, tokens)
            assert np.array_equal(operators.multiply(theirs, tokens), before)


# --- tensors that are not packed


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("n_rows", [1, 5, 64])
def test_rows_that_are_not_packed_have_the_same_bits_in_any_batch(
    type_name: str, n_rows: int
) -> None:
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
    """With packed weights (Gemma 3n's `altup_proj`, a matrix for each head in MLA) and without."""
    n_matrices = 3
    n_tokens = 21
    weights = operators.quantize(normal(n_matrices, 37, 256), type_name)
    tokens = normal(2, 2 * n_matrices, n_tokens, 256, seed=1)
    with Matrix(weights, buffer_type) as stack:
        together = operators.multiply(stack, tokens, n_threads=2)
        for i in range(n_tokens):
            alone = operators.multiply(stack, tokens[:, :, i : i + 1])
            assert np.array_equal(alone[:, :, 0], together[:, :, i])
    values = np.repeat(operators.dequantize(weights), 2, axis=0)
    assert error(together, np.einsum("sbtk,brk->sbtr", tokens, values)) < 0.015


# --- instruction sets

# Each instruction set needs its own process, because it is chosen when the library is attached.
_CHILD = """
import hashlib, json, sys
import numpy as np
from specgen.llama import operators
from specgen.llama.kernels.attached import attach
from specgen.llama.kernels.admission import library_path
from tests.llama.test_kernel_products import (
    MOST_COLUMNS, MOST_COLUMNS_OF_TILES, TYPES, error, exact, normal
)

kernels = attach(library_path())
found = {"instructions": kernels.instructions}
for name in TYPES:
    weights, tokens = operators.quantize(normal(37, 768), name), normal(110, 768, seed=1)
    with operators.Matrix(weights, operators.SPECGEN_BUFFER) as packed:
        computed = operators.multiply(packed, tokens, n_threads=2)
        same = all(
            np.array_equal(operators.multiply(packed, tokens[:n]), computed[:n])
            for n in (*range(1, MOST_COLUMNS + 6), 25, MOST_COLUMNS_OF_TILES)
        )
    digest = hashlib.sha256(computed.tobytes()).hexdigest()
    found[name] = [error(computed, exact(weights, tokens)), same, digest]
print(json.dumps(found))
"""


#: By type: the error, whether rows have the same bits in batches, and a digest of the results.
Found = dict[str, tuple[float, bool, str]]


@functools.cache
def found_with(instructions: str) -> Found:
    """Return what the kernels for an instruction set compute.

    The test is skipped if the CPU does not have the instruction set.
    """
    environment = {**os.environ, "SPECGEN_KERNELS_INSTRUCTIONS": instructions}
    root = Path(__file__).resolve().parents[2]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "this CPU lacks" in child.stderr:
        pytest.skip(f"this CPU has no {instructions}")
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found.pop("instructions") == instructions
    return {name: tuple(values) for name, values in found.items()}


@pytest.mark.parametrize(
    "instructions",
    ["avx2", "avx-vnni", "avx512", "avx512-vnni", "avx512-vnni-amd", "amx-int8", "neon-dotprod"],
)
def test_every_instruction_set_that_the_cpu_has(instructions: str) -> None:
    for type_name, (wrong, same, _) in found_with(instructions).items():
        assert wrong < (1e-6 if type_name in FLOAT_TYPES else 0.01), type_name
        assert same, type_name


@pytest.mark.parametrize(
    ("instructions", "others"), [("avx512", "avx2"), ("amx-int8", "avx512-vnni")]
)
def test_two_instruction_sets_give_the_same_bits(instructions: str, others: str) -> None:
    expected = found_with(others)
    found = found_with(instructions)
    assert found.keys() == expected.keys()
    for type_name, (_, _, digest) in found.items():
        assert digest == expected[type_name][2], type_name
