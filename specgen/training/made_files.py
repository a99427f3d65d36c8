"""The paths of the files that are made for a target."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specgen.models.files import FileIdentity


def made_folder(cache: Path, target: FileIdentity) -> Path:
    """Return the cache folder's subfolder for everything that is made for a target; it need not exist."""
    key = hashlib.sha256(f"{target.name}, {target.size_bytes}".encode()).hexdigest()[:16]
    return cache / "made" / key


def text_folder(cache: Path, target: FileIdentity) -> Path:
    """Return the folder of the target's own text."""
    return made_folder(cache, target) / "text"


def distilled_file(cache: Path, target: FileIdentity, draft: Path) -> Path:
    """Return the file of a draft model that was fitted to the target."""
    return made_folder(cache, target) / f"{draft.stem}-distilled.gguf"


def heads_file(cache: Path, target: FileIdentity) -> Path:
    """Return the file of the target's decoder heads."""
    return made_folder(cache, target) / f"{Path(target.name).stem}-heads.gguf"


def pruned_file(cache: Path, target: FileIdentity) -> Path:
    """Return the file of the target without some of its blocks."""
    return made_folder(cache, target) / f"{Path(target.name).stem}-pruned.gguf"


def learning_folder(data: Path, target: FileIdentity) -> Path:
    """Return the data folder's subfolder for the target's kept answers and the weights that drafts learnt
    from them."""
    key = hashlib.sha256(f"{target.name}, {target.size_bytes}".encode()).hexdigest()[:16]
    return data / "learning" / f"{Path(target.name).stem}-{key}"
