"""EAGLE-3 drafts: their files, and contexts in which they draft.

EAGLE-3 (Li et al., arXiv:2503.01840) is one layer that was trained for one target. It reads the inputs of
three of the target's layers. Its *encoder*, a matrix, makes one hidden state of the three. From a token
and the hidden state before it the layer predicts the next token, and a hidden state of its own that takes
the target's place where the target has not read so far.

llama.cpp computes both, and lets a context of the target hand out the inputs of its layers. It does so
for some architectures only (`HOOKED`): others would end the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import numpy as np

from specgen.drafters.hidden_trail import HiddenTrail, most_states
from specgen.errors import BackendError, ModelFileError, PairError
from specgen.llama.context import LlamaBackend
from specgen.llama.gguf_metadata import GgufMetadata
from specgen.llama.library import last_error, llama_cpp, llama_cpp_ext
from specgen.llama.model import LlamaModel
from specgen.llama.states_context import StatesContext
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits

ARCHITECTURE = "eagle3"
#: The architectures whose graphs hand out the inputs of layers.
HOOKED = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "gemma4",
        "gpt-oss",
        "hunyuan-dense",
        "hunyuan_vl",
        "lfm2",
        "lfm2moe",
        "llama",
        "mimo2",
        "minimax-01",
        "minimax-m2",
        "muse-glimmer",
        "nanbeige",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
    }
)
#: Those that also hand out what the last layer made.
_LAST = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
#: The most rows with logits in one native batch: llama.cpp computes logits of all rows of a batch or of none.
_MOST_OUTPUTS = 32


class EagleModel(LlamaModel):
    """A loaded EAGLE-3 draft for a target. Raises `ModelFileError` if the file is damaged, and `PairError` if
    it was made for another target, or llama.cpp cannot hand out the inputs of this target's layers."""

    architecture: ClassVar[str] = ARCHITECTURE
    #: What it is called in messages.
    kind: ClassVar[str] = "EAGLE-3"
    #: Whether it may read what the last layer made, as if a further layer read it.
    reads_last: ClassVar[bool] = False

    def __init__(self, path: Path, target: LlamaModel, *, n_gpu_layers: int = -1) -> None:
        super().__init__(path, n_gpu_layers=n_gpu_layers)
        try:
            #: The target's layers whose inputs it reads, and the length of these together.
            self.layers = self._layers()
            self.n_read = len(self.layers) * target.n_embd
            self._check_target(target)
        except (ModelFileError, PairError):
            self.close()
            raise

    def _check_usable(self) -> None:
        if self.metadata("general.architecture") != self.architecture:
            raise ModelFileError(f"{self.path}: not a draft of the kind {self.kind}")

    def _check_target(self, target: LlamaModel) -> None:
        architecture = target.metadata("general.architecture")
        hint = f"take a draft that was made for {target.name}, or --draft ngram, which fits every model"
        pair = f"{self.name} cannot draft for {target.name}"
        if where := target.computed_where:
            raise PairError(
                f"{pair}: {self.kind} reads the target's layers, which are computed {where}",
                "use a small model of the same family, or --draft ngram",
            )
        if architecture not in HOOKED:
            raise PairError(
                f"{pair}: llama.cpp does not hand out the layers' inputs of this architecture "
                f"({architecture}), which {self.kind} reads",
                "use a small model of the same family, or --draft ngram",
            )
        n_target = self._n_target()
        if n_target != target.n_embd:
            raise PairError(
                f"{pair}: it reads hidden states of {n_target} values, the target's have {target.n_embd}",
                hint,
            )
        n_layers = target.n_layer + (self.reads_last and architecture in _LAST)
        if not all(0 <= layer < n_layers for layer in self.layers):
            named = ", ".join(map(str, self.layers))
            raise PairError(
                f"{pair}: it reads layers {named}, the target has {target.n_layer}", hint
            )
        shares = self._shared_matrices()
        if shares and self.n_embd != target.n_embd:
            raise PairError(
                f"{pair}: it lacks {shares}, and its hidden states have {self.n_embd} values, the "
                f"target's {target.n_embd}",
                hint,
            )

    def _n_target(self) -> int:
        """Return the length of the target's hidden states that it was made for."""
        return int(self.metadata(f"{self.architecture}.target_hidden_size") or 0)

    def _layers(self) -> tuple[int, ...]:
        """Return the target's layers whose inputs it reads."""
        with ExitStack() as resources:
            key = f"{self.architecture}.target_layers"
            about = GgufMetadata(resources, self._file)
            n, data = about.length(key) or 0, about.get("gguf_get_arr_data", ctypes.c_void_p, key)
            return tuple((ctypes.c_int32 * n).from_address(data)) if n else ()

    def _shared_matrices(self) -> str:
        """Return which matrices it takes from its target; empty if none. Raise `ModelFileError` if it
        has a part of the target's vocabulary, and no output matrix for it."""
        with ExitStack() as resources:
            names = {tensor.name for tensor in GgufMetadata(resources, self._file).tensors()}
        lacks = {"token_embd.weight": "embeddings", "output.weight": "an output matrix"}
        if "d2t" in names and "output.weight" not in names:
            raise ModelFileError(
                f"{self.path}: damaged: there is no output matrix", "fetch the file again"
            )
        return " and ".join(what for name, what in lacks.items() if name not in names)


