"""Texts to look n-grams up in: files and folders, records of earlier answers, and the texts of
earlier runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import OutputError, UsageError
from specgen.system.files import locked, replace_bytes
from specgen.text.overlap import common_prefix_length
from specgen.text.vocabulary import Vocabulary

#: int32[n]: token ids, or positions.
IntArray: TypeAlias = npt.NDArray[np.int32]
_NOTHING: IntArray = np.empty(0, np.int32)
#: The errors that reading a damaged archive of arrays raises.
_DAMAGE: Final = (
    *(OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
#: The longest match that is looked for, in tokens, and the most occurrences of it that are looked
#: at.
MAX_MATCH, MAX_PLACES = 32, 100
SEPARATOR = -1  # behind each text of a corpus; no token
#: Larger files in folders are left out. More in all is refused: sorting takes 150 bytes of memory a
#: token.
MAX_FILE_BYTES, MAX_CORPUS_BYTES = 4 << 20, 16 << 20
#: The fields of a record that may hold text, in the order in which they are taken.
FIELDS = ("prompt", "turns", "content", "text", "answer")
_RECORD_ENDINGS = (".jsonl", ".ndjson")
_VERSION = 2  # of the arrays in the cache: to be raised if the same files give another array
MAX_STORE_BYTES = 8 << 20  # of a store; if it grows beyond that, its older half is removed
#: Texts that are not in the saved array get their own, up to so many tokens, or this share of the
#: saved ones.
MAX_NEW, _NEW_PART = 16384, 0.25
_WAIT_S = 2.0  # the longest wait for another process that adds a text


class Match(NamedTuple):
    """An ending of `length` tokens that occurs in a text, and the indices of what follows it, at
    least one.
    """

    length: int
    places: tuple[int, ...]


class Matches(ABC):
    """Tokens, and the matches of endings in them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._token_at = tokens

    @abstractmethod
    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of `ending` that is followed by something."""

    def longer(self, match: Match | None, ending: Sequence[int]) -> Match | None:
        """Return the longest match of `ending`; `match` is that of all but its last token."""
        tokens, places = self._token_at, list[int]()
        for place in match.places if match is not None else ():
            follows = place + 1 < len(tokens) and tokens[place + 1] != SEPARATOR
            if follows and tokens[place] == ending[-1]:
                places.append(place + 1)
        if match is None or not places:
            return self.longest(ending)
        return Match(match.length + 1, tuple(places))

    def followers(self, match: Match) -> dict[int, tuple[int, int]]:
        """Return the tokens that follow a match, each with its number of occurrences and the place
        of the last one.
        """
        followers: dict[int, tuple[int, int]] = {}
        for place in match.places:
            token = self._token_at[place]
            count, latest = followers.get(token, (0, place))
            followers[token] = (count + 1, max(latest, place))
        return followers


class SuffixArray(Matches):
    """Texts in which the longest match of an ending is found by binary search: their prefixes,
    sorted by their last tokens, the last one first (Manber and Myers, "Suffix arrays", 1990). No
    match runs from one text into the next.

    `tokens` are those of the texts with a separator after each, int32[n]. `places` are the tokens'
    indices, counted from the end, sorted by the `MAX_MATCH` tokens from there backwards.
    """

    def __init__(self, tokens: IntArray, places: IntArray) -> None:
        super().__init__(np.ascontiguousarray(tokens).data)
        self.tokens = tokens
        self._places = places
        self._place_at = np.ascontiguousarray(places).data
        self._backwards = _backwards(tokens)

    @classmethod
    def build(cls, texts: Iterable[Sequence[int] | IntArray]) -> SuffixArray:
        """Sort these texts. Among equally frequent followers the last one wins, so put the best
        text last.
        """
        tokens = joined(texts)
        # As bytes, the highest first, slices compare as the tokens do.
        rows = np.ndarray(len(tokens), f"S{4 * MAX_MATCH}", _backwards(tokens), strides=(4,))
        return cls(tokens, rows.argsort(kind="stable").astype(np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def longest(self, ending: Sequence[int]) -> Match | None:
        wanted = tuple(ending[: -MAX_MATCH - 1 : -1])
        if not wanted or not len(self):
            return None
        n, key = len(self), self._key(len(wanted))
        place = bisect_left(self._place_at, _bytes(wanted), key=key)
        # The longest match is next to where the ending itself would be inserted.
        n_most = max(
            common_prefix_length(wanted, self.tokens[::-1][at : at + len(wanted)].tolist())
            for at in self._place_at[max(0, place - 1) : place + 1].tolist()
        )
        for length in range(n_most, 0, -1):
            key, data = self._key(length), _bytes(wanted[:length])
            first = bisect_left(self._place_at, data, key=key)
            end = bisect_right(self._place_at, data, lo=first, key=key)
            step = -(-(end - first) // MAX_PLACES) or 1
            # Every token has one behind it: the last is a separator, which no ending has.
            followers = [n - place for place in self._place_at[first:end:step].tolist()]
            places = tuple(at for at in followers if self._token_at[at] != SEPARATOR)
            if places:
                return Match(length, places)
        return None

    def save(self, path: Path, made_of: IntArray = _NOTHING) -> None:
        """Write the array to a file; `made_of` identifies the texts. Raise `OSError`."""
        _save(path, tokens=self.tokens, places=self._places, made_of=made_of)

    @classmethod
    def load(cls, path: Path, made_of: IntArray = _NOTHING) -> SuffixArray | None:
        """Load a saved array; None if the file is missing, damaged, or made of other texts."""
        found = _load(path, "tokens", "places", "made_of")
        if found is None or not np.array_equal(found[2], made_of):
            return None
        return cls(*found[:2])

    def _key(self, n_tokens: int) -> Callable[[int], bytes]:
        data, n_bytes = self._backwards, 4 * n_tokens
        return lambda place: data[4 * place : 4 * place + n_bytes]


def _bytes(tokens: Sequence[int] | IntArray) -> bytes:
    return np.asarray(tokens).astype(">u4").tobytes()


def _backwards(tokens: IntArray) -> bytes:
    return _bytes(tokens[::-1]) + _bytes([SEPARATOR] * MAX_MATCH)


def joined(texts: Iterable[Sequence[int] | IntArray]) -> IntArray:
    parts = [np.array([*text, SEPARATOR], np.int32) for text in texts if len(text)]
    return np.concatenate(parts) if parts else _NOTHING


def split(tokens: IntArray) -> list[IntArray]:
    ends = np.flatnonzero(tokens == SEPARATOR)
    return [text[:-1] for text in np.split(tokens, ends + 1)[:-1]]


def _save(path: Path, **arrays: IntArray) -> None:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    replace_bytes(path, file.getvalue())


def _load(path: Path, *names: str) -> list[IntArray] | None:
    """Read arrays, int32[n] each, from a file; None if it is missing or damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return [file[name] for name in names]
    except _DAMAGE:
        return None


