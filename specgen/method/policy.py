"""How much is drafted: a policy makes a plan once a round, as a value, and drafters follow it without asking back.

`CostAwarePolicy` decides by costs and acceptance (`tables.py`); the others know none. A *look* is one reading of a
drafter's distribution for the next position; its *confidence* is the largest probability there. A look may end the
draft without adding a token.
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
    BatchShare,
    CostTable,
    Others,
    Price,
    judge_drafts,
    judge_draws,
    origin_of_rank,
)
from specgen.system.arrays import ProbArray

if TYPE_CHECKING:
    from specgen.options import DraftOptions

# --- plans ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a round drafts what it drafts. `text` is the reason with its numbers."""

    name: ReasonName
    text: str = ""

    def __str__(self) -> str:
        return self.text or REASONS[self.name]


@dataclass(frozen=True, slots=True)
class Offer:
    """What is known when a round is planned: the tokens that the answer is expected to get still, the most that may be
    drafted now, what the drafter that costs nothing has found, the name and price of the one that decodes, and the
    other sequences in the target's batch."""

    n_left: int
    n_most: int
    found: Draft = NO_DRAFT
    drafter: str | None = None
    price: Price = FREE
    others: Others = ALONE


class Stop(Protocol):
    """How far a draft goes. Its answers depend only on what the drafter has seen in this round.

    `confidences` has one number for each look so far; the last one belongs to the token that is about to be
    drafted. It is known before a token is drawn, so whether a token is drafted never depends on the token.
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
        """Return the nodes of a finished draft that are worth verifying: the first tokens of a chain, or nodes of a
        tree, likeliest first. No token that was drawn at random is dropped."""
        ...


@dataclass(frozen=True, slots=True)
class UntilUnsure:
    """A draft goes on while its model gives a token at least `p_min` (llama.cpp's rule), and the product of all its
    tokens' probabilities is at least `bound`. Drafts of fewer than `n_min` tokens are not verified."""

    p_min: float = 0.0
    n_min: int = 0
    bound: float = 0.0
    needs_confidence: bool = False

    def wants_token(self, confidences: Sequence[float]) -> bool:
        return confidences[-1] >= self.p_min and math.prod(confidences) >= self.bound

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        return True

    def cut(self, draft: Draft) -> Draft:
        if draft.is_drawn:  # a drawn token is not dropped because of what it is
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
    `drafter`, as far as `stop` lets it go; if `extends` is set, lookups add tokens after or beside those. `stop`
    cuts the finished draft. The first `n_given` tokens are drafted whatever `stop` says: a drafter of another
    vocabulary drafts them again. A parallel draft predicts `n_at_once` tokens in its one decode (None: `n_max`).
    Policies also learn from `prefill_s`, the seconds of the drafter's prefill: an investment in later rounds.
    """

    reason: Reason
    n_max: int = 0
    found: Draft = NO_DRAFT
    stop: Stop = field(default_factory=UntilUnsure)
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
    return RoundPlan(Reason("fixed"), n_max, stop=UntilUnsure(needs_confidence=needs_confidence))


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round for one sequence, from which policies and drafters learn: the verified draft and its
    accepted nodes; the seconds of this sequence's drafting; seconds and rows of the target's batch, those of other
    sequences included; the tokens that the round added to the text; and all that was drafted and found, before it was
    cut, since the text shows which of it was right."""

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


# --- policies that know no costs --------------------------------------------------------------


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure. Of several drafters, the first one that has a
    draft is used."""

    def __init__(self, options: DraftOptions) -> None:
        self.n_max = options.n_max
        p_min = options.stops_below
        self._stop = UntilUnsure(p_min, options.min_tokens, needs_confidence=p_min > 0.0)

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
    """Drafts while the product of the tokens' probabilities stays above a bound, which adapts.

    The product is the model's own estimate of the probability that the whole draft is accepted. The bound moves so
    that, in the long run, a quarter of the drafted tokens is rejected. (A confidence bound that follows the
    accepted share: Mamou et al., arXiv:2405.04304.)
    """

    _REJECTED = 0.25
    #: How far the bound moves in a round, in log-probability for each unit of difference to that share.
    _RATE = 0.4
    _START, _LEAST, _MOST = 0.3, 0.01, 0.9

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._stop = replace(self._stop, bound=self._START, needs_confidence=True)

    @property
    def bound(self) -> float:
        return self._stop.bound

    def observe(self, result: RoundResult) -> None:
        # If nothing was sure enough, the bound falls slowly, since nothing is learnt without drafts.
        difference = -0.1 * self._REJECTED
        if n_drafted := len(result.draft):
            difference = 1.0 - len(result.path) / n_drafted - self._REJECTED
        bound = self.bound * math.exp(self._RATE * difference)
        self._stop = replace(self._stop, bound=min(self._MOST, max(self._LEAST, bound)))


# --- how far a draft goes while it is expected to save time -----------------------------------

#: The probabilities that the draft so far is accepted whole, at which a rule's values are computed.
_N_GRID = 20
_LEAST = 0.01
_LOG_GRID = np.linspace(math.log(_LEAST), 0.0, _N_GRID)
_STEP = -math.log(_LEAST) / (_N_GRID - 1)


class StoppingRule:
    """Optimal stopping: the value, in seconds saved, of going on with a draft of n tokens.

    `extra_s[n]` are the seconds that n drafted tokens add to the target's batch, `next_s` those of a look at the
    next token, and `token_s` what an accepted token is worth. `frequencies` and `acceptance`, float64[n_bins], are
    how often the next token falls in a bin of confidence, and how often a token of that bin is accepted.

    With A the probability that the draft so far is accepted whole, V(n, A) = -next_s + the mean over bins b of
    max(0, A acceptance[b] token_s - (extra_s[n + 1] - extra_s[n]) + max(0, V(n + 1, A acceptance[b]))), and
    V(n_max, A) = 0. That is: look, then take the token or not, then look again or not.
    """

    def __init__(
        self,
        extra_s: Sequence[float],
        next_s: float,
        token_s: float,
        frequencies: ProbArray,
        acceptance: ProbArray,
    ) -> None:
        self.n_max = len(extra_s) - 1
        self._token_s, self._rows_s = token_s, np.diff(extra_s).tolist()
        log_chances = np.add.outer(_LOG_GRID, np.log(acceptance))
        gains_s = token_s * np.exp(log_chances)
        #: V(n, A) by n; lists, since single numbers are read.
        self._values: list[list[float]] = [[0.0] * _N_GRID]
        for row_s in reversed(self._rows_s):
            after_s = np.interp(log_chances, _LOG_GRID, np.maximum(self._values[0], 0.0))
            values = np.maximum(after_s + gains_s - row_s, 0.0) @ frequencies - next_s
            self._values.insert(0, values.tolist())

    def value(self, n_drafted: int, chance: float) -> float:
        """Return the expected gain V of a look at the next token, in seconds; below 0 the look does not pay."""
        if n_drafted >= self.n_max:
            return 0.0
        values = self._values[n_drafted]
        place = math.log(max(chance, _LEAST) / _LEAST) / _STEP
        index = min(int(place), _N_GRID - 2)
        return values[index] + (place - index) * (values[index + 1] - values[index])

    def takes(self, n_drafted: int, chance: float) -> float:
        """Return the expected gain, in seconds, of taking one more token, with which the draft's probability is
        `chance`."""
        if n_drafted >= self.n_max:
            return -1.0
        gain_s: float = chance * self._token_s - self._rows_s[n_drafted]
        return gain_s + max(0.0, self.value(n_drafted + 1, chance))


@dataclass(frozen=True, slots=True)
class WhilePaying:
    """Drafts as long as another token is expected to save time.

    `rates` returns the acceptance rates of an origin. An expected token counts `token_s` seconds, and `extra_s[n]` are the seconds that n drafted tokens
    add to the target's batch. A look of the drafter `origin` takes `next_s` seconds; without a `rule` it drafts
    nothing.
    """

    origin: str
    rates: Callable[[str], AcceptanceRates]
    token_s: float
    extra_s: Sequence[float]
    rule: StoppingRule | None = None
    next_s: float = 0.0
    p_min: float = 0.0
    needs_confidence: bool = True

    def worth_of(self, draft: Draft) -> float:
        """Return the expected gain of verifying a draft, in seconds; 0 for none."""
        chances = self.path_probabilities(draft)[: len(self.extra_s) - 1]
        return sum(chances) * self.token_s - self.extra_s[len(chances)]

    def chance(self, origin: str, confidence: float | None, rank: int = 0) -> float:
        """Return the probability that a token is accepted if all before it are; `rank` siblings are better."""
        confidence = 1.0 if confidence is None else confidence
        return self.rates(origin_of_rank(origin, rank)).chance(confidence)

    def wants_token(self, confidences: Sequence[float]) -> bool:
        if confidences[-1] < self.p_min or self.rule is None:
            return False
        return self.rule.takes(len(confidences) - 1, self._path_probability(confidences)) > 0.0

    def wants_decode(self, confidences: Sequence[float]) -> bool:
        if self.rule is None:
            return False
        return self.rule.value(len(confidences), self._path_probability(confidences)) > 0.0

    def cut(self, draft: Draft) -> Draft:
        """Return the nodes worth verifying, those of a tree likeliest first. Drawn nodes, and all before them, are
        never dropped, since that would bias the text."""
        n, chances = draft.n_fixed, self.path_probabilities(draft)
        if draft.is_chain:
            return draft.first(max(n, _best_number(chances, self.token_s, self.extra_s)))
        extra_s = [seconds - self.extra_s[n] for seconds in self.extra_s[n:]]
        behind = best_nodes(chances[n:], self.token_s, extra_s)
        return draft.only([*range(n), *(n + node for node in behind)])

    def path_probabilities(self, draft: Draft) -> list[float]:
        """Return, for each node of a draft, the probability that it and its ancestors are accepted."""
        probabilities: list[float] = []
        for parent, origin, rank, confidence in zip(
            draft.parents, draft.origins, draft.ranks(), draft.probabilities, strict=True
        ):
            chance = self.chance(origin, confidence, rank)
            probabilities.append(chance if parent == ROOT else chance * probabilities[parent])
        return probabilities

    def _path_probability(self, confidences: Sequence[float]) -> float:
        """Return the probability that tokens with these confidences are accepted."""
        rates = self.rates(self.origin)
        return math.prod(rates.chance(each) for each in confidences)


def best_nodes(
    path_probabilities: Sequence[float], token_s: float, extra_s: Sequence[float]
) -> list[int]:
    """Return the nodes of a tree that are worth most together, likeliest first.

    The probability that a path is accepted does not grow along it. So the n likeliest nodes always form a tree,
    and it is the best tree of n nodes (Sequoia, arXiv:2402.12374). `path_probabilities` lists parents before their
    children; `extra_s[n]` are the seconds to verify n nodes.
    """
    order = sorted(range(len(path_probabilities)), key=path_probabilities.__getitem__, reverse=True)
    chances = [path_probabilities[node] for node in order]
    return order[: _best_number(chances, token_s, extra_s)]


def _best_number(chances: Sequence[float], token_s: float, extra_s: Sequence[float]) -> int:
    """Return how many of the first nodes, accepted with these probabilities, are worth most together."""
    gains_s = itertools.accumulate(chances[: len(extra_s) - 1], initial=0.0)
    values_s = [gain * token_s - cost_s for gain, cost_s in zip(gains_s, extra_s, strict=False)]
    return max(range(len(values_s)), key=values_s.__getitem__, default=0)


# --- the policy by costs ----------------------------------------------------------------------

#: After this many rounds without a plain decode one is made: its cost is what everything is compared with.
_MAX_STALE = 64
#: The expected gain of a draft must be this many times its cost: a cost is certain and a gain is not.
_MARGIN = 1.2
#: The numbers of tokens that a parallel draft may predict in one decode.
_AT_ONCE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
#: A trial of a model that is not expected to pay drafts so many tokens, and reads the text first only if so many
#: trials may follow.
_N_TRIED_TOKENS = 3
_N_TRIALS = 3
#: The prefill of a draft may take at most this many times the time that the answer took so far, that of a trial less:
#: how long the answer gets is a guess.
_MOST_AHEAD = 2.0
_MOST_AHEAD_OF_TRIAL = 0.1
#: What a draft is expected to save in the rest of the answer must be this many times its prefill.
_PREFILL_MARGIN = 1.5
#: A round loses at most so many plain tokens: where it took longer, the machine stood still for a moment.
_MOST_LOST_TOKENS = 8.0
#: A stopping rule is computed again when a price has changed by this share of a token's worth, or after this many
#: looks and judged tokens.
_NEWS = 0.05
_N_NEWS = 24
_N_RULES = 64


class Pace:
    """Averages over the recent rounds of an answer: seconds a token, and tokens a round."""

    #: The weight of a new round once there were many; at first all count equally, and plain decoding as `_N_BEFORE`.
    _RATE = 0.06
    _N_BEFORE = 4.0

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        #: None before the first round.
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


class Gate:
    """Keeps the drafters of one answer from losing more time than they may, whatever is expected of them.

    A drafter that lost more than `_SHARE` of the answer's time and `_TOKENS` plain tokens waits for `_N_ROUNDS`
    rounds, and for twice as many each time. What it saved covers losses up to `_MOST_SAVED` tokens.
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
    """Drafts the tokens that are expected to save more time than they cost; that may be none.

    A token that a round adds is worth the time that it would take otherwise: that of a plain decode, or less if
    recent rounds were faster. Its cost is the drafter's decodes and the larger batch of the target. The number of
    tokens that a draft adds is the sum, over its tokens, of the probability that the token and all before it are
    accepted. A draft that is known as a whole is cut where its value is highest. A model drafts token by token,
    by a `StoppingRule`, which also predicts what the model is worth before it runs. (The rule for a fixed length
    is Leviathan et al.'s, arXiv:2211.17192, section 3.4.)

    Most learning is free: tokens that were not worth verifying are compared with the text that follows. Only trials
    of a model that is not expected to pay cost time. A drafter that loses time against expectation waits (`Gate`).

    A policy decides for one text. `costs` is the target's table, to which observed times are added. `acceptance`
    is by origin; its counts cover all texts and may be shared with other policies.
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
        self._share = BatchShare(costs)
        #: The acceptance probabilities from all texts, and those in this text; by origin.
        self._known = {} if acceptance is None else acceptance
        self._acceptance: dict[str, AcceptanceRates] = {}
        self._rules: dict[tuple[object, ...], StoppingRule] = {}
        self._pace = Pace()
        self._gate = Gate()
        self._n_stale = 0
        #: In this round: the seconds of a plain decode, those that n drafted tokens add to it, a token's worth.
        self._plain_s = self._token_s = 0.0
        self._extra_s = [0.0]

    def plan(self, offer: Offer) -> RoundPlan:
        self._gate.begin_round()
        self._n_stale += 1
        if (reason := self._read_costs(offer)) is not None:
            return RoundPlan(reason)
        drafter, price = offer.drafter, offer.price
        stop = WhilePaying(
            drafter or NGRAM_ORIGINS[0],
            self.acceptance_of,
            self._token_s,
            self._extra_s,
            p_min=self._p_min,
        )
        found = stop.cut(offer.found)
        if len(found) and self._gate.is_put_aside(found.origins[0]):
            found = NO_DRAFT
        plan = RoundPlan(Reason("found"), found=found, stop=stop, drafter=drafter)
        if drafter is None:
            return plan if len(found) else replace(plan, reason=self._why_not_found(offer.found))
        rule, value_s, n_at_once = self._expect(drafter, price, offer.n_left)
        why_not = self._why_not(drafter, price, value_s)
        if len(found) and (why_not is not None or stop.worth_of(found) >= value_s):
            return plan
        if why_not is None:
            return replace(
                plan,
                reason=Reason("model"),
                found=NO_DRAFT,
                n_max=min(self.n_max, offer.n_most),
                stop=replace(stop, rule=rule, next_s=price.next_s),
                extends=not self._gate.is_put_aside(NGRAM_ORIGINS[0]),
                n_at_once=n_at_once,
                prefill_s=price.prefill_s,
            )
        if why_not.name != "put aside" and self._may_try(drafter, price):
            return RoundPlan(
                Reason("trial"),
                min(self.n_max, offer.n_most, _N_TRIED_TOKENS),
                stop=UntilUnsure(needs_confidence=True),
                drafter=drafter,
                prefill_s=price.prefill_s,
            )
        return replace(plan, reason=why_not)

    def observe(self, result: RoundResult) -> None:
        self._table.observe(result.n_rows, result.target_s)
        plan, draft = result.plan, result.draft
        if not len(draft):
            self._n_stale = 0
        self._learn_acceptance(result)
        if not self._share.is_known:
            return
        plain_s = self._share.seconds(1)
        n_committed = max(1, len(result.committed), len(result.path) + 1)
        target_s = result.target_s * self._share.of_batch(1 + len(draft), result.n_rows)
        # Prefill is an investment in later rounds, and is not charged to this one.
        round_s = max(0.0, result.draft_s - plan.prefill_s) + target_s
        round_s = min(round_s, (n_committed + _MOST_LOST_TOKENS) * plain_s)
        saved_s = n_committed * plain_s - round_s
        self._pace.add(round_s, n_committed, plain_s)
        if plan.origin is not None and (len(draft) or plan.n_max):
            self._gate.add(plan.origin, saved_s, plain_s, self._pace.elapsed_s)
        if plan.drafter is not None:
            tried_s = saved_s - plan.prefill_s if plan.reason.name == "trial" else 0.0
            self.acceptance_of(plan.drafter).counts.account(n_committed, tried_s / plain_s)

    # --- the steps of a plan ----------------------------------------------------------------

    def _read_costs(self, offer: Offer) -> Reason | None:
        """Take the costs of this round, or return why nothing can be drafted."""
        self._share = share = BatchShare(self._table, offer.others)
        if not share.is_known:
            return Reason("costs unknown")
        if self._n_stale > _MAX_STALE:
            return Reason("plain decode")
        if min(self.n_max, offer.n_most) < 1:
            return Reason("no room")
        rows_s = [share.seconds(n) for n in range(1, self.n_max + 2)]
        self._plain_s = plain_s = rows_s[0]
        self._extra_s = [seconds - plain_s for seconds in rows_s]
        recent_s = plain_s if self._pace.token_s is None else self._pace.token_s
        self._token_s = min(plain_s / _MARGIN, recent_s)
        return None

    def _expect(
        self, origin: str, price: Price, n_left: int
    ) -> tuple[StoppingRule, float, int | None]:
        """Return a model's stopping rule, the seconds that a round with it is expected to save and, for a parallel
        draft, how many tokens its decode should predict."""
        rule, n_at_once = self._rule(origin, price, self.n_max), None
        value_s = rule.value(0, 1.0) + price.next_s - price.first_s
        if price.at_once_s:
            # How sure the draft is is known only once all its tokens are predicted. So the rule is solved for
            # each number of tokens, with free looks, and the decode is subtracted.
            n_most = min(self.n_max, len(price.at_once_s))
            value_s, n_at_once = max(
                (self._rule(origin, price, n).value(0, 1.0) - price.seconds(n), n)
                for n in _AT_ONCE
                if n <= n_most
            )
        # The prefill is spread over a cautious estimate of the rounds that the answer still takes.
        n_rounds = 0.75 * max(1.0, n_left / max(1.0, self._pace.tokens_a_round))
        return rule, value_s - _PREFILL_MARGIN * price.prefill_s / n_rounds, n_at_once

    def _why_not(self, origin: str, price: Price, value_s: float) -> Reason | None:
        """Return why not to start a model that is expected to gain `value_s` a round; None if it should start."""
        if price == FREE:  # its draft is judged once it is known
            return None
        if self._gate.is_put_aside(origin):
            return Reason("put aside")
        if value_s <= 0.0 and self._ideal_s(price) <= 0.0:
            guess_s = price.seconds(2) - price.first_s
            guess, row = guess_s / self._plain_s, self._extra_s[1] / self._plain_s
            text = f"a guess costs {guess:.2f} of a token of the target, and checking it {row:.2f}"
            return Reason("row cost", text)
        is_too_soon = price.prefill_s > _MOST_AHEAD * self._pace.elapsed_s
        if is_too_soon or (price.prefill_s and value_s <= 0.0):
            return Reason("prefill", f"the draft must first read the text, {price.prefill_s:.1f} s")
        return self._too_rarely(origin) if value_s <= 0.0 else None

    def _why_not_found(self, found: Draft) -> Reason:
        if not len(found):
            return Reason("nothing found")
        if self._gate.is_put_aside(found.origins[0]):
            return Reason("put aside")
        return self._too_rarely(found.origins[0])

    def _too_rarely(self, origin: str) -> Reason:
        rate, row = self.acceptance_of(origin).mean(), self._extra_s[1] / self._plain_s
        return Reason(
            "acceptance",
            f"{rate:.0%} of its tokens are expected to be accepted in this text, and checking one costs "
            f"{row:.2f} of a token",
        )

    def _may_try(self, origin: str, price: Price) -> bool:
        """Return whether to try a model that is not expected to pay, to learn whether that is still so."""
        n = min(_N_TRIED_TOKENS, self.n_max)
        cost_s = price.seconds(n) + self._extra_s[n]
        if price.prefill_s:
            cost_s = price.prefill_s + _N_TRIALS * cost_s
        credit_s = self.acceptance_of(origin).counts.trial_credit * self._plain_s
        most_s = min(credit_s, _MOST_AHEAD_OF_TRIAL * self._pace.elapsed_s)
        return cost_s <= most_s and self._ideal_s(price) > 0.0

    def _ideal_s(self, price: Price) -> float:
        """Return the seconds that a round would save with a draft of the best length, all accepted."""
        lengths = range(1, self.n_max + 1)
        return max(n * self._plain_s - self._extra_s[n] - price.seconds(n) for n in lengths)

    # --- acceptance -------------------------------------------------------------------------

    def _learn_acceptance(self, result: RoundResult) -> None:
        draft = result.draft
        if result.plan.drafter is not None:
            seen = self.acceptance_of(result.plan.drafter)
            for confidence in itertools.chain(*(each.looks for each in result.proposed)):
                seen.see(confidence)
        if draft.is_drawn and draft.is_chain:
            judge_draws(self.acceptance_of, draft, len(result.path))
        judge_drafts(self.acceptance_of, result.proposed, result.committed)

    def acceptance_of(self, origin: str) -> AcceptanceRates:
        """Return the acceptance rates of a drafter's tokens in this text."""
        acceptance = self._acceptance.get(origin)
        if acceptance is None:
            known = self._known.setdefault(origin, AcceptanceRates(origin))
            acceptance = self._acceptance[origin] = AcceptanceRates(origin, known.counts)
        return acceptance

    def _rule(self, origin: str, price: Price, n_most: int) -> StoppingRule:
        """Return the stopping rule of a drafter for drafts of at most `n_most` tokens: the one that was computed for
        about these prices and acceptance rates, if there is one."""
        acceptance, unit_s = self.acceptance_of(origin), _NEWS * self._plain_s
        prices = [round(s / unit_s) for s in (price.next_s, self._token_s, self._extra_s[1])]
        key = (origin, n_most, acceptance.version // _N_NEWS, *prices)
        rule = self._rules.get(key)
        if rule is None:
            if len(self._rules) >= _N_RULES:
                self._rules.clear()
            extra_s, curve = self._extra_s[: n_most + 1], np.array(acceptance.curve())
            frequencies = acceptance.frequencies()
            rule = StoppingRule(extra_s, price.next_s, self._token_s, frequencies, curve)
            self._rules[key] = rule
        return rule
