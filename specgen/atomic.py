"""Files that are replaced whole, so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: How the names of new files end. One whose process was killed keeps it.
NEW = ".new"


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """An empty file beside `path` to write to, and to give that name with `replace`: another process
    that writes at the same time uses another file, and the later one of the two stays. What did not
    get the name goes. Raises `OSError`."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=NEW)
    os.close(descriptor)
    new = Path(name)
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file whole, as `new_beside` does. Raises `OSError`."""
    with new_beside(path) as new:
        new.write_bytes(data)
        new.replace(path)


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` with JSON, in UTF-8. Names of files that are not UTF-8 have lone surrogates:
    they are written as escapes, which JSON reads back."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))
