"""Files to draft from: texts, folders of texts, records of earlier answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.drafters.lookup.array import SuffixArray
from specgen.errors import UsageError
from specgen.method.backend import Vocabulary

#: Larger files in folders are left out: people hardly write such files.
MAX_FILE_BYTES = 4 << 20
#: More bytes than this in all are refused: tokenizing them would take long, and sorting takes a
#: hundred bytes of memory a token.
MAX_BYTES = 16 << 20
#: The fields of a record that may hold text, in the order in which they are taken.
FIELDS = ("prompt", "turns", "content", "text", "answer")
_RECORD_ENDINGS = (".jsonl", ".ndjson")
#: The version of the arrays in the cache: to be raised if the same files give another array.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    n_bytes: int
    mtime_ns: int
    #: Whether the user named the file itself, and not its folder: it has to be text then.
    is_named: bool


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
    named file is not text, or if there is no text or more than `MAX_BYTES`.
    """
    files = [file for path in paths for file in _files(path)]
    n_bytes = sum(file.n_bytes for file in files)
    if n_bytes > MAX_BYTES:
        raise UsageError(
            f"--lookup-file {_listed(paths)}: {n_bytes >> 20} MB of text; "
            f"at most {MAX_BYTES >> 20} MB",
            hint="name fewer files or folders",
        )
    names = [str(file.path) for file in files]
    stats = [(file.n_bytes, file.mtime_ns) for file in files]
    # The same paths have the same place in the cache, so that changed files leave no waste there.
    place = cache / f"{_digest(fingerprint, [*map(str, paths)])}.npz" if cache else None
    made_of = _digest(str(_VERSION), fingerprint, names, stats)
    if place is not None:
        kept = SuffixArray.load(place)
        if kept is not None and kept.made_of == made_of:
            return kept
    texts = [text for file in files for text in _texts(file)]
    tokenized = (vocabulary.tokenize(t, add_special=False, parse_special=False) for t in texts)
    array = SuffixArray.build([tokens for tokens in tokenized if tokens], made_of)
    if not len(array):
        raise UsageError(f"--lookup-file {_listed(paths)}: no text in it")
    if place is not None:
        with contextlib.suppress(OSError):  # the next run makes it again
            place.parent.mkdir(parents=True, exist_ok=True)
            array.save(place)
    return array


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths)) or "no files"


def _files(path: Path) -> Iterator[_File]:
    try:
        path = path.expanduser().resolve(strict=True)
        if path.is_dir():
            yield from _files_below(path)
        elif path.is_file():
            stat = path.stat()
            yield _File(path, stat.st_size, stat.st_mtime_ns, is_named=True)
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
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(OSError):  # it went away
                stat = path.stat()
                if 0 < stat.st_size <= MAX_FILE_BYTES:
                    yield _File(path, stat.st_size, stat.st_mtime_ns, is_named=False)


def _texts(file: _File) -> list[str]:
    try:
        text = _text(file.path.read_bytes())
    except OSError as error:
        if not file.is_named:
            return []
        raise UsageError(f"{file.path}: {error.strerror or error}") from error
    if text is None:
        if not file.is_named:
            return []
        raise UsageError(f"{file.path}: not UTF-8 text")
    if file.path.suffix.lower() not in _RECORD_ENDINGS:
        return [text]
    try:
        return _recorded(file.path, text)
    except UsageError:
        if file.is_named:
            raise
        return [text]


def _text(data: bytes) -> str | None:
    """Return the text of a file; None if it is not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _recorded(path: Path, text: str) -> list[str]:
    """Yield the texts of records, one JSON object a line."""
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
