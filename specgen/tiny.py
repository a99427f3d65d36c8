"""Writes tiny GGUF models with random weights, for tests and for `specgen doctor`.

They say nothing sensible, but they are whole: a tokenizer that takes any text, a transformer
(or a state-space model, or an encoder) that llama.cpp loads and decodes like any other, and an
output distribution that depends on the whole context. A file takes some milliseconds to write
and is the same for the same `TinyConfig`.

>>> target = TinyConfig(seed=1)
>>> draft = target.draft(noise=0.1)  # agrees with the target often, not always
>>> path = write_tiny_model("target.gguf", target)  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

Architecture: TypeAlias = Literal["llama", "qwen2", "mamba", "bert"]
TokenizerKind: TypeAlias = Literal["bpe", "spm"]
TensorType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

#: The template of the ChatML family; its markers are among the control tokens.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: Every longer prefix of these becomes a token of its own.
_WORDS = (
    " the", " and", " of", " to", " in", " is", " for", " with", " that", " it", " be", " not",
    " return", " def", " self", " if", " else", " import", " from", " =", " +", " (",
    "ing", "tion", "er", "on", "re", "ed", "es", "th", "    ", "\n\n", "é", "😀",
)  # fmt: skip

#: Token types as GGUF numbers them.
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6

_CONTROL_TOKENS = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")

Weights: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """What to write. The defaults make a model of 0.5 MB that decodes a token in well under 1 ms."""

    #: ``llama`` and ``qwen2`` are transformers (the latter with biases), ``mamba`` cannot drop
    #: a suffix from its state, ``bert`` is an encoder and cannot generate.
    architecture: Architecture = "llama"
    #: ``bpe`` is GPT-2's byte-level kind, ``spm`` SentencePiece's with bytes to fall back on.
    #: ``bert`` always has a WordPiece vocabulary.
    tokenizer: TokenizerKind = "bpe"
    #: Tokens in all; what the tokenizer does not need is unused padding at the end. None adds
    #: no padding.
    n_vocab: int | None = None
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 2
    #: Heads of keys and values; None is as many as `n_head`.
    n_head_kv: int | None = None
    n_ff: int = 128
    n_ctx_train: int = 4096
    #: How the matrices are stored; vectors are always f32. Quantised types need dimensions that
    #: are multiples of 32.
    tensor_type: TensorType = "f32"
    #: Round the matrices to this type before they are stored as `tensor_type`: a model of the
    #: very same numbers that runs through other kernels.
    rounded_to: TensorType | None = None
    #: Seed of the weights. Each tensor has a generator of its own, so models that differ only
    #: in `n_layer` or `n_vocab` share the weights they both have.
    seed: int = 0
    #: Share of other random weights (from `noise_seed`) mixed in: 0 none, 1 as much as of the
    #: model's own; the weights keep their scale.
    noise: float = 0.0
    noise_seed: int = 1
    #: Standard deviation of the logits over the vocabulary: 0 is a flat distribution, 3 leaves
    #: the likeliest token some 0.2, 10 is all but deterministic.
    logit_scale: float = 3.0
    #: The same for control tokens (end of text among them), relative to the others: at 0 they
    #: are very unlikely, at 1 like any token.
    control_scale: float = 0.0
    #: The same for tokens that are no printable ASCII text: at 0 the text is readable.
    unprintable_scale: float = 1.0
    #: Begin every prompt with the first control token.
    add_bos: bool = True
    #: A Jinja template, for example `CHATML_TEMPLATE`.
    chat_template: str | None = None
    name: str = "tiny"

    def draft(self, noise: float, noise_seed: int = 1, *, n_layer: int | None = None) -> TinyConfig:
        """A model with the same vocabulary that agrees with this one the less, the more noise.

        With 0.01 the two have the same likeliest token nine times in ten, with 0.1 every other
        time, with 0.3 every seventh, and from 1 on by chance only. A draft of fewer layers
        without noise hits it every fifth time.
        """
        return dataclasses.replace(
            self,
            noise=noise,
            noise_seed=noise_seed,
            n_layer=self.n_layer if n_layer is None else n_layer,
            name=f"{self.name}-draft",
        )


@dataclass(frozen=True, slots=True)
class TinyVocabulary:
    """The tokens of a tiny model, in the spelling of its tokenizer; the index is the id."""

    tokens: tuple[str, ...]
    #: GGUF's token types.
    types: tuple[int, ...]
    #: SentencePiece's scores; the higher, the earlier two tokens are merged into this one.
    scores: tuple[float, ...]
    #: BPE's merges, the earliest first; empty for other tokenizers.
    merges: tuple[str, ...]
    #: Tokens that are not padding; these come first.
    n_used: int
    bos: int
    eos: int
    #: End of a turn; the end-of-text token where the vocabulary has no such thing.
    eot: int

    def __len__(self) -> int:
        return len(self.tokens)


def tiny_vocabulary(config: TinyConfig) -> TinyVocabulary:
    """The vocabulary of the model that `config` describes.

    Raises ValueError if `n_vocab` leaves no room for what the tokenizer needs.
    """
    if config.architecture == "bert":
        vocabulary = _wordpiece()
    elif config.tokenizer == "bpe":
        vocabulary = _byte_level_bpe()
    else:
        vocabulary = _sentencepiece()
    n_padding = 0 if config.n_vocab is None else config.n_vocab - len(vocabulary)
    if n_padding < 0:
        raise ValueError(f"n_vocab is {config.n_vocab}, the tokenizer needs {len(vocabulary)}")
    return dataclasses.replace(
        vocabulary,
        tokens=vocabulary.tokens + tuple(f"[PAD{index}]" for index in range(n_padding)),
        types=vocabulary.types + (_UNUSED,) * n_padding,
        scores=vocabulary.scores + (0.0,) * n_padding,
    )


def write_tiny_model(
    path: str | os.PathLike[str], config: TinyConfig, *, keep_fraction: float = 1.0
) -> Path:
    """Write the model to `path` and return it; a file of that name is replaced.

    With `keep_fraction` under 1 only that share of the file is left, as by a broken download.
    Raises ValueError for a configuration that no model can have.
    """
    from gguf import GGUFWriter

    _check(config)
    target = Path(path)
    vocabulary = tiny_vocabulary(config)
    writer = GGUFWriter(target, config.architecture)
    _add_metadata(writer, config, vocabulary)
    for name, weights in _tensors(config, vocabulary).items():
        _add_tensor(writer, config, name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if keep_fraction < 1.0:
        os.truncate(target, int(target.stat().st_size * keep_fraction))
    return target


def _check(config: TinyConfig) -> None:
    n_head_kv = config.n_head if config.n_head_kv is None else config.n_head_kv
    if config.n_embd % config.n_head or config.n_head % n_head_kv:
        raise ValueError(
            f"n_embd ({config.n_embd}) must be a multiple of n_head ({config.n_head}), "
            f"and that one of n_head_kv ({n_head_kv})"
        )
    if (config.n_embd // config.n_head) % 2:
        raise ValueError(f"a head of {config.n_embd // config.n_head} values cannot be rotated")
    quantised = {config.tensor_type, config.rounded_to} - {"f32", "f16", "bf16", None}
    if quantised and (config.n_embd % 32 or config.n_ff % 32):
        raise ValueError(
            f"{'/'.join(sorted(map(str, quantised)))} needs dimensions that are multiples of 32, "
            f"not n_embd {config.n_embd} and n_ff {config.n_ff}"
        )


# --- vocabularies ---------------------------------------------------------------------------


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if it is visible."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    codes = {byte: byte for byte in visible}
    codes |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


def _byte_level_bpe() -> TinyVocabulary:
    """Ids 0 to 255 are the bytes; then what the merges make; then the control tokens."""
    characters = _byte_characters()
    tokens = list(characters)
    merges: list[str] = []
    for word in _WORDS:
        spelled = [characters[byte] for byte in word.encode()]
        for length in range(2, len(spelled) + 1):
            token = "".join(spelled[:length])
            if token not in tokens:
                merges.append(f"{token[:-1]} {token[-1]}")
                tokens.append(token)
    n_text = len(tokens)
    tokens += _CONTROL_TOKENS
    return TinyVocabulary(
        tokens=tuple(tokens),
        types=(_NORMAL,) * n_text + (_CONTROL,) * len(_CONTROL_TOKENS),
        scores=(0.0,) * len(tokens),
        merges=tuple(merges),
        n_used=len(tokens),
        bos=n_text,
        eos=n_text + 1,
        eot=n_text + 3,
    )


def _sentencepiece() -> TinyVocabulary:
    """Unknown, begin, end, the 256 bytes, the pieces, and the markers of a chat."""
    characters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = ["▁", *characters]
    for word in _WORDS:
        spelled = word.replace(" ", "▁")
        prefixes = [spelled[:length] for length in range(1, len(spelled) + 1)]
        pieces += [piece for piece in prefixes if piece not in pieces and "\n" not in piece]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    markers = _CONTROL_TOKENS[2:]
    types = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return TinyVocabulary(
        tokens=(*tokens, *markers),
        types=(*types, *[_CONTROL] * len(markers)),
        scores=(*scores, *[0.0] * len(markers)),
        merges=(),
        n_used=len(tokens) + len(markers),
        bos=1,
        eos=2,
        eot=len(tokens) + 1,
    )


def _wordpiece() -> TinyVocabulary:
    """Letters at the beginning of a word and within one: enough for an encoder to load."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    letters = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    tokens = (*special, *(f"▁{letter}" for letter in letters), *letters)
    return TinyVocabulary(
        tokens=tokens,
        types=(_CONTROL,) * len(special) + (_NORMAL,) * (len(tokens) - len(special)),
        scores=(0.0,) * len(tokens),
        merges=(),
        n_used=len(tokens),
        bos=2,
        eos=3,
        eot=3,
    )


