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
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from specgen.errors import FetchError, UnknownModelError
from specgen.models.download_lock import locked
from specgen.models.fetch_errors import check_room, disk_errors_named, host_of, reason
from specgen.models.files import file_sha256, has_size, human_bytes
from specgen.models.hub_cache import cache_of_hub, cached_models, find_in_cache, storage_of
from specgen.models.hub_reference import choose, models_among, mtp_layers_for, reference_of, usual
from specgen.models.progress import SilentProgress, shown
from specgen.models.registry import HubSource
from specgen.models.transfer import Transfer, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from huggingface_hub import HfFileMetadata
    from huggingface_hub.errors import HfHubHTTPError

    from specgen.models.hub_reference import HubReference
    from specgen.models.progress import DownloadProgress
    from specgen.models.registry import CatalogueModel

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Moves the hub's cache.
_CACHE_VARIABLE = "HF_HOME"
_HINT = "check the network, and HTTPS_PROXY and HF_ENDPOINT if they are set; then try again"

_T = TypeVar("_T")


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
    """Download the model into the hub's cache and return its path. Raise FetchError or UnknownModelError.

    The hub is first asked once for the metadata of the file. So a hub that does not respond within
    seconds, or a file that differs from ours, is noticed then, and not after minutes of retries.
    """
    with _hub_in_use() as cache:
        metadata = _metadata(source)
        _check_same_file(metadata, model)
        left_bytes = _left_bytes(_blobs(source.repo), metadata, model.size_bytes)
        check_room(model.name, cache, left_bytes, _CACHE_VARIABLE)
        return _fetch(source, metadata, model.name, model.sha256, progress)


def fetch_reference(
    reference: HubReference, *, progress: DownloadProgress | None = None, newest: bool = False
) -> Path:
    """Return the first file of a model that is named by its repository, downloading it if need be.

    A model in the cache is used as it is, without asking the hub, unless the `newest` is wanted. A
    reference that names no quantisation may need the hub for the choice; if that cannot be reached,
    the cache decides. Raise FetchError, or UnknownModelError if there is no such repository or model.
    """
    watcher = SilentProgress() if progress is None else progress
    if not newest and (path := find_in_cache(usual(reference))) is not None:
        return path
    with _hub_in_use() as cache:
        try:
            sizes, licence = _listing(reference.repo)
        except FetchError as error:
            if newest:
                raise
            path = find_in_cache(reference)
            if path is None:
                raise _with_cached(error, reference) from error
            watcher.note(f"{error.message}; using {path.name} from the hub's cache")
            return path
        names = choose(sizes, reference)
        if names is None:
            raise _unknown(reference, sizes)
        files = {HubSource(reference.repo, name): sizes[name] for name in names}
        path = _fetch_all(files, licence, cache, watcher)
        if (layers := mtp_layers_for(names[0], sizes)) is not None:
            watcher.note(
                f"{reference.repo} also has MTP layers, which draft for this model once they are there: "
                f"`specgen models pull {reference.repo}/{layers}` ({human_bytes(sizes[layers])})"
            )
        return path


def _fetch_all(
    files: Mapping[HubSource, int], licence: str, cache: Path, progress: DownloadProgress
) -> Path:
    """Return the path of the first of a model's files, which have these sizes."""
    first = next(iter(files))
    blobs = _blobs(first.repo)
    wanted = {source: _metadata(source) for source in files}
    left_bytes = sum(_left_bytes(blobs, wanted[source], size) for source, size in files.items())
    if left_bytes:
        whole_bytes = sum(files.values())
        resumed = f"{human_bytes(left_bytes)} left of " if left_bytes < whole_bytes else ""
        size_text = ", ".join(filter(None, (f"{resumed}{human_bytes(whole_bytes)}", licence)))
        progress.note(f"downloading {first.repo}/{first.file} ({size_text})")
        check_room(first.file, cache, left_bytes, _CACHE_VARIABLE)
    paths = []
    for source, metadata in wanted.items():
        digest = metadata.etag if _SHA256.fullmatch(metadata.etag or "") else None
        label = PurePosixPath(source.file).name
        paths.append(_fetch(source, metadata, label, digest, progress))
    if len({path.parent for path in paths}) > 1:
        raise FetchError(f"{first.repo} changed during the download", "run it again")
    return paths[0]


