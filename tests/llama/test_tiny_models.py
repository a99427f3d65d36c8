"""The tiny models load and decode in the real llama.cpp, and are what their options say."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Logits
from tests.registry import ARCHITECTURES
from tests.tiny import (
    Architecture,
    TinyConfig,
    write_tiny_model,
)

TEXT = "Hello, the world of  returns\n\tdef é 😀 日本 " + "".join(map(chr, range(32, 127)))
OPTIONS = ContextOptions(n_threads=1, n_gpu_layers=0)


@contextmanager
def opened(path: Path, config: TinyConfig) -> Iterator[LlamaBackend]:
    model = LlamaModel(write_tiny_model(path / "tiny.gguf", config), n_gpu_layers=0)
    backend = LlamaBackend(model, OPTIONS, n_ctx=1024, clock=time.monotonic, n_outputs=64)
    try:
        yield backend
    finally:
        backend.close()
        model.close()


def decode(backend: LlamaBackend, tokens: Sequence[int], *, at_once: bool = True) -> Logits:
    """Logits after each token, in large batches or one by one, from an empty cache."""
    backend.remove(0)
    rows = []
    # A batch gives 64 rows of logits at most.
    size = 64 if at_once else 1
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        batch = Batch()
        for offset, token in enumerate(chunk):
            batch.add(token, backend.length(0) + offset, (0,), True)
        rows.append(backend.decode(batch).copy())
    return np.concatenate(rows)


def continue_greedily(backend: LlamaBackend, prompt: Sequence[int], n_tokens: int) -> list[int]:
    tokens = list(prompt)
    logits = decode(backend, tokens)[-1]
    for position in range(len(tokens), len(tokens) + n_tokens):
        tokens.append(int(logits.argmax()))
        batch = Batch()
        batch.add(tokens[-1], position, (0,), True)
        logits = backend.decode(batch)[-1].copy()
    return tokens[len(prompt) :]


def probabilities(logits: Logits) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def test_noise_makes_drafts_from_nearly_perfect_to_useless(tmp_path: Path) -> None:
    target = TinyConfig(seed=1)
    with opened(tmp_path, target) as backend:
        tokens = [65, *continue_greedily(backend, [65], 300)]
        target_probs = probabilities(decode(backend, tokens))
    agreement, overlap = [], []
    for noise in (0.0, 0.01, 0.1, 0.3, 1.0):
        with opened(tmp_path, target.draft(noise)) as backend:
            draft_probs = probabilities(decode(backend, tokens))
        agreement.append(float((draft_probs.argmax(axis=1)[:-1] == tokens[1:]).mean()))
        overlap.append(float(np.minimum(draft_probs, target_probs).sum(axis=1).mean()))
    assert agreement[0] > 0.99
    assert overlap[0] > 0.99
    assert 0.8 < agreement[1] < 1.0
    assert 0.3 < agreement[2] < 0.7
    assert 0.05 < agreement[3] < 0.3
    assert agreement[4] < 0.05
    assert overlap == sorted(overlap, reverse=True)


@pytest.mark.parametrize(
    "architecture", [name for name, case in ARCHITECTURES.items() if case.generates]
)
def test_llama_cpp_sees_the_state_of_those_that_have_one(
    tmp_path: Path, architecture: Architecture
) -> None:
    with opened(tmp_path, TinyConfig(architecture=architecture)) as backend:
        assert backend.model.has_recurrent_state == ARCHITECTURES[architecture].has_state


def test_a_sliding_window_hides_what_is_before_it(tmp_path: Path) -> None:
    """In one layer of two, so that the other one's keys show what it missed."""
    tokens = list(range(40, 80))
    rows = []
    for n_layer in (1, 2):
        config = TinyConfig(architecture="gemma3", sliding_window=8, n_layer=n_layer)
        with opened(tmp_path, config) as backend:
            logits = decode(backend, tokens)[-1]
            changed = decode(backend, [*tokens[:20], 100, *tokens[21:]])[-1]
        rows.append(np.abs(changed - logits).max())
    assert rows[0] == 0
    assert rows[1] > 0.01
