"""Turn errors of the disk and of the network into FetchErrors with a hint."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specgen.errors import FetchError
from specgen.models.files import human_bytes
from specgen.models.folders import CACHE_VARIABLE
from specgen.system.atomic_files import existing_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def reason(error: BaseException) -> str:
    """Return in a few words why a request failed.

    HTTP clients wrap the operating system's error several times over; it is the one that says
    "Connection refused" or "Name or service not known".
    """
    chain = [error]
    while (following := chain[-1].__cause__ or chain[-1].__context__) and following not in chain:
        chain.append(following)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        if type(link).__name__ == "IncompleteRead":  # urllib3's, or that of the standard library
            return "it was closed too early"
    return first_line(chain[-1])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def shown_url(url: str) -> str:
    """Return `url` without what may be secret: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_of(url)}{parts.path}"


def host_of(url: str) -> str:
    """Return the host of `url`, with its port if it names one."""
    return urlsplit(url).netloc.rpartition("@")[2]


def disk_error(error: OSError, folder: Path, variable: str = CACHE_VARIABLE) -> FetchError:
    """Return the FetchError for an error met while writing below `folder`, which `variable` moves."""
    if error.errno in _FULL:
        return FetchError(
            f"the disk that holds {folder} is full",
            f"free some space there, or set {variable} to a folder on another disk; "
            "what was downloaded is kept, and the next try goes on from there",
        )
    where = error.filename or folder
    return FetchError(
        f"cannot write to {where}: {error.strerror or first_line(error)}",
        f"make it writable, or set {variable} to a folder that is",
    )


@contextmanager
def disk_errors_named(folder: Path, variable: str = CACHE_VARIABLE) -> Iterator[None]:
    """Turn an OSError in the block, which writes below `folder`, into a FetchError."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, folder, variable) from error


def check_room(what: str, folder: Path, needed_bytes: int, variable: str = CACHE_VARIABLE) -> None:
    """Raise FetchError unless the disk that holds `folder` has room; `folder` may not exist yet."""
    existing = existing_parent(folder)
    try:
        free_bytes = shutil.disk_usage(existing).free
    except OSError:
        # Some network file systems do not say; writing will show.
        return
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{what} needs {human_bytes(needed_bytes)} in {folder}, but only {human_bytes(free_bytes)} are free",
            f"free some space there, or set {variable} to a folder on another disk",
        )
