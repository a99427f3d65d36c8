"""The G-test of `specgen verify`, and the power of the tests, compared with SciPy and with
simulated samplers.

A simulated rate is compared with its bound plus five standard errors. The seeds are fixed; with new
seeds, a correct implementation would fail each test with a probability of 3e-7.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specgen.measure.goodness_of_fit import MIN_EXPECTED, chi_square_tail, g_test
from specgen.system.arrays import ProbArray
from tests.helpers.goodness_of_fit import detectable_deviation, fits_of

pytestmark = pytest.mark.slow

probabilities = (
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30)
    .map(np.array)
    .map(lambda weights: weights / weights.sum())
)


# --- joint samples --------------------------------------------------------------------------


def test_draws_are_counted_by_their_beginnings_and_one_in_no_cell_is_impossible() -> None:
    exact = {(1,): 0.5, (2, 1): 0.3, (2, 2): 0.2}
    first, both = fits_of({(1,): 500, (2, 1): 310, (2, 2): 190}, exact, 2)
    assert (first.n_tokens, first.test.n_cells, first.n_impossible) == (1, 2, 0)
    assert (both.n_tokens, both.test.n_cells, both.n_draws) == (2, 3, 1000)
    assert min(first.test.p_value, both.test.p_value) > 0.1
    for drawn in ((3,), (2, 3), (2,)):
        *_, fit = fits_of({(1,): 99, drawn: 1}, exact, 2)
        assert (fit.n_impossible, fit.test.p_value, fit.test.statistic) == (1, 0.0, math.inf)


# --- the test -------------------------------------------------------------------------------


@given(probabilities, st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_the_statistic_is_scipys(probs: ProbArray, n: int, seed: int) -> None:
    counts = np.random.default_rng(seed).multinomial(n, probs)
    tested = g_test(counts, probs, min_expected=0.0)
    if len(probs) == 1:
        assert (tested.statistic, tested.p_value) == (0.0, 1.0)
        return
    expected = n * probs * (counts.sum() / (n * probs).sum())
    reference = stats.power_divergence(counts, expected, lambda_="log-likelihood")
    assert tested.statistic == pytest.approx(reference.statistic, rel=1e-9, abs=1e-9)
    correction = 1 + ((1 / probs).sum() - 1) / (6 * n * (len(probs) - 1))
    p_value = stats.chi2.sf(tested.statistic / correction, len(probs) - 1)
    assert tested.p_value == pytest.approx(p_value, rel=1e-9, abs=1e-300)
    assert tested.n_pooled == 0


@pytest.mark.parametrize("degrees", [1, 2, 3, 30, 301, 2000])
def test_the_chi_square_distribution_is_scipys(degrees: int) -> None:
    for x in (0.0, 1e-6, 1.0, 0.5 * degrees, degrees, 1.2 * degrees, degrees + 300.0):
        expected = stats.chi2.sf(x, degrees)
        assert chi_square_tail(x, degrees) == pytest.approx(expected, rel=1e-10, abs=1e-290)


@given(probabilities, st.integers(1, 100_000), st.integers(0, 2**32 - 1))
def test_every_cell_tested_is_expected_often(probs: ProbArray, n: int, seed: int) -> None:
    counts = np.random.default_rng(seed).multinomial(n, probs)
    tested = g_test(counts, probs)
    assert tested.n_cells == len(probs) - max(0, tested.n_pooled - 1)
    assert tested.statistic >= 0.0
    assert 0.0 <= tested.p_value <= 1.0
    rarest, least = np.sort(n * probs), MIN_EXPECTED * (1 - 1e-9)
    assert (rarest[tested.n_pooled :] >= least).all()
    if 0 < tested.n_pooled < len(probs):
        assert rarest[: tested.n_pooled].sum() >= least


# --- what a test can see --------------------------------------------------------------------


def test_the_promised_power_is_reached_by_the_worst_deviation() -> None:
    """The worst: half of the mass is raised by one factor and the rest lowered by another,
    for which Cauchy-Schwarz is an equality."""
    level, power, n = 1e-3, 0.9, 4000
    exact = np.full(90, 1 / 90)
    deviation = detectable_deviation(n, level, power, len(exact))
    signs = np.where(np.arange(len(exact)) % 2 == 0, 1.0, -1.0)
    true = exact * (1 + 2 * deviation * signs)
    assert 0.5 * np.abs(true - exact).sum() == pytest.approx(deviation)
    rng, n_simulations = np.random.default_rng(2), 1000
    n_found = sum(
        g_test(rng.multinomial(n, true), exact).p_value <= level for _ in range(n_simulations)
    )
    noise = 5 * math.sqrt(power * (1 - power) / n_simulations)
    assert abs(n_found / n_simulations - power) <= noise
