"""The paths of the files that are made for a target."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specgen.errors import ModelFileError
from specgen.models.files import FileIdentity, identify


def identity_of(target: Path) -> FileIdentity:
    """Return the identity of a file. Raises `ModelFileError` if there is none."""
    identity = identify(target)
    if identity is None:
        raise ModelFileError(f"{target}: no such file")
    return identity


def text_folder(cache: Path, target: FileIdentity) -> Path:
    """Return the folder of the target's own text."""
    return _folder(cache, target) / "text"


def distilled_file(cache: Path, target: FileIdentity, draft: Path) -> Path:
    """Return the file of a draft model that was fitted to the target."""
    return _folder(cache, target) / f"{draft.stem}-distilled.gguf"


def heads_file(cache: Path, target: FileIdentity) -> Path:
    """Return the file of the target's decoder heads."""
    return _folder(cache, target) / f"{Path(target.name).stem}-heads.gguf"


def pruned_file(cache: Path, target: FileIdentity) -> Path:
    """Return the file of the target without some of its layers."""
    return _folder(cache, target) / f"{Path(target.name).stem}-pruned.gguf"


def learning_folder(data: Path, target: FileIdentity) -> Path:
    """Return the data folder's subfolder for the target's kept answers and what drafts learnt from them."""
    return data / "learning" / f"{Path(target.name).stem}-{_key(target)}"


def _folder(cache: Path, target: FileIdentity) -> Path:
    """Return the cache folder's subfolder for everything that is made for a target; it need not exist."""
    return cache / "made" / _key(target)


def _key(target: FileIdentity) -> str:
    return hashlib.sha256(f"{target.name}, {target.size_bytes}".encode()).hexdigest()[:16]