def load_corpus(
    paths: Sequence[Path], vocabulary: Vocabulary, fingerprint: str, cache: Path | None = None
) -> SuffixArray:
    """Load the texts of files and folders as tokens of `vocabulary`.

    A folder stands for all UTF-8 text files in it of at most `MAX_FILE_BYTES`, except hidden ones
    and links. A .jsonl or .ndjson file has records, one JSON object a line, with texts, or lists
    and objects with texts, in the `FIELDS`. The array is kept in the folder `cache` until the files
    change; `fingerprint` identifies the vocabulary. Raise `UsageError` if there is no text or too
    much, or if a file that is named is not text.
    """
    files = [file for path in paths for file in _files(path)]
    named = f"--lookup-file {', '.join(map(str, paths))}"
    n_bytes = sum(about.st_size for _, about, _ in files)
    if n_bytes > MAX_CORPUS_BYTES:
        raise UsageError(
            f"{named}: {n_bytes >> 20} MB of text; at most {MAX_CORPUS_BYTES >> 20} MB",
            hint="name fewer files or folders",
        )
    states = [(str(path), about.st_size, about.st_mtime_ns) for path, about, _ in files]
    made_of = np.frombuffer(_digest(_VERSION, fingerprint, states), np.int32)
    # The same paths have the same place in the cache, so that changed files leave no waste there.
    place = cache / f"{_digest(fingerprint, [*map(str, paths)]).hex()}.npz" if cache else None
    kept = SuffixArray.load(place, made_of) if place is not None else None
    if kept is not None:
        return kept
    texts = [text for path, _, is_named in files for text in _texts(path, is_named=is_named)]
    array = SuffixArray.build(
        vocabulary.tokenize(text, add_special=False, parse_special=False) for text in texts
    )
    if not len(array):
        raise UsageError(f"{named}: no text in it")
    with contextlib.suppress(OSError):  # the next run makes it again
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            array.save(place, made_of)
    return array


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def _files(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield files in the order of their paths, and whether each is what the user named: it has to
    be text then.
    """
    try:
        path = path.expanduser().resolve(strict=True)
        about = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, no home folder
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"{path}: {reason or error}") from error
    if stat.S_ISREG(about.st_mode):
        yield path, about, True
    elif not stat.S_ISDIR(about.st_mode):
        raise UsageError(f"{path}: neither a file nor a folder")
    for parent, folders, names in os.walk(path):
        # In place: `os.walk` goes on with these. It follows no links.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            with contextlib.suppress(OSError):  # it went away
                about = Path(parent, name).lstat()
                if stat.S_ISREG(about.st_mode) and 0 < about.st_size <= MAX_FILE_BYTES:
                    yield Path(parent, name), about, False


def _texts(path: Path, *, is_named: bool) -> list[str]:
    texts: list[str] = []
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if "\0" in text:
            raise ValueError
        texts = [text]
        return _recorded(path, text) if path.suffix.lower() in _RECORD_ENDINGS else texts
    except (OSError, ValueError, UsageError) as error:
        if not is_named:
            return texts
        if isinstance(error, UsageError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"{path}: {reason or error}") from error


def _recorded(path: Path, text: str) -> list[str]:
    texts: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UsageError(f"{path}: line {number} is not a JSON object")
        texts += _texts_of(record)
    if not texts:
        raise UsageError(f"{path}: no record has text in {', '.join(FIELDS)}")
    # JSON may escape halves of characters (lone surrogates), which no tokenizer takes.
    return [text.encode(errors="replace").decode() for text in texts]


def _texts_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        items = value if isinstance(value, list) else [value.get(field) for field in FIELDS]
        for item in items:
            yield from _texts_of(item)


def texts_in(store: Path) -> list[IntArray]:
    """Return the texts in the folder of an `EarlierTexts`, the newest last: token ids, int32[n]
    each.
    """
    found = _load(store / "tokens.npz", "tokens")
    return split(found[0]) if found is not None else []


class EarlierTexts:
    """The token ids of earlier texts: a file for each vocabulary, the newest text last, and a saved
    array of most. Nothing here raises an error: a store that cannot be read is empty, one that
    cannot be written stays as it is.
    """

    def __init__(self, folder: Path, fingerprint: str, *, max_bytes: int = MAX_STORE_BYTES) -> None:
        #: The folder of the texts: a digest, since a fingerprint may not be a valid name.
        self.folder = folder / hashlib.blake2b(fingerprint.encode(), digest_size=16).hexdigest()
        self._n_most = max_bytes // np.int32().nbytes

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text that is not there yet as the newest one; if it is larger than the store, only
        its end.
        """
        new = np.array(tokens[-self._n_most :], np.int32)
        busy = OutputError(f"{self.folder}: another process is writing to it")
        with contextlib.suppress(OSError, OutputError), locked(self.folder / "lock", busy, _WAIT_S):
            texts = texts_in(self.folder)
            if not len(new) or any(np.array_equal(text, new) for text in texts):
                return
            texts.append(new)
            n_tokens = sum(map(len, texts))
            if n_tokens > self._n_most:
                while len(texts) > 1 and n_tokens > self._n_most // 2:
                    n_tokens -= len(texts.pop(0))
            _save(self.folder / "tokens.npz", tokens=joined(texts))

    def arrays(self) -> tuple[SuffixArray, ...]:
        """Return all texts, the newest in the last array. Most are in a saved one, rebuilt when
        many are not in it.
        """
        tokens, place = joined(texts_in(self.folder)), self.folder / "texts.npz"
        saved = SuffixArray.load(place)
        if saved is None or not np.array_equal(saved.tokens, tokens[: len(saved)]):
            saved = SuffixArray.build([])
        if len(tokens) - len(saved) > max(MAX_NEW, _NEW_PART * len(saved)):
            saved = SuffixArray.build(split(tokens))
            with contextlib.suppress(OSError):
                saved.save(place)
        new = SuffixArray.build(split(tokens[len(saved) :]))
        return tuple(array for array in (saved, new) if len(array))
