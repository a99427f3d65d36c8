"""A context of a model: its cache, the decoding of batches, and the check that it fits into memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from specgen.errors import (
    BackendError,
    DecodeEndedError,
    MemoryLimitError,
    ModelFileError,
    RollbackError,
    UsageError,
    WorkerLostError,
)
from specgen.llama.cache import Cache, Rewinder, StateCopies
from specgen.llama.cuda_graphs import replays_graphs
from specgen.llama.library import (
    forget_log,
    has_gpu,
    last_error,
    layer_input,
    llama_cpp,
    llama_cpp_ext,
    set_layer_input,
)
from specgen.llama.model import CACHE_TYPES, LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.method.backend import Batch, Rollback
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits
from specgen.system.quantities import human_bytes

#: GGML's limit of threads.
MAX_THREADS = 512


class ComputedRows(Protocol):
    """Limits the rows of the output matrix that are computed, in a decode of these tokens."""

    def limit(self, tokens: Sequence[int]) -> contextlib.AbstractContextManager[object]: ...

    def close(self) -> None: ...


class LlamaBackend:
    """A context of a model: its KV cache, and the decoding of batches. Its creator closes it.
    `n_ctx` is in tokens; one batch may want `n_outputs` rows of logits, of which `n_rollback` are
    likely to be dropped again (None: all but one). Each text has `n_branches` sequences, its own
    first: with a sliding window, only these keep what a rollback needs. `on_tensor` is a native
    callback that sees the computed tensors; its owner keeps it alive. `is_mtp` opens a context of
    the MTP layers; `other` is the native context of a target, whose matrices a draft takes. Raises
    `MemoryLimitError`, `UsageError`, `BackendError`, and `ModelFileError` if the model has no KV
    cache.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_sequences: int = 1,
        n_outputs: int = 1,
        n_rollback: int | None = None,
        n_branches: int = 1,
        on_tensor: Any = None,
        is_mtp: bool = False,
        other: Any = None,
    ) -> None:
        self.model = model
        self._clock = clock
        self.handle: Any = None
        # What these are is said in `Backend`.
        self.n_ctx = n_ctx
        self.n_batch = min(options.n_batch, n_ctx)
        self.n_sequences = n_sequences
        self.n_outputs = n_outputs
        self.decode_s = 0.0
        self.n_decoded_rows = 0
        self.vocabulary: LlamaVocabulary = model.vocabulary
        self.n_vocab = self.vocabulary.n_tokens

        n_rows = max(self.n_batch, n_outputs)
        native = {"on_tensor": on_tensor, "other": other}
        size = ContextSize(n_ctx, n_rows, n_outputs, n_sequences, n_branches, is_mtp, **native)
        n_rollback = n_outputs - 1 if n_rollback is None else n_rollback
        context = open_context(model, options, size, n_rollback)
        self.handle, self._n_snapshots = context.handle, context.n_snapshots
        model.loaded.share()
        self._decode_native = partial(model.call, _decode) if model.is_remote else _decode
        self.is_unwanted: Callable[[], bool] | None = None
        self.replays_graphs = replays_graphs(model, options.n_gpu_layers)
        #: Which rows of the output matrix are computed; None: all.
        self.computed_rows: ComputedRows | None = None
        self._cache = Cache(model, self.handle, context.guards)
        if not self._cache:
            self.close()
            why = "the model has no KV cache, so it cannot generate text"
            raise ModelFileError(f"{model.path}: {why}")
        self._rows = _RowBuffers(n_rows, n_sequences, n_outputs, self._cache)
        #: Views of llama.cpp's results by their addresses, as long as the most rows so far.
        self._memory: dict[int, NDArray[np.float32]] = {}
        #: The layers whose inputs `decode_hidden` returns for a draft that reads them.
        self._layers: tuple[int, ...] = ()
        #: The tokens of each sequence; not used for models with a recurrent state (see `Rewinder`).
        self._texts: list[list[int]] = [[] for _ in range(n_sequences)]
        self._rewinder: Rewinder | None = None
        self.rollback: Rollback = "cells"
        if model.has_recurrent_state and not is_mtp:
            self.rollback = "snapshots" if self._n_snapshots else "states"
            copies = StateCopies(self._cache, 0 if self._n_snapshots else n_sequences)
            self._rewinder = Rewinder(copies, self.decode_rows, n_rows, self._n_snapshots)

    def decode(self, batch: Batch) -> Logits:
        if self._rewinder is None:
            try:
                logits = self.decode_rows(batch)
            except WorkerLostError:
                raise
            except BaseException:  # the cache may hold a part of the batch
                for sequence in {each for sequences in batch.sequences for each in sequences}:
                    with contextlib.suppress(RollbackError):
                        self._cache.remove(sequence, len(self._texts[sequence]))
                raise
            for token, sequences in zip(batch.tokens, batch.sequences, strict=True):
                for sequence in sequences:
                    self._texts[sequence].append(token)
            return logits
        self._rows.check(batch)
        # The time of rollbacks, and of decoding tokens again, counts as decoding.
        started, before_s = self._clock(), self.decode_s
        try:
            return self._rewinder.decode(batch)
        finally:
            self.decode_s = before_s + self._clock() - started

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        """Decode, and also return the final hidden states of the rows that want logits:
        float32[n_wanted, n_embd], or with `all_rows` those that a draft reads, of all rows. Without
        it, llama.cpp computes an output for each row: that is expensive for a prompt. Raise
        `BackendError` then also for a recurrent model, which may decode more rows again.
        """
        if all_rows:
            return self._decode_all_rows(batch)
        if self._rewinder is not None:
            raise BackendError(f"{self.model.name}: no hidden states of a recurrent model")
        if len(batch) > self.n_outputs:
            what = f"{len(batch)} rows of hidden states; {self.n_outputs} at most"
            raise BackendError(f"a batch wants {what}")
        llama_cpp.llama_set_embeddings(self.handle, True)
        try:
            self.decode(batch)
            pointer = llama_cpp.llama_get_embeddings(self.handle)
            hidden = self._values_at(pointer, len(batch), self.model.n_embd)
        finally:
            llama_cpp.llama_set_embeddings(self.handle, False)
        pointer = llama_cpp.llama_get_logits(self.handle)
        logits = self._values_at(pointer, len(batch), self.n_vocab)
        wanted = np.flatnonzero(batch.wants_logits)
        return (logits, hidden) if len(wanted) == len(batch) else (logits[wanted], hidden[wanted])

    def _decode_all_rows(self, batch: Batch) -> tuple[Logits, Hidden]:
        n = len(batch)  # rows that were decoded again come first
        if self._layers:
            logits, n_embd = self.decode(batch), self.model.n_embd
            n_rows = self._rows.native.n_tokens
            inputs = (layer_input(self.handle, layer) for layer in self._layers)
            found = [self._values_at(each, n_rows, n_embd)[-n:] for each in inputs]
            return logits, np.concatenate(found, axis=1)
        llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, False)
        try:
            logits = self.decode(batch)
            return logits, self._mtp_states(self._rows.native.n_tokens)[-n:]
        finally:
            llama_cpp_ext.llama_set_embeddings_nextn(self.handle, False, False)

    def _mtp_states(self, n_rows: int) -> Hidden:
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self.handle)
        return self._values_at(pointer, n_rows, self.model.n_embd_out)

    def _values_at(self, pointer: Any, n_rows: int, n_values: int) -> NDArray[np.float32]:
        if not pointer:
            raise BackendError(f"{self.model.name}: llama.cpp gave no results")
        address, size = ctypes.addressof(pointer.contents), n_rows * n_values
        memory = self._memory.get(address)
        if memory is None or len(memory) < size:
            native = (ctypes.c_float * size).from_address(address)
            memory = self._memory[address] = np.ctypeslib.as_array(native)
        return memory[:size].reshape(n_rows, n_values)

    def hand_out(self, layers: Sequence[int]) -> None:
        """Let `decode_hidden` with `all_rows` return the inputs of these layers (of a model in
        `HOOKED`).
        """
        for layer in set(layers) - set(self._layers):
            set_layer_input(self.handle, layer, True)
        self._layers = tuple(layers)

    def decode_rows(self, batch: Batch) -> Logits:
        if self.model.is_closed:
            self.model.check_open()
        n = len(batch.tokens)
        # Not with a recurrent state: its snapshots are those of a batch.
        is_split = self.replays_graphs and self.n_outputs == 1 and self._rewinder is None
        if is_split and 1 < n <= _MOST_BY_ROW:
            n_wanted = self._rows.check(batch)
            parts = [replace(batch.part(row, row + 1), wants_logits=[True]) for row in range(n)]
            return [self.decode_rows(part) for part in parts][-1][:n_wanted]
        n_wanted = self._rows.fill(batch)
        rows = self.computed_rows
        limit = contextlib.nullcontext() if rows is None else rows.limit(batch.tokens)
        what = f"decode {n} tokens at position {batch.positions[0]} of {self.n_ctx}"
        with limit, self._ended_if_unwanted():
            self._run(self._decode_native, self._rows.native, what)
        self.n_decoded_rows += len(batch.tokens)
        if n_wanted == 0:
            return np.empty((0, self.n_vocab), np.float32)
        return self._values_at(llama_cpp.llama_get_logits(self.handle), n_wanted, self.n_vocab)

    def _run(self, function: Callable[[Any, Any], int], native: Any, what: str) -> None:
        """Let llama.cpp compute a native batch. Raise `BackendError` or `DecodeEndedError`."""
        started = self._clock()
        status = function(self.handle, native)
        self.decode_s += self._clock() - started
        if status == _ENDED:
            raise DecodeEndedError(f"{self.model.name}: a decode was ended")
        if status != 0:
            why = f"({_DECODE_ERRORS.get(status)}, status {status}): {last_error()}"
            raise BackendError(f"{self.model.name}: llama.cpp could not {what} {why}")

    @contextlib.contextmanager
    def _ended_if_unwanted(self) -> Iterator[None]:
        """Let llama.cpp ask after each operator whether the decode is still wanted. Ctrl-C is seen
        there, too: an exception of its handler ends the decode, and is raised after it.
        """
        asked = self.is_unwanted
        if asked is None or self.model.is_remote:
            yield
            return
        raised: list[BaseException] = []

        def ends(_data: object) -> bool:
            try:
                return bool(raised) or asked()
            except BaseException as error:  # noqa: BLE001 - native code cannot pass it on
                raised.append(error)
                return True

        callback = llama_cpp.ggml_abort_callback(ends)  # kept alive until the decode is done
        llama_cpp.llama_set_abort_callback(self.handle, callback, None)
        try:
            yield
        finally:
            llama_cpp.llama_set_abort_callback(self.handle, llama_cpp.ggml_abort_callback(), None)
            if raised:
                raise raised[0]

    def set_threads(self, n_single: int, n_batch: int) -> None:
        """Decode batches of one row with `n_single` threads from now on, and larger ones with
        `n_batch`. Raise `ValueError` unless both are from 1 to `MAX_THREADS`.
        """
        if not (1 <= n_single <= MAX_THREADS and 1 <= n_batch <= MAX_THREADS):
            raise ValueError(f"{n_single} and {n_batch} threads; give 1 to {MAX_THREADS}")
        llama_cpp.llama_set_n_threads(self.handle, n_single, n_batch)

    def length(self, sequence: int) -> int:
        if self._rewinder is not None:
            return len(self._rewinder.text(sequence))
        return len(self._texts[sequence])

    def text(self, sequence: int) -> Sequence[int]:
        if self._rewinder is not None:
            return self._rewinder.text(sequence)
        return self._texts[sequence]

    def saved_bytes(self, sequence: int) -> int:
        return self._cache.saved_bytes(sequence)

    def saved_text(self, sequence: int) -> NDArray[np.uint8]:
        """Return the state of a sequence's text: uint8[n_bytes]. Raise `BackendError`."""
        return self._cache.saved(sequence)

    def restore_text(self, sequence: int, tokens: Sequence[int], state: NDArray[np.uint8]) -> bool:
        """Let a sequence hold a text whose state was saved; return whether llama.cpp took it (else
        it is empty).
        """
        self.remove(sequence)
        if self._rewinder is not None:
            is_taken = self._rewinder.restore(sequence, tokens, state)
        else:
            is_taken = self._cache.restore(sequence, state, len(tokens))
            self._texts[sequence] = list(tokens)
        if not is_taken:
            self.remove(sequence)
        return is_taken

    def checkpoint(self, sequence: int) -> None:
        if self._rewinder is not None:
            self._rewinder.checkpoint(sequence)

    def anchor(self, sequence: int) -> None:
        if self._rewinder is not None:
            self._rewinder.anchor(sequence)

    def way_back(self, sequence: int, n: int) -> int:
        return n if self._rewinder is None else self._rewinder.way_back(sequence, n)

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        if self._rewinder is not None:
            why = f"sequence {source} has a recurrent state, which cannot be shared"
            raise BackendError(f"{self.model.name}: {why}")
        if end > 0 and self._cache.n_window:
            self._cache.check_window(source, end)
        self._cache.copy(source, destination, start, end)
        shared = self._texts[source]
        if start <= len(self._texts[destination]):
            self._texts[destination][start:] = shared[start : len(shared) if end < 0 else end]

    def remove(self, sequence: int, start: int = 0) -> None:
        if self._rewinder is not None:
            self._rewinder.remove(sequence, start)
            return
        if start > 0 and self._cache.n_window:
            self._cache.check_window(sequence, start)
        self._cache.remove(sequence, start)
        del self._texts[sequence][start:]

    def close(self) -> None:
        if self.computed_rows is not None:
            self.computed_rows.close()
        if self.handle:
            with contextlib.suppress(WorkerLostError):  # a lost worker's memory stays
                self.model.call(llama_cpp.llama_free, self.handle)
            self.handle = None
            self.model.loaded.release()


