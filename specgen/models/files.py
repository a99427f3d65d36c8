"""Model files by name and size, without reading them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

#: A model that is cut into files: "name-00002-of-00003.gguf".
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of a model file, wherever it lies: its name and its size in bytes.

    Reading gigabytes for a digest would take longer than the answer, and two files that agree
    in both are one model in practice. The size is that of all shards together.
    """

    name: str
    size_bytes: int


def identify(path: Path) -> FileIdentity | None:
    """Return a file's identity; None if there is no such file, or it cannot be accessed."""
    try:
        sizes = [part.stat().st_size for part in model_parts(path) if part.is_file()]
    except OSError:
        return None
    return FileIdentity(path.name, sum(sizes)) if sizes and path.is_file() else None


def shard_number(path: Path) -> int | None:
    """Return a file's number among the shards of a model, from 1; None for a model in one file."""
    shard = _SHARD.fullmatch(path.name)
    return int(shard["number"]) if shard else None


def model_parts(path: Path) -> list[Path]:
    """Return the files of a model: its shards, in their order, or the one file."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    return sorted(path.parent.glob(f"{_literal(shard['stem'])}-?????-of-{shard['count']}.gguf"))


def _literal(text: str) -> str:
    """Return a glob pattern that matches `text` only."""
    return re.sub(r"([*?[])", r"[\1]", text)
