"""Models of the Hugging Face hub: how they are named (as by llama.cpp's ``-hf``), and those in the
hub's cache, which is shared with other programs. (Downloads: `download.py`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specgen.drafters.kinds import FILE_PREFIXES
from specgen.errors import UsageError
from specgen.models.files import cache_folder, size_of
from specgen.models.registry import CatalogueModel
from specgen.system.files import parts_of

PREFIX = "hf:"
#: Without a quantisation, the first of these that the repository has, else its first model.
USUAL_QUANTS = ("Q4_K_M", "Q8_0")
#: Files with these in their names belong to a model, but are none.
_NO_MODELS = ("mmproj", "imatrix")
SHA256 = re.compile(r"[0-9a-f]{64}")

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_REFERENCE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?::(?P<quant>[A-Za-z0-9._-]+)|/(?P<file>[^:]+\.gguf))?",
    re.IGNORECASE,
)
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|(?:MX|NV)FP4(?:_[A-Z0-9]+)?)"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model in a repository: of a quantisation, of a file's name, or the usual one of the
    repository.
    """

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        rest = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        return f"{PREFIX}{self.repo}{rest}"


def looks_like_reference(name: str) -> bool:
    return _REFERENCE.fullmatch(name) is not None and not name.endswith(".gguf")


def parse_reference(name: str) -> HubReference:
    """Read USER/REPO, USER/REPO:QUANT or USER/REPO/FILE.gguf, with the prefix or without. Raise
    `UsageError`.
    """
    match = _REFERENCE.fullmatch(name.removeprefix(PREFIX))
    if match is None or any(each in match["repo"] for each in ("--", "..")):
        raise UsageError(
            f'"{name.removeprefix(PREFIX)}" does not name a model on the Hugging Face hub',
            "give USER/REPO or USER/REPO:QUANT, as in -hf Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
        )
    return HubReference(match["repo"], match["quant"], match["file"])


def models_among(names: Iterable[str], *, with_drafts: bool = False) -> list[list[str]]:
    """Return the models among files, each as its files in order; `with_drafts` those for one
    target, too.
    """
    left_out = _NO_MODELS if with_drafts else (*_NO_MODELS, *FILE_PREFIXES)
    every = set(names)
    found = []
    for name in sorted(every):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or any(each in path.name for each in left_out):
            continue
        shards = [*map(str, parts_of(path))]
        if shards[0] == name and every.issuperset(shards):
            found.append(shards)
    return found


def choose(names: Iterable[str], reference: HubReference) -> list[str] | None:
    """Return the files of the model that a reference names, in order, in upper or lower case as in
    llama.cpp.
    """
    models = models_among(names, with_drafts=reference.file is not None)
    if reference.file is not None:
        wanted = reference.file.lower()
        return next((each for each in models if wanted in map(str.lower, each)), None)
    for quant in USUAL_QUANTS if reference.quant is None else (reference.quant,):
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[.-]", re.IGNORECASE)
        for model in models:
            if pattern.search(model[0]):
                return model
    return models[0] if models and reference.quant is None else None


def mtp_layers_for(model: str, names: Iterable[str]) -> str | None:
    path = PurePosixPath(model)
    if path.name.startswith(FILE_PREFIXES):
        return None
    beside = [
        name
        for name in sorted(names)
        if PurePosixPath(name).match("mtp-*.gguf") and PurePosixPath(name).parent == path.parent
    ]
    alike = [name for name in beside if quant_of(name) == quant_of(model)]
    return next(iter((*alike, *beside)), None)


def reference_of(repo: str, model: list[str], names: Iterable[str]) -> HubReference:
    """Return the shortest reference to a model of a repository that has the files `names`."""
    by_quant = HubReference(repo, quant=quant_of(model[0]))
    if by_quant.quant is not None and choose(names, by_quant) == model:
        return by_quant
    return HubReference(repo, file=model[0])


def quant_of(name: str) -> str | None:
    found = _QUANT.findall(PurePosixPath(name).name)
    return found[-1].upper() if found else None


# --- what is on this disk


def folder_of(model: CatalogueModel) -> Path:
    """Return our folder of a model, named after the digest of its file: two files of one name never
    meet.
    """
    return cache_folder() / "models" / model.sha256[:16]


def locate(model: CatalogueModel) -> Path | None:
    """Return where a model of the registry is on this disk: in our store, or the hub's cache. No
    file is read.
    """
    own = folder_of(model) / model.file
    if size_of(own) == model.size_bytes:
        return own
    if model.hub is None:
        return None
    for snapshot, _names in snapshots(storage_of(model.hub.repo)):
        path = snapshot / model.hub.file
        # Only one link is followed: a store beyond has other names. Without links, the size must
        # do.
        blob = path.readlink().name if path.is_symlink() else path.name
        is_it = blob == model.sha256 or not SHA256.fullmatch(blob)
        if is_it and size_of(path) == model.size_bytes:
            return path
    return None


def find_in_cache(reference: HubReference) -> Path | None:
    for snapshot, names in snapshots(storage_of(reference.repo)):
        if (files := choose(names, reference)) is not None:
            return snapshot / files[0]
    return None


def snapshots(storage: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a repository's versions, the newest first, and their files whose blobs are there."""
    newest, found = "", []
    with suppress(OSError, UnicodeDecodeError):
        newest = (storage / "refs" / "main").read_text(encoding="utf-8")
    with suppress(OSError):
        found = [
            (path.name == newest, path.stat().st_mtime, path)
            for path in (storage / "snapshots").iterdir()
        ]
    for _is_newest, _time_s, snapshot in sorted(found, reverse=True):
        files = (path for path in snapshot.rglob("*.[gG][gG][uU][fF]") if path.is_file())
        yield snapshot, [path.relative_to(snapshot).as_posix() for path in files]


def storage_of(repo: str) -> Path:
    return cache_of_hub() / f"models--{repo.replace('/', '--')}"


def cache_of_hub() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def page_of(repo: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo}"
