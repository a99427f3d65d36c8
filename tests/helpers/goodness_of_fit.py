"""Goodness of fit of drawn tokens to a known distribution."""

from __future__ import annotations

from collections import Counter

from specgen.measure.proof.statistics import Cells, detectable_deviation, g_test

#: A total variation distance that has to be found with probability `POWER`, at the false-alarm
#: level `LEVEL`.
DEVIATION = 0.12
POWER = 0.99
LEVEL = 1e-4


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of a G-test; see `specgen.measure.proof.statistics.g_test`. Fails if there are too few
    draws to find what has to be found."""
    cells = Cells.of(expected)
    counted = cells.count(counts.elements())
    assert not counted.impossible, "something was drawn that the target never says"
    tested = g_test(counted.per_cell, cells.probs)
    found = detectable_deviation(counted.n_draws, LEVEL, POWER, tested.n_cells)
    assert found <= DEVIATION, f"too few draws: they show a deviation of {found:.3f}"
    return tested.p_value
