"""Decoder heads: what they compute, their files, drafting with them, and their training."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.errors import ModelFileError, PairError
from specgen.llama.decoder_heads import (
    DecoderHeads,
    HeadWeights,
    is_heads_file,
    quantize_part,
    read_heads,
    write_heads,
)
from specgen.llama.operators import FloatArray, dequantize
from specgen.method.answer_loop import AnswerLoop
from specgen.method.backend import Batch
from specgen.method.hidden_states import LastHiddenState
from specgen.options import Grammar, SamplerOptions
from specgen.session.drafter_factory import DrafterFactory
from tests.helpers.fake_generations import read_prompt
from tests.helpers.heads import make_heads, opened, prompts, trained, written
from tests.helpers.states_drafts import loaded
from tests.tiny import TinyConfig, write_tiny_model

PROMPT = "abc fed cab. abcd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and heads that were made for it."""
    folder = tmp_path_factory.mktemp("heads")
    write_tiny_model(folder / "t.gguf", TinyConfig(logit_scale=6.0))
    make_heads(folder / "t.gguf", folder / "heads.gguf", folder / "text")
    return folder


# --- what they compute --------------------------------------------------------------------------


def some_weights(n_embd: int = 64, n_inner: int = 32, n_vocab: int = 90) -> HeadWeights:
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> FloatArray:
        return rng.normal(0.0, 0.2, shape).astype(np.float32)

    tokens = np.sort(rng.choice(n_vocab, 40, replace=False)).astype(np.int32)
    return HeadWeights(
        target="t.gguf",
        n_embd=n_embd,
        n_vocab=n_vocab,
        vocabulary="abc",
        scale=0.5,
        tokens=tokens,
        of_state=quantize_part(drawn(n_embd + n_inner, n_embd), "of_state"),
        of_token=quantize_part(drawn(n_embd + n_inner, n_embd), "of_token"),
        bias=drawn(n_embd + n_inner),
        of_inner=quantize_part(drawn(n_embd, n_inner), "of_inner"),
        embeddings=quantize_part(drawn(41, n_embd), "embeddings"),
        output=quantize_part(drawn(40, n_embd), "output"),
    )


def test_heads_compute_what_the_page_describes(tmp_path: Path) -> None:
    weights = some_weights()
    write_heads(tmp_path / "h.gguf", weights)
    n_embd = weights.n_embd
    state_matrix, token_matrix = dequantize(weights.of_state), dequantize(weights.of_token)
    embeddings = dequantize(weights.embeddings)
    is_frequent = set(weights.tokens.tolist())
    other = next(token for token in range(weights.n_vocab) if token not in is_frequent)
    tokens = [int(weights.tokens[7]), other]
    rows = [embeddings[7], embeddings[-1]]
    hidden = np.random.default_rng(1).normal(0.0, 1.0, n_embd).astype(np.float32)
    with closing(DecoderHeads(tmp_path / "h.gguf", time.perf_counter, 1)) as heads:
        state, expected = heads.begin(hidden, tokens[0]), hidden * 0.5
        for embedded, token in zip(rows, [*tokens[1:], None], strict=True):
            parts = state_matrix @ expected + token_matrix @ embedded + weights.bias
            inner = parts[n_embd:]
            silu = inner / (1.0 + np.exp(-inner))
            expected = parts[:n_embd] + dequantize(weights.of_inner) @ silu
            np.testing.assert_allclose(state[0], expected, rtol=0.05, atol=0.05)
            logits = heads.logits(state)
            assert logits.shape == (1, 40)
            np.testing.assert_allclose(
                logits[0], dequantize(weights.output) @ expected, rtol=0.1, atol=0.15
            )
            if token is not None:
                state = heads.advance(state, [token])
        assert heads.compute_s > 0.0


# --- files --------------------------------------------------------------------------------------


def test_other_files_are_not_taken_for_heads(tmp_path: Path, tiny_models: Path) -> None:
    assert not is_heads_file(tiny_models / "target.gguf")
    assert not is_heads_file(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="damaged decoder heads"):
        read_heads(tiny_models / "target.gguf")


