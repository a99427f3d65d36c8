"""The GGUF models in the hub's cache: which there are, and where they are.

The cache is huggingface_hub's, shared with other programs. Only folders and names are read.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.models.files import identify
from specgen.models.hub_reference import HubReference, choose, models_among, reference_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache; `path` is its first file, and `names` are its files in the repository."""

    reference: HubReference
    path: Path
    names: tuple[str, ...]
    size_bytes: int


def find_in_cache(reference: HubReference) -> Path | None:
    """Return the first file of the model that a reference names, from the newest snapshot that has all its
    files."""
    for snapshot in _snapshots(storage_of(reference.repo)):
        files = choose(_names(snapshot), reference)
        if files is not None:
            return snapshot / files[0]
    return None


def cached_models(repo: str | None = None) -> list[CachedModel]:
    """Return the models in the cache, or those of a repository. Of several versions the newest counts."""
    storages = sorted(cache_of_hub().glob("models--*--*")) if repo is None else [storage_of(repo)]
    return [model for storage in storages for model in _models(storage)]


def partial_downloads(repo: str) -> list[Path]:
    """Return what interrupted downloads of a repository left."""
    return list(storage_of(repo).glob("blobs/*.incomplete"))


def _models(storage: Path) -> Iterator[CachedModel]:
    repo = storage.name.removeprefix("models--").replace("--", "/", 1)
    seen: set[str] = set()
    for snapshot in _snapshots(storage):
        names = _names(snapshot)
        for files in models_among(names, with_drafts=True):
            identity = identify(snapshot / files[0])
            if files[0] not in seen and identity is not None:
                seen.add(files[0])
                yield CachedModel(
                    reference_of(repo, files, names),
                    snapshot / files[0],
                    tuple(files),
                    identity.size_bytes,
                )


def _snapshots(storage: Path) -> list[Path]:
    """Return the folders of a repository's versions, the newest first."""
    newest = ""
    with suppress(OSError, UnicodeDecodeError):
        newest = (storage / "refs" / "main").read_text(encoding="utf-8")
    try:
        found = [path for path in (storage / "snapshots").iterdir() if path.is_dir()]
        return sorted(
            found, key=lambda each: (each.name == newest, each.stat().st_mtime), reverse=True
        )
    except OSError:
        return []


def _names(snapshot: Path) -> list[str]:
    """Return the files of a snapshot; an entry whose blob is gone does not count."""
    return [
        path.relative_to(snapshot).as_posix()
        for path in snapshot.rglob("*")
        if path.suffix.lower() == ".gguf" and path.is_file()
    ]


def storage_of(repo: str) -> Path:
    """Return the folder of a repository in the cache; it need not exist."""
    return cache_of_hub() / f"models--{repo.replace('/', '--')}"


def cache_of_hub() -> Path:
    """Return the folder of the hub's cache; it need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
