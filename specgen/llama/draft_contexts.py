"""The contexts of drafts that read what their target computes; `specgen.llama.draft_models` has
their files.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from specgen.errors import BackendError, SpecgenError
from specgen.llama.context import LlamaBackend
from specgen.llama.draft_models import AssistantModel, DflashModel, EagleModel, TrainedModel
from specgen.llama.kernels.frequent_rows import compute_frequent_tokens
from specgen.llama.library import llama_cpp, llama_cpp_ext
from specgen.llama.model import LlamaModel
from specgen.method.backend import Batch
from specgen.method.hidden_states import HiddenStateBuffer
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits

#: The most nodes of a tree that are decoded at once.
_WIDEST = 8
#: The most rows of EAGLE-3 in one native batch: llama.cpp computes logits of all rows of a batch or
#: of none.
_MOST_OUTPUTS = 32
#: The most rows of an assistant in a batch for each text: drafts are chains, a token at a time.
_N_ROWS = 8
#: llama.cpp's number of rotary embeddings with several positions a token, and how many these are.
_MROPE, _N_POSITIONS = 8, 4
#: The architectures whose MTP layers give hidden states only for the rows that want logits.
_WANTED_ROWS_ONLY = frozenset({"deepseek4", "mimo2", "qwen3next", "step35"})


class Rows(NamedTuple):
    """What the rows of a context read and give."""

    #: The number of values that a row reads beside its token.
    n_inputs: int = 0
    #: The most rows that may want logits, for each text.
    n_outputs: int = 1
    #: Whether the context gives hidden states of its own: of rows that want logits, or of all.
    states: Literal["none", "wanted", "all"] = "wanted"


class StatesContext(LlamaBackend):
    """A context of a draft that reads what its target computes; `n_slots` texts of `n_ctx` tokens
    share it. `trails` keep the target's states that the draft may still have to read. A row of a
    batch has a token and the state before it (`Batch.hidden`; None: zeros). Logits are of the first
    `n_shared_tokens` tokens, which the vocabularies share. Close it before the context of the
    `target`, which from now on hands out the inputs of the draft's layers.
    """

    def __init__(
        self,
        model: LlamaModel,
        target: LlamaBackend | None,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_shared_tokens: int | None = None,
        n_branches: int = 1,
        n_slots: int = 1,
    ) -> None:
        self._kind = kind = self._rows_of(model, target, n_branches, n_slots)
        super().__init__(
            model,
            options,
            n_ctx=n_ctx * n_slots,
            clock=clock,
            n_sequences=n_branches * n_slots,
            n_outputs=kind.n_outputs * n_slots,
            n_branches=n_branches,
            is_mtp=target is None,
            other=target.handle if target is not None else None,
        )
        self._n_shared_tokens = n_shared_tokens
        self.hidden_states_by_slot = tuple(HiddenStateBuffer() for _ in range(n_slots))
        #: The draft's hidden state after each sequence's last row that wanted logits.
        self._states: dict[int, Hidden] = {}
        if kind.states != "none":
            of_wanted = kind.states == "wanted"
            llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, of_wanted)
        if target is not None and isinstance(model, TrainedModel):
            target.hand_out(model.layers)
        n_rows = max(self.n_batch, self.n_outputs)
        self._inputs = np.empty((n_rows, 0), np.float32)
        if kind.n_inputs:
            memory = (ctypes.c_float * (n_rows * kind.n_inputs))()
            self._rows.native.embd = memory
            self._inputs = np.ctypeslib.as_array(memory).reshape(n_rows, kind.n_inputs)

    def _rows_of(
        self, model: Any, target: LlamaBackend | None, n_branches: int, n_slots: int
    ) -> Rows:
        raise NotImplementedError

    def state(self, sequence: int) -> Hidden:
        return self._states[sequence]

    def decode_rows(self, batch: Batch) -> Logits:
        self._rows.check(batch)
        parts = list(self._parts(batch))
        found = [np.empty((0, self.n_vocab), np.float32)]
        for part in parts:
            rows = self._decode_part(part)[:, : self._n_shared_tokens]
            if len(rows):  # the next part replaces them
                found.append(rows if part is parts[-1] else rows.copy())
        return found[-1] if len(found) <= 2 else np.concatenate(found[1:])

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        yield batch

    def _decode_part(self, batch: Batch) -> Logits:
        if self._inputs.shape[1]:
            inputs = self._inputs[: len(batch)]
            for row, state in enumerate(batch.hidden or [None] * len(batch)):
                inputs[row] = 0.0 if state is None else state
        logits = super().decode_rows(batch)
        n_wanted = sum(batch.wants_logits)
        if n_wanted and self._kind.states != "none":
            of_wanted = self._kind.states == "wanted"
            states = self._mtp_states(n_wanted if of_wanted else len(batch))
            wanted = [row for row, wants in enumerate(batch.wants_logits) if wants]
            for index, row in enumerate(wanted):
                state = states[index if of_wanted else row].copy()
                self._states.update(dict.fromkeys(batch.sequences[row], state))
        return logits


class MtpContext(StatesContext):
    """A context of an MTP layer: a cache of that layer, beside the target's own. The row of a token
    has the state before it: the target's or, for a drafted token, the layer's own. llama.cpp
    computes one layer at a time, so each has a context; the first opens and closes the others
    (`layers`). Raises `BackendError`.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        *,
        n_branches: int = 1,
        layer: int = 0,
        **sizes: Any,
    ) -> None:
        if model.why_no_mtp:
            raise BackendError(f"{model.name}: {model.why_no_mtp}")
        super().__init__(model, None, options, n_branches=n_branches, **sizes)
        compute_frequent_tokens(self)
        llama_cpp_ext.llama_set_nextn_layer_offset(self.handle, layer)
        #: The contexts of all layers, if this is the first one's.
        self.layers: tuple[MtpContext, ...] = (self,)
        try:
            for other in range(1, 0 if layer else model.n_mtp_layers):
                self.layers += (MtpContext(model, options, layer=other, **sizes),)
        except SpecgenError:
            self.close()
            raise

    def _rows_of(self, model: LlamaModel, _target: object, n_branches: int, n_slots: int) -> Rows:
        n, are_wanted = model.n_embd_out, model.architecture in _WANTED_ROWS_ONLY
        return Rows(n, min(n_branches, _WIDEST), "wanted" if are_wanted else "all")

    def close(self) -> None:
        for layer in self.layers[1:]:
            layer.close()
        super().close()


