"""Goodness of fit of sampled tokens to a known distribution, and the detectable deviation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from specgen.measure.goodness_of_fit import GTest, g_test

#: The total variation distance that must be detected with probability `POWER`, at the false-alarm
#: level `LEVEL`.
DEVIATION = 0.12
POWER = 0.99
LEVEL = 1e-4
Cell = tuple[int, ...]


@dataclass(frozen=True)
class DepthFit:
    """The fit of the joint distribution of `n_tokens` tokens.

    `detectable` is the total variation distance that the test detects with probability `POWER`.
    """

    n_tokens: int
    test: GTest
    n_impossible: int
    n_draws: int

    def detectable(self, level: float = LEVEL) -> float:
        return detectable_deviation(self.n_draws, level, POWER, self.test.n_cells)


def fits_of(
    drawn: Mapping[Cell, int], exact: Mapping[Cell, float], depth: int
) -> Iterator[DepthFit]:
    """The fits of the first token, of the first two tokens, and so on.

    A sample that is shorter than the cells that begin with it is impossible: it ended where the
    target would have continued.
    """
    for n in range(1, depth + 1):
        probs: dict[Cell, float] = {}
        for cell, prob in exact.items():
            probs[cell[:n]] = probs.get(cell[:n], 0.0) + prob
        counts: Counter[Cell] = Counter()
        for cell, count in drawn.items():
            counts[cell[:n]] += count
        in_cells = np.array([counts[cell] for cell in probs], np.int64)
        n_draws = sum(drawn.values())
        test = g_test(in_cells, np.array(list(probs.values())), n_draws)
        yield DepthFit(n, test, n_draws - int(in_cells.sum()), n_draws)


def detectable_deviation(n_draws: int, level: float, power: float, n_cells: int) -> float:
    """The smallest total variation distance D between the cells that `g_test` finds with at least
    this power; 1 for a single cell, which finds nothing.

    The statistic is about noncentral chi-square, with n times the divergence of the true
    distribution from the exact one as its noncentrality; and the divergence is at least 4 D², by
    Cauchy-Schwarz for chi-square's and by Pinsker's inequality for the likelihood ratio's.
    """
    if n_cells < 2:
        return 1.0
    critical = stats.chi2.isf(level, n_cells - 1)
    noncentrality = special.chndtrinc(critical, n_cells - 1, 1.0 - power)
    return min(1.0, math.sqrt(noncentrality / (4.0 * n_draws)))


def p_value(counts: Counter[Cell], expected: dict[Cell, float]) -> float:
    """The p-value of a G-test (`specgen.measure.goodness_of_fit`).

    Fails if there are too few samples to detect the required deviation.
    """
    assert set(counts) <= set(expected), "something was drawn that the target never says"
    observed = np.array([counts[cell] for cell in expected], np.int64)
    tested = g_test(observed, np.array(list(expected.values())))
    found = detectable_deviation(int(observed.sum()), LEVEL, POWER, tested.n_cells)
    assert found <= DEVIATION, f"too few draws: they show a deviation of {found:.3f}"
    return tested.p_value
