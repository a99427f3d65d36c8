"""A context of a model, which is specgen's `Backend`: its cache, and the decoding of batches."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError, DecodeEndedError, ModelFileError, WorkerLostError
from specgen.llama.cache import KvCache
from specgen.llama.cuda_graphs import replays_graphs
from specgen.llama.kernels.frequent_rows import FrequentRows
from specgen.llama.library import (
    check_threads,
    keep_layer_input,
    last_error,
    layer_input,
    llama_cpp,
    llama_cpp_ext,
)
from specgen.llama.model import LlamaModel
from specgen.llama.native_batch import NativeBatch
from specgen.llama.native_context import ContextSize, open_context
from specgen.llama.rollback import CellSequences, RecurrentSequences
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.method.backend import Batch, Rollback
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits

#: GGML's limit on threads.
MAX_THREADS = 512
#: The maximum number of rows that a draft decodes one by one where graphs are replayed: four single
#: rows take 5 ms, but two rows in one batch and two single ones 10 ms.
_MAX_SINGLE_ROWS = 8
#: llama.cpp's status for a decode that the abort callback ended.
_ENDED = 2
#: The meaning of llama.cpp's other statuses.
_DECODE_ERRORS = {
    1: "no room in the cache",
    -1: "an invalid batch",
    -2: "memory could not be allocated",
    -3: "computing failed",
}


class LlamaBackend:
    """A context of a model; `specgen.method.backend.Backend` documents its methods.

    Whoever creates it also closes it, before closing its model.
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
        """Open a context.

        Args:
            model: The model.
            options: Threads, cache types, and the size of batches.
            n_ctx: The number of cells of the cache, one per token.
            clock: Measures `decode_s`.
            n_sequences: The number of sequences, which share the cells.
            n_outputs: The maximum number of rows of a batch that may want logits.
            n_rollback: The number of these rows that are likely to be dropped again; None: all but
                one.
            n_branches: The number of sequences per text: its own, then those of its branches. With
                a sliding window, only a text's own sequence can be rolled back.
            on_tensor: A native callback that receives the computed tensors. The caller keeps it
                alive.
            is_mtp: Whether the context is for the model's MTP layers.
            other: The native context of the target, if a draft shares its matrices or cells.

        Raises:
            MemoryLimitError: If the context does not fit into memory.
            UsageError: If the options contradict each other.
            ModelFileError: If the model has no KV cache.
        """
        self.model = model
        self._clock = clock
        #: llama.cpp's pointer to the context; None after `close`.
        self.handle: Any = None
        # `Backend` documents these.
        self.n_ctx = n_ctx
        self.n_batch = min(options.n_batch, n_ctx)
        self.n_sequences = n_sequences
        self.n_outputs = n_outputs
        self.decode_s = 0.0
        self.n_decoded_rows = 0
        self.vocabulary: LlamaVocabulary = model.vocabulary
        self.n_vocab = self.vocabulary.n_tokens
        self.is_unwanted: Callable[[], bool] | None = None
        self.replays_graphs = replays_graphs(model, options.n_gpu_layers)
        #: The rows of the output matrix that are computed; None: all.
        self._computed_rows: FrequentRows | None = None

        # 1. Open the native context.
        n_rows = max(self.n_batch, n_outputs)
        size = ContextSize(
            n_ctx=n_ctx,
            n_rows=n_rows,
            n_outputs=n_outputs,
            n_sequences=n_sequences,
            n_branches=n_branches,
            is_mtp=is_mtp,
            on_tensor=on_tensor,
            other=other,
        )
        if n_rollback is None:
            n_rollback = n_outputs - 1
        context = open_context(model, options, size, n_rollback)
        self.handle = context.handle
        model.loaded.share()  # the weights are needed until the context is closed
        self._decode_native = partial(model.call, _decode) if model.is_remote else _decode

        # 2. Wrap its cache and its batch.
        #: The cells and states of the sequences.
        self._cache = KvCache(model, self.handle, context.guards)
        if not self._cache:
            self.close()
            raise ModelFileError(
                f"{model.path}: the model has no KV cache, so it cannot generate text"
            )
        self._native_batch = NativeBatch(n_rows, n_sequences, n_outputs, self._cache)
        #: The arrays of `_view`, by address; each is as long as the longest one that was returned.
        self._views: dict[int, NDArray[np.float32]] = {}
        #: The layers whose inputs `decode_hidden` returns, for a draft that reads them.
        self._read_layers: tuple[int, ...] = ()

        #: The tokens of the sequences, and how they are rolled back.
        self._sequences = self._new_sequences(size, context.n_snapshots)
        self.rollback: Rollback = self._sequences.rollback

    def _new_sequences(
        self, size: ContextSize, n_snapshots: int
    ) -> CellSequences | RecurrentSequences:
        """Return empty sequences, with the kind of rollback that the model's cache allows."""
        if self.model.has_recurrent_state and not size.is_mtp:
            return RecurrentSequences(
                self._cache,
                self.decode_rows,
                n_sequences=size.n_sequences,
                n_rows=size.n_rows,
                n_snapshots=n_snapshots,
            )
        return CellSequences(self._cache, self.decode_rows, size.n_sequences)

    # --- decoding

    def decode(self, batch: Batch) -> Logits:
        """See `Backend.decode`."""
        if self.rollback == "cells":
            return self._sequences.decode(batch)
        # With recurrent states, a decode first carries out rollbacks: states are restored, and
        # tokens decoded again. All of that counts as decoding time.
        self._native_batch.check(batch)
        started_s = self._clock()
        before_s = self.decode_s
        try:
            return self._sequences.decode(batch)
        finally:
            self.decode_s = before_s + self._clock() - started_s

    def decode_rows(self, batch: Batch) -> Logits:
        """Decode a batch natively: no rollback is made, and the sequences' texts are not updated.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_vocab]: a view that is valid
            until the next decode.

        Raises:
            BackendError: If llama.cpp cannot decode the batch.
            DecodeEndedError: If `is_unwanted` ended it.
        """
        if self.model.is_closed:
            self.model.check_open()
        if self._decodes_row_by_row(batch):
            return self._decode_row_by_row(batch)

        # 1. Write the rows where llama.cpp reads them.
        self._check_positions(batch)
        n_wanted = self._native_batch.fill(batch)

        # 2. Let llama.cpp compute them, for a draft perhaps only with the output matrix's rows of
        #    frequent tokens.
        limit: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._computed_rows is not None:
            limit = self._computed_rows.limit(batch.tokens)
        n = len(batch.tokens)
        action = f"decode {n} tokens at position {batch.positions[0]} of {self.n_ctx}"
        with limit, self._ended_if_unwanted():
            self._compute(self._decode_native, self._native_batch.native, action)
        self.n_decoded_rows += n

        # 3. Return llama.cpp's own memory: nothing is copied.
        if n_wanted == 0:
            return np.empty((0, self.n_vocab), np.float32)
        return self._view(llama_cpp.llama_get_logits(self.handle), n_wanted, self.n_vocab)

    def _check_positions(self, batch: Batch) -> None:
        """Raise `BackendError` for a position that the model has not learned.

        llama.cpp would end the process.
        """
        n_positions = 1 + max(batch.positions, default=0)
        n_learned = self.model.limited_n_ctx(n_positions)
        if n_positions > n_learned:
            raise BackendError(
                f"{self.model.name}: a text of {n_positions} tokens, but it has learned only "
                f"{n_learned} positions"
            )

    def _decodes_row_by_row(self, batch: Batch) -> bool:
        """Whether a small batch is faster in single rows, since the device replays their graph.

        That is never so with a recurrent state, whose snapshots go back within one batch.
        """
        if not self.replays_graphs or self.n_outputs > 1 or self.rollback != "cells":
            return False
        return 1 < len(batch) <= _MAX_SINGLE_ROWS

    def _decode_row_by_row(self, batch: Batch) -> Logits:
        """Decode each row in a batch of its own.

        All of them compute logits: otherwise the device could not replay the same graph.

        Returns:
            The logits of the last row if it wants any, float32[0 or 1, n_vocab].
        """
        n_wanted = self._native_batch.check(batch)
        rows = [batch.part(row, row + 1) for row in range(len(batch))]
        *first, last = [replace(row, wants_logits=[True]) for row in rows]
        for row in first:
            self.decode_rows(row)
        return self.decode_rows(last)[:n_wanted]

    def _compute(
        self,
        function: Callable[[Any, Any], int],
        native: Any,
        action: str,
    ) -> None:
        """Let llama.cpp compute a native batch, and add the time to `decode_s`.

        Args:
            function: Takes the context and the batch, and returns llama.cpp's status.
            native: The native batch.
            action: What it does, for the message of an error: "decode 3 tokens".

        Raises:
            DecodeEndedError: If `is_unwanted` ended the decode.
            BackendError: If llama.cpp fails.
        """
        check_threads()
        started_s = self._clock()
        status = function(self.handle, native)
        self.decode_s += self._clock() - started_s
        if status == _ENDED:
            raise DecodeEndedError(f"{self.model.name}: a decode was ended")
        if status != 0:
            raise BackendError(
                f"{self.model.name}: llama.cpp could not {action} "
                f"({_DECODE_ERRORS.get(status)}, status {status}): {last_error()}"
            )

    @contextlib.contextmanager
    def _ended_if_unwanted(self) -> Iterator[None]:
        """Let llama.cpp ask after each operator in the block whether the decode is still wanted.

        Python also runs its signal handlers then. If one raises an exception (Ctrl-C), the decode
        ends, and the exception is raised after it.
        """
        is_unwanted = self.is_unwanted
        if is_unwanted is None or self.model.is_remote:
            yield
            return
        raised: list[BaseException] = []

        def must_end(_data: object) -> bool:
            try:
                return bool(raised) or is_unwanted()  # once an exception was raised, it stays so
            except BaseException as error:  # noqa: BLE001 - native code cannot pass it on
                raised.append(error)
                return True

        callback = llama_cpp.ggml_abort_callback(must_end)  # kept alive until the decode is done
        llama_cpp.llama_set_abort_callback(self.handle, callback, None)
        try:
            yield
        finally:
            no_callback = llama_cpp.ggml_abort_callback()  # a null pointer
            llama_cpp.llama_set_abort_callback(self.handle, no_callback, None)
            if raised:
                raise raised[0]

    def _view(
        self,
        pointer: Any,
        n_rows: int,
        n_values: int,
    ) -> NDArray[np.float32]:
        """Return llama.cpp's results at a pointer, float32[n_rows, n_values], without a copy.

        The arrays are cached by address: llama.cpp mostly returns the same few buffers, and making
        an array takes longer than slicing one. An array whose buffer llama.cpp has freed stays in
        the cache, which is harmless: it is only returned if llama.cpp gives the same address again,
        and then at most as many values as llama.cpp has there now.

        Raises:
            BackendError: If the pointer is null.
        """
        if not pointer:
            raise BackendError(f"{self.model.name}: llama.cpp gave no results")
        address = ctypes.addressof(pointer.contents)
        size = n_rows * n_values
        view = self._views.get(address)
        if view is None or len(view) < size:
            native = (ctypes.c_float * size).from_address(address)
            view = np.ctypeslib.as_array(native)
            self._views[address] = view
        return view[:size].reshape(n_rows, n_values)

    # --- hidden states

    def decode_hidden(
        self,
        batch: Batch,
        *,
        all_rows: bool = False,
    ) -> tuple[Logits, Hidden]:
        """See `Backend.decode_hidden`.

        Without `all_rows`, llama.cpp computes logits for every row, which is expensive for a
        prompt. Recurrent models do not support it, since their batches may get additional rows.

        Raises:
            BackendError: If the model is recurrent, and `all_rows` is false.
        """
        if not all_rows:
            return self._decode_final_states(batch)
        if self._read_layers:
            return self._decode_layer_inputs(batch)
        return self._decode_mtp_states(batch)

    def _decode_final_states(self, batch: Batch) -> tuple[Logits, Hidden]:
        """Decode, and return the logits and the final hidden states of the rows that want logits.

        Returns:
            float32[n_wanted, n_vocab], and float32[n_wanted, n_embd].
        """
        if self.rollback != "cells":
            raise BackendError(f"{self.model.name}: no hidden states of a recurrent model")
        n = len(batch)
        if n > self.n_outputs:
            raise BackendError(f"a batch wants {n} rows of hidden states; {self.n_outputs} at most")
        llama_cpp.llama_set_embeddings(self.handle, True)
        try:
            self.decode(batch)
            hidden = self._view(llama_cpp.llama_get_embeddings(self.handle), n, self.model.n_embd)
        finally:
            llama_cpp.llama_set_embeddings(self.handle, False)
        # In this mode llama.cpp also returns the logits of all rows.
        logits = self._view(llama_cpp.llama_get_logits(self.handle), n, self.n_vocab)
        wanted = np.flatnonzero(batch.wants_logits)
        if len(wanted) == n:
            return logits, hidden
        return logits[wanted], hidden[wanted]

    def _decode_layer_inputs(self, batch: Batch) -> tuple[Logits, Hidden]:
        """Decode, and return the inputs of some layers side by side.

        Returns:
            The logits, and float32[n, n_layers * n_embd].
        """
        logits = self.decode(batch)
        n_rows = self._native_batch.native.n_tokens
        inputs: list[Hidden] = []
        for layer in self._read_layers:
            layer_rows = self._view(layer_input(self.handle, layer), n_rows, self.model.n_embd)
            # Rows that a rollback decoded again come first, and are left out.
            inputs.append(layer_rows[-len(batch) :])
        return logits, np.concatenate(inputs, axis=1)

    def _decode_mtp_states(self, batch: Batch) -> tuple[Logits, Hidden]:
        """Decode, and return the logits, and the hidden states of all rows that MTP layers read.

        Returns:
            float32[n_wanted, n_vocab], and float32[n, n_embd_out].
        """
        llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, False)
        try:
            logits = self.decode(batch)
            n_rows = self._native_batch.native.n_tokens
            return logits, self._mtp_states(n_rows)[-len(batch) :]
        finally:
            llama_cpp_ext.llama_set_embeddings_nextn(self.handle, False, False)

    def _mtp_states(self, n_rows: int) -> Hidden:
        """Return the hidden states for MTP layers, float32[n_rows, n_embd_out], after a decode."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self.handle)
        return self._view(pointer, n_rows, self.model.n_embd_out)

    def read_layers(self, layers: Sequence[int]) -> None:
        """Let `decode_hidden` with `all_rows` return the inputs of these layers.

        The model's architecture must be in `paired_drafts.HOOKED`.
        """
        for layer in set(layers) - set(self._read_layers):
            keep_layer_input(self.handle, layer)
        self._read_layers = tuple(layers)

    def compute_frequent_tokens(self) -> None:
        """Compute only the logits of frequent tokens, if the kernels can and it pays.

        The logits of the other tokens are -infinity from now on.
        """
        self._computed_rows = FrequentRows.of(self.vocabulary)

    # --- threads

    def set_threads(self, n_single: int, n_batch: int) -> None:
        """Set the numbers of threads.

        Args:
            n_single: The number of threads for batches of one row.
            n_batch: The number of threads for larger batches.

        Raises:
            ValueError: If a number is not from 1 to `MAX_THREADS`.
        """
        if not (1 <= n_single <= MAX_THREADS and 1 <= n_batch <= MAX_THREADS):
            raise ValueError(f"{n_single} and {n_batch} threads; give 1 to {MAX_THREADS}")
        llama_cpp.llama_set_n_threads(self.handle, n_single, n_batch)

    # --- sequences

    def length(self, sequence: int) -> int:
        """See `Backend.length`."""
        return len(self._sequences.text(sequence))

    def text(self, sequence: int) -> Sequence[int]:
        """See `Backend.text`."""
        return self._sequences.text(sequence)

    def checkpoint(self, sequence: int) -> None:
        """See `Backend.checkpoint`."""
        self._sequences.checkpoint(sequence)

    def anchor(self, sequence: int) -> None:
        """See `Backend.anchor`."""
        self._sequences.anchor(sequence)

    def n_restorable(self, sequence: int, n: int) -> int:
        """See `Backend.n_restorable`."""
        return self._sequences.n_restorable(sequence, n)

    def copy(
        self,
        source: int,
        destination: int,
        start: int = 0,
        end: int = -1,
    ) -> None:
        """See `Backend.copy`."""
        self._sequences.copy(source, destination, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        """See `Backend.remove`."""
        self._sequences.remove(sequence, start)

    def saved_bytes(self, sequence: int) -> int:
        """Return the size of what `saved_text` would return."""
        return self._cache.saved_bytes(sequence)

    def saved_text(self, sequence: int) -> NDArray[np.uint8]:
        """Return the state of a sequence's text, uint8[n_bytes].

        Raises:
            BackendError: If llama.cpp cannot save it.
        """
        return self._cache.saved(sequence)

    def restore_text(
        self,
        sequence: int,
        tokens: Sequence[int],
        state: NDArray[np.uint8],
    ) -> bool:
        """Give a sequence a text whose state was saved.

        Returns:
            Whether llama.cpp took the state; if not, the sequence is empty.
        """
        self.remove(sequence)
        is_restored = self._sequences.restore(sequence, tokens, state)
        if not is_restored:
            self.remove(sequence)
        return is_restored

    def close(self) -> None:
        """Free the context, and the weights if nothing else uses them. It may be called twice."""
        if self._computed_rows is not None:
            self._computed_rows.close()
        if self.handle:
            with contextlib.suppress(WorkerLostError):  # a lost worker's memory stays
                self.model.call(llama_cpp.llama_free, self.handle)
            self.handle = None
            self.model.loaded.release()


def _decode(context: Any, batch: Any) -> int:
    """Decode a native batch, and wait until it is done; return llama.cpp's status."""
    status = int(llama_cpp.llama_decode(context, batch))
    llama_cpp.llama_synchronize(context)
    return status
