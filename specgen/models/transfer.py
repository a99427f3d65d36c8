"""Download one file: resume, check its digest, and provide for disk space and a lock."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from specgen.errors import FetchError
from specgen.models.files import file_sha256, size_of
from specgen.models.network_errors import requests_to, without_secrets
from specgen.system.files import NOWHERE, existing_parent
from specgen.system.progress import ProgressView
from specgen.system.quantities import human_bytes

#: Receives the number of bytes done, the size of the file (0 if unknown), and whether the file is
#: being checked (True) or downloaded (False).
Report = Callable[[int, int, bool], None]

#: The HTTP status of a request for what follows the end of a file.
_RANGE_NOT_SATISFIABLE = 416
_DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def download_file(
    url: str,
    path: Path,
    sha256: str | None,
    report: Report,
    size_bytes: int = 0,
    token: str | None = None,
) -> None:
    """Download a file, or the rest of it if `path` has the beginning.

    A file whose digest is wrong is deleted. If part of it was from an earlier attempt, it is
    downloaded once more.

    Args:
        url: The address of the file.
        path: The path to write to. If the download fails, it keeps what was downloaded.
        sha256: The expected digest; None: it is not checked.
        report: Receives the progress.
        size_bytes: The size of the file; 0 if it is unknown.
        token: The token for the server, if it needs one.

    Raises:
        FetchError: If the file could not be downloaded, or has another digest.
        OSError: If it could not be written.
    """
    # A compressed answer could not be resumed: its offsets are not those of the file.
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if 0 < size_bytes < size_of(path):  # this cannot be the beginning of the file
        path.unlink()
    while True:
        kept_bytes = size_of(path)
        has_rest = _append_rest(url, path, headers, report, size_bytes)
        if sha256 is None:
            if has_rest:
                return
        elif file_sha256(path, lambda done_bytes: report(done_bytes, size_bytes, True)) == sha256:
            return
        path.unlink()
        if kept_bytes == 0:
            hint = "something on the network changes files; try another network"
            raise FetchError(
                f"{without_secrets(url)} does not have the SHA-256 that its server gives", hint
            )
        # The beginning from an earlier attempt may have been damaged: download the whole file.


def _append_rest(
    url: str,
    path: Path,
    headers: dict[str, str],
    report: Report,
    size_bytes: int,
) -> bool:
    """Append to a file what is missing of it; its parameters are those of `download_file`.

    Returns:
        False if the server has no more than the file, which may be complete, or of another version.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get

    kept_bytes = size_of(path)
    with path.open("r+b" if kept_bytes else "wb") as file, requests_to(url):
        file.seek(0, os.SEEK_END)
        try:
            http_get(
                url,
                file,
                resume_size=kept_bytes,
                headers=headers,
                expected_size=size_bytes or None,
                tqdm_class=_reporting_to(report, size_bytes),
            )
        except HfHubHTTPError as error:
            if kept_bytes and error.response.status_code == _RANGE_NOT_SATISFIABLE:
                return False
            raise
    return True


def _reporting_to(report: Report, size_bytes: int) -> Any:
    """Return a class that looks like tqdm's progress bar to huggingface_hub, and calls `report`.

    Args:
        report: Receives the progress.
        size_bytes: The size of the file; 0 if only its server knows it.
    """

    class Reporting(nullcontext["Reporting"]):
        def __init__(
            self,
            *_: object,
            initial: int = 0,
            total: int = 0,
            **__: object,
        ) -> None:
            super().__init__(self)  # `with Reporting(...) as bar` gives the object itself
            self._done_bytes = initial
            self._total_bytes = size_bytes or total or 0

        def update(self, n_bytes: int) -> None:
            self._done_bytes += n_bytes
            report(self._done_bytes, self._total_bytes, False)

    return Reporting


# --- the disk -------------------------------------------------------------------------------------


def announcement(
    name: str,
    left_bytes: int,
    whole_bytes: int,
    terms: str,
) -> str:
    """Return the notice before a download, with its size and its licence."""
    size = human_bytes(whole_bytes)
    if left_bytes < whole_bytes:
        size = f"{human_bytes(left_bytes)} left of {size}"
    details = f"{size}, {terms}" if terms else size
    return f"downloading {name} ({details})"


def check_room(
    name: str,
    folder: Path,
    needed_bytes: int,
    variable: str,
) -> None:
    """Check that the disk has room for a download.

    Args:
        name: The name of what is downloaded, for the error.
        folder: The folder to which it is written; it need not exist yet.
        needed_bytes: The room that it needs.
        variable: The environment variable that sets the folder, for the error's hint.

    Raises:
        FetchError: If the disk has too little room.
    """
    try:
        free_bytes = shutil.disk_usage(existing_parent(folder)).free
    except OSError:  # some network file systems do not report it
        return
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{name} needs {human_bytes(needed_bytes)} in {folder}, "
            f"but only {human_bytes(free_bytes)} are free",
            f"free some space, or set {variable} to a folder on another disk",
        )


@contextmanager
def writing_below(folder: Path, variable: str) -> Iterator[None]:
    """Turn an `OSError` of the block, which writes below a folder, into a `FetchError`.

    Args:
        folder: The folder.
        variable: The environment variable that sets the folder, for the error's hint.
    """
    try:
        yield
    except OSError as error:
        if folder.is_relative_to(NOWHERE):
            raise no_folder_error(variable) from error
        if error.errno in _DISK_FULL:
            raise FetchError(
                f"the disk that holds {folder} is full",
                f"free some space, or set {variable} to a folder on another disk; "
                "what was downloaded is kept",
            ) from error
        raise FetchError(
            f"cannot write to {error.filename or folder}: {error.strerror or error}",
            f"make it writable, or set {variable} to a folder that is",
        ) from error


def no_folder_error(variable: str) -> FetchError:
    """Return the error of a download that could only go to `NOWHERE`."""
    return FetchError(
        "there is no folder for downloads, because there is no home directory that can be used",
        f"set {variable} to a folder that can be written",
    )


def lock_download(
    lock_file: Path,
    name: str,
    progress: ProgressView,
) -> AbstractContextManager[object]:
    """Acquire the lock of a download, after waiting for a process that has it.

    The system releases the lock if this process dies.

    Args:
        lock_file: The file to lock. Its folder is created if need be.
        name: The name of what is downloaded, for the note about waiting.
        progress: Shows that note.

    Returns:
        A context manager that releases the lock at the end of its block. If the lock's folder
        cannot be written, there is no lock: either the download goes to another folder, or it
        fails as well.
    """
    import filelock

    lock = filelock.FileLock(lock_file)
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        progress.note(f"another process is downloading {name}; waiting for it")
        return lock.acquire()
    except OSError:
        return nullcontext()
