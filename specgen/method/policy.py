"""How much is drafted: a policy makes a plan once a round, as a value, and drafters follow it without asking back.

`CostAwarePolicy` decides by costs and acceptance (`tables.py`); the others know none. A *look* is one reading of a
drafter's distribution for the next position; its *confidence* is the largest probability there.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specgen.events import REASONS, ReasonName
from specgen.method.draft import NO_DRAFT, ROOT, Draft
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
    origin_of_rank,
)

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
    """What is known when a round is planned: the tokens that the answer is expected to get still, the most that may
    be drafted now, what was found for nothing, the name and price of the drafter that decodes, and the other
    sequences."""

    n_left: int
    n_most: int
    found: Draft = NO_DRAFT
    drafter: str | None = None
    price: Price = FREE
    others: Others = ALONE


@dataclass(frozen=True, slots=True)
class Stop:
    """How far a draft goes: while its model gives a token at least `p_min` (llama.cpp's rule), and the product of all
    its tokens' probabilities is at least `bound`. Drafts of fewer than `n_min` tokens are not verified.

    `confidences` has one number for each look so far; the last one belongs to the token that is about to be drafted.
    So whether a token is drafted never depends on the token. `needs_confidence` says whether `wants_token` uses them,
    each of which costs a pass over the logits."""

    p_min: float = 0.0
    n_min: int = 0
    bound: float = 0.0
    needs_confidence: bool = False

    def wants_token(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft the token at the last look."""
        return confidences[-1] >= self.p_min and math.prod(confidences) >= self.bound

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        """Return whether another look, after all these tokens, is worth a decode of the drafter."""
        return True

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes of a finished draft that are worth verifying: the first tokens of a chain, or nodes of a
        tree, likeliest first. No token that was drawn at random is dropped, since that would bias the text."""
        if draft.is_drawn:
            return draft
        if draft.is_chain and self.bound > 0.0:
            known = (1.0 if each is None else each for each in draft.probabilities)
            products = itertools.accumulate(known, operator.mul)
            draft = draft.first(sum(product >= self.bound for product in products))
        return draft if len(draft) >= self.n_min else NO_DRAFT


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one sequence drafts in a round, and why.

    A round verifies either `found`, which a lookup found without a decode, or a draft of at most `n_max` tokens of
    `drafter`, as far as `stop` lets it go; if `extends` is set, lookups add tokens after those. `stop`
    cuts the finished draft. The first `n_given` tokens are drafted whatever `stop` says: a drafter of another
    vocabulary drafts them again. A parallel draft predicts `n_at_once` tokens in its one decode (None: `n_max`).
    `prefill_s` are the seconds of the drafter's prefill, an investment in later rounds.
    """

    reason: Reason
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: Stop = field(default_factory=Stop)
    extends: bool = False
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
        """Return the plan for a drafter that first drafts `n_given` tokens of the text again."""
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


#: The logarithms of the probabilities, that the draft so far is accepted whole, at which values are computed.
_LOG_GRID = np.linspace(math.log(0.01), 0.0, 20)
_LEAST_LOG, _STEP = float(_LOG_GRID[0]), float(_LOG_GRID[1] - _LOG_GRID[0])


class StoppingRule:
    """Optimal stopping: the value, in seconds saved, of going on with a draft of n tokens.

    `extra_s[n]` are the seconds that n drafted tokens add to the target's batch, `next_s` those of a look at the next
    token, and `token_s` what an accepted token is worth. `rates` say how often the next token falls in a bin of
    confidence, and how often a token of that bin is accepted.

    With A the probability that the draft so far is accepted whole, look, then take the token or not, then look again
    or not: V(n, A) = -next_s + the mean over bins b of max(0, A acceptance[b] token_s - (extra_s[n + 1] - extra_s[n])
    + max(0, V(n + 1, A acceptance[b]))), and V(n_max, A) = 0.
    """

    def __init__(
        self, extra_s: Sequence[float], next_s: float, token_s: float, rates: AcceptanceRates
    ) -> None:
        self._token_s = token_s
        self._rows_s: list[float] = np.diff(extra_s).tolist()
        frequencies = rates.frequencies()
        log_chances = np.add.outer(_LOG_GRID, np.log(rates.curve()))
        gains_s = token_s * np.exp(log_chances)
        self._values: list[list[float]] = [[0.0] * len(_LOG_GRID)]
        for row_s in reversed(self._rows_s):
            after_s = np.interp(log_chances, _LOG_GRID, np.maximum(self._values[0], 0.0))
            values = np.maximum(after_s + gains_s - row_s, 0.0) @ frequencies - next_s
            self._values.insert(0, values.tolist())

    def value(self, n_drafted: int, chance: float) -> float:
        """Return V, the expected gain of a look at the next token; below 0 the look does not pay."""
        values = self._values[n_drafted]
        place = (max(math.log(chance), _LEAST_LOG) - _LEAST_LOG) / _STEP if chance > 0.0 else 0.0
        index = min(int(place), len(values) - 2)
        return values[index] + (place - index) * (values[index + 1] - values[index])

    def is_worth(self, n_drafted: int, whole: float) -> bool:
        """Return whether to add a token to n others; `whole` is the probability that it and they are accepted."""
        gain_s = whole * self._token_s - self._rows_s[n_drafted]
        return gain_s + max(0.0, self.value(n_drafted + 1, whole)) > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhilePaying(Stop):
    """Drafts as long as another token is expected to save time. `rates` returns the acceptance rates of an origin. An
    expected token counts `token_s` seconds, one from n-grams `ngram_trust` times as much; n drafted tokens add
    `extra_s[n]` to the target's batch. A look of the drafter `origin` takes `next_s`; without a `rule` it drafts
    nothing.
    """

    origin: str
    rates: Callable[[str], AcceptanceRates]
    token_s: float
    extra_s: Sequence[float]
    rule: StoppingRule | None = None
    next_s: float = 0.0
    ngram_trust: float = 1.0
    needs_confidence: bool = True

    def wants_token(self, confidences: Sequence[float]) -> bool:
        if confidences[-1] < self.p_min or self.rule is None:
            return False
        return self.rule.is_worth(len(confidences) - 1, self._whole(confidences))

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        if self.rule is None:
            return False
        return self.rule.value(len(confidences), self._whole(confidences)) > 0.0

    def cut(self, draft: Draft) -> Draft:
        n, chances = draft.n_fixed, self.path_probabilities(draft)
        if draft.is_chain:
            return draft.first(max(n, _best_number(chances, self.token_s, self.extra_s)))
        extra_s = [seconds - self.extra_s[n] for seconds in self.extra_s[n:]]
        behind = best_nodes(chances[n:], self.token_s, extra_s)
        return draft.only([*range(n), *(n + node for node in behind)])

    def worth_of(self, draft: Draft) -> float:
        """Return the seconds that verifying a draft is expected to save."""
        chances = self.path_probabilities(draft)[: len(self.extra_s) - 1]
        return sum(chances) * self.token_s - self.extra_s[len(chances)]

    def chance(self, origin: str, confidence: float | None, rank: int = 0) -> float:
        """Return the probability that a token is accepted if all before it are; `rank` siblings are better."""
        rates = self.rates(origin_of_rank(origin, rank))
        return rates.chance(1.0 if confidence is None else confidence)

    def path_probabilities(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        probabilities: list[float] = []
        for parent, origin, rank, confidence in zip(
            draft.parents, draft.origins, draft.ranks(), draft.probabilities, strict=True
        ):
            chance = self.chance(origin, confidence, rank)
            probabilities.append(chance if parent == ROOT else chance * probabilities[parent])
        for node, origin in enumerate(draft.origins):
            if origin in NGRAM_ORIGINS:
                probabilities[node] *= self.ngram_trust
        return probabilities

    def _whole(self, confidences: Sequence[float]) -> float:
        rates = self.rates(self.origin)
        return math.prod(rates.chance(each) for each in confidences)


def best_nodes(
    path_probabilities: Sequence[float], token_s: float, extra_s: Sequence[float]
) -> list[int]:
    """Return the nodes of a tree that are worth most together, likeliest first. The probability that a path is
    accepted does not grow along it: the n likeliest nodes form a tree, the best one (Sequoia, arXiv:2402.12374)."""
    order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
    chances = [path_probabilities[node] for node in order]
    return order[: _best_number(chances, token_s, extra_s)]


def _best_number(chances: Sequence[float], token_s: float, extra_s: Sequence[float]) -> int:
    gains_s = itertools.accumulate(chances[: len(extra_s) - 1], initial=0.0)
    values_s = [gain * token_s - cost_s for gain, cost_s in zip(gains_s, extra_s, strict=False)]
    return max(range(len(values_s)), key=values_s.__getitem__)


#: After this many rounds without a plain decode one is made: its cost is what everything is compared with.
_MAX_STALE = 64
#: The expected gain of a draft must be this many times its cost: a cost is certain and a gain is not. A model says
#: how sure it is, and can be trusted more than n-grams.
_MARGIN, _NGRAM_MARGIN = 1.1, 1.5
#: The numbers of tokens that a parallel draft may predict in one decode.
_AT_ONCE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
#: A trial of a model that is not expected to pay drafts so many tokens. In plain tokens' time, trials may cost a
#: share of the generated tokens, so much at once.
_N_TRIED, _TRIAL_SHARE, _MOST_CREDIT = 3, 0.015, 32.0
#: How long an answer gets is a guess: a prefill may take at most so many times the answer's time so far, that of a
#: trial less, and must be expected to save more than it takes.
_MOST_AHEAD, _MOST_AHEAD_OF_TRIAL, _PREFILL_MARGIN = 2.0, 0.1, 1.5
#: A drafter waits while it has lost more than so many plain tokens and this share of the answer's time. What it saved
#: covers losses up to `_MOST_SAVED` tokens. A round loses at most `_MOST_LOST`: if it took longer, the machine stood
#: still.
_TOKENS_LOST, _SHARE_LOST, _MOST_SAVED, _MOST_LOST = 4.0, 0.01, 8.0, 8.0
#: The weight of a round in the averages over recent ones; at first all count equally, and a plain decode as four.
_RATE = 0.06
#: A stopping rule is computed again when a price has changed by this share of a token's worth, or after this many
#: looks and judged tokens.
_NEWS, _N_NEWS, _N_RULES = 0.05, 24, 64


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
        if (nothing := self._read_costs(offer)) is not None:
            return RoundPlan(nothing)
        drafter, price, n_max = offer.drafter, offer.price, min(self.n_max, offer.n_most)
        stop = WhilePaying(
            origin=drafter or NGRAM_ORIGINS[0],
            rates=self.acceptance_of,
            token_s=self._token_s,
            extra_s=self._extra_s,
            ngram_trust=self._ngram_trust,
            p_min=self._p_min,
        )
        found = stop.cut(offer.found)
        if len(found) and self._waits(found.origins[0]):
            found = NO_DRAFT
        plan = RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
        if drafter is None:
            return plan if len(found) else replace(plan, reason=self._why_not_found(offer.found))
        rule, value_s, n_at_once = self._expect(drafter, price, offer.n_left)
        why_not = self._why_not(drafter, price, value_s)
        if len(found) and (why_not is not None or stop.worth_of(found) >= value_s):
            return plan
        if why_not is None:
            return RoundPlan(
                Reason("model"),
                n_max,
                stop=replace(stop, rule=rule, next_s=price.next_s),
                extends=not self._waits(NGRAM_ORIGINS[0]),
                n_at_once=n_at_once,
                drafter=drafter,
                prefill_s=price.prefill_s,
            )
        if not self._may_try(drafter, price):
            return replace(plan, reason=why_not)
        trial = replace(plan, stop=Stop(needs_confidence=True), prefill_s=price.prefill_s)
        return replace(trial, reason=Reason("trial"), n_max=min(n_max, _N_TRIED))

    def observe(self, result: RoundResult) -> None:
        self._costs.observe(result.n_rows, result.target_s)
        self._learn_acceptance(result)
        plan, n_drafted, n_sequences = result.plan, len(result.draft), 1 + self._others.n_sequences
        if not n_drafted:
            self._n_stale = 0
        if not self._costs.knows(n_sequences):
            return
        plain_s = self._costs.seconds(n_sequences) / n_sequences
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

    def _read_costs(self, offer: Offer) -> Reason | None:
        """Take the costs of this round, or return why nothing can be drafted.

        With v the seconds of the target's batches: N sequences without drafts pay v(N) / N each, and a drafted token
        is a row more in a batch with B rows of others, and costs what that row adds.
        """
        self._n_stale += 1
        costs, self._others = self._costs, offer.others
        n_sequences, n_others = 1 + offer.others.n_sequences, offer.others.n_rows
        if not costs.knows(n_sequences):
            return Reason("costs unknown")
        if self._n_stale > _MAX_STALE:
            return Reason("plain decode")
        if min(self.n_max, offer.n_most) < 1:
            return Reason("no room")
        rows_s = [costs.seconds(n_others + n) for n in range(1, self.n_max + 2)]
        self._extra_s = [seconds - rows_s[0] for seconds in rows_s]
        self._plain_s = plain_s = costs.seconds(n_sequences) / n_sequences
        recent_s = self._round_s / self._round_tokens if self._n_rounds else plain_s
        self._token_s = min(plain_s / _MARGIN, recent_s)
        self._ngram_trust = min(plain_s / _NGRAM_MARGIN, recent_s) / self._token_s
        return None

    def _expect(
        self, origin: str, price: Price, n_left: int
    ) -> tuple[StoppingRule, float, int | None]:
        """Return a model's stopping rule, the seconds that a round with it is expected to save and, for a parallel
        draft, how many tokens its decode should predict."""
        rule, n_at_once = self._rule(origin, price, self.n_max), None
        value_s = rule.value(0, 1.0) + price.next_s - price.first_s
        if price.at_once_s:
            # How sure the draft is is known only once all its tokens are predicted. So the rule is solved for each
            # number of tokens, with free looks, and the decode is subtracted.
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

    def _why_not_found(self, found: Draft) -> Reason:
        if not len(found):
            return Reason("nothing found")
        origin = found.origins[0]
        return Reason("put aside") if self._waits(origin) else self._too_rarely(origin)

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
        """Return the stopping rule of a drafter for drafts of at most `n_most` tokens, perhaps computed before for
        about these prices and acceptance rates."""
        rates, unit_s = self.acceptance_of(origin), _NEWS * self._plain_s
        prices = [round(s / unit_s) for s in (price.next_s, self._token_s, self._extra_s[1])]
        key = (origin, n_most, rates.version // _N_NEWS, *prices)
        if key not in self._rules:
            if len(self._rules) >= _N_RULES:
                self._rules.clear()
            extra_s = self._extra_s[: n_most + 1]
            self._rules[key] = StoppingRule(extra_s, price.next_s, self._token_s, rates)
        return self._rules[key]
