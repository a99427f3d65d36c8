"""Whether a draft model should start in a text, since it has to read all of it first."""

from __future__ import annotations

import math
from collections.abc import Callable

from specgen.calibration.acceptance import Worths
from specgen.calibration.cost_table import Price

#: The most that is read first, as a share of the time that the answer took so far: one that ends
#: soon loses no more. (In replays of 75 answers 0.2, 0.3, 0.5 and 1 gained alike, within noise; with 1
#: a summary of 54 tokens, whose prompt has 574, took 1.6 times as long as plain decoding.)
_MOST_AHEAD = 0.35
#: The same of a drafter that pays in nearly every text, by so many or more: what it promises is no
#: guess. (In replays of 75 answers with four tables 2 was 1.022 and 1.02 times as fast as 1 with those
#: of F16 targets, where drafts pay most, and the same with the others, whose drafts prove nothing.)
_MOST_AHEAD_IF_PROVEN = 2.0
_N_PROVEN = 2.0
#: How far what a single look tells of a text's worth may be off, as a standard deviation in plain
#: tokens' time; how many rounds it takes to find out; and how many have to make up for these.
_NOISE = 1.0
_N_TRIED = 4.0
_N_NEAR = 6.0
#: What is learnt of a text is of use for those after it: until so many were seen, half of what a
#: draft model has to read is put down to that, where so many rounds are to come. (In replays of 75
#: answers, the first five of which suit the model least, 1.07 times plain decoding with an account
#: that took all tokens alike, and 1.13 with this one.)
_N_LEARNING = 4.0
_N_LONG = 24.0


def worth_of_beginning(
    value_s: float,
    price: Price,
    worths: Worths,
    n_looks: int,
    *,
    could_pay: Callable[[], bool],
    plain_s: float,
    horizon: float,
    elapsed_s: float,
) -> float:
    """What it promises a round, in seconds, to begin with a model: above 0 it should.

    A round with it seems to be worth `value_s`, after `n_looks` at what it says in this text. At
    first little of it shows: then earlier texts tell what to expect, and how far this one may be
    from that. It shows soon, so what it is worth to begin, and to leave off again if it does not
    pay, is the mean of what is above zero.

    `could_pay`: whether it would save time if it were always right. A plain decode takes `plain_s`;
    `horizon` rounds are left, with caution; the answer took `elapsed_s` so far.
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


def may_read(price: Price, worths: Worths, *, plain_s: float, elapsed_s: float) -> bool:
    """Whether a model may read now what it has not read of the text: not where that takes longer
    than may be lost on it, or a share of the answer's time."""
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
