"""Texts to look n-grams up in: files and folders, records of earlier answers, and the texts of earlier runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from specgen.drafters.suffix_array import (
    IntArray,
    SuffixArray,
    joined,
    load_arrays,
    save_arrays,
    split,
)
from specgen.errors import OutputError, UsageError
from specgen.method.backend import Vocabulary
from specgen.system.files import locked

#: Larger files in folders are left out: people hardly write such files.
MAX_FILE_BYTES = 4 << 20
#: More bytes than this in all are refused: tokenizing them would take long, and sorting takes a
#: hundred bytes of memory a token.
MAX_CORPUS_BYTES = 16 << 20
#: The fields of a record that may hold text, in the order in which they are taken.
FIELDS = ("prompt", "turns", "content", "text", "answer")
_RECORD_ENDINGS = (".jsonl", ".ndjson")
_TOKENS = "tokens.npz"
#: The version of the arrays in the cache: to be raised if the same files give another array.
_VERSION = 1
#: A file, and whether the user named it itself, and not its folder: it has to be text then.
_File: TypeAlias = tuple[Path, os.stat_result, bool]


def load_corpus(
    paths: Sequence[Path], vocabulary: Vocabulary, fingerprint: str, cache: Path | None = None
) -> SuffixArray:
    """Load the texts of files and folders as tokens of `vocabulary`.

    A folder stands for all UTF-8 text files in it of at most `MAX_FILE_BYTES`, except hidden files,
    links, and files in hidden folders. A file whose name ends in .jsonl or .ndjson has records, one
    JSON object a line, with texts in any of the `FIELDS` (`turns`: a list of texts, or of objects
    with such fields).

    The array is kept in the folder `cache`, if given, until the files change; `fingerprint`
    identifies the vocabulary. Raise `UsageError` if a path does not exist or cannot be read, if a
    named file is not text, or if there is no text or more than `MAX_CORPUS_BYTES`.
    """
    files = [file for path in paths for file in _files(path)]
    n_bytes = sum(about.st_size for _, about, _ in files)
    if n_bytes > MAX_CORPUS_BYTES:
        raise UsageError(
            f"--lookup-file {_listed(paths)}: {n_bytes >> 20} MB of text; "
            f"at most {MAX_CORPUS_BYTES >> 20} MB",
            hint="name fewer files or folders",
        )
    states = [(str(path), about.st_size, about.st_mtime_ns) for path, about, _ in files]
    # The same paths have the same place in the cache, so that changed files leave no waste there.
    place = cache / f"{_digest_of(fingerprint, [*map(str, paths)])}.npz" if cache else None
    made_of = _digest_of(_VERSION, fingerprint, states)
    if place is not None:
        kept = SuffixArray.load(place)
        if kept is not None and kept.made_of == made_of:
            return kept
    texts = [text for path, _, is_named in files for text in _texts(path, is_named=is_named)]
    tokenized = (vocabulary.tokenize(t, add_special=False, parse_special=False) for t in texts)
    array = SuffixArray.build([tokens for tokens in tokenized if tokens], made_of)
    if not len(array):
        raise UsageError(f"--lookup-file {_listed(paths)}: no text in it")
    if place is not None:
        with contextlib.suppress(OSError):  # the next run makes it again
            place.parent.mkdir(parents=True, exist_ok=True)
            array.save(place)
    return array


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_of(*parts: object) -> str:
    return _digest(repr(parts).encode())


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths)) or "no files"


def _files(path: Path) -> Iterator[_File]:
    try:
        path = path.expanduser().resolve(strict=True)
        if path.is_dir():
            yield from _files_below(path)
        elif path.is_file():
            yield path, path.stat(), True
        else:
            raise UsageError(f"{path}: neither a file nor a folder")
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, no home folder
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"{path}: {reason or error}") from error


def _files_below(folder: Path) -> Iterator[_File]:
    """Yield the files of a folder that may be text, in the order of their paths."""
    for parent, folders, names in os.walk(folder):
        # In place: `os.walk` goes on with these. It follows no links.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(parent, name) for name in sorted(names) if not name.startswith(".")):
            with contextlib.suppress(OSError):  # it went away
                about = path.lstat()
                if stat.S_ISREG(about.st_mode) and 0 < about.st_size <= MAX_FILE_BYTES:
                    yield path, about, False


def _texts(path: Path, *, is_named: bool) -> list[str]:
    """Return the texts of a file. Raise `UsageError` if it has none and is named; else there are none."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
        if b"\0" in data:
            raise ValueError
    except (OSError, ValueError) as error:
        if not is_named:
            return []
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: {reason or error}") from error
    if path.suffix.lower() not in _RECORD_ENDINGS:
        return [text]
    try:
        return _recorded(path, text)
    except UsageError:
        if is_named:
            raise
        return [text]


