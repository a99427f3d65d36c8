"""How much is drafted: a policy makes a plan once a round, and drafters follow it.

There are three policies:

- `FixedPolicy` always drafts the same number of tokens, or stops where the drafter becomes unsure;
- `ThresholdPolicy` drafts while the whole draft is likely enough, and adapts that threshold;
- `CostAwarePolicy`, the default, drafts as many tokens as are expected to save time. It knows what
  a decode costs (`cost_table.py`) and how often tokens with some confidence are accepted
  (`acceptance.py`). If no draft is expected to save time, nothing is drafted, apart from occasional
  trials, which the drafter has to earn first (`CreditGate`).

They share these terms:

    plain decode             a decode of the target without a draft, which gives one token
    draft step               one use of a drafter's distribution for the next position
    confidence               the largest probability there: how sure the drafter is
    acceptance               how often tokens with that confidence are accepted, if all tokens
                             before them are
    cumulative acceptance    the probability that all tokens so far are accepted: the product of
                             their acceptances
    value of a draft step    the seconds that it is expected to save (`stopping.py`)
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
    FastestRound,
    StoppingRule,
    draft_step_values,
)

if TYPE_CHECKING:
    from specgen.options import DraftOptions

# The constants of `ThresholdPolicy`.

#: The share of rejected tokens that it aims at.
_TARGET_REJECTION = 0.25
#: Its bound at first, and the limits within which it is adapted.
_FIRST_BOUND = 0.3
_MIN_BOUND = 0.01
_MAX_BOUND = 0.9
#: How fast the bound follows the share of rejected tokens.
_BOUND_RATE = 0.4
#: A round without a draft counts as one with this much less rejection than the aim, so that the
#: bound falls slowly and drafting starts again.
_UNDRAFTED_DEFICIT = 0.025

# The constants of `CreditGate`.

#: The share of all time that goes to a drafter's credit.
_CREDIT_SHARE = 0.014
#: A drafter's maximum credit, in plain decodes. It also limits what a single round may cost over
#: plain decoding: a round that took longer was disturbed.
_MAX_CREDIT = 16.0
#: The debt, in plain decodes, above which a drafter is put aside.
_MAX_DEBT = 4.0

# The constants of `RecentRounds`.

#: The averages start with plain decoding, which counts as this many rounds. Then all rounds count
#: equally...
_N_PLAIN = 4
#: ...until the latest round would have less weight than this.
_RATE = 0.06

# The constants of `CostAwarePolicy`.

#: The expected gain of a draft has to exceed its cost by this factor, since only the cost is
#: certain.
_MARGIN = 1.1
#: After this many rounds with drafts, one round is a plain decode, to measure again the cost that
#: everything is compared with.
_MAX_DRAFTING_ROUNDS = 64
#: The values of draft steps are computed again after this many rounds.
_VALUES_LIFETIME = 4
#: The maximum time of a prefill, relative to the answer's time so far.
_MAX_PREFILL = 2.0
#: A prefill that takes less than this share of a plain decode need not wait.
_SHORT_PREFILL = 0.25
#: The number of tokens in a trial.
_TRIAL_TOKENS = 3
#: The maximum time of trials, relative to the answer's time so far...
_MAX_TRIALS_SO_FAR = 0.5
#: ...and as a share of the time that the whole answer is expected to take.
_MAX_TRIALS_SHARE = 0.1
#: A single trial reveals little: the credit must suffice for this many.
_N_TRIALS = 3
#: The expected gain in seconds of trials and of plans without a draft. Any draft that was found is
#: preferred to them.
_NO_GAIN = -math.inf


@dataclass(frozen=True, slots=True)
class Offer:
    """What a policy knows before a round."""

    #: How many more tokens the answer is expected to get.
    n_expected: int
    #: The maximum number of tokens in a row that may be drafted in this round.
    n_max: int
    #: The draft that was found without a decode.
    found: Draft = NO_DRAFT
    #: The name of the drafter that decodes, if there is one.
    drafter: str | None = None
    #: The price of that drafter's draft.
    price: Price = FREE
    #: The maximum number of nodes in a tree; None: `n_max`.
    n_nodes_max: int | None = None


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    The draft is either `found`, or up to `n_max` tokens from `drafter`.
    """

    #: The reason for this plan.
    reason: ReasonName
    #: The maximum number of tokens, or of nodes in a tree, that the drafter may draft.
    n_max: int = 0
    #: The draft that was found without a decode, if it is to be verified.
    found: Draft = NO_DRAFT
    #: Decides where the drafter stops, and which part of the finished draft is verified.
    stop: StoppingRule = field(default_factory=StoppingRule)
    #: The drafter that decodes, if it may draft.
    drafter: str | None = None
    #: The seconds of prefill in the drafter's price: an investment in later rounds.
    prefill_s: float = 0.0
    #: The number of tokens at the start of the draft that only repeat the end of the text, so that
    #: `stop` does not apply to them. (A drafter with another vocabulary may have to begin a few
    #: tokens before the end.)
    n_given: int = 0
    #: The reason in words, if it is more specific than the text in `REASONS`.
    detail: str = ""
    #: The maximum number of levels in a tree; None: `n_max`.
    n_levels_max: int | None = None

    @property
    def why(self) -> str:
        """The reason in words."""
        return self.detail or REASONS[self.reason]

    @property
    def n_tokens_max(self) -> int:
        """The maximum number of tokens in the draft; 0 if nothing is drafted."""
        return len(self.found) + self.n_max

    def after_draft_step(
        self,
        n_drafted: int,
        cumulative_acceptance: float,
        confidence: float,
    ) -> DraftStep:
        """Decide whether the next token joins the draft, and whether another draft step follows.

        The token is not chosen yet, since its value must not influence whether it is drafted.

        Args:
            n_drafted: The number of tokens that were drafted before it, in a row.
            cumulative_acceptance: The cumulative acceptance after the previous step; 1 at first.
            confidence: The drafter's largest probability for the next token.
        """
        has_room_after = n_drafted + 1 < self.n_max
        if n_drafted < self.n_given:
            return DraftStep(
                keep_token=True,
                continue_drafting=has_room_after,
                cumulative_acceptance=cumulative_acceptance,
            )
        if n_drafted >= self.n_max:
            return DraftStep(
                keep_token=False,
                continue_drafting=False,
                cumulative_acceptance=cumulative_acceptance,
            )
        step = self.stop.after_draft_step(
            n_drafted - self.n_given,
            cumulative_acceptance,
            confidence,
        )
        if has_room_after:
            return step
        return replace(step, continue_drafting=False)