# --- weights --------------------------------------------------------------------------------


class _Random:
    """Normal weights, reproducible tensor by tensor."""

    def __init__(self, config: TinyConfig) -> None:
        self._config = config

    def __call__(self, name: str, shape: tuple[int, ...], deviation: float) -> Weights:
        weights = self._draw(self._config.seed, name, shape)
        noise = self._config.noise
        if noise > 0.0:
            other = self._draw(self._config.noise_seed, f"noise {name}", shape)
            weights = (weights + np.float32(noise) * other) * np.float32(1 / math.hypot(1, noise))
        return weights * np.float32(deviation)

    @staticmethod
    def _draw(seed: int, name: str, shape: tuple[int, ...]) -> Weights:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(shape, dtype=np.float32)


def _tensors(config: TinyConfig, vocabulary: TinyVocabulary) -> dict[str, Weights]:
    """Every tensor of the model, shaped (rows, columns) = (outputs, inputs)."""
    random = _Random(config)
    if config.architecture == "bert":
        return _encoder_tensors(config, len(vocabulary), random)
    n_embd = config.n_embd
    tensors = {
        "token_embd.weight": _padded(
            random("token_embd", (vocabulary.n_used, n_embd), 1.0), len(vocabulary)
        ),
        "output_norm.weight": np.ones(n_embd, np.float32),
        "output.weight": _output(config, vocabulary, random),
    }
    layer = _mamba_layer if config.architecture == "mamba" else _transformer_layer
    for index in range(config.n_layer):
        tensors |= layer(config, f"blk.{index}", random)
    return tensors


