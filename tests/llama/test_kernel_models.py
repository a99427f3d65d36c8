"""Models with specgen's kernels: the logits agree with llama.cpp's kernels, and are
batch-invariant.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.kernels.attached import Kernels
from specgen.method.backend import Batch
from specgen.options import CacheType, ContextOptions, FlashAttention
from specgen.system.arrays import Logits
from tests.helpers.rows import decoded
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import Architecture

ARCHITECTURES = tuple(name for name in get_args(Architecture) if name != "bert")
#: Those in which only the kernels, and operators that work row by row, compute.
ATTENTION_ONLY = ("llama", "qwen2", "gemma3")
TEXT = tuple(int(token) for token in np.random.default_rng(0).integers(3, 250, 120))


def tiny(folder: Path, config: TinyConfig) -> Path:
    return write_tiny_model(folder / "tiny.gguf", config)


@contextlib.contextmanager
def opened(path: Path, options: ContextOptions | None = None) -> Iterator[LlamaBackend]:
    with contextlib.closing(LlamaModel(path)) as model:
        backend = LlamaBackend(
            model,
            options or ContextOptions(n_threads=2),
            n_ctx=256,
            clock=time.perf_counter,
            n_sequences=4,
            n_outputs=64,
        )
        with contextlib.closing(backend):
            yield backend


def along(backend: LlamaBackend, sizes: Sequence[int]) -> Logits:
    """The rows of `TEXT`, decoded in batches of these sizes, over and over."""
    backend.remove(0)
    rows: list[Logits] = []
    while (start := backend.length(0)) < len(TEXT):
        rows.append(decoded(backend, TEXT[start : start + sizes[len(rows) % len(sizes)]]))
    return np.concatenate(rows)


def spread(one: Logits, other: Logits) -> float:
    return float(np.std(one - other) / np.std(other))


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_change_no_more_than_rounding(
    kernels: Kernels, tmp_path: Path, architecture: Architecture, flash_attention: FlashAttention
) -> None:
    path = tiny(tmp_path, TinyConfig(architecture=architecture))
    options = ContextOptions(n_threads=2, flash_attention=flash_attention)
    with opened(path, options) as backend:
        before = kernels.counts()
        ours = along(backend, (1, 4, 7))
    after = kernels.counts()
    assert after.n_products > before.n_products
    kernels.enable(products=False, attention=False)
    with opened(path, options) as backend:
        theirs = along(backend, (1, 4, 7))
    assert kernels.counts().n_products == after.n_products
    assert spread(ours, theirs) < 0.01


def test_other_types_of_weights_are_left_to_llama_cpp(kernels: Kernels, tmp_path: Path) -> None:
    packed_bytes = []
    for tensor_type in ("tq1_0", "q4_0"):
        config = TinyConfig(n_embd=256, n_ff=256, tensor_type=tensor_type)
        with opened(tiny(tmp_path, config)) as backend:
            assert np.isfinite(along(backend, (1, 4))).all()
            packed_bytes.append(kernels.counts().packed_bytes)
    assert packed_bytes[0] < packed_bytes[1]


@pytest.mark.parametrize("tensor_type", ["f32", "f16", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("architecture", ATTENTION_ONLY)
@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.usefixtures("kernels")
def test_rows_have_the_same_bits_in_any_batch(
    tmp_path: Path, architecture: Architecture, tensor_type: str, flash_attention: FlashAttention
) -> None:
    config = TinyConfig(
        architecture=architecture,
        tensor_type=tensor_type,  # type: ignore[arg-type]
        n_head=4,
        n_head_kv=2,
        sliding_window=32 if architecture == "gemma3" else 0,
    )
    options = ContextOptions(n_threads=2, flash_attention=flash_attention)
    with opened(tiny(tmp_path, config), options) as backend:
        alone = along(backend, (1,))
        for sizes in ((2,), (3, 8), (16,), (32,), (5, 1, 13)):
            assert np.array_equal(along(backend, sizes), alone), sizes


@pytest.mark.parametrize(
    ("cache_type", "flash_attention"),
    [(name, "on") for name in ("f32", "f16", "bf16", "q8_0")]
    + [(name, "off") for name in ("f32", "f16", "bf16")],
)
@pytest.mark.usefixtures("kernels")
def test_rows_are_the_same_bits_with_any_cache_and_number_of_threads(
    tmp_path: Path, cache_type: CacheType, flash_attention: FlashAttention
) -> None:
    path = tiny(tmp_path, TinyConfig(n_embd=128))
    expected = None
    for n_threads in (1, 2, 3):
        options = ContextOptions(
            n_threads=n_threads,
            cache_type_k=cache_type,
            cache_type_v=cache_type,
            flash_attention=flash_attention,
        )
        with opened(path, options) as backend:
            for sizes in ((1,), (4, 9)):
                rows = along(backend, sizes)
                expected = rows if expected is None else expected
                assert np.array_equal(rows, expected), (n_threads, sizes)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.usefixtures("kernels")
def test_trees_and_the_holes_that_they_leave(
    tmp_path: Path, flash_attention: FlashAttention
) -> None:
    """The kept branch is after a rejected one in the cache, and later rows fill the hole."""
    options = ContextOptions(n_threads=2, flash_attention=flash_attention)
    with opened(tiny(tmp_path, TinyConfig(n_layer=3)), options) as backend:
        alone = along(backend, (1,))
        backend.remove(0)
        decoded(backend, TEXT[:50])
        for branch in (1, 2):
            backend.copy(0, branch)
        root, wrong, right = (0, 1, 2), (1,), (2,)
        tree = [TEXT[50], 7, 8, 9, TEXT[51], TEXT[52]]
        sequences = [root, wrong, wrong, wrong, right, right]
        rows = backend.decode(Batch(tree, [50, 51, 52, 53, 51, 52], sequences, [True] * 6))
        assert np.array_equal(rows[[0, 4, 5]], alone[50:53])
        backend.copy(2, 0, 51)
        backend.remove(1)
        backend.remove(2)
        for start, end in ((53, 55), (55, 56), (56, 72)):
            assert np.array_equal(decoded(backend, TEXT[start:end]), alone[start:end]), start


def test_weights_are_freed_with_their_model(kernels: Kernels, tmp_path: Path) -> None:
    before = kernels.counts().packed_bytes
    model = LlamaModel(tiny(tmp_path, TinyConfig()))
    assert kernels.counts().packed_bytes > before
    model.close()
    assert kernels.counts().packed_bytes == before
