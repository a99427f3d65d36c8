"""Goodness of fit of drawn tokens to a known distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
from scipy import stats


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of a G-test, cells of fewer than five expected draws pooled into one."""
    assert set(counts) <= set(expected), "something was drawn that the target never says"
    n = sum(counts.values())
    small = [cell for cell, prob in expected.items() if prob * n < 5]
    cells = [(counts[cell], prob * n) for cell, prob in expected.items() if prob * n >= 5]
    pooled = (sum(counts[cell] for cell in small), sum(expected[cell] * n for cell in small))
    if pooled[1] > 0:
        cells.append(pooled)
    observed, wanted = np.array(cells, dtype=np.float64).T
    positive = observed > 0
    g = 2 * (observed[positive] * np.log(observed[positive] / wanted[positive])).sum()
    return float(stats.chi2.sf(g, len(cells) - 1))
