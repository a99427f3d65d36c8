"""Tiny models with MTP layers that predict nearly what the model does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.model_files import copy_metadata, write_file
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.file import write_and_close

#: `glm4moe` attends, in dense layers; `qwen35` keeps a recurrent state in every other layer;
#: `mimo2` has a sliding window and several MTP layers, and gives hidden states only for rows that
#: want logits.
MtpArchitecture: TypeAlias = Literal["glm4moe", "qwen35", "mimo2"]
_BASES: dict[MtpArchitecture, Any] = {"glm4moe": "qwen2", "qwen35": "qwen35", "mimo2": "llama"}
_WINDOW = 24

Values: TypeAlias = npt.NDArray[np.float32]


def write_mtp_model(
    path: Path,
    architecture: MtpArchitecture = "glm4moe",
    *,
    of_state: float = 0.05,
    keep_layer: bool = True,
    **other: Any,
) -> Path:
    """Write a model with an MTP layer like the model's last one, or (`mimo2`) with three.

    The input of a layer is the token, plus `of_state` times the hidden state before it: with more
    of it, the layer agrees with the model less often. Without `keep_layer`, the file lacks the
    layer that its metadata announce. `other` are fields of `TinyConfig`.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    n_layer = 2 if architecture == "qwen35" else 1
    other = {"logit_scale": 6.0, "n_ctx_train": 1024, **other}
    config = TinyConfig(architecture=_BASES[architecture], n_layer=n_layer, **other)
    base = GGUFReader(write_tiny_model(path.with_suffix(".base"), config))
    writer = GGUFWriter(path, architecture)
    skipped = ("GGUF.", "general.architecture")
    for key, field in base.fields.items():
        if key.startswith(skipped) or key.endswith(".block_count"):
            continue
        name = key.replace(f"{config.architecture}.", f"{architecture}.", 1)
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    n_mtp = 3 if architecture == "mimo2" else 1
    writer.add_uint32(f"{architecture}.block_count", n_layer + n_mtp)
    writer.add_uint32(f"{architecture}.nextn_predict_layers", n_mtp)
    tensors = {each.name: np.array(each.data, np.float32) for each in base.tensors}
    tensors |= _mtp_layer(config, architecture, tensors, of_state, n_mtp) if keep_layer else {}
    if architecture == "glm4moe":
        _add_experts(writer, config, tensors, keep_layer=keep_layer)
    if architecture == "mimo2":
        head, windows = config.n_embd // config.n_head, [False] * n_layer + [True] * n_mtp
        numbers = {"key_length": head, "value_length": head, "sliding_window": _WINDOW}
        for key, number in numbers.items():
            writer.add_uint32(f"mimo2.attention.{key}", number)
        writer.add_array("mimo2.attention.sliding_window_pattern", windows)
        writer.add_uint32("mimo2.expert_feed_forward_length", 0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    write_and_close(writer)
    return path


def split_mtp_model(file: Path, target: Path, layers: Path) -> None:
    """Split a file into the model without its MTP layers, and the layers alone.

    The layers are written as by llama.cpp's converter with `--mtp`: with the metadata of the
    complete model, and with the tensors that they share with it.
    """
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    count, n_mtp = (f"{architecture}.{key}" for key in ("block_count", "nextn_predict_layers"))
    n_layers = reader.fields[n_mtp].contents()
    n_trunk = reader.fields[count].contents() - n_layers

    def write(path: Path, changed: dict[str, Any], keep: Callable[[int | None], bool]) -> None:
        writer = GGUFWriter(path, architecture)
        copy_metadata(reader, writer, changed=changed)
        kept = (each for each in reader.tensors if keep(_layer_of(each.name)))
        write_file(writer, {each.name: (each.data, each.tensor_type) for each in kept})

    fewer = {
        key: values[:n_trunk]
        for key, field in reader.fields.items()
        if isinstance(values := field.contents(), list) and len(values) == n_trunk + n_layers
    }
    write(
        target, {count: n_trunk, n_mtp: 0, **fewer}, lambda layer: layer is None or layer < n_trunk
    )
    write(layers, {}, lambda layer: layer is None or layer >= n_trunk)


def _layer_of(tensor: str) -> int | None:
    found = re.match(r"blk\.(\d+)\.", tensor)
    return int(found[1]) if found else None


def _mtp_layer(
    config: TinyConfig,
    architecture: MtpArchitecture,
    tensors: dict[str, Values],
    of_state: float,
    n_mtp: int,
) -> dict[str, Values]:
    """The tensors of the MTP layers: the last layer's, after a projection of token and state."""
    n_embd, last = config.n_embd, config.n_layer - 1
    rng = np.random.default_rng(config.seed + 1)
    found: dict[str, Values] = {}
    for layer in range(config.n_layer, config.n_layer + n_mtp):
        for name, values in tensors.items():
            if name.startswith(f"blk.{last}."):
                found[name.replace(f"blk.{last}.", f"blk.{layer}.")] = values
        if architecture == "mimo2":
            parts = [found.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
        mix = rng.standard_normal((n_embd, n_embd)) * of_state / np.sqrt(n_embd)
        projection = np.concatenate([np.eye(n_embd), mix], axis=1)
        found[f"blk.{layer}.nextn.eh_proj.weight"] = projection.astype(np.float32)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            found[f"blk.{layer}.nextn.{name}.weight"] = np.ones(n_embd, np.float32)
    return found


def _add_experts(
    writer: Any, config: TinyConfig, tensors: dict[str, Values], *, keep_layer: bool
) -> None:
    """Give a GLM-like model a single expert: the feed-forward part of its MTP layer."""
    head = config.n_embd // config.n_head
    for key, value in {
        "attention.key_length": head,
        "attention.value_length": head,
        "expert_count": 1,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "expert_feed_forward_length": config.n_ff,
        "leading_dense_block_count": config.n_layer,
        "expert_gating_func": 2,
    }.items():
        writer.add_uint32(f"glm4moe.{key}", value)
    writer.add_bool("glm4moe.expert_weights_norm", True)
    writer.add_float32("glm4moe.expert_weights_scale", 1.0)
    for name in list(tensors):
        if ".ffn_norm." in name:
            tensors[name.replace("ffn_norm", "post_attention_norm")] = tensors.pop(name)
    if not keep_layer:
        return
    layer = f"blk.{config.n_layer}"
    for part in ("gate", "up", "down"):
        values = tensors.pop(f"{layer}.ffn_{part}.weight")
        tensors[f"{layer}.ffn_{part}_exps.weight"] = values[None]
        tensors[f"{layer}.ffn_{part}_shexp.weight"] = np.zeros_like(values)
    tensors[f"{layer}.ffn_gate_inp.weight"] = np.zeros((1, config.n_embd), np.float32)
    tensors[f"{layer}.exp_probs_b.bias"] = np.zeros(1, np.float32)
