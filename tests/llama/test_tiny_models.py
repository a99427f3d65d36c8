"""The tiny models load and decode in the real llama.cpp, and are what their options say."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from specgen.errors import ModelFileError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Logits
from tests.registry import ARCHITECTURES
from tests.tiny import (
    CHATML_TEMPLATE,
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
def test_one_batch_and_single_tokens_give_the_same_logits(
    tmp_path: Path, config: TinyConfig
) -> None:
    with opened(tmp_path, config) as backend:
        tokens = backend.vocabulary.tokenize(TEXT, add_special=True, parse_special=False)[:60]
        together = decode(backend, tokens)
        one_by_one = decode(backend, tokens, at_once=False)
    assert together.shape == (60, len(tiny_vocabulary(config)))
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together, one_by_one, atol=0.05)


@pytest.mark.parametrize("config", GENERATING)
def test_any_text_survives_the_tokenizer(tmp_path: Path, config: TinyConfig) -> None:
    with opened(tmp_path, config) as backend:
        vocabulary = backend.vocabulary
        tokens = vocabulary.tokenize(TEXT, add_special=True, parse_special=False)
        text = b"".join(map(vocabulary.token_bytes, tokens)).decode()
    # SentencePiece begins a text with a space of its own.
    assert text.removeprefix(" ") == TEXT
    assert len(tokens) < len(TEXT.encode())


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


def test_prompts_need_not_begin_with_a_special_token(tmp_path: Path) -> None:
    with opened(tmp_path, TinyConfig(add_bos=False)) as backend:
        assert not backend.vocabulary.add_bos
        assert backend.vocabulary.tokenize("A", add_special=True, parse_special=False) == [65]


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


def test_the_same_config_writes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    files = [
        write_tiny_model(tmp_path / name, config).read_bytes()
        for name, config in {
            "a": TinyConfig(seed=5),
            "b": TinyConfig(seed=5),
            "c": TinyConfig(seed=6),
        }.items()
    ]
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_writing_takes_well_under_a_second(tmp_path: Path) -> None:
    config = TinyConfig(n_embd=256, n_ff=512, n_vocab=1024, tensor_type="q4_0", rounded_to="q4_0")
    write_tiny_model(tmp_path / "warm-up.gguf", config)
    started = time.perf_counter()
    write_tiny_model(tmp_path / "tiny.gguf", config)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_logit_scale_is_the_deviation_of_the_logits(tmp_path: Path, scale: float) -> None:
    config = TinyConfig(logit_scale=scale, control_scale=1.0)
    with opened(tmp_path, config) as backend:
        logits = decode(backend, list(range(100)))
    assert logits.std(axis=1).mean() == pytest.approx(scale, rel=0.1)


def test_the_default_distribution_is_neither_flat_nor_a_spike(tmp_path: Path) -> None:
    with opened(tmp_path, TinyConfig()) as backend:
        tokens = continue_greedily(backend, list(b"Once"), 200)
        likeliest = probabilities(decode(backend, tokens)).max(axis=1)
    assert 0.15 < float(np.median(likeliest)) < 0.6
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("config", GENERATING)
def test_logits_depend_on_every_token_of_the_context(tmp_path: Path, config: TinyConfig) -> None:
    with opened(tmp_path, config) as backend:
        tokens = list(range(40, 80))
        logits = decode(backend, tokens)[-1]
        for changed in range(len(tokens) - 24, len(tokens)):
            other = [*tokens[:changed], 100, *tokens[changed + 1 :]]
            assert np.abs(decode(backend, other)[-1] - logits).max() > 0.01, changed


def test_control_tokens_end_a_text_only_where_asked(tmp_path: Path) -> None:
    ends = {tiny_vocabulary(TinyConfig()).eos, tiny_vocabulary(TinyConfig()).eot}
    with opened(tmp_path, TinyConfig()) as backend:
        assert not ends & set(continue_greedily(backend, list(b"Once"), 400))
    with opened(tmp_path, TinyConfig(control_scale=2.5)) as backend:
        assert ends & set(continue_greedily(backend, list(b"Once"), 400))


def test_readable_text_where_asked(tmp_path: Path) -> None:
    with opened(tmp_path, TinyConfig(unprintable_scale=0.0)) as backend:
        tokens = continue_greedily(backend, list(b"Once"), 200)
        text = b"".join(map(backend.vocabulary.token_bytes, tokens)).decode("ascii")
    assert text.isprintable()


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


def test_vocabularies_can_differ_in_their_padding_only(tmp_path: Path) -> None:
    small, large = TinyConfig(n_vocab=352), TinyConfig(n_vocab=384)
    n_used = tiny_vocabulary(small).n_used
    assert tiny_vocabulary(large).tokens[:352] == tiny_vocabulary(small).tokens
    with opened(tmp_path, small) as backend:
        expected = decode(backend, list(b"padding"))
    with opened(tmp_path, large) as backend:
        logits = decode(backend, list(b"padding"))
        assert backend.vocabulary.token_bytes(383) == b""
    np.testing.assert_allclose(logits[:, :n_used], expected[:, :n_used], atol=0.01)


def test_a_draft_of_fewer_layers_shares_the_layers_it_has(tmp_path: Path) -> None:
    from gguf import GGUFReader

    target = TinyConfig()
    write_tiny_model(tmp_path / "target.gguf", target)
    write_tiny_model(tmp_path / "draft.gguf", target.draft(0.0, n_layer=1))
    layers = {
        name: {tensor.name: tensor for tensor in GGUFReader(tmp_path / name).tensors}
        for name in ("target.gguf", "draft.gguf")
    }
    assert len(layers["draft.gguf"]) < len(layers["target.gguf"])
    for name, tensor in layers["draft.gguf"].items():
        np.testing.assert_array_equal(tensor.data, layers["target.gguf"][name].data)


def test_chat_template_is_the_models_own(tmp_path: Path) -> None:
    with opened(tmp_path, TinyConfig(chat_template=CHATML_TEMPLATE)) as backend:
        assert backend.model.chat_template() == CHATML_TEMPLATE
    with opened(tmp_path, TinyConfig()) as backend:
        assert backend.model.chat_template() is None


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


def test_the_encoder_is_a_whole_model_that_does_not_generate(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "bert.gguf", TinyConfig(architecture="bert", n_ctx_train=64))
    with pytest.raises(ModelFileError, match=r"embedding|encoder"):
        LlamaModel(path, n_gpu_layers=0)


@pytest.mark.parametrize("keep_fraction", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_truncated_file_does_not_load(tmp_path: Path, keep_fraction: float) -> None:
    whole = write_tiny_model(tmp_path / "whole.gguf", TinyConfig()).stat().st_size
    path = write_tiny_model(tmp_path / "cut.gguf", TinyConfig(), keep_fraction=keep_fraction)
    assert path.stat().st_size == int(whole * keep_fraction)
    with pytest.raises(ModelFileError):
        LlamaModel(path, n_gpu_layers=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TinyConfig(n_vocab=100), "the tokenizer needs"),
        (TinyConfig(n_embd=65), "multiple of n_head"),
        (TinyConfig(n_head=4, n_head_kv=3), "n_head_kv"),
        (TinyConfig(n_embd=6), "cannot be rotated"),
        (TinyConfig(n_embd=48, tensor_type="q4_0"), "multiples of 32"),
    ],
)
def test_impossible_configurations_are_refused(
    tmp_path: Path, config: TinyConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny_model(tmp_path / "tiny.gguf", config)
    assert not list(tmp_path.iterdir())
