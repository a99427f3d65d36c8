"""DFlash and DSpark: a trained draft predicts all tokens of a draft in one decode.

The decode is a *block*: the last token of the text, and a mask for each further token (Chen et al.,
arXiv:2602.06036).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.expansion import Expansion
from specgen.drafters.hidden_state_drafts import (
    HiddenStateCache,
    HiddenStateDrafter,
    TrainedDraft,
)
from specgen.drafters.interface import (
    Ask,
    Batch,
    CostTable,
    Drafting,
    DraftRequest,
    Price,
)
from specgen.llama.hidden_state_contexts import DflashContext
from specgen.llama.paired_drafts import DflashModel
from specgen.system.arrays import Logits


class DflashDrafter(HiddenStateDrafter):
    """Drafts a chain with one decode of a block.

    Before the block is decoded, the cache is filled with the states of the target's layers for the
    tokens that were accepted since the last draft; no token is decoded for that. The row of a mask
    predicts the token at its own position; with `predicts_from_last`, each row predicts the next
    token. A row does not depend on drafted tokens, so every verifier can judge the draft.
    """

    name = "dflash"
    max_undecoded = 0  # a block begins with a single token

    def __init__(
        self,
        backend: DflashContext,
        request: DraftRequest,
    ) -> None:
        super().__init__(backend, request)
        draft = backend.draft
        self._mask = draft.mask
        self._predicts_from_last = draft.predicts_from_last
        #: The maximum number of tokens of a draft.
        self._n_block = draft.n_max
        self._max_predicted = self._n_block
        #: The number of rows of the largest block. Unless `predicts_from_last`, the row of the
        #: text's last token predicts nothing.
        self._n_rows = draft.n_max if draft.predicts_from_last else draft.n_max + 1
        self._cache = HiddenStateCache(backend, request, self.hidden_states)
        self._caches = [self._cache]
        #: The costs of filling the cache, separately because it is cheaper than decoding tokens.
        self._fill_costs = CostTable()

    def price(self, n_context: int) -> Price:
        """Return the cost of a block, which is the same however many of its tokens are used."""
        block_s = self._costs.seconds_each(self._n_rows)
        n_new = self._n_decoded(n_context) - max(self._cache.n_held, self.hidden_states.first)
        # One round adds at most a whole draft and the target's own token; more is a prefill. Its
        # cost is overestimated, since filling the cache costs less than decoding tokens.
        n_prefill = max(0, n_new - (self._n_block + 1))
        prefill_s = self._costs.seconds_each(n_prefill) if n_prefill else 0.0
        return Price(block_s, 0.0, prefill_s)

    def _grow(
        self,
        draft: Expansion,
        context: Sequence[int],
        n_decoded: int,
    ) -> Drafting:
        """Decode a block after the text, and grow a draft from its logits."""
        yield from self._fill_cache(context, n_decoded)
        n_tokens = draft.n_levels_max
        n_masks = n_tokens - 1 if self._predicts_from_last else n_tokens
        block = [context[-1], *[self._mask] * n_masks]
        position = n_decoded - self._cache.n_skipped
        batch = Batch.of(block, position, len(block), self._branches.first)
        batch.hidden = [None] * len(block)  # the states are in the cache already
        rows = yield Ask(self._backend, batch, self._costs)
        # Unless it predicts, the row of the text's last token comes first: leave it out.
        return (yield from draft.grow_from(rows[len(rows) - n_tokens :]))

    def _fill_cache(
        self,
        context: Sequence[int],
        n_decoded: int,
    ) -> Generator[Ask, Logits, None]:
        """Fill the cache with the states of the tokens that the target has decoded."""
        cache = self._cache
        while cache.n_held < n_decoded:
            batch = Batch()
            end = min(n_decoded, cache.n_held + self._backend.n_batch)
            for index in range(cache.n_held, end):
                position = index - cache.n_skipped
                batch.add(context[index], position, (self._branches.first,), wants=False)
                batch.hidden.append(self.hidden_states.after(index))
            yield Ask(self._backend, batch, self._fill_costs)
            cache.n_held = end


class DflashDraft(TrainedDraft):
    """A loaded DFlash or DSpark draft."""

    model_type = DflashModel
    context_type = DflashContext
    drafter_type = DflashDrafter


KIND = DflashDraft.kind()
