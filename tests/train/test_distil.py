"""Distilling a tiny target into a tiny draft: transformers, rows, training and files."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import time
import types
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax

from specgen.errors import MemoryLimitError, ModelFileError, OutputError, UsageError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.operators import dequantize, quantize
from specgen.options import ContextOptions
from specgen.train import distillation, gguf_weights
from specgen.train.distillation import (
    Distilled,
    Trainer,
    check_memory,
    distil,
    hidden_states,
    output_matrix,
    stack_layers,
)
from specgen.train.gguf_weights import read_weights, write_weights
from specgen.train.target_text import N_COLUMNS, TargetText, TrainingText, pack, training_texts
from specgen.train.training_loop import Budget, Schedule, TrainingState, train
from tests.helpers.heads import counting, opened, prompts, written
from tests.helpers.rows import decoded
from tests.helpers.tiny import write_respelled_model, write_with_other_scales
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

CONFIG = TinyConfig(logit_scale=6, chat_template=CHATML_TEMPLATE)


def llama_logits(path: Path, tokens: list[int]) -> np.ndarray:
    """llama.cpp's logits after each token of a text: float32[n, n_vocab]."""
    choices: dict[str, Any] = {"n_ctx": 128, "clock": time.monotonic, "n_outputs": len(tokens)}
    with (
        contextlib.closing(LlamaModel(path)) as model,
        contextlib.closing(LlamaBackend(model, ContextOptions(n_threads=1), **choices)) as backend,
    ):
        return decoded(backend, tokens)


def own_logits(path: Path, *texts: list[int]) -> list[np.ndarray]:
    """The same from the transformer that is trained, with the texts in one row."""
    weights = read_weights(path)
    layers, others = stack_layers(weights)
    tokens = np.concatenate(texts)[None]
    numbers = np.concatenate([np.full(len(text), i + 1) for i, text in enumerate(texts)])[None]
    places = np.concatenate([np.arange(len(text)) for text in texts])[None]
    states = jax.jit(hidden_states, static_argnums=0)(
        weights.hyperparameters, layers, others, tokens, numbers, places
    )
    logits = np.asarray(states @ output_matrix(others).T)[0]
    return np.split(logits, np.cumsum([len(text) for text in texts])[:-1])


@pytest.mark.parametrize(
    "config",
    [
        TinyConfig(n_layer=3),
        TinyConfig(n_layer=11, n_head=4, n_head_kv=2),
        TinyConfig(architecture="qwen2", n_head=4, n_head_kv=2),
        TinyConfig(architecture="qwen3", n_head=4, n_head_kv=2),
        TinyConfig(architecture="gemma3", n_layer=4, sliding_window=8),
        TinyConfig(architecture="gemma3", n_layer=2),
    ],
    ids=lambda config: f"{config.architecture}-{config.n_layer}-{config.sliding_window}",
)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, config: TinyConfig) -> None:
    path = write_tiny_model(tmp_path / "model.gguf", config)
    rng = np.random.default_rng(0)
    first, second = ([int(t) for t in rng.integers(4, 300, n)] for n in (40, 20))
    found = own_logits(path, first, second)
    for text, logits in zip((first, second), found, strict=True):
        # llama.cpp keeps keys and values in half precision.
        np.testing.assert_allclose(logits, llama_logits(path, text), atol=0.05)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 0.0},
        {"rope.scale_linear": 4.0},  # the factor's former name
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_positions_are_scaled_as_llama_cpp_scales_them(
    tmp_path: Path, architecture: Any, scaling: dict[str, str | float]
) -> None:
    config = TinyConfig(architecture=architecture, sliding_window=8)
    metadata = {f"{architecture}.{key}": value for key, value in scaling.items()}
    path = write_tiny_model(tmp_path / "model.gguf", config, metadata=metadata)
    text = [int(token) for token in np.random.default_rng(0).integers(4, 300, 40)]
    np.testing.assert_allclose(own_logits(path, text)[0], llama_logits(path, text), atol=0.05)


# --- files ----------------------------------------------------------------------------------


