"""Remove models from this disk: downloaded ones, and those in the hub's cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specgen.errors import FetchError, ModelFileError
from specgen.models.fetching import locate
from specgen.models.folders import models_folder
from specgen.models.hub_cache import cache_of_hub, cached_models, partial_downloads
from specgen.models.hub_reference import choose, parse_reference
from specgen.models.model_folder import slot_of

if TYPE_CHECKING:
    from pathlib import Path

    from specgen.models.hub_cache import CachedModel
    from specgen.models.registry import Registry


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed: files of our own, and models of one repository in the hub's cache."""

    names: tuple[str, ...]
    files: tuple[Path, ...]
    cached: tuple[CachedModel, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the files; less is freed if other files share blobs of the hub's cache."""
        own = sum(path.stat().st_size for path in self.files)
        return own + sum(model.size_bytes for model in self.cached)

    def execute(self) -> int:
        """Remove the files; return how many bytes that freed. Raise `FetchError`."""
        freed_bytes = sum(path.stat().st_size for path in self.files)
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
            files = partial_downloads(reference.repo)
        names = [str(model.reference) for model in cached] or [str(reference)]
    else:
        known, cached, names = registry.model(name), [], [name]
        folder = slot_of(known, models_folder()).folder
        files = [path for path in folder.glob("*") if path.is_file()]
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
