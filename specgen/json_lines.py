"""Files of JSON Lines that are appended to, and taken up again after any end of the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specgen.errors import OutputError, SpecgenError


class DamagedLineError(Exception):
    """A line before the last one is not what it should be; `number` counts from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number} is damaged")
        self.number = number


def to_line(value: Any) -> bytes:
    """A value as a line of JSON; half a surrogate pair becomes an escape."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def take_lines(data: bytes, take: Callable[[Any], None]) -> int:
    """Give the value of each line to `take`; returns how many bytes the lines are. A last line that is
    torn, as a killed process leaves it, is not among them; empty lines are passed over.

    What `take` raises for a value that is none is `ValueError`, `KeyError`, `TypeError` or
    `AttributeError`. Raises `DamagedLineError` if a line before the last one is no value.
    """
    n_bytes = 0
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, start=1):
        is_last = number == len(lines)
        if raw.strip():
            try:
                take(json.loads(raw))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if is_last:
                    break
                raise DamagedLineError(number) from None
        n_bytes += len(raw) + (not is_last)
    return n_bytes


class AppendedFile:
    """A file that is appended to; it is open for as long as this is."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path, mode: int = 0o666) -> Iterator[AppendedFile]:
        """Open a file, or make it with these rights. Raises `OutputError`."""
        with write_errors(path):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags, mode)
        try:
            yield AppendedFile(path, descriptor)
        finally:
            os.close(descriptor)

    def cut(self, n_bytes: int) -> None:
        """Keep the first `n_bytes` only. Raises `OutputError`, for a pipe or a device too."""
        with write_errors(self._path):
            os.ftruncate(self._descriptor, n_bytes)

    def append(self, data: bytes) -> None:
        """Append bytes, and have them on the disk when this returns. What does not fit whole is taken
        off again. Raises `OutputError`."""
        start = os.lseek(self._descriptor, 0, os.SEEK_END)
        with write_errors(self._path):
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
                os.fsync(self._descriptor)
            except OSError as error:
                if not data and error.errno == errno.EINVAL:  # a file system without fsync
                    return
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, start)
                raise


@contextlib.contextmanager
def locked(lock_file: Path, held: SpecgenError, wait_s: float = 0.0) -> Iterator[None]:
    """Let no other process hold this lock meanwhile; the system lets go of it when a process ends,
    however it does. Raises `held` if another one holds it for longer than `wait_s` seconds, and
    `OutputError` if it cannot be made."""
    import filelock

    with write_errors(lock_file):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(lock_file, timeout=wait_s)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise held from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Make an `OSError` the `OutputError` that names the file; a pipe that nobody reads stays a
    `BrokenPipeError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "make room on the disk" if error.errno == errno.ENOSPC else None
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint) from error


__all__ = ["AppendedFile", "DamagedLineError", "locked", "take_lines", "to_line", "write_errors"]
