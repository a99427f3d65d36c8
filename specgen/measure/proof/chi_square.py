"""The chi-square distribution, and what else `specgen verify` needs of special functions.

The degrees of freedom are whole numbers. The tail of the distribution then is a finite sum of positive
terms, so no digits are lost, and no other package is needed. `x` is the statistic. (Abramowitz and Stegun, 26.4.4,
26.4.5 and 26.4.25.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def log_gamma(values: FloatArray) -> FloatArray:
    """Return ln Γ of each value."""
    return np.array([math.lgamma(value) for value in values], np.float64)


def x_log_y(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return x·ln y, and 0 where x is 0, whatever y is."""
    with np.errstate(divide="ignore"):  # the logarithm of 0 is what is wanted
        return x * np.log(np.where(x == 0.0, 1.0, y))


def tail(x: float, degrees: int) -> float:
    """Return P(X >= x) of the chi-square distribution."""
    if x <= 0.0:
        return 1.0
    return min(1.0, _first(x, degrees) + float(_terms(x, degrees % 2 / 2.0, degrees // 2).sum()))


def critical_value(level: float, degrees: int) -> float:
    """Return the x with P(X >= x) = level."""
    return _root(lambda x: level - tail(x, degrees))


def noncentrality(x: float, degrees: int, power: float) -> float:
    """Return the noncentrality at which P(X >= x) = power."""
    if power <= tail(x, degrees):
        return 0.0
    return _root(lambda value: _noncentral_tail(x, degrees, value) - power)


def _noncentral_tail(x: float, degrees: int, noncentrality: float) -> float:
    """Return P(X >= x): the tails for `degrees` + 2j, weighted by the Poisson probabilities of j."""
    mean = noncentrality / 2.0
    n = int(mean + 10.0 * math.sqrt(mean)) + 50
    number = np.arange(n, dtype=np.float64)
    weights = np.exp(number * math.log(mean) - mean - log_gamma(number + 1.0))
    # Each tail is the one before and one more term.
    tails = tail(x, degrees) + np.append(0.0, _terms(x, degrees / 2.0, n - 1).cumsum())
    return float(weights @ np.minimum(tails, 1.0))


def _first(x: float, degrees: int) -> float:
    """Return what the sum of an odd number of degrees begins with: the tail for one degree."""
    return math.erfc(math.sqrt(x / 2.0)) if degrees % 2 else 0.0


def _terms(x: float, first: float, n: int) -> FloatArray:
    """Return e^(-x/2) (x/2)^k / Γ(k+1) for n values of k from `first` on, float64[n]."""
    powers = first + np.arange(n, dtype=np.float64)
    return np.exp(powers * math.log(x / 2.0) - x / 2.0 - log_gamma(powers + 1.0))


def _root(rising: Callable[[float], float]) -> float:
    """Return where a rising function of positive numbers is 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0.0:
        low, high = high, 2.0 * high
    while low < (middle := (low + high) / 2.0) < high:
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return high
