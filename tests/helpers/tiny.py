"""Tiny models that say the same in other tokens, or are damaged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specgen.llama import LlamaModel, LlamaVocabulary
from specgen.train.gguf_weights import initial_changes, read_weights, write_weights
from tests.tiny import TinyConfig, TinyVocabulary, tiny_vocabulary, write_tiny_model
from tests.tiny.vocabulary import byte_characters


@contextlib.contextmanager
def vocabulary_of(folder: Path, **config: Any) -> Iterator[LlamaVocabulary]:
    """The vocabulary of a tiny model with these values of its `TinyConfig`."""
    path = write_tiny_model(folder / "tiny.gguf", TinyConfig(n_embd=32, n_layer=1, **config))
    model = LlamaModel(path, n_gpu_layers=0)
    yield model.vocabulary
    model.close()


def write_respelled_model(path: Path, config: TinyConfig) -> Path:
    """Write a model like that of `config`, but with the other tokenizer.

    Tokens with the same bytes have the same weights, and tokens that only this model has are
    unlikely. The two models agree about texts that both tokenize in the same way.
    """
    from gguf import GGUFReader

    other = replace(config, tokenizer="spm" if config.tokenizer == "bpe" else "bpe")
    like = write_tiny_model(path.with_suffix(".like"), config)
    write_tiny_model(path, other)
    counterparts = _counterparts(tiny_vocabulary(other), tiny_vocabulary(config))
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(like).tensors}
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name not in {"token_embd.weight", "output.weight"}:
            continue
        rows: npt.NDArray[np.float32] = tensor.data
        if tensor.name == "output.weight":
            rows[:] = 0.0
        for token, counterpart in counterparts.items():
            rows[token] = tensors[tensor.name][counterpart]
    like.unlink()
    return path


def with_a_token_twice(path: Path) -> Path:
    """Write a tiny model with a duplicate token, on which llama.cpp fails an assertion."""
    data = write_tiny_model(path, TinyConfig()).read_bytes()

    def entry(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    one, other = entry("Ġfor".encode()), entry("Ġthe".encode())  # as byte-level BPE spells spaces
    assert data.count(one) == data.count(other) == 1
    path.write_bytes(data.replace(one, other))
    return path


def _counterparts(vocabulary: TinyVocabulary, other: TinyVocabulary) -> dict[int, int]:
    ends = [(vocabulary.bos, other.bos), (vocabulary.eos, other.eos), (vocabulary.eot, other.eot)]
    known = {_bytes(other, token): token for token in range(other.n_used)}
    # Of a byte and a character that stand for the same, the later one is the tokenizer's choice.
    mine = {_bytes(vocabulary, token): token for token in range(vocabulary.n_used)}
    found = {token: known[data] for data, token in mine.items() if data in known}
    return {**found, **dict(ends)}


def _bytes(vocabulary: TinyVocabulary, token: int) -> bytes:
    text = vocabulary.tokens[token]
    if text.startswith("<0x"):
        return bytes((int(text[3:5], 16),))
    if text.startswith("<"):
        return text.encode() if len(text) > 1 else b"<"
    if not vocabulary.merges:
        return text.replace("▁", " ").encode()
    return bytes(_BYTES[character] for character in text)


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def write_with_other_scales(model: Path, path: Path, size: float, seed: int = 0) -> Path:
    """Write a copy of a model with the blocks of its layers' matrices multiplied by factors of 1 -
    `size` to 1 + `size`: training their scales can undo it.
    """
    weights = read_weights(model)
    n_layer = weights.hyperparameters.n_layer
    names = [name for name in weights.tensors if ".attn_" in name or ".ffn_" in name]
    stacked = {
        name.removeprefix("blk.0."): np.stack(
            [weights.tensors[name.replace(".0.", f".{layer}.", 1)] for layer in range(n_layer)]
        )
        for name in names
        if name.startswith("blk.0.") and weights.tensors[name].ndim == 2
    }
    types = {name: [weights.types[f"blk.0.{name}"]] for name in stacked}
    rng = np.random.default_rng(seed)
    changes = {
        name: rng.uniform(-size, size, values.shape).astype(np.float32)
        for name, values in initial_changes(stacked, types).items()
    }
    write_weights(model, changes, path)
    return path


def write_large_model(path: Path, n_bytes: int) -> Path:
    """Write a model whose weights are a hole in its file: it can be described, and not loaded."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(32)
    writer.add_embedding_length(4096)
    writer.add_feed_forward_length(11008)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_context_length(8192)
    writer.add_token_list(["a", "b"])
    shape = (n_bytes // (4 * 4096), 4096)
    writer.add_tensor_info("blk.0.ffn_up.weight", shape, np.dtype(np.float32), n_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + n_bytes + 4096)
    return path
