"""DFlash and DSpark drafts (Chen et al., arXiv:2602.06036): all tokens of a draft from one decode."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.drafters.expansion import Expansion
from specgen.drafters.interface import DraftRequest
from specgen.drafters.states import StatesCache, StatesDrafter, TrainedDraft
from specgen.llama.hidden_state_contexts import DflashContext
from specgen.llama.paired_drafts import DflashModel
from specgen.method.backend import Batch
from specgen.method.cost_table import CostTable, Price
from specgen.method.drafter import Ask, Drafting


class DflashDrafter(StatesDrafter):
    """Drafts a chain with one decode of the last token and masks, a block.

    Before it, the cache gets what the target's layers read for the tokens that were accepted since
    the last draft: this decodes no token. The row of a mask predicts that mask's own token; with
    `predicts_from_last` each row predicts the token behind it. A row does not depend on what is
    drawn before it, which suits every verifier.
    """

    name = "dflash"
    n_most_unread = 0  # a block begins with a single token

    def __init__(self, backend: DflashContext, request: DraftRequest) -> None:
        super().__init__(backend, request)
        draft = backend.draft
        self._mask, self._n_block = draft.mask, draft.n_most
        self._predicts_from_last = draft.predicts_from_last
        self._n_most = self._n_block
        self._caches = [StatesCache(backend, request, self.hidden_states)]
        #: What filling the cache costs; it is not learnt with the blocks.
        self._fill_costs = CostTable()

    def price(self, n_context: int) -> Price:
        # All rows of a block are one decode; filling the cache costs less than its row of a token
        # does.
        block_s = self._costs.seconds_each(self._n_block + (not self._predicts_from_last))
        n_new = self._n_read(n_context) - max(self._caches[0].n_held, self.hidden_states.first)
        n_behind = max(0, n_new - self._n_block - 1)
        prefill_s = self._costs.seconds_each(n_behind) if n_behind else 0.0
        return Price(block_s, 0.0, prefill_s)

    def _grow(self, made: Expansion, context: Sequence[int], n_read: int) -> Drafting:
        cache = self._caches[0]
        while cache.n_held < n_read:
            batch = Batch()
            for index in range(cache.n_held, n_read)[: self._backend.n_batch]:
                batch.add(context[index], index - cache.n_skipped, (self._slot.first,), False)
                batch.hidden.append(self.hidden_states.after(index))
            yield Ask(self._backend, batch, self._fill_costs)
            cache.n_held += len(batch)
        n, batch = made.n_deepest, Batch()
        block = [context[-1], *[self._mask] * (n - self._predicts_from_last)]
        for position, token in enumerate(block, n_read - cache.n_skipped):
            batch.add(token, position, (self._slot.first,), True)
            batch.hidden.append(None)
        rows = yield Ask(self._backend, batch, self._costs)
        return (yield from made.grow_from(rows[len(rows) - n :]))


class DflashDraft(TrainedDraft):
    """A loaded DFlash or DSpark draft."""

    model_type = DflashModel
    context_type = DflashContext
    drafter_type = DflashDrafter


KIND = DflashDraft.kind()
