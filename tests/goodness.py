"""Goodness of fit of drawn tokens to a known distribution."""

from __future__ import annotations

from collections import Counter

from specgen.proof.statistics import Cells, g_test


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of a G-test; see `specgen.proof.statistics.g_test`."""
    cells = Cells.of(expected)
    counted = cells.count(counts.elements())
    assert not counted.impossible, "something was drawn that the target never says"
    tested = g_test(counted.per_cell, cells.probs)
    assert tested.n_cells > 1 or len(cells) == 1, "too few draws: every outcome was pooled"
    return tested.p_value
