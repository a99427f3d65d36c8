"""Model files (names, sizes, digests), and the folders in which specgen keeps its own files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import ModelFileError
from specgen.system.files import parts_of

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A model file's name, and the size of all its shards: a digest of gigabytes would take longer
    than the answer.
    """

    name: str
    size_bytes: int

    @property
    def key(self) -> str:
        """What names folders of it."""
        return hashlib.sha256(f"{self.name}, {self.size_bytes}".encode()).hexdigest()[:16]


def identify(path: Path) -> FileIdentity | None:
    try:
        sizes = [part.stat().st_size for part in parts_of(path) if part.is_file()]
    except OSError:
        return None
    return FileIdentity(path.name, sum(sizes)) if sizes and path.is_file() else None


def identity_of(target: Path) -> FileIdentity:
    if identity := identify(target):
        return identity
    from specgen.llama.gguf_file import check_file

    check_file(target)  # which says what is wrong
    raise ModelFileError(f"{target}: no such file")


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it cannot be accessed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_sha256(path: Path, report: Callable[[int], None] = lambda _n_bytes: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            report(file.tell())
    return digest.hexdigest()


# --- folders, none of which need exist


def _folder(kind: str) -> Path:
    if override := os.environ.get(f"SPECGEN_{kind.upper()}"):
        return Path(override).expanduser()
    import platformdirs

    return Path(getattr(platformdirs, f"user_{kind}_dir")("specgen", appauthor=False))


#: The folders of files that can be made or fetched again, that the user writes, and that the user
#: wants to keep.
cache_folder = partial(_folder, "cache")
config_folder = partial(_folder, "config")
data_folder = partial(_folder, "data")


def packed_folder() -> Path:
    return cache_folder() / "packed"


def prefixes_folder(cache: Path) -> Path:
    return cache / "prefixes"


def measurements_file() -> Path:
    return cache_folder() / "learnt.json"


# --- what is made for a target


def heads_file(cache: Path, target: FileIdentity) -> Path:
    return cache / "made" / target.key / f"{Path(target.name).stem}-heads.gguf"


def learning_folder(data: Path, target: FileIdentity) -> Path:
    return data / "learning" / f"{Path(target.name).stem}-{target.key}"