@dataclass(slots=True)
class RoundResult:
    """A round of one sequence, filled in by the steps of the round."""

    #: What was to be drafted, and why.
    plan: RoundPlan
    #: The draft that is verified.
    draft: Draft = NO_DRAFT
    #: Its accepted nodes, from a child of the root down.
    path: tuple[int, ...] = ()
    #: The seconds of all drafting.
    draft_s: float = 0.0
    #: The seconds of the target's batch, which `n_sequences` sequences share.
    target_s: float = 0.0
    #: The number of rows in that batch.
    n_rows: int = 0
    #: The tokens that the round added to the text.
    committed: tuple[int, ...] = ()
    #: What the drafters found and drafted, before it was cut.
    proposed: tuple[Draft, ...] = ()
    #: The number of sequences in the round.
    n_sequences: int = 1
    #: The seconds of the draft model's decodes, a part of `draft_s`.
    model_s: float = 0.0
    #: The rows of the pending tokens (the committed ones that the batch decodes), counted among the
    #: rows of the batch that have hidden states.
    pending_rows: range = range(1)
    #: The exception that a drafter raised.
    error: Exception | None = None
    #: How many of the `committed` tokens were the only ones that the grammar allowed. Those that
    #: were drafted count too, unlike in `FinishedEvent.n_forced`.
    n_without_choice: int = 0


class Policy(Protocol):
    """Decides for one sequence how much is drafted."""

    #: The maximum number of tokens that are drafted in any round.
    n_max: int

    def plan(self, offer: Offer) -> RoundPlan:
        """Return the plan of a round. It is called once per round."""

    def observe(self, result: RoundResult) -> None:
        """Learn from the result of the last plan."""


