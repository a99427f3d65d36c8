"""DFlash and DSpark drafts: their files, and contexts in which they draft.

DFlash (Chen et al., arXiv:2602.06036) predicts a block of tokens in one decode, of the last token and masks. The masks
attend to one another and to the text, which the cache holds as keys and values that are made of the inputs
of some of the target's layers. No token of the text is decoded for that. DSpark adds a bias by the token
before, the likeliest one, to each prediction.

llama.cpp computes both: a batch of hidden states fills the cache, and a batch of tokens is a block.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from specgen.errors import BackendError, ModelFileError
from specgen.llama.context import LlamaBackend
from specgen.llama.gguf_metadata import GgufMetadata
from specgen.llama.library import last_error, llama_cpp
from specgen.llama.model import LlamaModel
from specgen.llama.states_context import StatesContext, TrainedModel
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden, Logits

ARCHITECTURE = "dflash"
#: The size of a block, if the file does not say it.
_USUAL_BLOCK = 16
#: llama.cpp's number of rotary embeddings with several positions a token, and how many these are.
_MROPE, _N_POSITIONS = 8, 4


class DflashModel(TrainedModel):
    """A loaded DFlash or DSpark draft for a target. Raises as `TrainedModel` does, and `ModelFileError` if it is
    of a kind that specgen cannot use."""

    architecture = ARCHITECTURE
    kind = "DFlash"
    reads_last = True

    def __init__(self, path: Path, target: LlamaModel, *, n_gpu_layers: int = -1) -> None:
        super().__init__(path, target, n_gpu_layers=n_gpu_layers)
        with contextlib.ExitStack() as resources:
            about = GgufMetadata(resources, self._file)
            names = {tensor.name for tensor in about.tensors()}
        #: Whether each prediction depends on the one before (DSpark).
        self.is_chained = "markov_w1.weight" in names
        #: The token that stands for one that is to be predicted.
        self.mask = int(llama_cpp.llama_vocab_mask(self.vocabulary.handle))
        from_anchor = self.metadata(f"{ARCHITECTURE}.sample_from_anchor") != "false"
        #: Whether the row of the last token predicts too, or only those of masks do.
        self.predicts_from_last = self.is_chained and from_anchor
        n_block = self._number("block_size") or _USUAL_BLOCK
        #: The most tokens of a draft.
        self.n_most = n_block - (not self.predicts_from_last)
        problem = ""
        if "selector_hidden.weight" in names:
            problem = "a DFlash 2 draft, which specgen cannot use yet"
        elif self._number("hyper_connection.count"):
            problem = "a DSpark draft of DeepSeek V4, which specgen cannot use yet"
        elif self.mask < 0:
            problem = "damaged: there is no mask token"
        elif self.n_most < 1:
            problem = f"damaged: blocks of {n_block} tokens"
        if problem:
            self.close()
            raise ModelFileError(f"{path}: {problem}")

    def _n_target(self) -> int:
        return self.n_embd


class DflashContext(StatesContext):
    """A context of a DFlash or DSpark draft: a cache of the text, beside the target's.

    The rows of tokens that the target has read have hidden states (`Batch.hidden`, from `trails`), and give
    no logits. Those of a block, the last token and masks, have none (None) and all want logits.
    """

    def __init__(
        self, model: DflashModel, target: LlamaBackend, options: ContextOptions, **sizes: Any
    ) -> None:
        super().__init__(
            model, target, options, n_read=model.n_read, n_outputs=model.n_most + 1, **sizes
        )
        #: The draft, and what it predicts from.
        self.draft = model
        target.hand_out(model.layers)
        is_causal = model.metadata(f"{ARCHITECTURE}.attention.causal") == "true"
        llama_cpp.llama_set_causal_attn(self.handle, is_causal)
        rope = llama_cpp.llama_model_rope_type(model.handle)
        self._n_positions = _N_POSITIONS if rope == _MROPE else 1

    def decode_rows(self, batch: Batch) -> Logits:
        hidden = batch.hidden or [None] * len(batch)
        blocks: list[Logits] = []
        start = 0
        for (is_text, _), rows in itertools.groupby(
            zip(hidden, batch.sequences, strict=True), self._part
        ):
            end = start + len(list(rows))
            part = batch.part(start, end)
            start = end
            if is_text:
                self._fill(part)
            else:
                blocks.append(super().decode_rows(part))
                if end < len(batch):  # another decode replaces them
                    blocks[-1] = blocks[-1].copy()
        if len(blocks) == 1:
            return blocks[0]
        return np.concatenate(blocks) if blocks else np.empty((0, self.n_vocab), np.float32)

    def _part(self, row: tuple[Hidden | None, tuple[int, ...]]) -> tuple[bool, tuple[int, ...]]:
        """Return what the rows of a native batch have in common: llama.cpp takes hidden states or tokens, and
        chains blocks of one size only."""
        hidden, sequences = row
        is_text = hidden is not None
        return is_text, sequences if self.draft.is_chained and not is_text else ()

    def _fill(self, batch: Batch) -> None:
        """Add what the target has read to the cache, as keys and values."""
        self._rows.fill(batch)
        read = np.stack([state for state in batch.hidden if state is not None])
        positions = (ctypes.c_int32 * (len(batch) * self._n_positions))(
            *(batch.positions * min(self._n_positions, 3))
        )
        rows = self._rows.native
        native = llama_cpp.llama_batch(
            n_tokens=len(batch),
            embd=read.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=positions,
            n_seq_id=rows.n_seq_id,
            seq_id=rows.seq_id,
            logits=rows.logits,
        )
        started = self._clock()
        status = self._decode_native(self.handle, native)
        self.decode_s += self._clock() - started
        if status != 0:
            raise BackendError(
                f"{self.model.name}: llama.cpp could not read {len(batch)} hidden states "
                f"(status {status}): {last_error()}"
            )
        self.n_decoded_rows += len(batch)
