"""How much is worth drafting: a fixed length, a bound on the probability, or measured costs.

A policy makes a plan once a round, as a value. Drafters follow it without asking back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specgen.events import REASONS, ReasonName
from specgen.method.acceptance import (
    NGRAM_ORIGINS,
    AcceptanceRates,
    GainPrior,
    judge_drafts,
    judge_draws,
)
from specgen.method.cost_table import ALONE, FREE, BatchShare, CostTable, Others, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.stopping import StoppingRule, WhilePaying

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
class Whole:
    """Drafts go on up to their longest length, and are verified whole."""

    needs_confidence: bool = False

    def wants_token(self, confidences: Sequence[float]) -> bool:
        return True

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        return True

    def cut(self, draft: Draft) -> Draft:
        return draft


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    Either `found` is verified, which the free drafter proposed, or the drafter that decodes drafts at most
    `n_max` tokens, as far as `stop` lets it go; if `extends` is set, the free drafter adds tokens after or
    beside those. `stop` cuts the finished draft.
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

    def wants_token(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look; see `Stop`."""
        n_chosen = len(confidences) - self.n_given
        if n_chosen <= 0:
            return True
        return len(confidences) <= self.n_max and self.stop.wants_token(confidences[self.n_given :])

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        """Return whether to look for another token after these; see `Stop`."""
        n_chosen = len(confidences) - self.n_given
        if n_chosen < 0:
            return True
        if len(confidences) >= self.n_max:
            return False
        return n_chosen == 0 or self.stop.wants_decode(confidences[self.n_given :])

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


