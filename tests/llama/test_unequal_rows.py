"""Rows that depend on their batch: the operator is found, and known exceptions have a name."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from specgen.llama import LlamaModel
from specgen.llama.kernels import Kernels
from specgen.llama.model import row_exception
from specgen.llama.unequal_rows import UnequalOperator, find_unequal_operator, repeated
from specgen.options import ContextOptions
from tests.tiny import TinyConfig, write_tiny_model

TOKENS = repeated([int(token) for token in np.random.default_rng(0).integers(3, 250, 12)])


def found(path: Path, options: ContextOptions) -> UnequalOperator | None:
    model = LlamaModel(path)
    try:
        return find_unequal_operator(model, options, TOKENS)
    finally:
        model.close()


def test_the_first_operator_with_unequal_rows_is_found(kernels: Kernels, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", TinyConfig(n_embd=128))
    options = ContextOptions(n_threads=2, flash_attention="off")
    assert found(path, options) is None
    kernels.enable(products=True, attention=False)
    operator = found(path, options)
    assert operator is not None
    assert operator.operator == "MUL_MAT", "llama.cpp adds up K times Q in another order"
    assert operator.tensor == "kq-0"
    kernels.enable(products=False, attention=False)
    operator = found(path, options)
    assert str(operator) == "MUL_MAT of blk.0.attn_q.weight (Qcur-0, in a batch of 2)"


def test_too_few_tokens_are_an_error(tmp_path: Path) -> None:
    model = LlamaModel(write_tiny_model(tmp_path / "tiny.gguf", TinyConfig()))
    with pytest.raises(ValueError, match="3 tokens for batches of up to 33"):
        find_unequal_operator(model, ContextOptions(n_threads=1), TOKENS[:3])
    model.close()


def write(path: Path, tensors: dict[str, gguf.GGMLQuantizationType]) -> Path:
    """A file of matrices of these types, 32 x 256 zeros each."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, kind in tensors.items():
        block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(name, np.zeros((32, 256 // block * n_bytes), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_types_that_llama_cpp_multiplies_otherwise_from_8_rows_on(tmp_path: Path) -> None:
    types = gguf.GGMLQuantizationType
    plain = write(tmp_path / "a-00001-of-00002.gguf", {"blk.0.attn_q.weight": types.Q4_K})
    assert row_exception(plain, "llama") == ""
    other = {"blk.1.attn_q.weight": types.IQ3_S, "blk.1.attn_k.weight": types.IQ2_XS}
    write(tmp_path / "a-00002-of-00002.gguf", other)
    assert "iq2_xs and iq3_s weights" in row_exception(plain, "llama"), "of all shards"
    embeddings = write(tmp_path / "b.gguf", {"token_embd.weight": types.IQ3_S})
    assert row_exception(embeddings, "llama") == ""
    assert row_exception(tmp_path / "missing.gguf", "llama") == ""


@pytest.mark.parametrize("architecture", ["minimax-01", "chameleon"])
def test_architectures_that_compute_batches_otherwise(tmp_path: Path, architecture: str) -> None:
    assert "batch" in row_exception(tmp_path / "any.gguf", architecture)


def test_a_model_that_is_an_exception_has_no_equal_rows(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.computes_products
    model = LlamaModel(write_tiny_model(tmp_path / "tiny.gguf", TinyConfig()))
    monkeypatch.setattr(LlamaModel, "row_exception", "a reason")
    assert (model.has_kernels, model.has_equal_rows) == (True, False)
    monkeypatch.undo()
    assert (model.has_kernels, model.has_equal_rows) == (True, True)
    model.close()
