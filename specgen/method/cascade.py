"""The drafters of one text: a free one that is asked first, and one that decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.errors import BackendError
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Drafter, Drafting, HiddenStateSink
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.text_state import TextState


@dataclass(slots=True)
class Cascade:
    """The drafters of one text: a free one, one that decodes, or both.

    In each round, `look_up` asks the free drafter first. Then a policy makes a plan, knowing what
    was found, and `propose` carries it out.
    """

    #: A drafter that decodes nothing (n-grams).
    free: Drafter | None = None
    #: A drafter that decodes (a draft model).
    model: Drafter | None = None
    #: The text, for its grammar, which cuts what the free drafter finds; None for no grammar.
    text_state: TextState | None = None

    @property
    def model_name(self) -> str | None:
        """The name of the drafter that decodes, if there is one."""
        return None if self.model is None else self.model.name

    @property
    def hidden_states(self) -> HiddenStateSink | None:
        """What takes the target's hidden states, if one of the drafters reads them."""
        for drafter in (self.model, self.free):
            if drafter is not None and drafter.hidden_states is not None:
                return drafter.hidden_states
        return None

    def look_up(
        self,
        context: Sequence[int],
        n_max: int,
        n_drafted: int = 0,
    ) -> Draft:
        """Begin a round: return what the free drafter finds, as far as the grammar allows it.

        A sampled draft is returned unchanged.

        Args:
            context: The committed tokens, then `n_drafted` drafted ones.
            n_max: The maximum number of tokens to find.
            n_drafted: The number of tokens at the end of `context` that are not committed.

        Raises:
            BackendError: If the free drafter asks for a decode.
        """
        if self.free is None or n_max < 1:
            return NO_DRAFT
        try:
            # A drafter that needs no decode returns its draft at once, without yielding. The plan
            # only limits its length: the policy will cut the draft once it knows it.
            next(self.free.propose(context, RoundPlan("fixed", n_max), n_drafted))
        except StopIteration as ended:
            found: Draft = ended.value
        else:
            raise BackendError(f"{self.free.name} asks for a decode")
        text_state = self.text_state
        # Tokens that were sampled must not be left out. The verifier rejects those that the grammar
        # forbids.
        if text_state is not None and text_state.has_grammar and not found.is_sampled:
            found = text_state.within_grammar(found, context[len(context) - n_drafted :])
        return found

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft as planned, after `look_up` in the same round; see `Drafter.propose`.

        This is a generator, so that an error of the drafter is always raised while it drafts.
        """
        if self.model is None or plan.n_max < 1:
            return plan.found
        return (yield from self.model.propose(context, plan, n_drafted))

    def observe(self, result: RoundResult) -> None:
        """Tell the drafters the result of the last round."""
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` of the text, since another text follows them."""
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.rewind(n_tokens)
