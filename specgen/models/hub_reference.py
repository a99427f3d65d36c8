"""Models named by their repository on the Hugging Face hub, as llama.cpp's ``-hf`` names them.

The text ``hf:USER/REPO:QUANT`` names a quantisation, ``hf:USER/REPO`` the usual one, and
``hf:USER/REPO/FILE.gguf`` a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from specgen.drafters.kinds import FILE_PREFIXES
from specgen.errors import UsageError
from specgen.models.files import shard_names

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFIX = "hf:"
#: Without a quantisation, the first of these that the repository has, else its first model.
_USUAL_QUANTS = ("Q4_K_M", "Q8_0")
#: Files with these in their names belong to a model, but are none.
_NO_MODELS = ("mmproj", "imatrix")

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
    """A model in a repository: of a quantisation, of a file's name, or the usual one of the repository."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"{PREFIX}{self.repo}/{self.file}"
        return f"{PREFIX}{self.repo}" + (f":{self.quant}" if self.quant is not None else "")

    @property
    def names_a_model(self) -> bool:
        return self.quant is not None or self.file is not None


def is_reference(name: str) -> bool:
    """Return whether a name is meant for the hub."""
    return name.startswith(PREFIX)


def looks_like_reference(name: str) -> bool:
    """Return whether a name without the prefix may be meant for the hub: USER/REPO or USER/REPO:QUANT."""
    match = _REFERENCE.fullmatch(name)
    return match is not None and not name.endswith(".gguf")


def parse_reference(name: str) -> HubReference:
    """Read a name, with the prefix or without it. Raise `UsageError`."""
    match = _REFERENCE.fullmatch(name.removeprefix(PREFIX))
    if match is None or any(each in match["repo"] for each in ("--", "..")):
        raise UsageError(
            f'"{name.removeprefix(PREFIX)}" does not name a model on the Hugging Face hub',
            "give USER/REPO or USER/REPO:QUANT, as in -hf Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
        )
    return HubReference(match["repo"], match["quant"], match["file"])


def usual(reference: HubReference) -> HubReference:
    """Return the reference with the usual quantisation, if it names no model."""
    return reference if reference.names_a_model else replace(reference, quant=_USUAL_QUANTS[0])


def models_among(names: Iterable[str], *, with_drafts: bool = False) -> list[list[str]]:
    """Return the models among the files of a repository, each as its files in order; with `with_drafts` also those
    that draft for one model only. Models whose shards are not all there are left out."""
    left_out = _NO_MODELS if with_drafts else (*_NO_MODELS, *FILE_PREFIXES)
    every = set(names)
    found = []
    for name in sorted(every):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or any(each in path.name for each in left_out):
            continue
        shards = [str(path.with_name(each)) for each in shard_names(path.name)]
        if shards[0] == name and every.issuperset(shards):
            found.append(shards)
    return found


def choose(names: Iterable[str], reference: HubReference) -> list[str] | None:
    """Return the files of the model that a reference names, in order; None if it is not among them.

    As in llama.cpp, upper and lower case are the same.
    """
    models = models_among(names, with_drafts=reference.file is not None)
    if reference.file is not None:
        wanted = reference.file.lower()
        return next((each for each in models if wanted in map(str.lower, each)), None)
    for quant in _USUAL_QUANTS if reference.quant is None else (reference.quant,):
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[.-]", re.IGNORECASE)
        for model in models:
            if pattern.search(model[0]):
                return model
    return models[0] if models and reference.quant is None else None


def mtp_layers_for(model: str, names: Iterable[str]) -> str | None:
    """Return the file of MTP layers in the folder of one of a repository's models: of several, the one with the
    model's quantisation, else the first. None if there is none, or the model drafts for another one itself."""
    path = PurePosixPath(model)
    if path.name.startswith(FILE_PREFIXES):
        return None
    paths = map(PurePosixPath, sorted(names))
    beside = [
        str(each) for each in paths if each.match("mtp-*.gguf") and each.parent == path.parent
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
    """Return the quantisation in a file's name; None if there is none."""
    found = _QUANT.findall(PurePosixPath(name).name)
    return found[-1].upper() if found else None