class FixedPolicy:
    """Drafts a fixed number of tokens, or fewer where the drafter becomes unsure.

    A draft that was found without a decode is preferred to that of the model.
    """

    #: The reason of its plans for a draft (`RoundPlan.reason`).
    _reason: ReasonName = "fixed"

    def __init__(self, options: DraftOptions) -> None:
        p_min = options.stops_below
        self.n_max = options.n_max
        self._is_tree = options.tree.is_fixed
        self._stop = StoppingRule(p_min, options.min_tokens, needs_confidence=p_min > 0.0)

    def plan(self, offer: Offer) -> RoundPlan:
        """Return a plan for what was found; if nothing was, for the model's draft."""
        n_max = min(self.n_max, offer.n_max)
        if n_max < 1:
            return RoundPlan("no room")
        found = self._stop.cut(offer.found.first(n_max))
        if len(found):
            return RoundPlan(self._reason, found=found, stop=self._stop, detail=self._detail)
        if offer.drafter is None:
            return RoundPlan("nothing found")
        n_levels_max = None
        if self._is_tree and offer.n_nodes_max is not None:
            n_max = min(self.n_max, offer.n_nodes_max)
            n_levels_max = offer.n_max  # the tokens left in the answer limit only the tree's levels
        return RoundPlan(
            self._reason,
            n_max,
            stop=self._stop,
            drafter=offer.drafter,
            detail=self._detail,
            n_levels_max=n_levels_max,
        )

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""

    @property
    def _detail(self) -> str:
        """The reason in words, if it is more specific than the text in `REASONS`."""
        return ""


class ThresholdPolicy(FixedPolicy):
    """Drafts while the product of the tokens' probabilities is above a bound.

    The bound is adapted so that in the long run a quarter of the drafted tokens is rejected (Mamou
    et al., arXiv:2405.04304).
    """

    _reason = "threshold"

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=_FIRST_BOUND, needs_confidence=True)

    def observe(self, result: RoundResult) -> None:
        """Raise the bound if more than a quarter was rejected, otherwise lower it."""
        n_drafted = len(result.draft)
        excess = -_UNDRAFTED_DEFICIT
        if n_drafted:
            excess = 1.0 - len(result.path) / n_drafted - _TARGET_REJECTION
        bound = self._stop.bound * math.exp(_BOUND_RATE * excess)
        self._stop = replace(self._stop, bound=min(_MAX_BOUND, max(_MIN_BOUND, bound)))

    @property
    def _detail(self) -> str:
        return f"a draft's probability must be at least {self._stop.bound:.2f}"


class CreditGate:
    """Decides whether a drafter may lose time, by its credit, which is counted in plain decodes.

    A drafter earns the time that its rounds save over plain decoding, and a small share of all
    time. It pays for rounds that take longer. So it is in one of three states:

    - in credit: it can pay for trials, which are drafts that are not expected to save time;
    - in debt: it drafts only if that is expected to save time;
    - put aside, if its debt exceeds `_MAX_DEBT`: it waits until its share of time has paid enough.

    The credit is stored with the drafter's counts. A new text begins without debt.
    """

    def __init__(self, counts: AcceptanceCounts) -> None:
        self._counts = counts

    @property
    def is_put_aside(self) -> bool:
        """Whether the drafter has to wait."""
        return self._counts.credit < -_MAX_DEBT

    def credit_s(self, plain_s: float) -> float:
        """Return the seconds that the drafter may lose, if a plain decode takes `plain_s`."""
        return self._counts.credit * plain_s

    def forgive_debt(self) -> None:
        """Begin another text, with no debt from earlier ones."""
        self._counts.credit = max(0.0, self._counts.credit)

    def settle(self, n_tokens: int, n_saved: float) -> None:
        """Settle a round of `n_tokens` tokens.

        Args:
            n_tokens: The tokens of the round; the drafter earns its share of the time for them.
            n_saved: The time that the drafter saved, in plain decodes; negative if it lost time.
        """
        credit = self._counts.credit + n_saved + _CREDIT_SHARE * n_tokens
        self._counts.credit = min(_MAX_CREDIT, credit)


