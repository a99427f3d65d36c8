"""The drafters of one sequence: what costs nothing looks up first, a model drafts as planned."""

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
    planned. Then `propose` carries out the plan: it proposes what was found, or lets the model draft, after
    which n-grams may look up a continuation of the text and its draft.

    With `merges`, n-gram tokens that differ from the model's become branches of its draft. This
    is only for drafts that are not drawn at random. With `state`, nothing is found that its grammar
    forbids.
    """

    def __init__(
        self,
        free: Drafter | None = None,
        model: Drafter | None = None,
        *,
        merges: bool = False,
        state: TextState | None = None,
    ) -> None:
        self.free = free
        self.model = model
        self._merges = merges
        self._state = state
        #: What the free drafter found in this round.
        self._found = NO_DRAFT

    @property
    def name(self) -> str:
        """The names of the drafters."""
        return "+".join(each.name for each in (self.free, self.model) if each is not None)

    @property
    def model_name(self) -> str | None:
        """The name of the drafter that decodes; None if there is none."""
        return None if self.model is None else self.model.name

    def look_up(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        """Begin a round, and return what the free drafter finds to follow the text; at most `n_max` tokens.
        The last `n_drafted` tokens of `context` are drafted too."""
        self._found = self._free_draft(context, n_max, n_drafted)
        return self._found

    def price(self, n_context: int) -> Price:
        """Return the price of the drafter that decodes, after a text of `n_context` tokens."""
        return FREE if self.model is None else self.model.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft as planned; see `Drafter.propose`. `look_up` was called for this round."""
        if self.model is None or plan.n_max < 1:
            return plan.found
        draft = yield from self.model.propose(context, plan, n_drafted)
        if not plan.extends or not len(draft):
            return draft
        draft = self._extended(context, draft, plan.n_max, n_drafted)
        if self._merges and len(self._found):
            return plan.stop.cut(draft.merged_with(self._found)).first(plan.n_max)
        return draft

    def observe(self, result: RoundResult) -> None:
        """Let the drafters learn from a round."""
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        if self.free is not None:
            self.free.rewind(n_tokens)
        if self.model is not None:
            self.model.rewind(n_tokens)

    def _free_draft(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        if self.free is None or n_max < 1:
            return NO_DRAFT
        found = draft_alone(self.free.propose(context, draft_up_to(n_max), n_drafted))
        if self._state is None or not len(found):
            return found
        return self._state.within_grammar(found, context[len(context) - n_drafted :])

    def _extended(self, context: Sequence[int], draft: Draft, n_max: int, n_drafted: int) -> Draft:
        """Return the model's draft with what the free drafter finds after it."""
        if self.free is None or not draft.is_chain or draft.walks:
            return draft
        n_room, n_drafted = n_max - len(draft), n_drafted + len(draft)
        more = self._free_draft([*context, *draft.tokens], n_room, n_drafted)
        self.free.rewind(len(context))
        return draft.followed_by(more)


class WrappedDrafter(Drafter):
    """Forwards every call to another drafter; subclasses override what differs."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.states = inner.states

    @property
    def name(self) -> str:
        return self.inner.name

    def price(self, n_context: int) -> Price:
        return self.inner.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return self.inner.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        self.inner.observe(result)

    def rewind(self, n_tokens: int) -> None:
        self.inner.rewind(n_tokens)
