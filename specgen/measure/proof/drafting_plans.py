"""The ways to draft that are checked: that of the options, and one that drafts in every round; and what the
events of a loop tell about the drafts."""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from specgen.errors import BackendError
from specgen.events import CommittedEvent, DraftedEvent, Event, NoticeEvent
from specgen.method.draft import Draft
from specgen.method.policy import Offer, Policy, Reason, RoundPlan, RoundResult
from specgen.options import DraftOptions, PolicyName
from specgen.text.sequence import Sequence

WayName: TypeAlias = Literal[PolicyName, "forced"]


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """A way to draft. With `is_forced`, n-grams and the model draft in turn, and one continues the draft
    of the other, regardless of costs."""

    drafting: DraftOptions
    is_forced: bool = False

    @property
    def name(self) -> WayName:
        """The name of the policy that decides, or "forced"."""
        return "forced" if self.is_forced else self.drafting.policy_in_use

    def prepare(self, sequence: Sequence) -> None:
        """Let a sequence draft this way."""
        drafters = sequence.drafters
        if self.is_forced and drafters is not None and drafters.free and drafters.model:
            sequence.policy = ByTurns(sequence.policy)


def ways_to_draft(drafting: DraftOptions) -> list[DraftingPlan]:
    """Return how `specgen run` drafts with these options. If costs could decide that nothing is drafted,
    add a plan that always drafts, however unsure the draft is."""
    ways = [DraftingPlan(drafting)]
    if drafting.is_by_cost:
        shortest, longest = drafting.ngrams_of
        forced = replace(
            drafting,
            policy="fixed",
            p_min=0.0,
            ngrams=drafting.adds_ngrams,
            ngram_min=shortest,
            ngram_max=longest,
        )
        ways.append(DraftingPlan(forced, is_forced=True))
    return ways


class ByTurns:
    """Lets a model and n-grams begin the draft in turn. In half of the rounds the other one continues
    after one or two tokens.

    Whose turn it is depends only on the number of the round, so the text is not biased.
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.n_max = inner.n_max
        self._n_rounds = 0

    def plan(self, offer: Offer) -> RoundPlan:
        self._n_rounds += 1
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1 or offer.drafter is None:
            return self._inner.plan(offer)
        model_begins, other_goes_on = self._n_rounds % 2 == 0, self._n_rounds % 4 < 2
        #: The number of tokens by the first drafter, if the other one continues.
        n_first = min(n_max, 1 + self._n_rounds // 4 % 2) if other_goes_on else n_max
        reason = Reason("fixed")
        if model_begins or not len(offer.found):
            stop = UpTo(n_first)
            return RoundPlan(reason, n_max, stop=stop, extends=other_goes_on, drafter=offer.drafter)
        found = offer.found.first(n_first)
        n_behind = n_max - len(found) if other_goes_on and found.is_chain else 0
        return RoundPlan(reason, n_behind, found, drafter=offer.drafter)

    def observe(self, result: RoundResult) -> None:
        self._inner.observe(result)

    def finish(self) -> None:
        self._inner.finish()


@dataclass(frozen=True, slots=True)
class UpTo:
    """Stops a draft after `n` tokens, however sure it is."""

    n: int
    needs_confidence: bool = False

    def wants_token(self, confidences: abc.Sequence[float]) -> bool:
        return len(confidences) <= self.n

    def wants_decode(self, confidences: abc.Sequence[float]) -> bool:
        return len(confidences) < self.n

    def cut(self, draft: Draft) -> Draft:
        return draft


# --- what events tell ------------------------------------------------------------------------


def check_drafting(events: abc.Sequence[Event]) -> None:
    """Raise `BackendError` if the drafter failed: the answer continues without drafts, which proves
    nothing."""
    for event in events:
        if isinstance(event, NoticeEvent):
            raise BackendError(event.message)


def drafted_by(events: Iterable[Event]) -> Counter[str]:
    """Return the number of verified draft tokens for each drafter, by its name."""
    return Counter(
        node.origin for event in events if isinstance(event, DraftedEvent) for node in event.nodes
    )


def tokens_told(events: abc.Sequence[Event], *, loses_bonus: bool = False) -> Iterator[int]:
    """Yield the tokens that events commit to the text; with `loses_bonus`, without bonus tokens."""
    for event in events:
        if isinstance(event, CommittedEvent):
            for piece in event.pieces:
                if not (loses_bonus and piece.kind == "bonus"):
                    yield piece.token_id
