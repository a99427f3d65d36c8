"""Test whether counts of samples fit a known distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specgen.system.arrays import ProbArray

#: Cells with a smaller expected count are pooled.
MIN_EXPECTED = 20.0


@dataclass(frozen=True, slots=True)
class GTest:
    """The result of a G-test."""

    #: 2 Σ count·ln(count / expected) over all cells; infinite if an impossible token was sampled.
    statistic: float
    #: The number of cells, where the pool of rare cells counts as one.
    n_cells: int
    #: The probability of a statistic at least this large if the samples fit the distribution.
    p_value: float
    #: The number of rare cells that were pooled.
    n_pooled: int


def g_test(
    counts: npt.NDArray[np.int64],
    exact_probs: ProbArray,
    n_samples: int | None = None,
    *,
    min_expected: float = MIN_EXPECTED,
) -> GTest:
    """Test whether samples come from a known distribution.

    The statistic is chi-square distributed only if all expected counts are large. So cells with
    small expected counts are pooled, and the statistic is divided by Williams's correction
    (Biometrika 63, 1976, p. 33): 1 + (Σ 1/prob - 1) / (6 n_samples (n_cells - 1)). The false-alarm
    rate is then at most 1.5 times the nominal rate, down to a nominal rate of 1e-5.

    Args:
        counts: int64[n_cells], the number of samples of each cell.
        exact_probs: float64[n_cells], the probability of each cell.
        n_samples: The number of all samples; None if all of them are counted. Samples that are
            not counted are impossible ones, for which the p-value is 0.
        min_expected: Cells with a smaller expected count are pooled.

    Raises:
        ValueError: If a probability is not positive, if the probabilities do not sum to 1, or if
            the counts do not match the cells or `n_samples`.
    """
    n_counted = int(counts.sum())
    if n_samples is None:
        n_samples = n_counted
    total = float(exact_probs.sum())
    if not bool((exact_probs > 0.0).all()) or not abs(total - 1.0) <= 1e-6:
        raise ValueError(f"the exact probabilities must be positive and sum to 1, not to {total}")
    if len(counts) != len(exact_probs) or n_samples < 1 or n_counted > n_samples:
        cells = f"{len(counts)} of {len(exact_probs)} cells"
        raise ValueError(f"{n_counted} samples of {n_samples} in {cells}")

    # Pool rare cells into one, which becomes the last cell.
    probs = exact_probs / total
    observed = counts.astype(np.float64)
    rare, others = _rare_cells(n_samples * probs, min_expected)
    if len(rare):
        probs = np.append(probs[others], probs[rare].sum())
        observed = np.append(observed[others], observed[rare].sum())
    if n_counted < n_samples:
        return GTest(math.inf, len(probs), p_value=0.0, n_pooled=len(rare))
    if len(probs) == 1:
        return GTest(0.0, 1, p_value=1.0, n_pooled=len(rare))

    # A cell without samples adds nothing to the statistic: x·ln(x) is 0 at 0.
    is_sampled = observed > 0.0
    log_ratios = np.log(observed[is_sampled] / (n_samples * probs[is_sampled]))
    # Rounding may make a perfect fit slightly negative.
    statistic = max(0.0, 2.0 * float(observed[is_sampled] @ log_ratios))
    n_degrees = len(probs) - 1
    correction = 1.0 + (float((1.0 / probs).sum()) - 1.0) / (6.0 * n_samples * n_degrees)
    p_value = chi_square_tail(statistic / correction, n_degrees)
    return GTest(statistic, len(probs), p_value, len(rare))


def _rare_cells(
    expected: npt.NDArray[np.float64],
    min_expected: float,
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices of the cells to pool, and of the others, each by ascending expectation.

    All cells with too small an expected count are pooled. If their sum is still too small, the
    rarest of the others are added. The choice ignores the actual counts, which would bias the test.

    Args:
        expected: float64[n_cells], the expected count of each cell.
        min_expected: The smallest expected count of a cell, and of the pool.
    """
    order = expected.argsort(kind="stable")
    n_pooled = int(np.count_nonzero(expected < min_expected))
    if n_pooled:
        # The number of rarest cells whose sum reaches the minimum; one too many if none does.
        n_needed = int(expected[order].cumsum().searchsorted(min_expected)) + 1
        n_pooled = min(max(n_pooled, n_needed), len(expected))
    return order[:n_pooled], order[n_pooled:]


def chi_square_tail(x: float, n_degrees: int) -> float:
    """Return P(X >= x) of the chi-square distribution with `n_degrees` degrees of freedom.

    It is a finite sum (Abramowitz and Stegun, 26.4.4 and 26.4.5). For an even number of degrees it
    is e^(-x/2) Σ (x/2)^k / Γ(k + 1) over k = 0, 1, ... below n_degrees / 2. For an odd number, k is
    1/2, 3/2, ... below n_degrees / 2, and erfc(√(x/2)) is added.
    """
    if x <= 0.0:
        return 1.0
    half = x / 2.0
    is_odd = n_degrees % 2 == 1
    powers = np.arange(n_degrees // 2, dtype=np.float64)
    if is_odd:
        powers += 0.5
    log_gammas = np.array([math.lgamma(power + 1.0) for power in powers], np.float64)
    # Each term is computed from its logarithm, since its factors alone would overflow.
    terms = np.exp(powers * math.log(half) - half - log_gammas)
    tail = float(terms.sum())
    if is_odd:
        tail += math.erfc(math.sqrt(half))
    return min(1.0, tail)
