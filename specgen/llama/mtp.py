"""Contexts of multi-token prediction (MTP) layers: of a target's own, and of those in a file of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specgen.errors import BackendError, ModelFileError, PairError, SpecgenError
from specgen.llama.library import llama_cpp_ext
from specgen.llama.model import LlamaModel
from specgen.llama.mtp_layers import WANTED_ROWS_ONLY
from specgen.llama.states_context import StatesContext
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.system.arrays import Logits


class MtpModel(LlamaModel):
    """The MTP layers of a target, loaded from a file of their own. Raises `ModelFileError` if the file is damaged,
    and `PairError` if they were made for another target."""

    def __init__(self, path: Path, target: LlamaModel, *, n_gpu_layers: int = -1) -> None:
        super().__init__(path, n_gpu_layers=n_gpu_layers, mtp=True)
        try:
            self._check_target(target)
        except PairError:
            self.close()
            raise

    def _check_usable(self) -> None:
        if self.why_no_mtp:
            raise ModelFileError(f"{self.path}: {self.why_no_mtp}")

    def _check_target(self, target: LlamaModel) -> None:
        pair = f"{self.name} cannot draft for {target.name}"
        hint = f"take MTP layers that were made for {target.name}, or --draft ngram, which fits every model"
        if where := target.computed_where:
            raise PairError(f"{pair}: it reads the target's hidden states, which are {where}", hint)
        own, others = (each.metadata("general.architecture") for each in (self, target))
        if own != others:
            raise PairError(f"{pair}: its MTP layers are of a {own}, not of a {others}", hint)
        if self.n_embd_out != target.n_embd_out:
            raise PairError(
                f"{pair}: it reads hidden states of {self.n_embd_out} values, the target's have "
                f"{target.n_embd_out}",
                hint,
            )


class MtpContext(StatesContext):
    """A context of an MTP layer: a cache of that layer, beside the target's own.

    The row of a token has the hidden state before it: the target's or, for a drafted token, the layer's own. Raises
    `BackendError` if the model was loaded without MTP layers.

    Of several layers each has a context of its own (`layers`), since llama.cpp computes one of them at a
    time, and a row of the cache is of one layer only. The first layer's context opens and closes the others.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        *,
        n_ctx: int,
        clock: Callable[[], float],
        n_branches: int = 1,
        n_outputs: int = 1,
        n_slots: int = 1,
        layer: int = 0,
    ) -> None:
        if model.why_no_mtp:
            raise BackendError(f"{model.name}: {model.why_no_mtp}")
        super().__init__(
            model,
            None,
            options,
            n_ctx=n_ctx,
            clock=clock,
            n_read=model.n_embd_out,
            n_inputs=model.n_embd_out,
            n_branches=n_branches,
            n_outputs=n_outputs,
            n_slots=n_slots,
            is_mtp=True,
        )
        self.compute_frequent_tokens()
        self._wanted_rows_only = model.metadata("general.architecture") in WANTED_ROWS_ONLY
        llama_cpp_ext.llama_set_embeddings_nextn(self.handle, True, self._wanted_rows_only)
        llama_cpp_ext.llama_set_nextn_layer_offset(self.handle, layer)
        #: The contexts of all layers, if this is the first one's.
        self.layers: tuple[MtpContext, ...] = (self,)
        try:
            for other in range(1, 0 if layer else model.n_mtp_layers):
                context = MtpContext(
                    model, options, n_ctx=n_ctx, clock=clock, n_slots=n_slots, layer=other
                )
                self.layers += (context,)
        except SpecgenError:
            self.close()
            raise

    def close(self) -> None:
        for layer in self.layers[1:]:
            layer.close()
        super().close()

    def decode_rows(self, batch: Batch) -> Logits:
        logits = super().decode_rows(batch)
        if n_wanted := sum(batch.wants_logits):
            of_wanted = self._wanted_rows_only
            states = self._mtp_states(n_wanted if of_wanted else len(batch))
            self._keep_states(batch, states, of_wanted=of_wanted)
        return logits
