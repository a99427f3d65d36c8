"""A target's own MTP layers draft, in its file or in one of their own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

from specgen.drafters.expansion import Expansion
from specgen.drafters.interface import ContextSpec, DraftKind, DraftRequest, DraftSetup
from specgen.drafters.states import N_USUAL, LayerDrafter, StatesCache, StatesDraft, StatesDrafter
from specgen.errors import PairError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.draft_contexts import MtpContext
from specgen.llama.draft_models import MtpModel
from specgen.llama.gguf_file import holds_mtp_only
from specgen.method.cost_table import Price
from specgen.method.drafter import Ask, Drafter, Drafting
from specgen.system.arrays import Hidden, Logits


class MtpChainDrafter(StatesDrafter):
    """Drafts chains with several MTP layers: layer k predicts the k-th token behind what the target
    has read (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Each layer has a cache of its own, whose rows of accepted tokens read the target's states.
    Behind these, layer k decodes k rows of drafted tokens: the first layer's state after the first
    token, and so on. So a draft has no more tokens than there are layers, and tokens that the
    target has not read count among them.
    """

    name = "mtp"

    def __init__(self, backend: MtpContext, request: DraftRequest) -> None:
        super().__init__(backend, request)
        self._caches = [StatesCache(each, request, self.hidden_states) for each in backend.layers]
        self._n_most = len(self._caches)

    def price(self, n_context: int) -> Price:
        n_read = self._n_read(n_context)
        n_new = self._caches[0].n_missing(n_read)
        each = self._costs.price_of_draft(n_new, N_USUAL)
        next_s = self._costs.seconds_each(min(n_new, N_USUAL) + 1)
        first_s = each.first_s + (n_context - 1 - n_read) * next_s
        return Price(first_s, next_s, len(self._caches) * each.prefill_s)

    def _grow(self, made: Expansion, context: Sequence[int], n_read: int) -> Drafting:
        states: list[Hidden] = []

        def row_of_next() -> Generator[Ask, Logits, Logits]:
            layer = self._caches[len(states)]
            row = yield from layer.catch_up(context, n_read, made.tokens, states)
            states.append(layer.state())
            return row

        def rows_beyond(_nodes: Sequence[int]) -> Generator[Ask, Logits, list[Logits]]:
            return [(yield from row_of_next())]

        for _ in range(n_read + 1, len(context)):
            yield from row_of_next()
        row = yield from row_of_next()
        return (yield from made.grow(row, rows_beyond))


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
            self._take(self._model)
        n_layers, own = self._model.n_mtp_layers, None
        if n_layers > 1:
            own = f"each of the {n_layers} MTP layers of {self._model.name} drafts one token"
        self.why_chains = setup.why_chains or own

    def contexts(self, room: ContextSpec) -> tuple[LlamaBackend, ...]:
        return (MtpContext(self._model, room.options_of(self.key), **self._sizes(room)),)

    def drafter(self, request: DraftRequest) -> Drafter:
        (context,) = request.caches
        assert isinstance(context, MtpContext)
        if len(context.layers) > 1:
            return MtpChainDrafter(context, request)
        return LayerDrafter(context, request)


KIND = DraftKind(
    "mtp",
    matches=lambda draft: holds_mtp_only(draft) if isinstance(draft, Path) else draft == "mtp",
    open=lambda draft, setup: MtpDraft(setup, draft if isinstance(draft, Path) else None),
    suits=lambda target: not target.why_no_mtp,
)