def _padded(rows: Weights, n_rows: int) -> Weights:
    return np.concatenate([rows, np.zeros((n_rows - len(rows), rows.shape[1]), np.float32)])


def _output(config: TinyConfig, vocabulary: TinyVocabulary, random: _Random) -> Weights:
    """The output matrix. Its input has unit variance, so its rows set the logits' deviation."""
    deviation = config.logit_scale / math.sqrt(config.n_embd)
    rows = random("output", (vocabulary.n_used, config.n_embd), deviation)
    for index in range(vocabulary.n_used):
        if vocabulary.types[index] in {_CONTROL, _UNKNOWN}:
            rows[index] *= config.control_scale
        elif not _is_printable(vocabulary.tokens[index]):
            rows[index] *= config.unprintable_scale
    return _padded(rows, len(vocabulary))


def _is_printable(token: str) -> bool:
    """Whether a token, as its tokenizer spells it, is printable ASCII text or spaces."""
    if token.startswith("<0x"):
        return 0x20 <= int(token[3:5], 16) < 0x7F
    return token.replace("▁", " ").replace("Ġ", " ").isascii()


def _transformer_layer(config: TinyConfig, prefix: str, random: _Random) -> dict[str, Weights]:
    n_embd, n_ff = config.n_embd, config.n_ff
    n_head_kv = config.n_head if config.n_head_kv is None else config.n_head_kv
    n_embd_kv = n_embd // config.n_head * n_head_kv
    # Queries and keys are large enough for attention to pick some tokens out, and the outputs
    # for the context to weigh as much as the last token.
    unit = 1.0 / math.sqrt(n_embd)
    shapes = {
        "attn_q": (n_embd, n_embd, 1.4 * unit),
        "attn_k": (n_embd_kv, n_embd, 1.4 * unit),
        "attn_v": (n_embd_kv, n_embd, unit),
        "attn_output": (n_embd, n_embd, 1.5 * unit),
        "ffn_gate": (n_ff, n_embd, unit),
        "ffn_up": (n_ff, n_embd, unit),
        "ffn_down": (n_embd, n_ff, 1.5 / math.sqrt(n_ff)),
    }
    tensors = {
        f"{prefix}.{name}.weight": random(f"{prefix}.{name}", (n_rows, n_columns), deviation)
        for name, (n_rows, n_columns, deviation) in shapes.items()
    }
    tensors[f"{prefix}.attn_norm.weight"] = np.ones(n_embd, np.float32)
    tensors[f"{prefix}.ffn_norm.weight"] = np.ones(n_embd, np.float32)
    if config.architecture == "qwen2":
        for name, size in (("attn_q", n_embd), ("attn_k", n_embd_kv), ("attn_v", n_embd_kv)):
            tensors[f"{prefix}.{name}.bias"] = random(f"{prefix}.{name}.bias", (size,), 0.1)
    return tensors


