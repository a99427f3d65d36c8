"""Tiny EAGLE-3, DFlash and DSpark drafts with random weights, for a target of `TinyConfig`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.tiny.config import TinyConfig
from tests.tiny.file import add_tensor, add_tokenizer, write_and_close
from tests.tiny.vocabulary import tiny_vocabulary
from tests.tiny.weights import Random, TinyWeights

if TYPE_CHECKING:
    from gguf import GGUFWriter


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


@dataclass(frozen=True, slots=True)
class TinyDflash:
    """What to write. Its drafts agree with the target by chance only. Fields that `TinyEagle` has
    mean the same.
    """

    layers: tuple[int, ...] = (0, 1)
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 2
    n_block: int = 8
    drafted: Sequence[int] | None = None
    has_embeddings: bool = True
    has_output: bool = True
    #: The rank of the matrices by which the token before biases a prediction; 0 is no bias
    #: (DFlash).
    rank: int = 0
    #: Whether a draft with such a bias predicts from the last token, too.
    from_anchor: bool = True
    #: The tokens that a layer sees; 0 is all.
    sliding_window: int = 0
    #: Whether masks see only those before them.
    causal: bool = False
    #: Whether positions are turned as for a target that reads images (M-RoPE).
    has_sections: bool = False
    seed: int = 100


def write_tiny_eagle(
    path: str | os.PathLike[str], target: TinyConfig, eagle: TinyEagle | None = None
) -> Path:
    eagle = eagle or TinyEagle()
    writer = _writer(path, "eagle3", target, eagle)
    writer.add_block_count(1)
    writer.add_uint32("eagle3.target_hidden_size", eagle.n_target)
    writer.add_bool("eagle3.norm_before_residual", eagle.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", eagle.norm_before_fc)
    n_read = len(eagle.layers) * eagle.n_target
    found = _shared_tensors(target, eagle, n_read)
    if eagle.norm_before_fc:
        found["enc.output_norm.weight"] = np.ones(n_read, np.float32)
    found |= _layer(target, eagle, 0, 2 * eagle.n_embd)
    found["blk.0.attn_norm_2.weight"] = np.ones(eagle.n_embd, np.float32)
    return _finished(writer, path, target, eagle.drafted, found)


def write_tiny_dflash(
    path: str | os.PathLike[str], target: TinyConfig, dflash: TinyDflash | None = None
) -> Path:
    """Write a draft for a target to `path`, and return it; a file of that name is replaced. Its
    mask is the vocabulary's last token.
    """
    dflash = dflash or TinyDflash()
    writer = _writer(path, "dflash", target, dflash)
    n_vocab, n_head = len(tiny_vocabulary(target)), dflash.n_embd // dflash.n_head
    writer.add_block_count(dflash.n_layer)
    writer.add_uint32("dflash.block_size", dflash.n_block)
    writer.add_bool("dflash.sample_from_anchor", dflash.from_anchor)
    writer.add_bool("dflash.attention.causal", dflash.causal)
    writer.add_mask_token_id(n_vocab - 1)
    if dflash.has_sections:
        writer.add_rope_dimension_sections([n_head // 2, 0, 0, 0])
    if dflash.sliding_window:
        writer.add_sliding_window(dflash.sliding_window)
        windows = [layer % 2 == 0 for layer in range(dflash.n_layer)]
        writer.add_array("dflash.attention.sliding_window_pattern", windows)
    found = _shared_tensors(target, dflash, len(dflash.layers) * dflash.n_embd)
    found["enc.output_norm.weight"] = np.ones(dflash.n_embd, np.float32)
    for layer in range(dflash.n_layer):
        found |= _layer(target, dflash, layer, dflash.n_embd)
        for name in ("attn_q_norm", "attn_k_norm"):
            found[f"blk.{layer}.{name}.weight"] = np.full(n_head, 1.4, np.float32)
    if dflash.rank:
        random, n_drafted = _random(target, dflash.seed), len(dflash.drafted or range(n_vocab))
        for name, n_rows in (("markov_w1", n_vocab), ("markov_w2", n_drafted)):
            found[f"{name}.weight"] = random(name, (n_rows, dflash.rank), 1.0)
    return _finished(writer, path, target, dflash.drafted, found)


def _writer(
    path: str | os.PathLike[str], name: str, target: TinyConfig, draft: TinyEagle | TinyDflash
) -> GGUFWriter:
    from gguf import GGUFWriter

    vocabulary = tiny_vocabulary(target)
    writer = GGUFWriter(Path(path), name)
    writer.add_vocab_size(len(vocabulary))
    writer.add_context_length(target.n_ctx_train)
    writer.add_embedding_length(draft.n_embd)
    writer.add_feed_forward_length(2 * draft.n_embd)
    writer.add_head_count(draft.n_head)
    writer.add_head_count_kv(draft.n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(draft.n_embd // draft.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_array(f"{name}.target_layers", draft.layers)
    add_tokenizer(writer, target, vocabulary)
    return writer


def _finished(
    writer: GGUFWriter,
    path: str | os.PathLike[str],
    target: TinyConfig,
    drafted: Sequence[int] | None,
    found: dict[str, TinyWeights],
) -> Path:
    from gguf import GGMLQuantizationType as Type

    for name, weights in found.items():
        add_tensor(writer, target, name, weights)
    if drafted is not None:
        writer.add_tensor("d2t", np.array(drafted, np.int64), raw_dtype=Type.I64)
    write_and_close(writer)
    return Path(path)


def _random(target: TinyConfig, seed: int) -> Random:
    return Random(dataclasses.replace(target, seed=seed, noise=0.0))


def _shared_tensors(
    target: TinyConfig, draft: TinyEagle | TinyDflash, n_read: int
) -> dict[str, TinyWeights]:
    random, n_embd = _random(target, draft.seed), draft.n_embd
    n_vocab = len(tiny_vocabulary(target))
    n_drafted = n_vocab if draft.drafted is None else len(draft.drafted)
    found = {
        "fc.weight": random("fc", (n_embd, n_read), 1.0 / math.sqrt(n_read)),
        "output_norm.weight": np.ones(n_embd, np.float32),
    }
    if draft.has_output:
        deviation = target.logit_scale / math.sqrt(n_embd)
        found["output.weight"] = random("output", (n_drafted, n_embd), deviation)
    if draft.has_embeddings:
        found["token_embd.weight"] = random("token_embd", (n_vocab, n_embd), 1.0)
    return found


def _layer(
    target: TinyConfig, draft: TinyEagle | TinyDflash, layer: int, n_attended: int
) -> dict[str, TinyWeights]:
    n_embd, prefix = draft.n_embd, f"blk.{layer}"
    shapes = {f"attn_{part}": (n_embd, n_attended) for part in "qkv"}
    shapes |= {"attn_output": (n_embd, n_embd), "ffn_gate": (2 * n_embd, n_embd)}
    shapes |= {"ffn_up": (2 * n_embd, n_embd), "ffn_down": (n_embd, 2 * n_embd)}
    unit = 1.0 / math.sqrt(n_embd)
    found = _random(target, draft.seed).matrices(
        prefix, {name: (shape, unit) for name, shape in shapes.items()}
    )
    for name in ("attn_norm", "ffn_norm"):
        found[f"{prefix}.{name}.weight"] = np.ones(n_embd, np.float32)
    return found
