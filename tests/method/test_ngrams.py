"""Drafts of what followed before: against their definition, by searching."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.lookup_texts import MAX_MATCH, MAX_PLACES, SuffixArray
from specgen.drafters.ngram import SuffixDrafter, confidence
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import RoundPlan

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)
Text = Sequence[int]


def following(texts: Sequence[Text], ending: Text) -> list[int]:
    """What follows an ending in the texts, once for each occurrence, in their order."""
    n = len(ending)
    return [
        text[start + n]
        for text in texts
        for start in range(len(text) - n)
        if list(text[start : start + n]) == list(ending)
    ]


def longest(texts: Sequence[Text], ending: Text) -> list[int]:
    """The longest part of an ending that the texts go on from."""
    parts = (list(ending[start:]) for start in range(max(0, len(ending) - MAX_MATCH), len(ending)))
    return next((part for part in parts if following(texts, part)), [])


def choose(followers: list[int]) -> int:
    """The latest, unless another one is three times as frequent."""
    latest = followers[-1]
    counts = {token: followers.count(token) for token in followers}
    most = max(counts.values())
    if most < 3 * counts[latest]:
        return latest
    return next(token for token in reversed(followers) if counts[token] == most)


def definition(
    text: Text, n_max: int, min_match: int, max_match: int, corpus: Sequence[Text] = ()
) -> Draft:
    tokens: list[int] = []
    origins: list[str] = []
    confidences: list[float] = []
    while len(tokens) < n_max:
        ending = [*text, *tokens]
        own, other = longest([text], ending), longest(corpus, ending)
        own = own if len(own) >= min_match else []
        n_other = max(len(own) + 2, min_match)
        if len(other) >= n_other and max_match >= n_other:
            match, followers, origin = other, following(corpus, other), "lookup"
        elif own:
            match, followers, origin = own, following([text], own), "ngram"
        else:
            break
        token = choose(followers)
        length = min(len(match), max_match)
        tokens.append(token)
        origins.append(origin)
        confidences.append(confidence(length, followers.count(token), len(followers)))
    chain = Draft.chain(tokens, "")
    return Draft(
        chain.tokens, chain.parents, tuple(origins), tuple(confidences), chain.distributions
    )


def propose(drafter: SuffixDrafter, text: Text, n_max: int) -> Draft:
    draft = draft_alone(drafter.propose(text, RoundPlan("fixed", n_max)))
    assert len(draft) <= n_max
    assert draft.is_chain
    assert not draft.is_drawn
    return draft


@given(TEXT, st.integers(1, 8), st.integers(1, 3), st.integers(3, 6))
def test_drafts_continue_the_longest_match(
    text: list[int], n_max: int, min_match: int, max_match: int
) -> None:
    expected = definition(text, n_max, min_match, max_match)
    drafter = SuffixDrafter(min_match, max_match)
    # Whether the text comes at once or grows token by token makes no difference.
    for length in range(1, len(text)):
        propose(drafter, text[:length], n_max)
    assert propose(drafter, text, n_max) == expected
    assert propose(drafter, text, n_max) == expected
    assert propose(SuffixDrafter(min_match, max_match), text, n_max) == expected


@given(
    TEXT,
    st.lists(TEXT, max_size=3),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(3, 10),
)
def test_corpora_are_followed_where_they_match_more(
    text: list[int], corpus: list[list[int]], n_max: int, min_match: int, max_match: int
) -> None:
    drafter = SuffixDrafter(min_match, max_match, [SuffixArray.build(corpus)])
    expected = definition(text, n_max, min_match, max_match, corpus)
    assert propose(drafter, text, n_max) == expected
    # An array that matches nothing changes nothing.
    corpora = [SuffixArray.build([[7, 8, 9]]), SuffixArray.build(corpus), SuffixArray.build([])]
    assert propose(SuffixDrafter(min_match, max_match, corpora), text, n_max) == expected


@given(TEXT, st.lists(st.tuples(st.integers(0, 40), TEXT), max_size=4))
def test_a_rewound_drafter_is_as_if_it_had_never_gone_further(
    text: list[int], changes: list[tuple[int, list[int]]]
) -> None:
    drafter = SuffixDrafter(1, 4)
    propose(drafter, text, 2)
    for n_kept, ending in changes:
        drafter.rewind(n_kept)
        text = text[:n_kept] + ending
        assert propose(drafter, text, 5) == propose(SuffixDrafter(1, 4), text, 5)


def test_a_match_needs_the_least_length() -> None:
    assert propose(SuffixDrafter(2, 3), [1, 2, 3, 9, 3], 4) is NO_DRAFT
    assert propose(SuffixDrafter(1, 3), [], 4) is NO_DRAFT


def test_a_repetition_goes_on_beyond_the_end_of_the_text() -> None:
    draft = propose(SuffixDrafter(2, 32), [9, 1, 2, 3, 1, 2, 3, 1, 2], 10)
    assert draft.tokens == (3, 1, 2, 3, 1, 2, 3, 1, 2, 3)
    probabilities = [p for p in draft.probabilities if p is not None]
    assert probabilities[0] < max(probabilities)
    assert propose(SuffixDrafter(1, 8), [5] * 500, 6).tokens == (5,) * 6


@given(st.integers(1, 64), st.integers(1, 40), st.integers(0, 40))
def test_confidence_grows_with_length_and_agreement(
    length: int, n_agreeing: int, n_others: int
) -> None:
    n = n_agreeing + n_others
    value = confidence(length, n_agreeing, n)
    assert 0.0 < value < 1.0
    assert value < confidence(length + 1, n_agreeing, n)
    assert value < confidence(length, n_agreeing + 1, n + 1)
    assert value > confidence(length, n_agreeing, n + 1)
    if n_others:
        assert value < confidence(length, n_agreeing + 1, n)


def test_the_better_of_several_corpora_is_followed() -> None:
    short, long = [5, 6, 1], [4, 5, 6, 2]
    for corpora in ([short, long], [long, short]):
        drafter = SuffixDrafter(2, 8, [SuffixArray.build([text]) for text in corpora])
        assert propose(drafter, [3, 4, 5, 6], 1).tokens == (2,)
    # Of equally long matches that in the last one.
    drafter = SuffixDrafter(2, 8, [SuffixArray.build([[5, 6, token]]) for token in (1, 2, 3)])
    assert propose(drafter, [5, 6], 1).tokens == (3,)


# --- corpora that are searched


def test_token_ids_of_all_sizes_are_told_apart() -> None:
    text = [255, 256, 65536, 2**31 - 1, 1, 256, 7]
    array = SuffixArray.build([text])
    for n in range(1, len(text)):
        match = array.longest(text[:n])
        assert match is not None
        assert match.length == n
        assert set(array.followers(match)) == {text[n]}


def test_a_huge_repetition() -> None:
    array = SuffixArray.build([[5] * 20_000])
    match = array.longest([5] * 300)
    assert match is not None
    assert match.length == MAX_MATCH
    assert MAX_PLACES // 2 < len(match.places) <= MAX_PLACES
    assert set(array.followers(match)) == {5}
    longer = array.longer(match, [5] * 301)
    assert longer is not None
    assert longer.length == MAX_MATCH + 1
    assert array.longer(match, [6]) is None
