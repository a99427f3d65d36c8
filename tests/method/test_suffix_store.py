"""Texts of earlier runs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters import lookup_texts as store_module
from specgen.drafters.lookup_texts import EarlierTexts
from specgen.drafters.suffix_array import SuffixArray


def texts(store: EarlierTexts) -> list[list[int]]:
    return [text.tolist() for text in store.texts()]


def in_arrays(store: EarlierTexts) -> list[list[int]]:
    """All texts in the order of the arrays."""
    found: list[list[int]] = []
    for array in store.arrays():
        text: list[int] = []
        for token in array.tokens.tolist():
            if token >= 0:
                text.append(token)
            else:
                found.append(text)
                text = []
    return found


def folder_of(root: Path) -> Path:
    """The only vocabulary's folder."""
    (folder,) = root.iterdir()
    return folder


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=5), max_size=6))
def test_texts_come_back_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, added: list[list[int]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    expected: list[list[int]] = []
    for text in added:
        EarlierTexts(root, "v").add(text)
        # The same text again is newer, not more.
        expected = [other for other in expected if other != text] + ([text] if text else [])
        assert texts(EarlierTexts(root, "v")) == expected
    assert in_arrays(EarlierTexts(root, "v")) == expected


def test_vocabularies_do_not_mix(tmp_path: Path) -> None:
    EarlierTexts(tmp_path, "../a/b").add([1, 2])
    EarlierTexts(tmp_path, "c").add([3])
    assert texts(EarlierTexts(tmp_path, "../a/b")) == [[1, 2]]
    assert texts(EarlierTexts(tmp_path, "c")) == [[3]]
    assert texts(EarlierTexts(tmp_path, "d")) == []
    assert EarlierTexts(tmp_path, "d").arrays() == ()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_oldest_texts_go(tmp_path: Path) -> None:
    store = EarlierTexts(tmp_path, "v", max_bytes=4 * 10)
    for first in range(5):
        store.add([first] * 3)
    assert texts(store) == [[2] * 3, [3] * 3, [4] * 3]
    store.add([2] * 3)
    store.add([9] * 4)
    assert texts(store) == [[4] * 3, [2] * 3, [9] * 4]
    # Of a text that is too large the end is kept.
    store.add(list(range(100)))
    assert texts(store) == [list(range(90, 100))]


def test_damaged_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    store = EarlierTexts(tmp_path, "v")
    for first in range(6):
        store.add([first, first])
    folder = folder_of(tmp_path)
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    paths[1].write_bytes(paths[1].read_bytes()[:-3])
    paths[2].write_bytes(b"")
    paths[3].write_bytes(paths[0].read_bytes())
    paths[4].unlink()
    paths[4].mkdir()
    (folder / "notes.tokens").write_bytes(b"1234")
    (folder / "text.tokens.abc.new").write_bytes(b"1234")
    assert texts(store) == [[0, 0], [5, 5]]
    assert in_arrays(store) == [[0, 0], [5, 5]]


def test_the_array_is_kept_and_new_texts_stand_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    original = SuffixArray.build

    def build(texts: list[list[int]], made_of: str = "") -> SuffixArray:
        built.append(len(texts))
        return original(texts, made_of)

    monkeypatch.setattr(SuffixArray, "build", build)
    monkeypatch.setattr(store_module, "MAX_NEW", 20)
    store = EarlierTexts(tmp_path, "v")
    for first in range(3):
        store.add([first] * 10)
    assert in_arrays(store) == [[0] * 10, [1] * 10, [2] * 10]
    assert in_arrays(store) == [[0] * 10, [1] * 10, [2] * 10]
    assert built == [3]  # once
    store.add([3] * 10)
    assert in_arrays(store) == [[0] * 10, [1] * 10, [2] * 10, [3] * 10]
    assert built == [3, 1]  # the new one alone
    store.add([4] * 11)
    assert [text[0] for text in in_arrays(store)] == [0, 1, 2, 3, 4]
    assert built == [3, 1, 5]
    # A damaged array is made again.
    (folder_of(tmp_path) / "texts.npz").write_bytes(b"damaged")
    assert [text[0] for text in in_arrays(store)] == [0, 1, 2, 3, 4]
    assert built == [3, 1, 5, 5]
    assert len(store.arrays()) == 1


def test_a_store_that_cannot_be_written_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    store = EarlierTexts(place, "v")
    store.add([1, 2, 3])
    assert texts(store) == []
    assert store.arrays() == ()

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    store = EarlierTexts(tmp_path / "store", "v")
    store.add([1])
    monkeypatch.setattr(store_module, "replace_bytes", full)
    monkeypatch.setattr("specgen.drafters.suffix_array.replace_bytes", full)
    monkeypatch.setattr(store_module, "MAX_NEW", 0)
    store.add([2])
    assert texts(store) == [[1]]
    assert in_arrays(store) == [[1]]


def add_many(root: Path, first: int, n: int) -> None:
    store = EarlierTexts(root, "v", max_texts=25)
    for number in range(first, first + n):
        store.add([number] * 5)
        store.texts()
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
    store = EarlierTexts(tmp_path, "v", max_texts=25)
    kept = texts(store)
    # Two that add at once may each remove an old text for the other's new one.
    assert 20 <= len(kept) <= 25
    assert all(text == [text[0]] * 5 for text in kept)
    by_process = [[text[0] for text in kept if text[0] // 100 == number] for number in range(3)]
    assert all(numbers == sorted(numbers) for numbers in by_process)
    assert not list(folder_of(tmp_path).glob("*.new"))
