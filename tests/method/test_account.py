"""When a draft model starts in a text, and the account of what drafting saved or lost there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.method.acceptance import TextWorths
from specgen.method.cost_table import Price
from specgen.method.policy.account import Account, prefill_limit_s, worth_of_starting

PLAIN_S = 0.05


def promise(
    value: float = 0.3,
    backlog: float = 0.0,
    worths: TextWorths | None = None,
    n_looks: int = 0,
    *,
    horizon: float = 40.0,
    elapsed: float = 100.0,
) -> float:
    """What it promises to start, all in plain tokens' time; nothing where the prefill is too long."""
    price = Price(0.2 * PLAIN_S, 0.2 * PLAIN_S, backlog * PLAIN_S)
    worths = worths or TextWorths(start=value)
    worth_s = worth_of_starting(
        value * PLAIN_S, price, worths, n_looks, plain_s=PLAIN_S, n_rounds=horizon
    )
    limit_s = prefill_limit_s(price, worths, PLAIN_S, elapsed * PLAIN_S)
    return (min(worth_s, 0.0) if price.backlog_s > limit_s else worth_s) / PLAIN_S


def after(worth: float, n_texts: int = 30) -> TextWorths:
    """What is known after so many texts that were worth as much."""
    worths = TextWorths(start=worth)
    for _ in range(n_texts):
        worths.add(worth, 0.9)
    return worths


def test_what_pays_and_has_nothing_to_read_begins() -> None:
    assert promise() > 0.0


def test_a_text_may_be_better_than_it_seems() -> None:
    assert promise(-0.1) > 0.0
    assert promise(-2.0) <= 0.0


def test_no_more_is_read_than_may_be_lost_or_than_the_answer_took_so_far() -> None:
    worths = after(0.5)
    worths.allowance = 12.0
    assert promise(0.5, 11.0, worths) > 0.0 >= promise(0.5, 13.0, worths)
    assert promise(0.5, 11.0, worths, elapsed=5.0) <= 0.0
    worths.allowance = -3.0
    assert promise(0.5, 0.1, worths) <= 0.0


def test_what_paid_in_nearly_every_text_may_read_more() -> None:
    def reads_at_most(worths: TextWorths) -> int:
        return max(
            n for n in range(60) if promise(0.5, n, worths, horizon=60.0, elapsed=11.25) > 0.0
        )

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


def test_a_drafter_that_lost_too_much_waits_and_longer_each_time() -> None:
    account = Account()
    waits = []
    for _ in range(3):
        while not account.is_put_aside("model"):
            account.begin_round()
            account.observe("model", 2.0, 1, 1.0)
        n = 0
        while account.is_put_aside("model"):
            account.begin_round()
            account.observe(None, 1.0, 1, 1.0)
            n += 1
        waits.append(n)
    assert waits == [16, 32, 64]
    assert not account.is_put_aside("ngram")


def test_what_was_saved_covers_a_part_of_what_is_lost() -> None:
    def rounds_until_aside(n_saved: int) -> int:
        account = Account()
        for _ in range(n_saved):
            account.observe("model", 1.0, 2, 1.0)
        n = 0
        while not account.is_put_aside("model"):
            account.observe("model", 2.0, 1, 1.0)
            n += 1
        return n

    assert rounds_until_aside(0) == 5
    assert rounds_until_aside(4) == 9
    assert rounds_until_aside(50) == 13


def test_trials_take_a_hundredth_of_the_time() -> None:
    account = Account()
    assert not account.allows_trial(0.5)
    for _ in range(100):
        account.observe(None, 1.0, 1, 1.0)
    assert account.allows_trial(1.0)
    account.observe("model", 1.9, 1, 1.0, is_trial=True)
    assert not account.allows_trial(0.5)
    assert not account.is_put_aside("model")


def test_the_recent_time_of_a_token_follows_the_rounds() -> None:
    account = Account()
    assert account.token_s is None
    for _ in range(60):
        account.observe("model", 1.0, 4, 1.0)
    assert account.token_s == pytest.approx(0.25, abs=0.01)
    assert account.left_by_ngrams == 1.0
    assert account.n_rounds_left(40) == pytest.approx(0.75 * 10, abs=0.4)
    for _ in range(60):
        account.observe("ngram", 1.0, 2, 1.0)
    assert account.token_s == pytest.approx(0.5, abs=0.05)
    assert account.left_by_ngrams < 0.05


def rounds(*done: tuple[float, int], by: str | None = None) -> Account:
    """The account after rounds of so many plain tokens' time that added so many tokens."""
    account = Account()
    for round_s, n_tokens in done:
        account.observe(by, round_s, n_tokens, 1.0)
    return account


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 17)), min_size=1, max_size=80))
def test_the_recent_time_lies_between_the_rounds_and_plain_decoding(
    done: list[tuple[float, int]],
) -> None:
    account = rounds(*done)
    times = [1.0, *(round_s / n_tokens for round_s, n_tokens in done)]
    assert account.token_s is not None
    assert min(times) * 0.999 <= account.token_s <= max(times) * 1.001
    assert 1.0 <= account.tokens_a_round <= max(n_tokens for _, n_tokens in done)


def test_a_few_rounds_change_it_at_first_and_few_later() -> None:
    early, late = rounds(*[(1.6, 4)] * 4), rounds(*[(1.0, 1)] * 60, *[(1.6, 4)] * 4)
    assert early.token_s is not None
    assert late.token_s is not None
    assert early.token_s < 0.6 < late.token_s < 0.9


def test_when_a_model_starts_it_follows_as_at_first() -> None:
    account = rounds(*[(1.0, 1)] * 60)
    for _ in range(4):
        account.observe("model", 1.6, 4, 1.0)
    assert account.token_s == pytest.approx(rounds(*[(1.6, 4)] * 4).token_s)


def test_seconds_and_tokens_are_averaged_apart() -> None:
    # A long round of one token weighs as much as it took, not as one of two equal paces.
    assert rounds(*[(10.0, 1), (1.0, 10)] * 200).token_s == pytest.approx(11.0 / 11, rel=0.1)


def test_a_model_is_left_the_rounds_in_which_no_n_grams_draft() -> None:
    account = Account()
    for number in range(200):
        account.observe("ngram" if number % 4 else None, 1.0, 2, 1.0)
    assert account.left_by_ngrams == pytest.approx(0.25, abs=0.05)
    for _ in range(12):
        account.observe("model", 1.0, 1, 1.0)
    assert account.left_by_ngrams > 0.7
