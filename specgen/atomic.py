"""Replace files as a whole, so that no reader ever sees half of a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file by these bytes, through a file of `new_beside`. Raise `OSError`."""
    with new_beside(path) as new:
        new.write_bytes(data)
        new.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a JSON text in UTF-8. Raise `OSError`. File names that are not UTF-8 contain lone
    surrogates; these are written as escapes, which JSON reads back."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))
