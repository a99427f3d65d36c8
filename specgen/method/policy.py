"""How much is drafted: a policy makes a plan once a round, and drafters follow it.

There are three policies:

- `FixedPolicy` always drafts the same number of tokens, or stops where the draft becomes unsure;
- `ThresholdPolicy` drafts while the whole draft stays likely enough, and moves that threshold;
- `CostAwarePolicy`, the default, drafts as many tokens as are expected to save time. It knows what
  a decode costs (`cost_table.py`) and how often tokens of some confidence are accepted
  (`acceptance.py`). Where nothing is expected to save time, nothing is drafted, apart from a trial
  now and then, which a `CreditGate` has to afford.

The words of all of them:

    draft step               one use of a drafter's distribution for the next position
    confidence               the largest probability there: how sure the drafter is
    acceptance               how often tokens of that confidence are accepted, if all before are
    cumulative acceptance    the probability that all tokens so far are accepted: the product of
                             their acceptances
"""

from __future__ import annotations

import itertools
import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from specgen.events import REASONS, ReasonName
from specgen.method.acceptance import N_RANKS, AcceptanceCounts, AcceptanceRates, judge_drafts
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.stopping import (
    CostAwareStopping,
    DraftStep,
    StoppingRule,
    draft_step_values,
)

if TYPE_CHECKING:
    from specgen.options import DraftOptions

#: The least expected gain of a draft, over its cost: only the cost is certain.
_MARGIN = 1.1
#: The same for a prefill, since how long the answer gets is a guess.
_PREFILL_MARGIN = 2.0
#: A round's weight in averages. At first all rounds count equally, and a plain decode as four.
_RATE = 0.06
_N_PLAIN = 4
#: Rounds until a plain decode is made: its cost is what everything is compared with.
_MAX_STALE = 64
#: Rounds for which the values of draft steps are used.
_MAX_AGE = 4
#: The share of all time that goes to a drafter's credit.
_CREDIT_SHARE = 0.014
#: A drafter's largest credit, in plain decodes. A round that costs more than this over plain
#: decoding was disturbed, and counts as if it had cost this much.
_MAX_CREDIT = 16.0
#: The debt at which a drafter is put aside, in plain decodes.
_MAX_DEBT = 4.0
#: The longest prefill, over the answer's time so far; in a trial a quarter of it.
_MAX_PREFILL = 2.0
#: The tokens of a trial, and the largest share of the answer's time for trials.
_N_TRIED = 3
_MAX_TRIED = 0.1
#: A single trial says little: there must be credit for this many.
_N_TRIALS = 3
#: The expected gain of plans that are not expected to gain anything.
_NO_GAIN = -math.inf
#: The share of drafted tokens that `ThresholdPolicy` wants to see rejected.
_REJECTED = 0.25


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known before a round."""

    #: The tokens that the answer is expected to get still.
    n_left: int
    #: The most tokens that may be drafted in a row now.
    n_most: int
    #: What was found without a decode.
    found: Draft = NO_DRAFT
    #: The name of the drafter that decodes, if there is one.
    drafter: str | None = None
    #: The price of its draft.
    price: Price = FREE
    #: The most nodes of a tree; None: `n_most`.
    n_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    It is either `found`, without a decode, or at most `n_max` tokens of `drafter`.
    """

    #: The reason for this plan.
    reason: ReasonName
    #: The most tokens, or nodes of a tree, that the drafter drafts.
    n_max: int = 0
    #: What was found without a decode, if that is to be verified.
    found: Draft = NO_DRAFT
    #: How far the drafter goes; it also cuts the finished draft.
    stop: StoppingRule = field(default_factory=StoppingRule)
    #: The drafter that decodes, if one may draft.
    drafter: str | None = None
    #: The seconds of prefill in the drafter's price: an investment in later rounds.
    prefill_s: float = 0.0
    #: The first tokens of the draft that repeat the end of the text, whatever `stop` says: a
    #: drafter with another vocabulary begins before the end.
    n_given: int = 0
    #: The reason in words, if there is more to say than `REASONS` does.
    detail: str = ""
    #: The most levels of a tree; None: `n_max`.
    n_deepest: int | None = None

    @property
    def why(self) -> str:
        """The reason in words."""
        return self.detail or REASONS[self.reason]

    @property
    def n_tokens_max(self) -> int:
        """The most tokens of the draft, found or drafted; 0 if nothing is drafted."""
        return len(self.found) + self.n_max

    def after_draft_step(
        self,
        n_drafted: int,
        cumulative_acceptance: float,
        confidence: float,
    ) -> DraftStep:
        """Decide whether the next token is drafted, and whether another draft step follows.

        The token is not known yet: what it is never decides whether it is drafted.

        Args:
            n_drafted: The tokens that were drafted before, in a row.
            cumulative_acceptance: That of the step before; 1 at first.
            confidence: The drafter's largest probability for the next token.
        """
        has_room_after = n_drafted + 1 < self.n_max
        if n_drafted < self.n_given:
            return DraftStep(True, has_room_after, cumulative_acceptance)
        if n_drafted >= self.n_max:
            return DraftStep(False, False, cumulative_acceptance)
        step = self.stop.after_draft_step(
            n_drafted - self.n_given,
            cumulative_acceptance,
            confidence,
        )
        if has_room_after:
            return step
        return DraftStep(step.keep_token, False, step.cumulative_acceptance)


