"""The plan of a round: a policy makes it once, as a value, and drafters follow it without asking back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specgen.method.cost_table import ALONE, FREE, Others, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.policy.reasons import Reason


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known when a round is planned, before anything is decoded."""

    #: The tokens that the answer is expected to get still, and the most that may be drafted now.
    n_left: int
    n_most: int
    #: What the drafter that costs nothing has found.
    found: Draft = NO_DRAFT
    #: The name of the drafter that has to decode, and its price behind the first n found tokens.
    drafter: str | None = None
    price: Callable[[int], Price] = lambda _n: FREE
    #: The other sequences in the target's batch.
    others: Others = ALONE


class Stop(Protocol):
    """How far a draft goes. Its answers depend only on what the drafter has seen in this round.

    `confidences` are the largest probabilities that the drafter gave to any token, one for each of its
    looks so far: the last one belongs to the token that is about to be drafted. It is known before a
    token is drawn, so that whether a token is drafted never depends on the token.
    """

    @property
    def needs_confidence(self) -> bool:
        """Whether `keeps` uses the confidences, each of which costs a pass over the logits."""
        ...

    def keeps(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look."""
        ...

    def looks(self, confidences: Sequence[float]) -> bool:
        """Return whether another look, after all these tokens, is worth a decode of the drafter."""
        ...

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes of a finished draft that are worth verifying: the first tokens of a chain, or
        nodes of a tree, likeliest first. No token that was drawn at random is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Drafts go on up to their longest length, and are verified whole."""

    needs_confidence: bool = False

    def keeps(self, confidences: Sequence[float]) -> bool:
        return True

    def looks(self, confidences: Sequence[float]) -> bool:
        return True

    def cut(self, draft: Draft) -> Draft:
        return draft


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    The draft has up to three segments: `found`, the tokens of the free drafter that are verified; after
    them at most `n_max` tokens of the drafter that decodes, as far as `stop` lets it go; and, if `extends`
    is set, tokens that the free drafter finds after or beside those. `stop` cuts the finished draft.
    """

    reason: Reason
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: Stop = field(default_factory=Whole)
    extends: bool = False
    #: The first tokens of the drafter that decodes are no choice: it drafts so many whatever `stop` says.
    n_given: int = 0
    #: How many tokens a parallel draft predicts in its one decode; None: `n_max`.
    n_at_once: int | None = None
    #: The name of the drafter that decodes, and the seconds that its prefill takes: an investment in later
    #: rounds. Policies learn from these.
    drafter: str | None = None
    prefill_s: float = 0.0

    @property
    def origin(self) -> str | None:
        """The name of the drafter that the round is accounted to; None if nothing is drafted."""
        if self.n_max > 0 and self.drafter is not None:
            return self.drafter
        return self.found.origins[0] if len(self.found) else None

    @property
    def needs_confidence(self) -> bool:
        return self.stop.needs_confidence

    def keeps(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look; see `Stop`."""
        n_chosen = len(confidences) - self.n_given
        if n_chosen <= 0:
            return True
        return len(confidences) <= self.n_max and self.stop.keeps(confidences[self.n_given :])

    def looks(self, confidences: Sequence[float]) -> bool:
        """Return whether to look for another token after these; see `Stop`."""
        n_chosen = len(confidences) - self.n_given
        if n_chosen < 0:
            return True
        if len(confidences) >= self.n_max:
            return False
        return n_chosen == 0 or self.stop.looks(confidences[self.n_given :])

    def after(self, n_given: int) -> RoundPlan:
        """Return the plan for a drafter that first drafts `n_given` tokens of the text again."""
        if not n_given:
            return self
        return replace(self, n_max=self.n_max + n_given, n_given=n_given)


def draft_up_to(n_max: int, *, needs_confidence: bool = False) -> RoundPlan:
    """Return a plan for a single drafter that drafts `n_max` tokens, however sure it is."""
    return RoundPlan(Reason("fixed"), n_max, stop=Whole(needs_confidence))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round for one sequence, from which policies and drafters learn."""

    plan: RoundPlan
    #: The verified draft, and its accepted nodes.
    draft: Draft
    path: tuple[int, ...]
    #: Seconds that this sequence's drafting took.
    draft_s: float
    #: Seconds and rows of the target's batch, those of other sequences included.
    target_s: float
    n_rows: int
    #: The tokens that the round added to the text: the accepted ones, then the target's own.
    committed: tuple[int, ...] = ()
    #: All that was drafted and found, before it was cut: the text shows which of it was right.
    proposed: tuple[Draft, ...] = ()


class Policy(Protocol):
    """Decides how much is drafted for one sequence: one plan a round, and one result to learn from."""

    @property
    def n_max(self) -> int:
        """The most tokens of a draft."""
        ...

    def plan(self, offer: Offer) -> RoundPlan:
        """Return the plan of the round that begins."""
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from a round."""
        ...

    def finish(self) -> None:
        """End the text, and update the statistics for other texts. May be called twice."""
        ...
