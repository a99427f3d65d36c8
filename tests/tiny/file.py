"""The GGUF file of a tiny model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tiny.config import TensorType, TinyConfig
from tests.tiny.vocabulary import TinyVocabulary, tiny_vocabulary
from tests.tiny.weights import (
    CONVOLUTION,
    MAMBA_STATE,
    SHORT_CONVOLUTION,
    TinyWeights,
    has_attention,
    head_size,
    mamba_rank,
    n_groups,
    n_head_kv,
    tensors,
)

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

#: Matrices that llama.cpp wants in f32: small, or read element by element.
_ALWAYS_F32 = (
    *("ssm_conv1d", "ssm_x", "ssm_dt", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv"),
    *("position_embd", "token_types"),
)
#: Architectures that turn queries and keys by their positions.
_ROTATING = ("llama", "qwen2", "qwen3", "gemma3", "lfm2", "qwen35")


def write_tiny_model(
    path: str | os.PathLike[str],
    config: TinyConfig,
    *,
    keep_fraction: float = 1.0,
    metadata: Mapping[str, int | float | str] | None = None,
) -> Path:
    """Write the model to `path` and return it; a file of that name is replaced. `metadata` is
    written in addition, as u32, f32 or text. Only `keep_fraction` of the file is left, as by a
    broken download.
    """
    from gguf import GGUFValueType as Type
    from gguf import GGUFWriter

    value_types = {int: Type.UINT32, float: Type.FLOAT32, str: Type.STRING}
    target = Path(path)
    vocabulary = tiny_vocabulary(config)
    writer = GGUFWriter(target, config.architecture)
    add_metadata(writer, config, vocabulary)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, value_types[type(value)])
    for name, weights in tensors(config, vocabulary).items():
        add_tensor(writer, config, name, weights)
    write_and_close(writer)
    if keep_fraction < 1.0:
        os.truncate(target, int(target.stat().st_size * keep_fraction))
    return target


def _quantisation(tensor_type: TensorType) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[tensor_type.upper()]


def add_tensor(writer: GGUFWriter, config: TinyConfig, name: str, weights: TinyWeights) -> None:
    from gguf import quants

    if weights.ndim == 1 or any(part in name for part in _ALWAYS_F32):
        writer.add_tensor(name, weights)
        return
    kind = _quantisation(config.tensor_type)
    writer.add_tensor(name, quants.quantize(weights, kind), raw_dtype=kind)


def add_metadata(writer: GGUFWriter, config: TinyConfig, vocabulary: TinyVocabulary) -> None:
    from gguf import PoolingType

    writer.add_name(config.name)
    writer.add_quantization_version(2)
    writer.add_vocab_size(len(vocabulary))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    if config.architecture == "bert":
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
        writer.add_pooling_type(PoolingType.MEAN)
    elif config.architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    _add_attention(writer, config)
    _add_recurrence(writer, config)
    add_tokenizer(writer, config, vocabulary)


def _add_attention(writer: GGUFWriter, config: TinyConfig) -> None:
    attending = [has_attention(config, layer) for layer in range(config.n_layer)]
    if not any(attending) and config.architecture in {"mamba", "mamba2"}:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_head)
    # Layers without attention are told by this.
    if config.lists_heads or config.architecture in {"lfm2", "jamba"}:
        writer.add_head_count_kv([n_head_kv(config) if attends else 0 for attends in attending])
    else:
        writer.add_head_count_kv(n_head_kv(config))
    if config.architecture in _ROTATING:
        writer.add_rope_dimension_count(head_size(config))
        writer.add_rope_freq_base(10000.0)
    if config.architecture in {"qwen3", "gemma3", "qwen35"}:
        writer.add_key_length(head_size(config))
        writer.add_value_length(head_size(config))
    if config.architecture == "qwen35":
        # Values of a head that turn by the position in the text, in an image, and so on.
        third = head_size(config) // 6
        writer.add_rope_dimension_sections([head_size(config) // 2 - 2 * third, third, third, 0])
        writer.add_full_attention_interval(2)
    if config.sliding_window and config.architecture in {"gemma3", "lfm2"}:
        writer.add_sliding_window(config.sliding_window)
        if config.architecture == "gemma3":
            writer.add_sliding_window_pattern(2)


def _add_recurrence(writer: GGUFWriter, config: TinyConfig) -> None:
    architecture = config.architecture
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(SHORT_CONVOLUTION)
    if architecture not in {"mamba", "jamba", "mamba2", "qwen35"}:
        return
    writer.add_ssm_conv_kernel(CONVOLUTION)
    if architecture == "qwen35":
        writer.add_ssm_inner_size(config.n_embd)
        writer.add_ssm_state_size(head_size(config))
        writer.add_ssm_time_step_rank(config.n_head)
    else:
        writer.add_ssm_inner_size(2 * config.n_embd)
        writer.add_ssm_state_size(MAMBA_STATE)
        writer.add_ssm_time_step_rank(
            2 * config.n_head if architecture == "mamba2" else mamba_rank(config)
        )
    if n_groups(config):
        writer.add_ssm_group_count(n_groups(config))


def write_and_close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, config: TinyConfig, vocabulary: TinyVocabulary) -> None:
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    if config.architecture == "bert":
        writer.add_tokenizer_model("bert")
        writer.add_token_type_count(2)
        writer.add_unk_token_id(1)
        writer.add_sep_token_id(3)
        writer.add_pad_token_id(0)
        writer.add_mask_token_id(4)
        return
    if config.tokenizer == "bpe":
        writer.add_tokenizer_model("gpt2")
        own = "qwen2" if config.architecture == "qwen2" else "gpt-2"
        writer.add_tokenizer_pre(config.pre_tokenizer or own)
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(vocabulary.scores)
        writer.add_unk_token_id(0)
    writer.add_eot_token_id(vocabulary.eot)
    writer.add_add_bos_token(config.add_bos)
    named = {"default": config.chat_template, "tool_use": config.tool_template}
    templates = [
        {"name": name, "template": each} for name, each in named.items() if each is not None
    ]
    if templates:
        writer.add_chat_template(templates)