@contextmanager
def _hub_in_use() -> Iterator[Path]:
    """Give the folder of the hub's cache; the block may use huggingface_hub and write there."""
    cache = cache_of_hub()
    with _hub_held_back(), disk_errors_named(cache, _CACHE_VARIABLE):
        yield cache


def _listing(repo: str) -> tuple[dict[str, int], str]:
    """Return the size in bytes of each file of a repository, and its licence."""
    from huggingface_hub import HfApi

    info = _ask(lambda: HfApi().model_info(repo, files_metadata=True), repo)
    licences = [tag[len("license:") :] for tag in info.tags or () if tag.startswith("license:")]
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}, ", ".join(licences)


def _left_bytes(blobs: Path, metadata: HfFileMetadata, size_bytes: int) -> int:
    """Return how much of a file is still to be downloaded."""
    assert metadata.etag is not None
    if (blobs / metadata.etag).exists():
        return 0
    return max(1, size_bytes - size_of(_partial(blobs, metadata.etag)))


def _with_cached(error: FetchError, reference: HubReference) -> FetchError:
    """Return the error, with what the cache has of the repository."""
    cached = ", ".join(str(model.reference) for model in cached_models(reference.repo))
    has = f"it has {cached}" if cached else "nothing of this repository is there"
    message = f"{reference} is not in the hub's cache, and {error.message} ({has})"
    return FetchError(message, error.hint)


def _unknown(reference: HubReference, names: Iterable[str]) -> UnknownModelError:
    known = [str(reference_of(reference.repo, files, names)) for files in models_among(names)]
    if not known:
        return UnknownModelError(
            f"{reference.repo} has no GGUF model",
            "look for a repository whose name ends in GGUF; llama.cpp's convert_hf_to_gguf.py converts others",
        )
    return UnknownModelError(f"there is no {reference}", f"there are {', '.join(known)}")


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


def _metadata(source: HubSource) -> HfFileMetadata:
    """Return the hub's metadata of a file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    metadata = _ask(lambda: get_hf_file_metadata(url), source.repo)
    # The ETag becomes the name of a file.
    if metadata.commit_hash is None or not _ETAG.fullmatch(metadata.etag or ""):
        raise _no_hub()
    return metadata


def _no_hub() -> FetchError:
    return FetchError(
        f"{_host()} does not answer like the Hugging Face hub",
        "the network may require you to sign in first, or HF_ENDPOINT may be wrong",
    )


def _ask(request: Callable[[], _T], repo: str) -> _T:
    """Return the hub's answer, within the time limit that is set for it.

    The client's own limit holds for each address of the hub in turn, and behind a firewall
    that drops packets those add up; so it is asked in a thread that can be left behind.
    """
    from huggingface_hub import constants

    timeout_s = constants.HF_HUB_ETAG_TIMEOUT
    answer: Future[_T] = Future()

    def ask() -> None:
        try:
            answer.set_result(request())
        except Exception as error:  # noqa: BLE001 (raised again where the result is taken)
            answer.set_exception(error)

    threading.Thread(target=ask, name="specgen-ask-hub", daemon=True).start()
    try:
        return answer.result(timeout=timeout_s)
    except FutureTimeoutError as error:
        raise FetchError(
            f"{_host()} did not answer within {timeout_s:g} s",
            f"{_HINT}; HF_HUB_ETAG_TIMEOUT sets how long to wait",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_hub() from error
    except Exception as error:
        raise _translated(error, f"{_host()} cannot be reached", repo) from error


def page_of(repo: str) -> str:
    """Return the address of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


def _host() -> str:
    from huggingface_hub import constants

    return host_of(constants.ENDPOINT)


def _check_same_file(metadata: HfFileMetadata, model: CatalogueModel) -> None:
    """Compare the hub's metadata with models.toml, before a gigabyte is downloaded."""
    etag = metadata.etag or ""
    other_digest = _SHA256.fullmatch(etag) and etag != model.sha256
    if other_digest or metadata.size not in {None, model.size_bytes}:
        raise FetchError(
            f"the hub's file is not {model.name} as models.toml has it "
            f"(SHA-256 {etag}, {metadata.size} bytes)",
            "its repository has changed; set a revision in models.toml to get the old file",
        )


