"""Models from the Hugging Face hub, through huggingface_hub and its cache.

Its own variables (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, ...) are therefore respected, and a model
that another program has downloaded is found.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from specgen.errors import FetchError, UnknownModelError
from specgen.models.files import human_bytes, size_of
from specgen.models.hub_cache import (
    cache_of_hub,
    cached_models,
    find_in_cache,
    page_of,
    storage_of,
)
from specgen.models.hub_reference import (
    HubReference,
    choose,
    models_among,
    mtp_layers_for,
    reference_of,
    usual,
)
from specgen.models.progress import DownloadProgress
from specgen.models.registry import CatalogueModel, HubSource
from specgen.models.transfer import (
    check_room,
    download,
    download_lock,
    host_of,
    network_error,
    writing_below,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Moves the hub's cache.
_CACHE_VARIABLE = "HF_HOME"

_T = TypeVar("_T")


def _writing_to_cache() -> AbstractContextManager[None]:
    """Let the block use huggingface_hub, whose warnings stay off stderr unless the user set its log level."""
    logger = logging.getLogger("huggingface_hub")
    if logger.level == logging.WARNING:
        logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="huggingface_hub")
    return writing_below(cache_of_hub(), _CACHE_VARIABLE)


@dataclass(frozen=True, slots=True)
class _File:
    """A file as the hub has it now. The cache names it after its ETag, which is the SHA-256 of large files."""

    source: HubSource
    etag: str
    size_bytes: int

    @property
    def sha256(self) -> str | None:
        return self.etag if _SHA256.fullmatch(self.etag) else None

    @property
    def blob(self) -> Path:
        return storage_of(self.source.repo) / "blobs" / self.etag

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def left_bytes(self) -> int:
        return 0 if self.blob.exists() else max(1, self.size_bytes - size_of(self.partial))


def fetch_from_hub(source: HubSource, model: CatalogueModel, progress: DownloadProgress) -> Path:
    """Download the model into the hub's cache and return its path. Raise FetchError or UnknownModelError.

    The hub is first asked once about the file. So a hub that does not respond within seconds, or a file that
    differs from ours, is noticed then, and not after minutes of retries.
    """
    with _writing_to_cache():
        file = _file(source)
        if file.sha256 not in (None, model.sha256) or file.size_bytes not in (0, model.size_bytes):
            raise FetchError(
                f"the hub's file is not {model.name} as models.toml has it "
                f"(SHA-256 {file.etag}, {file.size_bytes} bytes)",
                "its repository has changed; set a revision in models.toml to get the old file",
            )
        check_room(model.name, cache_of_hub(), file.left_bytes, _CACHE_VARIABLE)
        return _fetch(file, model.name, model.sha256, progress)


def fetch_reference(
    reference: HubReference, progress: DownloadProgress | None, *, newest: bool = False
) -> Path:
    """Return the first file of a model that is named by its repository, downloading it if need be.

    A model in the cache is used as it is, without asking the hub, unless the `newest` is wanted. A
    reference that names no quantisation may need the hub for the choice; if that cannot be reached,
    the cache decides. Raise FetchError, or UnknownModelError if there is no such repository or model.
    """
    repo, progress = reference.repo, progress or DownloadProgress()
    if not newest and (path := find_in_cache(usual(reference))) is not None:
        return path
    with _writing_to_cache(), closing(progress):
        try:
            sizes, licence = _listing(repo)
        except FetchError as error:
            if newest:
                raise
            path = find_in_cache(reference)
            if path is None:
                has = ", ".join(str(model.reference) for model in cached_models(repo))
                message = f"{reference} is not in the hub's cache, and {error.message}"
                message += f" (it has {has})" if has else ""
                raise FetchError(message, error.hint) from error
            progress.note(f"{error.message}; using {path.name} from the hub's cache")
            return path
        names = choose(sizes, reference)
        if names is None:
            raise _unknown(reference, sizes)
        path = _fetch_all([_file(HubSource(repo, name)) for name in names], licence, progress)
        if (layers := mtp_layers_for(names[0], sizes)) is not None:
            progress.note(
                f"{repo} also has MTP layers, which draft for this model once they are there: "
                f"`specgen models pull {repo}/{layers}` ({human_bytes(sizes[layers])})"
            )
        return path


def _fetch_all(files: Sequence[_File], licence: str, progress: DownloadProgress) -> Path:
    """Return the path of the first of a model's files."""
    first = files[0].source
    if left_bytes := sum(file.left_bytes for file in files):
        whole_bytes = sum(file.size_bytes for file in files)
        resumed = f"{human_bytes(left_bytes)} left of " if left_bytes < whole_bytes else ""
        size_text = ", ".join(filter(None, (f"{resumed}{human_bytes(whole_bytes)}", licence)))
        progress.note(f"downloading {first.repo}/{first.file} ({size_text})")
        check_room(first.file, cache_of_hub(), left_bytes, _CACHE_VARIABLE)
    paths = [
        _fetch(file, PurePosixPath(file.source.file).name, file.sha256, progress) for file in files
    ]
    if len({path.parent for path in paths}) > 1:
        raise FetchError(f"{first.repo} changed during the download", "run it again")
    return paths[0]


