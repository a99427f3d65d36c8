"""How fast a disk reads."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path

#: The size of one read.
_BLOCK_BYTES = 8 * 2**20
#: By default, nothing more is read after so many bytes, or after so many seconds.
_MAX_BYTES = 512 * 2**20
_MAX_S = 0.25


def read_speed(
    file: Path,
    clock: Callable[[], float],
    *,
    max_bytes: int = _MAX_BYTES,
    max_s: float = _MAX_S,
) -> float | None:
    """Measure how fast the disk of a file reads in sequence, in a fraction of a second.

    The system's cache of files is bypassed, so that the disk itself is measured.

    Args:
        file: A file of several megabytes.
        clock: Returns the time in seconds.
        max_bytes: The number of bytes after which nothing more is read.
        max_s: The number of seconds after which nothing more is read.

    Returns:
        Bytes per second; None if the system or the file system cannot bypass the cache, or the file
        is too small.
    """
    direct = getattr(os, "O_DIRECT", None)  # Linux only
    if direct is None:
        return None
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | direct)
        try:
            return _speed_of(descriptor, clock, max_bytes, max_s)
        finally:
            os.close(descriptor)
    return None


def _speed_of(
    descriptor: int,
    clock: Callable[[], float],
    max_bytes: int,
    max_s: float,
) -> float | None:
    """Return the speed of reads from the beginning of an open file; None if it is too small."""
    n_read = 0
    # Such reads need memory that is aligned to pages, as maps are.
    with contextlib.closing(mmap.mmap(-1, _BLOCK_BYTES)) as block:
        started_s = clock()
        while n_read < max_bytes and clock() - started_s < max_s:
            n_bytes = os.preadv(descriptor, [block], n_read)
            if n_bytes < _BLOCK_BYTES:  # the end of the file
                break
            n_read += n_bytes
        took_s = clock() - started_s
    if not n_read or took_s <= 0.0:
        return None
    return n_read / took_s
