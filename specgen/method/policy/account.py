"""The account of one answer: the time of its rounds, what drafting saved or lost, and what prefill may cost."""

from __future__ import annotations

import math

from specgen.method.acceptance import NGRAM_ORIGINS, TextWorths
from specgen.method.cost_table import Price

#: The weight of a new round in the averages, once there were many.
_RATE = 0.06
#: At first, and after a draft model starts, the rounds since then count equally, and all before as this
#: many of them. An answer has few rounds, and an average that follows slowly overestimates the time of a
#: token, so that drafts are too long. (Replays of 24 answers with four cost tables: without it 0.8 to 1.7 %
#: slower with three of them; without the average at all 2.4 to 3.2 %.)
_N_BEFORE = 4.0
#: A drafter is put aside if it lost more than this share of the time so far plus the time of this
#: many plain tokens: for this many rounds at first, and for twice as many each time.
_MAX_LOSS = 0.01
_MAX_LOST_TOKENS = 4.0
_N_ROUNDS_ASIDE = 16
#: What a drafter saved covers new losses up to this many plain tokens.
_MOST_SAVED_TOKENS = 8.0
#: The share of an answer's time that may be spent on trials of a drafter that is not expected to pay, of
#: `N_TRIED_TOKENS` tokens each. (Without trials, a simulated text that suits its draft again after 1,000 tokens
#: that did not takes a quarter longer.)
_TRIAL_SHARE = 0.01
N_TRIED_TOKENS = 3
#: The prefill of a draft may take at most this share of the time that the answer took so far, so that an
#: answer that ends soon loses no more; and this share for a proven drafter: one that paid in nearly every
#: text, in at least `_N_PROVEN` texts. (Replays of 24 answers with four cost tables: with 0.35 for all 2 to
#: 3 % slower with three of them, with 1 for all 3.4 % slower for an F16 target.)
_MOST_AHEAD = 0.35
_MOST_AHEAD_IF_PROVEN = 2.0
_N_PROVEN = 2.0
#: The share of the remaining rounds over which prefill is spread: the answer may end earlier, or suit the
#: draft less. (The same replays with 1: 0.8 to 1.5 % slower with three tables.)
_CAUTION = 0.75
#: The standard deviation of a text's worth as estimated by a single look, in plain tokens' time.
_NOISE = 1.0
#: The rounds that it takes to see that a model does not pay in a text, and the rounds that have to make up
#: for such a try. (In simulated worlds, without them a model that is always wrong costs 5 % and more.)
_N_TRIED = 4.0
_N_NEAR = 6.0


