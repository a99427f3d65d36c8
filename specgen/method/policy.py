"""How much is drafted: a policy makes a plan once a round, as a value, and drafters follow it without asking back.

`CostAwarePolicy` decides by costs and acceptance (`tables.py`), and lets a draft grow while that pays
(`draft_length.py`); the others know no costs. Their words:

    look          one reading of a drafter's distribution for the next position
    confidence    the largest probability there: what the drafter says
    acceptance    how often tokens of that confidence are accepted, if all before them are
    whole         the probability that all tokens so far are accepted, the product of their acceptances
    credit        the time that a drafter may lose, in plain decodes: what it saved, and a small share of all time
"""

from __future__ import annotations

import itertools
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specgen.events import REASONS, ReasonName
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.draft_length import Stop, WhilePaying, values_of_looks
from specgen.method.tables import (
    FREE,
    NGRAM_ORIGINS,
    AcceptanceRates,
    CostTable,
    Price,
    judge_drafts,
)

if TYPE_CHECKING:
    from specgen.options import DraftOptions

# --- what is expected
_MARGIN = 1.1  # a draft's expected gain over its cost, at least: only the cost is certain
_PREFILL_MARGIN = 2.0  # the same for a prefill, since how long the answer gets is a guess
_RATE = 0.06  # a round's weight in averages; at first all count equally, a plain decode as four
_MAX_STALE = 64  # rounds until a plain decode is made: its cost is what everything is compared with
_MAX_AGE = 4  # the rounds for which the values of looks are used
# --- the gate of a drafter
_SHARE = 0.014  # the share of the answer's time that it may lose,
_MOST_LOST = 4.0  # and as many plain decodes beyond that before it waits
_MOST_SAVED = (
    16.0  # the most credit, and the most that one round may cost: else the machine stood still
)
_MOST_AHEAD = (
    2.0  # the longest prefill, over the answer's time so far; of a trial, a twentieth of that
)
_N_TRIED = 3  # the tokens of a trial


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known when a round is planned: the tokens that the answer is expected to get still, the most that may
    be drafted now, what was found without a decode, and the name and price of the drafter that decodes."""

    n_left: int
    n_most: int
    found: Draft = NO_DRAFT
    drafter: str | None = None
    price: Price = FREE


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why; `detail` has the reason's numbers.

    A round verifies either `found`, which a lookup found without a decode, or a draft of at most `n_max` tokens of
    `drafter`, as far as `stop` lets it go. `stop` cuts the finished draft. The first `n_given` tokens repeat the end of
    the text, whatever `stop` says: a drafter with another vocabulary takes back its last tokens and drafts them anew. A
    parallel draft predicts `n_at_once` tokens in its one decode (None: `n_max`). `prefill_s` are the seconds of the
    drafter's prefill, an investment in later rounds.
    """

    reason: ReasonName
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: Stop = field(default_factory=Stop)
    drafter: str | None = None
    prefill_s: float = 0.0
    n_at_once: int | None = None
    n_given: int = 0
    detail: str = ""

    @property
    def why(self) -> str:
        return self.detail or REASONS[self.reason]

    def wants_token(self, confidences: Sequence[float]) -> bool:
        chosen = confidences[self.n_given :]
        return not chosen or (len(confidences) <= self.n_max and self.stop.wants_token(chosen))

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        chosen = confidences[self.n_given :]
        return len(confidences) < self.n_max and (not chosen or self.stop.wants_decode(chosen))

    def after(self, n_given: int) -> RoundPlan:
        """Return the plan for a drafter that repeats the text's last `n_given` tokens first."""
        return replace(self, n_max=self.n_max + n_given, n_given=n_given)


def draft_up_to(n_max: int, *, needs_confidence: bool = False) -> RoundPlan:
    """Return a plan for a single drafter that drafts `n_max` tokens, however sure it is."""
    return RoundPlan("fixed", n_max, stop=Stop(needs_confidence=needs_confidence))


