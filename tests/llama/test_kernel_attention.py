"""The kernels' attention as an operator of GGML: its memory and its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specgen.llama import operators
from specgen.llama.kernels.attached import Kernels
from tests.helpers.cli import ended

pytestmark = pytest.mark.slow

#: Computes attention whose tasks four threads take one by one, and three threads share. Prints
#: whether one thread has the same result.
WITH_FOUR_THREADS = """
import json, sys
from pathlib import Path

import numpy as np

from specgen.llama import operators
from specgen.llama.kernels.attached import attach

attach(Path(sys.argv[1]))
rng = np.random.default_rng(0)
queries = rng.standard_normal((1, 5, 8, 64), dtype=np.float32)
cells = rng.standard_normal((1, 4000, 8, 64), dtype=np.float32)
mask = np.zeros((1, 1, 5, 4000), np.float16)
one, four = (operators.attend(queries, cells, cells, mask, n_threads=n) for n in (1, 4))
print(json.dumps(one.tobytes() == four.tobytes()))
"""


def test_openmp_may_start_fewer_threads_than_planned(kernels: Kernels) -> None:
    limit = {"OMP_THREAD_LIMIT": "3"}
    answer = ended(str(kernels.path), code=WITH_FOUR_THREADS, env=limit, timeout_s=300.0)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) is True


@pytest.mark.parametrize("n_more_cells", [0, 64])
def test_more_than_a_million_cells_are_left_to_llama_cpp(
    kernels: Kernels, n_more_cells: int
) -> None:
    """Their sums could overflow."""
    n_cells = 2**20 + n_more_cells
    queries = np.ones((1, 1, 1, 32), np.float32)
    cells = np.ones((1, n_cells, 1, 32), np.float32)
    mask = np.zeros((1, 1, 1, n_cells), np.float16)
    before = kernels.counts()
    outputs = operators.attend(queries, cells, cells, mask)
    after = kernels.counts()
    is_left = after.n_attentions_left > before.n_attentions_left
    assert is_left == (n_more_cells > 0)
    assert (after.n_attentions > before.n_attentions) == (not is_left)
    if not is_left:  # llama.cpp's sums in float16 are wrong for so many equal terms
        np.testing.assert_allclose(outputs, 1, rtol=1e-3)