def test_damage_is_reported_or_harmless(folder: Path, tmp_path: Path) -> None:
    """Whatever is changed or cut off, there is an error of ours or heads of the same shape."""
    data = (folder / "heads.gguf").read_bytes()
    rng = np.random.default_rng(3)
    path = tmp_path / "damaged.gguf"
    n_refused = 0
    for trial in range(60):
        damaged = bytearray(data)
        if trial % 3 == 0:
            del damaged[int(rng.integers(len(data))) :]
        else:
            for _ in range(4):
                place = int(rng.integers(1200 if trial % 3 == 1 else len(data)))
                damaged[place] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            read_heads(path)
        except ModelFileError:
            n_refused += 1
    assert n_refused >= 20


@pytest.mark.parametrize(
    "change",
    [
        {"scale": float("nan")},
        {"bias": np.full(96, np.inf, np.float32)},
        {"tokens": np.arange(40, dtype=np.int32)[::-1].copy()},
        {"tokens": np.arange(60, 100, dtype=np.int32)},
        {"n_embd": 32},
    ],
)
def test_parts_that_do_not_go_together_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    write_heads(tmp_path / "h.gguf", replace(some_weights(), **change))  # type: ignore[arg-type]
    with pytest.raises(ModelFileError, match="damaged decoder heads"):
        read_heads(tmp_path / "h.gguf")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TinyConfig(tokenizer="spm"), "heads.gguf: made for t.gguf, not for other.gguf"),
        (TinyConfig(architecture="mamba"), "recurrent state"),
    ],
)
def test_heads_of_another_model_are_refused(
    folder: Path, tmp_path: Path, config: TinyConfig, said: str
) -> None:
    write_tiny_model(tmp_path / "other.gguf", config)
    with pytest.raises(PairError, match=said):
        loaded(tmp_path, "other", str(folder / "heads"))


# --- drafting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grammar", [None, Grammar("gbnf", 'root ::= ("ab" [c-h] "---" [a-h]){12}')]
)
def test_the_loop_keeps_the_hidden_state_of_the_last_decoded_token(
    folder: Path, grammar: Grammar | None
) -> None:
    """After each round it is the state that a decode of the text alone gives."""
    options: dict[str, Any] = {"sampler": SamplerOptions(), "n_tokens": 40, "grammar": grammar}
    with loaded(folder, "t", "heads", **options) as speculative:
        prompt = speculative.prompts.of_text(PROMPT)
        with speculative.contexts(512) as (target, _), speculative.contexts(512) as (alone, _):
            loop = AnswerLoop(target, time.perf_counter)
            generation = DrafterFactory(speculative).new_answer(prompt, 512, (), 0)
            read_prompt(loop, generation)
            last = generation.hidden_states
            assert isinstance(last, LastHiddenState)
            n_seen = set()
            while not generation.is_finished:
                loop.round([generation])
                found = last.last
                assert found is not None
                n_read, state = found
                n_seen.add(len(generation.tokens) - n_read)
                alone.remove(0)
                batch = Batch()
                for position, token in enumerate(generation.tokens[:n_read]):
                    batch.add(token, position, (0,), position == n_read - 1)
                alone.decode(batch.part(0, n_read - 1))
                _, hidden = alone.decode_hidden(batch.part(n_read - 1, n_read))
                np.testing.assert_allclose(state, hidden[0], rtol=1e-4, atol=1e-4)
            assert generation.stats.n_drafted > 0
            assert n_seen == {1} if grammar is None else max(n_seen) > 3


# --- training -----------------------------------------------------------------------------------


def test_trained_heads_agree_more_than_the_linear_map_and_than_chance(folder: Path) -> None:
    with opened(folder / "t.gguf") as target:
        written(target, folder / "text", prompts())
        made = trained(target, folder / "text", folder / "heads.gguf")
    assert made is not None
    assert sum(made.after) >= sum(made.before)
    assert made.after[0] > 0.2