def _decode(context: Any, batch: Any) -> int:
    status = int(llama_cpp.llama_decode(context, batch))
    llama_cpp.llama_synchronize(context)
    return status


#: The most rows that a draft decodes one by one: four take 5 ms, and two together and two single
#: ones 10.
_MOST_BY_ROW = 8
#: llama.cpp's status of a decode that its callback ended.
_ENDED = 2
_DECODE_ERRORS = {
    1: "no room in the cache",
    -1: "a batch that makes no sense",
    -2: "memory could not be allocated",
    -3: "computing failed",
}


class _RowBuffers:
    """The arrays that llama.cpp's batch points to, allocated once."""

    def __init__(self, n_rows: int, n_sequences: int, n_outputs: int, cache: Cache) -> None:
        self._n_outputs = n_outputs
        self._with_guards = with_guards = cache.with_guards
        # Plain ctypes arrays: NumPy is slower for the few numbers of a round.
        self._tokens: Any = (ctypes.c_int32 * n_rows)()
        self._positions: Any = (ctypes.c_int32 * n_rows)()
        self._n_sequences = (ctypes.c_int32 * n_rows)()
        n_most = len(with_guards(tuple(range(n_sequences))))
        self._sequences: list[Any] = [(ctypes.c_int32 * n_most)() for _ in range(n_rows)]
        self._wants_logits: Any = (ctypes.c_int8 * n_rows)()
        #: The current content of `_sequences`. The next batch mostly needs the same, so nothing is
        #: written.
        self._written: list[tuple[int, ...]] = [()] * n_rows
        int32_p = ctypes.POINTER(ctypes.c_int32)
        self._pointers = (int32_p * n_rows)(
            *(ctypes.cast(sequences, int32_p) for sequences in self._sequences)
        )
        self.native = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._n_sequences,
            seq_id=self._pointers,
            logits=self._wants_logits,
        )

    def check(self, batch: Batch) -> int:
        n = len(batch.tokens)
        n_wanted = sum(batch.wants_logits)
        if not 0 < n <= len(self._tokens):
            raise BackendError(f"a batch of {n} rows; 1 to {len(self._tokens)} can be decoded")
        if n_wanted > self._n_outputs:
            what = f"{n_wanted} rows of logits; {self._n_outputs} at most"
            raise BackendError(f"a batch wants {what}")
        return n_wanted

    def fill(self, batch: Batch) -> int:
        n_wanted, n = self.check(batch), len(batch.tokens)
        self._tokens[:n] = batch.tokens
        self._positions[:n] = batch.positions
        self._wants_logits[:n] = batch.wants_logits
        for row, sequences in enumerate(batch.sequences):
            if sequences != self._written[row]:
                native = self._with_guards(sequences)
                self._sequences[row][: len(native)] = native
                self._n_sequences[row] = len(native)
                self._written[row] = sequences
        self.native.n_tokens = n
        return n_wanted


# --- opening a context ------------------------------------------------------------------------------

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
