"""What a draft model can be expected to gain from what decodes cost."""

from __future__ import annotations

import pytest

from specgen.session.calibration import (
    ACCEPTANCE,
    Costs,
    expected_gain,
)

COSTS = Costs({1: 0.03, 2: 0.04, 3: 0.05, 4: 0.06}, 0.002)
#: A machine on which the rows of a batch cost nearly as much as tokens one by one.
DEAR = Costs({1: 31.7, 2: 56.0, 3: 77.0, 4: 98.0}, 8.7)


# --- what to expect


def test_the_expected_speed_up_is_that_of_the_best_number_of_tokens() -> None:
    # 1: 3 * 1.7 / (4 + 0.2), 2: 3 * 2.19 / (5 + 0.4), 3: 3 * 2.533 / (6 + 0.6)
    expected = expected_gain(COSTS)
    assert expected.n_drafted == 2
    assert expected.speedup == pytest.approx(3 * 2.19 / 5.4)
    assert expected.batch_tokens == pytest.approx(5 / 3)
    assert expected.token_tokens == pytest.approx(0.2 / 3)
    assert expected.free_speedup == pytest.approx(3 * 2.19 / 5)
    assert expected.is_worth_it
    assert not expected.rules_out_all


def test_where_batches_are_dear_no_draft_model_pays() -> None:
    expected = expected_gain(DEAR)
    assert expected.n_drafted == 1
    assert expected.speedup == pytest.approx(31.7 * 1.7 / (56.0 + 8.7))
    assert not expected.is_worth_it
    assert expected.rules_out_all
    only_longest = expected_gain(Costs({1: 31.7, 2: 1000.0, 3: 1000.0, 4: 98.0}, 8.7))
    assert (only_longest.n_drafted, round(only_longest.speedup, 2)) == (3, 0.65)


def test_a_batch_that_seemed_to_cost_less_than_a_token_is_not_believed() -> None:
    expected = expected_gain(Costs({1: 0.3, 2: 0.1, 4: 0.05}, 1e-9))
    assert expected.speedup == pytest.approx(sum(ACCEPTANCE**depth for depth in range(4)))
    assert expected.batch_tokens == pytest.approx(1.0)
