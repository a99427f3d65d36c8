"""How fast an answer comes lately."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.policy.pace import Pace

PLAIN_S = 0.1


def after(rounds: list[tuple[float, int]]) -> Pace:
    pace = Pace()
    for round_s, n_tokens in rounds:
        pace.observe(round_s, n_tokens, PLAIN_S, by_ngrams=False)
    return pace


def test_before_the_first_round_nothing_is_known() -> None:
    assert Pace().token_s is None


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.integers(1, 17)), min_size=1, max_size=80))
def test_it_lies_between_the_rounds_and_plain_decoding(rounds: list[tuple[float, int]]) -> None:
    pace = after(rounds)
    paces = [PLAIN_S, *(round_s / n_tokens for round_s, n_tokens in rounds)]
    assert pace.token_s is not None
    assert min(paces) * 0.999 <= pace.token_s <= max(paces) * 1.001
    assert 1.0 <= pace.tokens_a_round <= max(n_tokens for _, n_tokens in rounds)


def test_what_stays_the_same_is_what_it_comes_to() -> None:
    pace = after([(0.16, 4)] * 200)
    assert pace.token_s == pytest.approx(0.04, rel=1e-3)
    assert pace.tokens_a_round == pytest.approx(4.0, rel=1e-3)


def test_a_few_rounds_change_it_at_first_and_few_later() -> None:
    early, late = after([(0.16, 4)] * 4), after([(0.1, 1)] * 60 + [(0.16, 4)] * 4)
    assert early.token_s is not None
    assert late.token_s is not None
    assert early.token_s < 0.06 < late.token_s < 0.09


def test_when_another_matter_begins_it_follows_as_at_first() -> None:
    pace = after([(0.1, 1)] * 60)
    pace.begin_anew()
    for _ in range(4):
        pace.observe(0.16, 4, PLAIN_S, by_ngrams=False)
    assert pace.token_s == pytest.approx(after([(0.16, 4)] * 4).token_s)


def test_seconds_and_tokens_are_averaged_apart() -> None:
    # A long round of one token weighs as much as it took, not as one of two equal paces.
    pace = after([(1.0, 1), (0.1, 10)] * 200)
    assert pace.token_s == pytest.approx(1.1 / 11, rel=0.1)


def test_a_model_is_left_the_rounds_in_which_no_n_grams_draft() -> None:
    pace = Pace()
    assert pace.left_by_ngrams == 1.0
    for number in range(200):
        pace.observe(0.1, 2, PLAIN_S, by_ngrams=number % 4 > 0)
    assert pace.left_by_ngrams == pytest.approx(0.25, abs=0.05)
    pace.begin_anew()
    for _ in range(12):
        pace.observe(0.1, 1, PLAIN_S, by_ngrams=False)
    assert pace.left_by_ngrams > 0.7
