"""Texts of earlier runs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters import lookup_texts as store_module
from specgen.drafters.lookup_texts import EarlierTexts
from specgen.drafters.suffix_array import IntArray, SuffixArray, joined, split


def texts(store: EarlierTexts) -> list[list[int]]:
    return [text.tolist() for text in store.texts()]


def in_arrays(store: EarlierTexts) -> list[list[int]]:
    """All texts in the order of the arrays."""
    return [text.tolist() for array in store.arrays() for text in split(array.tokens)]


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=5), max_size=6))
def test_texts_come_back_once_and_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, added: list[list[int]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    expected: list[list[int]] = []
    for text in added:
        EarlierTexts(root, "v").add(text)
        expected += [text] if text and text not in expected else []
        assert texts(EarlierTexts(root, "v")) == expected
    assert in_arrays(EarlierTexts(root, "v")) == expected


def test_vocabularies_do_not_mix(tmp_path: Path) -> None:
    EarlierTexts(tmp_path, "../a/b").add([1, 2])
    EarlierTexts(tmp_path, "c").add([3])
    assert texts(EarlierTexts(tmp_path, "../a/b")) == [[1, 2]]
    assert texts(EarlierTexts(tmp_path, "c")) == [[3]]
    assert EarlierTexts(tmp_path, "d").arrays() == ()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_oldest_texts_go(tmp_path: Path) -> None:
    store = EarlierTexts(tmp_path, "v", max_bytes=4 * 12)
    for first in range(6):
        store.add([first] * 3)
    assert texts(store) == [[3] * 3, [4] * 3, [5] * 3]
    # Of a text that is too large the end is kept.
    store.add(list(range(100)))
    assert texts(store) == [list(range(88, 100))]


def test_the_array_is_kept_and_new_texts_stand_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_: list[int] = []
    original = SuffixArray.build

    def build(texts: list[IntArray], made_of: str = "") -> SuffixArray:
        sorted_.append(len(texts))
        return original(texts, made_of)

    monkeypatch.setattr(SuffixArray, "build", build)
    monkeypatch.setattr(store_module, "MAX_NEW", 20)
    store = EarlierTexts(tmp_path, "v")
    for first in range(3):
        store.add([first] * 10)

    def check(*n_sorted: int) -> None:
        sorted_.clear()
        assert in_arrays(store) == texts(store)
        assert sorted_ == list(n_sorted)

    check(3, 0)
    check(0)  # once
    store.add([3] * 10)
    check(1)  # the new one alone
    store.add([4] * 11)
    check(5, 0)
    # A damaged array, and one of other texts, is made again.
    for damage in (b"damaged", None):
        if damage is None:
            original([[7] * 9]).save(store.folder / "texts.npz")
        else:
            (store.folder / "texts.npz").write_bytes(damage)
        assert [text[0] for text in in_arrays(store)] == [0, 1, 2, 3, 4]


def test_a_store_that_is_damaged_or_cannot_be_written_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    store = EarlierTexts(place, "v")
    store.add([1, 2, 3])
    assert store.arrays() == ()

    store = EarlierTexts(tmp_path / "store", "v")
    store.add([1])
    with monkeypatch.context() as patch:

        def full(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("specgen.drafters.suffix_array.replace_bytes", full)
        patch.setattr(store_module, "MAX_NEW", 0)
        store.add([2])
        assert texts(store) == in_arrays(store) == [[1]]
    (file,) = store.folder.glob("*.npz")
    data = bytearray(file.read_bytes())
    at = data.index(joined([[1]]).tobytes())
    data[at] ^= 8
    file.write_bytes(data)
    assert texts(store) == []
    store.add([3])
    assert texts(store) == [[3]]


def add_many(root: Path, first: int, n: int) -> None:
    store = EarlierTexts(root, "v")
    for number in range(first, first + n):
        store.add([number] * 5)
        store.arrays()


def test_several_processes_add_at_once(tmp_path: Path) -> None:
    # Not forked: the test's own threads would be copied half alive.
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=add_many, args=(tmp_path, 100 * number, 10)) for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    kept = np.array(texts(EarlierTexts(tmp_path, "v")))
    assert len(kept) == 30
    for number in range(3):
        own = [first for first in kept[:, 0] if first // 100 == number]
        assert own == list(range(100 * number, 100 * number + 10))
