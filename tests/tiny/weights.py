"""The tensors of a tiny model.

Everything is scaled so that each layer's input has unit variance, attention picks some tokens
out, states remember tens of tokens, and the context weighs as much as the last token.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tests.tiny.config import TinyConfig
from tests.tiny.vocabulary import CONTROL, UNKNOWN, TinyVocabulary

TinyWeights: TypeAlias = NDArray[np.float32]

#: Sizes of the recurrent layers.
MAMBA_STATE = 16
CONVOLUTION = 4
SHORT_CONVOLUTION = 3

#: A step of about 0.1, so that a state remembers tens of tokens.
_STEP = math.log(math.expm1(0.1))


def n_head_kv(config: TinyConfig) -> int:
    return config.n_head if config.n_head_kv is None else config.n_head_kv


def has_attention(config: TinyConfig, layer: int) -> bool:
    if config.architecture in {"lfm2", "qwen35", "jamba"}:
        return layer % 2 == 1
    return config.architecture not in {"mamba", "mamba2"}


def mamba_rank(config: TinyConfig) -> int:
    return max(1, config.n_embd // 16)


def n_groups(config: TinyConfig) -> int:
    return {"mamba2": 1, "qwen35": config.n_head}.get(config.architecture, 0)


def head_size(config: TinyConfig) -> int:
    return config.n_embd // config.n_head


def tensors(config: TinyConfig, vocabulary: TinyVocabulary) -> dict[str, TinyWeights]:
    """Yield every tensor of the model, shaped (rows, columns) = (outputs, inputs)."""
    random = Random(config)
    if config.architecture == "bert":
        return _encoder(config, len(vocabulary), random)
    if config.architecture == "gpt2":
        return _with_learned_positions(config, vocabulary, random)
    n_embd = config.n_embd
    # gemma3 multiplies its embeddings by this itself.
    deviation = 1.0 / math.sqrt(n_embd) if config.architecture == "gemma3" else 1.0
    norm = "token_embd_norm" if config.architecture == "lfm2" else "output_norm"
    found = {
        "token_embd.weight": _padded(
            random("token_embd", (vocabulary.n_used, n_embd), deviation), len(vocabulary)
        ),
        f"{norm}.weight": np.ones(n_embd, np.float32),
        "output.weight": _output(config, vocabulary, random),
    }
    for index in range(config.n_layer):
        found |= _layer(config, index, random)
    return found


def _layer(config: TinyConfig, index: int, random: Random) -> dict[str, TinyWeights]:
    prefix = f"blk.{index}"
    found = _norms(config, prefix)
    if has_attention(config, index):
        found |= _attention(config, prefix, random)
    else:
        recurrent = {"mamba": _mamba, "jamba": _mamba, "mamba2": _mamba2}
        recurrent |= {"lfm2": _short_convolution, "qwen35": _delta_net}
        found |= recurrent[config.architecture](config, prefix, random)
    if config.architecture not in {"mamba", "mamba2"}:
        found |= _feed_forward(config, prefix, random)
    return found


class Random:
    """Normal weights, reproducible tensor by tensor."""

    def __init__(self, config: TinyConfig) -> None:
        self._config = config

    def __call__(self, name: str, shape: tuple[int, ...], deviation: float) -> TinyWeights:
        weights = self._draw(self._config.seed, name, shape)
        noise = self._config.noise
        if noise > 0.0:
            other = self._draw(self._config.noise_seed, f"noise {name}", shape)
            weights = (weights + np.float32(noise) * other) * np.float32(1 / math.hypot(1, noise))
        return weights * np.float32(deviation)

    def matrices(
        self, prefix: str, shapes: Mapping[str, tuple[tuple[int, ...], float]]
    ) -> dict[str, TinyWeights]:
        return {
            f"{prefix}.{name}.weight": self(f"{prefix}.{name}", shape, deviation)
            for name, (shape, deviation) in shapes.items()
        }

    @staticmethod
    def _draw(seed: int, name: str, shape: tuple[int, ...]) -> TinyWeights:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(shape, dtype=np.float32)


def _padded(rows: TinyWeights, n_rows: int) -> TinyWeights:
    return np.concatenate([rows, np.zeros((n_rows - len(rows), rows.shape[1]), np.float32)])


def _output(config: TinyConfig, vocabulary: TinyVocabulary, random: Random) -> TinyWeights:
    """Return the output matrix. Its input has unit variance: its rows set the logits' deviation."""
    deviation = config.logit_scale / math.sqrt(config.n_embd)
    rows = random("output", (vocabulary.n_used, config.n_embd), deviation)
    for index in range(vocabulary.n_used):
        if vocabulary.types[index] in {CONTROL, UNKNOWN}:
            rows[index] *= config.control_scale
        elif not _is_printable(vocabulary.tokens[index]):
            rows[index] *= config.unprintable_scale
    return _padded(rows, len(vocabulary))


