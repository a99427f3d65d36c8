"""HTTP downloads that resume: after an interruption only the missing part is downloaded."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

from specgen import __version__
from specgen.errors import FetchError
from specgen.models.fetch_errors import first_line, host_of, reason, shown_url
from specgen.models.files import file_sha256, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path
    from typing import Literal

    import requests

    from specgen.models.progress import DownloadProgress

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16
#: The number of failures in a row, without a byte arriving between them, that ends a download.
_N_ATTEMPTS = 4
_LONGEST_WAIT_S = 60.0

#: Statuses that say "not now" rather than "no".
_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_UNSATISFIED_RANGE = re.compile(r"bytes \*/(\d+)")

_NETWORK_HINT = (
    "check the network, and HTTPS_PROXY if there is a proxy; then try again: "
    "what was downloaded is kept"
)
_CERTIFICATE_HINT = "set REQUESTS_CA_BUNDLE to a file with the certificates that your network needs"

_T = TypeVar("_T")


class OpenFile(Protocol):
    """Opens a file for reading or writing bytes, as `Path.open` does."""

    def __call__(self, path: Path, mode: Literal["rb", "wb", "ab", "r+b"]) -> BinaryIO: ...


def open_file(path: Path, mode: Literal["rb", "wb", "ab", "r+b"]) -> BinaryIO:
    """Open a file for reading or writing bytes."""
    return path.open(mode)


class _InterruptedError(Exception):
    """A failure that may pass; `wait_s` is how long the server asked us to wait, if it did."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Page:
    """A text resource, with the address that it was found at after redirects."""

    url: str
    content_type: str
    text: str


