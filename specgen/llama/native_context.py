"""Open a native context, after checking that it fits into memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from specgen.errors import MemoryLimitError, UsageError
from specgen.llama.cache_types import CACHE_TYPES
from specgen.llama.library import forget_log, has_gpu, last_error, llama_cpp, use_threads
from specgen.llama.model import LlamaModel
from specgen.options import ContextOptions
from specgen.system.machine import available_memory_bytes, usable_cores, usable_memory
from specgen.system.quantities import human_bytes

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
#: The memory that a context needs in addition to its cache: graph, scratch memory, and the
#: activations of one batch.
CONTEXT_OVERHEAD_BYTES = 100 * 2**20
#: Architectures with snapshots whose graphs have room for only a few (see `_max_snapshots`).
_SMALL_GRAPHS = frozenset({"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"})
#: The maximum number of sequences in a context of llama.cpp.
MAX_SEQUENCES = 256
#: The maximum number of cells: llama.cpp's positions are of type int32.
_MAX_CELLS = 2**31 - 1
#: llama.cpp rounds the number of cells of a context up to a multiple of this.
_CONTEXT_STEP = 256
#: More snapshots than any context asks for.
_UNLIMITED_SNAPSHOTS = 2**31


@dataclass(frozen=True, slots=True)
class ContextSize:
    """The sizes of a context, in tokens and rows, and its purpose."""

    #: The number of cells, one per token.
    n_ctx: int
    #: The maximum number of rows of a batch.
    n_rows: int
    #: The maximum number of rows of a batch that may want logits.
    n_outputs: int
    #: The number of sequences, without those for copies of states and for guards.
    n_sequences: int
    #: The number of sequences per text: its own, then those of its branches.
    n_branches: int = 1
    #: Whether it is for the model's MTP layers only.
    is_mtp: bool = False
    #: llama.cpp's number for how the hidden states of a text become one embedding; None: the
    #: context computes only logits.
    pooling: int | None = None
    #: A native callback that receives the computed tensors.
    on_tensor: Any = None
    #: The native context of the target, if a draft shares its matrices or cells.
    other: Any = None


class OpenContext(NamedTuple):
    """A native context."""

    #: llama.cpp's pointer.
    handle: Any
    #: The number of rows that the snapshots of recurrent states go back; 0: there are none.
    n_snapshots: int
    #: The guard of each sequence that has one (see `KvCache`).
    guards: dict[int, int]


def rounded_n_ctx(n_tokens: float) -> int:
    """Return the size of the smallest context that has room for a number of tokens.

    llama.cpp would round the size up in the same way. Callers do it themselves if they use the
    additional cells.
    """
    return math.ceil(n_tokens / _CONTEXT_STEP) * _CONTEXT_STEP


def n_native_sequences(model: LlamaModel, n_branches: int) -> int:
    """Return the maximum number of native sequences that a text with its branches needs.

    These are one per branch, as many again for copies of recurrent states (`StateCopiesInCache`),
    and a guard if there is a sliding window (`KvCache`).
    """
    n_sequences = n_branches
    if model.has_recurrent_state:
        n_sequences *= 2
    if model.n_window:
        n_sequences += 1
    return n_sequences


def open_context(
    model: LlamaModel,
    options: ContextOptions,
    size: ContextSize,
    n_rollback: int,
) -> OpenContext:
    """Open a native context, with snapshots of recurrent states where possible.

    Args:
        model: The model.
        options: Threads, cache types and flash attention.
        size: The size of the context.
        n_rollback: The number of rows that snapshots should go back, if the architecture has them
            and they fit into memory. Without them, a recurrent model gets twice as many sequences,
            for copies of states.

    Raises:
        MemoryLimitError: If the context does not fit into memory.
        UsageError: If the options contradict each other.
    """
    if options.flash_attention == "off" and options.cache_type_v not in ("f32", "f16", "bf16"):
        raise UsageError(
            f"--cache-type-v {options.cache_type_v} needs flash attention",
            "leave out --flash-attn off, or use --cache-type-v f16",
        )
    if size.n_ctx > _MAX_CELLS:
        raise MemoryLimitError(
            f"{model.name}: a context of {size.n_ctx} tokens is larger than llama.cpp's largest, "
            f"{_MAX_CELLS} tokens",
            hint="use a smaller --ctx-size",
        )
    opening = _Opening(model, options, size)
    if opening.has_states:
        # llama.cpp aborts unless n_snapshots + 1 < n_rows.
        n_snapshots = min(n_rollback, size.n_rows - 2, _max_snapshots(model))
        if n_snapshots > 0 and (context := opening.open_with_snapshots(n_snapshots)):
            return context
    return opening.open()


class _Opening:
    """Opens a native context, with snapshots of recurrent states or without."""

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        size: ContextSize,
    ) -> None:
        self._model = model
        self._options = options
        self._size = size
        #: Whether there are recurrent states to go back to.
        self.has_states = model.has_recurrent_state and not size.is_mtp
        #: The sequences that get guards: with a sliding window and several sequences, those of
        #: texts. Those of branches need none, since they end with their draft.
        self._guarded = range(0)
        if model.n_window > 0 and size.n_sequences > 1:
            self._guarded = range(0, size.n_sequences, size.n_branches)

    def open_with_snapshots(self, n_snapshots: int) -> OpenContext | None:
        """Open a context with snapshots.

        Returns:
            None if it does not fit into memory, or the architecture has no snapshots.
        """
        n_sequences = self._size.n_sequences
        if self._needed_bytes(n_sequences, n_snapshots) > self._available_bytes():
            return None
        handle = self._make(n_sequences, n_snapshots)
        if not handle:
            return None
        if llama_cpp.llama_n_rs_seq(handle) != n_snapshots:  # an architecture without snapshots
            self._model.call(llama_cpp.llama_free, handle)
            return None
        return OpenContext(handle, n_snapshots, self._guards(n_sequences))

    def open(self) -> OpenContext:
        """Open a context without snapshots; raise `MemoryLimitError` if that is impossible."""
        n_sequences = self._size.n_sequences
        if self.has_states:
            n_sequences *= 2
        needed = self._needed_bytes(n_sequences, n_snapshots=0)
        available = self._available_bytes()
        if needed > available:
            limit = usable_memory().limit
            hint = "use a smaller --ctx-size, or --cache-type-k q8_0 --cache-type-v q8_0"
            if self._model.is_streamed:
                hint += "; if you name a --ctx-size, streamed weights leave room for it"
            raise MemoryLimitError(
                f"{self._model.name}: a context of {self._size.n_ctx} tokens needs about "
                f"{human_bytes(int(needed))}, but only {human_bytes(int(available))} are free"
                f"{f' ({limit})' if limit else ''}",
                hint=hint,
            )
        handle = self._make(n_sequences, n_snapshots=0)
        if not handle:
            raise MemoryLimitError(
                f"{self._model.name}: llama.cpp cannot make a context of {self._size.n_ctx} "
                f"tokens: {last_error()}",
                hint="use a smaller --ctx-size",
            )
        return OpenContext(handle, 0, self._guards(n_sequences))

    def _guards(self, first_guard: int) -> dict[int, int]:
        """Return the guard of each guarded sequence: sequences from `first_guard` on."""
        return {sequence: first_guard + index for index, sequence in enumerate(self._guarded)}

    def _needed_bytes(self, n_sequences: int, n_snapshots: int) -> int:
        """Estimate the size of a context in bytes.

        Args:
            n_sequences: The number of sequences, without guards.
            n_snapshots: The number of snapshots per sequence.
        """
        model = self._model
        options = self._options
        size = self._size
        cell_bytes = model.cache_bytes(size.n_ctx, options.cache_type_k, options.cache_type_v)
        if size.is_mtp:
            # It has the cells of MTP layers only.
            cell_bytes = cell_bytes * model.n_mtp_layers // max(1, model.n_layer)
            return cell_bytes + CONTEXT_OVERHEAD_BYTES
        n_states = (n_sequences + len(self._guarded)) * (1 + n_snapshots)
        needed_bytes = cell_bytes + n_states * model.state_bytes() + CONTEXT_OVERHEAD_BYTES
        if size.pooling is not None:
            # llama.cpp allocates the logits of all outputs (float32), although encoders have none.
            needed_bytes += 4 * size.n_outputs * model.vocabulary.n_tokens
        return needed_bytes

    def _available_bytes(self) -> float:
        """Return the memory that a context may take, in bytes.

        If a context is too large, Linux kills the process when llama.cpp clears the memory, or
        llama.cpp aborts. The result is infinite for a GPU and for workers, whose failures to
        allocate memory are reported properly.
        """
        if self._model.is_remote or (self._options.n_gpu_layers != 0 and has_gpu()):
            return float("inf")
        return float(available_memory_bytes())

    def _make(self, n_sequences: int, n_snapshots: int) -> Any:
        """Let llama.cpp create the context, and return its pointer; null if that fails."""
        options = self._options
        size = self._size
        n_native = n_sequences + len(self._guarded)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = size.n_ctx
        # llama.cpp aborts if a batch can have fewer outputs than there are sequences. The limit is
        # `n_outputs_max`, or for a draft with an encoder (EAGLE-3, DFlash) the size of a batch.
        params.n_batch = max(size.n_rows, n_native)
        params.n_ubatch = params.n_batch
        params.n_outputs_max = max(size.n_outputs, n_native)
        params.n_seq_max = n_native
        params.n_rs_seq = n_snapshots
        params.n_threads = options.n_threads or default_threads()
        params.n_threads_batch = options.n_threads_batch or params.n_threads
        if max(params.n_threads, params.n_threads_batch) > 1:
            use_threads()
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        params.kv_unified = True  # branches of a tree share cells
        params.swa_full = True  # else a sliding window drops cells that a rollback needs
        if size.is_mtp:
            params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
        if size.pooling is not None:
            params.embeddings = True
            params.pooling_type = size.pooling
        params.no_perf = True
        if size.on_tensor is not None:
            params.cb_eval = size.on_tensor
        if size.other is not None:
            params.ctx_other = size.other
        forget_log()
        return self._model.call(llama_cpp.llama_init_from_model, self._model.handle, params)


def _max_snapshots(model: LlamaModel) -> int:
    """Return the maximum number of snapshots for which llama.cpp's graph has room.

    With more, llama.cpp aborts. A small graph has room for 8 operators per tensor, and at least
    1024. A layer needs about 70, and 3 for each snapshot.
    """
    if model.architecture not in _SMALL_GRAPHS:
        return _UNLIMITED_SNAPSHOTS
    return max(8, (1024 // max(1, model.n_layer) - 70) // 3)


@functools.cache
def default_threads() -> int:
    """Return the number of physical cores that this process can keep busy."""
    return usable_cores().amount
