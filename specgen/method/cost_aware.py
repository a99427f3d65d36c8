"""How much is worth drafting by measured costs: as long as it is expected to save time."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace

import numpy as np

from specgen.method.acceptance import (
    NGRAM_ORIGINS,
    AcceptanceRates,
    GainPrior,
    judge_drafts,
    judge_draws,
)
from specgen.method.cost_table import ALONE, FREE, BatchShare, CostTable, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.policy import Offer, Reason, RoundPlan, RoundResult, Whole
from specgen.method.stopping import StoppingRule, WhilePaying
from specgen.options import DraftOptions

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
    """Averages over the recent rounds of an answer: seconds a token, and tokens a round."""

    #: The weight of a new round once there were many; at first all rounds count equally, and plain decoding as
    #: `_N_BEFORE` of them.
    _RATE = 0.06
    _N_BEFORE = 4.0

    def __init__(self) -> None:
        #: Seconds of all rounds so far; recent seconds a token, None before the first round.
        self.elapsed_s = 0.0
        self.token_s: float | None = None
        self.tokens_a_round = 1.0
        self._n_rounds = 0

    def add(self, round_s: float, n_committed: int, plain_s: float) -> None:
        """Add a round; a plain decode takes `plain_s`."""
        self.elapsed_s += round_s
        self._n_rounds += 1
        rate = max(self._RATE, 1.0 / (self._n_rounds + self._N_BEFORE))
        # Seconds and tokens are averaged separately: the mean of their ratios would be a different figure.
        mean_round_s = (plain_s if self.token_s is None else self.token_s) * self.tokens_a_round
        mean_round_s += rate * (round_s - mean_round_s)
        self.tokens_a_round += rate * (n_committed - self.tokens_a_round)
        self.token_s = mean_round_s / self.tokens_a_round

    def n_rounds(self, n_left: int) -> float:
        """Return a cautious estimate of the rounds for `n_left` tokens."""
        return 0.75 * max(1.0, n_left / max(1.0, self.tokens_a_round))


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
        price, start = offer.price, self._start(drafter, offer.price)
        value_s, reason = self._worth_of_model(drafter, price, start.value_s, offer.n_left)
        if len(found) and stop.worth_of(found) >= value_s:
            return RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
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
        self._pace.add(round_s, n_committed, plain_s)
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

    def _worth_of_model(
        self, origin: str, price: Price, value_s: float, n_left: int
    ) -> tuple[float, Reason]:
        """Return the expected gain of starting a model, in seconds a round, and the reason. It is above 0
        only if the model should start. A round with it seems to gain `value_s`."""
        plain_s, acceptance = self._costs.seconds(1), self.acceptance_of(origin)
        if price == FREE:  # its draft is judged once it is known
            return 1e-9, Reason("model")
        if self._gate.is_put_aside(origin):
            return 0.0, Reason("put aside")
        gains = acceptance.counts.gains_at(self._costs.n_sequences)
        self._considered[origin] = gains
        acceptance.expect(value_s / plain_s, self._costs.n_sequences)
        if value_s <= 0.0 and self._ideal_s(price) <= 0.0:
            row = self._extra_s(1) / plain_s
            guess = (price.seconds(2) - price.first_s) / plain_s
            text = f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
            return value_s, Reason("row cost", text)
        if price.prefill_s > _prefill_limit_s(gains, plain_s, self._pace.elapsed_s):
            return 0.0, _needs_prefill(price)
        value_s = _gain_of_starting(
            value_s,
            price.prefill_s,
            gains,
            acceptance.n_looks,
            plain_s=plain_s,
            n_rounds=self._pace.n_rounds(n_left),
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
        seconds = self._costs.seconds
        return WhilePaying(
            origin=offer.drafter or NGRAM_ORIGINS[0],
            curves=_Curves(self.acceptance_of),
            ngram_token_s=self._token_s(_NGRAM_MARGIN),
            model_token_s=self._token_s(_MODEL_MARGIN),
            extra_s=[seconds(n + 1) - seconds(1) for n in range(self.n_max + 1)],
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
