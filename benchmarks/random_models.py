"""Write a model with random weights and the shape of a real one, to measure the cost of batches.

    python benchmarks/random_models.py SHAPE TOKENIZER.gguf OUT.gguf [--layers 4] [--type Q4_K]

SHAPE is a name in `SHAPES`: a dense model, or a mixture of experts with the sizes of a popular
model. The weights are random bytes with plausible scales; the vocabulary is copied from
TOKENIZER.gguf. The text makes no sense, but a batch costs as much as with the real weights. There
is one difference: a random router spreads the tokens of a batch over nearly all experts, which is
the most expensive case.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

N_KV_HEADS = 4
HEAD_SIZE = 128


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and the types of its weights."""

    n_embd: int
    #: The feed-forward size, of each expert if there are several.
    n_ff: int
    attention_type: str = "Q4_K"
    #: The type of the feed-forward matrices gate and up.
    ff_type: str = "Q4_K"
    #: The type of the feed-forward matrix down.
    down_type: str = "Q4_K"
    #: 0 for a dense model.
    n_experts: int = 0
    #: The experts that are used for each token.
    n_used: int = 0
    #: The feed-forward size of the shared expert; 0 without one.
    n_ff_shared: int = 0
    n_heads: int = 32


SHAPES = {
    "dense": Shape(1536, 8960),
    "qwen3-30b-a3b": Shape(2048, 768, n_experts=128, n_used=8),
    "qwen3-30b-a3b-mixed": Shape(2048, 768, "Q6_K", "Q5_K", "Q6_K", n_experts=128, n_used=8),
    "gpt-oss-20b": Shape(2880, 2880, "Q8_0", "MXFP4", "MXFP4", n_experts=32, n_used=4),
    "qwen1.5-moe-a2.7b": Shape(
        2048, 1408, "Q4_K", "Q4_K", "Q8_0", n_experts=64, n_used=6, n_ff_shared=2816, n_heads=16
    ),
}
#: The bytes of a block that are its scales (float16), by type.
_SCALES: dict[str, slice] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), slice(0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), slice(0, 4)),
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q6_K": slice(208, 210),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--type", help="the type of all matrices (default: the shape's types)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.type:
        shape = replace(
            shape, attention_type=arguments.type, ff_type=arguments.type, down_type=arguments.type
        )
    write(shape, arguments.layers, GGUFReader(arguments.tokenizer), arguments.out)
    return 0


def write(shape: Shape, n_layers: int, tokenizer: GGUFReader, out: Path) -> None:
    """Write the model one tensor at a time, because it may be larger than memory."""
    architecture = "qwen3"
    if shape.n_ff_shared:
        architecture = "qwen2moe"
    elif shape.n_experts:
        architecture = "qwen3moe"
    writer = GGUFWriter(out, architecture)
    for key, field in tokenizer.fields.items():
        if key.startswith("tokenizer."):
            kind = field.types[0]
            sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub_type)
    writer.add_block_count(n_layers)
    writer.add_context_length(65536)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if shape.n_experts:
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    if shape.n_ff_shared:
        writer.add_expert_shared_feed_forward_length(shape.n_ff_shared)
    sizes = tensors(shape, n_layers, len(tokenizer.fields["tokenizer.ggml.tokens"].data))
    for name, (dimensions, type_name) in sizes.items():
        raw = GGMLQuantizationType[type_name]
        block, n_bytes = GGML_QUANT_SIZES[raw]
        stored = (*dimensions[:-1], dimensions[-1] // block * n_bytes)
        total_bytes = int(np.prod(stored, dtype=np.int64))
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), total_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, (dimensions, type_name) in sizes.items():
        writer.write_tensor_data(weights(name, dimensions, type_name, random))
    writer.close()


def tensors(shape: Shape, n_layers: int, n_vocab: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The dimensions (rows first) and the type of each tensor, by name."""
    n_embd = shape.n_embd
    attention = shape.attention_type
    sizes: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((n_vocab, n_embd), attention),
        "output_norm.weight": ((n_embd,), "F32"),
        "output.weight": ((n_vocab, n_embd), attention),
    }

    def add_feed_forward(prefix: str, suffix: str, n_ff: int, stack: tuple[int, ...] = ()) -> None:
        for name in ("gate", "up"):
            sizes[f"{prefix}.ffn_{name}{suffix}.weight"] = ((*stack, n_ff, n_embd), shape.ff_type)
        sizes[f"{prefix}.ffn_down{suffix}.weight"] = ((*stack, n_embd, n_ff), shape.down_type)

    for layer in range(n_layers):
        prefix = f"blk.{layer}"
        n_queries = shape.n_heads * HEAD_SIZE
        n_keys = N_KV_HEADS * HEAD_SIZE
        rows = {"q": n_queries, "k": n_keys, "v": n_keys}
        for name in ("attn_norm", "ffn_norm"):
            sizes[f"{prefix}.{name}.weight"] = ((n_embd,), "F32")
        for name, n_rows in rows.items():
            sizes[f"{prefix}.attn_{name}.weight"] = ((n_rows, n_embd), attention)
            if shape.n_ff_shared:  # Qwen2 has biases where Qwen3 has norms
                sizes[f"{prefix}.attn_{name}.bias"] = ((n_rows,), "F32")
            elif name != "v":
                sizes[f"{prefix}.attn_{name}_norm.weight"] = ((HEAD_SIZE,), "F32")
        sizes[f"{prefix}.attn_output.weight"] = ((n_embd, n_queries), attention)
        if not shape.n_experts:
            add_feed_forward(prefix, "", shape.n_ff)
            continue
        sizes[f"{prefix}.ffn_gate_inp.weight"] = ((shape.n_experts, n_embd), "F32")
        add_feed_forward(prefix, "_exps", shape.n_ff, (shape.n_experts,))
        if shape.n_ff_shared:
            sizes[f"{prefix}.ffn_gate_inp_shexp.weight"] = ((n_embd,), "F32")
            add_feed_forward(prefix, "_shexp", shape.n_ff_shared)
    return sizes


def weights(
    name: str, dimensions: tuple[int, ...], kind: str, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Return random bytes for a tensor: uint8[..., bytes of a row]."""
    if "norm" in name:
        return np.ones(dimensions, np.float32).view(np.uint8)
    if kind in {"F32", "F16", "BF16"}:
        values = 0.02 * random.standard_normal(dimensions, np.float32)
        if kind == "BF16":
            return np.right_shift(values.view(np.uint32), 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float32 if kind == "F32" else np.float16).view(np.uint8)
    block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(
        0, 256, (int(np.prod(dimensions[:-1])), dimensions[-1] // block, n_bytes), np.uint8
    )
    if kind == "MXFP4":
        blocks[:, :, 0] = 118  # the exponent of a scale of 2^-9
    else:
        # Small enough for any codes and sub-scales. Minima get the same value as scales.
        scale = np.float16(0.5 / dimensions[-1] ** 0.5 / (1000 if block == 256 else 20))
        scale_bytes = _SCALES[kind]
        n_scales = (scale_bytes.stop - scale_bytes.start) // 2
        blocks[:, :, scale_bytes] = np.full(n_scales, scale, np.float16).view(np.uint8)
    return blocks.reshape(*dimensions[:-1], -1)


if __name__ == "__main__":
    sys.exit(main())