class EagleContext(StatesContext):
    """A context of an EAGLE-3 draft: a cache of its layer, beside the target's.

    The row of a token has the hidden state before it (`Batch.hidden`): the encoder's, from the inputs of
    the target's layers (`trails`), or, for a drafted token, the draft's own. Where none is given it reads
    zeros. `n_slots` texts share the context. Logits are those of the first `n_shared_tokens` tokens, which
    the vocabularies share. From now on the context of the target hands out the inputs
    of the layers that the draft reads. Close this context before that of the target. Other parameters
    and the errors are those of `LlamaBackend`.
    """

    def __init__(
        self,
        model: EagleModel,
        target: LlamaBackend,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_shared_tokens: int | None = None,
        n_branches: int = 1,
        n_outputs: int = 1,
        n_slots: int = 1,
    ) -> None:
        super().__init__(
            model,
            options,
            n_ctx=n_ctx * n_slots,
            clock=clock,
            n_sequences=n_branches * n_slots,
            n_outputs=max(_MOST_OUTPUTS, n_outputs * n_slots),
            n_branches=n_branches,
            other=target.handle,
        )
        target.hand_out(model.layers)
        self._n_embd = model.n_embd
        self._take_states(self._n_embd)
        self._n_shared_tokens = n_shared_tokens
        llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, True)
        n_most = most_states(model.n_read, n_slots)
        #: What the target's layers read along each slot's text, which the draft may still have to read.
        self.trails = tuple(EagleTrail(n_most, self.encode) for _ in range(n_slots))

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
            self._decode_part(batch.part(0, n_silent))
        found: list[Logits] = []
        for start in range(n_silent, len(batch), _MOST_OUTPUTS):
            part = batch.part(start, start + _MOST_OUTPUTS)
            wants, part.wants_logits = part.wants_logits, [True] * len(part)
            logits = self._decode_part(part)
            rows = [row for row, is_wanted in enumerate(wants) if is_wanted]
            states = self._own_states(len(part))
            for row in rows:
                self._states.update(dict.fromkeys(part.sequences[row], states[row].copy()))
            if rows == list(range(len(part) - len(rows), len(part))):
                found.append(logits[len(part) - len(rows) :])
            else:
                found.append(logits[rows])
            if start + _MOST_OUTPUTS < len(batch):  # the next part replaces them
                found[-1] = found[-1].copy()
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty((0, self.n_vocab), np.float32)

    def _decode_part(self, batch: Batch) -> Logits:
        return super().decode_rows(batch)[:, : self._n_shared_tokens]


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
