"""The cost-aware policy: draft as long as it is expected to save time."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, replace

import numpy as np

from specgen.method.acceptance import (
    NGRAM_ORIGINS,
    AcceptanceRates,
    TextWorths,
    new_acceptance_rates,
)
from specgen.method.cost_table import ALONE, FREE, BatchShare, CostTable, Price
from specgen.method.draft import Draft
from specgen.method.policy.account import (
    N_TRIED_TOKENS,
    Account,
    prefill_limit_s,
    worth_of_starting,
)
from specgen.method.policy.draft_outcomes import DraftOutcomes
from specgen.method.policy.plan import Offer, RoundPlan, RoundResult
from specgen.method.policy.reasons import Reason
from specgen.method.policy.stopping import KnownRule, StoppingRule, WhilePaying, row_bucket
from specgen.options import DraftOptions
from specgen.system.units import seconds_text

#: If no costs were measured, this many plain decodes are observed before anything is drafted.
_N_FIRST = 2
#: After this many rounds without a plain decode one is made: its cost is what everything is compared
#: with.
_MAX_STALE = 64
#: The expected gain of a draft must be this many times its cost: a cost is certain and a gain is not. A
#: model says how sure it is, and can be trusted more than n-grams. (Replays of 24 answers with four cost
#: tables: with 1.2 for n-grams the worst answer falls from 1.00 to 0.82 where rows are dear, and to 0.74
#: with none; the means differ by 1.3 %.)
_NGRAM_MARGIN = 1.5
_MODEL_MARGIN = 1.1
#: The numbers of tokens that a parallel draft may predict in one decode. (All numbers up to 16 would take
#: twice the time to weigh.)
_AT_ONCE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
#: A round loses at most so many plain tokens: where it took longer, the machine stood still for a moment, which says
#: nothing about the drafter. (Without this, a simulated machine on which one round in thirty takes a hundred times
#: as long for the length of two answers gets no drafts for a dozen answers after them.)
_MOST_LOST_TOKENS = 8.0


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
    arXiv:2211.17192, section 3.4; for a tree's nodes, "decode the tree that maximises expected
    tokens per second", Sequoia's, arXiv:2402.12374.)

    All learning is free: tokens that were proposed but not worth verifying are compared with the
    text that follows. A drafter that loses time against expectation is paused for a while.

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
        #: Rules by drafter, by the price of a row, which depends on the other sequences in the batch, and by
        #: the longest draft.
        self._rules: dict[tuple[str, int, int], KnownRule] = {}
        self._account = Account()
        self._outcomes = DraftOutcomes(self.acceptance_of)
        self._n_stale = 0
        #: The accounts of the drafters that were considered in this text, by origin.
        self._considered: dict[str, TextWorths] = {}

    def plan(self, offer: Offer) -> RoundPlan:
        self._costs = BatchShare(self._table, offer.others)
        self._account.begin_round()
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
        if len(found) and self._account.is_put_aside(found.origins[0]):
            found = found.first(0)
        found_s = stop.worth_of(found)
        if offer.drafter is None:
            if not len(found):
                return RoundPlan(self._why_nothing_found(offer.found), stop=stop)
            return RoundPlan(Reason("found"), found=found, stop=stop)
        value_s, reason = self._worth_of_model(offer.drafter, offer.price(0), offer.n_left)
        if len(found) and found_s >= value_s:
            return self._found_first(offer, found, n_max, stop)
        price, n_tried = offer.price(0), None
        start = self._start(offer.drafter, price)
        n_at_once = start.n_at_once
        if value_s <= 0.0:
            if not self._may_try(price):
                return RoundPlan(reason, stop=stop, drafter=offer.drafter)
            reason, n_tried = Reason("trial"), N_TRIED_TOKENS
            n_at_once = N_TRIED_TOKENS if n_at_once else None
        return RoundPlan(
            reason,
            n_max,
            stop=replace(stop, rule=start.rule, next_s=price.next_s, n_tried=n_tried),
            extends=not self._account.is_put_aside(NGRAM_ORIGINS[0]),
            n_at_once=n_at_once,
            drafter=offer.drafter,
            prefill_s=price.backlog_s,
        )

    def observe(self, result: RoundResult) -> None:
        self._table.observe(result.n_rows, result.target_s)
        if not self._table:  # by the clock, the first decode took no time
            return
        if not len(result.draft):
            self._n_stale = 0
        self._outcomes.observe(result)
        if not self._costs.is_known:
            return
        plan, plain_s = result.plan, self._costs.seconds(1)
        n_committed = max(1, len(result.committed), len(result.path) + 1)
        target_s = result.target_s * self._costs.of_batch(1 + len(result.draft), result.n_rows)
        # Prefill is an investment in later rounds, and is not charged to this one.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + target_s
        round_s = min(round_s, (n_committed + _MOST_LOST_TOKENS) * plain_s)
        origin = plan.origin if len(result.draft) or plan.n_max else None
        is_trial = plan.reason.name == "trial"
        self._account.observe(origin, round_s, n_committed, plain_s, is_trial=is_trial)
        for considered, worths in self._considered.items():
            saved_s = n_committed * plain_s - round_s - plan.prefill_s
            worths.account(saved_s / plain_s if origin == considered else 0.0, n_committed)

    def finish(self) -> None:
        for acceptance in self._acceptance.values():
            acceptance.end_text()

    # --- found tokens -----------------------------------------------------------------------

    def _found_first(self, offer: Offer, found: Draft, n_max: int, stop: WhilePaying) -> RoundPlan:
        """Return the plan of a round whose draft starts with found tokens. The model drafts after them if
        that is expected to pay."""
        drafter, n_room = offer.drafter, n_max - len(found)
        assert drafter is not None
        if n_room < 1 or not found.is_chain:
            return RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
        price, before = offer.price(len(found)), stop.path_probabilities(found)[-1]
        start = self._start(drafter, price, len(found), before)
        if start.value_s <= price.backlog_s / self._account.n_rounds_left(offer.n_left):
            return RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
        behind = replace(
            stop, rule=start.rule, next_s=price.next_s, n_before=len(found), before=before
        )
        return RoundPlan(
            Reason("found and model"),
            n_room,
            found,
            behind,
            n_at_once=start.n_at_once,
            drafter=drafter,
            prefill_s=price.backlog_s,
        )

    def _why_nothing_found(self, found: Draft) -> Reason:
        if not len(found):
            return Reason("nothing found")
        if self._account.is_put_aside(found.origins[0]):
            return Reason("put aside")
        return self._too_rarely(found.origins[0])

    # --- the model --------------------------------------------------------------------------

    def _worth_of_model(self, origin: str, price: Price, n_left: int) -> tuple[float, Reason]:
        """Return the expected gain of starting a model, in seconds a round, and the reason. It is above 0
        only if the model should start."""
        plain_s, acceptance = self._costs.seconds(1), self.acceptance_of(origin)
        if price == FREE:  # its draft is judged once it is known
            return 1e-9, Reason("model")
        if self._account.is_put_aside(origin):
            return 0.0, Reason("put aside")
        worths = acceptance.counts.worths_at(self._costs.n_sequences)
        self._considered[origin] = worths
        elapsed_s = self._account.elapsed_s
        too_early = price.backlog_s > prefill_limit_s(price, worths, plain_s, elapsed_s)
        if too_early and worths.start is not None:
            return 0.0, self._needs_prefill(price)
        value_s = self._start(origin, price).value_s
        acceptance.expect(value_s / plain_s, self._costs.n_sequences)
        ideal_s = self._ideal_s(price)
        if value_s <= 0.0 and ideal_s <= 0.0:
            row = (self._costs.seconds(2) - plain_s) / plain_s
            guess_s = price.seconds(2) - price.first_s
            return value_s, Reason("row cost", _costs_text(row, guess_s / plain_s))
        if too_early:
            return 0.0, self._needs_prefill(price)
        # In rounds in which n-grams draft, as in a text that copies, a model adds little.
        n_rounds = self._account.n_rounds_left(n_left) * self._account.left_by_ngrams
        value_s = worth_of_starting(
            value_s, price, worths, acceptance.n_looks, plain_s=plain_s, n_rounds=n_rounds
        )
        if value_s > 0.0:
            return value_s, Reason("model")
        return value_s, self._needs_prefill(price) if price.backlog_s else self._too_rarely(origin)

    def _may_try(self, price: Price) -> bool:
        """Return whether to try a model that is not expected to pay, to learn whether that is still so.
        It is not tried if it could not pay even if it were always right."""
        n = min(N_TRIED_TOKENS, self.n_max)
        cost_s = price.backlog_s + price.seconds(n) + self._extra_s(n)
        return self._account.allows_trial(cost_s) and self._ideal_s(price) > 0.0

    def _needs_prefill(self, price: Price) -> Reason:
        return Reason(
            "prefill",
            f"the draft must first read {price.n_unread} tokens, {seconds_text(price.backlog_s)}",
        )

    def _too_rarely(self, origin: str) -> Reason:
        rate = self.acceptance_of(origin).mean()
        plain_s = self._costs.seconds(1)
        row = (self._costs.seconds(2) - plain_s) / plain_s
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

    def _start(self, origin: str, price: Price, n_before: int = 0, before: float = 1.0) -> _Start:
        """Return how a model's draft should start behind `n_before` found tokens, which are accepted whole
        with the probability `before`."""
        if not price.at_once_s:
            rule = self._rule(origin, price)
            return _Start(rule, rule.value(n_before, before) + price.next_s - price.first_s)
        # How sure the draft is is known only once all its tokens are predicted. So the rule is solved for
        # each number of tokens, with free looks, and the decode is subtracted.
        n_most = min(self.n_max - n_before, len(price.at_once_s))
        values_s = {
            n: self._rule(origin, price, n_before + n).value(n_before, before) - price.seconds(n)
            for n in _AT_ONCE
            if n <= n_most
        }
        best = max(values_s, key=values_s.__getitem__)
        # Trees have more tokens than levels, so that their rule has no such limit.
        return _Start(self._rule(origin, price), values_s[best], best)

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
        plain_s = self._costs.seconds(1)
        recent_s = self._account.token_s
        return min(plain_s / margin, plain_s if recent_s is None else recent_s)

    def _extra_s(self, n_drafted: int) -> float:
        """Return the seconds that a draft of n tokens adds to a plain decode."""
        return self._costs.seconds(n_drafted + 1) - self._costs.seconds(1)

    def acceptance_of(self, origin: str) -> AcceptanceRates:
        """Return the acceptance rates of a drafter's tokens in this text; they are learnt from each round."""
        acceptance = self._acceptance.get(origin)
        if acceptance is None:
            known = self._known.setdefault(origin, new_acceptance_rates(origin))
            acceptance = self._acceptance[origin] = known.for_new_text()
        return acceptance

    def _rule(self, origin: str, price: Price, n_most: int | None = None) -> StoppingRule:
        """Return the known stopping rule for a drafter and a row's price, or a new one if much has
        changed. It is for drafts of at most `n_most` tokens (None: as many as are allowed)."""
        acceptance, token_s = self.acceptance_of(origin), self._token_s(_MODEL_MARGIN)
        n_most = self.n_max if n_most is None else n_most
        prices = (price.next_s, token_s, self._extra_s(1))
        key = (origin, row_bucket(token_s, self._extra_s(1)), n_most)
        known = self._rules.get(key)
        if known is not None and known.holds(acceptance.version, *prices):
            return known.rule
        batch_s = np.array([self._costs.seconds(n + 1) for n in range(n_most + 1)])
        rule = StoppingRule(
            batch_s, price.next_s, token_s, acceptance.frequencies(), np.array(acceptance.curve())
        )
        self._rules[key] = KnownRule(rule, acceptance.version, *prices)
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


def _costs_text(row: float, guess: float) -> str:
    """Return what a row and a guess cost, as shares of a token of the target."""
    return f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
