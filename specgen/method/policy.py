"""How much is drafted: a policy makes a plan once a round, as a value, and drafters follow it without asking back.

`CostAwarePolicy` decides by costs and acceptance (`tables.py`), and lets a draft end by a `StoppingRule`
(`stopping.py`); the others know no costs. Their words:

    look          one reading of a drafter's distribution for the next position
    confidence    the largest probability there: what the drafter says
    acceptance    how often tokens of that confidence are accepted, if all before them are
    whole         the probability that all tokens so far are accepted, the product of their acceptances
    worth         the seconds of the target that an accepted token saves
"""

from __future__ import annotations

import itertools
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specgen.events import REASONS, ReasonName
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.stopping import Stop, StoppingRule, WhilePaying
from specgen.method.tables import (
    ALONE,
    FREE,
    NGRAM_ORIGINS,
    AcceptanceRates,
    CostTable,
    Others,
    Price,
    judge_drafts,
    judge_draws,
)

if TYPE_CHECKING:
    from specgen.options import DraftOptions

# --- stopping rules
_NEWS = 0.05  # one is computed again when a price has changed by this share of a plain decode,
_N_NEWS = 24  # or after this many looks and judged tokens
_N_RULES = 64  # the most that are kept
# --- what is expected
_MARGIN = 1.1  # a draft's expected gain over its cost, at least: only the cost is certain
_NGRAM_MARGIN = 1.5  # the same for n-grams, whose confidence can be trusted less
_MAX_STALE = 64  # rounds until a plain decode is made: its cost is what everything is compared with
_RATE = 0.06  # a round's weight in averages; at first all count equally, a plain decode as four
#: The numbers of tokens that a parallel draft may predict in one decode.
_AT_ONCE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
# --- trials of a model that is not expected to pay
_N_TRIED = 3  # the tokens of one
_TRIAL_SHARE = 0.015  # the share of the answer's time, in plain decodes, that they may take,
_MOST_CREDIT = 32.0  # and how many plain decodes at once
# --- the prefill of a draft; how long the answer gets is a guess
_MOST_AHEAD = 2.0  # the most it may take, over the answer's time so far;
_MOST_AHEAD_OF_TRIAL = 0.1  # the same for a trial
_PREFILL_MARGIN = 1.5  # what it is expected to save over what it takes, at least
# --- losses
_TOKENS_LOST = 4.0  # a drafter waits while it has lost more than so many plain decodes,
_SHARE_LOST = 0.01  # and this share of the answer's time
_MOST_SAVED = 8.0  # earlier savings cover losses of so many plain decodes at most
_MOST_LOST = 8.0  # a round's largest loss: if it took longer, the machine stood still


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a round drafts what it drafts. `text` is the reason with its numbers."""

    name: ReasonName
    text: str = ""

    def __str__(self) -> str:
        return self.text or REASONS[self.name]


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known when a round is planned: the tokens that the answer is expected to get still, the most that may
    be drafted now, what was found without a decode, the name and price of the drafter that decodes, and the other
    sequences."""

    n_left: int
    n_most: int
    found: Draft = NO_DRAFT
    drafter: str | None = None
    price: Price = FREE
    others: Others = ALONE


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    A round verifies either `found`, which a lookup found without a decode, or a draft of at most `n_max` tokens of
    `drafter`, as far as `stop` lets it go. `stop` cuts the finished draft. The first `n_given` tokens repeat the end of the text, whatever `stop` says: a drafter
    with another vocabulary takes back its last tokens and drafts them anew. A parallel draft predicts `n_at_once` tokens in its one decode (None: `n_max`).
    `prefill_s` are the seconds of the drafter's prefill, an investment in later rounds.
    """

    reason: Reason
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: Stop = field(default_factory=Stop)
    n_given: int = 0
    n_at_once: int | None = None
    drafter: str | None = None
    prefill_s: float = 0.0

    @property
    def origin(self) -> str | None:
        """The name of the drafter that the round is accounted to; None if nothing is drafted."""
        if self.n_max > 0 and self.drafter is not None:
            return self.drafter
        return self.found.origins[0] if len(self.found) else None

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
    return RoundPlan(Reason("fixed"), n_max, stop=Stop(needs_confidence=needs_confidence))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round for one sequence: the verified draft and its accepted nodes; the seconds of its drafting;
    seconds and rows of the target's batch, those of others included; the tokens that it added to the text; all that
    was drafted and found, uncut."""

    plan: RoundPlan
    draft: Draft
    path: tuple[int, ...]
    draft_s: float
    target_s: float
    n_rows: int
    committed: tuple[int, ...] = ()
    proposed: tuple[Draft, ...] = ()


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
    """Drafts while the product of the tokens' probabilities, the model's own estimate that the whole draft is
    accepted, stays above a bound. This moves so that, in the long run, a quarter of the drafted tokens is rejected.
    (A confidence bound that follows the accepted share: Mamou et al., arXiv:2405.04304.)"""

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=0.3, needs_confidence=True)

    @property
    def bound(self) -> float:
        return self._stop.bound

    def observe(self, result: RoundResult) -> None:
        # If nothing was sure enough, the bound falls slowly, since nothing is learnt without drafts.
        difference = -0.025
        if n_drafted := len(result.draft):
            difference = 1.0 - len(result.path) / n_drafted - 0.25
        bound = self.bound * math.exp(0.4 * difference)
        self._stop = replace(self._stop, bound=min(0.9, max(0.01, bound)))


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost; that may be none.

    A token is worth the time that it would take otherwise: that of a plain decode, or less if recent rounds were
    faster. It costs decodes of the drafter and a row of the target's batch. A draft adds the sum, over its tokens, of
    the probability that the token and all before it are accepted (for a fixed length: Leviathan et al.,
    arXiv:2211.17192, section 3.4). What is known as a whole is cut where its value is highest; a model drafts by a
    `StoppingRule`.

    Most learning is free: tokens that were not worth verifying are compared with the text that follows. Only trials
    of a model that is not expected to pay cost time. A drafter that loses time against expectation waits.

    A policy decides for one text. `costs` is the target's table, to which observed times are added. `acceptance` is
    by origin; its counts cover all texts and may be shared with other policies.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        acceptance: MutableMapping[str, AcceptanceRates] | None = None,
    ) -> None:
        self.n_max, self._p_min = options.n_max, options.stops_below
        self._costs, self._others = costs, ALONE
        #: The acceptance probabilities from all texts, and those in this text; by origin.
        self._known = {} if acceptance is None else acceptance
        self._here: dict[str, AcceptanceRates] = {}
        self._rules: dict[tuple[object, ...], StoppingRule] = {}
        #: The seconds that each drafter has saved in this text.
        self._saved_s: dict[str, float] = {}
        self._n_stale = self._n_rounds = 0
        #: The seconds of all rounds, and averages over recent ones: seconds and tokens of a round.
        self._elapsed_s = self._round_s = 0.0
        self._round_tokens = 1.0
        #: In this round: the seconds of a plain decode, those that n drafted tokens add to it, a token's worth.
        self._plain_s = self._token_s = self._ngram_trust = 0.0
        self._extra_s = [0.0]

    def plan(self, offer: Offer) -> RoundPlan:
        self._n_stale += 1
        self._others = offer.others
        if (why_nothing := self._why_nothing(offer)) is not None:
            return RoundPlan(why_nothing)
        self._read_costs(offer.others)
        stop = WhilePaying(
            origin=offer.drafter or NGRAM_ORIGINS[0],
            rates=self.acceptance_of,
            token_s=self._token_s,
            extra_s=self._extra_s,
            ngram_trust=self._ngram_trust,
            p_min=self._p_min,
        )
        plan = self._plan_found(offer, stop)
        if offer.drafter is None:
            return plan
        model_plan, value_s = self._plan_model(offer, offer.drafter, stop)
        return plan if len(plan.found) and stop.worth_of(plan.found) >= value_s else model_plan

    def observe(self, result: RoundResult) -> None:
        self._costs.observe(result.n_rows, result.target_s)
        self._learn_acceptance(result)
        plan, n_drafted, n_sequences = result.plan, len(result.draft), 1 + self._others.n_sequences
        if not n_drafted:
            self._n_stale = 0
        if not self._costs.knows(n_sequences):
            return
        plain_s = self._costs.seconds(n_sequences) / n_sequences
        # Forced tokens count, too, and so do accepted ones behind the end of the answer.
        n_tokens = max(1, len(result.committed), len(result.path) + 1)
        target_s = result.target_s * self._costs.share_of_batch(
            1 + n_drafted, result.n_rows, n_sequences
        )
        # Prefill is an investment in later rounds, and is not charged to this one.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + target_s
        round_s = min(round_s, (n_tokens + _MOST_LOST) * plain_s)
        saved_s = n_tokens * plain_s - round_s
        self._average(round_s, n_tokens, plain_s)
        if plan.origin is not None and (n_drafted or plan.n_max):
            before_s = self._saved_s.get(plan.origin, 0.0)
            self._saved_s[plan.origin] = min(before_s + saved_s, _MOST_SAVED * plain_s)
        if plan.drafter is not None:
            counts = self.acceptance_of(plan.drafter).counts
            tried_s = saved_s - plan.prefill_s if plan.reason.name == "trial" else 0.0
            credit = counts.trial_credit + _TRIAL_SHARE * n_tokens + tried_s / plain_s
            counts.trial_credit = min(_MOST_CREDIT, credit)

    # --- the steps of a plan ----------------------------------------------------------------

    def _why_nothing(self, offer: Offer) -> Reason | None:
        """Return why nothing can be drafted in this round, whatever it is."""
        if not self._costs.knows(1 + offer.others.n_sequences):
            return Reason("costs unknown")
        if self._n_stale > _MAX_STALE:
            return Reason("plain decode")
        return Reason("no room") if min(self.n_max, offer.n_most) < 1 else None

    def _read_costs(self, others: Others) -> None:
        """Set the costs of this round.

        With v the seconds of the target's batches: N sequences without drafts pay v(N) / N each, and a drafted token
        is a row more in a batch with B rows of others, and costs what that row adds.
        """
        costs, n_sequences = self._costs, 1 + others.n_sequences
        rows_s = [costs.seconds(others.n_rows + n) for n in range(1, self.n_max + 2)]
        self._extra_s = [seconds - rows_s[0] for seconds in rows_s]
        self._plain_s = plain_s = costs.seconds(n_sequences) / n_sequences
        recent_s = self._round_s / self._round_tokens if self._n_rounds else plain_s
        self._token_s = min(plain_s / _MARGIN, recent_s)
        self._ngram_trust = min(plain_s / _NGRAM_MARGIN, recent_s) / self._token_s

    def _plan_found(self, offer: Offer, stop: WhilePaying) -> RoundPlan:
        """Plan to verify the best part of what was found; if there is none, say why."""
        found = stop.cut(offer.found)
        if len(found) and not self._waits(found.origins[0]):
            return RoundPlan(Reason("found"), found=found, stop=stop, drafter=offer.drafter)
        reason = Reason("nothing found")
        if len(offer.found):
            origin = offer.found.origins[0]
            waits = self._waits(origin)
            reason = Reason("put aside") if waits else self._too_rarely(origin)
        return RoundPlan(reason, stop=stop)

    def _plan_model(self, offer: Offer, drafter: str, stop: WhilePaying) -> tuple[RoundPlan, float]:
        """Return the plan for the drafter that decodes, and its expected gain in seconds; -inf for a trial or none."""
        rule, value_s, n_at_once = self._expect(drafter, offer.price, offer.n_left)
        why_not = self._why_not(drafter, offer.price, value_s)
        if why_not is not None:
            return self._plan_trial(offer, drafter, stop, why_not), -math.inf
        plan = RoundPlan(
            Reason("model"),
            min(self.n_max, offer.n_most),
            stop=replace(stop, rule=rule, next_s=offer.price.next_s),
            n_at_once=n_at_once,
            drafter=drafter,
            prefill_s=offer.price.prefill_s,
        )
        return plan, value_s

    def _plan_trial(
        self, offer: Offer, drafter: str, stop: WhilePaying, why_not: Reason
    ) -> RoundPlan:
        """Return the plan of a trial if one may be made, and else that of no draft."""
        if not self._may_try(drafter, offer.price):
            return RoundPlan(why_not, stop=stop, drafter=drafter)
        return RoundPlan(
            Reason("trial"),
            min(self.n_max, offer.n_most, _N_TRIED),
            stop=Stop(needs_confidence=True),
            drafter=drafter,
            prefill_s=offer.price.prefill_s,
        )

    def _expect(
        self, origin: str, price: Price, n_left: int
    ) -> tuple[StoppingRule, float, int | None]:
        """Return a model's stopping rule, the seconds that a round with it is expected to save and, for a parallel
        draft, how many tokens its decode should predict."""
        rule, n_at_once = self._rule(origin, price, self.n_max), None
        # The rule takes `next_s` for each look; the first one costs `first_s` instead.
        value_s = rule.value(0, 1.0) + price.next_s - price.first_s
        if price.at_once_s:
            # The confidences are known only once all tokens are predicted. So the rule is solved for each number of
            # tokens, with free looks, and the decode is subtracted.
            values_s = {
                n: self._rule(origin, price, n).value(0, 1.0) - price.seconds(n)
                for n in _AT_ONCE
                if n <= min(self.n_max, len(price.at_once_s))
            }
            n_at_once = max(values_s, key=values_s.__getitem__)
            value_s = values_s[n_at_once]
        # The prefill is spread over a cautious estimate of the rounds that the answer still takes.
        n_rounds = 0.75 * max(1.0, n_left / max(1.0, self._round_tokens))
        return rule, value_s - _PREFILL_MARGIN * price.prefill_s / n_rounds, n_at_once

    def _why_not(self, origin: str, price: Price, value_s: float) -> Reason | None:
        """Return why not to start a model that is expected to gain `value_s` a round; None if it should start."""
        if self._waits(origin):
            return Reason("put aside")
        pays = value_s > 0.0 or price == FREE  # a draft for nothing is judged once it is known
        if not pays and self._ideal_s(price) <= 0.0:
            guess = (price.seconds(2) - price.first_s) / self._plain_s
            row = self._extra_s[1] / self._plain_s
            text = f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
            return Reason("row cost", text)
        if price.prefill_s > (_MOST_AHEAD * self._elapsed_s if pays else 0.0):
            return Reason("prefill", f"the draft must first read the text, {price.prefill_s:.1f} s")
        return None if pays else self._too_rarely(origin)

    def _waits(self, origin: str) -> bool:
        """Return whether a drafter lost so much time that it waits, whatever is expected of it."""
        most_s = _TOKENS_LOST * self._plain_s + _SHARE_LOST * self._elapsed_s
        return self._saved_s.get(origin, 0.0) < -most_s

    def _too_rarely(self, origin: str) -> Reason:
        rate, row = self.acceptance_of(origin).mean(), self._extra_s[1] / self._plain_s
        return Reason(
            "acceptance",
            f"{rate:.0%} of its tokens are expected to be accepted in this text, and checking one costs "
            f"{row:.2f} of a token",
        )

    def _may_try(self, origin: str, price: Price) -> bool:
        """Return whether to try a model that is not expected to pay, to learn whether that is still so."""
        n = min(_N_TRIED, self.n_max)
        credit_s = self.acceptance_of(origin).counts.trial_credit * self._plain_s
        most_s = min(credit_s, _MOST_AHEAD_OF_TRIAL * self._elapsed_s)
        # The text is read for several trials.
        n_trials = 3 if price.prefill_s else 1
        cost_s = price.prefill_s + n_trials * (price.seconds(n) + self._extra_s[n])
        return not self._waits(origin) and cost_s <= most_s and self._ideal_s(price) > 0.0

    def _ideal_s(self, price: Price) -> float:
        """Return the seconds that a round would save with a draft of the best length, all accepted."""
        lengths = range(1, self.n_max + 1)
        return max(n * self._plain_s - self._extra_s[n] - price.seconds(n) for n in lengths)

    # --- what it learns ---------------------------------------------------------------------

    def _average(self, round_s: float, n_tokens: int, plain_s: float) -> None:
        """Average seconds and tokens separately: the mean of their ratios would be a different figure."""
        if not self._n_rounds:
            self._round_s = plain_s
        self._n_rounds += 1
        self._elapsed_s += round_s
        rate = max(_RATE, 1.0 / (self._n_rounds + 4))
        self._round_s += rate * (round_s - self._round_s)
        self._round_tokens += rate * (n_tokens - self._round_tokens)

    def _learn_acceptance(self, result: RoundResult) -> None:
        if result.plan.drafter is not None:
            seen = self.acceptance_of(result.plan.drafter)
            for confidence in itertools.chain(*(each.looks for each in result.proposed)):
                seen.see(confidence)
        if result.draft.is_drawn and result.draft.is_chain:
            judge_draws(self.acceptance_of, result.draft, len(result.path))
        judge_drafts(self.acceptance_of, result.proposed, result.committed)

    def acceptance_of(self, origin: str) -> AcceptanceRates:
        """Return the acceptance rates of a drafter's tokens in this text."""
        rates = self._here.get(origin)
        if rates is None:
            known = self._known.setdefault(origin, AcceptanceRates(origin))
            rates = self._here[origin] = AcceptanceRates(origin, known.counts)
        return rates

    def _rule(self, origin: str, price: Price, n_most: int) -> StoppingRule:
        """Return a drafter's rule for drafts of at most `n_most` tokens, or one that still fits about."""
        rates, unit_s = self.acceptance_of(origin), _NEWS * self._plain_s
        prices = [round(s / unit_s) for s in (price.next_s, self._token_s, self._extra_s[1])]
        key = (origin, n_most, rates.version // _N_NEWS, *prices)
        if key not in self._rules:
            if len(self._rules) >= _N_RULES:
                self._rules.clear()
            extra_s = self._extra_s[: n_most + 1]
            self._rules[key] = StoppingRule(extra_s, price.next_s, self._token_s, rates)
        return self._rules[key]
