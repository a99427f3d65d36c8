"""A Gemma 4 assistant drafts from the target's own cache."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.kind import Reads
from specgen.drafters.states import MOST_UNREAD, StatesDrafter, TrainedDraft
from specgen.llama.draft_contexts import AssistantContext
from specgen.llama.draft_models import AssistantModel
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Ask, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.tables import Price
from specgen.system.arrays import Logits


class AssistantDrafter(StatesDrafter):
    """Drafts chains with layers that attend to the target's keys and values, and have none of their own. So
    nothing is read before a draft, and nothing is dropped after it. The first row reads the target's hidden
    state, each further one that of the row before. All rows have the position behind the target's last
    token."""

    name = "gemma4-assistant"

    def price(self, n_context: int) -> Price:
        token_s = self._costs.share_s(1)
        return Price((n_context - self._n_read(n_context)) * token_s, token_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_read = self._n_read(len(context))
        state = self.states.after(n_read - 1)
        if state is None or plan.n_max < 1 or len(context) - 1 - n_read > MOST_UNREAD:
            return NO_DRAFT
        self.states.forget(n_read)
        for token in context[n_read:-1]:
            yield from self._row_after(token, n_read, state)
            state = self._backend.state(self._slot.first)
        before = context[len(context) - n_drafted :]
        row = yield from self._row_after(context[-1], n_read, state)

        def step(token: int, _n: int) -> Generator[Ask, Logits, Logits]:
            return self._row_after(token, n_read, self._backend.state(self._slot.first))

        return (yield from self._chain(row, before, step, plan, plan.n_max))


class AssistantDraft(TrainedDraft):
    """A loaded Gemma 4 assistant."""

    model_type = AssistantModel
    context_type = AssistantContext
    drafter_type = AssistantDrafter
    reads: Reads = "cache"


KIND = AssistantDraft.kind()