@dataclass(slots=True)
class RoundResult:
    """A round of one sequence, which the steps of the round fill in."""

    plan: RoundPlan
    #: The draft that is verified.
    draft: Draft = NO_DRAFT
    #: Its accepted nodes, from a child of the root down.
    path: tuple[int, ...] = ()
    #: The seconds of all drafting.
    draft_s: float = 0.0
    #: The seconds and rows of the target's batch, which `n_sequences` share.
    target_s: float = 0.0
    n_rows: int = 0
    #: The tokens that the round added to the text.
    committed: tuple[int, ...] = ()
    #: What was found and what was drafted, uncut.
    proposed: tuple[Draft, ...] = ()
    n_sequences: int = 1
    #: The seconds of the draft model's decodes, a part of `draft_s`.
    model_s: float = 0.0
    #: The rows of hidden states before the draft.
    rows: range = range(1)
    #: What a drafter raised.
    error: Exception | None = None


class Policy(Protocol):
    """Decides for one sequence how much is drafted."""

    #: The most tokens that it ever drafts in a round.
    n_max: int

    def plan(self, offer: Offer) -> RoundPlan:
        """Return the plan of a round; called once a round."""

    def observe(self, result: RoundResult) -> None:
        """Learn from the round that was planned last."""


class FixedPolicy:
    """Drafts a fixed number of tokens, fewer where the draft becomes unsure.

    What was found without a decode comes first.
    """

    def __init__(self, options: DraftOptions) -> None:
        p_min = options.stops_below
        self.n_max = options.n_max
        self._is_tree = options.tree.is_fixed
        self._stop = StoppingRule(p_min, options.min_tokens, needs_confidence=p_min > 0.0)

    def plan(self, offer: Offer) -> RoundPlan:
        """Return a plan for what was found, else for the model's draft."""
        n_max = min(self.n_max, offer.n_most)
        if n_max < 1:
            return RoundPlan("no room")
        reason = "fixed"
        detail = ""
        if self._stop.bound:
            reason = "threshold"
            detail = f"a draft's probability must be at least {self._stop.bound:.2f}"

        found = self._stop.cut(offer.found.first(n_max))
        if len(found):
            return RoundPlan(reason, found=found, stop=self._stop, detail=detail)
        if offer.drafter is None:
            return RoundPlan("nothing found")
        n_deepest = None
        if self._is_tree and offer.n_nodes is not None:
            n_max = min(self.n_max, offer.n_nodes)
            n_deepest = offer.n_most  # the tokens that are left limit the tree's levels
        return RoundPlan(
            reason,
            n_max,
            stop=self._stop,
            drafter=offer.drafter,
            detail=detail,
            n_deepest=n_deepest,
        )

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""