#: Types with blocks of 32 weights; those with blocks of 256; and numbers without blocks.
SMALL_BLOCKS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl"]
LARGE_BLOCKS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"]


@pytest.mark.parametrize("type_name", [*SMALL_BLOCKS, *LARGE_BLOCKS, "f32", "f16", "bf16"])
def test_blocks_are_multiplied_in_every_type(type_name: str) -> None:
    """Each block has its own factor, as llama.cpp dequantizes it, and nothing else changes."""
    rng = np.random.default_rng(0)
    stored = quantize(rng.normal(0.0, 0.1, (3, 512)).astype(np.float32), type_name)
    size = gguf_weights.block_size([type_name], 512)
    assert size == (256 if type_name in LARGE_BLOCKS else 32)
    changes = rng.uniform(-0.3, 0.3, (3, 512 // size)).astype(np.float32)
    changes[1] = 0.0
    new = replace(stored, data=gguf_weights.scaled_bytes(stored, changes))
    before = dequantize(stored)
    wanted = np.asarray(gguf_weights.apply_changes(before, changes))
    # Scales, or numbers themselves, are rounded to as many bits as float16 or bfloat16 has.
    rounding = 2.0**-8 if type_name == "bf16" else 2.0**-9
    np.testing.assert_allclose(dequantize(new), wanted, rtol=rounding, atol=rounding * 0.2)
    assert np.array_equal(dequantize(new)[1], before[1])


def test_blocks_of_two_types_share_a_factor_and_a_scale_stays_a_number() -> None:
    assert gguf_weights.block_size(["q4_0", "q4_k"], 512) == 256
    assert gguf_weights.block_size(["f16", "q8_0"], 64) == 32
    assert gguf_weights.block_size(["f32"], 40) == 40
    assert gguf_weights.block_size(["q4_0", "mxfp4"], 64) is None
    stored = quantize(np.full((1, 32), 5e5, np.float32), "q4_0")
    new = gguf_weights.scaled_bytes(stored, np.array([[3.0]], np.float32))
    assert np.isfinite(dequantize(replace(stored, data=new))).all()


@pytest.mark.parametrize("tensor_type", ["f32", "f16", "q8_0", "q4_0", "q4_1"])
def test_a_file_keeps_its_types_and_gets_other_scales(tmp_path: Path, tensor_type: Any) -> None:
    original = write_tiny_model(tmp_path / "a.gguf", TinyConfig(tensor_type=tensor_type))
    before = read_weights(original)
    none = pack([])
    name = "ffn_up.factors"
    shape = Trainer(original, none, none).parameters[name].shape
    rng = np.random.default_rng(0)
    changes = {name: rng.uniform(-0.01, 0.01, shape).astype(np.float32)}
    write_weights(original, changes, tmp_path / "b.gguf")
    after = read_weights(tmp_path / "b.gguf")
    for layer, of_layer in enumerate(changes[name]):
        matrix = f"blk.{layer}.ffn_up.weight"
        wanted = np.asarray(gguf_weights.apply_changes(before.tensors[matrix], of_layer))
        np.testing.assert_allclose(after.tensors[matrix], wanted, rtol=2e-3, atol=5e-4)
    for other, values in before.tensors.items():
        assert ".ffn_up." in other or np.array_equal(values, after.tensors[other])
    assert after.types == before.types
    assert (tmp_path / "b.gguf").stat().st_size == original.stat().st_size


def test_what_cannot_be_trained_is_one_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "a.gguf", TinyConfig(architecture="mamba"))
    write_tiny_model(tmp_path / "b.gguf", TinyConfig(), keep_fraction=0.5)
    scaled_attention = {"llama.rope.scaling.attn_factor": 2.0}
    write_tiny_model(tmp_path / "d.gguf", TinyConfig(), metadata=scaled_attention)
    for name, message in (
        ("a.gguf", "cannot train a model of the architecture 'mamba'"),
        ("b.gguf", "not a complete GGUF file"),
        ("c.gguf", "cannot be read"),
        ("d.gguf", "cannot train a model with this rope.scaling.attn_factor"),
    ):
        with pytest.raises(ModelFileError, match=message):
            read_weights(tmp_path / name)


# --- texts ----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(8, 40),
)
def test_every_token_of_an_answer_is_predicted_once(
    lengths: list[tuple[int, int]], n_columns: int
) -> None:
    counter = itertools.count(1)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(itertools.islice(counter, n))

    texts = [TrainingText(tokens(i), tokens(n), is_held_back=False) for i, n in lengths]
    rows = pack(texts, n_columns)
    wanted = {
        token
        for text in texts
        for token in text.answer_tokens[: max(0, n_columns - len(text.prompt_tokens))]
    }
    is_label = rows.labels >= 0
    assert sorted(rows.labels[is_label]) == sorted(wanted)
    assert rows.n_labels == len(wanted)
    # All tokens are different numbers in order, so that the one before is the one that predicts.
    assert np.array_equal(rows.tokens[is_label] + 1, rows.labels[is_label])
    for text in texts:
        for r, c in np.argwhere(rows.tokens == text.prompt_tokens[0]):
            assert rows.positions[r, c] == 0
            same = rows.texts[r] == rows.texts[r, c]
            n = min(n_columns, len(text.prompt_tokens) + len(text.answer_tokens))
            assert np.array_equal(rows.positions[r, same], np.arange(n))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "t.gguf", CONFIG)


