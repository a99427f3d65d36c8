"""EAGLE-3 drafts: their files, and contexts in which they draft.

EAGLE-3 (Li et al., arXiv:2503.01840) is one layer that was trained for one target. It reads the inputs of
three of the target's layers. Its *encoder*, a matrix, makes one hidden state of the three. From a token
and the hidden state before it the layer predicts the next token, and a hidden state of its own that takes
the target's place where the target has not read so far.

llama.cpp computes both, and lets a context of the target hand out the inputs of its layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specgen.errors import BackendError
from specgen.llama.context import LlamaBackend
from specgen.llama.library import last_error, llama_cpp, llama_cpp_ext
from specgen.llama.states_context import StatesContext, TrainedModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits
from specgen.text.hidden_trail import HiddenTrail

#: The most rows with logits in one native batch: llama.cpp computes logits of all rows of a batch or of none.
_MOST_OUTPUTS = 32
#: The most nodes of a tree that are decoded at once.
_WIDEST = 8


class EagleModel(TrainedModel):
    """A loaded EAGLE-3 draft for a target."""

    architecture = "eagle3"
    kind = "EAGLE-3"


class EagleContext(StatesContext):
    """A context of an EAGLE-3 draft: a cache of its layer, beside the target's.

    The row of a token has the hidden state before it (`Batch.hidden`): the encoder's, from the inputs of
    the target's layers (`trails`), or, for a drafted token, the draft's own. From now on the context of the target
    hands out the inputs of the layers that the draft reads.
    """

    def __init__(
        self,
        model: EagleModel,
        target: LlamaBackend,
        options: ContextOptions,
        *,
        n_branches: int = 1,
        n_slots: int = 1,
        **sizes: Any,
    ) -> None:
        super().__init__(
            model,
            target,
            options,
            n_read=model.n_read,
            n_inputs=model.n_embd,
            n_branches=n_branches,
            n_outputs=max(-(-_MOST_OUTPUTS // n_slots), min(n_branches, _WIDEST)),
            n_slots=n_slots,
            **sizes,
        )
        self._n_embd = model.n_embd
        target.hand_out(model.layers)
        llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, True)

    def _new_trail(self, n_most: int) -> HiddenTrail:
        return EagleTrail(n_most, self.encode)

    def encode(self, read: Hidden) -> Hidden:
        """Return the hidden states, float32[n, n_embd], for the inputs of the target's layers,
        float32[n, n_read]. Logits of the last decode are not valid afterwards."""
        made = np.empty((len(read), self._n_embd), np.float32)
        for start in range(0, len(read), _MOST_OUTPUTS):
            part = np.ascontiguousarray(read[start : start + _MOST_OUTPUTS], np.float32)
            embd = part.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            batch = llama_cpp.llama_batch(n_tokens=len(part), embd=embd)
            started = self._clock()
            status = self.model.call(llama_cpp.llama_encode, self.handle, batch)
            if status != 0:
                raise BackendError(
                    f"{self.model.name}: llama.cpp could not encode {len(part)} hidden states "
                    f"(status {status}): {last_error()}"
                )
            made[start : start + len(part)] = self._own_states(len(part))
            self.decode_s += self._clock() - started
        return made

    def _own_states(self, n_rows: int) -> Hidden:
        """Return a view of what the last native call computed: float32[n_rows, n_embd]."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self.handle)
        return self._states_at(pointer, n_rows, self._n_embd)

    def decode_rows(self, batch: Batch) -> Logits:
        self._rows.check(batch)
        wanted = [row for row, wants in enumerate(batch.wants_logits) if wants]
        n_silent = min(wanted[0], max(0, len(batch) - _MOST_OUTPUTS)) if wanted else len(batch)
        if n_silent:
            super().decode_rows(batch.part(0, n_silent))
        found: list[Logits] = []
        for start in range(n_silent, len(batch), _MOST_OUTPUTS):
            part = batch.part(start, start + _MOST_OUTPUTS)
            wants, part.wants_logits = part.wants_logits, [True] * len(part)
            logits = super().decode_rows(part)
            rows = [row for row, is_wanted in enumerate(wants) if is_wanted]
            part.wants_logits = wants
            self._keep_states(part, self._own_states(len(part)), of_wanted=False)
            if rows == list(range(len(part) - len(rows), len(part))):
                found.append(logits[len(part) - len(rows) :])
            else:
                found.append(logits[rows])
            if start + _MOST_OUTPUTS < len(batch):  # the next part replaces them
                found[-1] = found[-1].copy()
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, self.n_vocab), np.float32)


class EagleTrail(HiddenTrail):
    """The inputs of the target's layers along a text. They are encoded only when the draft reads them."""

    def __init__(self, n_most: int, encode: Callable[[Hidden], Hidden]) -> None:
        super().__init__(n_most)
        self._encode = encode
        self._n_raw = 0

    @property
    def n_raw(self) -> int:
        """The number of states, from the last, that are not encoded."""
        return min(self._n_raw, len(self._states))

    def after(self, index: int) -> Hidden | None:
        n_raw = self.n_raw
        if n_raw and index >= self.n_read - n_raw:
            self._states[-n_raw:] = self._encode(np.stack(self._states[-n_raw:]))
            self._n_raw = 0
        return super().after(index)

    def take_over(self, other: HiddenTrail) -> None:
        super().take_over(other)
        self._n_raw = other.n_raw if isinstance(other, EagleTrail) else 0

    def take_rows(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        super().take_rows(rows, text, n_read)
        self._n_raw = self.n_raw + len(rows)

    def rewind(self, n_tokens: int) -> None:
        n_before = len(self._states)
        super().rewind(n_tokens)
        self._n_raw = max(0, self._n_raw - (n_before - len(self._states)))
