"""The other texts that prompt lookup searches: files, folders, and earlier answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specgen.drafters.stored_texts import (
    IntArray,
    read_texts,
    read_tokens,
    split_texts,
    store_texts,
)
from specgen.drafters.suffix_index import SuffixArray
from specgen.errors import UsageError
from specgen.system.files import path_of, read_text
from specgen.text.vocabulary import Vocabulary

#: Larger files in a folder are ignored.
MAX_FILE_BYTES = 4 << 20
#: A larger total size is refused: sorting takes 150 bytes of memory per token.
MAX_CORPUS_BYTES = 16 << 20
#: The fields of a record that may have text, in the order in which they are read.
FIELDS = ("prompt", "turns", "content", "text", "answer")
#: Files with these suffixes consist of records.
_RECORD_SUFFIXES = (".jsonl", ".ndjson")
#: The version of the arrays in the cache. Increase it if the same files result in another array.
_VERSION = 2
#: The maximum size of a store of earlier texts. When it grows beyond that, its older half is
#: removed.
MAX_STORE_BYTES = 8 << 20
#: The number of unsaved tokens, which are sorted again for each session, may reach this...
MAX_UNSAVED = 16384
#: ...or this share of the saved tokens, whichever is more, before all are sorted and saved.
_UNSAVED_SHARE = 0.25


# --- files and folders


@dataclass(frozen=True, slots=True)
class _CorpusFile:
    """A file with text to look up."""

    #: The file.
    path: Path
    #: Its size and modification time.
    about: os.stat_result
    #: Whether the user named the file itself, and not a folder: then it has to be text.
    is_named: bool


def load_corpus(
    paths: Sequence[Path],
    vocabulary: Vocabulary,
    fingerprint: str,
    cache: Path | None = None,
) -> SuffixArray:
    """Load the texts of files and folders as tokens.

    A folder stands for all UTF-8 text files in it of at most `MAX_FILE_BYTES`, except hidden files
    and links. A .jsonl or .ndjson file has records, one JSON object per line. Texts are read from
    their `FIELDS`, including those in lists and objects there.

    Args:
        paths: The files and folders.
        vocabulary: Tokenizes the texts.
        fingerprint: Identifies the vocabulary.
        cache: A folder that stores the sorted texts until the files change; None stores nothing.

    Raises:
        UsageError: If there is no text, or too much, or if a file that the user named is not text.
    """
    files = [file for path in paths for file in _corpus_files(path)]
    option = f"--lookup-file {', '.join(map(str, paths))}"
    n_bytes = sum(file.about.st_size for file in files)
    if n_bytes > MAX_CORPUS_BYTES:
        n_mib = math.ceil(n_bytes / 2**20)
        raise UsageError(
            f"{option}: {n_mib} MiB of text; at most {MAX_CORPUS_BYTES >> 20} MiB",
            hint="name fewer files or folders",
        )
    states = [(str(file.path), file.about.st_size, file.about.st_mtime_ns) for file in files]
    made_of = np.frombuffer(_digest(_VERSION, fingerprint, states), np.int32)
    # The name of the cached file does not depend on the contents of the files: when they change,
    # the new array replaces the old one.
    cache_file = None
    if cache is not None:
        cache_file = cache / f"{_digest(fingerprint, [*map(str, paths)]).hex()}.npz"
        cached = SuffixArray.load(cache_file, made_of)
        if cached is not None:
            return cached
    texts = [text for file in files for text in _texts(file)]
    array = SuffixArray.build(
        vocabulary.tokenize(text, add_special=False, parse_special=False) for text in texts
    )
    if not len(array):
        raise UsageError(f"{option}: no text in it")
    if cache_file is not None:
        with contextlib.suppress(OSError):  # the next run will make it again
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            array.save(cache_file, made_of)
    return array


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _corpus_files(path: Path) -> Iterator[_CorpusFile]:
    """Yield a file, or the files of a folder in the order of their paths.

    Raises:
        UsageError: If the path does not exist, or is neither a file nor a folder.
    """
    try:
        path = path_of(str(path)).resolve(strict=True)
        about = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"--lookup-file {path}: {reason or error}") from error
    if stat.S_ISREG(about.st_mode):
        yield _CorpusFile(path, about, is_named=True)
    elif stat.S_ISDIR(about.st_mode):
        yield from _files_in(path)
    else:
        raise UsageError(f"--lookup-file {path}: neither a file nor a folder")


def _visible(names: Sequence[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _files_in(folder: Path) -> Iterator[_CorpusFile]:
    for parent, folders, names in os.walk(folder):
        folders[:] = _visible(folders)  # in place: `os.walk` goes on with what is in this list
        for name in _visible(names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # the file may have been deleted meanwhile
                about = path.lstat()
                if stat.S_ISREG(about.st_mode) and 0 < about.st_size <= MAX_FILE_BYTES:
                    yield _CorpusFile(path, about, is_named=False)


def _texts(file: _CorpusFile) -> list[str]:
    """Return the texts of a file: its content, or the texts of its records.

    A file of a folder that cannot be read has none; if it has invalid records, it is one text.

    Raises:
        UsageError: If the user named the file, and it is not text or has invalid records.
    """
    path = file.path
    try:
        text = read_text(path, str(path), UsageError)
    except UsageError:
        if file.is_named:
            raise
        return []
    if path.suffix.lower() not in _RECORD_SUFFIXES:
        return [text]
    try:
        return _texts_of_records(path, text)
    except UsageError:
        if file.is_named:
            raise
        return [text]


def _texts_of_records(path: Path, lines: str) -> list[str]:
    """Return the texts of the records in a file.

    Raises:
        UsageError: If a line is not a JSON object, or if no record has text.
    """
    texts: list[str] = []
    for number, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UsageError(f"{path}: line {number} is not a JSON object")
        texts += _texts_of_value(record)
    if not texts:
        raise UsageError(f"{path}: no record has text in {', '.join(FIELDS)}")
    # JSON escapes can stand for halves of characters (lone surrogates): replace them.
    return [text.encode(errors="replace").decode() for text in texts]


def _texts_of_value(value: object) -> Iterator[str]:
    """Yield a text itself, or all texts in the items of a list or in the `FIELDS` of an object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of_value(item)
    elif isinstance(value, dict):
        for field in FIELDS:
            yield from _texts_of_value(value.get(field))


