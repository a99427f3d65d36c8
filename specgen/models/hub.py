"""Models from the Hugging Face hub, through huggingface_hub and its cache.

Its own variables (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, ...) are therefore respected, and a model
that another program has downloaded is found.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import warnings
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import FetchError
from specgen.models.fetch_errors import check_room, disk_errors_named, host_of, reason
from specgen.models.files import file_sha256, has_size
from specgen.models.progress import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from huggingface_hub import HfFileMetadata
    from typing_extensions import Self

    from specgen.models.progress import DownloadProgress
    from specgen.models.registry import CatalogueModel, HubSource

_SHA256 = re.compile(r"[0-9a-f]{64}")
_HINT = "check the network, and HTTPS_PROXY and HF_ENDPOINT if they are set; then try again"


def find_cached(source: HubSource, model: CatalogueModel) -> Path | None:
    """Return the model's file from the hub's cache, if it is there; only names are read.

    The cache keeps large files under the SHA-256 that the hub gives for them, and moves them
    there when they are complete: name and size together say that it is the file.
    """
    from huggingface_hub import try_to_load_from_cache

    # The pinned revision, and whatever the cache holds as the newest.
    for revision in dict.fromkeys((source.revision, None)):
        with suppress(OSError):
            cached = try_to_load_from_cache(source.repo, source.file, revision=revision)
            if isinstance(cached, str) and _is_model(Path(cached), model):
                return Path(cached)
    return None


def fetch_from_hub(source: HubSource, model: CatalogueModel, progress: DownloadProgress) -> Path:
    """Download the model into the hub's cache and return its path. Raise FetchError.

    The hub is first asked once for the metadata of the file. So a hub that does not respond within
    seconds, or a file that differs from ours, is noticed then, and not after minutes of retries.
    """
    from huggingface_hub import constants

    host = host_of(constants.ENDPOINT)
    cache = Path(constants.HF_HUB_CACHE)
    with _hub_held_back(), disk_errors_named(cache):
        _check_same_file(_ask(source, host, constants.HF_HUB_ETAG_TIMEOUT), model, host)
        check_room(model.name, cache, model.size_bytes)
        with shown(progress, model.name, model.size_bytes):
            path = _download(source, host, progress)
        with shown(progress, f"{model.name}: checking", model.size_bytes):
            _check_content(path, model, progress)
    return path


def _is_model(path: Path, model: CatalogueModel) -> bool:
    if not has_size(path, model.size_bytes):
        return False
    # Where the system has no symbolic links, the name says nothing and the size must do.
    blob = _blob_of(path).name
    return blob == model.sha256 or not _SHA256.fullmatch(blob)


def _blob_of(path: Path) -> Path:
    """Return the target of a link in the cache; it is named after the file's digest.

    One link is followed and no more, since that may lead in turn to a store in which files
    are called after another kind of digest, and shared with other repositories.
    """
    return path.parent / path.readlink() if path.is_symlink() else path


def _ask(source: HubSource, host: str, timeout_s: float) -> HfFileMetadata:
    """Return the hub's metadata of the file, within `timeout_s` altogether.

    The client's own limit holds for each address of the hub in turn, and behind a firewall
    that drops packets those add up; so it is asked in a thread that can be left behind.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    answer: Future[HfFileMetadata] = Future()

    def ask() -> None:
        try:
            answer.set_result(get_hf_file_metadata(url, timeout=timeout_s))
        except Exception as error:  # noqa: BLE001 (raised again where the result is taken)
            answer.set_exception(error)

    threading.Thread(target=ask, name="specgen-ask-hub", daemon=True).start()
    try:
        return answer.result(timeout=timeout_s)
    except FutureTimeoutError as error:
        raise FetchError(
            f"{host} did not answer within {timeout_s:g} s",
            f"{_HINT}; HF_HUB_ETAG_TIMEOUT sets how long to wait",
        ) from error
    except Exception as error:
        raise _translated(error, f"{host} cannot be reached", host) from error


