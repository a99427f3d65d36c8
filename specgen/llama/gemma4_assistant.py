"""Gemma 4 assistants: their files, and contexts in which they draft.

An assistant is a few layers that were trained for one Gemma 4 model. The layers have no keys and values: they
attend to those of the target's last two layers. From a token and the hidden state before it, the target's last
one, they predict the next token, and a state of their own that takes the target's place for the token after
that. All tokens of a draft have the position of the first.

llama.cpp computes them in a context that shares the cells of the target's context, so nothing is read twice.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from specgen.llama.context import LlamaBackend
from specgen.llama.gguf_metadata import GgufMetadata
from specgen.llama.library import llama_cpp_ext
from specgen.llama.model import LlamaModel
from specgen.llama.states_context import StatesContext, TrainedModel
from specgen.method.backend import Batch
from specgen.options import CacheType, ContextOptions
from specgen.system.arrays import Logits

ARCHITECTURE = "gemma4-assistant"
_TARGET = "gemma4"
#: The most rows in a batch for each text: drafts are chains, a token at a time.
_N_ROWS = 8


class AssistantModel(TrainedModel):
    """A loaded Gemma 4 assistant for a target. Raises `ModelFileError` if the file is damaged, and
    `PairError` if it was made for another target: llama.cpp would end the process."""

    architecture = ARCHITECTURE
    kind = "Gemma 4 assistant"

    @property
    def n_window(self) -> int:
        """0: it has no cells of its own that a rollback could miss."""
        return 0

    def cache_bytes(self, n_ctx: int, type_k: CacheType, type_v: CacheType) -> int:
        """Return 0: it has no cache of its own."""
        return 0

    def _layers(self) -> tuple[int, ...]:
        return ()

    def _check_target(self, target: LlamaModel) -> None:
        architecture = target.metadata("general.architecture")
        if architecture != _TARGET:
            raise self._misfit(
                target, f"a Gemma 4 assistant drafts for Gemma 4, and not for {architecture}"
            )
        if where := target.computed_where:
            raise self._misfit(target, f"it reads the target's cache, which is {where}")
        if self.n_embd_out != target.n_embd:
            raise self._misfit(
                target,
                f"it reads hidden states of {self.n_embd_out} values, the target's have {target.n_embd}",
            )
        own, others = _shapes(self._file, ARCHITECTURE), _shapes(target.path, _TARGET)
        # Its layers with a window read the last layer but one, the others read the last.
        if [is_windowed for is_windowed, *_ in others[-2:]] != [True, False] or not set(own) <= set(
            others[-2:]
        ):
            raise self._misfit(
                target, "the keys of the target's last two layers do not fit its layers"
            )


def _shapes(path: Path, architecture: str) -> list[tuple[bool, int, int]]:
    """Return for each layer whether it has a sliding window, the number of its heads of keys, and their size."""
    with ExitStack() as resources:
        about = GgufMetadata(resources, path)
        own, swa = (
            about.number(f"{architecture}.attention.key_length{end}") for end in ("", "_swa")
        )
        n_heads = about.number(f"{architecture}.attention.head_count_kv")
        windows = about.array(f"{architecture}.attention.sliding_window_pattern", ctypes.c_bool)
        heads = about.array(f"{architecture}.attention.head_count_kv", ctypes.c_int32)
    heads = heads or [n_heads] * len(windows)
    return [
        (bool(is_windowed), int(n), swa if is_windowed else own)
        for is_windowed, n in zip(windows, heads, strict=False)
    ]


class AssistantContext(StatesContext):
    """A context of an assistant, over the cells of the target's context: the same sequences, the same
    positions. Its rows add no cells. Each row has a token and the hidden state before it (`Batch.hidden`), and
    the position behind the target's last token. Otherwise it is like `EagleContext`."""

    def __init__(
        self,
        model: AssistantModel,
        target: LlamaBackend,
        options: ContextOptions,
        *,
        n_slots: int = 1,
        **sizes: Any,
    ) -> None:
        own = {"n_ctx": target.n_ctx // n_slots, "n_branches": target.n_sequences // n_slots}
        super().__init__(
            model,
            target,
            replace(options, n_batch=_N_ROWS * n_slots),
            n_read=model.n_embd_out,
            n_inputs=model.n_embd_out,
            n_outputs=_N_ROWS,
            n_slots=n_slots,
            **(sizes | own),
        )
        self.compute_frequent_tokens()
        llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, True)

    def decode(self, batch: Batch) -> Logits:
        return self.decode_rows(batch)

    def decode_rows(self, batch: Batch) -> Logits:
        logits = super().decode_rows(batch)
        self._keep_states(batch, self._mtp_states(sum(batch.wants_logits)), of_wanted=True)
        return logits
