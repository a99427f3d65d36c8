"""How much is drafted: a policy makes a plan once a round, as a value, and drafters follow it
without asking back.

`CostAwarePolicy` decides by costs and acceptance (`cost_table.py`, `acceptance.py`); the others know no costs. Their
words:

    look          one reading of a drafter's distribution for the next position
    confidence    the largest probability there: what the drafter says
    acceptance    how often tokens of that confidence are accepted, if all before them are
    whole         the probability that all tokens so far are accepted, the product of their acceptances
    credit        the time that a drafter may lose, in plain decodes: what it saved, and a small share of all time
"""

from __future__ import annotations

import itertools
import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specgen.events import REASONS, ReasonName
from specgen.method.acceptance import N_RANKS, AcceptanceRates, judge_drafts
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.stopping import CostAwareStopping, StoppingRule, draft_step_values

if TYPE_CHECKING:
    from specgen.options import DraftOptions

_MARGIN = 1.1  # a draft's expected gain over its cost, at least: only the cost is certain
_PREFILL_MARGIN = 2.0  # the same for a prefill, since how long the answer gets is a guess
_RATE = 0.06  # a round's weight in averages; at first all count equally, a plain decode as four
_MAX_STALE = 64  # rounds until a plain decode is made: its cost is what everything is compared with
_MAX_AGE = 4  # the rounds for which the values of looks are used
# --- the gate of a drafter
_SHARE = 0.014  # the share of all time that goes to its credit
_MOST_SAVED = 16.0  # its most credit; the most that a round may cost, else the machine stood still
_MOST_LOST = 4.0  # the debt with which it waits
_MOST_AHEAD = 2.0  # the longest prefill, over the answer's time so far; a quarter in a trial
_N_TRIED, _MOST_TRIED = 3, 0.1  # the tokens of a trial; its largest share of the answer's time


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known before a round: how many tokens the answer is expected to get still, the most
    that may be drafted in a row now, what was found without a decode, the drafter that decodes, its
    price, and the most nodes of a tree.
    """

    n_left: int
    n_most: int
    found: Draft = NO_DRAFT
    drafter: str | None = None
    price: Price = FREE
    n_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why: either `found`, without a decode, or at most
    `n_max` tokens of `drafter`, as far as `stop` lets them go, which also cuts the finished draft.

    The first `n_given` tokens repeat the end of the text, whatever `stop` says, for a drafter with
    another vocabulary. `prefill_s` is an investment in later rounds, `detail` the reason in words,
    `n_deepest` a tree's most levels.
    """

    reason: ReasonName
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: StoppingRule = field(default_factory=StoppingRule)
    drafter: str | None = None
    prefill_s: float = 0.0
    n_given: int = 0
    detail: str = ""
    n_deepest: int | None = None

    @property
    def why(self) -> str:
        return self.detail or REASONS[self.reason]

    def after_draft_step(self, n: int, whole: float, confidence: float) -> tuple[bool, bool, float]:
        """Return whether token n, which follows a draft with this `whole`, is drafted, whether one
        more look is worth a decode then, and the new `whole`. The token is not known yet: what it
        is never decides whether it is drafted.
        """
        if n < self.n_given:
            return True, n + 1 < self.n_max, whole
        if n >= self.n_max:
            return False, False, whole
        takes, goes_on, whole = self.stop.after_draft_step(n - self.n_given, whole, confidence)
        return takes, goes_on and n + 1 < self.n_max, whole


@dataclass(slots=True)
class RoundResult:
    """A round of one sequence, which its steps fill in: the verified draft and its accepted nodes;
    the seconds of all drafting; seconds and rows of the target's batch, which `n_sequences` share;
    the added tokens; what was found and drafted, uncut; the draft model's seconds; the rows of
    hidden states before the draft; a drafter's error.
    """

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
    error: Exception | None = None