def _is_printable(token: str) -> bool:
    if token.startswith("<0x"):
        return 0x20 <= int(token[3:5], 16) < 0x7F
    return token.replace("▁", " ").replace("Ġ", " ").isascii()


# --- parts of layers ------------------------------------------------------------------------


def _norms(config: TinyConfig, prefix: str) -> dict[str, TinyWeights]:
    names = {
        "mamba": ("attn_norm",),
        "mamba2": ("attn_norm",),
        "qwen35": ("attn_norm", "post_attention_norm"),
        "gemma3": ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
    }.get(config.architecture, ("attn_norm", "ffn_norm"))
    return {f"{prefix}.{name}.weight": np.ones(config.n_embd, np.float32) for name in names}


def _attention(config: TinyConfig, prefix: str, random: Random) -> dict[str, TinyWeights]:
    n_embd, n_embd_kv = config.n_embd, head_size(config) * n_head_kv(config)
    # Of qwen35's queries every second head is a gate.
    n_query = 2 * n_embd if config.architecture == "qwen35" else n_embd
    unit = 1.0 / math.sqrt(n_embd)
    found = random.matrices(
        prefix,
        {
            "attn_q": ((n_query, n_embd), 1.4 * unit),
            "attn_k": ((n_embd_kv, n_embd), 1.4 * unit),
            "attn_v": ((n_embd_kv, n_embd), unit),
            "attn_output": ((n_embd, n_embd), 1.5 * unit),
        },
    )
    if config.architecture == "qwen2":
        for name, size in (("attn_q", n_embd), ("attn_k", n_embd_kv), ("attn_v", n_embd_kv)):
            found[f"{prefix}.{name}.bias"] = random(f"{prefix}.{name}.bias", (size,), 0.1)
    if config.architecture in {"qwen3", "gemma3", "lfm2", "qwen35"}:
        for name in ("attn_q_norm", "attn_k_norm"):
            found[f"{prefix}.{name}.weight"] = np.full(head_size(config), 1.4, np.float32)
    return found


def _feed_forward(config: TinyConfig, prefix: str, random: Random) -> dict[str, TinyWeights]:
    n_embd, n_ff = config.n_embd, config.n_ff
    inner = (n_ff, n_embd), 1.0 / math.sqrt(n_embd)
    outer = (n_embd, n_ff), 1.5 / math.sqrt(n_ff)
    return random.matrices(prefix, {"ffn_gate": inner, "ffn_up": inner, "ffn_down": outer})


def _mamba(config: TinyConfig, prefix: str, random: Random) -> dict[str, TinyWeights]:
    n_embd, n_inner = config.n_embd, 2 * config.n_embd
    n_rank = mamba_rank(config)
    unit, unit_inner = 1.0 / math.sqrt(n_embd), 1.0 / math.sqrt(n_inner)
    decays = np.arange(1, MAMBA_STATE + 1, dtype=np.float32)
    found = random.matrices(
        prefix,
        {
            "ssm_in": ((2 * n_inner, n_embd), unit),
            "ssm_conv1d": ((n_inner, CONVOLUTION), 0.5),
            "ssm_x": ((n_rank + 2 * MAMBA_STATE, n_inner), 2.0 * unit_inner),
            "ssm_dt": ((n_inner, n_rank), 0.5 / math.sqrt(n_rank)),
            "ssm_out": ((n_embd, n_inner), 3.0 * unit_inner),
        },
    )
    found |= {
        f"{prefix}.ssm_conv1d.bias": np.zeros(n_inner, np.float32),
        f"{prefix}.ssm_dt.bias": np.full(n_inner, _STEP, np.float32),
        f"{prefix}.ssm_a": -np.tile(decays, (n_inner, 1)),
        f"{prefix}.ssm_d": np.ones(n_inner, np.float32),
    }
    if config.architecture == "jamba":
        for name, size in (("dt", n_rank), ("b", MAMBA_STATE), ("c", MAMBA_STATE)):
            found[f"{prefix}.ssm_{name}_norm.weight"] = np.ones(size, np.float32)
    return found


