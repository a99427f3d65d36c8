"""Tiny Gemma 4 models, and assistants that draft for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.tiny.config import TinyConfig
from tests.tiny.file import add_tokenizer, write_and_close
from tests.tiny.vocabulary import tiny_vocabulary

Values = npt.NDArray[np.float32]
_N_EMBD, _N_HEAD, _N_FF, _WINDOW = 64, 2, 96, 24
#: The sizes of heads with and without a window.
_SIZES = {True: 16, False: 32}


def write_gemma4(path: Path, *, n_head_kv: int = 1, seed: int = 0) -> Path:
    """Write a Gemma 4 model of three layers, of which the last has no window."""
    return _write(path, "gemma4", [True, True, False], _N_EMBD, n_head_kv, seed)


def write_assistant(
    path: Path, *, n_target: int = _N_EMBD, n_head_kv: int = 1, seed: int = 0
) -> Path:
    """Write an assistant that knows three quarters of what its target computes from a token."""
    return _write(
        path, "gemma4-assistant", [True, False], _N_EMBD * 3 // 4, n_head_kv, seed, n_target
    )


def _write(
    path: Path,
    architecture: str,
    windows: list[bool],
    n_embd: int,
    n_head_kv: int,
    seed: int,
    n_target: int | None = None,
) -> Path:
    config = TinyConfig(logit_scale=6.0, seed=seed)
    vocabulary = tiny_vocabulary(config)
    writer = GGUFWriter(path, architecture)
    numbers = {
        "context_length": 1024,
        "embedding_length": n_embd,
        "block_count": len(windows),
        "feed_forward_length": _N_FF,
        "attention.head_count": _N_HEAD,
        "attention.head_count_kv": n_head_kv,
        "attention.sliding_window": _WINDOW,
        "embedding_length_per_layer_input": 0,
    }
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        numbers |= {key: _SIZES[False], f"{key}_swa": _SIZES[True]}
    if n_target is not None:
        numbers |= {"embedding_length_out": n_target, "nextn_predict_layers": len(windows)}
    for key, number in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", number)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array(f"{architecture}.attention.sliding_window_pattern", windows)
    add_tokenizer(writer, config, vocabulary)
    for name, values in _tensors(len(vocabulary), windows, n_embd, n_head_kv, seed, n_target):
        writer.add_tensor(name, values)
    write_and_close(writer)
    return path


def _tensors(
    n_vocab: int, windows: list[bool], n_embd: int, n_head_kv: int, seed: int, n_target: int | None
) -> list[tuple[str, Values]]:
    shared, rng = np.random.default_rng(seed), np.random.default_rng([seed, n_embd])
    # Both models have the same matrices from a token to logits; the assistant has the first
    # columns.
    embeddings = shared.standard_normal((n_vocab, _N_EMBD), np.float32)
    output = shared.standard_normal((n_vocab, _N_EMBD), np.float32)
    eighth, quarter = np.float32(1 / 8), np.float32(1 / 4)
    kept = np.eye(_N_EMBD, dtype=np.float32)[:n_embd]

    def drawn(rows: int, columns: int, scale: float = 1.0) -> Values:
        values = rng.standard_normal((rows, columns), np.float32)
        return values * np.float32(scale / columns**0.5)

    found: list[tuple[str, Values]] = [("output_norm.weight", np.ones(n_embd, np.float32))]
    if n_target is None:
        found += [("token_embd.weight", embeddings * eighth), ("output.weight", output * quarter)]
    else:
        before = np.zeros((n_embd, 2 * n_target), np.float32)
        before[:, :_N_EMBD] = kept[:, : 2 * n_target]
        before[:, n_target:] += drawn(n_embd, n_target, 0.2)
        found += [
            ("token_embd.weight", output[:, :n_embd] * quarter),
            ("nextn.pre_projection.weight", before),
            ("nextn.post_projection.weight", drawn(n_target, n_embd)),
        ]
    found.append(("rope_freqs.weight", np.ones(_SIZES[False] // 2, np.float32)))
    for layer, is_windowed in enumerate(windows):
        size = _SIZES[is_windowed]
        matrices = {
            "attn_q": (_N_HEAD * size, n_embd),
            "attn_output": (n_embd, _N_HEAD * size),
            "ffn_gate": (_N_FF, n_embd),
            "ffn_up": (_N_FF, n_embd),
            "ffn_down": (n_embd, _N_FF),
        }
        # What a layer adds is normalised: a fraction of what the token gives.
        norms = {
            "attn_q_norm": (size, 1.0),
            "attn_norm": (n_embd, 1.0),
            "ffn_norm": (n_embd, 1.0),
            "post_attention_norm": (n_embd, 0.2),
            "post_ffw_norm": (n_embd, 0.2),
            "layer_output_scale": (1, 1.0),
        }
        if n_target is None:
            matrices |= {f"attn_{part}": (n_head_kv * size, n_embd) for part in "kv"}
            norms["attn_k_norm"] = (size, 1.0)
        layers = {name: drawn(*shape) for name, shape in matrices.items()}
        layers |= {name: np.full(n, value, np.float32) for name, (n, value) in norms.items()}
        found += [(f"blk.{layer}.{name}.weight", values) for name, values in layers.items()]
    return found
