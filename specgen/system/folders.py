"""The folders in which specgen keeps its own files. None of them need exist."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.system.files import NOWHERE, is_writable, path_of

if TYPE_CHECKING:
    from platformdirs import PlatformDirs


def cache_folder() -> Path:
    """Return the folder for files that can be made or downloaded again."""
    return _folder("SPECGEN_CACHE", lambda folders: folders.user_cache_path)


def config_folder() -> Path:
    """Return the folder for files that the user writes."""
    return _folder("SPECGEN_CONFIG", lambda folders: folders.user_config_path)


def data_folder() -> Path:
    """Return the folder for files that the user wants to keep."""
    return _folder("SPECGEN_DATA", lambda folders: folders.user_data_path)


def packed_folder() -> Path:
    """Return the folder of weights in the layout of specgen's kernels."""
    return cache_folder() / "packed"


def prefixes_folder(cache: Path) -> Path:
    """Return the folder of stored prompt prefixes."""
    return cache / "prefixes"


def phrases_folder(cache: Path) -> Path:
    """Return the folder of phrases that answers have in common."""
    return cache / "phrases"


def measurements_file() -> Path:
    """Return the file with the measurements on this machine."""
    return cache_folder() / "learnt.json"


def note_about_folders() -> str | None:
    """Return a note for the user if nothing can be kept in the cache folder, else None."""
    cache = cache_folder()
    if cache.is_relative_to(NOWHERE):
        return (
            "there is no home directory that can be used, so nothing is kept for the next run: set "
            "HOME, or SPECGEN_CACHE, SPECGEN_DATA and HF_HOME to folders that can be written"
        )
    if not is_writable(cache):
        return (
            f"{cache} cannot be written, so nothing is kept for the next run: set SPECGEN_CACHE "
            "to another folder"
        )
    return None


def usable(folder: Path) -> Path:
    """Return the absolute path of a folder, which need not exist.

    Returns:
        `NOWHERE` if the user may not enter the folder. So it is for a folder in the home directory
        of a user who has none, which begins with ``~``, and for a relative path if the working
        directory was deleted.
    """
    if str(folder).startswith("~"):
        return NOWHERE
    try:
        folder = folder.absolute()
    except OSError:
        return NOWHERE
    try:
        (folder / "any").stat()
    except (FileNotFoundError, NotADirectoryError):
        return folder
    except OSError:
        return NOWHERE
    return folder


def user_folder(
    choose: Callable[[PlatformDirs], Path],
    program: str | None = None,
    *,
    roaming: bool = False,
) -> Path:
    """Return one of the system's folders for the user's files, `NOWHERE` if there is none.

    Args:
        choose: Returns the folder.
        program: The program whose folder it is; None is the folder that all programs share.
        roaming: Whether it is the one that Windows copies between a user's machines.
    """
    from platformdirs import PlatformDirs

    try:
        return usable(choose(PlatformDirs(program, appauthor=False, roaming=roaming)))
    except RuntimeError:  # newer versions of platformdirs; older ones return "~/..."
        return NOWHERE


def _folder(variable: str, default: Callable[[PlatformDirs], Path]) -> Path:
    """Return the folder that a variable sets, or else the system's default."""
    given = os.environ.get(variable)
    if given:
        return usable(path_of(given))
    return user_folder(default, "specgen")