class Policy(Protocol):
    """Decides for one sequence how much is drafted, `n_max` tokens at most: one plan a round, and
    one result.
    """

    n_max: int

    def plan(self, offer: Offer) -> RoundPlan: ...
    def observe(self, result: RoundResult) -> None: ...


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure. What was found comes first."""

    def __init__(self, options: DraftOptions) -> None:
        self.n_max, p_min, self._is_tree = options.n_max, options.stops_below, options.tree.is_fixed
        self._stop = StoppingRule(p_min, options.min_tokens, needs_confidence=p_min > 0.0)

    def plan(self, offer: Offer) -> RoundPlan:
        n_max, n_deepest = min(self.n_max, offer.n_most), None
        if n_max < 1:
            return RoundPlan("no room")
        found, bound = self._stop.cut(offer.found.first(n_max)), self._stop.bound
        detail = f"a draft's probability must be at least {bound:.2f}" if bound else ""
        reason = "threshold" if bound else "fixed"
        if len(found):
            return RoundPlan(reason, found=found, stop=self._stop, detail=detail)
        if offer.drafter is None:
            return RoundPlan("nothing found")
        if self._is_tree and offer.n_nodes is not None:  # the tokens left limit its levels
            n_max, n_deepest = min(self.n_max, offer.n_nodes), offer.n_most
        plan = RoundPlan(reason, n_max, stop=self._stop, drafter=offer.drafter, detail=detail)
        return replace(plan, n_deepest=n_deepest)

    def observe(self, result: RoundResult) -> None: ...


class ThresholdPolicy(FixedPolicy):
    """Drafts while the product of the tokens' probabilities stays above a bound, which moves so
    that in the long run a quarter of the drafted tokens is rejected (Mamou et al.,
    arXiv:2405.04304).
    """

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=0.3, needs_confidence=True)

    def observe(self, result: RoundResult) -> None:
        # If nothing was sure enough, the bound falls slowly, since nothing is learnt without
        # drafts.
        n = len(result.draft)
        difference = 1.0 - len(result.path) / n - 0.25 if n else -0.025
        bound = self._stop.bound * math.exp(0.4 * difference)
        self._stop = replace(self._stop, bound=min(0.9, max(0.01, bound)))


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost; that may be none.

    A token is worth the time that it would take otherwise: that of a plain decode, or less if
    recent rounds were faster. It costs decodes of the drafter and a row of the target's batch. A
    draft adds the sum, over its tokens, of their cumulative_acceptances (for a fixed length:
    Leviathan et al., arXiv:2211.17192, section 3.4). Most learning is free: tokens that were not
    worth verifying are compared with the text that follows. A policy decides for one text, but its
    `costs`, and the counts of `acceptance`, by origin, may be shared.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        acceptance: MutableMapping[str, AcceptanceRates] | None = None,
    ) -> None:
        self.n_max, self._p_min, self._costs = options.n_max, options.stops_below, costs
        #: Acceptance in all texts and in this one, by origin.
        self._known = {} if acceptance is None else acceptance
        self._here: dict[str, AcceptanceRates] = {}
        #: The values of the model's looks, a few rounds old; empty if they are to be computed.
        self._values: list[list[float]] = []
        self._n_stale = self._n_rounds = 0
        #: The seconds of all rounds; averages over recent ones.
        self._elapsed_s, self._round_s, self._round_tokens = 0.0, 0.0, 1.0

    def plan(self, offer: Offer) -> RoundPlan:
        self._n_stale += 1
        if not self._costs:
            return RoundPlan("costs unknown")
        if self._n_stale > _MAX_STALE:
            return RoundPlan("plain decode")
        if min(self.n_max, offer.n_most) < 1:
            return RoundPlan("no room")
        # A sequence pays its part of a batch in which all draft as much as it does.
        rows_s = [self._costs.seconds_each(n) for n in range(1, self.n_max + 2)]
        recent_s = (self._round_s or self._plain_s) / self._round_tokens
        stop = CostAwareStopping(
            origin=offer.drafter or "",
            rates=self.acceptance_of,
            token_s=min(self._plain_s / _MARGIN, recent_s),
            extra_s=[seconds - rows_s[0] for seconds in rows_s],
            next_s=offer.price.next_s,
            p_min=self._p_min,
        )
        plan = self._plan_found(offer.found, stop)
        if offer.drafter is None:
            return plan
        model_plan, value_s = self._plan_model(offer, offer.drafter, stop)
        return plan if len(plan.found) and stop.worth_of(plan.found) >= value_s else model_plan

    def _plan_found(self, found: Draft, stop: CostAwareStopping) -> RoundPlan:
        """Plan to verify the best part of what was found; if there is none, say why."""
        if not len(found):
            return RoundPlan("nothing found", stop=stop)
        rates, found = self.acceptance_of(found.origins[0]), stop.cut(found)
        if rates.counts.credit < -_MOST_LOST:
            return RoundPlan("put aside", stop=stop)
        if not len(found):
            return RoundPlan("acceptance", stop=stop, detail=self._too_rarely(rates, stop))
        return RoundPlan("found", found=found, stop=stop)

    def _plan_model(
        self, offer: Offer, drafter: str, stop: CostAwareStopping
    ) -> tuple[RoundPlan, float]:
        """Return the plan for the drafter that decodes, and its expected gain in seconds; -inf for
        a trial or none.
        """
        price, extra_s, rates = offer.price, stop.extra_s, self.acceptance_of(drafter)
        plain_s, credit = self._plain_s, rates.counts.credit
        if not self._values:
            self._values = draft_step_values(extra_s, price.next_s, stop.token_s, rates)
        n_max, growing = min(self.n_max, offer.n_most), replace(stop, values=self._values)
        plan = RoundPlan("model", n_max, NO_DRAFT, growing, drafter, price.prefill_s)
        # Each look takes `next_s`, but the first one `first_s`; the prefill is spread over the
        # rounds to come.
        n_rounds = max(1.0, offer.n_left / max(1.0, self._round_tokens))
        value_s = self._values[0][-1] + price.next_s - price.first_s
        value_s -= _PREFILL_MARGIN * price.prefill_s / n_rounds
        pays = value_s > 0.0 or price == FREE  # a draft for nothing is judged once it is known
        n_tried = min(self.n_max, _N_TRIED)  # one trial says little: there is credit for several
        trials_s = price.prefill_s + 3 * (price.seconds(n_tried) + extra_s[n_tried])
        most_s = _MOST_TRIED * (self._elapsed_s + offer.n_left * plain_s)
        if credit < -_MOST_LOST:
            reason, why = "put aside", ""
        elif pays and price.prefill_s <= _MOST_AHEAD * self._elapsed_s:
            return plan, value_s
        elif not pays and all(  # not even if all is accepted
            n * plain_s <= extra_s[n] + price.seconds(n) for n in range(1, self.n_max + 1)
        ):
            guess = (price.seconds(2) - price.first_s) / plain_s
            reason = "row cost"
            why = f"a guess costs {guess:.2f} of a token of the target, and checking it {self._row(stop)}"
        elif trials_s <= min(credit * plain_s, _MOST_AHEAD / 4 * self._elapsed_s, most_s):
            tried = StoppingRule(needs_confidence=True)
            return replace(plan, reason="trial", n_max=min(n_max, n_tried), stop=tried), -math.inf
        elif price.prefill_s > 0.0:
            reason = "prefill"
            why = f"the draft must first read the text, {price.prefill_s:.2f} s"
        else:
            reason, why = "acceptance", self._too_rarely(rates, stop)
        return RoundPlan(reason, stop=stop, detail=why), -math.inf

    def observe(self, result: RoundResult) -> None:
        costs, plan, n_drafted = self._costs, result.plan, len(result.draft)
        costs.observe(result.n_rows, result.target_s, result.n_sequences)
        if plan.drafter is not None:
            looks = itertools.chain(*(each.looks for each in result.proposed))
            self.acceptance_of(plan.drafter).see(looks)
        judge_drafts(self.acceptance_of, result.proposed, result.committed, len(result.path))
        self._n_stale = self._n_stale if n_drafted else 0
        if not costs:
            return
        plain_s = self._plain_s
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
        # Seconds and tokens are averaged apart: the mean of their ratios would be a different
        # figure.
        self._round_s = self._round_s or plain_s
        self._n_rounds += 1
        self._elapsed_s += round_s
        rate = max(_RATE, 1.0 / (self._n_rounds + 4))
        self._round_s += rate * (round_s - self._round_s)
        self._round_tokens += rate * (n_tokens - self._round_tokens)
        if self._n_rounds % _MAX_AGE == 0:
            self._values = []

    @property
    def _plain_s(self) -> float:
        return self._costs.seconds(self._costs.n_sharing) / self._costs.n_sharing

    def acceptance_of(self, origin: str, rank: int = 0) -> AcceptanceRates:
        """Return the acceptance rates, in this text, of a drafter's tokens with `rank` better
        siblings.
        """
        name = f"{origin}:{min(rank, N_RANKS) + 1}" if rank else origin
        if (here := self._here.get(name)) is None:
            counts = self._known.setdefault(name, AcceptanceRates(name)).counts
            counts.credit = max(0.0, counts.credit)  # debt of other texts is forgiven
            here = self._here[name] = AcceptanceRates(name, counts)
        return here

    def _too_rarely(self, rates: AcceptanceRates, stop: CostAwareStopping) -> str:
        accepted = f"{rates.mean():.0%} of its tokens are expected to be accepted in this text"
        return f"{accepted}, and checking one costs {self._row(stop)} of a token"

    def _row(self, stop: CostAwareStopping) -> str:
        # A batch of two may have been quicker than one row, by noise: that is no price below
        # nothing.
        return f"{max(0.0, stop.extra_s[1]) / self._plain_s:.2f}"
