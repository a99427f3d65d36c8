"""DRY's search for repetitions against its definition, and breakers in terms of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.system.arrays import TokenArray
from specgen.text.sampling import DryBreakers
from specgen.text.sampling.dry import dry_penalties
from tests.helpers.fake_backend import FakeVocabulary

BASE, MULTIPLIER = 1.75, 0.8


def penalties(
    text: TokenArray, breakers: DryBreakers, allowed_length: int, last_n: int = -1
) -> dict[int, float]:
    token_ids, amounts = dry_penalties(
        text,
        breakers,
        multiplier=MULTIPLIER,
        base=BASE,
        allowed_length=allowed_length,
        last_n=last_n,
    )
    assert (np.diff(token_ids) > 0).all()
    return dict(zip(token_ids.tolist(), amounts.tolist(), strict=True))


def slow_penalties(text: list[int], breakers: DryBreakers, allowed_length: int) -> dict[int, float]:
    """For each earlier token, as many of the tokens before it as are the text's last ones."""
    limit = len(text)
    for back, token in enumerate(reversed(text)):
        after = tuple(text[len(text) - back :])
        matching = [len(t) for t in breakers.tails.get(token, ()) if after[: len(t)] == t]
        if matching:
            limit = back - max(matching)
            break
    if limit < allowed_length or len(text) <= allowed_length:
        return {}
    longest: dict[int, int] = {}
    for place in range(1, len(text)):
        n = 0
        while n < place and text[place - 1 - n] == text[len(text) - 1 - n]:
            n += 1
        n = min(n, limit)
        if n >= allowed_length and not breakers.is_whole(text[place]):
            longest[text[place]] = max(n, longest.get(text[place], 0))
    largest = int(88.7228391 / np.log(BASE))
    return {
        token: MULTIPLIER * BASE ** min(n - allowed_length, largest) for token, n in longest.items()
    }


TEXTS = st.lists(st.integers(0, 2), max_size=40) | st.builds(
    lambda part, n, rest: part * n + rest,
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(2, 40),
    st.lists(st.integers(0, 3), max_size=3),
)
BREAKERS = st.dictionaries(
    st.integers(0, 3),
    st.frozensets(st.lists(st.integers(0, 3), max_size=2).map(tuple), min_size=1, max_size=3),
    max_size=2,
).map(DryBreakers)


@settings(max_examples=500)
@given(TEXTS, BREAKERS, st.integers(-1, 4))
def test_penalties_are_what_their_definition_says(
    text: list[int], breakers: DryBreakers, allowed_length: int
) -> None:
    found = penalties(np.array(text, np.int64), breakers, allowed_length)
    assert found == pytest.approx(slow_penalties(text, breakers, allowed_length))


def test_an_example() -> None:
    # a b c c b c y a b c: after "a b c" came c, after "c" also b, after "b c" also y.
    text = np.array([0, 1, 2, 2, 1, 2, 3, 0, 1, 2])
    assert penalties(text, DryBreakers(), 1) == pytest.approx(
        {2: MULTIPLIER * BASE**2, 1: MULTIPLIER, 3: MULTIPLIER * BASE}
    )
    assert penalties(text, DryBreakers(), 3) == pytest.approx({2: MULTIPLIER})
    assert penalties(text, DryBreakers(), 1, last_n=6) == pytest.approx({3: MULTIPLIER * BASE})
    # What comes before a breaker is not repeated.
    stop = DryBreakers({0: frozenset([()])})
    assert penalties(text, stop, 1)[2] == pytest.approx(MULTIPLIER * BASE)


VOCABULARY = FakeVocabulary(
    (b"a", b"b", b"c", b"\n", b" ", b":\n", b"ab", b"bc", b"abc", b"xab", b"ca", b"<end>"),
    ends=frozenset([11]),
)


def tails(*breakers: str) -> dict[int, set[tuple[int, ...]]]:
    return {
        token: set(found) for token, found in DryBreakers.of(VOCABULARY, breakers).tails.items()
    }


def test_breakers_in_terms_of_tokens() -> None:
    assert tails() == tails("") == {}
    assert tails("\n") == {3: {()}, 5: {()}}
    # "abc" as a whole; "a" and "ca" with the rest "bc", "ab" and "xab" with the rest "c".
    assert tails("abc") == {8: {()}, 0: {(7,)}, 10: {(7,)}, 6: {(2,)}, 9: {(2,)}}
    # Several ways at once: "ca" is whole for the one and begins the other.
    assert tails("ca", "abc")[10] == {(), (7,)}
    assert DryBreakers.of(VOCABULARY, ["\n"]).is_whole(5)
    assert not DryBreakers.of(VOCABULARY, ["abc"]).is_whole(0)


def test_a_long_breaker_is_cut_as_llama_cpp_does() -> None:
    assert tails("a" * 50) == tails("a" * 40)
    assert len(next(iter(tails("a" * 40)[0]))) == 20