def _check_same_file(metadata: HfFileMetadata, model: CatalogueModel, host: str) -> None:
    """Compare the hub's metadata with models.toml, before a gigabyte is downloaded."""
    if metadata.commit_hash is None:
        raise FetchError(
            f"{host} does not answer like the Hugging Face hub",
            "the network may require you to sign in first, or HF_ENDPOINT may be wrong",
        )
    etag = metadata.etag or ""
    other_digest = _SHA256.fullmatch(etag) and etag != model.sha256
    if other_digest or metadata.size not in {None, model.size_bytes}:
        raise FetchError(
            f"the hub's file is not {model.name} as models.toml has it "
            f"(SHA-256 {etag}, {metadata.size} bytes)",
            "its repository has changed; set a revision in models.toml to get the old file",
        )


def _download(source: HubSource, host: str, progress: DownloadProgress) -> Path:
    from huggingface_hub import hf_hub_download

    class Bar(TransferBar):
        """The class of huggingface_hub's bar; only a class can be passed, so this one holds `progress`."""

        watcher = progress

    try:
        path = hf_hub_download(source.repo, source.file, revision=source.revision, tqdm_class=Bar)
    except Exception as error:
        if _is_of_the_disk(error):
            raise
        raise _translated(error, f"the download from {host} failed", host) from error
    return Path(path)


def _check_content(path: Path, model: CatalogueModel, progress: DownloadProgress) -> None:
    """Compare the file with its SHA-256; a wrong one leaves the cache, where it would be found."""
    digest = file_sha256(path, progress.update)
    if digest == model.sha256:
        return
    _blob_of(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise FetchError(
        f"the hub sent {model.name} with the SHA-256 {digest}, not {model.sha256}",
        "the file was deleted; try again",
    )


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether an error is the operating system's, and not one of the network."""
    network = (ConnectionError, TimeoutError, socket.gaierror)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, network)


def _translated(error: Exception, failure: str, host: str) -> FetchError:
    """Return the FetchError for an error out of huggingface_hub.

    Over its versions these come from several HTTP clients, besides its own and those of the
    Xet storage, which have no common base.
    """
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for cause in _chain(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return FetchError("HF_HUB_OFFLINE is set", "unset it to download from the hub")
        if isinstance(cause, HfHubHTTPError):
            answer = f"{host} answered with status {cause.response.status_code}"
            return FetchError(answer, _HINT)
    return FetchError(f"{failure}: {reason(error)}", _HINT)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


@contextmanager
def _hub_held_back() -> Iterator[None]:
    """Keep huggingface_hub's warnings off stderr, unless its log level was set by the user.

    Important warnings also arrive as exceptions, which are reported once, in our words.
    """
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if level == logging.WARNING:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class TransferBar:
    """Passes what huggingface_hub would draw with tqdm to a `DownloadProgress`.

    With Xet storage bytes are reported twice, as received and as written; `update_transfer`
    tells huggingface_hub that one bar takes both.
    """

    watcher: DownloadProgress

    def __init__(
        self, *_: object, initial: float = 0, total: float | None = None, **__: object
    ) -> None:
        self.n = initial
        self.total = total
        self._received = initial
        self._report()

    def update(self, n: float | None = 1) -> None:
        self.n += n or 0
        self._report()

    def update_transfer(self, n: float | None = 1) -> None:
        self._received += n or 0
        self._report()

    def _report(self) -> None:
        # Received bytes may be fewer than those written, as what is known is not sent again,
        # but not more than the file has.
        received = self._received if self.total is None else min(self._received, self.total)
        self.watcher.update(int(max(self.n, received)))

    def set_description(self, *_: object, **__: object) -> None:
        pass

    def set_postfix_str(self, *_: object, **__: object) -> None:
        pass

    def set_transfer_postfix_str(self, *_: object, **__: object) -> None:
        pass

    def refresh(self, *_: object, **__: object) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
