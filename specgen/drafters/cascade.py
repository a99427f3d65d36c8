"""Drafters that draft together: what costs nothing before a model, and the model."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Drafter, Drafting, draft_alone
from specgen.method.policy import RoundPlan, RoundResult, draft_up_to
from specgen.method.tables import FREE, Price
from specgen.text.text_state import TextState


class Cascade:
    """A drafter that costs nothing, one that decodes, or both, for one sequence.

    In each round `look_up` comes first: the proposal of `free` (n-grams) is known before the round is
    planned. Then `propose` carries out the plan: it proposes what was found, or lets the model draft. With `state`, nothing is found that its grammar forbids.
    """

    def __init__(
        self,
        free: Drafter | None = None,
        model: Drafter | None = None,
        *,
        state: TextState | None = None,
    ) -> None:
        self.free = free
        self.model = model
        self._both = [each for each in (free, model) if each is not None]
        self._state = state

    @property
    def model_name(self) -> str | None:
        """The name of the drafter that decodes; None if there is none."""
        return None if self.model is None else self.model.name

    def look_up(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        """Begin a round, and return what the free drafter finds to follow the text; at most `n_max` tokens.
        The last `n_drafted` tokens of `context` are drafted too."""
        if self.free is None or n_max < 1:
            return NO_DRAFT
        found = draft_alone(self.free.propose(context, draft_up_to(n_max), n_drafted))
        if self._state is not None:
            found = self._state.within_grammar(found, context[len(context) - n_drafted :])
        return found

    def price(self, n_context: int) -> Price:
        """Return the price of the drafter that decodes, after a text of `n_context` tokens."""
        return FREE if self.model is None else self.model.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft as planned; see `Drafter.propose`. `look_up` was called for this round."""
        if self.model is None or plan.n_max < 1:
            return plan.found
        return (yield from self.model.propose(context, plan, n_drafted))

    def observe(self, result: RoundResult) -> None:
        for drafter in self._both:
            drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        for drafter in self._both:
            drafter.rewind(n_tokens)
