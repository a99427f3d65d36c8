"""Phrases that answers have in common: which are found, which are kept, and where."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specgen
from specgen.drafters.shared_phrases import MAX_TOKENS, SHORTEST, SharedPhrases
from specgen.drafters.stored_texts import SEPARATOR, join_texts, read_texts
from specgen.drafters.suffix_index import MAX_MATCH
from tests.helpers.disk import full_disk
from tests.helpers.scripted import write_model_that_says
from tests.tiny import CHATML_TEMPLATE

Text = Sequence[int]
#: Few tokens, so that texts have phrases in common.
TEXT = st.lists(st.integers(0, 4), max_size=12)


def kept(file: Path) -> list[list[int]]:
    return [phrase.tolist() for phrase in read_texts(file)]


def runs_of(text: Text) -> set[tuple[int, ...]]:
    """The shortest phrases in a text."""
    return {tuple(text[i : i + SHORTEST]) for i in range(len(text) - SHORTEST + 1)}


@given(st.lists(st.tuples(TEXT, TEXT), max_size=6, unique_by=lambda each: tuple(each[0])))
def test_phrases_are_what_answers_share_without_their_prompts(
    answers: list[tuple[list[int], list[int]]],
) -> None:
    """Compared by their definition, one phrase of the shortest length at a time."""
    phrases = SharedPhrases()
    seen: set[tuple[int, ...]] = set()
    shared: set[tuple[int, ...]] = set()
    for prompt, answer in answers:
        phrases.add(prompt, answer)
        own = runs_of(answer) - runs_of(prompt)
        shared |= own & seen
        seen |= own
    for run in seen:
        match = phrases.index.longest(list(run[:-1]))
        found = match is not None and match.length == SHORTEST - 1
        tokens = phrases.index.followers(match).counts if match is not None and found else {}
        assert (run[-1] in tokens) == (run in shared)


def test_neighbouring_runs_are_one_phrase(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    phrases.add([1], [10, 11, 12, 13, 14, 15, 16])
    phrases.add([2], [20, 11, 12, 13, 14, 21, 15, 16])
    phrases.add([3], [30, 11, 12, 13, 31])  # nothing new
    phrases.add([4], [10, 11, 12, 13])  # the phrase has a new beginning
    phrases.save()
    assert kept(file) == [[11, 12, 13, 14], [10, 11, 12, 13]]


def test_another_answer_to_the_same_prompt_shares_nothing(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    for prompt in ([1], [1], [2]):
        phrases.add(prompt, [10, 11, 12])
        phrases.save()
        assert kept(file) == ([] if prompt == [1] else [[10, 11, 12]])


def test_only_phrases_are_stored(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    for first in (5000, 6000):
        phrases.add([first], [*range(first, first + 40), 1, 2, 3])
    phrases.save()
    with np.load(file) as stored:
        assert {name: stored[name].tolist() for name in stored} == {"tokens": [1, 2, 3, SEPARATOR]}
    # Nothing else is known to the next process.
    again = SharedPhrases(file)
    again.add([7000], range(5000, 5040))
    again.save()
    assert kept(file) == [[1, 2, 3]]
    assert again.index.longest([1, 2]) is not None


def test_the_older_half_of_many_phrases_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    text = list(range(100))
    old_index = phrases.index
    n_texts = MAX_TOKENS // 100 + 1
    for number in range(n_texts):
        for prompt in (2 * number, 2 * number + 1):
            phrases.add([prompt], [1000 * number + token for token in text])
    phrases.save()
    assert len(phrases.index) <= MAX_TOKENS
    firsts = [text[0] // 1000 for text in kept(file)]
    assert firsts == list(range(n_texts - len(firsts), n_texts))
    # Whoever uses the old index can go on with it.
    match = old_index.longest([0, 1, 2])
    assert match is not None
    assert match.length == 3
    assert phrases.index.longest([0, 1, 2]) is None


def test_the_newest_phrase_is_kept_however_long_it_is(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    n_tokens = MAX_TOKENS // 2 + 1
    for number in range(2):
        text = range(number * n_tokens, (number + 1) * n_tokens)
        for prompt in (2 * number, 2 * number + 1):
            phrases.add([prompt], text)
    phrases.save()
    assert [len(text) for text in kept(file)] == [n_tokens]
    assert phrases.index.longest([n_tokens, n_tokens + 1]) is not None
    assert phrases.index.longest([0, 1]) is None


def test_a_phrase_is_stored_once_however_often_it_is_found(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    processes = (SharedPhrases(file), SharedPhrases(file))
    for phrases in processes:
        phrases.add([1], [10, 11, 12])
        phrases.add([2], [10, 11, 12, 5, 10, 11, 12])
        phrases.save()
    assert kept(file) == [[10, 11, 12]]


def add_many(file: Path, number: int) -> None:
    phrases = SharedPhrases(file)
    for text in range(20):
        first = 1000 * number + 10 * text
        for prompt in (2 * first, 2 * first + 1):
            phrases.add([prompt], range(first, first + SHORTEST))
    phrases.save()


def test_several_processes_add_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    # Not forked: the test's own threads would be copied half alive.
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=add_many, args=(file, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    expected = [1000 * number + 10 * text for number in range(3) for text in range(20)]
    assert sorted(phrase[0] for phrase in kept(file)) == expected


@pytest.mark.parametrize("damage", ["half", "text", "other arrays", "folder"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    for prompt in (1, 2):
        phrases.add([prompt], [10, 11, 12])
    phrases.save()
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "other arrays":
        np.savez(file, allow_pickle=False, tokens=np.ones((2, 2)))
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "half" else b"text")
    phrases = SharedPhrases(file)
    assert phrases.index.longest([10, 11]) is None
    for prompt in (1, 2):
        phrases.add([prompt], [10, 11, 12])
    assert phrases.index.longest([10, 11]) is not None
    phrases.save()
    assert kept(file) == ([] if damage == "folder" else [[10, 11, 12]])


def test_phrases_stay_in_memory_if_the_disk_is_full(tmp_path: Path) -> None:
    file = tmp_path / "phrases.npz"
    phrases = SharedPhrases(file)
    with full_disk():
        for prompt in (1, 2):
            phrases.add([prompt], [10, 11, 12])
            phrases.save()
    assert phrases.index.longest([10, 11]) is not None
    assert not file.exists()


def test_phrases_of_any_length_are_found() -> None:
    phrases = SharedPhrases()
    text = list(range(100, 100 + 2 * MAX_MATCH))
    phrases.add([1], text)
    phrases.add([2], text)
    for length in range(1, MAX_MATCH):
        match = phrases.index.longest(text[:length])
        assert match is not None
        assert match.length == length
    assert join_texts([text]).size == len(phrases.index)


def test_phrases_of_earlier_answers_are_drafted(tmp_path: Path) -> None:
    """The model says the same whatever it is asked. From the third answer on, that is drafted."""
    text = "xq9 Zvj%k 4wLp~ Gy7u# bTm0"
    body = {"messages": [{"role": "user", "content": "a"}]}
    target = write_model_that_says(tmp_path / "target.gguf", CHATML_TEMPLATE, text, body)
    fixed = specgen.DraftOptions(policy="fixed")
    with specgen.load(target, "ngram", drafting=fixed) as model:
        answers = [model.generate(prompt, temperature=0.0) for prompt in "abcd"]
    assert [answer.text for answer in answers] == [text] * 4
    first, second, *later = [answer.summary.n_accepted for answer in answers]
    assert max(first, second) < len(text) / 2 < min(later)  # a token of the model is a byte