@pytest.fixture(scope="module")
def text(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TargetText:
    folder = tmp_path_factory.mktemp("text")
    with opened(target) as session:
        assert written(session, folder, prompts(60)) >= 3000
    return TargetText(folder)


def texts_for(text: TargetText, target: Path, draft: Path) -> list[TrainingText]:
    with (
        contextlib.closing(LlamaModel(target)) as model,
        contextlib.closing(LlamaModel(draft)) as small,
    ):
        return training_texts(text, model, small, datetime.datetime(2026, 1, 1))


def said(model: Path, answers: Iterable[tuple[int, ...]]) -> list[bytes]:
    with contextlib.closing(LlamaModel(model, vocabulary_only=True)) as loaded:
        return [b"".join(map(loaded.vocabulary.token_bytes, tokens)) for tokens in answers]


def test_a_sibling_reads_the_targets_tokens(text: TargetText, target: Path) -> None:
    found = texts_for(text, target, target)
    assert [(each.prompt_tokens, each.answer_tokens, each.is_held_back) for each in found] == [
        (each.prompt_tokens, each.tokens, each.is_held_back) for each in text.answers
    ]
    rows = pack(found, N_COLUMNS)
    is_label = rows.labels >= 0
    # The target chose its likeliest tokens.
    assert np.array_equal(rows.top_tokens[is_label][:, 0], rows.labels[is_label])
    assert (rows.top_probabilities[is_label].sum(axis=-1) > 0.0).all()


def test_another_draft_reads_the_same_text_in_its_own_tokens(
    text: TargetText, target: Path, tmp_path: Path
) -> None:
    draft = write_respelled_model(tmp_path / "d.gguf", CONFIG)
    found = texts_for(text, target, draft)
    own = said(draft, (each.answer_tokens for each in found))
    assert own == said(target, (answer.tokens for answer in text.answers))
    for each, answer in zip(found, text.answers, strict=True):
        assert each.prompt_tokens != answer.prompt_tokens
    rows = pack(found, N_COLUMNS)
    assert rows.n_labels > 0
    assert rows.top_tokens.shape == (*rows.labels.shape, 0)


# --- training -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    right = write_tiny_model(folder / "right.gguf", replace(CONFIG, tensor_type="q8_0"))
    return write_with_other_scales(right, folder / "d.gguf", 0.5)


def fitted(
    draft: Path, texts: list[TrainingText], output: Path, *, stop_after: int = 10**9
) -> tuple[Distilled | None, list[int]]:
    """Train a draft, interrupted after this number of steps; also return the reported progress."""
    told: list[int] = []
    budget = Budget(
        counting(),
        interrupted=lambda: len(told) >= stop_after,
        progress=lambda done, _: told.append(done),
    )
    return distil(draft, texts, output, budget, rate=0.01), told


def agreement_of(draft: Path, texts: list[TrainingText]) -> float:
    """How often the held-out answers' tokens are the most likely ones in llama.cpp."""
    n_right = 0
    n = 0
    for text in texts:
        if text.is_held_back:
            tokens = [*text.prompt_tokens, *text.answer_tokens]
            likeliest = llama_logits(draft, tokens[:-1]).argmax(axis=1)
            n_right += int((likeliest[len(text.prompt_tokens) - 1 :] == text.answer_tokens).sum())
            n += len(text.answer_tokens)
    return n_right / n


def test_a_trained_draft_agrees_more_often(
    text: TargetText, target: Path, draft: Path, tmp_path: Path
) -> None:
    texts = texts_for(text, target, draft)
    output = tmp_path / "new" / "trained.gguf"
    found, told = fitted(draft, texts, output)
    assert found is not None
    assert found.agreement_before == pytest.approx(agreement_of(draft, texts), abs=0.02)
    assert found.agreement_after == pytest.approx(agreement_of(output, texts), abs=0.02)
    assert found.agreement_after > found.agreement_before + 0.05
    assert told == list(range(1, found.n_steps + 1))
    assert [path.name for path in output.parent.iterdir()] == [output.name]


@pytest.mark.parametrize(
    ("losses", "until_s", "stop_after", "best", "n_steps"),
    [
        ([3.0, 1.0, 2.0], math.inf, 99, (1.0, 8), 12),  # the lowest loss counts, not the last
        ([9.0, 9.0, 9.0, 9.0], math.inf, 99, (8.0, None), 8),  # patience
        ([1.0] * 9, 5.0, 99, (1.0, 3), 3),  # the time is over: judged once more
        ([1.0] * 9, math.inf, 5, (1.0, 4), 5),  # interrupted
    ],
)
def test_training_ends_with_the_parameters_of_the_lowest_loss(
    losses: list[float], until_s: float, stop_after: int, best: tuple[float, Any], n_steps: int
) -> None:
    """`best` is the lowest loss, and the steps before it."""
    schedule = Schedule(16, 4, 3, 0.01, n_rising=2, last_share=0.1, judged_every=4, patience=2)
    state = TrainingState(8.0)
    rates: list[float] = []
    judged = itertools.count()
    budget = Budget(counting(), until_s, lambda: len(rates) >= stop_after)
    trainee = types.SimpleNamespace(
        step=lambda rows, rate: rates.append(rate * len(rows)),
        loss=lambda: losses[next(judged)],
        parameters={"rates": rates},
    )
    is_whole = train(trainee, state, schedule, budget)
    assert is_whole == (stop_after == 99)
    assert state.n_steps == len(rates) == n_steps
    assert rates[0] < rates[1]
    n_best = len(state.best["rates"]) if state.best else None
    assert (state.best_loss, n_best) == best


def test_memory_is_only_checked_before_training(
    text: TargetText,
    target: Path,
    draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What training used is not free when the file is judged that it wrote."""
    available_bytes = itertools.chain([2**40], itertools.repeat(0))
    monkeypatch.setattr(distillation, "available_memory_bytes", available_bytes.__next__)
    found, _ = fitted(draft, texts_for(text, target, draft), tmp_path / "trained.gguf")
    assert found is not None


def test_errors_before_training(
    text: TargetText, target: Path, draft: Path, tmp_path: Path
) -> None:
    texts = texts_for(text, target, draft)
    with pytest.raises(UsageError, match="too few tokens to learn from"):
        fitted(draft, texts[:9], tmp_path / "d.gguf")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        fitted(draft, texts, tmp_path / "file" / "d.gguf")
    assert fitted(draft, texts, tmp_path / "d.gguf", stop_after=2)[0] is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(MemoryLimitError, match=r"training it needs about .*B are free"):
        check_memory(draft, read_weights(draft), available_bytes=1000)
