"""The tokens that a target found likely, translated into the vocabulary of a draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.translated import Translation
from specgen.train.target_text import soft_labels
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.vocabularies import target_texts, vocabularies, vocabulary

TARGET = vocabulary([b"a", b"b", b"c", b"ab", b"bc", b"\xff"], ["<s>", "</s>"])
DRAFT = vocabulary([b"c", b"b", b"a", b"abc"], ["<|im_end|>"])
A, B, C, AB, BC, STRAY, BEGIN, END = range(8)


def translated(
    answer: Sequence[int],
    top: Sequence[dict[int, float]],
    draft_tokens: Sequence[int],
    target: FakeVocabulary = TARGET,
    draft: FakeVocabulary = DRAFT,
) -> list[dict[int, float]]:
    """The probabilities by the draft's tokens for each place, those without any left out."""
    n_top = max(map(len, top))
    tokens = np.zeros((len(answer), n_top), np.int32)
    probabilities = np.zeros((len(answer), n_top), np.float16)
    for place, row in enumerate(top):
        tokens[place, : len(row)] = list(row)
        probabilities[place, : len(row)] = list(row.values())
    found = soft_labels(Translation(target, draft), answer, tokens, probabilities, draft_tokens)
    assert [array.dtype for array in found] == [np.int32, np.float16]
    assert [array.shape for array in found] == [(len(draft_tokens), n_top)] * 2
    rows: list[dict[int, float]] = []
    for own, shares in zip(*(array.tolist() for array in found), strict=True):
        rows.append({})
        for token, share in zip(own, shares, strict=True):
            if share:
                rows[-1][token] = rows[-1].get(token, 0.0) + share
    return rows


@pytest.mark.parametrize(
    ("answer", "top", "own", "wanted"),
    [
        # A likely token is the draft's token that it begins with: "ab" and "a" with "a", token 2.
        ([A], [{A: 0.5, AB: 0.25, C: 0.125}], [2], [{2: 0.75, 0: 0.125}]),
        # The chosen token is the one in the text: "abc" begins as the target's "ab" does.
        ([AB, C], [{AB: 0.5, A: 0.25}, {C: 1.0}], [3], [{3: 0.5, 2: 0.25}]),
        # Within a chosen token the text is known.
        (
            [AB, C],
            [{AB: 0.5, C: 0.5}, {C: 0.75, A: 0.25}],
            [2, 1, 0],
            [{2: 0.5, 0: 0.5}, {1: 1.0}, {0: 0.75, 2: 0.25}],
        ),
        # Ends are told by their role.
        (
            [A, END],
            [{A: 0.5, END: 0.25}, {END: 0.75, BEGIN: 0.25}],
            [2, 4],
            [{2: 0.5, 4: 0.25}, {4: 0.75}],
        ),
        # What the draft cannot say has no probability, and behind it the text alone is known.
        ([A], [{A: 0.5, STRAY: 0.5}], [2], [{2: 0.5}]),
        (
            [A, STRAY, B],
            [{A: 1.0}, {STRAY: 1.0}, {B: 0.5, C: 0.5}],
            [2, 1],
            [{2: 1.0}, {1: 1.0}],
        ),
    ],
)
def test_likely_tokens_in_the_drafts_vocabulary(
    answer: list[int],
    top: list[dict[int, float]],
    own: list[int],
    wanted: list[dict[int, float]],
) -> None:
    assert translated(answer, top, own) == wanted


@given(st.data(), vocabularies(), vocabularies())
def test_the_tokens_of_any_text_have_probability(
    data: st.DataObject, target: FakeVocabulary, draft: FakeVocabulary
) -> None:
    """Where the target is sure of what it said, so is the translation."""
    answer = data.draw(target_texts(target))
    text = Translation(target, draft).text((), ())
    text.follow(answer)
    if not text.tokens:
        return
    sure = [{token: 1.0} for token in answer]
    found = translated(answer, sure, text.tokens, target, draft)
    assert found == [{token: 1.0} for token in text.tokens]
