"""Locate a model on this disk, or have it downloaded.

What downloads (`download`, `hub`) is imported by its name where it is needed: most runs need none of it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.models.files import models_folder, size_of
from specgen.models.hub_reference import HubReference
from specgen.models.registry import CatalogueModel
from specgen.options import SourceChoice

if TYPE_CHECKING:
    from specgen.models.progress import DownloadProgress


def _module(name: str) -> Any:
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
    found: Path | None = None
    if model.hub is not None:
        found = _module("hub_cache").find_cached(model.hub, model)
    return found


def fetch(
    model: CatalogueModel,
    *,
    progress: DownloadProgress | None = None,
    source: SourceChoice = "auto",
) -> Path:
    """Return the path of a model, downloading it if it is not on this disk yet. Raise FetchError if it cannot be
    had; what has arrived by then is kept for next time."""
    path: Path = locate(model) or _module("download").fetch(model, progress, source)
    return path


def fetch_reference(
    reference: HubReference, *, progress: DownloadProgress | None = None, newest: bool = False
) -> Path:
    """Return the first file of a model that is named by its repository on the hub, downloading it if need be
    (`hub.fetch_reference`)."""
    path: Path = _module("hub").fetch_reference(reference, progress, newest=newest)
    return path


def stderr_progress(*, quiet: bool = False) -> DownloadProgress:
    """Return what suits stderr as it is: a bar on a terminal, lines elsewhere, nothing if quiet."""
    progress: DownloadProgress = _module("progress").stderr_progress(quiet=quiet)
    return progress
