"""The arguments of llama-cpp-python's `Llama`, and what they mean to specgen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from specgen.errors import UsageError
from specgen.llama.cache_types import CACHE_TYPES
from specgen.option_values import checked_value, shown_value
from specgen.options import CacheType, ContextOptions, KernelChoice
from specgen.text.built_in_templates import BUILT_IN

#: llama.cpp's number for a seed that nobody gave.
_NO_SEED = 0xFFFFFFFF
#: The maximum of `ContextOptions.n_batch`.
_MAX_BATCH = 8192


class HonouredArguments(TypedDict, total=False):
    """The arguments of `Llama` that have a meaning here. One that is None counts as left out."""

    #: The number of layers on the GPU; -1 for all.
    n_gpu_layers: int | None
    #: Whether to load the vocabulary only, without weights.
    vocab_only: bool | None
    #: The seed from which the seeds of answers are made; none if left out.
    seed: int | None
    #: The maximum number of tokens of a prompt and its answer; 0 for the model's.
    n_ctx: int | None
    #: The number of tokens of a prompt that are decoded at once.
    n_batch: int | None
    #: The number of threads; None for what specgen finds best.
    n_threads: int | None
    #: The number of threads for prompts and for verifying drafts.
    n_threads_batch: int | None
    #: Whether the model makes embeddings, instead of text.
    embedding: bool | None
    #: Whether flash attention is used.
    flash_attn: bool | None
    #: The number of last tokens that the penalties look at.
    last_n_tokens_size: int | None
    #: The name of a chat template that replaces the model's own.
    chat_format: str | None
    #: specgen's draft: a file, a name or ``ngram``, ``none``, or a list of these. None chooses one.
    draft_model: str | Path | Sequence[str | Path] | None
    #: GGML's number for the type of cached keys.
    type_k: int | None
    #: GGML's number for the type of cached values.
    type_v: int | None
    #: Whether specgen's notes are printed to standard error.
    verbose: bool | None
    #: Which CPU kernels are used; this argument is specgen's.
    kernels: KernelChoice | None


class OtherArguments(TypedDict, total=False):
    """llama-cpp-python's other arguments: ignored, or refused if they would change the answers."""

    attention_type: Any
    chat_handler: Any
    kv_overrides: Any
    logits_all: Any
    lora_base: Any
    lora_path: Any
    lora_scale: Any
    main_gpu: Any
    n_ubatch: Any
    no_perf: Any
    numa: Any
    offload_kqv: Any
    op_offload: Any
    pooling_type: Any
    rope_freq_base: Any
    rope_freq_scale: Any
    rope_scaling_type: Any
    spm_infill: Any
    split_mode: Any
    swa_full: Any
    tensor_split: Any
    tokenizer: Any
    use_mlock: Any
    use_mmap: Any
    yarn_attn_factor: Any
    yarn_beta_fast: Any
    yarn_beta_slow: Any
    yarn_ext_factor: Any
    yarn_orig_ctx: Any


class LlamaArguments(HonouredArguments, OtherArguments, total=False):
    """All arguments of `Llama` after the model, by name."""


