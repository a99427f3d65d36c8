"""DFlash and DSpark drafts (Chen et al., arXiv:2602.06036): all tokens of a draft from one decode."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.expansion import DraftedChain
from specgen.drafters.kind import DraftRequest
from specgen.drafters.states import StatesCache, StatesDrafter, TrainedDraft
from specgen.llama.draft_contexts import DflashContext
from specgen.llama.draft_models import DflashModel
from specgen.method.backend import Batch
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.tables import CostTable, Price
from specgen.system.arrays import Logits


class DflashDrafter(StatesDrafter):
    """Drafts a chain with one decode of the last token and masks, a block.

    Before it, the cache gets what the target's layers read for the tokens that were accepted since the
    last draft: this decodes no token. The block leaves the cache afterwards. The row of a mask predicts
    that mask's own token; with `predicts_from_last` each row predicts the token behind it, that of the last
    token, too. A row does not depend on what is drawn from the rows before it, so each drawn token is from
    a distribution that is known before, which suits every verifier.

    Nothing is drafted behind tokens that the target has not read (those that n-grams found, or a grammar
    forced, before the last one): a block begins with a single token.
    """

    name = "dflash"

    def __init__(self, backend: DflashContext, request: DraftRequest) -> None:
        super().__init__(backend, request)
        draft = backend.draft
        self._mask, self._n_most = draft.mask, draft.n_most
        self._predicts_from_last = draft.predicts_from_last
        self._cache = StatesCache(backend, request, self.states, n_left_out=0)
        #: What filling the cache costs; it is not learnt with the blocks.
        self._fill_costs = CostTable()

    def price(self, n_context: int) -> Price:
        # All rows of a block are one decode; filling the cache costs less than its row of a token does.
        block_s = self._costs.share_s(self._n_most + (not self._predicts_from_last))
        n_new = self._n_read(n_context) - max(self._cache.n_held, self.states.first)
        n_behind = max(0, n_new - self._n_most - 1)
        prefill_s = self._costs.share_s(n_behind) if n_behind else 0.0
        return Price(block_s, 0.0, prefill_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_read = self._n_read(len(context))
        if len(context) - 1 > n_read or not self._cache.find_start(n_read):
            return NO_DRAFT
        n_room = self._n_ctx - (len(context) - self._cache.n_skipped)
        n_max = min(plan.n_max, self._n_most, n_room, self._request.n_deepest or plan.n_max)
        if n_max < 1:
            return NO_DRAFT
        try:
            yield from self._fill(context, n_read)
            rows = yield from self._block(context[-1], n_read - self._cache.n_skipped, n_max)
            before = context[len(context) - n_drafted :]
            chain = DraftedChain(plan, self._request, before, self._backend.vocabulary.is_end)
            for row in rows:
                if not chain.extend(row):
                    break
            return chain.draft(self.name)
        finally:
            self._cache.drop_drafted()

    def _fill(self, context: Sequence[int], n_read: int) -> Generator[Ask, Logits, None]:
        """Add the tokens that the target has read since to the cache."""
        while self._cache.n_held < n_read:
            batch = Batch()
            for index in range(self._cache.n_held, n_read)[: self._backend.n_batch]:
                position = index - self._cache.n_skipped
                batch.add(context[index], position, (self._slot.first,), False)
                batch.hidden.append(self.states.after(index))
            yield Ask(self._backend, batch, self._fill_costs)
            self._cache.n_held += len(batch)
        self.states.forget(n_read)

    def _block(self, last: int, position: int, n: int) -> Generator[Ask, Logits, Logits]:
        """Decode a block; return the logits of the n tokens behind the last one, float32[n, n_vocab]."""
        tokens = [last, *[self._mask] * (n - self._predicts_from_last)]
        batch = Batch()
        for offset, token in enumerate(tokens):
            batch.add(token, position + offset, (self._slot.first,), True)
            batch.hidden.append(None)
        rows = yield Ask(self._backend, batch, self._costs)
        return rows[len(rows) - n :]

    def rewind(self, n_tokens: int) -> None:
        super().rewind(n_tokens)
        self._cache.rewind(n_tokens)


class DflashDraft(TrainedDraft):
    """A loaded DFlash or DSpark draft."""

    model_type = DflashModel
    context_type = DflashContext
    drafter_type = DflashDrafter


KIND = DflashDraft.kind()
