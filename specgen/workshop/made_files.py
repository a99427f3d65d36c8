"""Where what is made for a target lies on the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specgen.catalogue.files import FileIdentity


def made_folder(cache: Path, target: FileIdentity) -> Path:
    """The folder of all that was made for a target, in the cache folder; it need not exist."""
    key = hashlib.sha256(f"{target.name}, {target.size_bytes}".encode()).hexdigest()[:16]
    return cache / "made" / key


def text_folder(cache: Path, target: FileIdentity) -> Path:
    """The target's own text."""
    return made_folder(cache, target) / "text"


def distilled_file(cache: Path, target: FileIdentity, draft: Path) -> Path:
    """A draft model that was fitted to the target."""
    return made_folder(cache, target) / f"{draft.stem}-distilled.gguf"


def heads_file(cache: Path, target: FileIdentity) -> Path:
    """The target's decoder heads."""
    return made_folder(cache, target) / f"{Path(target.name).stem}-heads.gguf"


def pruned_file(cache: Path, target: FileIdentity) -> Path:
    """The target without some of its blocks."""
    return made_folder(cache, target) / f"{Path(target.name).stem}-pruned.gguf"


def learning_folder(data: Path, target: FileIdentity) -> Path:
    """The target's answers that were kept, and what drafts learnt from them, in the data folder."""
    key = hashlib.sha256(f"{target.name}, {target.size_bytes}".encode()).hexdigest()[:16]
    return data / "learning" / f"{Path(target.name).stem}-{key}"
