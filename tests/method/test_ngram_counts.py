"""Calibrated n-grams: what is counted, and the probabilities that follow from the counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.ngram_counts import (
    LONGEST,
    MOST_OFTEN,
    Evidence,
    NgramCounts,
    Place,
    TextChances,
)
from specgen.drafters.suffix_index import SuffixArray
from specgen.method.draft import Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import RoundPlan

PLACES: Sequence[Place] = get_args(Place)
EVIDENCE = st.builds(
    Evidence,
    st.sampled_from(PLACES),
    st.integers(1, LONGEST),
    st.integers(1, MOST_OFTEN),
    st.booleans(),
)


def propose(drafter: SuffixDrafter, text: Sequence[int], n_max: int = 4) -> Draft:
    return draft_alone(drafter.propose(text, RoundPlan("fixed", n_max)))


def counted(counts: NgramCounts) -> dict[Evidence, tuple[int, int]]:
    """The tries and hits of each evidence, without what was forgotten since."""
    return {
        evidence: (round(n_tries), round(n_hits)) for evidence, n_tries, n_hits in counts.entries()
    }


def test_every_kind_of_match_has_a_prior() -> None:
    lengths = range(1, LONGEST + 1)
    numbers = range(1, MOST_OFTEN + 1)
    for fields in itertools.product(PLACES, lengths, numbers, (False, True)):
        assert 0.0 < Evidence(*fields).prior < 1.0


def test_long_and_frequent_matches_count_together() -> None:
    assert Evidence.of("answer", 40, 9, 9) == Evidence("answer", LONGEST, MOST_OFTEN, True)
    assert Evidence.of("answer", 2, 1, 3) == Evidence("answer", 2, 1, False)


@given(EVIDENCE, st.lists(st.booleans(), min_size=400, max_size=400))
def test_the_rate_approaches_the_counts(evidence: Evidence, outcomes: list[bool]) -> None:
    counts = NgramCounts()
    assert counts.rate(evidence) == evidence.prior
    for came_next in outcomes:
        counts.add(evidence, came_next=came_next)
    share = sum(outcomes) / len(outcomes)
    assert counts.rate(evidence) == pytest.approx(share, abs=0.12)
    others = [other for other in [Evidence("prompt", 1, 1, False)] if other != evidence]
    assert all(counts.rate(other) == other.prior for other in others)


@given(EVIDENCE)
def test_a_text_that_repeats_itself_more_raises_all_its_chances(evidence: Evidence) -> None:
    weak = Evidence("answer", 1, 1, False)

    def chance_after(*, came_next: bool) -> float:
        text = TextChances(NgramCounts())
        for _ in range(40):
            text.learn(weak, came_next=came_next)
        return text.chance(evidence)

    unknown = TextChances(NgramCounts()).chance(evidence)
    assert chance_after(came_next=False) < unknown < chance_after(came_next=True)


def test_another_text_starts_with_the_counts_but_without_the_deviation() -> None:
    counts = NgramCounts()
    weak = Evidence("answer", 1, 1, False)
    strong = Evidence("prompt", LONGEST, 1, True)
    edit = TextChances(counts)
    before = edit.chance(weak), edit.chance(strong)
    for _ in range(40):
        edit.learn(weak, came_next=True)
    other = TextChances(counts)
    assert before[0] < other.chance(weak) < edit.chance(weak)
    assert before[1] == other.chance(strong) < edit.chance(strong)


@given(st.lists(st.tuples(EVIDENCE, st.booleans()), max_size=50))
def test_counts_survive_being_stored(outcomes: list[tuple[Evidence, bool]]) -> None:
    counts = NgramCounts()
    for evidence, came_next in outcomes:
        counts.add(evidence, came_next=came_next)
    restored = NgramCounts.restore(counts.entries())
    assert bool(restored) == bool(counts) == bool(outcomes)
    for evidence, _ in outcomes:
        assert restored.rate(evidence) == counts.rate(evidence)


def test_every_token_of_the_answer_is_counted_and_none_of_the_prompt() -> None:
    counts = NgramCounts()
    drafter = SuffixDrafter(1, 8, n_prompt=4, counts=counts)
    prompt = [1, 2, 3, 1]
    propose(drafter, prompt)
    assert not counts
    # After 1 came 2. It comes again, and then 3, but 9 does not follow from anything.
    propose(drafter, [*prompt, 2, 3, 9, 5])
    assert counted(counts) == {
        Evidence("prompt", 1, 1, True): (1, 1),
        Evidence("prompt", 2, 1, True): (1, 1),
        Evidence("prompt", 3, 1, True): (1, 0),
    }
    # 5 followed 9 in the answer.
    propose(drafter, [*prompt, 2, 3, 9, 5, 9, 5])
    assert counted(counts)[Evidence("answer", 1, 1, True)] == (1, 1)


def test_it_is_counted_whether_or_not_it_was_drafted() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
    asked_always = NgramCounts()
    drafter = SuffixDrafter(1, 8, counts=asked_always)
    for length in range(1, len(text) + 1):
        propose(drafter, text[:length])
    asked_rarely = NgramCounts()
    drafter = SuffixDrafter(1, 8, counts=asked_rarely)
    propose(drafter, text[:1])
    propose(drafter, text, n_max=1)
    assert list(asked_always.entries()) == list(asked_rarely.entries())


def test_other_texts_are_counted_apart() -> None:
    counts = NgramCounts()
    files = [SuffixArray.build([[1, 2, 3]])]
    earlier = [SuffixArray.build([[1, 2, 4]])]
    drafter = SuffixDrafter(1, 8, files=files, earlier=earlier, counts=counts)
    propose(drafter, [1])
    propose(drafter, [1, 2, 4])
    assert counted(counts) == {
        Evidence("earlier", 1, 1, True): (1, 1),
        Evidence("earlier", 2, 1, True): (1, 1),
        Evidence("file", 1, 1, True): (1, 1),
        Evidence("file", 2, 1, True): (1, 0),
    }


def test_continuations_that_failed_in_this_text_rank_below_those_that_were_right() -> None:
    counts = NgramCounts()
    for _ in range(200):
        counts.add(Evidence("file", 1, 1, True), came_next=False)
        counts.add(Evidence("earlier", 1, 1, True), came_next=True)
    drafter = SuffixDrafter(
        1,
        8,
        files=[SuffixArray.build([[7, 1]])],
        earlier=[SuffixArray.build([[7, 2]])],
        counts=counts,
        n_children=3,
    )
    draft = propose(drafter, [7], n_max=2)
    assert draft.tokens == (2, 1)
    assert draft.is_calibrated
    likely, unlikely = draft.probabilities
    assert likely is not None
    assert unlikely is not None
    assert likely > 0.5
    assert unlikely < 0.1