class EagleContext(StatesContext):
    """A context of an EAGLE-3 draft: a cache of its layer, beside the target's. The state of a row
    (`Batch.hidden`) is what the target's layers read, which is encoded here, or, for a drafted
    token, the draft's own.
    """

    def _rows_of(
        self, model: EagleModel, target: LlamaBackend | None, n_branches: int, n_slots: int
    ) -> Rows:
        n_outputs = max(-(-_MOST_OUTPUTS // n_slots), min(n_branches, _WIDEST))
        return Rows(model.n_embd, n_outputs)

    def _encode(self, batch: Batch) -> None:
        """Encode what the target's layers read, float32[n_read] for a row, as hidden states,
        float32[n_embd].
        """
        rows = [
            row
            for row, state in enumerate(batch.hidden)
            if state is not None and len(state) != self.model.n_embd
        ]
        for start in range(0, len(rows), _MOST_OUTPUTS):
            some = rows[start : start + _MOST_OUTPUTS]
            read = np.stack([np.asarray(batch.hidden[row], np.float32) for row in some])
            embd = read.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            native = llama_cpp.llama_batch(n_tokens=len(some), embd=embd)
            encode = partial(self.model.call, llama_cpp.llama_encode)
            self._run(encode, native, f"encode {len(some)} hidden states")
            for row, state in zip(some, self._mtp_states(len(some)).copy(), strict=True):
                batch.hidden[row] = state

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        n_silent = [*batch.wants_logits, True].index(True)
        if n_silent < len(batch):
            n_silent = min(n_silent, max(0, len(batch) - _MOST_OUTPUTS))
        if n_silent:
            yield batch.part(0, n_silent)
        for start in range(n_silent, len(batch), _MOST_OUTPUTS):
            yield batch.part(start, start + _MOST_OUTPUTS)

    def _decode_part(self, batch: Batch) -> Logits:
        self._encode(batch)
        wanted = [row for row, wants in enumerate(batch.wants_logits) if wants]
        if wanted:
            batch.wants_logits = [True] * len(batch)
        logits = super()._decode_part(batch)
        are_last = wanted[:1] == [len(batch) - len(wanted)]  # usually, and then nothing is copied
        return logits[wanted[0] :] if are_last else logits[wanted]


class DflashContext(StatesContext):
    """A context of a DFlash or DSpark draft: a cache of the text, beside the target's. A block, the
    last token and masks, is predicted in one decode. Its rows have no states (`Batch.hidden`) and
    all want logits; those of the text have the target's, of which keys and values are made, and
    give none. (DSpark adds a bias by the likeliest token before to each.)
    """

    def __init__(self, model: DflashModel, *context: Any, **sizes: Any) -> None:
        super().__init__(model, *context, **sizes)
        #: The draft, and what it predicts from.
        self.draft = model
        is_causal = model.metadata("dflash.attention.causal") == "true"
        llama_cpp.llama_set_causal_attn(self.handle, is_causal)
        rope = llama_cpp.llama_model_rope_type(model.handle)
        self._n_positions = _N_POSITIONS if rope == _MROPE else 1

    def _rows_of(self, model: DflashModel, *_: object) -> Rows:
        return Rows(n_outputs=model.n_most + 1, states="none")

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        hidden, start = batch.hidden or [None] * len(batch), 0
        for _, rows in itertools.groupby(zip(hidden, batch.sequences, strict=True), self._part):
            end = start + len(list(rows))
            yield batch.part(start, end)
            start = end

    def _part(self, row: tuple[Hidden | None, tuple[int, ...]]) -> tuple[bool, tuple[int, ...]]:
        """Return what rows of a native batch have in common: hidden states or tokens, and chained
        blocks of one size.
        """
        hidden, sequences = row
        is_text = hidden is not None
        return is_text, sequences if self.draft.is_chained and not is_text else ()

    def _decode_part(self, batch: Batch) -> Logits:
        read = [state for state in batch.hidden if state is not None]
        if not read:
            return super()._decode_part(batch)
        self._rows.fill(batch)
        rows, states = self._rows.native, np.stack(read)
        positions = (ctypes.c_int32 * (len(batch) * self._n_positions))(
            *(batch.positions * min(self._n_positions, 3))
        )
        native = llama_cpp.llama_batch(
            n_tokens=len(batch),
            embd=states.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=positions,
            n_seq_id=rows.n_seq_id,
            seq_id=rows.seq_id,
            logits=rows.logits,
        )
        self._run(self._decode_native, native, f"read {len(batch)} hidden states")
        self.n_decoded_rows += len(batch)
        return np.empty((0, self.n_vocab), np.float32)


class AssistantContext(StatesContext):
    """A context of an assistant, over the cells of the target's context, to which its rows add
    none. Each row has a token, the state before it, the target's or its own, and the position
    behind the target's last token.
    """

    def __init__(
        self,
        model: AssistantModel,
        target: LlamaBackend,
        options: ContextOptions,
        *,
        n_slots: int = 1,
        **sizes: Any,
    ) -> None:
        sizes |= {"n_ctx": target.n_ctx // n_slots, "n_branches": target.n_sequences // n_slots}
        options = replace(options, n_batch=_N_ROWS * n_slots)
        super().__init__(model, target, options, n_slots=n_slots, **sizes)
        compute_frequent_tokens(self)

    def _rows_of(self, model: AssistantModel, *_: object) -> Rows:
        return Rows(model.n_embd_out, _N_ROWS)

    def decode(self, batch: Batch) -> Logits:
        return self.decode_rows(batch)
