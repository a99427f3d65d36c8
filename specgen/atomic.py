"""Files that are replaced whole, so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file beside `path` and give it that name: another process that writes at the same
    time uses another file, and the later one of the two stays. Raises `OSError`."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as new:
            new.write(data)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` with text, in UTF-8."""
    replace_bytes(path, text.encode())
