"""The contexts of drafts that read hidden states of their target.

`specgen.llama.paired_drafts` has the models. A row of such a context has a token and, in
`Batch.hidden`, the hidden state before it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from specgen.errors import BackendError, SpecgenError
from specgen.llama.context import LlamaBackend
from specgen.llama.library import llama_cpp, llama_cpp_ext
from specgen.llama.model import LlamaModel
from specgen.llama.paired_drafts import AssistantModel, DflashModel, EagleModel, TrainedDraftModel
from specgen.method.backend import Batch
from specgen.method.hidden_states import HiddenStateBuffer
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits

#: The maximum number of nodes of a tree that are decoded at once.
_MAX_NODES = 8
#: The maximum number of rows of EAGLE-3 in one native batch, for which llama.cpp computes logits of
#: all rows or of none.
_MAX_EAGLE_ROWS = 32
#: The maximum number of an assistant's rows in a batch, per text. Drafts are chains, one token at a
#: time.
_MAX_ASSISTANT_ROWS = 8
#: The number of positions per token of some rotary embeddings. The last one is always 0.
_N_MROPE_POSITIONS = 4
#: The architectures whose MTP layers return hidden states only of the rows that want logits.
_WANTED_ROWS_ONLY = frozenset({"deepseek4", "mimo2", "qwen3next", "step35"})

#: The rows for which llama.cpp returns the draft's own hidden states.
StateRows: TypeAlias = Literal["none", "wanted", "all"]


@dataclass(frozen=True, slots=True)
class DraftContextSize:
    """The size of a context that several texts share."""

    #: The number of cells per text.
    n_ctx: int
    #: The number of texts.
    n_slots: int = 1
    #: The number of sequences per text.
    n_branches: int = 1
    #: The number of tokens, from the first, that both vocabularies have: only their logits are
    #: returned. None: all.
    n_shared_tokens: int | None = None


class RowLayout(NamedTuple):
    """The inputs and outputs of a context's rows."""

    #: The number of values that a row reads in addition to its token.
    n_inputs: int = 0
    #: The maximum number of rows that may want logits, per text.
    n_outputs: int = 1
    #: The rows for which llama.cpp returns the draft's own hidden states.
    states: StateRows = "wanted"


