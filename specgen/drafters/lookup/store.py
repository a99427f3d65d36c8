"""Texts of earlier runs, to draft from."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specgen.drafters.lookup.array import IntArray, SuffixArray
from specgen.system.files import replace_bytes

#: The most bytes and texts that a store holds.
MAX_BYTES = 8 << 20
MAX_TEXTS = 4096
#: The ending of a text's file name, behind the digest of its contents.
_ENDING = ".tokens"
_ARRAY = "texts.npz"
#: Texts that are not in the saved array get an array of their own, until they have more tokens than
#: this, and more than this share of the saved tokens.
MAX_NEW = 16384
_NEW_PART = 0.25
_BYTES_A_TOKEN = 4


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """A file of the store; older files sort first."""

    mtime_ns: int
    name: str
    n_bytes: int


class EarlierTexts:
    """The token ids of earlier texts, in a folder of their own for each vocabulary.

    Every text is a file, written whole and named by its digest. So several processes may add at
    once, the same text takes room once, and a damaged file is noticed and left out. If there is too
    much, the oldest texts are removed. Nothing here raises `OSError`: a store that cannot be read
    is empty, and one that cannot be written stays as it is.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        *,
        max_bytes: int = MAX_BYTES,
        max_texts: int = MAX_TEXTS,
    ) -> None:
        # A digest, since a fingerprint may not be a valid name of a folder.
        digest = hashlib.blake2b(fingerprint.encode(), digest_size=16).hexdigest()
        #: The folder of the texts.
        self.folder = folder / digest
        self._max_bytes = max_bytes
        self._max_texts = max_texts

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text as the newest one; if it is larger than the store, only its end."""
        n_most = self._max_bytes // _BYTES_A_TOKEN
        kept = tokens[max(0, len(tokens) - n_most) :]
        if not len(kept):
            return
        data = np.asarray(kept, "<i4").tobytes()
        path = self.folder / f"{_digest(data)}{_ENDING}"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, data)
            entries = self._entries()
            # File times are coarse: make the new text the newest.
            newest = max((e.mtime_ns for e in entries if e.name != path.name), default=0)
            mtime_ns = path.stat().st_mtime_ns
            if mtime_ns <= newest:
                os.utime(path, ns=(mtime_ns, newest + 1))
                entries = self._entries()
            self._bound(entries)

    def texts(self) -> list[IntArray]:
        """Return all texts, the newest last: token ids, int32[n] each."""
        return self._read([entry for entry in self._entries() if entry.name.endswith(_ENDING)])

    def arrays(self) -> tuple[SuffixArray, ...]:
        """Return all texts in arrays that can be searched, the newest texts in the last one. Most texts are
        in a saved array, which is rebuilt only when many texts are not in it."""
        entries = [entry for entry in self._entries() if entry.name.endswith(_ENDING)]
        saved = SuffixArray.load(self.folder / _ARRAY)
        n_saved = len(saved) if saved is not None else 0
        known = set(saved.made_of.split()) if saved is not None else set()
        new = [entry for entry in entries if entry.name not in known]
        n_new = sum(entry.n_bytes for entry in new) // _BYTES_A_TOKEN
        if n_new > max(MAX_NEW, _NEW_PART * n_saved):
            saved = SuffixArray.build(self._read(entries), " ".join(e.name for e in entries))
            with contextlib.suppress(OSError):
                saved.save(self.folder / _ARRAY)
            new = []
        arrays = [saved] if saved is not None else []
        if new:
            arrays.append(SuffixArray.build(self._read(new)))
        return tuple(array for array in arrays if len(array))

    def _entries(self) -> list[_Entry]:
        """Return all files but the saved array, the newest last. Files of a killed process are among them:
        they are removed once they are old."""
        entries: list[_Entry] = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as files:
            for file in files:
                if file.name == _ARRAY:
                    continue
                with contextlib.suppress(OSError):  # another process removed it
                    stat = file.stat()
                    entries.append(_Entry(stat.st_mtime_ns, file.name, stat.st_size))
        return sorted(entries)

    def _bound(self, entries: list[_Entry]) -> None:
        """Remove the oldest files until the store is within its limits."""
        n_bytes, n_texts = sum(entry.n_bytes for entry in entries), len(entries)
        for entry in entries:
            if n_bytes <= self._max_bytes and n_texts <= self._max_texts:
                return
            with contextlib.suppress(OSError):
                (self.folder / entry.name).unlink()
            n_bytes, n_texts = n_bytes - entry.n_bytes, n_texts - 1

    def _read(self, entries: Sequence[_Entry]) -> list[IntArray]:
        texts: list[IntArray] = []
        for entry in entries:
            try:
                data = (self.folder / entry.name).read_bytes()
            except OSError:
                continue
            if len(data) % _BYTES_A_TOKEN == 0 and entry.name == f"{_digest(data)}{_ENDING}":
                texts.append(np.frombuffer(data, "<i4").astype(np.int32))
        return texts


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