class Transfer:
    """Requests over one session, with retries where they may help.

    A host that cannot be reached at the first request is not retried: there is no network, and the
    user should know immediately. After the first response, failures count as temporary.
    """

    def __init__(
        self,
        session: requests.Session,
        progress: DownloadProgress,
        *,
        sleep: Callable[[float], None] = time.sleep,
        open_file: OpenFile = open_file,
    ) -> None:
        self._session = session
        self._session.headers["User-Agent"] = f"specgen/{__version__}"
        self._progress = progress
        self._sleep = sleep
        self._open_file = open_file
        self._answered = False

    def page(self, url: str, accept: str) -> Page | None:
        """Return a text resource, or None where there is none (404). Raise FetchError."""

        def attempt() -> Page | None:
            with self._response(url, {"Accept": accept}, allowed={404}) as response:
                if response.status_code == 404:
                    return None
                content_type = response.headers.get("Content-Type", "")
                # Indexes are UTF-8; requests would take Latin-1 where no charset is given.
                text = response.content.decode("utf-8", errors="replace")
                return Page(response.url, content_type, text)

        return self._until_done(attempt, size=lambda: 0)

    def download(
        self,
        url: str,
        path: Path,
        *,
        sha256: str | None,
        report: Callable[[int, int | None], None],
        digest: Callable[[Path], str] = file_sha256,
    ) -> None:
        """Download `url` to `path`, and resume an earlier download.

        `report` receives the bytes so far and, if known, the total. Raise FetchError if the file cannot be
        downloaded, or if its `digest` is not `sha256`; an OSError of the disk passes through.
        """
        resumed = size_of(path) > 0
        self._until_done(lambda: self._attempt(url, path, report), size=lambda: size_of(path))
        if sha256 is None or digest(path) == sha256:
            return
        path.unlink()
        if not resumed:
            raise FetchError(
                f"{shown_url(url)} does not have the SHA-256 that its server gives",
                "something on the network changes files; try another network",
            )
        self._progress.note("the earlier part of the download was damaged; starting again")
        self.download(url, path, sha256=sha256, report=report, digest=digest)

    def _attempt(self, url: str, path: Path, report: Callable[[int, int | None], None]) -> None:
        """Ask for what is missing and write what arrives; return when nothing is missing."""
        offset = size_of(path)
        # A compressed answer would have other offsets than the file.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with self._response(url, headers, allowed={_RANGE_NOT_SATISFIABLE}) as response:
            if response.status_code == _RANGE_NOT_SATISFIABLE:
                _accept_whole(response, path, offset)
                return
            start, total_bytes = _span(response)
            if start not in {0, offset}:
                path.unlink()
                raise _InterruptedError(f"{host_of(url)} answered with another range")
            done_bytes = start
            with self._open_file(path, "ab" if start else "wb") as file:
                for chunk in response.iter_content(_CHUNK_BYTES):
                    file.write(chunk)
                    done_bytes += len(chunk)
                    report(done_bytes, total_bytes)
        if total_bytes is not None and done_bytes < total_bytes:
            raise _InterruptedError(_cut_off(url, done_bytes, total_bytes))

    def _until_done(self, attempt: Callable[[], _T], size: Callable[[], int]) -> _T:
        """Call `attempt` until it returns; give up when it fails over and over without gaining."""
        n_failures = 0
        while True:
            size_before = size()
            try:
                return attempt()
            except _InterruptedError as error:
                n_failures = 1 if size() > size_before else n_failures + 1
                if n_failures >= _N_ATTEMPTS:
                    raise FetchError(f"gave up: {error}", _NETWORK_HINT) from error
                wait_s = float(2 ** (n_failures - 1)) if error.wait_s is None else error.wait_s
                self._progress.note(f"{error}; trying again in {wait_s:g} s")
                self._sleep(wait_s)

    @contextmanager
    def _response(
        self, url: str, headers: dict[str, str], allowed: Collection[int]
    ) -> Iterator[requests.Response]:
        """Ask for `url`; every error of the network in the block is translated here."""
        import requests

        timeout = (_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S)
        try:
            with self._session.get(url, headers=headers, stream=True, timeout=timeout) as response:
                self._answered = True
                _check_status(response, url, allowed)
                yield response
        except requests.exceptions.RequestException as error:
            raise self._translated(error, url) from error

    def _translated(
        self, error: requests.exceptions.RequestException, url: str
    ) -> FetchError | _InterruptedError:
        from requests import exceptions

        host, why = host_of(url), reason(error)
        if isinstance(error, exceptions.ProxyError):
            return FetchError(f"the proxy cannot be used: {why}", "check HTTPS_PROXY")
        if isinstance(error, exceptions.SSLError) and "CERTIFICATE" in str(error):
            return FetchError(f"the certificate of {host} is not trusted", _CERTIFICATE_HINT)
        if isinstance(error, exceptions.ConnectionError) and not self._answered:
            return FetchError(f"{host} cannot be reached: {why}", _NETWORK_HINT)
        passing = (
            exceptions.ConnectionError,
            exceptions.Timeout,
            exceptions.ChunkedEncodingError,
            exceptions.ContentDecodingError,
        )
        if isinstance(error, passing):
            return _InterruptedError(f"the connection to {host} failed: {why}")
        return FetchError(f"{shown_url(url)} cannot be asked for: {first_line(error)}")


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _check_status(response: requests.Response, url: str, allowed: Collection[int]) -> None:
    status = response.status_code
    if status in {200, _PARTIAL_CONTENT} or status in allowed:
        return
    answer = f"{shown_url(url)} answered {status} {response.reason or ''}".rstrip()
    if status in _PASSING_STATUSES:
        asked = response.headers.get("Retry-After", "")
        wait_s = min(float(asked), _LONGEST_WAIT_S) if asked.isdecimal() else None
        raise _InterruptedError(answer, wait_s)
    raise FetchError(answer, "the server refuses it; another try is not likely to help")


def _span(response: requests.Response) -> tuple[int, int | None]:
    """Return where the body of an answer begins in the file, and how long the file is, if known."""
    if response.status_code == _PARTIAL_CONTENT:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if match is None:
            return -1, None
        start, total = match.groups()
        return int(start), None if total == "*" else int(total)
    # The server does not know ranges, or has another file now: from the beginning, then.
    length = response.headers.get("Content-Length", "")
    encoded = response.headers.get("Content-Encoding", "identity") != "identity"
    return 0, int(length) if length.isdecimal() and not encoded else None


def _accept_whole(response: requests.Response, path: Path, offset: int) -> None:
    """Accept the file as whole if its length is `offset`: nothing lies beyond it."""
    match = _UNSATISFIED_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
    if match is None or int(match.group(1)) != offset:
        path.unlink()
        raise _InterruptedError("the earlier part of the download is longer than the file")


def _cut_off(url: str, done_bytes: int, total_bytes: int) -> str:
    done, total = human_bytes(done_bytes), human_bytes(total_bytes)
    return f"{host_of(url)} closed the connection after {done} of {total}"
