"""Whether a draft model should start in a text, since it has to read all of it first."""

from __future__ import annotations

import math
from collections.abc import Callable

from specgen.calibration.acceptance import TextWorths
from specgen.calibration.cost_table import Price

#: Reading the text may take at most this share of the time that the answer took so far, so that an
#: answer that ends soon loses no more. (In replays of 75 answers 0.2, 0.3, 0.5 and 1 gained alike, within
#: noise; with 1 a summary of 54 tokens, whose prompt has 574, took 1.6 times as long as plain decoding.)
_MOST_AHEAD = 0.35
#: The same share for a proven drafter: one that paid in nearly every text, in at least `_N_PROVEN`
#: texts. (In replays of 75 answers with four cost tables, 2 was 1.022 and 1.02 times as fast as 1 with
#: those of F16 targets, where drafts pay most, and as fast with the others, whose drafts are not proven.)
_MOST_AHEAD_IF_PROVEN = 2.0
_N_PROVEN = 2.0
#: The standard deviation of a text's worth as estimated by a single look, in plain tokens' time;
#: the rounds that a try takes; and the rounds that have to make up for a try.
_NOISE = 1.0
_N_TRIED = 4.0
_N_NEAR = 6.0
#: Later texts gain from what is learnt in this one, so a share of the reading time counts as learning:
#: 0.9 in the first text, half after about `_N_LEARNING` texts, and less where fewer than `_N_LONG`
#: rounds are left. (In replays of 75 answers, the first five of which suit the model least, this was
#: 1.13 times as fast as plain decoding, and 1.07 times with an account that took all tokens alike.)
_N_LEARNING = 4.0
_N_LONG = 24.0


def worth_of_beginning(
    value_s: float,
    price: Price,
    worths: TextWorths,
    n_looks: int,
    *,
    could_pay: Callable[[], bool],
    plain_s: float,
    horizon: float,
    elapsed_s: float,
) -> float:
    """The expected gain of starting a model in a text, in seconds a round; above 0 it should start.

    After `n_looks` of the model in this text, a round with it seems to be worth `value_s`. A few
    looks are an unsure estimate, so it is averaged with the worth of earlier texts, whose spread
    shows how far this text may be from it. A model that does not pay shows this soon, and stops
    again. So the gain of starting is the mean of the positive part of the worth.

    `could_pay` is whether the model would save time if it were always right. A plain decode takes
    `plain_s`; about `horizon` rounds are left, cautiously estimated; the answer took `elapsed_s`
    so far.
    """
    mean, deviation = worths.of_next(price.first_s / plain_s)
    unknown = 1.0 / (1.0 + n_looks * (deviation / _NOISE) ** 2)
    value_s = unknown * mean * plain_s + (1.0 - unknown) * value_s
    if value_s <= 0.0 and not could_pay():
        return value_s
    if not may_read(price, worths, plain_s=plain_s, elapsed_s=elapsed_s):
        return min(value_s, 0.0)
    gain_s = _mean_above_zero(value_s, deviation * plain_s * math.sqrt(unknown))
    cost_s = _N_TRIED * max(0.0, -value_s)
    share = _N_LEARNING / (worths.n + 0.5 + _N_LEARNING) * min(1.0, horizon / _N_LONG)
    reading_s = price.backlog_s * (1.0 - share)
    if gain_s * horizon <= reading_s + cost_s or gain_s * min(horizon, _N_NEAR) <= cost_s:
        return min(value_s, 0.0)
    return max(value_s - price.backlog_s / horizon, 1e-9)


def may_read(price: Price, worths: TextWorths, *, plain_s: float, elapsed_s: float) -> bool:
    """Whether a model may read the unread part of the text now. It may not if that takes longer
    than may be lost on the drafter, or than a share of the answer's time so far."""
    mean, deviation = worths.of_next(price.first_s / plain_s)
    is_proven = worths.n >= _N_PROVEN and mean > deviation
    most_ahead = _MOST_AHEAD_IF_PROVEN if is_proven else _MOST_AHEAD
    most_s = min(worths.allowance * plain_s, most_ahead * elapsed_s)
    return price.backlog_s <= max(0.0, most_s)


def _mean_above_zero(mean: float, deviation: float) -> float:
    """The mean of max(0, X) for a normal X."""
    if deviation <= 0.0:
        return max(0.0, mean)
    place = mean / deviation
    below = 0.5 * math.erfc(-place / math.sqrt(2.0))
    density = math.exp(-0.5 * place * place) / math.sqrt(2.0 * math.pi)
    return mean * below + deviation * density
