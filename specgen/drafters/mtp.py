"""A target's own MTP layers draft, in its file or in one of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.drafters.expansion import DraftedChain
from specgen.drafters.kind import DraftKind, DraftRequest, DraftSetup, Room
from specgen.drafters.pairing import check_pair
from specgen.drafters.states import (
    CELLS_BEHIND,
    N_USUAL,
    LayerDrafter,
    StatesCache,
    StatesDraft,
    StatesDrafter,
)
from specgen.errors import PairError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.draft_contexts import MtpContext
from specgen.llama.draft_models import MtpModel
from specgen.llama.mtp_layers import holds_mtp_only
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.tables import Price
from specgen.options import DraftSource
from specgen.system.arrays import Hidden


class MtpChainDrafter(StatesDrafter):
    """Drafts chains with several MTP layers: layer k predicts the k-th token behind what the target has
    read (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Each layer has a cache of its own, whose rows of accepted tokens read the target's states. Behind these,
    layer k decodes k rows of drafted tokens: the first layer's state after the first token, the second
    layer's after the second, and so on. So a draft has no more tokens than there are layers, and tokens that
    the target has not read count among them. A layer reads the text only when it drafts.
    """

    name = "mtp"

    def __init__(self, backend: MtpContext, request: DraftRequest) -> None:
        super().__init__(backend, request)
        self._layers = [
            StatesCache(each, request, self.states, n_left_out=0) for each in backend.layers
        ]

    def price(self, n_context: int) -> Price:
        n_read = self._n_read(n_context)
        n_rows = [layer.n_missing(n_read) for layer in self._layers]
        n_usual = min(n_rows[0], N_USUAL)
        first_s, next_s = self._costs.share_s(n_usual), self._costs.share_s(n_usual + 1)
        n_unread = n_context - 1 - n_read
        prefill_s = 0.0
        # Later a layer that no draft reached reads little, and only if one does.
        if n_rows[0] > n_usual:
            prefill_s = sum(max(0.0, self._costs.share_s(n) - first_s) for n in n_rows)
        return Price(first_s + n_unread * next_s, next_s, prefill_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_read = self._n_read(len(context))
        n_unread = len(context) - 1 - n_read
        n_room = self._n_ctx - (len(context) - self._layers[0].n_skipped) + 1
        n_max = min(plan.n_max, len(self._layers) - n_unread, n_room)
        if n_max < 1 or not all(layer.find_start(n_read) for layer in self._layers):
            return NO_DRAFT
        before = context[len(context) - n_drafted :]
        chain = DraftedChain(plan, self._request, before, self._backend.vocabulary.is_end)
        states: list[Hidden] = []
        try:
            for layer in self._layers[: n_unread + min(n_max, self._request.n_deepest or n_max)]:
                row = yield from layer.catch_up(context, n_read, chain.tokens, states)
                states.append(layer.state())
                if len(states) <= n_unread:
                    continue
                if not chain.extend(row):
                    break
            return chain.draft(self.name)
        finally:
            for layer in self._layers:
                layer.drop_drafted()
            self.states.forget(min(layer.n_held for layer in self._layers) - 1)

    def rewind(self, n_tokens: int) -> None:
        super().rewind(n_tokens)
        for layer in self._layers:
            layer.rewind(n_tokens)


class MtpDraft(StatesDraft):
    """The MTP layers of a loaded target, or those in a file of their own (`path`)."""

    def __init__(self, setup: DraftSetup, path: Path | None) -> None:
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
            self.models = (self._model,)
            self._check_tokens(target)
        n_layers, own = self._model.n_mtp_layers, None
        if n_layers > 1:
            own = f"each of the {n_layers} MTP layers of {self._model.name} drafts one token"
        self.why_chains = setup.why_chains or own

    def contexts(self, room: Room) -> tuple[LlamaBackend, ...]:
        context = MtpContext(
            self._model,
            room.options_of(self.key),
            n_ctx=room.n_ctx + CELLS_BEHIND,
            clock=room.clock,
            n_branches=self.n_branches(room.n_rows),
            n_slots=room.n_slots,
        )
        return (context,)

    def drafter(self, request: DraftRequest) -> Drafter:
        (context,) = request.caches
        assert isinstance(context, MtpContext)
        if len(context.layers) > 1:
            return MtpChainDrafter(context, request)
        return LayerDrafter(context, request)

    def _check_tokens(self, target: LlamaModel) -> None:
        own, others = self._model.vocabulary, target.vocabulary
        try:
            if check_pair(others, own, target.name, self._model.name) < others.n_tokens:
                raise PairError(
                    f"{self._model.name} cannot draft for {target.name}: it has {own.n_tokens} tokens, the target "
                    f"{others.n_tokens}"
                )
        except PairError:
            self.close()
            raise


def _matches(source: DraftSource) -> bool:
    return holds_mtp_only(source) if isinstance(source, Path) else source == "mtp"


def _open(source: DraftSource, setup: DraftSetup) -> MtpDraft:
    return MtpDraft(setup, source if isinstance(source, Path) else None)


KIND = DraftKind(
    "mtp", _matches, _open, reads="all states", suits=lambda target: not target.why_no_mtp
)