def _fetch(
    source: HubSource,
    metadata: HfFileMetadata,
    label: str,
    sha256: str | None,
    progress: DownloadProgress,
) -> Path:
    """Return a file's path in the cache, downloading it if need be.

    huggingface_hub drops what an interrupted download got. So the blob is downloaded here, which
    resumes, and huggingface_hub then finds it in its place and does the rest. It downloads by itself
    what the hub serves over its own protocol only.
    """
    from huggingface_hub import constants, hf_hub_download

    assert metadata.etag is not None
    blobs = _blobs(source.repo)
    blob = blobs / metadata.etag
    if (metadata.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE and not blob.exists():
        # The lock that huggingface_hub takes too.
        lock = cache_of_hub() / ".locks" / blobs.parent.name / f"{blob.name}.lock"
        with locked(lock, label, progress):
            if not blob.exists():
                blobs.mkdir(parents=True, exist_ok=True)
                partial = _partial(blobs, metadata.etag)
                _download(source, partial, metadata.size or 0, label, sha256, progress)
                partial.replace(blob)
    try:
        path = Path(hf_hub_download(source.repo, source.file, revision=source.revision))
    except Exception as error:
        if _is_of_the_disk(error):
            raise
        raise _translated(error, f"the download from {_host()} failed", source.repo) from error
    if not path.is_symlink():  # a system without links: the file was copied
        blob.unlink(missing_ok=True)
    return path


def _download(
    source: HubSource,
    partial: Path,
    size_bytes: int,
    label: str,
    sha256: str | None,
    progress: DownloadProgress,
) -> None:
    """Download a file, or the rest of it, and check it."""
    import requests
    from huggingface_hub import get_token, hf_hub_url

    def digest(path: Path) -> str:
        progress.finish()
        progress.start(f"{label}: checking", size_bytes)
        return file_sha256(path, progress.update)

    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    with (
        requests.Session() as session,
        shown(progress, label, size_bytes, size_of(partial)),
    ):
        if token := get_token():  # requests sends it to no other host
            session.headers["Authorization"] = f"Bearer {token}"
        Transfer(session, progress).download(
            url,
            partial,
            sha256=sha256,
            report=lambda done_bytes, _total_bytes: progress.update(done_bytes),
            digest=digest,
        )


def _blobs(repo: str) -> Path:
    """Return the folder of a repository's files in the cache, where each is named after its ETag."""
    return storage_of(repo) / "blobs"


def _partial(blobs: Path, etag: str) -> Path:
    return blobs / f"{etag}.incomplete"


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether an error is the operating system's, and not one of the network."""
    network = (ConnectionError, TimeoutError, socket.gaierror)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, network)


def _translated(error: Exception, failure: str, repo: str) -> FetchError | UnknownModelError:
    """Return our error for one out of huggingface_hub.

    Over its versions these come from several HTTP clients, besides its own and those of the
    Xet storage, which have no common base.
    """
    from huggingface_hub import errors, get_token

    page = page_of(repo)
    for cause in _chain(error):
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return FetchError("HF_HUB_OFFLINE is set", "unset it to download from the hub")
        if isinstance(cause, errors.GatedRepoError):
            if get_token():
                return FetchError(
                    f"{repo} is gated, and your token gives no access to it",
                    f"ask for access on {page}, or set HF_TOKEN (or --hf-token) to another token",
                )
            return FetchError(
                f"{repo} is gated: its authors give access to those who ask",
                f"ask for access on {page}, then set HF_TOKEN (or --hf-token) to a token of yours",
            )
        if isinstance(cause, errors.HfHubHTTPError) and _has_no_repository(cause):
            return UnknownModelError(
                f"{_host()} has no repository {repo}, or it is private",
                f"check the name on {page}; for a private one, set HF_TOKEN (or --hf-token)",
            )
        if isinstance(cause, errors.HfHubHTTPError):
            status = cause.response.status_code
            hint = f"check HF_TOKEN, and {page}" if status in {401, 403} else _HINT
            return FetchError(f"{_host()} answered with status {status}", hint)
    return FetchError(f"{failure}: {reason(error)}", _HINT)


def _has_no_repository(error: HfHubHTTPError) -> bool:
    """Return whether the hub has no such repository. Mirrors of the hub may answer with the status alone."""
    from huggingface_hub.errors import RepositoryNotFoundError

    is_listing = "/api/models/" in str(error.response.url)
    is_missing = is_listing and error.response.status_code == 404
    return is_missing or isinstance(error, RepositoryNotFoundError)


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
