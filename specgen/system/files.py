"""Files: replaced as a whole, so that no reader ever sees half of one; results in JSON; TOML that users write."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specgen.errors import UsageError

#: The ending of the names of new files. A file whose process was killed keeps it.
NEW = ".new"


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """Make an empty file beside `path`. The caller writes to it and then moves it to `path` with its method
    `replace`. If two processes write at the same time, each has its own file, and the later one stays.
    A file that was not moved is deleted. Raise `OSError`."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=NEW)
    os.close(descriptor)
    new = Path(name)
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def existing_parent(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file by these bytes, through a file of `new_beside`. Raise `OSError`."""
    with new_beside(path) as new:
        new.write_bytes(data)
        new.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a JSON text in UTF-8. Raise `OSError`. File names that are not UTF-8 contain lone
    surrogates; these are written as escapes, which JSON reads back."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


class KeptResults:
    """Results of tests in a JSON file, by key: the latest `n_kept` of them. None as the file keeps nothing.
    If the file is damaged or cannot be written, its results are not known."""

    def __init__(self, file: Path | None, n_kept: int) -> None:
        self._file = file
        self._n_kept = n_kept

    def read(self) -> dict[str, Any]:
        document: object = None
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                document = json.loads(self._file.read_text(encoding="utf-8"))
        results = document.get("results") if isinstance(document, dict) else None
        return results if isinstance(results, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Write new results, which are JSON values, after those that the file has by now."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            known = {key: value for key, value in self.read().items() if key not in new}
            latest = dict([*known.items(), *new.items()][-self._n_kept :])
            replace_text(self._file, json.dumps({"results": latest}, indent=1) + "\n")


def read_toml(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Return the content of a file; empty if it `is_optional` and there is none. Raise `UsageError` if it cannot
    be read, or is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        if is_optional and isinstance(error, FileNotFoundError):
            return {}
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}", correct(file)) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}", correct(file)) from error
    except RecursionError as error:
        raise UsageError(f"{file} is nested too deeply", correct(file)) from error


def correct(file: object) -> str:
    """Return a hint for a file with a mistake."""
    return f"correct {file}, or move it away"