class RecentRounds:
    """Averages over recent rounds of one text, and the time of all its rounds."""

    def __init__(self) -> None:
        #: The seconds of all rounds.
        self.elapsed_s = 0.0
        #: The average number of tokens per round.
        self.n_tokens = 1.0
        #: The average seconds per round; 0 before the first one.
        self._round_s = 0.0
        #: The number of rounds so far.
        self.n_rounds = 0

    def token_s(self, plain_s: float) -> float:
        """Return the average seconds per token; before the first round those of a plain decode."""
        return (self._round_s or plain_s) / self.n_tokens

    def add(self, round_s: float, n_tokens: int, plain_s: float) -> None:
        """Add a round. The averages start with plain decodes of `plain_s` seconds."""
        # Seconds and tokens are averaged separately: the mean of their ratios would be another
        # figure.
        self._round_s = self._round_s or plain_s
        self.n_rounds += 1
        self.elapsed_s += round_s
        rate = max(_RATE, 1.0 / (self.n_rounds + _N_PLAIN))
        self._round_s += rate * (round_s - self._round_s)
        self.n_tokens += rate * (n_tokens - self.n_tokens)


class CostAwarePolicy:
    """Drafts the tokens that are expected to save more time than they cost, if there are any.

    An accepted token saves the time that it would take otherwise: that of a plain decode, or less
    if recent rounds were faster. It costs draft steps and a row of the target's batch. The expected
    number of accepted tokens is the sum of the drafted tokens' cumulative acceptances (Leviathan et
    al., arXiv:2211.17192, section 3.4).

    Most learning is free: drafted tokens that were not worth verifying are compared with the text
    that follows.
    """

    def __init__(
        self,
        options: DraftOptions,
        costs: CostTable,
        acceptance_counts: MutableMapping[str, AcceptanceCounts] | None = None,
    ) -> None:
        """Begin a text.

        Args:
            options: The draft options.
            costs: The costs of the target's batches, which texts may share.
            acceptance_counts: How often tokens were accepted in all texts, by origin. Texts may
                share these counts, to which this one adds.
        """
        self.n_max = options.n_max
        self._p_min = options.stops_below
        self._n_min = options.min_tokens
        self._costs = costs
        self._acceptance_counts = {} if acceptance_counts is None else acceptance_counts
        #: The acceptance rates in this text, by origin.
        self._text_rates: dict[str, AcceptanceRates] = {}
        #: The values of the model's draft steps, at most a few rounds old; empty if they have to be
        #: computed.
        self._values: list[list[float]] = []
        #: The number of rounds since the last one without a draft.
        self._n_drafting_rounds = 0
        self._recent = RecentRounds()

    def plan(self, offer: Offer) -> RoundPlan:
        """Return the better of two plans: to verify what was found, or to let the model draft."""
        self._n_drafting_rounds += 1
        if not self._costs:
            return RoundPlan("costs unknown")
        if self._n_drafting_rounds > _MAX_DRAFTING_ROUNDS:
            return RoundPlan("plain decode")
        if min(self.n_max, offer.n_max) < 1:
            return RoundPlan("no room")
        # The sequence's share of a batch in which all sequences draft as much as this one.
        rows_s = [self._costs.seconds_each(n) for n in range(1, self.n_max + 2)]
        plain_s = self._plain_s
        stop = CostAwareStopping(
            origin=offer.drafter or "",
            rates_of=self.rates_of,
            token_s=min(plain_s / _MARGIN, self._recent.token_s(plain_s)),
            extra_s=[seconds - rows_s[0] for seconds in rows_s],
            next_s=offer.price.next_s,
            p_min=self._p_min,
            n_min=self._n_min,
        )
        found_plan = self._plan_found(offer.found, stop)
        if offer.drafter is None:
            return found_plan
        model_plan, gain_s = self._plan_model(offer, offer.drafter, stop)
        if len(found_plan.found) and stop.worth_of(found_plan.found) >= gain_s:
            return found_plan
        return model_plan

    def _plan_found(
        self,
        found: Draft,
        stop: CostAwareStopping,
    ) -> RoundPlan:
        """Plan to verify the best part of what was found. A plan without a draft tells why."""
        if not len(found):
            return RoundPlan("nothing found", stop=stop)
        rates = self.rates_of(found.origins[0])
        if CreditGate(rates.counts).is_put_aside:
            return RoundPlan("put aside", stop=stop)
        fastest = FastestRound(
            origin=stop.origin,
            rates_of=stop.rates_of,
            token_s=stop.token_s,
            extra_s=stop.extra_s,
            p_min=stop.p_min,
            n_min=stop.n_min,
            plain_s=self._costs.seconds_each(1),
        )
        best_part = fastest.cut(found)
        if not len(best_part):
            return RoundPlan("acceptance", stop=stop, detail=self._too_unlikely(found, stop))
        return RoundPlan("found", found=best_part, stop=fastest)

    def _plan_model(
        self,
        offer: Offer,
        drafter: str,
        stop: CostAwareStopping,
    ) -> tuple[RoundPlan, float]:
        """Return the plan for the drafter that decodes, and its expected gain in seconds.

        That of trials and of plans without a draft is `_NO_GAIN`.
        """
        price = offer.price
        rates = self.rates_of(drafter)
        if not self._values:
            self._values = draft_step_values(stop.extra_s, price.next_s, stop.token_s, rates)
        gate = CreditGate(rates.counts)
        if gate.is_put_aside:
            return RoundPlan("put aside", stop=stop), _NO_GAIN

        # 1. Draft if that should save time. A long prefill has to wait until the answer itself has
        #    taken some time.
        plan = RoundPlan(
            "model",
            n_max=min(self.n_max, offer.n_max),
            stop=replace(stop, values=self._values),
            drafter=drafter,
            prefill_s=price.prefill_s,
        )
        gain_s = self._expected_gain_s(price, offer.n_expected)
        # A free draft is made in any case; which part of it pays is decided once it is known.
        pays = gain_s > 0.0 or price == FREE
        max_prefill_s = max(_MAX_PREFILL * self._recent.elapsed_s, _SHORT_PREFILL * self._plain_s)
        if pays and price.prefill_s <= max_prefill_s:
            return plan, gain_s
        if not pays and self._can_never_pay(price, stop):
            detail = self._costs_of_a_guess(price, stop)
            return RoundPlan("row cost", stop=stop, detail=detail), _NO_GAIN

        # 2. Otherwise try a few tokens now and then, to learn whether it has become worthwhile.
        if self._affords_trials(offer, stop, gate):
            trial = replace(
                plan,
                reason="trial",
                n_max=min(plan.n_max, _TRIAL_TOKENS),
                # Drafts all of these tokens.
                stop=StoppingRule(n_min=self._n_min, needs_confidence=True),
            )
            return trial, _NO_GAIN

        # 3. Otherwise tell why not.
        if price.prefill_s > 0.0:
            detail = f"the draft must first prefill the text, which takes {price.prefill_s:.2f} s"
            return RoundPlan("prefill", stop=stop, detail=detail), _NO_GAIN
        detail = self._too_rarely(rates, price, stop)
        return RoundPlan("acceptance", stop=stop, detail=detail), _NO_GAIN

    def _expected_gain_s(self, price: Price, n_expected: int) -> float:
        """Return the seconds that a draft is expected to save.

        The cost of a prefill is spread over the expected number of rounds left in the answer.
        """
        n_rounds = max(1.0, n_expected / max(1.0, self._recent.n_tokens))
        # The value of the first draft step, at cumulative acceptance 1. It includes the cost
        # `next_s` of every step, but the first one costs `first_s`.
        gain_s = self._values[0][-1] + price.next_s - price.first_s
        return gain_s - price.prefill_s / n_rounds

    def _can_never_pay(
        self,
        price: Price,
        stop: CostAwareStopping,
    ) -> bool:
        """Return whether a draft would not save time even if all of it were accepted."""
        plain_s = self._plain_s
        return all(
            n * plain_s <= stop.extra_s[n] + price.seconds(n) for n in range(1, self.n_max + 1)
        )

    def _affords_trials(
        self,
        offer: Offer,
        stop: CostAwareStopping,
        gate: CreditGate,
    ) -> bool:
        """Return whether the drafter's credit and the answer's time suffice for a few trials."""
        price = offer.price
        plain_s = self._plain_s
        n_tokens = min(self.n_max, _TRIAL_TOKENS)
        trial_s = price.seconds(n_tokens) + stop.extra_s[n_tokens]
        trials_s = price.prefill_s + _N_TRIALS * trial_s
        answer_s = self._recent.elapsed_s + offer.n_expected * plain_s
        max_trials_s = min(
            gate.credit_s(plain_s),
            _MAX_TRIALS_SO_FAR * self._recent.elapsed_s,
            _MAX_TRIALS_SHARE * answer_s,
        )
        return trials_s <= max_trials_s

    def observe(self, result: RoundResult) -> None:
        """Learn what decodes cost and what is accepted, and settle the time that was saved."""
        plan = result.plan
        self._costs.observe(result.n_rows, result.target_s, result.n_sequences)
        if plan.drafter is not None:
            confidences = [draft.step_confidences for draft in result.proposed]
            self.rates_of(plan.drafter).count_steps(itertools.chain(*confidences))
        judge_drafts(self.rates_of, result.proposed, result.committed, len(result.path))
        if not len(result.draft):
            self._n_drafting_rounds = 0
        if self._costs:
            self._settle(result)

    def _settle(self, result: RoundResult) -> None:
        """Count the time of a round, and let its drafter earn what it saved or pay what it lost."""
        plan = result.plan
        plain_s = self._plain_s
        # Forced tokens count too, and so do accepted tokens after the end of the answer.
        n_tokens = max(1, len(result.committed), len(result.path) + 1)
        share = self._costs.share_of_batch(len(result.draft), result.n_rows)
        # A prefill is an investment in later rounds. Only a trial has to pay for it.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + result.target_s * share
        round_s = min(round_s, (n_tokens + _MAX_CREDIT) * plain_s)
        charged_s = round_s
        if plan.reason == "trial":
            charged_s += plan.prefill_s

        drafted_by = plan.drafter
        if drafted_by is None and len(plan.found):
            drafted_by = plan.found.origins[0]
        # All drafters get their share of time; the one that drafted settles the round. Plain
        # decoding would have got forced tokens without a decode.
        n_plain_decodes = max(1, n_tokens - result.n_without_choice)
        for origin, rates in self._text_rates.items():
            n_saved = n_plain_decodes - charged_s / plain_s if origin == drafted_by else 0.0
            CreditGate(rates.counts).settle(n_tokens, n_saved)

        self._recent.add(round_s, n_tokens, plain_s)
        if self._recent.n_rounds % _VALUES_LIFETIME == 0:
            self._values = []

    @property
    def _plain_s(self) -> float:
        """One sequence's share of the seconds of a plain decode, which rounds are compared with.

        Unlike `CostTable.seconds_each(1)`, it leaves out what a change of the batch's size costs
        with CUDA graphs (`GraphCostTable`).
        """
        return self._costs.seconds(self._costs.n_sharing) / self._costs.n_sharing

    def rates_of(
        self,
        origin: str,
        rank: int = 0,
    ) -> AcceptanceRates:
        """Return the acceptance rates, in this text, of tokens with `rank` better siblings.

        They share their counts with other texts.
        """
        name = f"{origin}:{min(rank, N_RANKS) + 1}" if rank else origin
        rates = self._text_rates.get(name)
        if rates is None:  # the first time in this text
            counts = self._acceptance_counts.setdefault(name, AcceptanceCounts())
            CreditGate(counts).forgive_debt()
            rates = AcceptanceRates(name, counts)
            self._text_rates[name] = rates
        return rates

    # --- reasons in words ------------------------------------------------------------------------

    def _too_unlikely(self, found: Draft, stop: CostAwareStopping) -> str:
        chance = max(stop.cumulative_acceptances(found))
        accepted = f"its likeliest token is accepted with a probability of {chance:.0%}"
        return f"{accepted}, and checking one costs {self._row_cost(stop)} of a token"

    def _too_rarely(
        self,
        rates: AcceptanceRates,
        price: Price,
        stop: CostAwareStopping,
    ) -> str:
        accepted = f"{rates.mean():.0%} of its tokens are expected to be accepted in this text"
        return f"{accepted}; {self._costs_of_a_guess(price, stop)}"

    def _costs_of_a_guess(self, price: Price, stop: CostAwareStopping) -> str:
        """Return what a guess costs, and what checking it costs, for a message."""
        guess = (price.seconds(2) - price.first_s) / self._plain_s
        return (
            f"a guess costs {guess:.2f} of a token of the target, "
            f"and checking it {self._row_cost(stop)}"
        )

    def _row_cost(self, stop: CostAwareStopping) -> str:
        """Return the cost of another row, in plain decodes, for a message."""
        # By noise, a batch of two may have been measured as faster than one row.
        return f"{max(0.0, stop.extra_s[1]) / self._plain_s:.2f}"
