"""A list of the model files that passed a check, in the cache folder. A check reads all tokens of a
vocabulary, which takes a quarter of a second for a large one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from specgen import __version__
from specgen.atomic import replace_text

#: The list's name in the cache folder.
FILE_NAME = "checked.json"
#: The most files in the list; the latest ones are kept.
_N_KEPT = 256


class CheckedFiles:
    """The files that passed a check, each in the version that was checked.

    `folder` holds the list; without one nothing is remembered. If the list is damaged or cannot be
    written, files are checked again. Failed checks are never remembered.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / FILE_NAME

    def has(self, path: Path) -> bool:
        """Return whether a file passed a check and has not changed since."""
        if self._file is None:
            return False
        try:
            return _key(path) in _read(self._file)
        except OSError:
            return False

    def add(self, path: Path) -> None:
        """Remember that a file passed the check."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            key = _key(path)
            others = [known for known in _read(self._file) if known != key]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            document = {"checked": [*others, key][-_N_KEPT:]}
            replace_text(self._file, json.dumps(document, indent=1) + "\n")


def _key(path: Path) -> str:
    """Return a hash of a file's path, identity, size and time, and of specgen's version. Raise
    `OSError`."""
    about = path.stat()
    name = os.fsencode(path.resolve())
    numbers = f"\0{about.st_ino} {about.st_size} {about.st_mtime_ns} {__version__}"
    return hashlib.sha256(name + numbers.encode()).hexdigest()


def _read(file: Path) -> list[str]:
    """Return the keys in a list; none if it is missing or damaged."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    keys = document.get("checked") if isinstance(document, dict) else None
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


__all__ = ["FILE_NAME", "CheckedFiles"]
