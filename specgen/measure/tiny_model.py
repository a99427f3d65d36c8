"""A tiny GGUF model with random weights, for the checks of `specgen doctor`.

Its text makes no sense, but llama.cpp loads and decodes it like any other, and its matrices are large enough for
every kernel.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

TensorType: TypeAlias = Literal["f32", "q8_0", "q4_0"]

_N_LAYER, _N_EMBD, _N_HEAD, _N_FF, _N_CTX = 2, 256, 4, 512, 4096
#: GGUF's token types.
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]


def write_tiny_model(
    path: Path, tensor_type: TensorType = "q8_0", *, rounded_to: TensorType | None = None
) -> Path:
    """Write a Llama model whose tokens are bytes, and return its path. `rounded_to` rounds the matrices to that
    type first: a model of the very same numbers that other kernels compute."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, "llama")
    writer.add_quantization_version(2)
    writer.add_vocab_size(len(_TOKENS))
    writer.add_context_length(_N_CTX)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(_N_LAYER)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_N_EMBD // _N_HEAD)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _NORMAL])
    writer.add_token_scores([0.0] * len(_TOKENS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(1)

    def add(name: str, n_out: int, n_in: int, scale: float = 1.0) -> None:
        weights = rng.standard_normal((n_out, n_in), np.float32) * np.float32(scale)
        if rounded_to is not None:
            coarse = GGMLQuantizationType[rounded_to.upper()]
            weights = quants.dequantize(quants.quantize(weights, coarse), coarse)
        kind = GGMLQuantizationType[tensor_type.upper()]
        writer.add_tensor(f"{name}.weight", quants.quantize(weights, kind), raw_dtype=kind)

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_N_EMBD, np.float32))

    unit = 1.0 / math.sqrt(_N_EMBD)
    add("token_embd", len(_TOKENS), _N_EMBD)
    add("output", len(_TOKENS), _N_EMBD, 3.0 * unit)
    add_norm("output_norm")
    for layer in range(_N_LAYER):
        prefix = f"blk.{layer}"
        add_norm(f"{prefix}.attn_norm")
        add_norm(f"{prefix}.ffn_norm")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{prefix}.{name}", _N_EMBD, _N_EMBD, 1.4 * unit)
        add(f"{prefix}.ffn_gate", _N_FF, _N_EMBD, unit)
        add(f"{prefix}.ffn_up", _N_FF, _N_EMBD, unit)
        add(f"{prefix}.ffn_down", _N_EMBD, _N_FF, 1.5 / math.sqrt(_N_FF))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
