"""Learn acceptance rates by comparing drafts with the text, including drafts that were not verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specgen.method.acceptance import AcceptanceRates, origin_of_rank
from specgen.method.draft import ROOT, Draft
from specgen.method.policy.plan import RoundResult


@dataclass(slots=True)
class _Waiting:
    """A draft that is compared with the text as it grows, verified or not, and the node of it that
    the text has reached."""

    draft: Draft
    ranks: list[int]
    node: int = ROOT

    def holds(self, other: Draft) -> bool:
        """Return whether this draft contains another one, from the reached node on."""
        found = {ROOT: self.node}
        for node, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True)):
            for child in self.draft.children(found[parent]):
                if self.draft.tokens[child] == token:
                    found[node] = child
                    break
            else:
                return False
        return True

    def step(self, token: int) -> bool:
        """Go to the child with the text's next token; return False if there is none, or if it has no
        children."""
        for child in self.draft.children(self.node):
            if self.draft.tokens[child] == token:
                self.node = child
                return bool(self.draft.children(child))
        return False


@dataclass(slots=True)
class DraftOutcomes:
    """Compares drafts with the text, and counts the results in the drafters' `acceptance`, by origin.

    A token that was not drawn at random need not be verified for this: the text shows whether it
    continues with the token. A drawn token is counted only where it was verified.
    """

    acceptance: Callable[[str], AcceptanceRates]
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def observe(self, result: RoundResult) -> None:
        """Count the looks and the judged tokens of a round."""
        for draft in result.proposed:
            if result.plan.drafter is not None:
                seen = self.acceptance(result.plan.drafter)
                for confidence in draft.looks:
                    seen.see(confidence)
            self._wait_for(draft)
        draft = result.draft
        if draft.is_drawn and draft.is_chain:
            self._judge_draws(result)
        for key in list(self._waiting):
            waiting = self._waiting[key]
            for token in result.committed:
                self._judge_children(waiting, token)
                if not waiting.step(token):
                    del self._waiting[key]
                    break

    def _wait_for(self, draft: Draft) -> None:
        """Remember a draft without drawn tokens, whether or not it was verified."""
        if not len(draft) or draft.is_drawn:
            return
        waiting = self._waiting.get(draft.origins[0])
        if waiting is not None and waiting.holds(draft):
            return  # the same draft, shortened
        self._waiting[draft.origins[0]] = _Waiting(draft, draft.ranks())

    def _judge_draws(self, result: RoundResult) -> None:
        """Count which of the judged tokens of a drawn chain were accepted.

        They are counted by the model's confidence before the draw, which shows what to expect of
        them, and not by the probability of the drawn token."""
        draft, n_accepted = result.draft, len(result.path)
        looks = iter(draft.looks)
        for node in range(min(n_accepted + 1, len(draft))):
            if draft.distributions[node] is not None:
                confidence = next(looks, None)
                if confidence is not None:
                    acceptance = self.acceptance(draft.origins[node])
                    acceptance.judge(confidence, accepted=node < n_accepted)

    def _judge_children(self, waiting: _Waiting, token: int) -> None:
        """Count, for each token that was proposed here, whether it is the text's token."""
        draft = waiting.draft
        for child in draft.children(waiting.node):
            confidence = draft.probabilities[child]
            acceptance = self.acceptance(origin_of_rank(draft.origins[child], waiting.ranks[child]))
            acceptance.judge(
                1.0 if confidence is None else confidence, accepted=draft.tokens[child] == token
            )
