"""Which model files were checked already, remembered in the cache folder: a check reads all tokens of a
vocabulary, which takes a quarter of a second where there are many."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from specgen import __version__
from specgen.atomic import replace_text

#: In the cache folder.
FILE_NAME = "checked.json"
#: Files that are remembered, the latest ones.
_N_KEPT = 256


class CheckedFiles:
    """Files in which nothing wrong was found, as they were then.

    `folder` holds the list; without one nothing is remembered. A list that is damaged, or cannot be
    written, costs another check. What is wrong with a file is never remembered.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = None if folder is None else folder / FILE_NAME

    def has(self, path: Path) -> bool:
        """Whether a file was checked, and is still the same."""
        if self._file is None:
            return False
        try:
            return _key(path) in _read(self._file)
        except OSError:
            return False

    def add(self, path: Path) -> None:
        """Nothing is wrong with a file."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            key = _key(path)
            others = [known for known in _read(self._file) if known != key]
            self._file.parent.mkdir(parents=True, exist_ok=True)
            document = {"checked": [*others, key][-_N_KEPT:]}
            replace_text(self._file, json.dumps(document, indent=1) + "\n")


def _key(path: Path) -> str:
    """A file as it is now, and who checks it. Raises `OSError`."""
    about = path.stat()
    name = os.fsencode(path.resolve())
    numbers = f"\0{about.st_ino} {about.st_size} {about.st_mtime_ns} {__version__}"
    return hashlib.sha256(name + numbers.encode()).hexdigest()


def _read(file: Path) -> list[str]:
    """The keys in a list; none if it is not there or damaged."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    keys = document.get("checked") if isinstance(document, dict) else None
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


__all__ = ["FILE_NAME", "CheckedFiles"]