def _recorded(path: Path, text: str) -> list[str]:
    texts: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: line {number} is not JSON") from error
        if not isinstance(record, dict):
            raise UsageError(f"{path}: line {number} is not a JSON object")
        texts += _texts_of(record)
    if not texts:
        raise UsageError(f"{path}: no record has text in {', '.join(FIELDS)}")
    # JSON may escape halves of characters (lone surrogates), which no tokenizer takes.
    return [text.encode(errors="replace").decode() for text in texts]


def _texts_of(record: dict[object, object]) -> Iterator[str]:
    for field in FIELDS:
        value = record.get(field)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                yield item
            elif field == "turns" and isinstance(item, dict):
                yield from (text for name in FIELDS if isinstance(text := item.get(name), str))


#: The most bytes that a store holds; if it grows beyond that, its older half is removed.
MAX_STORE_BYTES = 8 << 20
_BYTES_A_TOKEN = 4
#: Texts that are not in the saved array get an array of their own, until they have more tokens than
#: this, and more than this share of the saved tokens.
MAX_NEW = 16384
_NEW_PART = 0.25
#: The longest wait for another process that adds a text, in seconds.
_WAIT_S = 2.0


def count_texts(store: Path) -> int:
    """Return the number of texts in the folder of an `EarlierTexts`."""
    return len(_texts_in(store))


def _texts_in(store: Path) -> list[IntArray]:
    found = load_arrays(store / _TOKENS, "tokens")
    return split(found[0]) if found is not None else []


class EarlierTexts:
    """The token ids of earlier texts: a file for each vocabulary, the newest text last, and a saved array of most of
    them. The files are replaced whole, and damaged ones are noticed. Nothing here raises an error: a store that cannot
    be read is empty, and one that cannot be written stays as it is."""

    def __init__(self, folder: Path, fingerprint: str, *, max_bytes: int = MAX_STORE_BYTES) -> None:
        # A digest, since a fingerprint may not be a valid name of a folder.
        #: The folder of the texts.
        self.folder = folder / _digest(fingerprint.encode())
        self._file, self._array = self.folder / _TOKENS, self.folder / "texts.npz"
        self._n_most = max_bytes // _BYTES_A_TOKEN

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text that is not there yet as the newest one; if it is larger than the store, only its end."""
        new = np.array(tokens[-self._n_most :], np.int32)
        busy = OutputError(f"{self._file}: another process does not stop writing to it")
        with contextlib.suppress(OSError, OutputError), locked(self.folder / "lock", busy, _WAIT_S):
            texts = self.texts()
            if not len(new) or any(np.array_equal(text, new) for text in texts):
                return
            texts.append(new)
            n_tokens = sum(map(len, texts))
            if n_tokens > self._n_most:
                while len(texts) > 1 and n_tokens > self._n_most // 2:
                    n_tokens -= len(texts.pop(0))
            save_arrays(self._file, tokens=joined(texts))

    def texts(self) -> list[IntArray]:
        """Return all texts, the newest last: token ids, int32[n] each."""
        return _texts_in(self.folder)

    def arrays(self) -> tuple[SuffixArray, ...]:
        """Return all texts in arrays that can be searched, the newest texts in the last one. Most texts are
        in a saved array, which is rebuilt only when many texts are not in it."""
        tokens = joined(self.texts())
        saved = SuffixArray.load(self._array)
        n_saved = len(saved) if saved is not None else 0
        if saved is None or not np.array_equal(saved.tokens, tokens[:n_saved]):
            saved, n_saved = None, 0
        if len(tokens) - n_saved > max(MAX_NEW, _NEW_PART * n_saved):
            saved, n_saved = SuffixArray.build(split(tokens)), len(tokens)
            with contextlib.suppress(OSError):
                saved.save(self._array)
        new = SuffixArray.build(split(tokens[n_saved:]))
        return tuple(array for array in (saved, new) if array is not None and len(array))
