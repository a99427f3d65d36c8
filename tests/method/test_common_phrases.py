"""Phrases that language models have in common: n-grams draft them in the first answer."""

from __future__ import annotations

from pathlib import Path

import pytest

import specgen
from scripts.make_common_phrases import LEAST_PROMPTS, Answer, find_phrases
from specgen.drafters.shared_phrases import SharedPhrases
from specgen.drafters.stored_texts import read_texts
from tests.helpers.scripted import write_model_that_says
from tests.tiny import CHATML_TEMPLATE

QUESTION = {"messages": [{"role": "user", "content": "?"}]}


@pytest.mark.parametrize(
    ("text", "is_common"),
    [
        ("I hope this message finds you well. I am writing to express my", True),
        ("xq9 Zvj%k 4wLp~ Gy7u# bTm0", False),
    ],
)
def test_common_phrases_are_drafted_in_the_first_answer(
    tmp_path: Path, text: str, is_common: bool
) -> None:
    target = write_model_that_says(tmp_path / "target.gguf", CHATML_TEMPLATE, text, QUESTION)
    fixed = specgen.DraftOptions(policy="fixed")
    with specgen.load(target, "ngram", drafting=fixed) as model:
        answer = model.generate("?", temperature=0.0)
    assert answer.text == text
    # A token of the model is a byte.
    assert (answer.summary.n_accepted > len(text) / 2) == is_common


def test_common_phrases_are_searched_but_not_stored(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file, common=[[1, 2, 3, 4], [5, 6, 7]])
    phrases.add([90], [30, 1, 2, 3, 4, 31, 32, 33])
    phrases.add([91], [1, 2, 3, 4, 40, 31, 32, 33])
    for ending, following in (([1, 2, 3], 4), ([5, 6], 7), ([31, 32], 33)):
        match = phrases.index.longest(ending)
        assert match is not None
        assert phrases.index.followers(match).ranked() == [following]
    phrases.save()
    assert [phrase.tolist() for phrase in read_texts(file)] == [[31, 32, 33]]


def test_the_phrases_are_what_several_answers_share_without_their_prompts() -> None:
    assert LEAST_PROMPTS == 3
    answers = [
        Answer(1, [1], [10, 11, 12, 13, 50, 51, 52, 20]),
        Answer(1, [1], [10, 11, 12, 13, 50, 51, 52, 20]),  # another model's, to the same prompt
        Answer(2, [2], [10, 11, 12, 13, 50, 51, 52, 21, 30, 31, 32]),
        Answer(3, [3, 50, 51, 52], [60, 10, 11, 12, 13, 61, 50, 51, 52, 30, 31, 32]),
    ]
    assert find_phrases(answers) == [[10, 11, 12, 13], [50, 51, 52]]
