"""The suffix automaton against searching the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specgen.decoding.drafters.lookup.automaton import NOWHERE, Cursor, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def ends(text: list[int], string: list[int]) -> list[int]:
    """Where a string's occurrences end: the index of the last token of each."""
    n = len(string)
    return [end for end in range(n - 1, len(text)) if text[end - n + 1 : end + 1] == string]


def followed(text: list[int], ending: list[int]) -> list[int]:
    """The longest ending that occurs in the text with something behind it."""
    for start in range(len(ending)):
        if any(end < len(text) - 1 for end in ends(text, ending[start:])):
            return ending[start:]
    return []


def check_followers(
    automaton: SuffixAutomaton, text: list[int], cursor: Cursor, string: list[int]
) -> None:
    """That the cursor stands for the string, and what the automaton says of it."""
    assert cursor.length == len(string)
    if not string:
        assert cursor == NOWHERE
        return
    expected = {text[end + 1] for end in ends(text, string) if end + 1 < len(text)}
    followers = automaton.followers(cursor)
    assert set(followers) == expected
    for token, state in followers.items():
        places = ends(text, [*string, token])
        assert automaton.count(state) == len(places)
        assert automaton.end(state) == max(places)


def everything(automaton: SuffixAutomaton) -> tuple[object, ...]:
    """All that it holds."""
    return tuple(getattr(automaton, name) for name in sorted(vars(automaton)))


@given(TEXTS)
def test_the_cursor_is_the_longest_ending_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for length, token in enumerate(text, start=1):
        automaton.extend(token)
        assert len(automaton) == length
        so_far = text[:length]
        check_followers(automaton, so_far, automaton.cursor(), followed(so_far, so_far))


@given(TEXTS, st.lists(st.integers(0, 4), max_size=12))
def test_a_cursor_goes_on_with_tokens_that_are_not_in_the_text(
    text: list[int], further: list[int]
) -> None:
    automaton = SuffixAutomaton(text)
    cursor = automaton.cursor()
    string = followed(text, text)
    for token in further:
        cursor = automaton.advance(cursor, token)
        string = followed(text, [*string, token])
        check_followers(automaton, text, cursor, string)
    assert len(automaton) == len(text)


@given(st.lists(st.integers(0, 2), max_size=25))
def test_every_string_of_the_text_is_counted(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    for start in range(len(text)):
        cursor = NOWHERE
        for length, token in enumerate(text[start:], start=1):
            cursor = Cursor(automaton.followers(cursor)[token], length)
            places = ends(text, text[start : start + length])
            assert automaton.count(cursor.state) == len(places)
            assert automaton.end(cursor.state) == max(places)


@given(TEXTS)
def test_a_shorter_cursor_stands_at_more_places(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    cursor, string = automaton.cursor(), followed(text, text)
    while string:
        places = ends(text, string)
        while string and ends(text, string) == places:
            string = string[1:]
        cursor = automaton.shorter(cursor)
        check_followers(automaton, text, cursor, string)
    assert automaton.shorter(cursor) == NOWHERE


@given(TEXTS, st.lists(st.tuples(st.integers(0, 40), TEXTS), max_size=5))
def test_rewinding_leaves_no_trace(text: list[int], changes: list[tuple[int, list[int]]]) -> None:
    automaton = SuffixAutomaton(text)
    for n_kept, ending in changes:
        automaton.rewind(n_kept)
        text = text[:n_kept] + ending
        for token in ending:
            automaton.extend(token)
        assert everything(automaton) == everything(SuffixAutomaton(text))


def test_rewinding_to_more_or_fewer_tokens_than_there_are() -> None:
    automaton = SuffixAutomaton([1, 2, 1])
    automaton.rewind(5)
    assert everything(automaton) == everything(SuffixAutomaton([1, 2, 1]))
    automaton.rewind(-1)
    assert everything(automaton) == everything(SuffixAutomaton())


def test_a_text_without_repetition_has_no_match() -> None:
    assert SuffixAutomaton().cursor() == NOWHERE
    assert SuffixAutomaton([7]).cursor() == NOWHERE
    assert SuffixAutomaton(range(50)).cursor() == NOWHERE
    assert SuffixAutomaton().advance(NOWHERE, 3) == NOWHERE


def test_a_token_updates_a_bounded_number_of_states() -> None:
    n_counted, n_tokens = 4, 500
    automaton = SuffixAutomaton([5] * n_tokens, n_counted=n_counted)
    # The longest strings are those that are counted; the shorter ones are not all.
    cursor = automaton.cursor()
    assert cursor.length == n_tokens - 1
    assert automaton.count(automaton.followers(cursor)[5]) == 1
    assert automaton.count(automaton.followers(NOWHERE)[5]) < n_tokens
    automaton.rewind(20)
    assert everything(automaton) == everything(SuffixAutomaton([5] * 20, n_counted=n_counted))


@given(st.lists(st.integers(0, 2), min_size=3, max_size=60))
def test_its_size_is_proportional_to_the_text(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    n_states, n_transitions = automaton.size
    assert n_states <= 2 * len(text)
    assert n_transitions <= 3 * len(text)