class Account:
    """Averages over an answer's recent rounds, and what each drafter saved or lost in them.

    A policy's expectations can be wrong, for a text or because the machine's speed has changed.
    The account shows this.
    """

    def __init__(self) -> None:
        #: Seconds of the rounds so far; recent seconds a token (None before the first round) and tokens a
        #: round; the share of rounds that n-grams leave to a model.
        self.elapsed_s = 0.0
        self.token_s: float | None = None
        self.tokens_a_round = 1.0
        self.left_by_ngrams = 1.0
        self._n_rounds = 0
        self._has_model_begun = False
        self._tried_s = 0.0
        self._saved_s: dict[str, float] = {}
        self._aside: dict[str, int] = {}
        self._n_aside: dict[str, int] = {}

    def begin_round(self) -> None:
        """Begin a round: drafters that are put aside wait one round less."""
        self._aside = {origin: n - 1 for origin, n in self._aside.items() if n > 1}

    def is_put_aside(self, origin: str) -> bool:
        """Return whether a drafter waits since it lost too much."""
        return origin in self._aside

    def allows_trial(self, cost_s: float) -> bool:
        """Return whether a trial that may cost `cost_s` seconds is allowed now."""
        return self._tried_s + cost_s <= _TRIAL_SHARE * self.elapsed_s

    def n_rounds_left(self, n_left: int) -> float:
        """Return a cautious estimate of the rounds for `n_left` tokens."""
        return _CAUTION * max(1.0, n_left / max(1.0, self.tokens_a_round))

    def observe(
        self,
        origin: str | None,
        round_s: float,
        n_committed: int,
        plain_s: float,
        *,
        is_trial: bool = False,
    ) -> None:
        """Enter a round that took `round_s` seconds and added `n_committed` tokens. `origin` is the drafter
        that it is accounted to, None if nothing was drafted; a plain decode takes `plain_s`."""
        self.elapsed_s += round_s
        self._average(origin, round_s, n_committed, plain_s)
        if origin is None:
            return
        saved_s = n_committed * plain_s - round_s
        if is_trial:
            self._tried_s += max(0.0, -saved_s)
            return
        saved_s += self._saved_s.get(origin, 0.0)
        # Savings are capped, so that old ones do not cover new losses for ever.
        saved_s = min(saved_s, _MOST_SAVED_TOKENS * plain_s)
        if saved_s < -_MAX_LOST_TOKENS * plain_s - _MAX_LOSS * self.elapsed_s:
            n_rounds = self._n_aside.get(origin, _N_ROUNDS_ASIDE)
            self._aside[origin] = n_rounds
            self._n_aside[origin] = 2 * n_rounds
            saved_s = 0.0
        self._saved_s[origin] = saved_s

    def _average(
        self, origin: str | None, round_s: float, n_committed: int, plain_s: float
    ) -> None:
        by_ngrams = origin in NGRAM_ORIGINS
        if origin is not None and not by_ngrams and not self._has_model_begun:
            self._has_model_begun, self._n_rounds = True, 0
        self._n_rounds += 1
        rate = max(_RATE, 1.0 / (self._n_rounds + _N_BEFORE))
        # Seconds and tokens are averaged separately: the mean of their ratios would be a different figure.
        mean_round_s = (plain_s if self.token_s is None else self.token_s) * self.tokens_a_round
        mean_round_s += rate * (round_s - mean_round_s)
        self.tokens_a_round += rate * (n_committed - self.tokens_a_round)
        self.token_s = mean_round_s / self.tokens_a_round
        self.left_by_ngrams += rate * ((not by_ngrams) - self.left_by_ngrams)


def prefill_limit_s(price: Price, worths: TextWorths, plain_s: float, elapsed_s: float) -> float:
    """Return the most seconds that a draft's prefill may take now: what may be lost on the drafter, and a
    share of the answer's time so far."""
    mean, deviation = worths.of_next(price.first_s / plain_s)
    is_proven = worths.n >= _N_PROVEN and mean > deviation
    most_ahead = _MOST_AHEAD_IF_PROVEN if is_proven else _MOST_AHEAD
    return max(0.0, min(worths.allowance * plain_s, most_ahead * elapsed_s))


def worth_of_starting(
    value_s: float,
    price: Price,
    worths: TextWorths,
    n_looks: int,
    *,
    plain_s: float,
    n_rounds: float,
) -> float:
    """Return the expected gain of starting a draft model in a text, in seconds a round; above 0 it should
    start.

    After `n_looks` of the model in this text, a round with it seems to be worth `value_s`. A few
    looks are an unsure estimate, so it is averaged with the worth of earlier texts, whose spread
    shows how far this text may be from it. A model that does not pay shows this soon, and stops
    again. So the gain of starting is the mean of the positive part of the worth. It has to make up for
    the prefill and for a try that fails. A plain decode takes `plain_s`; about `n_rounds` are left.
    """
    mean, deviation = worths.of_next(price.first_s / plain_s)
    unknown = 1.0 / (1.0 + n_looks * (deviation / _NOISE) ** 2)
    value_s = unknown * mean * plain_s + (1.0 - unknown) * value_s
    gain_s = _mean_above_zero(value_s, deviation * plain_s * math.sqrt(unknown))
    try_s = _N_TRIED * max(0.0, -value_s)
    if gain_s * n_rounds <= price.backlog_s + try_s or gain_s * min(n_rounds, _N_NEAR) <= try_s:
        return min(value_s, 0.0)
    return max(value_s - price.backlog_s / n_rounds, 1e-9)


def _mean_above_zero(mean: float, deviation: float) -> float:
    """Return the mean of max(0, X) for a normal X."""
    if deviation <= 0.0:
        return max(0.0, mean)
    place = mean / deviation
    below = 0.5 * math.erfc(-place / math.sqrt(2.0))
    density = math.exp(-0.5 * place * place) / math.sqrt(2.0 * math.pi)
    return mean * below + deviation * density
