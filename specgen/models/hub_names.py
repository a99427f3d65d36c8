"""Models on the Hugging Face hub: their names, and the models in the hub's cache.

Names are those of llama.cpp's ``-hf``. The cache is shared with other programs. `download.py` has
the downloads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from specgen.errors import UnknownModelError, UsageError
from specgen.models.files import identify, parts_of, size_of
from specgen.models.registry import CatalogueModel
from specgen.system.folders import cache_folder, usable

PREFIX = "hf:"
#: A reference without a quantisation means the first of these that the repository has, or else its
#: first model.
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
#: Files whose names contain one of these belong to a model, but are not models.
_NOT_MODELS = ("mmproj", "imatrix")
#: The prefixes of files with a draft for a single target, which is not a whole model.
DRAFT_PREFIXES = ("mtp-", "eagle3-", "dflash-", "dspark-")
SHA256 = re.compile(r"[0-9a-f]{64}")

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?::(?P<quant>[A-Za-z0-9._-]+)|/(?P<file>[^:]+\.gguf))?",
    re.IGNORECASE,
)
#: An address, with its path on the hub if it is there. The hub's pages of a repository and of its
#: files begin alike; ollama's names of models on the hub have no scheme.
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<path>\S+)|[a-z][a-z0-9+.-]*://.*",
    re.IGNORECASE | re.DOTALL,
)
_FILE_PAGE = re.compile(r"/(?:resolve|blob|tree|raw)/[^/]+(?=/|$)")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?"
    r"(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|(?:MX|NV)FP4(?:_[A-Z0-9]+)?)"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model in a repository; without a quantisation and a file, its default one."""

    #: The repository: USER/NAME.
    repo: str
    #: The quantisation, such as Q4_K_M; None for the default one.
    quant: str | None = None
    #: The name of a file, or a pattern of names with ``*`` and ``?``.
    file: str | None = None

    def __str__(self) -> str:
        if self.file:
            return f"{PREFIX}{self.repo}/{self.file}"
        if self.quant:
            return f"{PREFIX}{self.repo}:{self.quant}"
        return f"{PREFIX}{self.repo}"


def looks_like_reference(name: str) -> bool:
    """Return whether a name has the form of a reference, without the prefix, and not of a path."""
    return _REFERENCE.fullmatch(name) is not None and not name.endswith(".gguf")


def check_no_address(name: str) -> None:
    """Check that a model's name is not the address of a file or of a page.

    Raises:
        UnknownModelError: If it is one. The hint has the model's name, if it is on the hub.
    """
    address = _ADDRESS.fullmatch(name)
    if address is None:
        return
    hint = "download it, or name it with -hf USER/REPO:QUANT if it is on the Hugging Face hub"
    if name.lower().startswith("file:"):
        hint = "give the path of the file, without file://"
    path = _FILE_PAGE.sub("", (address["path"] or "").partition("?")[0]).rstrip("/")
    if _REFERENCE.fullmatch(path):
        hint = f"name it with -hf {path}, or as {PREFIX}{path}"
    raise UnknownModelError(f"{name}: models are not loaded from addresses", hint)


def parse_reference(name: str) -> HubReference:
    """Parse USER/REPO, USER/REPO:QUANT or USER/REPO/FILE.gguf, with the prefix or without.

    Raises:
        UnknownModelError: If it is an address.
        UsageError: If the name has none of these forms.
    """
    check_no_address(name)
    name = name.removeprefix(PREFIX)
    match = _REFERENCE.fullmatch(name)
    if match is None or "--" in match["repo"] or ".." in match["repo"]:
        raise UsageError(
            f'"{name}" does not name a model on the Hugging Face hub',
            "give USER/REPO or USER/REPO:QUANT, "
            "as in -hf Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
        )
    return HubReference(match["repo"], match["quant"], match["file"])


def reference_of(
    repo: str,
    model: list[str],
    names: Iterable[str],
) -> HubReference:
    """Return the shortest reference to a model.

    Args:
        repo: The repository.
        model: The names of the model's files.
        names: The names of all files of the repository.
    """
    by_quant = HubReference(repo, quant=quant_of(model[0]))
    if by_quant.quant is not None and choose(names, by_quant) == model:
        return by_quant
    return HubReference(repo, file=model[0])


def quant_of(name: str) -> str | None:
    """Return the last quantisation in a file's name, in upper case; None if it has none."""
    quants = _QUANT.findall(PurePosixPath(name).name)
    return quants[-1].upper() if quants else None


