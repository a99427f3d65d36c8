"""The folders in which specgen keeps its own files. None of them need exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from platformdirs import PlatformDirs


def cache_folder() -> Path:
    """Return the folder for files that can be made or downloaded again."""
    return _override("SPECGEN_CACHE") or _default_folders().user_cache_path


def config_folder() -> Path:
    """Return the folder for files that the user writes."""
    return _override("SPECGEN_CONFIG") or _default_folders().user_config_path


def data_folder() -> Path:
    """Return the folder for files that the user wants to keep."""
    return _override("SPECGEN_DATA") or _default_folders().user_data_path


def packed_folder() -> Path:
    """Return the folder of weights in the layout of specgen's kernels."""
    return cache_folder() / "packed"


def prefixes_folder(cache: Path) -> Path:
    """Return the folder of stored prompt prefixes."""
    return cache / "prefixes"


def measurements_file() -> Path:
    """Return the file with the measurements on this machine."""
    return cache_folder() / "learnt.json"


def _default_folders() -> PlatformDirs:
    from platformdirs import PlatformDirs

    return PlatformDirs("specgen", appauthor=False)


def _override(variable: str) -> Path | None:
    folder = os.environ.get(variable)
    return Path(folder).expanduser() if folder else None
