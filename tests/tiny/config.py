"""The configuration of a tiny model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, TypeAlias

Architecture: TypeAlias = Literal[
    "llama",
    "gpt2",
    "qwen2",
    "qwen3",
    "gemma3",
    "mamba",
    "mamba2",
    "lfm2",
    "qwen35",
    "jamba",
    "bert",
]
TokenizerKind: TypeAlias = Literal["bpe", "spm"]
TensorType: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "tq1_0"
]

#: The template of the ChatML family; its markers are among the control tokens.
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


#: Qwen2.5-Coder's control tokens for texts with a gap, and for the files of a repository.
INFILL_TOKENS = (
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)


@dataclass(frozen=True, slots=True)
class TinyConfig:
    """The configuration of a model. The default has 0.5 MB and takes less than 1 ms per token."""

    #: ``llama``, ``qwen2`` (with biases), ``qwen3`` (heads normalised) and ``gemma3`` (every other
    #: layer with a sliding window) are transformers, and so is ``gpt2``, which has learned an
    #: embedding of each position up to `n_ctx_train`; ``mamba`` and ``mamba2`` keep a recurrent
    #: state, which cannot drop a suffix; ``lfm2`` (short convolutions), ``qwen35`` (gated delta
    #: nets) and ``jamba`` (mamba) do so in every other layer and attend in those between, and
    #: llama.cpp keeps snapshots of the first two; ``bert`` is an encoder and cannot generate.
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
    #: The number of heads of keys and values; None for `n_head`.
    n_head_kv: int | None = None
    #: Whether the file has the number of these heads for each layer, and not one for all layers.
    lists_heads: bool = False
    n_ff: int = 128
    #: The size of sliding windows in tokens, for ``gemma3`` and ``lfm2``; 0 for no window.
    sliding_window: int = 0
    n_ctx_train: int = 4096
    #: How the matrices are stored; vectors are always f32. Quantised types need dimensions that
    #: are multiples of 32.
    tensor_type: TensorType = "f32"
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
    #: Whether every prompt begins with the first control token.
    add_bos: bool = True
    #: The name of the rules by which llama.cpp splits texts into words; empty for the
    #: architecture's own.
    pre_tokenizer: str = ""
    #: Additional control tokens, such as `INFILL_TOKENS`, after those that every vocabulary has.
    control_tokens: tuple[str, ...] = ()
    #: A Jinja template, for example `CHATML_TEMPLATE`.
    chat_template: str | None = None
    #: A second template for conversations with tools, which some files have.
    tool_template: str | None = None
    name: str = "tiny"

    def draft(self, noise: float, noise_seed: int = 1, *, n_layer: int | None = None) -> TinyConfig:
        """A model with the same vocabulary that agrees with this one less often, the more noise it
        has.

        With noise 0.01, the two have the same most likely token nine times in ten, with 0.1 every
        second time, with 0.3 every seventh, and from 1 on only by chance. With fewer layers and
        without noise: every fifth time.
        """
        return dataclasses.replace(
            self,
            noise=noise,
            noise_seed=noise_seed,
            n_layer=self.n_layer if n_layer is None else n_layer,
            name=f"{self.name}-draft",
        )