# --- policies that know no costs --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UntilUnsure:
    """A draft goes on while its model gives a token at least `p_min` (llama.cpp's rule), and the product of
    all its tokens' probabilities is at least `bound`. Drafts of fewer than `n_min` tokens are not verified."""

    p_min: float
    n_min: int = 0
    bound: float = 0.0

    @property
    def needs_confidence(self) -> bool:
        return self.p_min > 0.0 or self.bound > 0.0

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


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure (llama.cpp's rule).

    Among several drafters, the first one that has a draft is used.
    """

    def __init__(self, options: DraftOptions) -> None:
        self.n_max = options.n_max
        self._stop = UntilUnsure(options.stops_below, options.min_tokens)

    def plan(self, offer: Offer) -> RoundPlan:
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1:
            return RoundPlan(Reason("no room"))
        found = self._stop.cut(
            offer.found.first(n_max) if len(offer.found) > n_max else offer.found
        )
        if len(found):
            return RoundPlan(Reason("fixed"), found=found, stop=self._stop)
        if offer.drafter is None:
            return RoundPlan(Reason("nothing found"))
        return RoundPlan(Reason("fixed"), n_max, stop=self._stop, drafter=offer.drafter)

    def observe(self, result: RoundResult) -> None:
        pass

    def finish(self) -> None:
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
        self._stop = replace(self._stop, bound=self._START)

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


# --- the policy that knows costs --------------------------------------------------------------

#: If no costs were measured, this many plain decodes are observed before anything is drafted.
_N_FIRST = 2
#: After this many rounds without a plain decode one is made: its cost is what everything is compared
#: with.
_MAX_STALE = 64
#: The expected gain of a draft must be this many times its cost: a cost is certain and a gain is not. A
#: model says how sure it is, and can be trusted more than n-grams.
_NGRAM_MARGIN = 1.5
_MODEL_MARGIN = 1.1
#: The numbers of tokens that a parallel draft may predict in one decode.
_AT_ONCE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
#: A trial of a model that is not expected to pay drafts so many tokens.
_N_TRIED_TOKENS = 3
#: A round loses at most so many plain tokens: where it took longer, the machine stood still for a moment,
#: which says nothing about the drafter.
_MOST_LOST_TOKENS = 8.0
#: The prefill of a draft may take at most this share of the time that the answer took so far; and this share
#: for a proven drafter, which gained this much of a plain token in a round, in at least so many texts.
_MOST_AHEAD = 0.35
_MOST_AHEAD_IF_PROVEN = 2.0
_PROVEN_GAIN = 0.3
_N_PROVEN = 2.0
#: The looks at a text that say as much of it as earlier texts do, and what a text may be better than is known,
#: in plain tokens' time a round.
_N_SURE = 10.0
_HOPE = 0.12
#: The rounds that it takes to see that a model does not pay in a text, and the rounds that have to make up
#: for such a try.
_N_TRIED = 4.0
_N_NEAR = 6.0
#: A stopping rule is computed again when a price has changed by this share of a token's worth, or after this
#: many looks and judged tokens.
_NEWS = 0.05
_N_NEWS = 24
_N_RULES = 64


class Pace:
    """Averages over the recent rounds of an answer: seconds a token, tokens a round, and the share of rounds
    that n-grams leave to a model."""

    #: The weight of a new round once there were many; at first all rounds count equally, and plain decoding as
    #: `_N_BEFORE` of them.
    _RATE = 0.06
    _N_BEFORE = 4.0

    def __init__(self) -> None:
        #: Seconds of all rounds so far; recent seconds a token, None before the first round.
        self.elapsed_s = 0.0
        self.token_s: float | None = None
        self.tokens_a_round = 1.0
        self.left_by_ngrams = 1.0
        self._n_rounds = 0

    def add(self, origin: str | None, round_s: float, n_committed: int, plain_s: float) -> None:
        """Add a round that drafted with `origin`; a plain decode takes `plain_s`."""
        self.elapsed_s += round_s
        by_ngrams = origin in NGRAM_ORIGINS
        self._n_rounds += 1
        rate = max(self._RATE, 1.0 / (self._n_rounds + self._N_BEFORE))
        # Seconds and tokens are averaged separately: the mean of their ratios would be a different figure.
        mean_round_s = (plain_s if self.token_s is None else self.token_s) * self.tokens_a_round
        mean_round_s += rate * (round_s - mean_round_s)
        self.tokens_a_round += rate * (n_committed - self.tokens_a_round)
        self.token_s = mean_round_s / self.tokens_a_round
        self.left_by_ngrams += rate * ((not by_ngrams) - self.left_by_ngrams)

    def n_model_rounds(self, n_left: int) -> float:
        """Return a cautious estimate of the rounds for `n_left` tokens in which n-grams do not draft."""
        return 0.75 * max(1.0, n_left / max(1.0, self.tokens_a_round)) * self.left_by_ngrams


class Gate:
    """Keeps the drafters of one answer from losing more time than they may, whatever is expected of them.

    A drafter that lost more than `_SHARE` of the answer's time and `_TOKENS` plain tokens waits for
    `_N_ROUNDS` rounds, and for twice as many each time. What it saved covers losses up to `_MOST_SAVED` tokens.
    Trials of a drafter that is not expected to pay take `_SHARE` of the time, too.
    """

    _SHARE = 0.01
    _TOKENS = 4.0
    _MOST_SAVED = 8.0
    _N_ROUNDS = 16

    def __init__(self) -> None:
        self._tried_s = 0.0
        self._saved_s: dict[str, float] = {}
        self._aside: dict[str, int] = {}
        self._n_aside: dict[str, int] = {}

    def begin_round(self) -> None:
        self._aside = {origin: n - 1 for origin, n in self._aside.items() if n > 1}

    def is_put_aside(self, origin: str) -> bool:
        """Return whether a drafter waits since it lost too much."""
        return origin in self._aside

    def allows_trial(self, cost_s: float, elapsed_s: float) -> bool:
        """Return whether a trial that may cost `cost_s` seconds is allowed now."""
        return self._tried_s + cost_s <= self._SHARE * elapsed_s

    def add(
        self, origin: str, saved_s: float, plain_s: float, elapsed_s: float, *, is_trial: bool
    ) -> None:
        """Add what a drafter saved in a round, negative if it lost time. A plain decode takes `plain_s`."""
        if is_trial:
            self._tried_s += max(0.0, -saved_s)
            return
        saved_s = min(saved_s + self._saved_s.get(origin, 0.0), self._MOST_SAVED * plain_s)
        if saved_s < -self._TOKENS * plain_s - self._SHARE * elapsed_s:
            self._aside[origin] = self._n_aside.get(origin, self._N_ROUNDS)
            self._n_aside[origin] = 2 * self._aside[origin]
            saved_s = 0.0
        self._saved_s[origin] = saved_s


@dataclass(frozen=True, slots=True)
class _Start:
    """How a model's draft starts: its stopping rule, what it is expected to save, in seconds, and, for a
    parallel draft, how many tokens its decode predicts."""

    rule: StoppingRule
    value_s: float
    n_at_once: int | None = None


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost.

    A token that a round adds is worth the time that it would take otherwise: that of a plain
    decode, or less if recent rounds were faster. Its cost is the drafter's decodes and the larger
    batch of the target, as measured (`CostTable`). The number of tokens that a draft adds is the
    sum, over its tokens, of the probability that the token and all before it are accepted; these
    probabilities are learnt (`AcceptanceRates`). Drafting nothing is a valid decision.

    A draft that is known as a whole is cut where its value is highest. A model drafts token by
    token, which is an optimal stopping problem (`StoppingRule`). Its solution also predicts what
    the model is worth before it runs. (The rule for a fixed length is Leviathan et al.'s,
    arXiv:2211.17192, section 3.4.)

    All learning is free: tokens that were proposed but not worth verifying are compared with the
    text that follows. A drafter that loses time against expectation is paused (`Gate`).

    Beside other sequences, a token's plain decode is a share of a batch for all of them, and a
    drafted row costs what it adds to that batch (`BatchShare`).

    A policy decides for one text. `costs` is the target's table, to which observed times are
    added. `acceptance` are by origin; their counts cover all texts and may be shared with other
    policies.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        acceptance: MutableMapping[str, AcceptanceRates] | None = None,
    ) -> None:
        self.n_max = options.n_max
        self._p_min = options.stops_below
        self._table = costs
        #: The costs of this sequence's rows in the round's batch.
        self._costs = BatchShare(costs, ALONE)
        #: The acceptance probabilities from all texts, and those in this text; by origin.
        self._known = {} if acceptance is None else acceptance
        self._acceptance: dict[str, AcceptanceRates] = {}
        self._rules: dict[tuple[object, ...], StoppingRule] = {}
        self._pace = Pace()
        self._gate = Gate()
        self._n_stale = 0
        #: The drafters that were considered in this text, by origin.
        self._considered: dict[str, GainPrior] = {}

    def plan(self, offer: Offer) -> RoundPlan:
        self._costs = BatchShare(self._table, offer.others)
        self._gate.begin_round()
        if not self._table or (self._costs.n_seen < _N_FIRST and not self._costs.is_known):
            return RoundPlan(Reason("costs unknown"))
        self._n_stale += 1
        if self._n_stale > _MAX_STALE:
            return RoundPlan(Reason("plain decode"))
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1:
            return RoundPlan(Reason("no room"))
        stop = self._stop(offer)
        found = stop.cut(offer.found)
        if len(found) and self._gate.is_put_aside(found.origins[0]):
            found = NO_DRAFT
        drafter = offer.drafter
        if drafter is None:
            reason = Reason("found") if len(found) else self._why_nothing_found(offer.found)
            return RoundPlan(reason, found=found, stop=stop)
        price = offer.price
        value_s, reason = self._worth_of_model(drafter, price, offer.n_left)
        if len(found) and stop.worth_of(found) >= value_s:
            return RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
        start = self._start(drafter, price)
        if value_s > 0.0:
            return RoundPlan(
                reason,
                n_max,
                stop=replace(stop, rule=start.rule, next_s=price.next_s),
                extends=not self._gate.is_put_aside(NGRAM_ORIGINS[0]),
                n_at_once=start.n_at_once,
                drafter=drafter,
                prefill_s=price.prefill_s,
            )
        if not self._may_try(price):
            return RoundPlan(reason, stop=stop, drafter=drafter)
        return RoundPlan(
            Reason("trial"),
            min(n_max, _N_TRIED_TOKENS),
            stop=Whole(needs_confidence=True),
            drafter=drafter,
            prefill_s=price.prefill_s,
        )

    def observe(self, result: RoundResult) -> None:
        self._table.observe(result.n_rows, result.target_s)
        if not self._table:  # by the clock, the first decode took no time
            return
        plan, draft = result.plan, result.draft
        if not len(draft):
            self._n_stale = 0
        if plan.drafter is not None:
            seen = self.acceptance_of(plan.drafter)
            for confidence in (look for each in result.proposed for look in each.looks):
                seen.see(confidence)
        if draft.is_drawn and draft.is_chain:
            judge_draws(self.acceptance_of, draft, len(result.path))
        judge_drafts(self.acceptance_of, result.proposed, result.committed)
        if not self._costs.is_known:
            return
        plain_s = self._costs.seconds(1)
        n_committed = max(1, len(result.committed), len(result.path) + 1)
        target_s = result.target_s * self._costs.of_batch(1 + len(draft), result.n_rows)
        # Prefill is an investment in later rounds, and is not charged to this one.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + target_s
        round_s = min(round_s, (n_committed + _MOST_LOST_TOKENS) * plain_s)
        saved_s = n_committed * plain_s - round_s
        origin = plan.origin if len(draft) or plan.n_max else None
        self._pace.add(origin, round_s, n_committed, plain_s)
        if origin is not None:
            is_trial = plan.reason.name == "trial"
            self._gate.add(origin, saved_s, plain_s, self._pace.elapsed_s, is_trial=is_trial)
        for considered, gains in self._considered.items():
            own_s = saved_s - plan.prefill_s if origin == considered else 0.0
            gains.account(own_s / plain_s, n_committed)

    def finish(self) -> None:
        for acceptance in self._acceptance.values():
            acceptance.end_text()

    def _why_nothing_found(self, found: Draft) -> Reason:
        if not len(found):
            return Reason("nothing found")
        if self._gate.is_put_aside(found.origins[0]):
            return Reason("put aside")
        return self._too_rarely(found.origins[0])

    # --- the model --------------------------------------------------------------------------

    def _worth_of_model(self, origin: str, price: Price, n_left: int) -> tuple[float, Reason]:
        """Return the expected gain of starting a model, in seconds a round, and the reason. It is above 0
        only if the model should start."""
        plain_s, acceptance = self._costs.seconds(1), self.acceptance_of(origin)
        if price == FREE:  # its draft is judged once it is known
            return 1e-9, Reason("model")
        if self._gate.is_put_aside(origin):
            return 0.0, Reason("put aside")
        gains = acceptance.counts.gains_at(self._costs.n_sequences)
        self._considered[origin] = gains
        too_long = price.prefill_s > _prefill_limit_s(gains, plain_s, self._pace.elapsed_s)
        if too_long and gains.start is not None:
            return 0.0, _needs_prefill(price)
        value_s = self._start(origin, price).value_s
        acceptance.expect(value_s / plain_s, self._costs.n_sequences)
        if value_s <= 0.0 and self._ideal_s(price) <= 0.0:
            row = self._extra_s(1) / plain_s
            guess = (price.seconds(2) - price.first_s) / plain_s
            text = f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
            return value_s, Reason("row cost", text)
        if too_long:
            return 0.0, _needs_prefill(price)
        value_s = _gain_of_starting(
            value_s,
            price.prefill_s,
            gains,
            acceptance.n_looks,
            plain_s=plain_s,
            n_rounds=self._pace.n_model_rounds(n_left),
        )
        if value_s > 0.0:
            return value_s, Reason("model")
        return value_s, _needs_prefill(price) if price.prefill_s else self._too_rarely(origin)

    def _may_try(self, price: Price) -> bool:
        """Return whether to try a model that is not expected to pay, to learn whether that is still so.
        It is not tried if it could not pay even if it were always right."""
        n = min(_N_TRIED_TOKENS, self.n_max)
        cost_s = price.prefill_s + price.seconds(n) + self._extra_s(n)
        return self._gate.allows_trial(cost_s, self._pace.elapsed_s) and self._ideal_s(price) > 0.0

    def _too_rarely(self, origin: str) -> Reason:
        rate, row = self.acceptance_of(origin).mean(), self._extra_s(1) / self._costs.seconds(1)
        return Reason(
            "acceptance",
            f"{rate:.0%} of its tokens are expected to be accepted in this text, and checking one costs "
            f"{row:.2f} of a token",
        )

    def _ideal_s(self, price: Price) -> float:
        """Return the seconds that a round would save with a draft of the best length, all accepted."""
        plain_s = self._costs.seconds(1)
        return max(
            k * plain_s - self._extra_s(k) - price.seconds(k) for k in range(1, self.n_max + 1)
        )

    def _start(self, origin: str, price: Price) -> _Start:
        """Return how a model's draft should start."""
        rule = self._rule(origin, price, self.n_max)
        if not price.at_once_s:
            return _Start(rule, rule.value(0, 1.0) + price.next_s - price.first_s)
        # How sure the draft is is known only once all its tokens are predicted. So the rule is solved for
        # each number of tokens, with free looks, and the decode is subtracted.
        n_most = min(self.n_max, len(price.at_once_s))
        values_s = {
            n: self._rule(origin, price, n).value(0, 1.0) - price.seconds(n)
            for n in _AT_ONCE
            if n <= n_most
        }
        best = max(values_s, key=values_s.__getitem__)
        # Trees have more tokens than levels, so that their rule has no such limit.
        return _Start(rule, values_s[best], best)

    # --- costs and acceptance -------------------------------------------------------------------

    def _stop(self, offer: Offer) -> WhilePaying:
        """Return how far drafts go at the present costs and acceptance probabilities, without the
        model's rule."""
        return WhilePaying(
            origin=offer.drafter or NGRAM_ORIGINS[0],
            curves=_Curves(self.acceptance_of),
            ngram_token_s=self._token_s(_NGRAM_MARGIN),
            model_token_s=self._token_s(_MODEL_MARGIN),
            extra_s=tuple(self._extra_s(n) for n in range(self.n_max + 1)),
            p_min=self._p_min,
        )

    def _token_s(self, margin: float) -> float:
        """Return what an expected token counts, in seconds."""
        plain_s, recent_s = self._costs.seconds(1), self._pace.token_s
        return min(plain_s / margin, plain_s if recent_s is None else recent_s)

    def _extra_s(self, n_drafted: int) -> float:
        """Return the seconds that a draft of n tokens adds to a plain decode."""
        return self._costs.seconds(n_drafted + 1) - self._costs.seconds(1)

    def acceptance_of(self, origin: str) -> AcceptanceRates:
        """Return the acceptance rates of a drafter's tokens in this text; they are learnt from each round."""
        acceptance = self._acceptance.get(origin)
        if acceptance is None:
            known = self._known.setdefault(origin, AcceptanceRates(origin))
            acceptance = self._acceptance[origin] = known.for_new_text()
        return acceptance

    def _rule(self, origin: str, price: Price, n_most: int) -> StoppingRule:
        """Return the stopping rule of a drafter for drafts of at most `n_most` tokens: the one that was computed
        for about these prices and acceptance rates, if there is one."""
        acceptance, token_s = self.acceptance_of(origin), self._token_s(_MODEL_MARGIN)
        unit_s = _NEWS * self._costs.seconds(1)
        prices = [round(s / unit_s) for s in (price.next_s, token_s, self._extra_s(1))]
        key = (origin, n_most, acceptance.version // _N_NEWS, *prices)
        rule = self._rules.get(key)
        if rule is None:
            if len(self._rules) >= _N_RULES:
                self._rules.clear()
            batch_s = np.array([self._costs.seconds(n + 1) for n in range(n_most + 1)])
            curve = np.array(acceptance.curve())
            rule = StoppingRule(batch_s, price.next_s, token_s, acceptance.frequencies(), curve)
            self._rules[key] = rule
        return rule


class _Curves(dict[str, tuple[float, ...]]):
    """The acceptance probabilities by bin of confidence, for each origin that is asked for in a
    round."""

    def __init__(self, acceptance: Callable[[str], AcceptanceRates]) -> None:
        super().__init__()
        self._of = acceptance

    def __missing__(self, origin: str) -> tuple[float, ...]:
        curve = self[origin] = self._of(origin).curve()
        return curve


def _needs_prefill(price: Price) -> Reason:
    text = f"the draft must first read the text, {price.prefill_s:.1f} s"
    return Reason("prefill", text)


def _prefill_limit_s(gains: GainPrior, plain_s: float, elapsed_s: float) -> float:
    """Return the most seconds that a draft's prefill may take now: what may be lost on the drafter, and a
    share of the answer's time so far, so that an answer that ends soon loses no more."""
    is_proven = gains.n >= _N_PROVEN and gains.mean > _PROVEN_GAIN
    most_ahead = _MOST_AHEAD_IF_PROVEN if is_proven else _MOST_AHEAD
    return max(0.0, min(gains.allowance * plain_s, most_ahead * elapsed_s))


def _gain_of_starting(
    value_s: float,
    prefill_s: float,
    gains: GainPrior,
    n_looks: int,
    *,
    plain_s: float,
    n_rounds: float,
) -> float:
    """Return the expected gain of starting a draft model in a text, in seconds a round; above 0 it should
    start.

    After `n_looks` of the model in this text, a round with it seems to gain `value_s`. A few looks are an
    unsure estimate, so it is averaged with the gain in earlier texts. What is unsure counts in favour:
    a model that does not pay shows this soon, and stops again. The gain has to make up for the prefill and for
    a try that fails. A plain decode takes `plain_s`; about `n_rounds` are left.
    """
    unknown = _N_SURE / (_N_SURE + n_looks)
    value_s = unknown * gains.mean * plain_s + (1.0 - unknown) * value_s
    gain_s = max(0.0, value_s + _HOPE * unknown * plain_s)
    try_s = _N_TRIED * max(0.0, -value_s)
    if gain_s * n_rounds <= prefill_s + try_s or gain_s * min(n_rounds, _N_NEAR) <= try_s:
        return min(value_s, 0.0)
    return max(value_s - prefill_s / n_rounds, 1e-9)
