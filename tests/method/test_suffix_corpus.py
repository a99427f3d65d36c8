"""Files to look up in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from specgen.drafters.lookup_texts import MAX_CORPUS_BYTES, MAX_FILE_BYTES, load_corpus
from specgen.drafters.suffix_array import SuffixArray
from specgen.errors import UsageError
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


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.py").write_bytes("third\nwith ü".encode())
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    assert load(tmp_path / "b.txt") == ["second"]
    assert load(tmp_path) == ["second", "marked", "third\nwith ü"]
    assert load(tmp_path / "a", tmp_path / "b.txt") == ["third\nwith ü", "second"]


def test_what_a_folder_leaves_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("hidden")
    (folder / ".env").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "empty.txt").write_text("")
    (folder / "large.txt").write_text("x" * (MAX_FILE_BYTES + 1))
    (folder / "good.txt").write_text("good")
    (folder / "link.txt").symlink_to(outside / "secret.txt")
    (folder / "link").symlink_to(outside)
    (folder / "circle").symlink_to(folder)
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    if sys.platform != "win32":
        os.mkfifo(folder / "pipe")
    assert load(folder) == ["good"]
    # What is named is taken, hidden or linked.
    assert load(folder / "link.txt", folder / ".env") == ["secret", "hidden"]
    assert load(folder / ".git") == ["hidden"]


def test_records_of_answers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ('{"text": "a"}\n\n[1]', "line 3 is not a JSON object"),
        ('{"story": "a"}', "no record has text in prompt, turns, content, text, answer"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("", "no record has text in prompt, turns, content, text, answer"),
    ],
)
def test_records_that_are_none(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    assert message(path) == f"{path}: {expected}"
    # In a folder it is a text like others.
    (tmp_path / "z.txt").write_text("z")
    assert load(tmp_path) == ([content, "z"] if content else ["z"])


def test_what_cannot_be_looked_up_in(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    assert message(missing).startswith(f"{missing}: ")
    binary = tmp_path / "binary"
    binary.write_bytes(b"a\0b")
    assert message(binary) == f"{binary}: not UTF-8 text"
    binary.write_bytes(b"caf\xe9")
    assert message(binary) == f"{binary}: not UTF-8 text"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert message(empty) == f"--lookup-file {empty}: no text in it"
    assert message(empty, empty) == f"--lookup-file {empty}, {empty}: no text in it"
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert str(circle) in message(circle)
    if sys.platform != "win32":
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        assert message(pipe) == f"{pipe}: neither a file nor a folder"


def test_too_much_is_refused_before_it_is_read(tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(MAX_CORPUS_BYTES + 1)
    assert message(large) == (
        f"--lookup-file {large}: {MAX_CORPUS_BYTES >> 20} MB of text; at most {MAX_CORPUS_BYTES >> 20} MB"
    )


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
