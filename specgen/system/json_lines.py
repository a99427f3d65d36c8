"""JSON: values that it can hold, and files of JSON Lines, which can be continued after any end of the process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

from specgen.errors import OutputError, SpecgenError


def json_reason(error: Exception) -> str:
    """Return why a line is not JSON, by an error of `json.loads`."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def as_json(value: Any) -> Any:
    """Convert dataclasses, dictionaries, lists, tuples and paths to what JSON can hold; other values stay.
    Infinities and NaN, which JSON does not have, become texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class DamagedLineError(Exception):
    """A line before the last one is damaged; `number` counts from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number} is damaged")
        self.number = number


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON. A lone surrogate becomes an escape."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def take_lines(data: bytes, take: Callable[[Any], None]) -> int:
    """Pass the value of each line to `take`, and return the size of these lines in bytes. Empty lines are
    skipped. An incomplete last line, which a killed process may leave, is not passed and not counted.

    `take` raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for a value that is not valid.
    Raise `DamagedLineError` if this happens for a line before the last one, or the line is not JSON.
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
    """A file to which lines are appended; `opened` opens it for a `with` block."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path, mode: int = 0o666) -> Iterator[AppendedFile]:
        """Open a file, or create it with the rights `mode`. Raise `OutputError`."""
        with write_errors(path):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags, mode)
        try:
            yield AppendedFile(path, descriptor)
        finally:
            os.close(descriptor)

    def cut(self, n_bytes: int) -> None:
        """Keep only the first `n_bytes` of the file. Raise `OutputError`, also for a pipe or a device."""
        with write_errors(self._path):
            os.ftruncate(self._descriptor, n_bytes)

    def append(self, data: bytes) -> None:
        """Append bytes, and return when they are on the disk. If that fails, a part that was written is
        removed again. Raise `OutputError`."""
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
    """Hold a lock inside this context, so that no other process can hold it. The system releases it when
    the process ends in any way. Raise `held` if another process holds it for longer than `wait_s`
    seconds, and `OutputError` if the lock file cannot be created."""
    import filelock

    with write_errors(lock_file, "SPECGEN_CACHE and SPECGEN_DATA choose other folders"):
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
def write_errors(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an `OSError` into an `OutputError` that names the file, with a hint unless the disk is full. A `BrokenPipeError`, for a pipe that
    nobody reads, is not changed."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "make room on the disk" if error.errno == errno.ENOSPC else hint
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint) from error
