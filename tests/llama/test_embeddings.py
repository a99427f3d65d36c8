"""Embeddings: they are the same as llama.cpp's, whatever was embedded before and in whichever
batches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama

from specgen.errors import ModelFileError
from specgen.llama import LlamaModel
from specgen.llama.embeddings import Embedder, unit
from tests.helpers.common import EXACT
from tests.tiny import TinyConfig, write_tiny_model

TEXTS = ("the cat is in the house", "something else altogether, and longer than the other", "x")
N_CTX = 64
BERT = TinyConfig(architecture="bert", n_ctx_train=N_CTX)
#: What to write, and llama.cpp's number of the pooling; 0 is none.
KINDS: dict[str, tuple[TinyConfig, int]] = {
    "encoder": (BERT, 1),
    "without pooling": (BERT, 0),
    "last": (TinyConfig(architecture="qwen3"), 3),
    "first": (BERT, 2),
    "mean": (TinyConfig(architecture="llama", tensor_type="q8_0"), 1),
}


def write(folder: Path, kind: str) -> Path:
    config, pooling = KINDS[kind]
    key, path = f"{config.architecture}.pooling_type", folder / f"{kind}.gguf"
    if config.architecture != "bert":
        return write_tiny_model(path, config, metadata={key: pooling})
    data = write_tiny_model(path, config).read_bytes()  # which has the mean
    before, after = (key.encode() + struct.pack("<II", 4, value) for value in (1, pooling))
    path.write_bytes(data.replace(before, after))
    return path


@pytest.fixture(params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path, request.param)


@pytest.fixture
def embedder(file: Path) -> Iterator[Embedder]:
    with closing(Embedder(file, EXACT, N_CTX)) as found:
        yield found


def test_vectors_are_those_of_llama_cpp(embedder: Embedder, file: Path) -> None:
    same: dict[str, Any] = {
        "type_k": 0,
        "type_v": 0,
        "flash_attn": False,
        "n_threads": 1,
        "verbose": False,
    }
    with closing(Llama(str(file), embedding=True, n_ctx=N_CTX, **same)) as other:
        for text in TEXTS:
            vector = np.asarray(other.embed(text), np.float32)
            expected = unit(vector if vector.ndim == 1 else vector.mean(axis=0))
            found = embedder.embed(embedder.tokenize(text))
            np.testing.assert_allclose(found, expected, atol=1e-5)
            assert np.linalg.norm(found) == pytest.approx(1.0)


def test_a_texts_embedding_is_the_same_in_a_batch_as_alone(embedder: Embedder) -> None:
    texts = [embedder.tokenize(text) for text in TEXTS]
    vectors = [embedder.embed(tokens) for tokens in texts]
    assert len({vector.tobytes() for vector in vectors}) == len(texts)
    for tokens, vector in reversed([*zip(texts, vectors, strict=True)]):
        np.testing.assert_array_equal(embedder.embed(tokens), vector)


def test_pieces_of_a_text_give_the_vector_of_the_whole(embedder: Embedder, file: Path) -> None:
    tokens = embedder.tokenize(TEXTS[1])
    with closing(Embedder(file, replace(EXACT, n_batch=3), N_CTX)) as in_pieces:
        np.testing.assert_allclose(in_pieces.embed(tokens), embedder.embed(tokens), atol=1e-5)


def test_names_of_control_tokens_are_text(tmp_path: Path) -> None:
    with closing(Embedder(write(tmp_path, "last"), EXACT, N_CTX)) as embedder:
        (token,) = embedder.model.vocabulary.tokenize(
            "<|im_start|>", add_special=False, parse_special=True
        )
        assert token not in embedder.tokenize("<|im_start|>")


def test_an_embedding_model_does_not_generate(file: Path) -> None:
    with pytest.raises(ModelFileError, match="an embedding model") as refused:
        LlamaModel(file)
    assert "/v1/embeddings" in (refused.value.hint or "")


@pytest.mark.parametrize("pooling", [0, 4, 7])
def test_generating_and_ranking_models_do_not_embed(tmp_path: Path, pooling: int) -> None:
    file = write_tiny_model(
        tmp_path / "other.gguf", TinyConfig(), metadata={"llama.pooling_type": pooling}
    )
    with pytest.raises(ModelFileError, match="not an embedding model"):
        Embedder(file, EXACT, N_CTX)
