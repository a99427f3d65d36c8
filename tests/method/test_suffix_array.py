"""The suffix array against searching the texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters import suffix_array as array_module
from specgen.drafters.suffix_array import (
    MAX_MATCH,
    MAX_PLACES,
    Match,
    SuffixArray,
    sorted_suffixes,
)
from tests.method.test_suffix_drafter import following, longest

TEXT = st.lists(st.integers(0, 3), max_size=25)
TEXTS = st.lists(TEXT, max_size=5)


def check(
    array: SuffixArray, texts: list[list[int]], match: Match | None, ending: list[int]
) -> None:
    if not ending:
        assert match is None
        return
    assert match is not None
    assert match.length == len(ending)
    expected = following(texts, ending)
    followers = array.followers(match)
    assert {token: count for token, (count, _) in followers.items()} == Counter(expected)
    # Later places have larger numbers.
    by_place = sorted(followers, key=lambda token: followers[token][1])
    assert by_place == sorted(set(expected), key=expected[::-1].index)[::-1]


@given(TEXTS, TEXT)
def test_the_longest_match_and_its_followers(texts: list[list[int]], ending: list[int]) -> None:
    array = SuffixArray.build(texts)
    check(array, texts, array.longest(ending), longest(texts, ending))


@given(TEXTS, TEXT, st.lists(st.integers(0, 3), max_size=8))
def test_a_match_that_goes_on_is_the_longest_one_still(
    texts: list[list[int]], ending: list[int], further: list[int]
) -> None:
    array = SuffixArray.build(texts)
    match = array.longest(ending)
    for token in further:
        if match is None:
            break
        match = array.advance(match, token)
        ending = [*ending, token]
        if match is not None:
            check(array, texts, match, longest(texts, ending))


@given(st.lists(st.integers(0, 2), max_size=60), st.sampled_from([1, 2, 4, 8, 64]))
def test_suffixes_are_sorted(text: list[int], n_sorted: int) -> None:
    original = array_module.MAX_MATCH
    array_module.MAX_MATCH = n_sorted  # type: ignore[misc]
    try:
        order = sorted_suffixes(np.array(text, np.int32)).tolist()
    finally:
        array_module.MAX_MATCH = original  # type: ignore[misc]
    assert sorted(order) == list(range(len(text)))
    beginnings = [text[start : start + n_sorted] for start in order]
    assert beginnings == sorted(beginnings)


def test_token_ids_of_all_sizes_are_told_apart() -> None:
    texts = [[255, 256, 65536, 2**31 - 1, 1, 256, 7]]
    array = SuffixArray.build(texts)
    for n in range(1, len(texts[0])):
        match = array.longest(texts[0][:n])
        assert match is not None
        assert match.length == n
        assert set(array.followers(match)) == {texts[0][n]}


def test_a_huge_repetition() -> None:
    array = SuffixArray.build([[5] * 20_000])
    match = array.longest([5] * 300)
    assert match is not None
    assert match.length == MAX_MATCH
    assert MAX_PLACES // 2 < len(match.places) <= MAX_PLACES
    followers = array.followers(match)
    assert set(followers) == {5}
    longer = array.advance(match, 5)
    assert longer is not None
    assert longer.length == MAX_MATCH + 1
    assert array.advance(match, 6) is None


def test_a_frequent_match_is_sampled_evenly() -> None:
    """Occurrences are sorted by what stands before them; the last third goes on differently."""
    texts = [[before, 9, 1 if before < 2010 else 2] for before in range(10, 3010)]
    array = SuffixArray.build(texts)
    match = array.longest([9])
    assert match is not None
    counts = {token: count for token, (count, _) in array.followers(match).items()}
    assert set(counts) == {1, 2}
    assert sum(counts.values()) <= MAX_PLACES
    assert counts[1] > counts[2] > MAX_PLACES / 5


@given(texts=TEXTS, made_of=st.text())
def test_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], made_of: str
) -> None:
    path = tmp_path_factory.mktemp("arrays") / "array.npz"
    made_of = made_of.encode(errors="replace").decode()
    array = SuffixArray.build(texts, made_of)
    array.save(path)
    loaded = SuffixArray.load(path)
    assert loaded is not None
    assert loaded.made_of == made_of
    assert len(loaded) == len(array)
    for text in texts:
        assert loaded.longest(text) == array.longest(text)
    assert [file.name for file in path.parent.iterdir()] == ["array.npz"]


def test_a_missing_or_damaged_file_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "array.npz"
    assert SuffixArray.load(path) is None
    assert SuffixArray.load(tmp_path) is None
    SuffixArray.build([list(range(300))]).save(path)
    data = path.read_bytes()
    changed = bytearray(data)
    changed[700] ^= 1  # among the tokens
    for damaged in (b"", b"no array", data[:200], data[:-30], bytes(changed)):
        path.write_bytes(damaged)
        assert SuffixArray.load(path) is None
    numbers = np.arange(4, dtype=np.int32)
    source = np.frombuffer(b"x", np.uint8)
    for tokens, places in (
        (numbers, numbers + 1),
        (numbers, numbers[:3]),
        (numbers.astype(np.int64), numbers),
        (numbers, numbers.astype(np.float32)),
        (numbers.reshape(2, 2), numbers.reshape(2, 2)),
    ):
        np.savez(path, tokens=tokens, places=places, made_of=source)
        assert SuffixArray.load(path) is None
    np.savez(path, tokens=numbers)
    assert SuffixArray.load(path) is None