class ThresholdPolicy(FixedPolicy):
    """Drafts while the product of the tokens' probabilities stays above a bound.

    The bound moves so that in the long run a quarter of the drafted tokens is rejected (Mamou et
    al., arXiv:2405.04304).
    """

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=0.3, needs_confidence=True)

    def observe(self, result: RoundResult) -> None:
        """Raise the bound if more than a quarter was rejected, else lower it."""
        n_drafted = len(result.draft)
        # If nothing was sure enough, nothing is learnt, and the bound falls slowly.
        excess = -0.025
        if n_drafted:
            excess = 1.0 - len(result.path) / n_drafted - _REJECTED
        bound = self._stop.bound * math.exp(0.4 * excess)
        self._stop = replace(self._stop, bound=min(0.9, max(0.01, bound)))


class CreditGate:
    """Decides whether a drafter may lose time: its credit, in plain decodes.

    A drafter earns what its rounds save over plain decoding, and a small share of all time. It pays
    for rounds that take longer. So it is in one of three states:

    - in credit: it may pay for trials, drafts that are not expected to save time;
    - in debt: it drafts only where that is expected to save time;
    - put aside, once its debt exceeds `_MAX_DEBT`: it waits until its share has paid for enough.

    The credit is kept with the drafter's counts. Debt that it made in other texts is forgiven.
    """

    def __init__(self, counts: AcceptanceCounts) -> None:
        self._counts = counts

    @property
    def is_put_aside(self) -> bool:
        """Whether the drafter has to wait."""
        return self._counts.credit < -_MAX_DEBT

    def seconds(self, plain_s: float) -> float:
        """Return the seconds that it may lose, if a plain decode takes `plain_s`."""
        return self._counts.credit * plain_s

    def forgive_debt(self) -> None:
        """Begin another text."""
        self._counts.credit = max(0.0, self._counts.credit)

    def settle(self, n_tokens: int, n_saved: float) -> None:
        """Settle a round of `n_tokens` tokens, in which the drafter saved `n_saved` decodes."""
        credit = self._counts.credit + n_saved + _CREDIT_SHARE * n_tokens
        self._counts.credit = min(_MAX_CREDIT, credit)


