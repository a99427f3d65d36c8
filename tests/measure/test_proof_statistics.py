"""The statistics of `specgen verify`, against scipy and against simulated samplers.

Seeds are fixed, so a test that passes keeps passing. A simulated rate is compared with its
bound plus five standard errors: a correct implementation had a chance of about 3e-7 to fail
each when the seed was chosen.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from specgen.measure.proof import chi_square
from specgen.measure.proof.statistics import (
    MIN_EXPECTED,
    Cells,
    detectable_deviation,
    draws_needed,
    g_test,
    n_cells_tested,
    split_level,
    total_variation,
)
from specgen.system.arrays import ProbArray


def zipf(n_cells: int, exponent: float) -> ProbArray:
    probs: ProbArray = np.arange(1, n_cells + 1, dtype=np.float64) ** -exponent
    probs /= probs.sum()
    return probs


#: Distributions of a language model's next tokens are like the skewed ones.
SHAPES: dict[str, ProbArray] = {
    "uniform": np.full(90, 1 / 90),
    "zipf": zipf(300, 1.3),
    "geometric": 0.5 ** np.minimum(np.arange(1, 16), 14.0),
    "one rare": np.array([0.011, 0.989]),
}
N_DRAWS = 2000

probabilities = (
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30)
    .map(np.array)
    .map(lambda weights: weights / weights.sum())
)


# --- cells ----------------------------------------------------------------------------------


def test_a_draw_is_counted_in_the_cell_that_it_begins_with() -> None:
    cells = Cells.of({(1,): 0.5, (2, 1): 0.3, (2, 2, 7): 0.2})
    counts = cells.count([(1, 9, 9), (1,), (2, 1, 4), (2, 2, 7), [2, 2, 7]])
    assert counts.per_cell.tolist() == [2, 1, 2]
    assert counts.impossible == ()
    assert counts.n_draws == 5


@pytest.mark.parametrize("drawn", [(3,), (2, 3, 1), (2, 2, 6), (2, 2), (2,), ()])
def test_a_draw_in_no_cell_is_impossible(drawn: tuple[int, ...]) -> None:
    cells = Cells.of({(1,): 0.5, (2, 1): 0.3, (2, 2, 7): 0.2})
    assert cells.find(drawn) is None
    counts = cells.count([(1, 0, 0)] * 99 + [drawn])
    assert counts.impossible == (drawn,)
    assert counts.n_draws == 100
    tested = g_test(counts.per_cell, cells.probs, counts.n_draws)
    assert tested.p_value == 0.0
    assert tested.statistic == math.inf


def test_one_cell_may_be_everything() -> None:
    cells = Cells.of({(): 1.0})
    assert cells.find((1, 2)) == cells.find(()) == 0


@pytest.mark.parametrize(
    "table",
    [
        {(1,): 0.5, (1, 2): 0.5},
        {(): 0.5, (1,): 0.5},
        {(1,): 0.5, (2,): 0.4},
        {(1,): 1.0, (2,): 0.0},
        {(1,): 1.5, (2,): -0.5},
        {(1,): math.nan},
        {},
    ],
)
def test_cells_that_are_no_partition_are_refused(table: dict[tuple[int, ...], float]) -> None:
    with pytest.raises(ValueError, match="cell|sum"):
        Cells.of(table)


def test_a_cell_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Cells(((1,), (1,)), np.array([0.5, 0.5]))


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
        assert chi_square.tail(x, degrees) == pytest.approx(
            stats.chi2.sf(x, degrees), rel=1e-10, abs=1e-290
        )
    for level in (1e-2, 1e-9):
        critical = chi_square.critical_value(level, degrees)
        assert critical == pytest.approx(stats.chi2.isf(level, degrees), rel=1e-12)
        for power in (0.5, 0.999):
            found = chi_square.noncentrality(critical, degrees, power)
            assert found == pytest.approx(
                special.chndtrinc(critical, degrees, 1.0 - power), rel=1e-9
            )
        assert chi_square.noncentrality(critical, degrees, level / 2) == 0.0


@given(probabilities, st.integers(1, 100_000), st.integers(0, 2**32 - 1))
def test_every_cell_tested_is_expected_often(probs: ProbArray, n: int, seed: int) -> None:
    counts = np.random.default_rng(seed).multinomial(n, probs)
    tested = g_test(counts, probs)
    assert tested.n_cells == n_cells_tested(probs, n)
    assert tested.n_cells == len(probs) - max(0, tested.n_pooled - 1)
    assert tested.statistic >= 0.0
    assert 0.0 <= tested.p_value <= 1.0
    rarest, least = np.sort(n * probs), MIN_EXPECTED * (1 - 1e-9)
    assert (rarest[tested.n_pooled :] >= least).all()
    if 0 < tested.n_pooled < len(probs):
        assert rarest[: tested.n_pooled].sum() >= least


@given(probabilities, st.integers(0, 2**32 - 1))
def test_the_order_of_the_cells_does_not_matter(probs: ProbArray, seed: int) -> None:
    counts = np.random.default_rng(seed).multinomial(500, probs)
    order = np.random.default_rng(seed + 1).permutation(len(probs))
    here, there = g_test(counts, probs), g_test(counts[order], probs[order])
    if len(set(probs.tolist())) == len(probs):  # among equals, which are pooled is open
        assert here.statistic == pytest.approx(there.statistic, rel=1e-9, abs=1e-9)
    assert here.degrees_of_freedom == there.degrees_of_freedom
    a, b = total_variation(counts, probs), total_variation(counts[order], probs[order])
    assert a.measured == pytest.approx(b.measured)


def test_one_cell_after_pooling_says_nothing() -> None:
    tested = g_test(np.array([10, 5]), np.array([0.5, 0.5]))
    assert (tested.p_value, tested.degrees_of_freedom, tested.n_pooled) == (1.0, 0, 2)


@pytest.mark.parametrize("n_draws", [0, 4])
def test_counts_that_are_no_draws_are_refused(n_draws: int) -> None:
    with pytest.raises(ValueError, match="draws"):
        g_test(np.array([5 * (n_draws > 0), 0]), np.array([0.5, 0.5]), n_draws)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_false_alarm_rate_is_the_nominal_one(shape: str) -> None:
    """At most 1.35 times the level, the worst that two cells may have by their discreteness
    (see `g_test`); five standard errors more for the simulation's own noise."""
    probs = SHAPES[shape] / SHAPES[shape].sum()
    n_simulations = 20_000
    samples = np.random.default_rng(0).multinomial(N_DRAWS, probs, size=n_simulations)
    p_values = np.array([g_test(counts, probs).p_value for counts in samples])
    for level in (1e-2, 1e-3):
        bound = 1.35 * level
        assert (p_values <= level).mean() <= bound + 5 * math.sqrt(bound / n_simulations)
    # Nor is it asleep: large levels, where counts are not too discrete, are used up.
    assert (p_values <= 0.1).mean() >= 0.08


