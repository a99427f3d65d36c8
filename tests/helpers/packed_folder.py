"""A folder of packed weights, on a disk whose size the tests choose."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from specgen.llama.kernels import packed_weights
from specgen.llama.kernels.packed_weights import keep_packed_weights

#: The size of the simulated disk.
LARGE = 10**12


class Disk(NamedTuple):
    """What `shutil.disk_usage` returns."""

    total: int = LARGE
    used: int = 0
    free: int = LARGE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where weights are kept, of models of any size."""
    monkeypatch.setattr(packed_weights, "MIN_BYTES", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk())
    keep_packed_weights(tmp_path / "packed")
    yield tmp_path / "packed"
    keep_packed_weights(None)


def files(folder: Path) -> list[Path]:
    """Return the files in the folder, which need not exist."""
    return sorted(folder.iterdir()) if folder.exists() else []


def cut(path: Path) -> None:
    """Remove the last byte of a file."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
