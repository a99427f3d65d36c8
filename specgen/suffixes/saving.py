"""Bytes that are replaced whole, so that no reader ever sees half of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

#: Ends the names of files that are still being written.
UNFINISHED = ".new"


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file beside `path` and give it that name, as `specgen.atomic.replace_text` does
    with text. Raises `OSError`."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as new:
            new.write(data)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