#: Arguments that do not change answers here, with the values that need no warning.
_IGNORED: Mapping[str, Any] = {
    "f16_kv": True,  # of older versions, as is `n_parts`
    "lora_base": None,
    "lora_scale": 1.0,
    "main_gpu": 0,
    "n_parts": -1,
    "n_ubatch": 512,
    "no_perf": False,
    "numa": False,
    "offload_kqv": True,
    "op_offload": None,
    "split_mode": 1,
    "swa_full": None,
    "tensor_split": None,
    "use_mlock": False,
    "use_mmap": True,
}
#: Arguments that would change answers and cannot be honoured, with their defaults.
_REFUSED: Mapping[str, Any] = {
    "attention_type": -1,
    "chat_handler": None,
    "kv_overrides": None,
    "lora_path": None,
    "pooling_type": -1,
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "rope_scaling_type": -1,
    "spm_infill": False,
    "tokenizer": None,
    "yarn_attn_factor": 1.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_ext_factor": -1.0,
    "yarn_orig_ctx": 0,
}
#: What LangChain passes for every model, as for the first Llama. Other models would write nonsense
#: with it, so the model's own values are used, with a warning.
_LANGCHAIN: Mapping[str, float] = {"rope_freq_base": 10_000.0, "rope_freq_scale": 1.0}
#: The others that need no warning: log-probabilities are always available.
_HONOURED = frozenset([*HonouredArguments.__annotations__, "logits_all"])
#: Formats of llama-cpp-python that stand for the model's own template.
_OWN_TEMPLATE = frozenset(["chat_template.default", "jinja", "chatml-function-calling"])


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is loaded, from the arguments of `Llama`."""

    #: How the model is loaded and its context is made.
    context: ContextOptions
    #: The drafts, as `specgen.load` takes them.
    draft: str | Path | Sequence[str | Path] | None
    #: The seed from which the seeds of answers are made; None if each answer has a random one.
    seed: int | None
    #: The number of last tokens that penalties look at.
    repeat_last_n: int
    #: Which kernels compute on the CPU.
    kernels: KernelChoice
    #: Whether to load only the vocabulary.
    vocab_only: bool
    #: Whether the model makes embeddings.
    embedding: bool
    #: Whether to show llama.cpp's log.
    verbose: bool


def loading_of(arguments: Mapping[str, Any]) -> Loading:
    """Read the arguments of `Llama`, and warn once about those that are ignored.

    Raises:
        UsageError: If one is invalid or cannot be honoured.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, default in _REFUSED.items():
        if given.get(name, default) not in (default, _LANGCHAIN.get(name)):
            raise UsageError(
                f"{name}={shown_value(given[name])}: specgen's Llama cannot honour it",
                "leave it out, or use llama_cpp.Llama",
            )
    draft = given.get("draft_model")
    ignored = [name for name in given if _is_ignored(name, given[name])]
    if draft is not None and not isinstance(draft, (str, Path, list, tuple)):
        ignored.append("draft_model")  # llama-cpp-python's kind; specgen chooses its own
        draft = None
    if ignored:
        message = f"specgen's Llama ignores {', '.join(sorted(ignored))}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    seed = checked_value("seed", int, given.get("seed", -1))
    return Loading(
        _context(given),
        draft,
        seed=None if seed in (-1, _NO_SEED) else seed,
        repeat_last_n=given.get("last_n_tokens_size", 64),
        kernels=given.get("kernels", "auto"),
        vocab_only=bool(given.get("vocab_only")),
        embedding=bool(given.get("embedding")),
        verbose=bool(given.get("verbose", True)),
    )


def _is_ignored(name: str, value: Any) -> bool:
    """Return whether an argument has a value that the user should know to be ignored."""
    if name in _HONOURED:
        return False
    defaults = {**_IGNORED, **_REFUSED}
    return name not in defaults or value != defaults[name]


def _context(given: Mapping[str, Any]) -> ContextOptions:
    """Return how the target's context is made.

    Raises:
        UsageError: If an argument is invalid.
    """
    n_ctx = given.get("n_ctx", 512)
    n_batch = given.get("n_batch", 512)
    if isinstance(n_batch, int):
        n_batch = min(n_batch, _MAX_BATCH)
    return ContextOptions(
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_threads=given.get("n_threads"),
        n_threads_batch=given.get("n_threads_batch"),
        n_gpu_layers=given.get("n_gpu_layers", 0),
        flash_attention="on" if given.get("flash_attn") else "off",
        cache_type_k=_cache_type("type_k", given),
        cache_type_v=_cache_type("type_v", given),
        chat_template=_chat_template(given.get("chat_format")),
    )


def _cache_type(name: str, given: Mapping[str, Any]) -> CacheType:
    """Return the type of cached keys or values.

    Raises:
        UsageError: If there is no such type.
    """
    number = given.get(name, CACHE_TYPES["f16"])
    for cache_type, type_number in CACHE_TYPES.items():
        if type_number == number:
            return cache_type
    numbers = ", ".join(f"{number} ({cache_type})" for cache_type, number in CACHE_TYPES.items())
    raise UsageError(f"{name}: {shown_value(number)} is not a type of caches; give {numbers}")


def _chat_template(chat_format: str | None) -> str | None:
    """Return the chat template of a format; None for the model's own.

    Raises:
        UsageError: If specgen does not have it.
    """
    if chat_format is None or chat_format in _OWN_TEMPLATE:
        return None
    name = {"llama-3": "llama3"}.get(chat_format, chat_format)
    if name not in BUILT_IN:
        raise UsageError(
            f"chat_format={shown_value(chat_format)}: specgen has {', '.join(BUILT_IN)}",
            "leave it out to use the model's own template",
        )
    return BUILT_IN[name]