def _mamba2(config: TinyConfig, prefix: str, random: Random) -> dict[str, TinyWeights]:
    n_embd, n_inner, n_head = config.n_embd, 2 * config.n_embd, 2 * config.n_head
    n_mixed = n_inner + 2 * n_groups(config) * MAMBA_STATE
    found = random.matrices(
        prefix,
        {
            "ssm_in": ((n_inner + n_mixed + n_head, n_embd), 1.0 / math.sqrt(n_embd)),
            "ssm_conv1d": ((n_mixed, CONVOLUTION), 0.5),
            "ssm_out": ((n_embd, n_inner), 1.5 / math.sqrt(n_inner)),
        },
    )
    return found | {
        f"{prefix}.ssm_conv1d.bias": np.zeros(n_mixed, np.float32),
        f"{prefix}.ssm_dt.bias": np.full(n_head, _STEP, np.float32),
        f"{prefix}.ssm_a": -np.arange(1, n_head + 1, dtype=np.float32).reshape(n_head, 1),
        f"{prefix}.ssm_d": np.ones((n_head, 1), np.float32),
        f"{prefix}.ssm_norm.weight": np.ones(
            (n_groups(config), n_inner // n_groups(config)), np.float32
        ),
    }


def _short_convolution(config: TinyConfig, prefix: str, random: Random) -> dict[str, TinyWeights]:
    n_embd, unit = config.n_embd, 1.0 / math.sqrt(config.n_embd)
    shapes = {
        "shortconv.conv": ((n_embd, SHORT_CONVOLUTION), 0.7),
        "shortconv.in_proj": ((3 * n_embd, n_embd), unit),
        "shortconv.out_proj": ((n_embd, n_embd), 1.5 * unit),
    }
    return random.matrices(prefix, shapes)


def _delta_net(config: TinyConfig, prefix: str, random: Random) -> dict[str, TinyWeights]:
    n_embd, n_head = config.n_embd, config.n_head
    unit = 1.0 / math.sqrt(n_embd)
    found = random.matrices(
        prefix,
        {
            "attn_qkv": ((3 * n_embd, n_embd), unit),
            "attn_gate": ((n_embd, n_embd), unit),
            "ssm_conv1d": ((3 * n_embd, CONVOLUTION), 0.5),
            "ssm_beta": ((n_head, n_embd), unit),
            "ssm_alpha": ((n_head, n_embd), unit),
            "ssm_out": ((n_embd, n_embd), 3.0 * unit),
        },
    )
    return found | {
        f"{prefix}.ssm_dt.bias": np.full(n_head, _STEP, np.float32),
        f"{prefix}.ssm_a": -np.linspace(0.5, 1.0, n_head, dtype=np.float32),
        f"{prefix}.ssm_norm.weight": np.ones(head_size(config), np.float32),
    }


def _with_learned_positions(
    config: TinyConfig, vocabulary: TinyVocabulary, random: Random
) -> dict[str, TinyWeights]:
    """GPT-2: one matrix for queries, keys and values, and biases everywhere."""
    n_embd, n_ff = config.n_embd, config.n_ff
    unit = 1.0 / math.sqrt(n_embd)
    embeddings = random("token_embd", (vocabulary.n_used, n_embd), 1.0)
    found = {
        "token_embd.weight": _padded(embeddings, len(vocabulary)),
        "position_embd.weight": random("position_embd", (config.n_ctx_train, n_embd), 0.1),
        "output.weight": _output(config, vocabulary, random),
    }
    norms = ["output_norm"]
    for index in range(config.n_layer):
        prefix = f"blk.{index}"
        found |= random.matrices(
            prefix,
            {
                "attn_qkv": ((3 * n_embd, n_embd), 1.4 * unit),
                "attn_output": ((n_embd, n_embd), 1.5 * unit),
                "ffn_up": ((n_ff, n_embd), unit),
                "ffn_down": ((n_embd, n_ff), 1.5 / math.sqrt(n_ff)),
            },
        )
        for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
            n_outputs = len(found[f"{prefix}.{name}.weight"])
            found[f"{prefix}.{name}.bias"] = np.zeros(n_outputs, np.float32)
        norms += [f"{prefix}.attn_norm", f"{prefix}.ffn_norm"]
    for name in norms:
        found[f"{name}.weight"] = np.ones(n_embd, np.float32)
        found[f"{name}.bias"] = np.zeros(n_embd, np.float32)
    return found


def _encoder(config: TinyConfig, n_vocab: int, random: Random) -> dict[str, TinyWeights]:
    n_embd, n_ff = config.n_embd, config.n_ff
    unit = 1.0 / math.sqrt(n_embd)
    shapes: dict[str, tuple[tuple[int, int], float]] = {
        "token_embd": ((n_vocab, n_embd), 1.0),
        "token_types": ((2, n_embd), 1.0),
        "position_embd": ((config.n_ctx_train, n_embd), 0.1),
    }
    norms = ["token_embd_norm"]
    for index in range(config.n_layer):
        prefix = f"blk.{index}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"{prefix}.{name}"] = ((n_embd, n_embd), unit)
        shapes[f"{prefix}.ffn_up"] = ((n_ff, n_embd), unit)
        shapes[f"{prefix}.ffn_down"] = ((n_embd, n_ff), 1.0 / math.sqrt(n_ff))
        norms += [f"{prefix}.attn_output_norm", f"{prefix}.layer_output_norm"]
    found = {
        f"{name}.weight": random(name, shape, deviation)
        for name, (shape, deviation) in shapes.items()
    }
    for name in norms:
        found[f"{name}.weight"] = np.ones(n_embd, np.float32)
        found[f"{name}.bias"] = np.zeros(n_embd, np.float32)
    return found
