"""HTTP downloads that resume: after an interruption only the missing part is downloaded."""

from __future__ import annotations

import errno
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specgen import __version__
from specgen.errors import FetchError
from specgen.models.files import file_sha256, human_bytes, size_of
from specgen.system.files import existing_parent

if TYPE_CHECKING:
    import requests

    from specgen.models.progress import DownloadProgress

#: For a connection, and for the next bytes.
_TIMEOUTS_S = (10.0, 30.0)
_CHUNK_BYTES = 1 << 16
#: The number of failures in a row, without a byte arriving between them, that ends a download.
_N_ATTEMPTS = 4
_LONGEST_WAIT_S = 60.0
#: Statuses that say "not now" rather than "no".
_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206
NETWORK_HINT = (
    "check the network, and HTTPS_PROXY if there is a proxy; then try again: "
    "what was downloaded is kept"
)
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class _InterruptedError(Exception):
    """A failure that may pass; `wait_s` is how long the server asked us to wait, if it did."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Transfer:
    """Requests over one session, with retries where they may help.

    A host that cannot be reached at the first request is not retried: there is no network, and the
    user should know immediately. After the first response, failures count as temporary.
    """

    def __init__(
        self,
        session: requests.Session,
        progress: DownloadProgress,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session = session
        self._session.headers["User-Agent"] = f"specgen/{__version__}"
        self._progress = progress
        self._sleep = sleep
        self._answered = False

    def get(self, url: str, accept: str) -> requests.Response | None:
        """Return a small resource, or None where there is none (404). Raise FetchError."""
        found: list[requests.Response] = []

        def attempt() -> int:
            with self._response(url, {"Accept": accept}, allowed=404) as response:
                if response.status_code != 404:
                    found.append(response)
                    return len(response.content)
            return 0

        self._until_done(attempt, lambda: 0)
        return found[0] if found else None

    def download(
        self,
        url: str,
        path: Path,
        sha256: str | None,
        report: Callable[[int, int | None], None] = lambda _done_bytes, _total_bytes: None,
        digest: Callable[[Path], str] = file_sha256,
    ) -> None:
        """Download `url` to `path`, and resume an earlier download.

        `report` receives the bytes so far and, if known, the total. Raise FetchError if the file cannot be
        downloaded, or if its `digest` is not `sha256`; an OSError of the disk passes through.
        """
        resumed = size_of(path) > 0
        self._until_done(lambda: self._attempt(url, path, report), lambda: size_of(path))
        if sha256 is None or digest(path) == sha256:
            return
        path.unlink()
        if not resumed:
            raise FetchError(
                f"{shown_url(url)} does not have the SHA-256 that its server gives",
                "something on the network changes files; try another network",
            )
        self._progress.note("the earlier part of the download was damaged; starting again")
        self.download(url, path, sha256, report, digest)

    def _attempt(self, url: str, path: Path, report: Callable[[int, int | None], None]) -> None:
        """Ask for what is missing and write what arrives; return when nothing is missing."""
        offset = size_of(path)
        # A compressed answer would have other offsets than the file.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with self._response(url, headers, allowed=_RANGE_NOT_SATISFIABLE) as response:
            start, total_bytes = _span(response)
            if start not in {0, offset}:
                path.unlink(missing_ok=True)
                raise _InterruptedError(f"{host_of(url)} answered with another range")
            done_bytes = start
            if response.status_code != _RANGE_NOT_SATISFIABLE:
                with path.open("ab" if start else "wb") as file:
                    for chunk in response.iter_content(_CHUNK_BYTES):
                        file.write(chunk)
                        done_bytes += len(chunk)
                        report(done_bytes, total_bytes)
        if total_bytes is not None and done_bytes < total_bytes:
            done, total = human_bytes(done_bytes), human_bytes(total_bytes)
            raise _InterruptedError(f"the connection was closed after {done} of {total}")

    def _until_done(self, attempt: Callable[[], object], size: Callable[[], int]) -> None:
        """Call `attempt` until it returns; give up when it fails over and over without gaining."""
        n_failures = 0
        while True:
            size_before = size()
            try:
                attempt()
            except _InterruptedError as error:
                n_failures = 1 if size() > size_before else n_failures + 1
                if n_failures >= _N_ATTEMPTS:
                    raise FetchError(f"gave up: {error}", NETWORK_HINT) from error
                wait_s = float(2 ** (n_failures - 1)) if error.wait_s is None else error.wait_s
                self._progress.note(f"{error}; trying again in {wait_s:g} s")
                self._sleep(wait_s)
            else:
                return

    @contextmanager
    def _response(
        self, url: str, headers: dict[str, str], allowed: int
    ) -> Iterator[requests.Response]:
        """Ask for `url`; every error of the network in the block is translated here."""
        from requests import exceptions

        try:
            with self._session.get(
                url, headers=headers, stream=True, timeout=_TIMEOUTS_S
            ) as response:
                self._answered = True
                if response.status_code not in {200, _PARTIAL_CONTENT, allowed}:
                    raise _refusal(response, url)
                yield response
        except exceptions.RequestException as error:
            may_pass = (
                exceptions.ConnectionError,
                exceptions.Timeout,
                exceptions.ChunkedEncodingError,
            )
            final = (exceptions.ProxyError, exceptions.SSLError)
            failure = f"the connection to {host_of(url)} failed: {reason(error)}"
            if self._answered and isinstance(error, may_pass) and not isinstance(error, final):
                raise _InterruptedError(failure) from error
            hint = NETWORK_HINT
            if isinstance(error, exceptions.SSLError):
                hint = "REQUESTS_CA_BUNDLE names a file with the certificates of your network"
            raise FetchError(failure, hint) from error


def _refusal(response: requests.Response, url: str) -> FetchError | _InterruptedError:
    answer = f"{shown_url(url)} answered {response.status_code} {response.reason or ''}".rstrip()
    if response.status_code in _PASSING_STATUSES:
        asked = response.headers.get("Retry-After", "")
        return _InterruptedError(
            answer, min(float(asked), _LONGEST_WAIT_S) if asked.isdecimal() else None
        )
    return FetchError(answer, "the server refuses it; another try is not likely to help")


def _span(response: requests.Response) -> tuple[int, int | None]:
    """Return where the body of an answer begins in the file, and how long the file is, if known."""
    content_range = response.headers.get("Content-Range", "").strip()
    if response.status_code == _RANGE_NOT_SATISFIABLE:  # nothing lies beyond the end
        match = re.fullmatch(r"bytes \*/(\d+)", content_range)
        return (int(match[1]), int(match[1])) if match else (-1, None)
    if response.status_code == _PARTIAL_CONTENT:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range)
        if match is None:
            return -1, None
        return int(match[1]), None if match[2] == "*" else int(match[2])
    # The server does not know ranges, or has another file now: from the beginning, then.
    length = response.headers.get("Content-Length", "")
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    return 0, int(length) if length.isdecimal() and not encoded else None


# --- errors of the network and of the disk


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
    lines = str(chain[-1]).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(chain[-1]).__name__


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
