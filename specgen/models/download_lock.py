"""The lock of a file that is being downloaded."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from specgen.models.progress import DownloadProgress


@contextmanager
def locked(lock_file: Path, what: str, progress: DownloadProgress) -> Iterator[None]:
    """Hold the lock of a download. The system gives it back when a process dies."""
    import filelock

    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress.note(f"another process is downloading {what}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
