"""Whether to begin with a model, by what it has to read, what it seems to be worth, and earlier texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.calibration.acceptance import TextWorths
from specgen.calibration.cost_table import Price
from specgen.policy.beginning import worth_of_beginning

PLAIN_S = 0.05


def promise(
    value: float = 0.3,
    backlog: float = 0.0,
    worths: TextWorths | None = None,
    n_looks: int = 0,
    *,
    could_pay: bool = True,
    horizon: float = 40.0,
    elapsed: float = 100.0,
) -> float:
    """What it promises to begin, all in plain tokens' time."""
    price = Price(0.2 * PLAIN_S, 0.2 * PLAIN_S, backlog * PLAIN_S)
    worth_s = worth_of_beginning(
        value * PLAIN_S,
        price,
        worths or TextWorths(start=value),
        n_looks,
        could_pay=lambda: could_pay,
        plain_s=PLAIN_S,
        horizon=horizon,
        elapsed_s=elapsed * PLAIN_S,
    )
    return worth_s / PLAIN_S


def after(worth: float, n_texts: int = 30) -> TextWorths:
    """What is known after so many texts that were worth as much."""
    worths = TextWorths(start=worth)
    for _ in range(n_texts):
        worths.add(worth, 0.9)
    return worths


def test_what_pays_and_has_nothing_to_read_begins() -> None:
    assert promise() > 0.0


def test_what_could_not_pay_if_it_were_always_right_does_not_begin() -> None:
    assert promise(-0.1) > 0.0  # this text may be better than it seems
    assert promise(-0.1, could_pay=False) < 0.0


def test_no_more_is_read_than_may_be_lost_or_than_the_answer_took_so_far() -> None:
    worths = after(0.5)
    worths.allowance = 12.0
    assert promise(0.5, 11.0, worths) > 0.0 >= promise(0.5, 13.0, worths)
    assert promise(0.5, 11.0, worths, elapsed=5.0) <= 0.0
    worths.allowance = -3.0
    assert promise(0.5, 0.1, worths) <= 0.0


def test_what_paid_in_nearly_every_text_may_read_more() -> None:
    def reads_at_most(worths: TextWorths) -> int:
        return max(n for n in range(60) if promise(0.5, n, worths, elapsed=11.25) > 0.0)

    differing = TextWorths(start=0.5)
    for _ in range(15):
        differing.add(1.5, 0.9)
        differing.add(-0.5, 0.9)
    assert reads_at_most(after(0.5)) == 22
    assert reads_at_most(differing) == reads_at_most(after(0.5, n_texts=1)) == 3


def test_earlier_texts_count_first_and_the_present_one_when_it_is_known() -> None:
    bad, good = after(-0.3), after(0.4)
    assert promise(0.4, 3.0, bad) <= 0.0 < promise(0.4, 3.0, bad, n_looks=4000)
    assert promise(-0.3, 3.0, good, n_looks=4000) <= 0.0 < promise(-0.3, 3.0, good)


def test_where_texts_differ_one_that_looks_bad_is_given_a_chance() -> None:
    alike, differing = after(-0.2), TextWorths(start=-0.2)
    for _ in range(15):
        differing.add(-0.9, 0.9)
        differing.add(0.5, 0.9)
    assert promise(-0.2, 2.0, alike) <= 0.0 < promise(-0.2, 2.0, differing)


def test_of_the_first_texts_there_is_more_to_learn() -> None:
    def reads_at_most(n_texts: int) -> float:
        return max(n / 4 for n in range(120) if promise(0.2, n / 4, after(0.2, n_texts)) > 0.0)

    limits = [reads_at_most(n_texts) for n_texts in (1, 5, 30)]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > 1.3 * limits[-1]


@given(
    st.floats(-1.0, 2.0), st.floats(0.0, 40.0), st.integers(0, 60), st.floats(1.0, 400.0), st.data()
)
def test_more_to_read_and_less_to_come_never_speak_for_beginning(
    value: float, backlog: float, n_looks: int, horizon: float, data: st.DataObject
) -> None:
    if promise(value, backlog, n_looks=n_looks, horizon=horizon) <= 0.0:
        more = data.draw(st.floats(backlog, 100.0))
        less = data.draw(st.floats(1.0, horizon))
        assert promise(value, more, n_looks=n_looks, horizon=less) <= 0.0


@pytest.mark.parametrize("n_looks", [0, 3, 500])
def test_nothing_is_promised_for_less_than_a_plain_round_gains(n_looks: int) -> None:
    assert promise(-2.0, n_looks=n_looks) <= 0.0
