"""The drafters of one text, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.errors import BackendError
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Drafter, Drafting, ready
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.text_state import TextState


@dataclass(slots=True)
class Cascade:
    """What drafts for one text: a `free` drafter (n-grams), one that decodes, or both. In each
    round `look_up` comes first, so that the plan, which `propose` carries out, knows what it found.
    The grammar allows all that is found.
    """

    free: Drafter | None = None
    model: Drafter | None = None
    state: TextState | None = None

    @property
    def model_name(self) -> str | None:
        return None if self.model is None else self.model.name

    def look_up(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        """Begin a round: return what the free drafter finds, at most `n_max` tokens; `n_drafted`
        are drafts.
        """
        if self.free is None or n_max < 1:
            return NO_DRAFT
        try:
            next(self.free.propose(context, RoundPlan("fixed", n_max), n_drafted))
        except StopIteration as ended:
            found: Draft = ended.value
        else:
            raise BackendError(f"{self.free.name} asks for a decode")
        if self.state is not None and self.state.has_grammar:
            found = self.state.within_grammar(found, context[len(context) - n_drafted :])
        return found

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft as planned; see `Drafter.propose`. `look_up` was called for this round."""
        if self.model is None or plan.n_max < 1:
            return ready(plan.found)
        return self.model.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.rewind(n_tokens)