def test_without_pooling_and_correction_it_would_not_be() -> None:
    """The simulation can tell: an uncorrected test of many rare cells alarms too often."""
    probs = np.full(400, 1 / 400)
    samples = np.random.default_rng(0).multinomial(N_DRAWS, probs, size=2000)
    statistics = np.array([g_test(counts, probs, min_expected=0.0).statistic for counts in samples])
    assert (stats.chi2.sf(statistics, 399) <= 1e-2).mean() > 0.03


# --- the distance ---------------------------------------------------------------------------


def test_the_distance_of_equal_frequencies_is_zero() -> None:
    distance = total_variation(np.array([25, 75]), np.array([0.25, 0.75]))
    assert distance.measured == distance.lower == 0.0
    assert distance.upper == pytest.approx(math.sqrt(math.log(40) / 200))


def test_impossible_draws_are_distance() -> None:
    distance = total_variation(np.array([9000]), np.array([1.0]), 10_000)
    assert distance.measured == pytest.approx(0.1)
    assert 0.05 < distance.lower < 0.1 < distance.upper


@given(probabilities, st.integers(1, 2000))
def test_the_distance_of_an_exact_sampler_is_the_mean_over_binomials(
    probs: ProbArray, n: int
) -> None:
    counts = np.random.default_rng(0).multinomial(n, probs)
    values = np.arange(n + 1)
    mean = 0.5 * sum(
        float((np.abs(values / n - p) * stats.binom.pmf(values, n, p)).sum()) for p in probs
    )
    assert total_variation(counts, probs).if_exact == pytest.approx(mean, rel=1e-6, abs=1e-12)


