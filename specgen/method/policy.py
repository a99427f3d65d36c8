"""How much is drafted: a policy makes a plan once a round, as a value, and drafters follow it without asking back.

Here are the plan and the policies that know no costs; `cost_aware` decides by measured costs.

A *look* is one reading of a drafter's distribution for the next position; its *confidence* is the largest probability
there. A look may end the draft without adding a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specgen.events import REASONS, ReasonName
from specgen.method.cost_table import ALONE, FREE, Others, Price
from specgen.method.draft import NO_DRAFT, Draft

if TYPE_CHECKING:
    from specgen.options import DraftOptions


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a round drafts what it drafts. `text` is the reason with its numbers."""

    name: ReasonName
    text: str = ""

    def __str__(self) -> str:
        return self.text or REASONS[self.name]


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known when a round is planned, before anything is decoded."""

    #: The tokens that the answer is expected to get still, and the most that may be drafted now.
    n_left: int
    n_most: int
    #: What the drafter that costs nothing has found.
    found: Draft = NO_DRAFT
    #: The name of the drafter that has to decode, and its price.
    drafter: str | None = None
    price: Price = FREE
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
        """Whether `wants_token` uses the confidences, each of which costs a pass over the logits."""
        ...

    def wants_token(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look."""
        ...

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        """Return whether another look, after all these tokens, is worth a decode of the drafter."""
        ...

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes of a finished draft that are worth verifying: the first tokens of a chain, or
        nodes of a tree, likeliest first. No token that was drawn at random is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class UntilUnsure:
    """A draft goes on while its model gives a token at least `p_min` (llama.cpp's rule), and the product of
    all its tokens' probabilities is at least `bound`. Drafts of fewer than `n_min` tokens are not verified."""

    p_min: float = 0.0
    n_min: int = 0
    bound: float = 0.0
    needs_confidence: bool = False

    def wants_token(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self.p_min and math.prod(confidences) >= self.bound

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        return True

    def cut(self, draft: Draft) -> Draft:
        if draft.is_drawn:  # a drawn token is not dropped because of what it is
            return draft
        if draft.is_chain and self.bound > 0.0:
            known = [1.0 if each is None else each for each in draft.probabilities]
            products = (math.prod(known[: n + 1]) for n in range(len(draft)))
            draft = draft.first(sum(product >= self.bound for product in products))
        return draft if len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    A round verifies either `found`, which a lookup found without a decode, or a draft of at most `n_max` tokens of
    the drafter that decodes, as far as `stop` lets it go; if `extends` is set, lookups add tokens after or beside
    those. `stop` cuts the finished draft.
    """

    reason: Reason
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: Stop = field(default_factory=UntilUnsure)
    extends: bool = False
    #: Tokens that a drafter of another vocabulary has to draft again first, whatever `stop` says.
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

    def wants_token(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look; see `Stop`."""
        chosen = confidences[self.n_given :]
        return not chosen or (len(confidences) <= self.n_max and self.stop.wants_token(chosen))

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        """Return whether to look for another token after these; see `Stop`."""
        if len(confidences) < self.n_given:
            return True
        chosen = confidences[self.n_given :]
        return len(confidences) < self.n_max and (not chosen or self.stop.wants_decode(chosen))

    def after(self, n_given: int) -> RoundPlan:
        """Return the plan for a drafter that first drafts `n_given` tokens of the text again."""
        if not n_given:
            return self
        return replace(self, n_max=self.n_max + n_given, n_given=n_given)


def draft_up_to(n_max: int, *, needs_confidence: bool = False) -> RoundPlan:
    """Return a plan for a single drafter that drafts `n_max` tokens, however sure it is."""
    return RoundPlan(Reason("fixed"), n_max, stop=UntilUnsure(needs_confidence=needs_confidence))


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


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure (llama.cpp's rule).

    Among several drafters, the first one that has a draft is used.
    """

    def __init__(self, options: DraftOptions) -> None:
        self.n_max = options.n_max
        p_min = options.stops_below
        self._stop = UntilUnsure(p_min, options.min_tokens, needs_confidence=p_min > 0.0)

    def plan(self, offer: Offer) -> RoundPlan:
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1:
            return RoundPlan(Reason("no room"))
        found = self._stop.cut(offer.found.first(n_max))
        if len(found):
            return RoundPlan(Reason("fixed"), found=found, stop=self._stop)
        if offer.drafter is None:
            return RoundPlan(Reason("nothing found"))
        return RoundPlan(Reason("fixed"), n_max, stop=self._stop, drafter=offer.drafter)

    def observe(self, result: RoundResult) -> None:
        pass


class ThresholdPolicy(FixedPolicy):
    """Drafts while the product of the tokens' probabilities stays above a bound, which adapts.

    The product is the model's own estimate of the probability that the whole draft is accepted. After
    each round the bound moves so that, in the long run, a quarter of the drafted tokens is rejected.
    (A confidence bound that follows the accepted share: Mamou et al., arXiv:2405.04304.)
    """

    _REJECTED = 0.25
    #: How far the bound moves in a round, in log-probability for each unit of difference to that share.
    _RATE = 0.4
    _START, _LEAST, _MOST = 0.3, 0.01, 0.9

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=self._START, needs_confidence=True)

    @property
    def bound(self) -> float:
        """The present bound on a draft's probability."""
        return self._stop.bound

    def observe(self, result: RoundResult) -> None:
        n_drafted = len(result.draft)
        # If nothing was sure enough, the bound falls slowly, since nothing is learnt without drafts.
        difference = -0.1 * self._REJECTED
        if n_drafted:
            difference = 1.0 - len(result.path) / n_drafted - self._REJECTED
        bound = self.bound * math.exp(self._RATE * difference)
        self._stop = replace(self._stop, bound=min(self._MOST, max(self._LEAST, bound)))
