"""Estimate the memory of models before they are loaded, from the metadata of their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specgen.errors import ModelFileError
from specgen.llama.context_opening import CONTEXT_OVERHEAD_BYTES
from specgen.llama.gguf_file import GgufMetadata, parts_of
from specgen.llama.model import CACHE_TYPES
from specgen.options import ContextOptions, DraftSource, SessionOptions
from specgen.session.session import usual_n_ctx


def needed_bytes(options: SessionOptions, drafts: Iterable[DraftSource], n_parallel: int) -> int:
    """Estimate the memory that a target takes with the largest of its possible `drafts`, their helpers, and
    contexts for `n_parallel` answers. Raise `ModelFileError` if a file is no model."""
    target, context = options.target, options.target_context
    n_ctx = usual_n_ctx(context.n_ctx, _trained_context(target)) * n_parallel
    sizes = [
        _model_bytes(draft, options.draft_context, n_ctx)
        for draft in drafts
        if isinstance(draft, Path)
    ]
    helpers = [draft for draft in options.helpers if isinstance(draft, Path)]
    return (
        _model_bytes(target, context, n_ctx)
        + max(sizes, default=0)
        + sum(_model_bytes(helper, options.draft_context, n_ctx) for helper in helpers)
    )


def embedder_bytes(target: Path, context: ContextOptions) -> int:
    """Estimate the memory of an embedding model. Raise `ModelFileError` if a file is no model."""
    n_ctx = embedder_context(target, context)
    with GgufMetadata(target) as about:
        n_vocab = about.length("tokenizer.ggml.tokens") or 0
    return _model_bytes(target, context, n_ctx) + 4 * n_ctx * n_vocab  # llama.cpp's room for logits


def embedder_context(target: Path, context: ContextOptions) -> int:
    """Return the most tokens of a text for an embedding model."""
    n_train = _trained_context(target)
    n_ctx = usual_n_ctx(context.n_ctx, n_train)
    return min(n_ctx, n_train) if n_train else n_ctx


def _model_bytes(file: Path, context: ContextOptions, n_tokens: int) -> int:
    """Estimate the size of a model's weights, and of its context for so many tokens. Where the metadata give
    the numbers of heads layer by layer, the cache is estimated as if all layers had the most."""
    with GgufMetadata(file) as about:
        name = about.text("general.architecture")
        n_layers = about.number(f"{name}.block_count")
        n_heads = about.number(f"{name}.attention.head_count") or 1
        n_heads_kv = about.number(f"{name}.attention.head_count_kv") or n_heads
        size = about.number(f"{name}.embedding_length") // n_heads
        size_k = about.number(f"{name}.attention.key_length") or size
        size_v = about.number(f"{name}.attention.value_length") or size
    a_token = size_k * CACHE_TYPES[context.cache_type_k][1]
    a_token += size_v * CACHE_TYPES[context.cache_type_v][1]
    cache_bytes = int(n_tokens * n_layers * n_heads_kv * a_token)
    try:
        weight_bytes = sum(part.stat().st_size for part in parts_of(file))
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error.strerror}") from error
    return weight_bytes + cache_bytes + CONTEXT_OVERHEAD_BYTES


def _trained_context(file: Path) -> int:
    with GgufMetadata(file) as about:
        return about.number(f"{about.text('general.architecture')}.context_length")
