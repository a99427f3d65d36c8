"""The files that may be tried as drafts, chosen by their names and sizes only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Literal, TypeAlias

from specgen.models import FileIdentity, human_bytes, identify, shard_number

#: Two files of one size are the same if they are equal at these places, as shares of the size.
_PROBES, _PROBE_BYTES = (0.0, 0.25, 0.5, 0.75, 1.0), 1 << 20
#: Where a file comes from: the user named it or its folder, or specgen knows it.
_Origin: TypeAlias = Literal["named", "folder", "known"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot draft, and the reason in a few words."""

    file: Path
    reason: str


def find_candidates(
    named: Sequence[Path], known: Iterable[Path], target: Path
) -> tuple[list[Path], list[Refused]]:
    """Return the files to try as drafts for `target`, and the files that are refused.

    `named` are files, and folders that stand for the GGUF files in them. `known` are the models that
    specgen has on this disk; they are never reported as refused. A model that occurs twice is tried once.
    A file that is larger than the target is tried only if the user named the file itself.
    """
    candidates: list[Path] = []
    refused: list[Refused] = []
    target_identity = identify(target)
    seen: list[tuple[Path, FileIdentity]] = []
    for path, origin in _files(named, known):
        identity = identify(path)
        if identity is not None:
            if any(_is_same(path, identity, *other) for other in seen):
                continue
            seen.append((path, identity))
        reason = _reason(path, identity, target, target_identity, is_named=origin == "named")
        if reason is None:
            candidates.append(path)
        elif origin != "known":
            refused.append(Refused(path, reason))
    return candidates, refused


def _files(named: Sequence[Path], known: Iterable[Path]) -> Iterator[tuple[Path, _Origin]]:
    """Yield all files with their origins. Named files come first, since the first of equal files is
    used."""
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
    """Return why a file should not be tried; None if it should."""
    if identity is None:
        return "there is no such file, or it cannot be read"
    if shard_number(path) not in (None, 1):
        return "it is a later part of a model: name the first"
    if "mmproj" in path.name.lower():
        return "it is a projector of images or sound (mmproj), no language model"
    if target is None:
        return None
    if _is_same(path, identity, target_path, target):
        return "it is the target itself"
    if identity.size_bytes > target.size_bytes and not is_named:
        return (
            f"it is larger than the target ({human_bytes(identity.size_bytes)}): "
            "named itself, it is tried all the same"
        )
    return None


def _is_same(path: Path, identity: FileIdentity, other: Path, of_other: FileIdentity) -> bool:
    """Return whether two paths name the same model: the same file, perhaps through a link, or a copy of it."""
    if identity == of_other:
        return True
    if identity.size_bytes != of_other.size_bytes:
        return False
    try:
        return path.samefile(other) or all(map(_equal_at, _PROBES, repeat(path), repeat(other)))
    except OSError:
        return False


def _equal_at(share: float, path: Path, other: Path) -> bool:
    """Return whether two files of one size have the same bytes at a place. The first bytes of a model have
    its name and vocabulary."""
    start = int(share * max(0, path.stat().st_size - _PROBE_BYTES))
    pieces = []
    for each in (path, other):
        with each.open("rb") as file:
            file.seek(start)
            pieces.append(file.read(_PROBE_BYTES))
    return pieces[0] == pieces[1]
