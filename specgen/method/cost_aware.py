"""How much is worth drafting by measured costs: as long as it is expected to save time."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import numpy as np

from specgen.method.acceptance_rates import (
    NGRAM_ORIGINS,
    AcceptanceRates,
    judge_drafts,
    judge_draws,
)
from specgen.method.cost_table import ALONE, FREE, BatchShare, CostTable, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.draft_length import StoppingRule, WhilePaying
from specgen.method.policy import Offer, Reason, RoundPlan, RoundResult, UntilUnsure
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
#: A trial of a model that is not expected to pay drafts so many tokens, and reads the text first only if so many
#: trials may follow.
_N_TRIED_TOKENS = 3
_N_TRIALS = 3
#: The prefill of a draft may take at most this many times the time that the answer took so far: how long it gets is a
#: guess. A trial may take less, since it is not expected to pay.
_MOST_AHEAD = 2.0
_MOST_AHEAD_OF_TRIAL = 0.1
#: What a draft is expected to save in the rest of the answer must be this many times its prefill.
_PREFILL_MARGIN = 1.5
#: A round loses at most so many plain tokens: where it took longer, the machine stood still for a moment,
#: which says nothing about the drafter.
_MOST_LOST_TOKENS = 8.0
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
    """

    _SHARE = 0.01
    _TOKENS = 4.0
    _MOST_SAVED = 8.0
    _N_ROUNDS = 16

    def __init__(self) -> None:
        self._saved_s: dict[str, float] = {}
        self._aside: dict[str, int] = {}
        self._n_aside: dict[str, int] = {}

    def begin_round(self) -> None:
        self._aside = {origin: n - 1 for origin, n in self._aside.items() if n > 1}

    def is_put_aside(self, origin: str) -> bool:
        """Return whether a drafter waits since it lost too much."""
        return origin in self._aside

    def add(self, origin: str, saved_s: float, plain_s: float, elapsed_s: float) -> None:
        """Add what a drafter saved in a round, negative if it lost time. A plain decode takes `plain_s`."""
        saved_s = min(saved_s + self._saved_s.get(origin, 0.0), self._MOST_SAVED * plain_s)
        if saved_s < -self._TOKENS * plain_s - self._SHARE * elapsed_s:
            self._aside[origin] = self._n_aside.get(origin, self._N_ROUNDS)
            self._n_aside[origin] = 2 * self._aside[origin]
            saved_s = 0.0
        self._saved_s[origin] = saved_s


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

    Most learning is free: tokens that were proposed but not worth verifying are compared with the
    text that follows. Only trials of a model that is not expected to pay cost time. A drafter that loses time against expectation is paused (`Gate`).

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
        rule, value_s, n_at_once = self._start(drafter, price)
        value_s -= _PREFILL_MARGIN * price.prefill_s / self._pace.n_rounds(offer.n_left)
        why_not = self._why_not(drafter, price, value_s)
        if len(found) and (why_not is not None or stop.worth_of(found) >= value_s):
            return RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
        plan = RoundPlan(why_not or Reason("model"), stop=stop, drafter=drafter)
        if why_not is None:
            return replace(
                plan,
                n_max=n_max,
                stop=replace(stop, rule=rule, next_s=price.next_s),
                extends=not self._gate.is_put_aside(NGRAM_ORIGINS[0]),
                n_at_once=n_at_once,
                prefill_s=price.prefill_s,
            )
        if why_not.name != "put aside" and self._may_try(drafter, price):
            return RoundPlan(
                Reason("trial"),
                min(n_max, _N_TRIED_TOKENS),
                stop=UntilUnsure(needs_confidence=True),
                drafter=drafter,
                prefill_s=price.prefill_s,
            )
        return plan

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
        is_trial = plan.reason.name == "trial"
        if origin is not None:
            self._gate.add(origin, saved_s, plain_s, self._pace.elapsed_s)
        if plan.drafter is not None:
            tried_s = saved_s - plan.prefill_s if is_trial else 0.0
            counts = self.acceptance_of(plan.drafter).counts
            counts.account(n_committed, tried_s / plain_s)

    def _why_nothing_found(self, found: Draft) -> Reason:
        if not len(found):
            return Reason("nothing found")
        if self._gate.is_put_aside(found.origins[0]):
            return Reason("put aside")
        return self._too_rarely(found.origins[0])

    # --- the model --------------------------------------------------------------------------

    def _why_not(self, origin: str, price: Price, value_s: float) -> Reason | None:
        """Return why not to start a model that is expected to gain `value_s` a round; None if it should start."""
        if price == FREE:  # its draft is judged once it is known
            return None
        if self._gate.is_put_aside(origin):
            return Reason("put aside")
        if value_s <= 0.0 and self._ideal_s(price) <= 0.0:
            plain_s = self._costs.seconds(1)
            guess, row = (price.seconds(2) - price.first_s) / plain_s, self._extra_s(1) / plain_s
            text = f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
            return Reason("row cost", text)
        is_too_soon = price.prefill_s > _MOST_AHEAD * self._pace.elapsed_s
        if is_too_soon or (price.prefill_s and value_s <= 0.0):
            return Reason("prefill", f"the draft must first read the text, {price.prefill_s:.1f} s")
        return self._too_rarely(origin) if value_s <= 0.0 else None

    def _may_try(self, origin: str, price: Price) -> bool:
        """Return whether to try a model that is not expected to pay, to learn whether that is still so."""
        n = min(_N_TRIED_TOKENS, self.n_max)
        cost_s = price.seconds(n) + self._extra_s(n)
        if price.prefill_s:
            cost_s = price.prefill_s + _N_TRIALS * cost_s
        credit_s = self.acceptance_of(origin).counts.trial_credit * self._costs.seconds(1)
        most_s = min(credit_s, _MOST_AHEAD_OF_TRIAL * self._pace.elapsed_s)
        return cost_s <= most_s and self._ideal_s(price) > 0.0

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

    def _start(self, origin: str, price: Price) -> tuple[StoppingRule, float, int | None]:
        """Return a model's stopping rule, the seconds that a round with it is expected to save and, for a parallel
        draft, how many tokens its decode should predict."""
        rule = self._rule(origin, price, self.n_max)
        if not price.at_once_s:
            return rule, rule.value(0, 1.0) + price.next_s - price.first_s, None
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
        return rule, values_s[best], best

    # --- costs and acceptance -------------------------------------------------------------------

    def _stop(self, offer: Offer) -> WhilePaying:
        """Return how far drafts go at the present costs and acceptance probabilities, without the
        model's rule."""
        seconds = self._costs.seconds
        return WhilePaying(
            origin=offer.drafter or NGRAM_ORIGINS[0],
            curve=lambda origin: self.acceptance_of(origin).curve(),
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
