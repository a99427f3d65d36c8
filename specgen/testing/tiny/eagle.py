"""Tiny EAGLE-3 drafts with random weights, for a target of `TinyConfig`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specgen.testing.tiny.config import TinyConfig
from specgen.testing.tiny.file import add_tensor, add_tokenizer
from specgen.testing.tiny.vocabulary import tiny_vocabulary
from specgen.testing.tiny.weights import Random, TinyWeights


@dataclass(frozen=True, slots=True)
class TinyEagle:
    """What to write. Its drafts agree with the target by chance only."""

    #: The target's layers whose inputs it reads.
    layers: tuple[int, ...] = (0, 1, 1)
    #: The sizes of its hidden states, and of its target's.
    n_embd: int = 64
    n_target: int = 64
    n_head: int = 2
    #: The tokens that it can draft; None means all.
    drafted: Sequence[int] | None = None
    #: Whether the file has embeddings and an output matrix; else it takes the target's.
    has_embeddings: bool = True
    has_output: bool = True
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    seed: int = 100


def write_tiny_eagle(
    path: str | os.PathLike[str], target: TinyConfig, eagle: TinyEagle | None = None
) -> Path:
    """Write a draft for a target to `path`, and return it; a file of that name is replaced."""
    from gguf import GGMLQuantizationType, GGUFWriter

    eagle = eagle or TinyEagle()
    vocabulary = tiny_vocabulary(target)
    writer = GGUFWriter(Path(path), "eagle3")
    writer.add_vocab_size(len(vocabulary))
    writer.add_context_length(target.n_ctx_train)
    writer.add_embedding_length(eagle.n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * eagle.n_embd)
    writer.add_head_count(eagle.n_head)
    writer.add_head_count_kv(eagle.n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(eagle.n_embd // eagle.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_array("eagle3.target_layers", eagle.layers)
    writer.add_uint32("eagle3.target_hidden_size", eagle.n_target)
    writer.add_bool("eagle3.norm_before_residual", eagle.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", eagle.norm_before_fc)
    add_tokenizer(writer, target, vocabulary)
    for name, weights in _tensors(target, eagle, len(vocabulary)).items():
        add_tensor(writer, target, name, weights)
    if eagle.drafted is not None:
        writer.add_tensor(
            "d2t", np.array(eagle.drafted, np.int64), raw_dtype=GGMLQuantizationType.I64
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _tensors(target: TinyConfig, eagle: TinyEagle, n_vocab: int) -> dict[str, TinyWeights]:
    random = Random(dataclasses.replace(target, seed=eagle.seed, noise=0.0))
    n_embd, n_read = eagle.n_embd, len(eagle.layers) * eagle.n_target
    n_drafted = n_vocab if eagle.drafted is None else len(eagle.drafted)
    unit = 1.0 / math.sqrt(n_embd)
    found = {
        "fc.weight": random("fc", (n_embd, n_read), 1.0 / math.sqrt(n_read)),
        "output_norm.weight": np.ones(n_embd, np.float32),
    }
    if eagle.norm_before_fc:
        found["enc.output_norm.weight"] = np.ones(n_read, np.float32)
    if eagle.has_output:
        found["output.weight"] = random("output", (n_drafted, n_embd), target.logit_scale * unit)
    if eagle.has_embeddings:
        found["token_embd.weight"] = random("token_embd", (n_vocab, n_embd), 1.0)
    found |= random.matrices(
        "blk.0",
        {
            "attn_q": ((n_embd, 2 * n_embd), unit),
            "attn_k": ((n_embd, 2 * n_embd), unit),
            "attn_v": ((n_embd, 2 * n_embd), unit),
            "attn_output": ((n_embd, n_embd), unit),
            "ffn_gate": ((2 * n_embd, n_embd), unit),
            "ffn_up": ((2 * n_embd, n_embd), unit),
            "ffn_down": ((n_embd, 2 * n_embd), unit),
        },
    )
    for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
        found[f"blk.0.{name}.weight"] = np.ones(n_embd, np.float32)
    return found


__all__ = ["TinyEagle", "write_tiny_eagle"]