class RecentRounds:
    """Averages over recent rounds of one text, and the time of all its rounds."""

    def __init__(self) -> None:
        #: The seconds of all rounds.
        self.elapsed_s = 0.0
        #: The average tokens of a round.
        self.n_tokens = 1.0
        #: The average seconds of a round; 0 before the first one.
        self._round_s = 0.0
        self.n_rounds = 0

    def token_s(self, plain_s: float) -> float:
        """Return the average seconds of a token; at first those of a plain decode."""
        return (self._round_s or plain_s) / self.n_tokens

    def add(
        self,
        round_s: float,
        n_tokens: int,
        plain_s: float,
    ) -> None:
        """Add a round. The averages start with plain decodes of `plain_s` seconds."""
        # Seconds and tokens are averaged apart: the mean of their ratios would be a different
        # figure.
        self._round_s = self._round_s or plain_s
        self.n_rounds += 1
        self.elapsed_s += round_s
        rate = max(_RATE, 1.0 / (self.n_rounds + _N_PLAIN))
        self._round_s += rate * (round_s - self._round_s)
        self.n_tokens += rate * (n_tokens - self.n_tokens)


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost; that may be none.

    A token is worth the time that it would take otherwise: that of a plain decode, or less if
    recent rounds were faster. It costs decodes of the drafter and a row of the target's batch. A
    draft of a fixed length adds the sum, over its tokens, of their cumulative acceptances
    (Leviathan et al., arXiv:2211.17192, section 3.4).

    Most learning is free: tokens that were not worth verifying are compared with the text that
    follows.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        acceptance: MutableMapping[str, AcceptanceRates] | None = None,
    ) -> None:
        """Decide for one text.

        Args:
            options: The options of drafting.
            costs: The costs of the target's batches, which texts may share.
            acceptance: The acceptance rates in all texts, by origin, which texts may share.
        """
        self.n_max = options.n_max
        self._p_min = options.stops_below
        self._costs = costs
        self._known = {} if acceptance is None else acceptance
        #: The acceptance rates in this text, by origin.
        self._here: dict[str, AcceptanceRates] = {}
        #: The values of the model's draft steps, at most a few rounds old; empty if they have to be
        #: computed.
        self._values: list[list[float]] = []
        #: Rounds since the last one without a draft.
        self._n_stale = 0
        self._recent = RecentRounds()

    def plan(self, offer: Offer) -> RoundPlan:
        """Return the better one of the plans for what was found and for the model's draft."""
        self._n_stale += 1
        if not self._costs:
            return RoundPlan("costs unknown")
        if self._n_stale > _MAX_STALE:
            return RoundPlan("plain decode")
        if min(self.n_max, offer.n_most) < 1:
            return RoundPlan("no room")
        # A sequence pays its part of a batch in which all draft as much as it does.
        rows_s = [self._costs.seconds_each(n) for n in range(1, self.n_max + 2)]
        plain_s = self._plain_s
        stop = CostAwareStopping(
            origin=offer.drafter or "",
            rates=self.acceptance_of,
            token_s=min(plain_s / _MARGIN, self._recent.token_s(plain_s)),
            extra_s=[seconds - rows_s[0] for seconds in rows_s],
            next_s=offer.price.next_s,
            p_min=self._p_min,
        )
        found_plan = self._plan_found(offer.found, stop)
        if offer.drafter is None:
            return found_plan
        model_plan, gain_s = self._plan_model(offer, offer.drafter, stop)
        if len(found_plan.found) and stop.worth_of(found_plan.found) >= gain_s:
            return found_plan
        return model_plan

    def _plan_found(self, found: Draft, stop: CostAwareStopping) -> RoundPlan:
        """Plan to verify the best part of what was found; if there is none, say why."""
        if not len(found):
            return RoundPlan("nothing found", stop=stop)
        rates = self.acceptance_of(found.origins[0])
        best_part = stop.cut(found)
        if CreditGate(rates.counts).is_put_aside:
            return RoundPlan("put aside", stop=stop)
        if not len(best_part):
            return RoundPlan("acceptance", stop=stop, detail=self._too_rarely(rates, stop))
        return RoundPlan("found", found=best_part, stop=stop)

    def _plan_model(
        self,
        offer: Offer,
        drafter: str,
        stop: CostAwareStopping,
    ) -> tuple[RoundPlan, float]:
        """Return the plan for the drafter that decodes, and its expected gain in seconds.

        Trials, and plans without a draft, have `_NO_GAIN`: anything that was found is better.
        """
        price = offer.price
        rates = self.acceptance_of(drafter)
        gate = CreditGate(rates.counts)
        if not self._values:
            self._values = draft_step_values(stop.extra_s, price.next_s, stop.token_s, rates)
        plan = RoundPlan(
            "model",
            n_max=min(self.n_max, offer.n_most),
            stop=replace(stop, values=self._values),
            drafter=drafter,
            prefill_s=price.prefill_s,
        )
        gain_s = self._expected_gain_s(price, offer.n_left)
        pays = gain_s > 0.0 or price == FREE  # a draft for nothing is judged once it is known
        if gate.is_put_aside:
            return RoundPlan("put aside", stop=stop), _NO_GAIN
        # A long prefill has to wait until the answer has taken long enough.
        if pays and price.prefill_s <= _MAX_PREFILL * self._recent.elapsed_s:
            return plan, gain_s
        if not pays and self._can_never_pay(price, stop):
            detail = self._too_costly(price, stop)
            return RoundPlan("row cost", stop=stop, detail=detail), _NO_GAIN
        if self._affords_trial(offer, stop, gate):
            n_max = min(plan.n_max, _N_TRIED)
            always = StoppingRule(needs_confidence=True)
            return replace(plan, reason="trial", n_max=n_max, stop=always), _NO_GAIN
        if price.prefill_s > 0.0:
            detail = f"the draft must first read the text, {price.prefill_s:.2f} s"
            return RoundPlan("prefill", stop=stop, detail=detail), _NO_GAIN
        detail = self._too_rarely(rates, stop)
        return RoundPlan("acceptance", stop=stop, detail=detail), _NO_GAIN

    def _expected_gain_s(self, price: Price, n_left: int) -> float:
        """Return what a draft is expected to save, its prefill spread over the rounds to come."""
        n_rounds = max(1.0, n_left / max(1.0, self._recent.n_tokens))
        # The value counts `next_s` for each draft step, but the first one takes `first_s`.
        gain_s = self._values[0][-1] + price.next_s - price.first_s
        return gain_s - _PREFILL_MARGIN * price.prefill_s / n_rounds

    def _can_never_pay(self, price: Price, stop: CostAwareStopping) -> bool:
        """Return whether no draft would save time even if all of it were accepted."""
        plain_s = self._plain_s
        return all(
            n * plain_s <= stop.extra_s[n] + price.seconds(n) for n in range(1, self.n_max + 1)
        )

    def _affords_trial(
        self,
        offer: Offer,
        stop: CostAwareStopping,
        gate: CreditGate,
    ) -> bool:
        """Return whether the credit, and the answer's time, allow trials of a few tokens."""
        price = offer.price
        plain_s = self._plain_s
        n_tried = min(self.n_max, _N_TRIED)
        trials_s = price.prefill_s + _N_TRIALS * (price.seconds(n_tried) + stop.extra_s[n_tried])
        answer_s = self._recent.elapsed_s + offer.n_left * plain_s
        longest_s = min(
            gate.seconds(plain_s),
            _MAX_PREFILL / 4 * self._recent.elapsed_s,
            _MAX_TRIED * answer_s,
        )
        return trials_s <= longest_s

    def observe(self, result: RoundResult) -> None:
        """Learn what decodes cost and what is accepted, and settle what the round saved."""
        plan = result.plan
        self._costs.observe(result.n_rows, result.target_s, result.n_sequences)
        if plan.drafter is not None:
            confidences = [each.step_confidences for each in result.proposed]
            self.acceptance_of(plan.drafter).see(itertools.chain(*confidences))
        judge_drafts(self.acceptance_of, result.proposed, result.committed, len(result.path))
        if not len(result.draft):
            self._n_stale = 0
        if self._costs:
            self._settle(result)

    def _settle(self, result: RoundResult) -> None:
        """Count the time of a round, and let its drafter earn or pay the difference."""
        plan = result.plan
        plain_s = self._plain_s
        # Forced tokens count, too, and so do accepted ones after the end of the answer.
        n_tokens = max(1, len(result.committed), len(result.path) + 1)
        share = self._costs.share_of_batch(len(result.draft), result.n_rows)
        # Prefill is an investment in later rounds, and is charged to trials only.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + result.target_s * share
        round_s = min(round_s, (n_tokens + _MAX_CREDIT) * plain_s)
        charged_s = round_s
        if plan.reason == "trial":
            charged_s += plan.prefill_s

        drafted_by = plan.drafter
        if drafted_by is None and len(plan.found):
            drafted_by = plan.found.origins[0]
        for origin, rates in self._here.items():
            n_saved = n_tokens - charged_s / plain_s if origin == drafted_by else 0.0
            CreditGate(rates.counts).settle(n_tokens, n_saved)

        self._recent.add(round_s, n_tokens, plain_s)
        if self._recent.n_rounds % _MAX_AGE == 0:
            self._values = []

    @property
    def _plain_s(self) -> float:
        """The seconds of a plain decode, shared by the sequences of a round."""
        return self._costs.seconds(self._costs.n_sharing) / self._costs.n_sharing

    def acceptance_of(self, origin: str, rank: int = 0) -> AcceptanceRates:
        """Return the acceptance rates, in this text, of tokens with `rank` better siblings."""
        name = f"{origin}:{min(rank, N_RANKS) + 1}" if rank else origin
        here = self._here.get(name)
        if here is None:
            counts = self._known.setdefault(name, AcceptanceRates(name)).counts
            CreditGate(counts).forgive_debt()
            here = AcceptanceRates(name, counts)
            self._here[name] = here
        return here

    def _too_rarely(self, rates: AcceptanceRates, stop: CostAwareStopping) -> str:
        accepted = f"{rates.mean():.0%} of its tokens are expected to be accepted in this text"
        return f"{accepted}, and checking one costs {self._row_cost(stop)} of a token"

    def _too_costly(self, price: Price, stop: CostAwareStopping) -> str:
        guess = (price.seconds(2) - price.first_s) / self._plain_s
        return (
            f"a guess costs {guess:.2f} of a token of the target, "
            f"and checking it {self._row_cost(stop)}"
        )

    def _row_cost(self, stop: CostAwareStopping) -> str:
        """Return what another row costs, in tokens."""
        # A batch of two may have been measured faster than one row, by noise.
        return f"{max(0.0, stop.extra_s[1]) / self._plain_s:.2f}"