def _mamba_layer(config: TinyConfig, prefix: str, random: _Random) -> dict[str, Weights]:
    n_embd, n_inner = config.n_embd, 2 * config.n_embd
    n_rank = _mamba_rank(config)
    unit = 1.0 / math.sqrt(n_embd)
    unit_inner = 1.0 / math.sqrt(n_inner)
    n_mixed = n_rank + 2 * _MAMBA_STATE
    return {
        f"{prefix}.attn_norm.weight": np.ones(n_embd, np.float32),
        f"{prefix}.ssm_in.weight": random(f"{prefix}.ssm_in", (2 * n_inner, n_embd), unit),
        f"{prefix}.ssm_conv1d.weight": random(
            f"{prefix}.ssm_conv1d", (n_inner, _MAMBA_CONVOLUTION), 0.5
        ),
        f"{prefix}.ssm_conv1d.bias": np.zeros(n_inner, np.float32),
        f"{prefix}.ssm_x.weight": random(f"{prefix}.ssm_x", (n_mixed, n_inner), 2.0 * unit_inner),
        f"{prefix}.ssm_dt.weight": random(
            f"{prefix}.ssm_dt", (n_inner, n_rank), 0.5 / math.sqrt(n_rank)
        ),
        # A step of about 0.1, so that the state remembers tens of tokens.
        f"{prefix}.ssm_dt.bias": np.full(n_inner, math.log(math.expm1(0.1)), np.float32),
        f"{prefix}.ssm_a": -np.tile(np.arange(1, _MAMBA_STATE + 1, dtype=np.float32), (n_inner, 1)),
        f"{prefix}.ssm_d": np.ones(n_inner, np.float32),
        f"{prefix}.ssm_out.weight": random(
            f"{prefix}.ssm_out", (n_embd, n_inner), 3.0 * unit_inner
        ),
    }


