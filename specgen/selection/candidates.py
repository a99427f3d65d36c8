"""Which files may be tried as drafts, judged without opening them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from specgen.catalogue import FileIdentity, human_bytes, identify, shard_number

#: How a file comes to be tried: named itself, in a folder that was named, or by its own name.
_Origin: TypeAlias = Literal["named", "folder", "known"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot draft, and why, in a few words."""

    file: Path
    reason: str


def find_candidates(
    named: Sequence[Path], known: Iterable[Path], target: Path
) -> tuple[list[Path], list[Refused]]:
    """Files to try as drafts for `target`, and those among them that there is no use in trying.

    `named` are files, and folders whose GGUF files are meant; `known` are the models that
    specgen has on this disk, of which nothing is said if they cannot be tried. A model that
    comes twice is tried once. A file that is larger than the target is tried only if it was
    named itself.
    """
    candidates: list[Path] = []
    refused: list[Refused] = []
    target_identity = identify(target)
    seen: set[FileIdentity] = set()
    for path, origin in _files(named, known):
        identity = identify(path)
        if identity is not None and identity in seen:
            continue
        if identity is not None:
            seen.add(identity)
        reason = _reason(path, identity, target, target_identity, is_named=origin == "named")
        if reason is None:
            candidates.append(path)
        elif origin != "known":
            refused.append(Refused(path, reason))
    return candidates, refused


def _files(named: Sequence[Path], known: Iterable[Path]) -> Iterator[tuple[Path, _Origin]]:
    """All files and where they come from. What was named comes first, since of equal ones the
    first is taken."""
    for path in named:
        if not path.is_dir():
            yield path, "named"
    for folder in named:
        if folder.is_dir():
            for path in sorted(folder.glob("*.gguf")):
                if shard_number(path) in (None, 1) and not path.is_dir():
                    yield path, "folder"
    for path in known:
        yield path, "known"


def _reason(
    path: Path,
    identity: FileIdentity | None,
    target_path: Path,
    target: FileIdentity | None,
    *,
    is_named: bool,
) -> str | None:
    """Why a file is not to be tried; None if it is."""
    if identity is None:
        return "there is no such file, or it cannot be read"
    if shard_number(path) not in (None, 1):
        return "it is a later part of a model: name the first"
    if "mmproj" in path.name.lower():
        return "it is a projector of images or sound (mmproj), no language model"
    if target is None:
        return None
    if identity == target or _is_same(path, target_path):
        return "it is the target itself"
    if identity.size_bytes > target.size_bytes and not is_named:
        return (
            f"it is larger than the target ({human_bytes(identity.size_bytes)}): "
            "named itself, it is tried all the same"
        )
    return None


def _is_same(path: Path, target: Path) -> bool:
    """Whether two paths lead to one file, by a link or otherwise."""
    try:
        return path.samefile(target)
    except OSError:
        return False
