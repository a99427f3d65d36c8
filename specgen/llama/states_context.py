"""Drafts that read what their target computes: their files, and contexts in which they draft."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import numpy as np

from specgen.errors import ModelFileError, PairError
from specgen.llama.context import LlamaBackend
from specgen.llama.gguf_metadata import GgufMetadata
from specgen.llama.model import LlamaModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits
from specgen.text.hidden_trail import HiddenTrail, most_states

#: The architectures whose graphs hand out the inputs of layers: llama.cpp ends the process with others.
HOOKED = frozenset(
    [
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
    ]
)
#: Those that also hand out what the last layer made.
_LAST = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})


class TrainedModel(LlamaModel):
    """A loaded draft that was trained for one target and reads the inputs of some of its layers. Raises
    `ModelFileError` if the file is damaged, and `PairError` if it was made for another target, or llama.cpp cannot
    hand out the inputs of this target's layers."""

    architecture: ClassVar[str]
    #: What it is called in messages.
    kind: ClassVar[str]
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
        other = "use a small model of the same family, or --draft ngram"
        if where := target.computed_where:
            raise self._misfit(
                target, f"{self.kind} reads the target's layers, which are computed {where}", other
            )
        if architecture not in HOOKED:
            raise self._misfit(
                target,
                f"llama.cpp does not hand out the layers' inputs of this architecture ({architecture}), which "
                f"{self.kind} reads",
                other,
            )
        if (n_target := self._n_target()) != target.n_embd:
            raise self._misfit(
                target,
                f"it reads hidden states of {n_target} values, the target's have {target.n_embd}",
            )
        n_layers = target.n_layer + (self.reads_last and architecture in _LAST)
        if not all(0 <= layer < n_layers for layer in self.layers):
            named = ", ".join(map(str, self.layers))
            raise self._misfit(target, f"it reads layers {named}, the target has {target.n_layer}")
        shares = self._shared_matrices()
        if shares and self.n_embd != target.n_embd:
            raise self._misfit(
                target,
                f"it lacks {shares}, and its hidden states have {self.n_embd} values, the target's {target.n_embd}",
            )

    def _misfit(self, target: LlamaModel, why: str, hint: str = "") -> PairError:
        return PairError(
            f"{self.name} cannot draft for {target.name}: {why}",
            hint
            or f"take a draft that was made for {target.name}, or --draft ngram, which fits every model",
        )

    def _n_target(self) -> int:
        return int(self.metadata(f"{self.architecture}.target_hidden_size") or 0)

    def _layers(self) -> tuple[int, ...]:
        with ExitStack() as resources:
            about = GgufMetadata(resources, self._file)
            return tuple(about.array(f"{self.architecture}.target_layers", ctypes.c_int32))

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


class StatesContext(LlamaBackend):
    """A context of a draft that reads what its target computes; `n_slots` texts of `n_ctx` tokens share it.

    The target's hidden states of `n_read` values each are kept along each slot's text (`trails`), for rows that the
    draft may still have to read. A row of a batch has a token and, in contexts with `n_inputs`, so many values of the
    hidden state before it (`Batch.hidden`); where none is given, it reads zeros. Logits are those of the first
    `n_shared_tokens` tokens, which the vocabularies share. Close it before the context of the `target`. Other
    parameters and the errors are those of `LlamaBackend`.
    """

    def __init__(
        self,
        model: LlamaModel,
        target: LlamaBackend | None,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_read: int,
        n_inputs: int = 0,
        n_shared_tokens: int | None = None,
        n_branches: int = 1,
        n_outputs: int = 1,
        n_slots: int = 1,
        is_mtp: bool = False,
    ) -> None:
        super().__init__(
            model,
            options,
            n_ctx=n_ctx * n_slots,
            clock=clock,
            n_sequences=n_branches * n_slots,
            n_outputs=n_outputs * n_slots,
            n_branches=n_branches,
            is_mtp=is_mtp,
            other=target.handle if target is not None else None,
        )
        self._n_shared_tokens = n_shared_tokens
        n_most = most_states(n_read, n_slots)
        self.trails = tuple(self._new_trail(n_most) for _ in range(n_slots))
        #: The draft's hidden state after each sequence's last row that wanted logits.
        self._states: dict[int, Hidden] = {}
        n_rows = max(self.n_batch, self.n_outputs)
        self._inputs = np.empty((n_rows, 0), np.float32)
        if n_inputs:
            memory = (ctypes.c_float * (n_rows * n_inputs))()
            self._rows.native.embd = memory
            self._inputs = np.ctypeslib.as_array(memory).reshape(n_rows, n_inputs)

    def _new_trail(self, n_most: int) -> HiddenTrail:
        return HiddenTrail(n_most)

    def state(self, sequence: int) -> Hidden:
        """Return the draft's hidden state after the sequence's last row that wanted logits."""
        return self._states[sequence]

    def decode_rows(self, batch: Batch) -> Logits:
        if self._inputs.shape[1]:
            self._rows.check(batch)
            inputs = self._inputs[: len(batch)]
            for row, state in enumerate(batch.hidden or [None] * len(batch)):
                inputs[row] = 0.0 if state is None else state
        return super().decode_rows(batch)[:, : self._n_shared_tokens]

    def _keep_states(self, batch: Batch, states: Hidden, *, of_wanted: bool) -> None:
        """Keep the states of the rows that want logits: row by row of the batch, or (`of_wanted`) of these alone."""
        wanted = [row for row, wants in enumerate(batch.wants_logits) if wants]
        for index, row in enumerate(wanted):
            state = states[index if of_wanted else row].copy()
            self._states.update(dict.fromkeys(batch.sequences[row], state))
