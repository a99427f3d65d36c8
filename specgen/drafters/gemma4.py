"""A Gemma 4 assistant drafts from the target's own cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.expansion import Expansion
from specgen.drafters.interface import Reads
from specgen.drafters.states import StatesDrafter, TrainedDraft
from specgen.llama.hidden_state_contexts import AssistantContext
from specgen.llama.paired_drafts import AssistantModel
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Ask, Drafting
from specgen.system.arrays import Logits


class AssistantDrafter(StatesDrafter):
    """Drafts chains with layers that attend to the target's keys and values, and have none of their
    own. The first row reads the target's hidden state, each further one that of the row before, at
    the position behind its last token.
    """

    name = "gemma4-assistant"

    def _grow(self, made: Expansion, context: Sequence[int], n_read: int) -> Drafting:
        state = self.hidden_states.after(n_read - 1)
        if state is None:
            return NO_DRAFT
        for token in context[n_read:-1]:
            yield from self._row_after(token, n_read, state)
            state = self._backend.state(self._slot.first)
        row = yield from self._row_after(context[-1], n_read, state)

        def rows_beyond(nodes: Sequence[int]) -> Generator[Ask, Logits, list[Logits]]:
            state = self._backend.state(self._slot.first)
            row = yield from self._row_after(made.tokens[nodes[0]], n_read, state)
            return [row]

        return (yield from made.grow(row, rows_beyond))


class AssistantDraft(TrainedDraft):
    """A loaded Gemma 4 assistant."""

    model_type = AssistantModel
    context_type = AssistantContext
    drafter_type = AssistantDrafter
    reads: Reads = "cache"


KIND = AssistantDraft.kind()
