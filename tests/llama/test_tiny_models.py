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
    TensorType,
    TinyConfig,
    tiny_vocabulary,
    write_tiny_model,
)

TEXT = "Hello, the world of  returns\n\tdef é 😀 日本 " + "".join(map(chr, range(32, 127)))
OPTIONS = ContextOptions(n_threads=1, n_gpu_layers=0)

GENERATING = [
    pytest.param(TinyConfig(), id="llama-bpe"),
    pytest.param(TinyConfig(tokenizer="spm"), id="llama-spm"),
    pytest.param(TinyConfig(n_head=4, n_head_kv=2, n_vocab=512), id="llama-grouped-padded"),
    pytest.param(TinyConfig(architecture="qwen2", n_head_kv=1), id="qwen2"),
    pytest.param(TinyConfig(architecture="mamba"), id="mamba"),
    pytest.param(TinyConfig(architecture="mamba", tensor_type="q8_0"), id="mamba-q8_0"),
    pytest.param(TinyConfig(architecture="gemma3", sliding_window=8), id="gemma3"),
    pytest.param(TinyConfig(architecture="gemma3", n_head_kv=1), id="gemma3-no-window"),
    pytest.param(TinyConfig(architecture="mamba2"), id="mamba2"),
    pytest.param(TinyConfig(architecture="jamba", n_head_kv=1), id="jamba"),
    pytest.param(TinyConfig(architecture="lfm2", n_head_kv=1), id="lfm2"),
    pytest.param(TinyConfig(architecture="qwen35", n_head_kv=1), id="qwen35"),
    pytest.param(TinyConfig(architecture="qwen35", n_layer=4, tensor_type="q8_0"), id="qwen35-4"),
]


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


@pytest.mark.parametrize("config", GENERATING)
def test_special_tokens_are_where_the_vocabulary_says(tmp_path: Path, config: TinyConfig) -> None:
    expected = tiny_vocabulary(config)
    with opened(tmp_path, config) as backend:
        vocabulary = backend.vocabulary
        assert vocabulary.n_tokens == len(expected)
        assert vocabulary.special_tokens() == {
            "bos": expected.bos,
            "eos": expected.eos,
            "eot": expected.eot,
        }
        assert vocabulary.end_tokens() == sorted({expected.eos, expected.eot})
        assert [vocabulary.token_text(i) for i in range(len(expected))] == list(expected.tokens)
        marker = vocabulary.tokenize("<|im_end|>", add_special=True, parse_special=True)
        assert marker == [expected.bos, expected.eot]


@pytest.mark.parametrize("tensor_type", ["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_every_tensor_type_computes_what_its_rounded_weights_say(
    tmp_path: Path, tensor_type: TensorType
) -> None:
    stored = TinyConfig(tensor_type=tensor_type)
    reference = TinyConfig(rounded_to=tensor_type)
    tokens = list(b"All the same numbers.")
    with opened(tmp_path, stored) as backend:
        logits = decode(backend, tokens)
    with opened(tmp_path, reference) as backend:
        expected = decode(backend, tokens)
    assert (tmp_path / "tiny.gguf").stat().st_size > 400_000
    # Not equal: llama.cpp rounds the activations too.
    assert np.abs(logits - expected).std() < 0.1 * expected.std()


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
