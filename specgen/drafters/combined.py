"""N-grams and a model, drafting together."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.calibration.cost_table import FREE, Price
from specgen.core.draft import NO_DRAFT, Draft
from specgen.drafters.base import Drafter, Drafting, draft_alone, drafting_of
from specgen.policy import Decided, Policy, RoundReport


class CombinedDrafter:
    """In each round the drafter with the larger expected gain starts, and the other one may go on.

    `free` drafts at no cost (n-grams), so its proposal is known before the choice. `model` has to
    decode, so only its expected gain is known. Each may extend the other's draft: n-grams look
    up a continuation of the text and the model's draft; the model may read the n-grams' proposal
    and draft on from there. The accepted tokens of that proposal stay in the model's cache.

    With `merges`, n-gram tokens that differ from the model's become branches of its draft. This
    is only for drafts that are not drawn at random.
    """

    def __init__(self, free: Drafter, model: Drafter, *, merges: bool = False) -> None:
        self._merges = merges
        self._free = free
        self._model = model
        #: The tokens behind the text that the model was shown, and the text's length then.
        self._shown: tuple[int, ...] = ()
        self._n_text = 0
        #: The drafter that made the last draft; None if both did.
        self._sole: Drafter | None = None

    @property
    def name(self) -> str:
        return f"{self._free.name}+{self._model.name}"

    @property
    def model_s(self) -> float:
        return self._free.model_s + self._model.model_s

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Draft:
        return draft_alone(self.drafting(context, n_max, policy, n_drafted))

    def drafting(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Drafting:
        self._take_back(context)
        proposed = self._free.propose(context, n_max, policy)
        found = policy.trim(proposed)
        prospect = policy.prospect(self._model.name, self._model.price(len(context)))
        if len(found) and policy.worth(found) >= prospect:
            self._sole = self._free
            return (yield from self._extended_by_model(context, found, n_max, policy))
        self._sole = self._model
        if prospect <= 0.0:
            return NO_DRAFT
        draft = yield from drafting_of(self._model, context, n_max, Decided(policy))
        draft = self._extended_by_ngrams(context, draft, n_max, policy)
        if self._merges and len(draft) and len(proposed):
            return policy.trim(draft.merged_with(proposed)).first(n_max)
        return draft

    def observe(self, report: RoundReport) -> None:
        if self._sole is not None:
            self._sole.observe(report)

    def rewind(self, n_tokens: int) -> None:
        self._free.rewind(n_tokens)
        self._model.rewind(min(n_tokens, self._n_text) if self._shown else n_tokens)
        self._shown = ()

    def _extended_by_model(
        self, context: Sequence[int], found: Draft, n_max: int, policy: Policy
    ) -> Drafting:
        n_room = n_max - len(found)
        if n_room < 1 or not found.is_chain:
            return found
        n_text = len(context) + len(found)
        if policy.prospect(self._model.name, self._model.price(n_text), found) <= 0.0:
            return found
        self._shown, self._n_text = found.tokens, len(context)
        behind = Decided(policy, n_after=len(found))
        text = [*context, *found.tokens]
        more = yield from drafting_of(self._model, text, n_room, behind, len(found))
        self._sole = None
        return found.followed_by(more)

    def _extended_by_ngrams(
        self, context: Sequence[int], draft: Draft, n_max: int, policy: Policy
    ) -> Draft:
        n_room = n_max - len(draft)
        if n_room < 1 or not len(draft) or not draft.is_chain or draft.walks:
            return draft
        if policy.prospect(self._free.name, FREE, draft) <= 0.0:
            return draft
        more = self._free.propose([*context, *draft.tokens], n_room, policy, len(draft))
        self._free.rewind(len(context))
        if len(more):
            self._sole = None
        return draft.followed_by(more)

    def _take_back(self, context: Sequence[int]) -> None:
        """Let the model forget the tokens that it was shown and that did not become text."""
        if not self._shown:
            return
        n_same = 0
        for shown, token in zip(self._shown, context[self._n_text :], strict=False):
            if shown != token:
                break
            n_same += 1
        if n_same < len(self._shown):
            self._model.rewind(self._n_text + n_same)
        self._shown = ()
