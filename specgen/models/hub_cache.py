"""The GGUF models in the hub's cache: find, list and remove them.

The cache is huggingface_hub's, shared with other programs. To find models, only folders and names are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from specgen.errors import FetchError, ModelFileError
from specgen.models.fetching import folder_of, locate
from specgen.models.files import identify, size_of
from specgen.models.hub_reference import (
    HubReference,
    choose,
    models_among,
    parse_reference,
    reference_of,
)
from specgen.models.registry import CatalogueModel, HubSource, Registry

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache; `path` is its first file, and `names` are its files in the repository."""

    reference: HubReference
    path: Path
    names: tuple[str, ...]
    size_bytes: int


def find_cached(source: HubSource, model: CatalogueModel) -> Path | None:
    """Return the file of a model of the registry, if the cache has it.

    The cache keeps large files under the SHA-256 that the hub gives for them, and moves them
    there when they are complete: name and size together say that it is the file.
    """
    from huggingface_hub import try_to_load_from_cache

    # The pinned revision, and whatever the cache holds as the newest.
    for revision in dict.fromkeys((source.revision, None)):
        with suppress(OSError):
            cached = try_to_load_from_cache(source.repo, source.file, revision=revision)
            if not isinstance(cached, str) or size_of(Path(cached)) != model.size_bytes:
                continue
            # One link is followed and no more: it may lead in turn to a store with names of another kind.
            # Where the system has no symbolic links, the name says nothing and the size must do.
            path = Path(cached)
            blob = path.readlink().name if path.is_symlink() else path.name
            if blob == model.sha256 or not _SHA256.fullmatch(blob):
                return path
    return None


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


def _models(storage: Path) -> Iterator[CachedModel]:
    repo = storage.name.removeprefix("models--").replace("--", "/", 1)
    seen: set[str] = set()
    for snapshot in _snapshots(storage):
        names = _names(snapshot)
        for files in models_among(names, with_drafts=True):
            path = snapshot / files[0]
            identity = identify(path)
            if files[0] not in seen and identity is not None:
                seen.add(files[0])
                reference = reference_of(repo, files, names)
                yield CachedModel(reference, path, tuple(files), identity.size_bytes)


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


def page_of(repo: str) -> str:
    """Return the address of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


# --- removal


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed: files of our own, and models of one repository in the hub's cache."""

    names: tuple[str, ...]
    files: tuple[Path, ...]
    cached: tuple[CachedModel, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the files; less is freed if other files share blobs of the hub's cache."""
        return sum(map(size_of, self.files)) + sum(model.size_bytes for model in self.cached)

    def execute(self) -> int:
        """Remove the files; return how many bytes that freed. Raise `FetchError`."""
        freed_bytes = sum(map(size_of, self.files))
        try:
            for path in self.files:
                path.unlink()
        except OSError as error:
            raise FetchError(f"cannot remove {error.filename}: {error.strerror}") from error
        return freed_bytes + (_remove_cached(self.cached) if self.cached else 0)


def find_removal(name: str, registry: Registry) -> Removal:
    """Return what a name stands for: a model of the registry, or USER/REPO[:QUANT] for models in the hub's
    cache; without QUANT, it is all GGUF models of the repository, and what interrupted downloads left.
    Raise `UnknownModelError`, or `ModelFileError` if nothing is on this disk."""
    files: list[Path] = []
    if "/" in name:
        reference = parse_reference(name)
        cached = cached_models(reference.repo)
        if reference.names_a_model:
            wanted = choose([each for model in cached for each in model.names], reference) or [""]
            cached = [model for model in cached if model.names[0] == wanted[0]]
        else:
            files = list(storage_of(reference.repo).glob("blobs/*.incomplete"))
        names = [str(model.reference) for model in cached] or [str(reference)]
    else:
        known, cached, names = registry.model(name), [], [name]
        files = [path for path in folder_of(known).glob("*") if path.is_file()]
        path = locate(known)
        if known.hub is not None and path is not None and path not in files:
            # By its name: the path may be in an older snapshot than the newest, which `cached_models` gives.
            file = known.hub.file
            cached = [each for each in cached_models(known.hub.repo) if file in each.names]
    if not files and not cached:
        raise ModelFileError(f"{name} is not on this disk", "`specgen models list` shows what is")
    return Removal(tuple(names), tuple(files), tuple(cached))


def _remove_cached(models: tuple[CachedModel, ...]) -> int:
    """Remove models of one repository in all their versions; blobs that other files share stay."""
    from huggingface_hub import scan_cache_dir

    repo = models[0].reference.repo
    names = {name for model in models for name in model.names}
    info = scan_cache_dir(cache_of_hub())
    found = [each for each in info.repos if (each.repo_type, each.repo_id) == ("model", repo)]
    # A copy of the repository may have the same commits, by which revisions are deleted.
    info = replace(info, repos=frozenset(found))
    revisions = [revision for each in found for revision in each.revisions]
    files = {
        file: file.file_path.relative_to(revision.snapshot_path).as_posix() in names
        for revision in revisions
        for file in revision.files
    }
    if all(files.values()):
        strategy = info.delete_revisions(*(revision.commit_hash for revision in revisions))
    else:
        strategy = info.delete_files(*(file for file, goes in files.items() if goes))
    strategy.execute()  # it only logs what it cannot delete
    for model in models:
        if model.path.exists():
            raise FetchError(f"cannot remove {model.path}", "make its folder writable")
    return strategy.expected_freed_size