def page_of(repo: str) -> str:
    """Return the address of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


# --- the files of a repository --------------------------------------------------------------------


def models_among(names: Iterable[str], *, with_drafts: bool = False) -> list[list[str]]:
    """Return the models among the files of a repository.

    A model is the list of its files in order, and all of them must exist.

    Args:
        names: The names of all files.
        with_drafts: Whether drafts for a single target count as models.
    """
    excluded = _NOT_MODELS if with_drafts else (*_NOT_MODELS, *DRAFT_PREFIXES)
    existing = set(names)
    models = []
    for name in sorted(existing):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or any(word in path.name for word in excluded):
            continue
        parts = [str(part) for part in parts_of(path)]
        # A split model is added once, when its first file comes.
        if parts[0] == name and existing.issuperset(parts):
            models.append(parts)
    return models


def choose(names: Iterable[str], reference: HubReference) -> list[str] | None:
    """Choose the model that a reference means.

    As in llama.cpp, upper and lower case are the same.

    Args:
        names: The names of all files of the repository.
        reference: The reference.

    Returns:
        The names of its files in order; None if there is no such model.
    """
    if reference.file is not None:
        wanted = reference.file.lower()
        for model in models_among(names, with_drafts=True):
            if any(name == wanted or fnmatch(name, wanted) for name in map(str.lower, model)):
                return model
        return None
    models = models_among(names)
    quants = DEFAULT_QUANTS if reference.quant is None else (reference.quant,)
    for quant in quants:
        # "Q4_0" matches "-Q4_0.gguf" and "-Q4_0-00001-of-00002.gguf", but not "IQ4_0" or "Q4_0_4".
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[.-]", re.IGNORECASE)
        for model in models:
            if pattern.search(model[0]):
                return model
    if models and reference.quant is None:
        return models[0]
    return None


def mtp_layers_for(model: str, names: Iterable[str]) -> str | None:
    """Return the name of a file of MTP layers for a model.

    Args:
        model: The name of the model's first file.
        names: The names of all files of the repository.

    Returns:
        A file in the model's folder, preferably with the same quantisation; None if there is none,
        or if `model` is itself a draft.
    """
    model_path = PurePosixPath(model)
    if model_path.name.startswith(DRAFT_PREFIXES):
        return None
    layers = []
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.parent == model_path.parent and path.match("mtp-*.gguf"):
            layers.append(name)
    same_quant = [name for name in layers if quant_of(name) == quant_of(model)]
    return next(iter(same_quant + layers), None)


# --- what is on this disk -------------------------------------------------------------------------


def folder_of(model: CatalogueModel) -> Path:
    """Return specgen's own folder for a model.

    It is named after the digest of the model's file, so that files of the same name never mix.
    """
    return cache_folder() / "models" / model.sha256[:16]


def locate(model: CatalogueModel) -> Path | None:
    """Return the path of a registry model's file; None if it is not on this disk.

    It may be in specgen's own folder or in the hub's cache. Names and sizes decide: no file is
    read.
    """
    own_file = folder_of(model) / model.file
    if size_of(own_file) == model.size_bytes:
        return own_file
    if model.hub is None:
        return None
    for snapshot, _names in snapshots(storage_of(model.hub.repo)):
        path = snapshot / model.hub.file
        # Usually this is a link to a file that is named after its digest. Follow only this one
        # link: its target may itself be a link to a store with other names. Without a digest in a
        # name (on systems without links), the size has to suffice.
        name = path.readlink().name if path.is_symlink() else path.name
        may_be_model = name == model.sha256 or not SHA256.fullmatch(name)
        if may_be_model and size_of(path) == model.size_bytes:
            return path
    return None


def find_in_cache(reference: HubReference) -> Path | None:
    """Return the first file of a model, in the newest version in the hub's cache that has it.

    Returns:
        None if no version has it.
    """
    for snapshot, names in snapshots(storage_of(reference.repo)):
        files = choose(names, reference)
        if files is not None:
            return snapshot / files[0]
    return None


def snapshots(storage: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a repository's versions in the cache, newest first.

    Yields:
        The folder of a version, and the names of its GGUF files whose content is in the cache.
    """
    newest = ""
    with suppress(OSError, UnicodeDecodeError):
        newest = (storage / "refs" / "main").read_text(encoding="utf-8")

    def recency(folder: Path) -> tuple[bool, float, Path]:
        return folder.name == newest, folder.stat().st_mtime, folder

    folders: list[Path] = []
    with suppress(OSError):
        folders = sorted((storage / "snapshots").iterdir(), key=recency, reverse=True)
    for folder in folders:
        files = [path for path in folder.rglob("*.[gG][gG][uU][fF]") if path.is_file()]
        yield folder, [path.relative_to(folder).as_posix() for path in files]


def storage_of(repo: str) -> Path:
    """Return the folder of a repository in the hub's cache."""
    return cache_of_hub() / f"models--{repo.replace('/', '--')}"


def cache_of_hub() -> Path:
    """Return the folder of the hub's cache.

    Raises:
        UsageError: If one of huggingface_hub's variables has a value that it cannot have.
    """
    try:
        from huggingface_hub import constants
    except ValueError as error:
        hint = "correct or unset the variables that begin with HF_"
        raise UsageError(f"a variable of huggingface_hub is wrong: {error}", hint) from error
    return usable(Path(constants.HF_HUB_CACHE))


# --- the models in the cache ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the Hugging Face cache."""

    #: The name of the model, as for `-m`.
    reference: HubReference
    #: The first file of the model.
    path: Path
    #: The names of all its files in the repository.
    names: tuple[str, ...]
    #: The size of all its files.
    size_bytes: int


def cached_models(repo: str | None = None, *, cache: Path | None = None) -> list[CachedModel]:
    """Return the models in the Hugging Face cache, each in its newest version.

    Args:
        repo: The repository whose models are returned; None is all repositories.
        cache: Another folder that is laid out like the cache.
    """
    if repo is not None:
        return _models_in(storage_of(repo))
    models: list[CachedModel] = []
    for storage in sorted((cache or cache_of_hub()).glob("models--*--*")):
        models += _models_in(storage)
    return models


def _models_in(storage: Path) -> list[CachedModel]:
    """Return the models of the repository with this folder in the cache."""
    repo = storage.name.removeprefix("models--").replace("--", "/", 1)
    models: dict[str, CachedModel] = {}  # by the name of the first file
    for snapshot, names in snapshots(storage):  # the newest first
        for files in models_among(names, with_drafts=True):
            first_file = files[0]
            if first_file in models:
                continue
            path = snapshot / first_file
            identity = identify(path)
            if identity is not None:  # the file can be read
                reference = reference_of(repo, files, names)
                models[first_file] = CachedModel(reference, path, tuple(files), identity.size_bytes)
    return list(models.values())
