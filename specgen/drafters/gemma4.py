"""Gemma 4 assistants: a few trained layers draft from the target's own KV cache.

They attend to the target's keys and values and have none of their own, so nothing has to be
prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence

from specgen.drafters.expansion import Decoding, Expansion
from specgen.drafters.hidden_state_drafts import HiddenStateDrafter, TrainedDraft
from specgen.drafters.interface import (
    NO_DRAFT,
    Drafting,
)
from specgen.llama.hidden_state_contexts import AssistantContext
from specgen.llama.paired_drafts import AssistantModel


class AssistantDrafter(HiddenStateDrafter):
    """Drafts chains.

    The first row reads the target's hidden state, and each further row the state of the previous
    row. All rows are at the same position: the one after the last token that the target decoded.
    """

    name = "gemma4-assistant"

    def _grow(
        self,
        draft: Expansion,
        context: Sequence[int],
        n_decoded: int,
    ) -> Drafting:
        """Decode the tokens that the target has not decoded, then the draft, one by one."""
        state = self.hidden_states.after(n_decoded - 1)
        if state is None:
            return NO_DRAFT
        for token in context[n_decoded:-1]:
            yield from self._decode_token(token, n_decoded, state)
            state = self._backend.state(self._branches.first)
        rows = yield from self._decode_token(context[-1], n_decoded, state)

        def logits_after(_nodes: Sequence[int]) -> Decoding:
            """Decode the last token of the chain with the state after the previous one."""
            state = self._backend.state(self._branches.first)
            return self._decode_token(draft.tokens[-1], n_decoded, state)

        return (yield from draft.grow(rows[0], logits_after))


class AssistantDraft(TrainedDraft):
    """A loaded Gemma 4 assistant."""

    model_type = AssistantModel
    context_type = AssistantContext
    drafter_type = AssistantDrafter
    reads_target_cache = True


KIND = AssistantDraft.kind()
