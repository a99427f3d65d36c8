"""Several MTP layers of a target draft a chain, each layer one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgen.drafters.expansion import DraftedChain
from specgen.drafters.mtp import N_USUAL, MtpDrafter
from specgen.drafters.states_cache import StatesCache
from specgen.method.backend import MtpBackend
from specgen.method.cost_table import FREE, Price
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Drafting
from specgen.method.policy import RoundPlan
from specgen.system.arrays import Hidden


class MtpChainDrafter(MtpDrafter):
    """Drafts chains with several MTP layers: layer k predicts the k-th token behind what the target has
    read (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Each layer has a cache of its own, whose rows of accepted tokens read the target's states. Behind these,
    layer k decodes k rows of drafted tokens: the first layer's state after the first token, the second
    layer's after the second, and so on. So a draft has no more tokens than there are layers, and tokens that
    the target has not read count among them. A layer reads the text only when it drafts.

    `others` are the contexts of the layers after the first, each with the number of tokens that its
    part for this text holds.
    """

    def __init__(
        self,
        backend: MtpBackend,
        *arguments: Any,
        others: Sequence[tuple[MtpBackend, int]],
        n_held: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(backend, *arguments, n_held=n_held, **options)
        first = self._slot.first
        self._layers = [
            self._cache,
            *(StatesCache(each, self._trail, self._costs, first, n) for each, n in others),
        ]

    def price(self, n_context: int) -> Price:
        if not self._costs:
            return FREE
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
        n_room = self._n_ctx - (len(context) - self._cache.n_skipped) + 1
        n_max = min(plan.n_max, len(self._layers) - n_unread, n_room)
        if n_max < 1 or not all(layer.find_start(n_read) for layer in self._layers):
            return NO_DRAFT
        before = context[len(context) - n_drafted :]
        chain = DraftedChain(plan, self._shaper, self._rng, before, draws=self._draws)
        states: list[Hidden] = []
        try:
            for layer in self._layers[: n_unread + min(n_max, self._n_deepest or n_max)]:
                row = yield from layer.catch_up(context, n_read, chain.tokens, states)
                states.append(layer.state())
                if len(states) <= n_unread:
                    continue
                is_more = chain.takes(row) and chain.goes_on()
                if not is_more or self._backend.vocabulary.is_end(chain.tokens[-1]):
                    break
            return chain.draft(self.name)
        finally:
            for layer in self._layers:
                layer.drop_drafted()
            self._trail.forget(min(layer.n_held for layer in self._layers) - 1)

    def rewind(self, n_tokens: int) -> None:
        self._trail.rewind(n_tokens)
        for layer in self._layers:
            layer.rewind(n_tokens)
