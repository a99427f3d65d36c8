"""MTP layers: extra layers that a target was trained with, to predict further tokens.

They are in the target's file or in a separate one. A single layer drafts a chain or a tree by
reading its own output again. If there are several layers, each drafts one token (multi-token
prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.drafters.expansion import Decoding, Expansion
from specgen.drafters.hidden_state_drafts import (
    N_ROUND_ROWS,
    HiddenStateCache,
    HiddenStateDraft,
    HiddenStateDrafter,
    LayerDrafter,
)
from specgen.drafters.interface import (
    ContextSpec,
    Drafter,
    Drafting,
    DraftKind,
    DraftRequest,
    DraftSetup,
    DraftSource,
    Price,
)
from specgen.errors import PairError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.hidden_state_contexts import MtpContext
from specgen.llama.mtp_layers import holds_mtp_only
from specgen.llama.paired_drafts import MtpModel
from specgen.system.arrays import Hidden


class MtpChainDrafter(HiddenStateDrafter):
    """Drafts chains with several MTP layers.

    Each layer has its own cache of the text, whose rows read the target's states. To draft, the
    layers are used one after the other. Each first decodes the rows of the text that its cache
    lacks, then one row for each earlier layer, which reads that layer's state; the logits after its
    last row are those of the next token. So layer k (from 1) predicts the k-th token after the
    first one that the target has not decoded.

    A draft thus has at most as many tokens as there are layers. Known tokens that the target has
    not decoded, except the first, take up layers, too.
    """

    name = "mtp"

    def __init__(
        self,
        backend: MtpContext,
        request: DraftRequest,
    ) -> None:
        super().__init__(backend, request)
        self._caches = [
            HiddenStateCache(layer, request, self.hidden_states) for layer in backend.layers
        ]
        self._max_predicted = len(self._caches)

    def price(self, n_context: int) -> Price:
        """Return the costs. Each token takes a decode of a further layer."""
        n_decoded = self._n_decoded(n_context)
        n_rows = self._caches[0].n_missing(n_decoded)
        one_layer = self._costs.price_of_draft(n_rows, N_ROUND_ROWS)
        next_s = self._costs.seconds_each(min(n_rows, N_ROUND_ROWS) + 1)
        n_undecoded = n_context - 1 - n_decoded
        return Price(
            first_s=one_layer.first_s + n_undecoded * next_s,
            next_s=next_s,
            prefill_s=len(self._caches) * one_layer.prefill_s,
        )

    def _grow(
        self,
        draft: Expansion,
        context: Sequence[int],
        n_decoded: int,
    ) -> Drafting:
        """Grow a draft, using a further layer for each token."""
        #: The state after the last row of each layer that was used so far.
        states: list[Hidden] = []

        def decode_next_layer(_nodes: Sequence[int] = ()) -> Decoding:
            """Use the next layer: let it decode the text and the draft so far."""
            layer = self._caches[len(states)]
            rows = yield from layer.catch_up(context, n_decoded, draft.tokens, states)
            states.append(layer.state())
            return rows

        # The first layers predict tokens that are known already: only their states are needed.
        for _ in range(n_decoded + 1, len(context)):
            yield from decode_next_layer()
        rows = yield from decode_next_layer()
        return (yield from draft.grow(rows[0], decode_next_layer))


class MtpDraft(HiddenStateDraft):
    """The MTP layers of a loaded target, or those in a separate file."""

    def __init__(self, setup: DraftSetup, path: Path | None) -> None:
        """Use or load the MTP layers.

        Args:
            setup: The target and the options.
            path: The file with the layers; None if they are in the target's file.

        Raises:
            PairError: If the target has no MTP layers, or the file does not fit the target.
            ModelFileError: If the file cannot be used.
        """
        target = setup.target
        if path is None and target.why_no_mtp:
            raise PairError(
                f"--draft mtp: {target.name}: {target.why_no_mtp}",
                hint="use a file with its MTP (NextN) layers, or another draft",
            )
        super().__init__("mtp" if path is None else path.name, path or "mtp", setup)
        self._model: LlamaModel = target
        if path is not None:
            self._model = MtpModel(path, target, n_gpu_layers=setup.context.n_gpu_layers)
            self._use_model(self._model)
        self.why_chains = setup.why_chains
        n_layers = self._model.n_mtp_layers
        if self.why_chains is None and n_layers > 1:
            self.why_chains = (
                f"each of the {n_layers} MTP layers of {self._model.name} drafts one token"
            )

    def contexts(self, spec: ContextSpec) -> tuple[LlamaBackend, ...]:
        context = MtpContext(
            self._model,
            spec.options_of(self.key),
            self._context_size(spec),
            spec.clock,
        )
        return (context,)

    def drafter(self, request: DraftRequest) -> Drafter:
        (context,) = request.caches
        assert isinstance(context, MtpContext)
        if len(context.layers) > 1:
            return MtpChainDrafter(context, request)
        return LayerDrafter(context, request)


def _matches(source: DraftSource) -> bool:
    if isinstance(source, Path):
        return holds_mtp_only(source)
    return source == "mtp"


def _open(source: DraftSource, setup: DraftSetup) -> MtpDraft:
    """Load the file with the layers, or use those in the target's file."""
    return MtpDraft(setup, source if isinstance(source, Path) else None)


KIND = DraftKind("mtp", matches=_matches, open=_open, suits=lambda target: not target.why_no_mtp)