def _fetch(file: _File, label: str, sha256: str | None, progress: DownloadProgress) -> Path:
    """Return a file's path in the cache, downloading it if need be.

    huggingface_hub drops what an interrupted download got. So the blob is downloaded here, which
    resumes, and huggingface_hub then finds it in its place and does the rest. It downloads by itself
    what the hub serves over its own protocol only.
    """
    from huggingface_hub import constants, hf_hub_download

    source, blob = file.source, file.blob
    if file.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE and not blob.exists():
        # The lock that huggingface_hub takes too.
        lock = cache_of_hub() / ".locks" / storage_of(source.repo).name / f"{blob.name}.lock"
        with download_lock(lock, label, progress):
            if not blob.exists():
                blob.parent.mkdir(parents=True, exist_ok=True)
                _download(file, label, sha256, progress)
    try:
        path = Path(hf_hub_download(source.repo, source.file, revision=source.revision))
    except Exception as error:
        raise _translated(error, source.repo) from error
    if not path.is_symlink():  # a system without links: the file was copied
        blob.unlink(missing_ok=True)
    return path


def _download(file: _File, label: str, sha256: str | None, progress: DownloadProgress) -> None:
    from huggingface_hub import get_token, hf_hub_url

    source, token = file.source, get_token()  # the client sends it to no other host
    progress.show(label, size_of(file.partial), file.size_bytes)
    download(
        hf_hub_url(source.repo, source.file, revision=source.revision),
        file.partial,
        sha256,
        progress,
        report=lambda done_bytes, _total: progress.show(label, done_bytes, file.size_bytes),
        size_bytes=file.size_bytes or None,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        report_check=lambda done: progress.show(f"{label}: checking", done, file.size_bytes),
    )
    file.partial.replace(file.blob)


# --- questions to the hub


def _listing(repo: str) -> tuple[dict[str, int], str]:
    """Return the size in bytes of each file of a repository, and its licence."""
    from huggingface_hub import HfApi, constants

    timeout_s = constants.HF_HUB_ETAG_TIMEOUT
    info = _ask(lambda: HfApi().model_info(repo, files_metadata=True, timeout=timeout_s), repo)
    licences = [tag[len("license:") :] for tag in info.tags or () if tag.startswith("license:")]
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}, ", ".join(licences)


def _file(source: HubSource) -> _File:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    timeout_s = constants.HF_HUB_ETAG_TIMEOUT
    metadata = _ask(lambda: get_hf_file_metadata(url, timeout=timeout_s), source.repo)
    etag = metadata.etag or ""
    if metadata.commit_hash is None or not _ETAG.fullmatch(etag):  # it becomes a file's name
        raise _no_hub()
    return _File(source, etag, metadata.size or 0)


def _ask(request: Callable[[], _T], repo: str) -> _T:
    try:
        return request()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_hub() from error
    except Exception as error:
        raise _translated(error, repo) from error


def _host() -> str:
    return host_of(page_of(""))


def _no_hub() -> FetchError:
    return FetchError(
        f"{_host()} does not answer like the Hugging Face hub",
        "the network may require you to sign in first, or HF_ENDPOINT may be wrong",
    )


def _unknown(reference: HubReference, names: Iterable[str]) -> UnknownModelError:
    known = [str(reference_of(reference.repo, files, names)) for files in models_among(names)]
    if not known:
        return UnknownModelError(
            f"{reference.repo} has no GGUF model",
            "look for a repository whose name ends in GGUF; llama.cpp's convert_hf_to_gguf.py converts others",
        )
    return UnknownModelError(f"there is no {reference}", f"there are {', '.join(known)}")


def _translated(error: Exception, repo: str) -> Exception:
    """Return our error for one out of huggingface_hub, or the operating system's own about the disk."""
    from huggingface_hub import errors, get_token

    page = page_of(repo)
    cause: BaseException = error
    while not isinstance(cause, errors.HfHubHTTPError):
        if cause.__cause__ is None:
            return network_error(error, page)
        cause = cause.__cause__
    status = cause.response.status_code
    if isinstance(cause, errors.GatedRepoError):
        refused = "and your token gives no access to it" if get_token() else "and needs a token"
        return FetchError(
            f"{repo} is gated, {refused}",
            f"ask its authors for access on {page}, then set HF_TOKEN (or --hf-token) to your token",
        )
    # Mirrors of the hub may answer with the status alone.
    is_listing = "/api/models/" in str(cause.response.url)
    if isinstance(cause, errors.RepositoryNotFoundError) or (is_listing and status == 404):
        return UnknownModelError(
            f"{_host()} has no repository {repo}, or it is private",
            f"check the name on {page}; for a private one, set HF_TOKEN (or --hf-token)",
        )
    return FetchError(f"{_host()} answered with status {status}", f"check HF_TOKEN, and {page}")
