"""When to stop drafting: the rule against the search through everything that may happen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.method.stopping import StoppingRule

#: AcceptanceRates below this are all one to the rule.
LEAST = 0.01


def searched(
    batch_s: list[float],
    next_s: float,
    token_s: float,
    frequencies: list[float],
    chances: list[float],
    n: int,
    chance: float,
) -> float:
    """The value of a look at the next token, by trying both answers to each question."""
    if n >= len(batch_s) - 1:
        return 0.0
    value = -next_s
    for frequency, own in zip(frequencies, chances, strict=True):
        after = chance * own
        further = searched(batch_s, next_s, token_s, frequencies, chances, n + 1, after)
        taken = after * token_s - (batch_s[n + 1] - batch_s[n]) + max(0.0, further)
        value += frequency * max(0.0, taken)
    return value


def rule(
    batch_s: list[float],
    next_s: float,
    token_s: float,
    frequencies: list[float],
    chances: list[float],
) -> StoppingRule:
    return StoppingRule(
        np.array(batch_s), next_s, token_s, np.array(frequencies), np.array(chances)
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[float], float, float, list[float], list[float]]:
    """Costs of batches, of a look, and the worth of a token; how often bins come, and how often
    their tokens are accepted."""
    n_bins = draw(st.integers(1, 3))
    weights = draw(st.lists(st.floats(0.05, 1.0), min_size=n_bins, max_size=n_bins))
    chances = draw(st.lists(st.floats(0.05, 0.99), min_size=n_bins, max_size=n_bins))
    batch_s = draw(st.lists(st.floats(0.5, 3.0), min_size=2, max_size=6))
    next_s = draw(st.floats(0.0, 1.0))
    token_s = draw(st.floats(0.2, 2.0))
    total = sum(weights)
    return batch_s, next_s, token_s, [weight / total for weight in weights], chances


@settings(max_examples=150)
@given(worlds(), st.floats(0.05, 1.0))
def test_the_value_is_that_of_the_best_answers_to_all_questions(
    world: tuple[list[float], float, float, list[float], list[float]], chance: float
) -> None:
    found = rule(*world)
    n_max, token_s = found.n_max, world[2]
    assert n_max == len(world[0]) - 1
    for n in range(n_max + 1):
        expected = searched(*world, n, chance)
        # Values lie on a grid; what is near zero anyway is not decided by that. AcceptanceRates below
        # the grid's first one are worth a little more than they should be.
        assert found.value(n, chance) == pytest.approx(expected, abs=0.1 * token_s)


@settings(max_examples=100)
@given(worlds(), st.floats(0.05, 1.0), st.data())
def test_a_token_is_worth_itself_and_what_may_follow(
    world: tuple[list[float], float, float, list[float], list[float]],
    chance: float,
    data: st.DataObject,
) -> None:
    batch_s, _, token_s, _, _ = world
    found = rule(*world)
    n = data.draw(st.integers(0, found.n_max - 1))
    further = searched(*world, n + 1, chance)
    expected = chance * token_s - (batch_s[n + 1] - batch_s[n]) + max(0.0, further)
    assert found.takes(n, chance) == pytest.approx(expected, abs=0.1 * token_s)


def test_there_is_nothing_behind_the_longest_draft() -> None:
    found = rule([1.0, 1.0, 1.0], 0.0, 1.0, [1.0], [1.0])
    assert found.n_max == 2
    assert found.value(2, 1.0) == 0.0
    assert found.takes(2, 1.0) < 0.0
    none = rule([1.0], 0.0, 1.0, [1.0], [1.0])
    assert (none.n_max, none.value(0, 1.0)) == (0, 0.0)
    assert none.takes(0, 1.0) < 0.0


def test_a_dear_row_is_taken_for_the_cheap_ones_behind_it() -> None:
    """A second row costs as much as a plain decode, three more nothing."""
    step = [1.0, 2.0, 2.0, 2.0, 2.0]
    likely, unlikely = rule(step, 0.0, 1.0, [1.0], [0.8]), rule(step, 0.0, 1.0, [1.0], [0.4])
    assert likely.takes(0, 0.8) == pytest.approx(0.8 - 1.0 + 0.64 + 0.512 + 0.4096, abs=0.02)
    assert likely.takes(0, 0.8) > 0.0
    assert unlikely.takes(0, 0.4) < 0.0
    # By itself it would not be.
    assert rule(step[:2], 0.0, 1.0, [1.0], [0.8]).takes(0, 0.8) < 0.0