# --- earlier answers


def texts_in(store: Path) -> list[IntArray]:
    """Return the texts in the folder of an `EarlierTexts`, int32[n] each, the newest last."""
    return read_texts(_tokens_file(store))


def _tokens_file(store: Path) -> Path:
    return store / "tokens.npz"


class EarlierTexts:
    """The tokens of earlier texts on the disk, with a saved suffix array of most of them.

    Nothing here raises an error: a store that cannot be read counts as empty, and one that cannot
    be written stays as it is.

    Args:
        folder: The folder with the stores of all vocabularies.
        fingerprint: Identifies the vocabulary.
        max_bytes: When the texts become larger than this, the older half is removed.
        max_unsaved: The number of tokens, not yet in the saved array, that may be sorted again in
            each session before all texts are sorted and saved.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        *,
        max_bytes: int = MAX_STORE_BYTES,
        max_unsaved: int = MAX_UNSAVED,
    ) -> None:
        # Named by a digest, since a fingerprint may not be a valid name.
        name = hashlib.blake2b(fingerprint.encode(), digest_size=16).hexdigest()
        self.folder = folder / name
        self._max_tokens = max_bytes // np.int32().nbytes
        self._max_unsaved = max_unsaved

    def add(self, tokens: Sequence[int]) -> None:
        """Store a text as the newest one, unless the store has it already.

        Only the end of a text that is larger than the store is stored.
        """
        text = np.array(tokens[-self._max_tokens :], np.int32)
        if len(text):
            store_texts(_tokens_file(self.folder), [text], self._max_tokens)

    def arrays(self) -> tuple[SuffixArray, ...]:
        """Return suffix arrays of all texts, with the newest texts in the last one.

        One array is loaded from the disk; another one is built of the texts that it lacks. If it
        lacks too much, an array of all texts is built and saved.
        """
        tokens = read_tokens(_tokens_file(self.folder))
        saved_file = self.folder / "texts.npz"
        saved = SuffixArray.load(saved_file)
        # If the oldest texts were removed meanwhile, the saved array is of no use.
        if saved is None or not np.array_equal(saved.tokens, tokens[: len(saved)]):
            saved = SuffixArray.build([])
        n_unsaved = len(tokens) - len(saved)
        if n_unsaved > max(self._max_unsaved, _UNSAVED_SHARE * len(saved)):
            saved = SuffixArray.build(split_texts(tokens))
            with contextlib.suppress(OSError):
                saved.save(saved_file)
        unsaved = SuffixArray.build(split_texts(tokens[len(saved) :]))
        return tuple(array for array in (saved, unsaved) if len(array))