class HiddenStateContext(LlamaBackend):
    """A context of a draft that reads hidden states of its target; several texts may share it.

    Close it before the context of the target.
    """

    def __init__(
        self,
        model: LlamaModel,
        target: LlamaBackend | None,
        options: ContextOptions,
        size: DraftContextSize,
        clock: Callable[[], float],
    ) -> None:
        """Open a context.

        Args:
            model: The draft.
            target: The target's context, which from now on returns the hidden states that the draft
                reads; None for MTP layers.
            options: Threads, cache types, and the size of batches.
            size: The size of the context.
            clock: Measures `decode_s`.
        """
        # 1. Open the native context.
        layout = self._layout(model, size)
        self._state_rows = layout.states
        super().__init__(
            model,
            options,
            n_ctx=size.n_ctx * size.n_slots,
            clock=clock,
            n_sequences=size.n_branches * size.n_slots,
            n_outputs=layout.n_outputs * size.n_slots,
            n_branches=size.n_branches,
            is_mtp=target is None,
            other=target.handle if target is not None else None,
        )
        self._n_shared_tokens = size.n_shared_tokens
        #: The target's hidden states that the draft may still have to read, for each text.
        self.hidden_states_by_slot = tuple(HiddenStateBuffer() for _ in range(size.n_slots))
        #: The draft's hidden state after each sequence's last row that wanted logits.
        self._states: dict[int, Hidden] = {}

        # 2. Let the draft, and its target, return hidden states.
        if layout.states != "none":
            only_wanted = layout.states == "wanted"
            llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, only_wanted)
        if target is not None and isinstance(model, TrainedDraftModel):
            target.read_layers(model.layers)

        # 3. Give the native batch an array for the states that its rows read.
        #: The values that the rows of a native batch read in addition to their tokens,
        #: float32[n_rows, n_inputs]: a view of llama.cpp's batch.
        n_rows = max(self.n_batch, self.n_outputs)
        self._inputs = np.empty((n_rows, 0), np.float32)
        if layout.n_inputs:
            memory = (ctypes.c_float * (n_rows * layout.n_inputs))()
            self._native_batch.native.embd = memory
            self._inputs = np.ctypeslib.as_array(memory).reshape(n_rows, layout.n_inputs)

    def _layout(self, model: Any, size: DraftContextSize) -> RowLayout:
        """Return the layout of the rows; it is called before the context is opened."""
        raise NotImplementedError

    def state(self, sequence: int) -> Hidden:
        """Return the draft's hidden state after a sequence's last row that wanted logits.

        It is float32[n_embd].
        """
        return self._states[sequence]

    def decode_rows(self, batch: Batch) -> Logits:
        """Decode a batch, in several native ones where llama.cpp needs that.

        Returns:
            The logits of the rows that want them, float32[n_wanted, n_shared_tokens].
        """
        self._native_batch.check(batch)
        parts = list(self._parts(batch))
        logits_of_parts: list[Logits] = []
        for part in parts:
            logits = self._decode_part(part)[:, : self._n_shared_tokens]
            if len(logits) == 0:
                continue
            if part is not parts[-1]:
                logits = logits.copy()  # the next decode overwrites llama.cpp's memory
            logits_of_parts.append(logits)
        if not logits_of_parts:
            return np.empty((0, self.n_vocab), np.float32)
        if len(logits_of_parts) == 1:
            return logits_of_parts[0]  # without a copy
        return np.concatenate(logits_of_parts)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield the native batches into which a batch is split, in the order of its rows."""
        yield batch

    def _decode_part(self, batch: Batch) -> Logits:
        """Decode a native batch, and keep the draft's hidden states of rows that want logits.

        Returns:
            The logits of these rows, float32[n_wanted, n_vocab].
        """
        self._write_inputs(batch)
        logits = super().decode_rows(batch)
        n_wanted = len(logits)
        if n_wanted and self._state_rows != "none":
            only_wanted = self._state_rows == "wanted"
            states = self._mtp_states(n_wanted if only_wanted else len(batch))
            wanted_rows = [row for row, wants in enumerate(batch.wants_logits) if wants]
            for index, row in enumerate(wanted_rows):
                # `states` has either the wanted rows only, or all rows.
                state = states[index if only_wanted else row].copy()
                self._states.update(dict.fromkeys(batch.sequences[row], state))
        return logits

    def _write_inputs(self, batch: Batch) -> None:
        """Write `Batch.hidden` into the native batch, and zeros where a state is None."""
        if not self._inputs.shape[1]:  # this draft's rows read no states
            return
        inputs = self._inputs[: len(batch)]
        for row, state in enumerate(batch.hidden or [None] * len(batch)):
            inputs[row] = 0.0 if state is None else state


class MtpContext(HiddenStateContext):
    """A context of an MTP layer: a cache of that layer, separate from the target's.

    The row of a token reads the hidden state before it: the target's or, for a drafted token, the
    layer's own. llama.cpp computes one layer at a time, so each layer has a context. The context of
    the first layer opens and closes the others.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        size: DraftContextSize,
        clock: Callable[[], float],
        *,
        layer: int = 0,
    ) -> None:
        """Open the context of a layer; that of layer 0 also opens those of the other layers.

        Raises:
            BackendError: If the MTP layers of the model cannot draft.
        """
        if model.why_no_mtp:
            raise BackendError(f"{model.name}: {model.why_no_mtp}")
        super().__init__(model, None, options, size, clock)
        self.compute_frequent_tokens()
        llama_cpp_ext.llama_set_nextn_layer_offset(self.handle, layer)
        #: The contexts of all layers, if this is the first layer's.
        self.layers: tuple[MtpContext, ...] = (self,)
        if layer == 0:
            chain_size = replace(size, n_branches=1)
            try:
                for other in range(1, model.n_mtp_layers):
                    context = MtpContext(model, options, chain_size, clock, layer=other)
                    self.layers += (context,)
            except SpecgenError:
                self.close()
                raise

    def _layout(
        self,
        model: LlamaModel,
        size: DraftContextSize,
    ) -> RowLayout:
        states: StateRows = "wanted" if model.architecture in _WANTED_ROWS_ONLY else "all"
        return RowLayout(model.n_embd_out, min(size.n_branches, _MAX_NODES), states)

    def close(self) -> None:
        """Close the contexts of all layers."""
        for layer in self.layers[1:]:
            layer.close()
        super().close()


