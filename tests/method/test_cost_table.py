"""What is expected of a decode, from what was measured and what was seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.method.cost_table import FREE, CostTable, Price

#: Five rows cost as much as eight, and nine twice as much.
JAGGED = {1: 1.0, 2: 1.1, 4: 1.2, 5: 2.0, 8: 2.0, 9: 4.0}

TIMES = st.floats(0.001, 100.0)
TABLES = st.dictionaries(st.integers(1, 40), TIMES, min_size=1, max_size=8)


@given(TABLES)
def test_what_was_measured_is_expected(seconds: dict[int, float]) -> None:
    table = CostTable(seconds)
    assert table
    assert table.known == seconds
    assert list(table.known) == sorted(seconds)
    for size, time in seconds.items():
        assert table.seconds(size) == time
        assert table.n_seen(size) == 0


@given(TABLES, st.integers(1, 80))
def test_what_lies_between_two_sizes_costs_what_lies_between_their_costs(
    seconds: dict[int, float], n_rows: int
) -> None:
    found = CostTable(seconds).seconds(n_rows)
    sizes = sorted(seconds)
    if n_rows > sizes[-1]:
        assert found == pytest.approx(seconds[sizes[-1]] * n_rows / sizes[-1])
    else:
        # Fewer rows than any that is known cost what the fewest known do.
        assert found == pytest.approx(np.interp(n_rows, sizes, [seconds[n] for n in sizes]))


def test_nothing_costs_nothing_and_nothing_known_is_no_guess() -> None:
    table = CostTable()
    assert not table
    assert table.seconds(0) == table.seconds(-3) == 0.0
    with pytest.raises(LookupError):
        table.seconds(1)
    assert Price(0.0, 0.0) == FREE


@pytest.mark.parametrize("sense", [{0: 1.0}, {-1: 1.0}, {1: 0.0}, {1: -2.0}, {1: float("nan")}])
def test_what_makes_no_sense_is_not_known(sense: dict[int, float]) -> None:
    table = CostTable(sense)
    for size, seconds in sense.items():
        table.start(size, seconds)
        table.observe(size, seconds)
    assert not table
    assert table.n_seen(1) == 0


@given(TABLES, st.floats(0.5, 2.0), st.data())
def test_a_machine_at_another_pace_is_found_out_from_one_size(
    seconds: dict[int, float], pace: float, data: st.DataObject
) -> None:
    """All sizes share the pace of the machine, so that what is seen of one tells about others."""
    n_rows = data.draw(st.sampled_from(sorted(seconds)))
    table = CostTable(seconds)
    for _ in range(200):
        table.observe(n_rows, pace * seconds[n_rows])
    assert table.seconds(n_rows) == pytest.approx(pace * seconds[n_rows], rel=0.01)
    for size, time in seconds.items():
        # Not all of it: some is put down to the size itself.
        low, high = sorted((time, pace * time))
        assert low * 0.999 <= table.seconds(size) <= high * 1.001
        if abs(pace - 1.0) > 0.1:
            assert table.seconds(size) != pytest.approx(time, rel=0.01)


def test_every_size_is_learnt_whatever_was_expected() -> None:
    truth = {n: JAGGED.get(n, 1.5) for n in range(1, 10)}
    table = CostTable(dict.fromkeys(range(1, 10), 1.0))
    rng = np.random.default_rng(1)
    for n in rng.integers(1, 10, 3000):
        table.observe(int(n), truth[int(n)] * float(np.exp(rng.normal(0.0, 0.05))))
    for n, seconds in truth.items():
        assert table.seconds(n) == pytest.approx(seconds, rel=0.12)
        assert table.n_seen(n) > 0


@given(TABLES, st.floats(1.0, 1e6))
def test_one_decode_out_of_line_moves_what_is_expected_by_little(
    seconds: dict[int, float], factor: float
) -> None:
    table = CostTable(seconds)
    sizes = list(seconds)
    for _ in range(4):
        for size in sizes:
            table.observe(size, table.seconds(size))
    before = table.known
    table.observe(sizes[0], factor * before[sizes[0]])
    for size in sizes:
        assert before[size] * 0.999 <= table.seconds(size) <= 1.11 * before[size]


@given(TABLES, st.lists(st.tuples(st.integers(1, 40), TIMES), max_size=60))
def test_expectations_stay_finite_and_above_zero(
    seconds: dict[int, float], decodes: list[tuple[int, float]]
) -> None:
    table = CostTable(seconds)
    for n_rows, time in decodes:
        table.observe(n_rows, time)
    for n_rows in range(1, 60):
        assert 0.0 < table.seconds(n_rows) < float("inf")
    assert set(table.known) == {*seconds, *(n for n, _ in decodes)}


def test_what_is_measured_again_at_another_pace_is_taken_as_it_is() -> None:
    table = CostTable({1: 1.0, 2: 1.5})
    for _ in range(100):
        table.observe(1, 2.0)
    table.start(2, 1.5)
    table.start(7, 9.0)
    assert table.seconds(2) == pytest.approx(1.5)
    assert table.seconds(7) == pytest.approx(9.0)
    assert table.known[7] == pytest.approx(9.0)
