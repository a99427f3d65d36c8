"""Models of the Hugging Face hub: how they are named, and those in the hub's cache.

Names are those of llama.cpp's ``-hf``. The cache is shared with other programs. (Downloads:
`download.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specgen.errors import UsageError
from specgen.models.files import parts_of, size_of
from specgen.models.registry import CatalogueModel
from specgen.system.folders import cache_folder

PREFIX = "hf:"
#: Without a quantisation, the first of these that the repository has, else its first model.
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
#: Files with these in their names belong to a model, but are not models.
_NO_MODELS = ("mmproj", "imatrix")
#: How the names of files begin that hold a draft for a single target, and not a whole model.
DRAFT_PREFIXES = ("mtp-", "eagle3-", "dflash-", "dspark-")
SHA256 = re.compile(r"[0-9a-f]{64}")

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?::(?P<quant>[A-Za-z0-9._-]+)|/(?P<file>[^:]+\.gguf))?",
    re.IGNORECASE,
)
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?"
    r"(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|(?:MX|NV)FP4(?:_[A-Z0-9]+)?)"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)


# --- names ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model in a repository. With neither a quantisation nor a file, it is the usual one."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.file:
            return f"{PREFIX}{self.repo}/{self.file}"
        if self.quant:
            return f"{PREFIX}{self.repo}:{self.quant}"
        return f"{PREFIX}{self.repo}"


def looks_like_reference(name: str) -> bool:
    """Return whether a name without the prefix is one on the hub, and not the path of a file."""
    return _REFERENCE.fullmatch(name) is not None and not name.endswith(".gguf")


def parse_reference(name: str) -> HubReference:
    """Read USER/REPO, USER/REPO:QUANT or USER/REPO/FILE.gguf, with the prefix or without.

    Raises:
        UsageError: If the name is none of these.
    """
    name = name.removeprefix(PREFIX)
    match = _REFERENCE.fullmatch(name)
    if match is None or "--" in match["repo"] or ".." in match["repo"]:
        raise UsageError(
            f'"{name}" does not name a model on the Hugging Face hub',
            "give USER/REPO or USER/REPO:QUANT, "
            "as in -hf Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
        )
    return HubReference(match["repo"], match["quant"], match["file"])


def reference_of(repo: str, model: list[str], names: Iterable[str]) -> HubReference:
    """Return the shortest reference to a model, given its files and all files of the repository."""
    by_quant = HubReference(repo, quant=quant_of(model[0]))
    if by_quant.quant is not None and choose(names, by_quant) == model:
        return by_quant
    return HubReference(repo, file=model[0])


def quant_of(name: str) -> str | None:
    """Return the quantisation in a file's name, in upper case."""
    found = _QUANT.findall(PurePosixPath(name).name)
    return found[-1].upper() if found else None


def page_of(repo: str) -> str:
    """Return the address of a repository's page."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"


# --- the files of a repository --------------------------------------------------------------------


def models_among(names: Iterable[str], *, with_drafts: bool = False) -> list[list[str]]:
    """Return the models among the files of a repository, each as its files in order.

    Args:
        names: The names of all files.
        with_drafts: Whether drafts for a single target count as models.
    """
    excluded = _NO_MODELS if with_drafts else (*_NO_MODELS, *DRAFT_PREFIXES)
    existing = set(names)
    models = []
    for name in sorted(existing):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or any(word in path.name for word in excluded):
            continue
        parts = [str(part) for part in parts_of(path)]
        if parts[0] == name and existing.issuperset(parts):
            models.append(parts)
    return models


def choose(names: Iterable[str], reference: HubReference) -> list[str] | None:
    """Return the files, in order, of the model that a reference names; None if there is none.

    As in llama.cpp, upper and lower case are the same.

    Args:
        names: The names of all files of the repository.
        reference: What to look for.
    """
    if reference.file is not None:
        wanted = reference.file.lower()
        for model in models_among(names, with_drafts=True):
            if wanted in (name.lower() for name in model):
                return model
        return None
    models = models_among(names)
    quants = DEFAULT_QUANTS if reference.quant is None else (reference.quant,)
    for quant in quants:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[.-]", re.IGNORECASE)
        for model in models:
            if pattern.search(model[0]):
                return model
    if models and reference.quant is None:
        return models[0]
    return None


def mtp_layers_for(model: str, names: Iterable[str]) -> str | None:
    """Return the file of MTP layers that is next to a model's file, if there is one.

    Of several, one of the same quantisation is preferred.

    Args:
        model: The name of the model's first file.
        names: The names of all files of the repository.
    """
    model_path = PurePosixPath(model)
    if model_path.name.startswith(DRAFT_PREFIXES):
        return None
    layers = []
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.parent == model_path.parent and path.match("mtp-*.gguf"):
            layers.append(name)
    alike = [name for name in layers if quant_of(name) == quant_of(model)]
    return next(iter(alike + layers), None)


# --- what is on this disk -------------------------------------------------------------------------


def folder_of(model: CatalogueModel) -> Path:
    """Return specgen's own folder of a model.

    It is named after the digest of the model's file, so that files of one name never mix.
    """
    return cache_folder() / "models" / model.sha256[:16]


def locate(model: CatalogueModel) -> Path | None:
    """Return the file of a model of the registry, if it is on this disk.

    It may be in specgen's own folder or in the hub's cache. No file is read.
    """
    own = folder_of(model) / model.file
    if size_of(own) == model.size_bytes:
        return own
    if model.hub is None:
        return None
    for snapshot, _names in snapshots(storage_of(model.hub.repo)):
        path = snapshot / model.hub.file
        # It is a link to a file that is named after its digest. Only this link is followed: what it
        # leads to may itself be a link to a store with other names. Where there are no links, the
        # size has to do.
        digest = path.readlink().name if path.is_symlink() else path.name
        may_be_it = digest == model.sha256 or not SHA256.fullmatch(digest)
        if may_be_it and size_of(path) == model.size_bytes:
            return path
    return None


def find_in_cache(reference: HubReference) -> Path | None:
    """Return the first file of a model in the hub's cache, of the newest version that has it."""
    for snapshot, names in snapshots(storage_of(reference.repo)):
        files = choose(names, reference)
        if files is not None:
            return snapshot / files[0]
    return None


def snapshots(storage: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a repository's versions in the cache, newest first.

    Yields:
        The folder of a version, and the names of its GGUF files whose content is there.
    """
    newest = ""
    with suppress(OSError, UnicodeDecodeError):
        newest = (storage / "refs" / "main").read_text(encoding="utf-8")

    def age(folder: Path) -> tuple[bool, float, Path]:
        return folder.name == newest, folder.stat().st_mtime, folder

    folders: list[Path] = []
    with suppress(OSError):
        folders = sorted((storage / "snapshots").iterdir(), key=age, reverse=True)
    for folder in folders:
        files = [path for path in folder.rglob("*.[gG][gG][uU][fF]") if path.is_file()]
        yield folder, [path.relative_to(folder).as_posix() for path in files]


def storage_of(repo: str) -> Path:
    """Return the folder of a repository in the hub's cache."""
    return cache_of_hub() / f"models--{repo.replace('/', '--')}"


def cache_of_hub() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
