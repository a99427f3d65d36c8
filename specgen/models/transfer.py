"""HTTP downloads through huggingface_hub's client, which resume: after an interruption only the rest is downloaded."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specgen.errors import FetchError
from specgen.models.files import file_sha256, human_bytes, size_of
from specgen.system.files import existing_parent

if TYPE_CHECKING:
    from specgen.models.progress import DownloadProgress

NETWORK_HINT = (
    "check the network, and HTTPS_PROXY if there is a proxy; then try again: "
    "what was downloaded is kept"
)
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
#: Receives the bytes of a file that are here and, if known, all that there are.
Report = Callable[[int, int | None], None]


def download(
    url: str,
    path: Path,
    sha256: str | None,
    progress: DownloadProgress,
    *,
    report: Report = lambda _done_bytes, _total_bytes: None,
    size_bytes: int | None = None,
    headers: Mapping[str, str] | None = None,
    report_check: Callable[[int], None] = lambda _done_bytes: None,
) -> None:
    """Download `url` to `path`, and resume an earlier download.

    The client tries again, five times without a byte between them. Raise FetchError if the file cannot be
    downloaded, or if its digest is not `sha256`; an OSError of the disk passes through. `report_check` receives the bytes
    whose digest is known.
    """
    from huggingface_hub.file_download import http_get

    if size_bytes is not None and size_of(path) > size_bytes:
        path.unlink()
    while True:
        here_bytes = size_of(path)
        with path.open("r+b" if here_bytes else "wb") as file:
            file.seek(0, os.SEEK_END)
            try:
                http_get(
                    url,
                    file,
                    resume_size=here_bytes,
                    # A compressed answer would have other offsets than the file.
                    headers={"Accept-Encoding": "identity", **(headers or {})},
                    expected_size=size_bytes,
                    tqdm_class=_reporting(report),
                )
            except Exception as error:
                raise network_error(error, url) from error
        if sha256 is None or file_sha256(path, report_check) == sha256:
            return
        path.unlink()
        if not here_bytes:
            raise FetchError(
                f"{shown_url(url)} does not have the SHA-256 that its server gives",
                "something on the network changes files; try another network",
            )
        progress.note("the earlier part of the download was damaged; starting again")


def _reporting(report: Report) -> Any:
    """Return what takes the place of tqdm's class and reports the position."""

    class Reporting:
        def __init__(
            self, *_: object, initial: int = 0, total: int | None = None, **__: object
        ) -> None:
            self._n_bytes, self._total_bytes = initial, total

        def __enter__(self) -> Reporting:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n_bytes: int) -> None:
            self._n_bytes += n_bytes
            report(self._n_bytes, self._total_bytes)

    return Reporting


# --- errors of the network and of the disk


def network_error(error: Exception, url: str) -> Exception:
    """Return our error for one out of huggingface_hub or its client, or the operating system's own about the disk."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    causes = [*_causes(error)]
    for cause in causes:
        if isinstance(cause, OfflineModeIsEnabled):
            return FetchError("HF_HUB_OFFLINE is set", "unset it to download models")
        if isinstance(cause, HfHubHTTPError):
            message = f"{shown_url(url)} answered with status {cause.response.status_code}"
            return FetchError(message, "another try is not likely to help")
    is_network = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
    if isinstance(error, OSError) and error.errno is not None and not is_network:
        return error
    # The operating system's own reason comes last: "Connection refused".
    reasons = [each.strerror for each in causes if isinstance(each, OSError) and each.strerror]
    reason = reasons[-1] if reasons else str(error).strip() or type(error).__name__
    return FetchError(
        f"the connection to {host_of(url)} failed: {reason.splitlines()[0].rstrip('.')}",
        NETWORK_HINT,
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, down to the operating system's own."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def shown_url(url: str) -> str:
    """Return `url` without what may be secret: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_of(url)}{parts.path}"


def host_of(url: str) -> str:
    """Return the host of `url`, with its port if it names one."""
    return urlsplit(url).netloc.rpartition("@")[2]


@contextmanager
def writing_below(folder: Path, variable: str) -> Iterator[None]:
    """Turn an OSError in the block, which writes below `folder`, into a FetchError; `variable` moves it."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FetchError(
                f"the disk that holds {folder} is full",
                f"free some space there, or set {variable} to a folder on another disk; "
                "what was downloaded is kept, and the next try goes on from there",
            ) from error
        raise FetchError(
            f"cannot write to {error.filename or folder}: {error.strerror or error}",
            f"make it writable, or set {variable} to a folder that is",
        ) from error


def check_room(what: str, folder: Path, needed_bytes: int, variable: str) -> None:
    """Raise FetchError unless the disk that holds `folder` has room; `folder` may not exist yet."""
    try:
        free_bytes = shutil.disk_usage(existing_parent(folder)).free
    except OSError:
        # Some network file systems do not say; writing will show.
        return
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{what} needs {human_bytes(needed_bytes)} in {folder}, but only {human_bytes(free_bytes)} are free",
            f"free some space there, or set {variable} to a folder on another disk",
        )


@contextmanager
def download_lock(lock_file: Path, what: str, progress: DownloadProgress) -> Iterator[None]:
    """Hold the lock of a download. The system gives it back when a process dies."""
    import filelock

    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress.note(f"another process is downloading {what}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
