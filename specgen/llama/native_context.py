"""Opening a native context."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from specgen.errors import MemoryLimitError, UsageError
from specgen.llama.library import forget_log, has_gpu, last_error, llama_cpp
from specgen.llama.model import CACHE_TYPES, LlamaModel
from specgen.options import ContextOptions
from specgen.system.progress import human_bytes

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
#: The memory that a context needs beside its cache: graph, scratch, one batch of activations.
CONTEXT_OVERHEAD_BYTES = 100 * 2**20
#: Architectures with snapshots whose graphs have no room for any number of them.
_SMALL_GRAPHS = frozenset({"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"})


@dataclass(frozen=True, slots=True)
class ContextSize:
    """The sizes of a context, in tokens and rows."""

    n_ctx: int
    #: The most rows of a batch, and the most of them that may want logits.
    n_rows: int
    n_outputs: int
    #: The sequences, and how many of them each text has: its own, then those of its branches.
    n_sequences: int
    n_branches: int = 1
    #: Whether it is for the model's MTP layers only.
    is_mtp: bool = False
    #: llama.cpp's number of how the hidden states of a text become one embedding; None: it computes
    #: logits only.
    pooling: int | None = None
    #: A native callback that sees the computed tensors, and the native context of a target; see
    #: `LlamaBackend`.
    on_tensor: Any = None
    other: Any = None


class OpenContext(NamedTuple):
    """A native context, how many tokens its snapshots go back, and the guards of its sequences (see
    `Cache`).
    """

    handle: Any
    n_snapshots: int
    guards: dict[int, int]


def n_native_sequences(model: LlamaModel, n_branches: int) -> int:
    """Return the most of llama.cpp's sequences that a text with its branches needs, with copies of
    each recurrent state (see `StateCopies`), and a guard if there is a sliding window (see
    `Cache`).
    """
    return n_branches * (2 if model.has_recurrent_state else 1) + (1 if model.n_window else 0)


def open_context(
    model: LlamaModel, options: ContextOptions, size: ContextSize, n_rollback: int
) -> OpenContext:
    """Open a native context, with snapshots of `n_rollback` tokens where the architecture has them
    and they fit. Without them, a recurrent model has twice as many sequences (`StateCopies`). With
    a sliding window and several sequences, those of texts get guards; those of branches do not
    outlive a draft. Raise `MemoryLimitError`, `UsageError`.
    """
    if options.flash_attention == "off" and options.cache_type_v not in ("f32", "f16", "bf16"):
        hint = "leave out --flash-attn off, or use --cache-type-v f16"
        raise UsageError(f"--cache-type-v {options.cache_type_v} needs flash attention", hint)
    is_guarded = model.n_window > 0 and size.n_sequences > 1
    guarded = range(0, size.n_sequences, size.n_branches) if is_guarded else range(0)
    # llama.cpp aborts if the number of snapshots, plus one, reaches the number of rows in a batch.
    n_snapshots = min(n_rollback, size.n_rows - 2, _most_snapshots(model))
    has_state = model.has_recurrent_state and not size.is_mtp
    for n in (n_snapshots, 0) if has_state and n_snapshots > 0 else (0,):
        first_guard = size.n_sequences * (2 if has_state and not n else 1)
        n_sequences = first_guard + len(guarded)
        needed = _needed_bytes(model, options, size, n_sequences * (1 + n))
        available = _available_bytes(model, options)
        if needed > available:
            if n:
                continue
            raise MemoryLimitError(
                f"{model.name}: a context of {size.n_ctx} tokens needs about "
                f"{human_bytes(int(needed))}, but only {human_bytes(int(available))} are free",
                hint="use a smaller --ctx-size, or --cache-type-k q8_0 --cache-type-v q8_0",
            )
        handle = _make(model, options, size, n_sequences, n)
        if handle and n in (0, llama_cpp.llama_n_rs_seq(handle)):
            guards = dict(zip(guarded, range(first_guard, n_sequences), strict=True))
            return OpenContext(handle, n, guards)
        if handle:  # an architecture without snapshots
            model.call(llama_cpp.llama_free, handle)
    raise MemoryLimitError(
        f"{model.name}: llama.cpp cannot make a context of {size.n_ctx} tokens: {last_error()}",
        hint="use a smaller --ctx-size",
    )


def _most_snapshots(model: LlamaModel) -> int:
    """Return how many snapshots fit into llama.cpp's graph, which aborts if there are more. It has
    room for 8 operators for each tensor, 1024 at least. A layer needs some 70, and 3 for each
    snapshot.
    """
    if model.architecture not in _SMALL_GRAPHS:
        return 2**31
    return max(8, (1024 // max(1, model.n_layer) - 70) // 3)


def _make(
    model: LlamaModel,
    options: ContextOptions,
    size: ContextSize,
    n_sequences: int,
    n_snapshots: int,
) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = size.n_ctx
    params.n_batch = params.n_ubatch = size.n_rows
    params.n_seq_max = n_sequences
    params.n_rs_seq = n_snapshots
    # llama.cpp aborts if there are fewer outputs than sequences.
    params.n_outputs_max = max(size.n_outputs, n_sequences)
    params.n_threads = options.n_threads or default_threads()
    params.n_threads_batch = options.n_threads_batch or params.n_threads
    params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
    types = options.cache_type_k, options.cache_type_v
    params.type_k, params.type_v = (CACHE_TYPES[each][0] for each in types)
    params.kv_unified = True  # branches of a tree share cells
    params.swa_full = True  # else a sliding window drops cells that a rollback needs
    if size.is_mtp:
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    if size.pooling is not None:
        params.embeddings, params.pooling_type = True, size.pooling
    params.no_perf = True
    if size.on_tensor is not None:
        params.cb_eval = size.on_tensor
    if size.other is not None:
        params.ctx_other = size.other
    forget_log()
    return model.call(llama_cpp.llama_init_from_model, model.handle, params)


@functools.cache
def default_threads() -> int:
    """Return the number of physical cores: hyper-threads do not help matrix products."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _needed_bytes(
    model: LlamaModel, options: ContextOptions, size: ContextSize, n_states: int
) -> int:
    cells = model.cache_bytes(size.n_ctx, options.cache_type_k, options.cache_type_v)
    if size.is_mtp:
        return cells * model.n_mtp_layers // max(1, model.n_layer) + CONTEXT_OVERHEAD_BYTES
    # llama.cpp has room for the logits of all outputs, also of encoders, which have none.
    outputs = 0 if size.pooling is None else 4 * size.n_outputs * model.vocabulary.n_tokens
    return cells + n_states * model.state_bytes() + outputs + CONTEXT_OVERHEAD_BYTES


def _available_bytes(model: LlamaModel, options: ContextOptions) -> float:
    """Return the memory in bytes that a context may take. With too little, Linux kills the process
    when llama.cpp clears it, or llama.cpp aborts. A GPU's allocator and workers report failures
    properly: there it is infinite.
    """
    if model.is_remote or (options.n_gpu_layers != 0 and has_gpu()):
        return float("inf")
    return float(psutil.virtual_memory().available)
