"""Texts for lookup: files, the texts of earlier runs, and drafts that continue their matches."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.lookup_texts import (
    MAX_CORPUS_BYTES,
    MAX_FILE_BYTES,
    EarlierTexts,
    load_corpus,
    texts_in,
)
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.ngram_counts import Evidence, NgramCounts, Place, TextChances
from specgen.drafters.stored_texts import join_texts, split_texts
from specgen.drafters.suffix_index import (
    MAX_MATCH,
    MAX_PLACES,
    GrowingCorpus,
    SuffixArray,
    SuffixIndex,
)
from specgen.errors import UsageError
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import RoundPlan
from tests.helpers.disk import full_disk
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.vocabularies import CountingVocabulary

VOCABULARY = FakeVocabulary(tuple(bytes([i]) for i in range(256)))


def texts(array: SuffixArray) -> list[str]:
    """What the array holds."""
    separated = [max(token, 0) for token in array.tokens.tolist()]
    return bytes(separated).decode().split("\0")[:-1]


def load(*paths: Path) -> list[str]:
    return texts(load_corpus(paths, VOCABULARY, "bytes"))


def message(*paths: Path) -> str:
    with pytest.raises(UsageError) as raised:
        load(*paths)
    assert "\n" not in raised.value.message
    return raised.value.message


def test_files_and_folders_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.py").write_bytes("third\nwith ü".encode())
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    assert load(tmp_path / "b.txt") == ["second"]
    assert load(tmp_path) == ["second", "marked", "third\nwith ü"]
    assert load(tmp_path / "a", tmp_path / "b.txt") == ["third\nwith ü", "second"]


def test_some_files_in_a_folder_are_left_out(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.txt", tmp_path / "folder"
    outside.write_text("secret")
    (folder / ".git").mkdir(parents=True)
    for name, data in {
        ".git/config": b"hidden",
        ".env": b"hidden",
        "image.png": b"\x89PNG\0\0",
        "latin.txt": b"caf\xe9",
        "empty.txt": b"",
        "large.txt": b"x" * (MAX_FILE_BYTES + 1),
        "good.txt": b"good",
    }.items():
        (folder / name).write_bytes(data)
    for name, target in {"link": outside, "circle": folder, "nowhere": tmp_path / "x"}.items():
        (folder / name).symlink_to(target)
    if sys.platform != "win32":
        os.mkfifo(folder / "pipe")
    assert load(folder) == ["good"]
    # What is named is taken, hidden or linked.
    assert load(folder / "link", folder / ".env") == ["secret", "hidden"]
    assert load(folder / ".git") == ["hidden"]


def test_records_of_answers_are_loaded(tmp_path: Path) -> None:
    records: list[object] = [
        {"answer": "an answer", "prompt": "a prompt", "other": "x"},
        {"answer": [1, 2], "text": "text", "prompt": None},
        {"turns": ["first turn", {"role": "user", "content": "second turn"}, 3]},
        {"content": "content"},
        {"n": 3},
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n\n".join(map(json.dumps, records)) + "\n")
    assert load(path) == [
        *("a prompt", "an answer", "text", "first turn", "second turn", "content")
    ]
    assert load(tmp_path) == load(path)


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le"])
def test_files_in_utf_16_are_looked_up_in(tmp_path: Path, codec: str) -> None:
    (tmp_path / "a.txt").write_bytes("the café\n".encode(codec))
    (tmp_path / "b.jsonl").write_bytes('{"text": "é"}\n'.encode(codec))
    assert load(tmp_path) == ["the café\n", "é"]


def test_sources_that_cannot_be_looked_up_in_are_errors(tmp_path: Path) -> None:
    path = {name: tmp_path / name for name in ("missing", "binary", "latin", "empty", "circle")}
    path["binary"].write_bytes(b"a\0b")
    path["latin"].write_bytes(b"caf\xe9")
    path["empty"].mkdir()
    path["circle"].symlink_to(path["circle"])
    for name, said in {
        "missing": f"--lookup-file {path['missing']}: ",
        "binary": f"{path['binary']} is not text: it has a NUL byte on line 1",
        "latin": f"{path['latin']} is not UTF-8: byte 0xe9 on line 1",
        "empty": f"--lookup-file {path['empty']}: no text in it",
        "circle": f"--lookup-file {path['circle']}: ",
    }.items():
        assert message(path[name]).startswith(said)
    if sys.platform != "win32":
        os.mkfifo(tmp_path / "pipe")
        assert message(tmp_path / "pipe").endswith("pipe: neither a file nor a folder")
    large = tmp_path / "large.txt"  # refused before it is read
    with large.open("wb") as file:
        file.truncate(MAX_CORPUS_BYTES + 1)
    n_mib = MAX_CORPUS_BYTES >> 20
    wanted = f"--lookup-file {large}: {n_mib + 1} MiB of text; at most {n_mib} MiB"
    assert message(large) == wanted


def test_the_array_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    folder, cache = tmp_path / "folder", tmp_path / "cache" / "lookup"
    folder.mkdir()
    (folder / "a.txt").write_text("first")
    vocabulary = CountingVocabulary.of(VOCABULARY)

    def loaded(fingerprint: str = "bytes") -> tuple[list[str], int]:
        array = load_corpus([folder], vocabulary, fingerprint, cache)
        return texts(array), len(vocabulary.counts)

    assert loaded() == (["first"], 1)
    assert loaded() == (["first"], 1)
    assert loaded("another vocabulary") == (["first"], 2)
    (folder / "a.txt").write_text("other")  # as long; times of files may be coarse
    os.utime(folder / "a.txt", ns=(1, 1))
    assert loaded() == (["other"], 3)
    (folder / "b.txt").write_text("new")
    assert loaded() == (["other", "new"], 5)
    assert loaded() == (["other", "new"], 5)
    (folder / "b.txt").rename(folder / "0.txt")
    assert loaded() == (["new", "other"], 7)
    # One file for each vocabulary, whatever changed.
    kept = list(cache.iterdir())
    assert len(kept) == 2
    for path in kept:
        path.write_bytes(b"damaged")
    assert loaded() == (["new", "other"], 9)


# --- texts of earlier runs


def kept_texts(store: EarlierTexts) -> list[list[int]]:
    return [text.tolist() for text in texts_in(store.folder)]


def in_arrays(store: EarlierTexts) -> list[list[int]]:
    """All texts in the order of the arrays."""
    return [text.tolist() for array in store.arrays() for text in split_texts(array.tokens)]


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=5), max_size=6))
def test_texts_are_returned_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, added: list[list[int]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    expected: list[list[int]] = []
    for text in added:
        EarlierTexts(root, "v").add(text)
        expected += [text] if text and text not in expected else []
        assert kept_texts(EarlierTexts(root, "v")) == expected
    assert in_arrays(EarlierTexts(root, "v")) == expected


def test_vocabularies_do_not_mix(tmp_path: Path) -> None:
    EarlierTexts(tmp_path, "../a/b").add([1, 2])
    EarlierTexts(tmp_path, "c").add([3])
    assert kept_texts(EarlierTexts(tmp_path, "../a/b")) == [[1, 2]]
    assert kept_texts(EarlierTexts(tmp_path, "c")) == [[3]]
    assert EarlierTexts(tmp_path, "d").arrays() == ()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_oldest_texts_go(tmp_path: Path) -> None:
    store = EarlierTexts(tmp_path, "v", max_bytes=4 * 12)
    for first in range(6):
        store.add([first] * 3)
    assert kept_texts(store) == [[3] * 3, [4] * 3, [5] * 3]
    # The end of a text that is too large is kept.
    store.add(list(range(100)))
    assert kept_texts(store) == [list(range(88, 100))]


def test_what_is_sorted_stays_sorted(tmp_path: Path) -> None:
    store = EarlierTexts(tmp_path, "v", max_unsaved=20)
    saved_at = store.folder / "texts.npz"
    last_saved: int | None = None
    # All are sorted and saved once; then new texts get an array of their own, until there are
    # many; and all are sorted again where what was saved is damaged.
    for n_new, n_texts, is_saved in (
        (3, [3], True),
        (0, [3], False),
        (1, [3, 1], False),
        (1, [5], True),
        (0, [5], True),
    ):
        for _ in range(n_new):
            store.add([len(kept_texts(store))] * 11)
        arrays = store.arrays()
        assert [len(split_texts(array.tokens)) for array in arrays] == n_texts
        assert in_arrays(store) == kept_texts(store)
        saved = saved_at.stat().st_ino  # another file replaces it
        assert (saved != last_saved) == is_saved
        if n_texts == [5] and is_saved and n_new:
            saved_at.write_bytes(b"damaged")
        last_saved = saved


def test_a_store_that_is_damaged_or_cannot_be_written_breaks_nothing(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    store = EarlierTexts(place, "v")
    store.add([1, 2, 3])
    assert store.arrays() == ()

    store = EarlierTexts(tmp_path / "store", "v", max_unsaved=0)
    store.add([1])
    with full_disk():
        store.add([2])
        assert kept_texts(store) == in_arrays(store) == [[1]]
    (file,) = store.folder.glob("*.npz")
    data = bytearray(file.read_bytes())
    at = data.index(join_texts([[1]]).tobytes())
    data[at] ^= 8
    file.write_bytes(data)
    assert kept_texts(store) == []
    store.add([3])
    assert kept_texts(store) == [[3]]

    # An archive that is intact, but not one of ours.
    np.savez(file, allow_pickle=False, tokens=np.float64(1.0))
    assert kept_texts(store) == in_arrays(store) == []
    store.add([4])
    assert kept_texts(store) == [[4]]


def add_many(root: Path, first: int, n: int) -> None:
    store = EarlierTexts(root, "v")
    for number in range(first, first + n):
        store.add([number] * 5)
        store.arrays()


def test_several_processes_add_at_once(tmp_path: Path) -> None:
    # Not forked: the test's own threads would be copied half alive.
    context = multiprocessing.get_context("spawn")
    arguments = [(tmp_path, 100 * number, 10) for number in range(3)]
    processes = [context.Process(target=add_many, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    firsts = [text[0] for text in kept_texts(EarlierTexts(tmp_path, "v"))]
    for number in range(0, 300, 100):
        own = [first for first in firsts if first // 100 == number // 100]
        assert own == list(range(number, number + 10))


# --- drafts of what followed: against their definition, by searching

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
    """The longest suffix of an ending that occurs in the texts with a continuation."""
    parts = (list(ending[start:]) for start in range(max(0, len(ending) - MAX_MATCH), len(ending)))
    return next((part for part in parts if following(texts, part)), [])


def ranking(followers: list[int]) -> list[int]:
    """The most frequent tokens first, but the latest one before all, unless another is three times
    as frequent.
    """
    counts = {token: followers.count(token) for token in followers}
    latest = {token: index for index, token in enumerate(followers)}
    tokens = sorted(counts, key=lambda token: (counts[token], latest[token]), reverse=True)
    last = followers[-1]
    if counts[tokens[0]] < 3 * counts[last]:
        tokens.remove(last)
        tokens.insert(0, last)
    return tokens


def continuations(
    texts: Sequence[Text], ending: Text, place: Place, limits: tuple[int, int]
) -> Iterator[tuple[int, Evidence]]:
    """The three most promising tokens that follow the longest match in some texts."""
    match = longest(texts, ending)
    length = min(len(match), limits[1])
    if length < limits[0]:
        return
    followers = following(texts, match)
    for token in ranking(followers)[:3]:
        n_followed = followers.count(token)
        yield token, Evidence.of(place, length, n_followed, len(followers))


def definition(
    text: Text, n_max: int, min_match: int, max_match: int, corpus: Sequence[Text] = ()
) -> Draft:
    """The chain of the most likely tokens, before anything was counted."""
    chances = TextChances(NgramCounts())
    limits = (min_match, max_match)
    tokens: list[int] = []
    origins: list[str] = []
    probabilities: list[float] = []
    while len(tokens) < n_max:
        ending = [*text, *tokens]
        best: tuple[float, int, str] | None = None
        sources: list[tuple[str, Place, Sequence[Text]]] = [
            ("ngram", "answer", [text]),
            ("lookup", "file", corpus),
        ]
        for origin, place, texts in sources:
            for token, evidence in continuations(texts, ending, place, limits):
                chance = chances.chance(evidence)
                if best is None or chance > best[0]:
                    best = (chance, token, origin)
        if best is None:
            break
        probabilities.append(best[0])
        tokens.append(best[1])
        origins.append(best[2])
    chain = Draft.chain(tokens, "")
    return Draft(
        chain.tokens, chain.parents, tuple(origins), tuple(probabilities), chain.distributions
    )


def propose(drafter: SuffixDrafter, text: Text, n_max: int) -> Draft:
    draft = draft_alone(drafter.propose(text, RoundPlan("fixed", n_max)))
    assert len(draft) <= n_max
    assert draft.is_chain
    assert not draft.is_sampled
    return draft


@given(TEXT, st.integers(1, 8), st.integers(1, 3), st.integers(3, 6))
def test_drafts_continue_the_longest_match(
    text: list[int], n_max: int, min_match: int, max_match: int
) -> None:
    expected = definition(text, n_max, min_match, max_match)
    drafter = SuffixDrafter(min_match, max_match)
    assert propose(drafter, text, n_max) == expected
    assert propose(drafter, text, n_max) == expected


@given(TEXT, st.integers(1, 8), st.integers(1, 3))
def test_a_text_that_grows_token_by_token_has_the_same_matches(
    text: list[int], n_max: int, min_match: int
) -> None:
    growing = SuffixDrafter(min_match, 6)
    for length in range(1, len(text)):
        propose(growing, text[:length], n_max)
    grown = propose(growing, text, n_max)
    growing.rewind(0)  # forgets the text, but not what was counted
    assert propose(growing, text, n_max) == grown


@given(TEXT, st.lists(TEXT, max_size=3), st.integers(1, 8), st.integers(1, 3), st.integers(3, 10))
def test_files_are_followed_where_their_continuations_are_likelier(
    text: list[int], corpus: list[list[int]], n_max: int, min_match: int, max_match: int
) -> None:
    drafter = SuffixDrafter(min_match, max_match, files=[SuffixArray.build(corpus)])
    expected = definition(text, n_max, min_match, max_match, corpus)
    assert propose(drafter, text, n_max) == expected
    # An array that matches nothing changes nothing.
    corpora = [SuffixArray.build([[7, 8, 9]]), SuffixArray.build(corpus), SuffixArray.build([])]
    drafter = SuffixDrafter(min_match, max_match, files=corpora)
    assert propose(drafter, text, n_max) == expected


@given(TEXT, st.lists(st.tuples(st.integers(0, 40), TEXT), max_size=4))
def test_a_rewound_drafter_is_as_if_it_had_never_gone_further(
    text: list[int], changes: list[tuple[int, list[int]]]
) -> None:
    drafter = SuffixDrafter(1, 4)
    propose(drafter, text, 2)
    for n_kept, ending in changes:
        drafter.rewind(n_kept)
        text = text[:n_kept] + ending
        draft = propose(drafter, text, 5)
        drafter.rewind(0)  # what was counted stays
        assert propose(drafter, text, 5) == draft


def test_a_match_needs_the_least_length() -> None:
    assert propose(SuffixDrafter(2, 3), [1, 2, 3, 9, 3], 4) is NO_DRAFT
    assert propose(SuffixDrafter(1, 3), [], 4) is NO_DRAFT


def test_a_repetition_continues_beyond_the_end_of_the_text() -> None:
    draft = propose(SuffixDrafter(2, 32), [9, 1, 2, 3, 1, 2, 3, 1, 2], 10)
    assert draft.tokens == (3, 1, 2, 3, 1, 2, 3, 1, 2, 3)
    probabilities = [p for p in draft.probabilities if p is not None]
    assert probabilities[0] < max(probabilities)
    assert propose(SuffixDrafter(1, 8), [5] * 500, 6).tokens == (5,) * 6


def test_the_longer_of_several_matches_is_followed() -> None:
    short, long = [5, 6, 1], [4, 5, 6, 2]
    for texts in ([short, long], [long, short]):
        arrays = [SuffixArray.build([text]) for text in texts]
        assert propose(SuffixDrafter(2, 8, files=arrays), [3, 4, 5, 6], 1).tokens == (2,)
        assert propose(SuffixDrafter(2, 8, earlier=arrays), [3, 4, 5, 6], 1).tokens == (2,)


# --- corpora that are searched


def test_token_ids_of_all_sizes_are_distinguished() -> None:
    text = [255, 256, 65536, 2**31 - 1, 1, 256, 7]
    array = SuffixArray.build([text])
    for n in range(1, len(text)):
        match = array.longest(text[:n])
        assert match is not None
        assert match.length == n
        assert set(array.followers(match).counts) == {text[n]}


def test_a_huge_repetition_is_searched_within_limits() -> None:
    array = SuffixArray.build([[5] * 20_000])
    match = array.longest([5] * 300)
    assert match is not None
    assert match.length == MAX_MATCH
    assert MAX_PLACES // 2 < len(match.places) <= MAX_PLACES
    assert set(array.followers(match).counts) == {5}
    longer = array.extend_match(match, [5] * 301)
    assert longer is not None
    assert longer.length == MAX_MATCH + 1
    assert array.extend_match(match, [6]) is None


# --- answers that are searched


def found(index: SuffixIndex, ending: Text) -> tuple[int, dict[int, int]]:
    """The length of the longest match, and how often each token follows it."""
    match = index.longest(ending)
    return (match.length, index.followers(match).counts) if match is not None else (0, {})


@given(st.lists(TEXT, max_size=4), TEXT)
def test_finished_texts_are_found_as_in_a_sorted_array(
    answers: list[list[int]], ending: list[int]
) -> None:
    index = GrowingCorpus()
    for number, answer in enumerate(answers):
        assert found(index, ending) == found(SuffixArray.build(answers[:number]), ending)
        index.add_text(answer)
    assert found(index, ending) == found(SuffixArray.build(answers), ending)