def _encoder_tensors(config: TinyConfig, n_vocab: int, random: _Random) -> dict[str, Weights]:
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
    tensors = {
        f"{name}.weight": random(name, shape, deviation)
        for name, (shape, deviation) in shapes.items()
    }
    for name in norms:
        tensors[f"{name}.weight"] = np.ones(n_embd, np.float32)
        tensors[f"{name}.bias"] = np.zeros(n_embd, np.float32)
    return tensors


# --- the file -------------------------------------------------------------------------------

_MAMBA_STATE = 16
_MAMBA_CONVOLUTION = 4

#: Matrices that llama.cpp wants in f32: small, or read element by element.
_ALWAYS_F32 = ("ssm_conv1d", "ssm_x", "ssm_dt", "ssm_a", "position_embd", "token_types")


def _mamba_rank(config: TinyConfig) -> int:
    return max(1, config.n_embd // 16)


def _quantisation(tensor_type: TensorType) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[tensor_type.upper()]


def _add_tensor(writer: GGUFWriter, config: TinyConfig, name: str, weights: Weights) -> None:
    from gguf import quants

    if weights.ndim == 1 or any(part in name for part in _ALWAYS_F32):
        writer.add_tensor(name, weights)
        return
    if config.rounded_to is not None:
        coarse = _quantisation(config.rounded_to)
        rounded = quants.dequantize(quants.quantize(weights, coarse), coarse)
        weights = rounded.astype(np.float32)
    kind = _quantisation(config.tensor_type)
    writer.add_tensor(name, quants.quantize(weights, kind), raw_dtype=kind)


def _add_metadata(writer: GGUFWriter, config: TinyConfig, vocabulary: TinyVocabulary) -> None:
    from gguf import LlamaFileType, PoolingType

    writer.add_name(config.name)
    writer.add_quantization_version(2)
    file_types = {
        "f32": LlamaFileType.ALL_F32,
        "f16": LlamaFileType.MOSTLY_F16,
        "bf16": LlamaFileType.MOSTLY_BF16,
        "q8_0": LlamaFileType.MOSTLY_Q8_0,
        "q5_1": LlamaFileType.MOSTLY_Q5_1,
        "q5_0": LlamaFileType.MOSTLY_Q5_0,
        "q4_1": LlamaFileType.MOSTLY_Q4_1,
        "q4_0": LlamaFileType.MOSTLY_Q4_0,
    }
    writer.add_file_type(file_types[config.tensor_type])
    writer.add_vocab_size(len(vocabulary))
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    if config.architecture == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_ssm_conv_kernel(_MAMBA_CONVOLUTION)
        writer.add_ssm_inner_size(2 * config.n_embd)
        writer.add_ssm_state_size(_MAMBA_STATE)
        writer.add_ssm_time_step_rank(_mamba_rank(config))
    else:
        writer.add_feed_forward_length(config.n_ff)
        writer.add_head_count(config.n_head)
        writer.add_head_count_kv(config.n_head if config.n_head_kv is None else config.n_head_kv)
    if config.architecture in {"llama", "qwen2"}:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(config.n_embd // config.n_head)
        writer.add_rope_freq_base(10000.0)
    if config.architecture == "bert":
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
        writer.add_pooling_type(PoolingType.MEAN)
    _add_tokenizer(writer, config, vocabulary)


def _add_tokenizer(writer: GGUFWriter, config: TinyConfig, vocabulary: TinyVocabulary) -> None:
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
        writer.add_tokenizer_pre("qwen2" if config.architecture == "qwen2" else "gpt-2")
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(vocabulary.scores)
        writer.add_unk_token_id(0)
    writer.add_eot_token_id(vocabulary.eot)
    writer.add_add_bos_token(config.add_bos)
    if config.chat_template is not None:
        writer.add_chat_template(config.chat_template)


__all__ = [
    "CHATML_TEMPLATE",
    "Architecture",
    "TensorType",
    "TinyConfig",
    "TinyVocabulary",
    "TokenizerKind",
    "tiny_vocabulary",
    "write_tiny_model",
]