@dataclass(slots=True)
class RoundResult:
    """A round of one sequence; the steps of the round fill it in. The verified draft and its accepted nodes; the
    seconds of all drafting; seconds and rows of the target's batch, which `n_sequences` share; the tokens that the
    round added to the text; all that was found and drafted, uncut; the seconds of the draft model's decodes; the
    batch's rows of the committed tokens before the draft."""

    plan: RoundPlan
    draft: Draft = NO_DRAFT
    path: tuple[int, ...] = ()
    draft_s: float = 0.0
    target_s: float = 0.0
    n_rows: int = 0
    committed: tuple[int, ...] = ()
    proposed: tuple[Draft, ...] = ()
    n_sequences: int = 1
    model_s: float = 0.0
    rows: range = range(1)


class Policy(Protocol):
    """Decides for one sequence how much is drafted, `n_max` tokens at most: one plan a round, and one result."""

    @property
    def n_max(self) -> int: ...

    def plan(self, offer: Offer) -> RoundPlan: ...

    def observe(self, result: RoundResult) -> None: ...


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure. What was found comes first."""

    def __init__(self, options: DraftOptions) -> None:
        self.n_max = options.n_max
        p_min = options.stops_below
        self._stop = Stop(p_min, options.min_tokens, needs_confidence=p_min > 0.0)

    def plan(self, offer: Offer) -> RoundPlan:
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1:
            return RoundPlan("no room")
        found = self._stop.cut(offer.found.first(n_max))
        if len(found):
            return RoundPlan("fixed", found=found, stop=self._stop)
        if offer.drafter is None:
            return RoundPlan("nothing found")
        return RoundPlan("fixed", n_max, stop=self._stop, drafter=offer.drafter)

    def observe(self, result: RoundResult) -> None:
        pass


class ThresholdPolicy(FixedPolicy):
    """Drafts while the product of the tokens' probabilities, the model's own estimate that the whole draft is
    accepted, stays above a bound. This moves so that, in the long run, a quarter of the drafted tokens is rejected.
    (A confidence bound that follows the accepted share: Mamou et al., arXiv:2405.04304.)"""

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=0.3, needs_confidence=True)

    def observe(self, result: RoundResult) -> None:
        # If nothing was sure enough, the bound falls slowly, since nothing is learnt without drafts.
        difference = -0.025
        if n_drafted := len(result.draft):
            difference = 1.0 - len(result.path) / n_drafted - 0.25
        bound = self._stop.bound * math.exp(0.4 * difference)
        self._stop = replace(self._stop, bound=min(0.9, max(0.01, bound)))


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost; that may be none.

    A token is worth the time that it would take otherwise: that of a plain decode, or less if recent rounds were
    faster. It costs decodes of the drafter and a row of the target's batch. A draft adds the sum, over its tokens, of
    the probability that the token and all before it are accepted (for a fixed length: Leviathan et al.,
    arXiv:2211.17192, section 3.4). What is known as a whole is cut where its value is highest; a model drafts
    `WhilePaying`.

    Most learning is free: tokens that were not worth verifying are compared with the text that follows. A model that
    is not expected to pay is tried on its credit, and a drafter that loses time against expectation waits.

    A policy decides for one text. `costs` is the target's table, to which observed times are added. `acceptance` is
    by origin; its counts cover all texts and may be shared with other policies.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        acceptance: MutableMapping[str, AcceptanceRates] | None = None,
    ) -> None:
        self.n_max, self._p_min, self._costs = options.n_max, options.stops_below, costs
        #: The acceptance probabilities from all texts, and those in this text; by origin.
        self._known = {} if acceptance is None else acceptance
        self._here: dict[str, AcceptanceRates] = {}
        #: The values of looks, by drafter and longest draft.
        self._values: dict[tuple[str, int], list[list[float]]] = {}
        self._n_stale = self._n_rounds = 0
        #: The seconds of all rounds, and averages over recent ones: seconds and tokens of a round.
        self._elapsed_s = self._round_s = 0.0
        self._round_tokens = 1.0
        #: In this round: the seconds of a plain decode, those that n drafted tokens add to it, a token's worth.
        self._plain_s = self._token_s = 0.0
        self._extra_s = [0.0]

    def plan(self, offer: Offer) -> RoundPlan:
        self._n_stale += 1
        if not self._costs:
            return RoundPlan("costs unknown")
        if self._n_stale > _MAX_STALE:
            return RoundPlan("plain decode")
        if min(self.n_max, offer.n_most) < 1:
            return RoundPlan("no room")
        # A sequence pays its part of a batch in which all draft as much as it does.
        rows_s = [self._costs.seconds_each(1 + n) for n in range(self.n_max + 1)]
        self._plain_s = plain_s = rows_s[0]
        self._extra_s = [seconds - plain_s for seconds in rows_s]
        recent_s = self._round_s / self._round_tokens if self._n_rounds else plain_s
        self._token_s = min(plain_s / _MARGIN, recent_s)
        stop = WhilePaying(
            origin=offer.drafter or NGRAM_ORIGINS[0],
            rates=self.acceptance_of,
            token_s=self._token_s,
            extra_s=self._extra_s,
            next_s=offer.price.next_s,
            p_min=self._p_min,
        )
        plan = self._plan_found(offer.found, stop)
        if offer.drafter is None:
            return plan
        model_plan, value_s = self._plan_model(offer, offer.drafter, stop)
        return plan if len(plan.found) and stop.worth_of(plan.found) >= value_s else model_plan

    def _plan_found(self, found: Draft, stop: WhilePaying) -> RoundPlan:
        """Plan to verify the best part of what was found; if there is none, say why."""
        if not len(found):
            return RoundPlan("nothing found", stop=stop)
        origin, found = found.origins[0], stop.cut(found)
        if self._waits(origin):
            return RoundPlan("put aside", stop=stop)
        if not len(found):
            return RoundPlan("acceptance", stop=stop, detail=self._too_rarely(origin))
        return RoundPlan("found", found=found, stop=stop)

    def _plan_model(self, offer: Offer, drafter: str, stop: WhilePaying) -> tuple[RoundPlan, float]:
        """Return the plan for the drafter that decodes, and its expected gain in seconds; -inf for a trial or none."""
        price, plain_s = offer.price, self._plain_s
        stop_paying, value_s, n_at_once = self._expect(drafter, price, offer.n_left, stop)
        plan = RoundPlan(
            "model",
            min(self.n_max, offer.n_most),
            stop=stop_paying,
            drafter=drafter,
            prefill_s=price.prefill_s,
            n_at_once=n_at_once,
        )
        pays = value_s > 0.0 or price == FREE  # a draft for nothing is judged once it is known
        if self._waits(drafter):
            return RoundPlan("put aside", stop=stop), -math.inf
        if pays and price.prefill_s <= _MOST_AHEAD * self._elapsed_s:
            return plan, value_s
        lengths = range(1, self.n_max + 1)
        if not pays and all(
            n * plain_s <= self._extra_s[n] + price.seconds(n) for n in lengths
        ):  # not even a draft that is accepted whole
            guess, row = (price.seconds(2) - price.first_s) / plain_s, self._extra_s[1] / plain_s
            text = f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
            return RoundPlan("row cost", stop=stop, detail=text), -math.inf
        if self._may_try(drafter, price):
            n_max, stop_tried = min(plan.n_max, _N_TRIED), Stop(needs_confidence=True)
            return replace(plan, reason="trial", n_max=n_max, stop=stop_tried), -math.inf
        if price.prefill_s > 0.0:
            text = f"the draft must first read the text, {price.prefill_s:.1f} s"
            return RoundPlan("prefill", stop=stop, detail=text), -math.inf
        text = self._too_rarely(drafter)
        return RoundPlan("acceptance", stop=stop, detail=text), -math.inf

    def _expect(
        self, drafter: str, price: Price, n_left: int, stop: WhilePaying
    ) -> tuple[WhilePaying, float, int | None]:
        """Return how far a model drafts, the seconds that a round with it is expected to save and, for a parallel
        draft, how many tokens its decode should predict."""
        stop = replace(stop, values=self._values_of(drafter, price, self.n_max))
        # Each look takes `next_s`, but the first one `first_s`.
        value_s, n_at_once = stop.value(0, 1.0) + price.next_s - price.first_s, None
        if price.at_once_s:
            # The confidences are known only once all tokens are predicted. So the values are found for each number of
            # tokens, with free looks, and the decode is subtracted.
            n_most = min(self.n_max, len(price.at_once_s))
            values_s = {
                n: self._values_of(drafter, price, n)[0][-1] - price.seconds(n)
                for n in {n_most, *(2**i for i in range(n_most.bit_length()))}
            }
            n_at_once = max(values_s, key=values_s.__getitem__)
            value_s = values_s[n_at_once]
        n_rounds = max(1.0, n_left / max(1.0, self._round_tokens))
        return stop, value_s - _PREFILL_MARGIN * price.prefill_s / n_rounds, n_at_once

    def _values_of(self, drafter: str, price: Price, n_most: int) -> list[list[float]]:
        """Return the values of looks in drafts of at most `n_most` tokens, a few rounds old perhaps."""
        if (drafter, n_most) not in self._values:
            rates, extra_s = self.acceptance_of(drafter), self._extra_s[: n_most + 1]
            found = values_of_looks(extra_s, price.next_s, self._token_s, rates)
            self._values[drafter, n_most] = found
        return self._values[drafter, n_most]

    def _waits(self, origin: str) -> bool:
        """Return whether a drafter lost so much time that it waits, whatever is expected of it."""
        return self.acceptance_of(origin).counts.credit < -_MOST_LOST

    def _may_try(self, drafter: str, price: Price) -> bool:
        """Return whether to try a model that is not expected to pay, to learn whether that is still so."""
        n, credit = min(_N_TRIED, self.n_max), self.acceptance_of(drafter).counts.credit
        most_s = min(credit * self._plain_s, _MOST_AHEAD / 20 * self._elapsed_s)
        # One trial says little: there is credit for several.
        return price.prefill_s + 3 * (price.seconds(n) + self._extra_s[n]) <= most_s

    def _too_rarely(self, origin: str) -> str:
        rate, row = self.acceptance_of(origin).mean(), self._extra_s[1] / self._plain_s
        return (
            f"{rate:.0%} of its tokens are expected to be accepted in this text, and checking one costs "
            f"{row:.2f} of a token"
        )

    def observe(self, result: RoundResult) -> None:
        costs, plan, n_drafted = self._costs, result.plan, len(result.draft)
        costs.observe(result.n_rows, result.target_s, result.n_sequences)
        if plan.drafter is not None:
            seen = self.acceptance_of(plan.drafter)
            for confidence in itertools.chain(*(each.looks for each in result.proposed)):
                seen.see(confidence)
        judge_drafts(self.acceptance_of, result.proposed, result.committed, len(result.path))
        if not n_drafted:
            self._n_stale = 0
        if not costs:
            return
        plain_s = costs.seconds_each(1)
        # Forced tokens count, too, and so do accepted ones behind the end of the answer.
        n_tokens = max(1, len(result.committed), len(result.path) + 1)
        target_s = result.target_s * costs.share_of_batch(n_drafted, result.n_rows)
        # Prefill is an investment in later rounds, and is charged to trials only.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + target_s
        round_s = min(round_s, (n_tokens + _MOST_SAVED) * plain_s)
        lost_s = round_s + (plan.prefill_s if plan.reason == "trial" else 0.0)
        drafted_by = plan.drafter or (plan.found.origins[0] if len(plan.found) else None)
        for origin, rates in self._here.items():
            gain = n_tokens - lost_s / plain_s if origin == drafted_by else 0.0
            credit = rates.counts.credit + gain + _SHARE * n_tokens
            rates.counts.credit = min(_MOST_SAVED, credit)
        # Seconds and tokens are averaged apart: the mean of their ratios would be a different figure.
        if not self._n_rounds:
            self._round_s = plain_s
        self._n_rounds += 1
        self._elapsed_s += round_s
        rate = max(_RATE, 1.0 / (self._n_rounds + 4))
        self._round_s += rate * (round_s - self._round_s)
        self._round_tokens += rate * (n_tokens - self._round_tokens)
        if self._n_rounds % _MAX_AGE == 0:
            self._values.clear()

    def acceptance_of(self, origin: str) -> AcceptanceRates:
        """Return the acceptance rates of a drafter's tokens in this text."""
        rates = self._here.get(origin)
        if rates is None:
            known = self._known.setdefault(origin, AcceptanceRates(origin))
            rates = self._here[origin] = AcceptanceRates(origin, known.counts)
            known.counts.credit = max(0.0, known.counts.credit)  # what it lost in other texts
        return rates