class EagleContext(HiddenStateContext):
    """A context of an EAGLE-3 draft: a cache of its layer, separate from the target's.

    A row reads one hidden state. For a token of the text, the draft's encoder makes it from the
    inputs of some of the target's layers; for a drafted token it is the draft's own.
    """

    def _layout(
        self,
        model: EagleModel,
        size: DraftContextSize,
    ) -> RowLayout:
        rows_per_slot = -(-_MAX_EAGLE_ROWS // size.n_slots)  # rounded up
        n_outputs = max(rows_per_slot, min(size.n_branches, _MAX_NODES))
        return RowLayout(model.n_embd, n_outputs)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield the first rows, which want no logits, as one part, and the others in small parts.

        llama.cpp computes logits of all rows of a native batch or of none, so a part with logits
        has at most `_MAX_EAGLE_ROWS`. A batch that is no longer than that is a single part.
        """
        n_without_logits = len(batch)
        if any(batch.wants_logits):
            n_before_first = batch.wants_logits.index(True)
            n_without_logits = min(n_before_first, max(0, len(batch) - _MAX_EAGLE_ROWS))
        if n_without_logits:
            yield batch.part(0, n_without_logits)
        for start in range(n_without_logits, len(batch), _MAX_EAGLE_ROWS):
            yield batch.part(start, start + _MAX_EAGLE_ROWS)

    def _decode_part(self, batch: Batch) -> Logits:
        """Encode states of the target, decode the rows, and return the logits of wanted rows."""
        self._encode(batch)
        wanted_rows = [row for row, wants in enumerate(batch.wants_logits) if wants]
        if wanted_rows:
            batch.wants_logits = [True] * len(batch)  # see `_parts`
        logits = super()._decode_part(batch)
        if wanted_rows and wanted_rows[0] == len(batch) - len(wanted_rows):
            return logits[wanted_rows[0] :]  # usually they are the last rows: a view is enough
        return logits[wanted_rows]

    def _encode(self, batch: Batch) -> None:
        """Replace the inputs of the target's layers in `batch.hidden` with encoded states.

        The inputs of all layers together are longer, float32[n_read], than a state,
        float32[n_embd]. States of drafted tokens have that length already and stay.
        """
        encode = partial(self.model.call, llama_cpp.llama_encode)
        rows = [
            row
            for row, state in enumerate(batch.hidden)
            if state is not None and len(state) != self.model.n_embd
        ]
        for start in range(0, len(rows), _MAX_EAGLE_ROWS):
            part = rows[start : start + _MAX_EAGLE_ROWS]
            n = len(part)
            read = np.stack([np.asarray(batch.hidden[row], np.float32) for row in part])
            native = llama_cpp.llama_batch(n_tokens=n, embd=_floats_pointer(read))
            self._compute(encode, native, f"encode {n} hidden states")
            encoded = self._mtp_states(n).copy()
            for row, state in zip(part, encoded, strict=True):
                batch.hidden[row] = state


class DflashContext(HiddenStateContext):
    """A context of a DFlash or DSpark draft: a cache of the text, separate from the target's.

    A block is the last token of the text, followed by masks. One decode predicts all of its tokens.
    A batch has two kinds of rows:

    - Rows of the text have states of the target (`Batch.hidden`), from which keys and values are
      computed, and no logits.
    - Rows of a block have no states, and all of them want logits. (With DSpark, a prediction also
      depends on the likeliest token before it.)
    """

    def __init__(
        self,
        model: DflashModel,
        target: LlamaBackend,
        options: ContextOptions,
        size: DraftContextSize,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(model, target, options, size, clock)
        #: The draft.
        self.draft = model
        is_causal = model.metadata("dflash.attention.causal") == "true"
        llama_cpp.llama_set_causal_attn(self.handle, is_causal)
        rope = llama_cpp.llama_model_rope_type(model.handle)
        self._n_positions = _N_MROPE_POSITIONS if rope == llama_cpp.LLAMA_ROPE_TYPE_MROPE else 1

    def _layout(
        self,
        model: DflashModel,
        _size: DraftContextSize,
    ) -> RowLayout:
        return RowLayout(n_outputs=model.n_max + 1, states="none")

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield rows of the text and rows of blocks apart; for DSpark each block alone."""
        start = 0
        states = batch.hidden or [None] * len(batch)
        rows = zip(states, batch.sequences, strict=True)
        for _, part in itertools.groupby(rows, self._part_key):
            end = start + len(list(part))
            yield batch.part(start, end)
            start = end

    def _part_key(self, row: tuple[Hidden | None, tuple[int, ...]]) -> object:
        """Return a key that neighbouring rows share if they may be in one native batch."""
        hidden, sequences = row
        is_text = hidden is not None
        if self.draft.is_chained and not is_text:
            return sequences
        return is_text

    def _decode_part(self, batch: Batch) -> Logits:
        """Decode rows of blocks, or let the draft read the target's states of rows of the text."""
        states = [state for state in batch.hidden if state is not None]
        if not states:  # `_parts` never mixes the two kinds of rows
            return super()._decode_part(batch)

        # 1. Fill a native batch that has states in place of tokens.
        self._native_batch.fill(batch)
        rows = self._native_batch.native
        read = np.stack(states)
        # If tokens have several positions, llama.cpp reads the first position of each token, then
        # the second of each token, and so on. All but the last (0) are the position in the text.
        n_filled = min(self._n_positions, _N_MROPE_POSITIONS - 1)
        positions: Any = (ctypes.c_int32 * (len(batch) * self._n_positions))()
        positions[: len(batch) * n_filled] = batch.positions * n_filled
        native = llama_cpp.llama_batch(
            n_tokens=len(batch),
            embd=_floats_pointer(read),
            pos=positions,
            n_seq_id=rows.n_seq_id,
            seq_id=rows.seq_id,
            logits=rows.logits,
        )
        self._compute(self._decode_native, native, f"read {len(batch)} hidden states")
        self.n_decoded_rows += len(batch)
        return np.empty((0, self.n_vocab), np.float32)


class AssistantContext(HiddenStateContext):
    """A context of a Gemma 4 assistant, which reads the cells of its target's context.

    The assistant writes no cells of its own. Each row has a token, the hidden state before it (the
    target's or, for a drafted token, its own), and the position after the target's last token.
    """

    def __init__(
        self,
        model: AssistantModel,
        target: LlamaBackend,
        options: ContextOptions,
        size: DraftContextSize,
        clock: Callable[[], float],
    ) -> None:
        """Open a context with the same cells and sequences as the target's."""
        size = replace(
            size,
            n_ctx=target.n_ctx // size.n_slots,
            n_branches=target.n_sequences // size.n_slots,
        )
        options = replace(options, n_batch=_MAX_ASSISTANT_ROWS * size.n_slots)
        super().__init__(model, target, options, size, clock)
        self.compute_frequent_tokens()

    def _layout(
        self,
        model: AssistantModel,
        _size: DraftContextSize,
    ) -> RowLayout:
        return RowLayout(model.n_embd_out, _MAX_ASSISTANT_ROWS)

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch. The texts of the sequences stay empty, since there are no cells."""
        return self.decode_rows(batch)


def _floats_pointer(values: Hidden) -> Any:
    return values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