@given(probabilities, st.integers(1, 5000), st.integers(0, 2**32 - 1), st.floats(0.5, 0.999))
def test_the_interval_holds_what_was_measured(
    probs: ProbArray, n: int, seed: int, confidence: float
) -> None:
    counts = np.random.default_rng(seed).multinomial(n, zipf(len(probs), 1.0))
    distance = total_variation(counts, probs, confidence=confidence)
    assert 0.0 <= distance.lower <= distance.measured <= distance.upper <= 1.0
    assert distance.measured == pytest.approx(0.5 * np.abs(counts / n - probs).sum())
    wider = total_variation(counts, probs, confidence=0.9999)
    assert wider.lower <= distance.lower
    assert wider.upper >= distance.upper


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_covers_the_true_distance(shape: str, shift: float) -> None:
    """Each end is missed at most as often as `confidence` allows: here 10 % of the time."""
    exact = SHAPES[shape] / SHAPES[shape].sum()
    true = (1 - shift) * exact + shift * exact[::-1]
    distance = 0.5 * np.abs(true - exact).sum()
    rng = np.random.default_rng(1)
    found = [
        total_variation(rng.multinomial(N_DRAWS, true), exact, confidence=0.8) for _ in range(1000)
    ]
    allowed = 0.1 * 1000 + 5 * math.sqrt(0.1 * 0.9 * 1000)
    assert sum(d.lower > distance for d in found) <= allowed
    assert sum(d.upper < distance for d in found) <= allowed
    if shift == 0.3 and shape != "uniform":  # a gross fault is seen as one
        assert all(d.lower > 0.0 for d in found)


# --- what a test can see --------------------------------------------------------------------


@given(
    st.floats(0.001, 0.5), st.sampled_from([1e-2, 1e-4]), st.floats(0.5, 0.99), st.integers(2, 500)
)
def test_needed_draws_and_detectable_deviations_agree(
    deviation: float, level: float, power: float, n_cells: int
) -> None:
    n = draws_needed(deviation, level, power, n_cells)
    assert detectable_deviation(n, level, power, n_cells) <= deviation
    assert n == 1 or detectable_deviation(n - 1, level, power, n_cells) >= deviation * (1 - 1e-9)
    reached = stats.ncx2.sf(stats.chi2.isf(level, n_cells - 1), n_cells - 1, 4 * n * deviation**2)
    assert reached >= power * (1 - 1e-9)
    assert draws_needed(deviation, level, power, n_cells + 1) >= n


@settings(max_examples=200)
@given(probabilities, st.integers(0, 2**32 - 1))
def test_the_divergences_are_at_least_what_the_distance_implies(
    exact: ProbArray, seed: int
) -> None:
    """The two inequalities that `draws_needed` rests on."""
    true = np.random.default_rng(seed).dirichlet(np.ones(len(exact)))
    distance = 0.5 * np.abs(true - exact).sum()
    assert ((true - exact) ** 2 / exact).sum() >= 4 * distance**2 * (1 - 1e-9)
    assert 2 * stats.entropy(true, exact) >= 4 * distance**2 * (1 - 1e-9) - 1e-12


@pytest.mark.parametrize("shape", ["uniform", "zipf"])
def test_the_promised_power_is_reached_by_the_worst_deviation(shape: str) -> None:
    """The worst: half of the mass is raised by one factor and the rest lowered by another,
    for which Cauchy-Schwarz is an equality."""
    level, power, deviation = 1e-3, 0.9, 0.05
    exact = SHAPES[shape] / SHAPES[shape].sum()
    n = draws_needed(deviation, level, power, len(exact))
    n = draws_needed(deviation, level, power, n_cells_tested(exact, n))
    signs = np.where(np.arange(len(exact)) % 2 == 0, 1.0, -1.0)
    signs[-1] *= n_cells_tested(exact, n) == len(exact)  # what is pooled is not seen
    tail = np.argsort(exact)[: len(exact) - n_cells_tested(exact, n) + 1]
    if len(tail) > 1:
        signs[tail] = -1.0
    upper = exact[signs > 0].sum()
    true = exact * np.where(signs > 0, 1 + deviation / upper, 1 - deviation / (1 - upper))
    assert 0.5 * np.abs(true - exact).sum() == pytest.approx(deviation)
    rng = np.random.default_rng(2)
    n_simulations = 1000
    n_found = sum(
        g_test(rng.multinomial(n, true), exact).p_value <= level for _ in range(n_simulations)
    )
    noise = 5 * math.sqrt(power * (1 - power) / n_simulations)
    assert n_found / n_simulations >= power - noise
    if shape == "uniform":  # and for an even split not by much more than promised
        assert n_found / n_simulations <= power + noise


def test_one_cell_detects_nothing() -> None:
    assert detectable_deviation(1000, 1e-3, 0.9, 1) == 1.0
    with pytest.raises(ValueError, match="one cell"):
        draws_needed(0.1, 1e-3, 0.9, 1)


@given(st.floats(1e-9, 0.5), st.integers(1, 1000))
def test_the_split_levels_keep_the_whole(level: float, n_tests: int) -> None:
    assert n_tests * split_level(level, n_tests) == pytest.approx(level)
