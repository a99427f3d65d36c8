"""Files that are replaced whole; JSON Lines, which can be continued after any end; locks; TOML that users write."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from specgen.errors import OutputError, SpecgenError, UsageError

#: The ending of the names of new files. A file whose process was killed keeps it.
NEW = ".new"


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """Make an empty file beside `path`, which the caller writes and moves there with `replace`. Raise `OSError`."""
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


def make_room(files: Iterable[Path], n_bytes: int, most_bytes: int) -> bool:
    """Delete the least recently used files until `n_bytes` more fit; return whether that is possible."""
    found = sorted(files, key=lambda path: path.stat().st_mtime)
    excess = sum(path.stat().st_size for path in found) + n_bytes - most_bytes
    for path in found if n_bytes <= most_bytes else ():
        if excess > 0:
            excess -= path.stat().st_size
            path.unlink(missing_ok=True)
    return excess <= 0


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file through one of `new_beside`; its rights stay, and a new one is the user's alone."""
    with new_beside(path) as new:
        new.write_bytes(data)
        with contextlib.suppress(OSError):
            new.chmod(path.stat().st_mode)
        new.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a JSON text in UTF-8; lone surrogates (in file names) become escapes. Raise `OSError`."""
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


class KeptResults:
    """The latest `n_kept` results in a JSON file, by key. What cannot be read or written keeps nothing."""

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
        """Write new results, which are JSON values, after the others."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            known = {key: value for key, value in self.read().items() if key not in new}
            latest = dict([*known.items(), *new.items()][-self._n_kept :])
            replace_text(self._file, json.dumps({"results": latest}, indent=1) + "\n")


def read_toml(file: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror or error}") from error
    except RecursionError as error:
        raise UsageError(f"{file} is nested too deeply", correct(file)) from error
    except ValueError as error:
        what = "UTF-8" if isinstance(error, UnicodeDecodeError) else "TOML"
        raise UsageError(f"{file} is not {what}: {error}", correct(file)) from error


def correct(file: object) -> str:
    return f"correct {file}, or move it away"


# --- JSON


def as_json(value: Any) -> Any:
    """Convert dataclasses, dictionaries, lists, tuples, paths, infinities and NaN to what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_infinite or isinstance(value, PurePath) else value


class DamagedLineError(Exception):
    """A line before the last one is damaged; `number` counts from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(f"line {number} is damaged")
        self.number = number


#: Valid in JSON, but a terminal may obey these characters, and readers may take them for line breaks.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON in UTF-8. Numbers that JSON lacks become null, lone surrogates escapes."""
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(value), parse_constant=lambda _name: None)
        line = json.dumps(known, ensure_ascii=False)
    line = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
    return line.encode("utf-8", "backslashreplace") + b"\n"


def take_lines(data: bytes, take: Callable[[Any], None]) -> int:
    """Pass the value of each line to `take`; return the bytes of these lines, without an incomplete last one. Raise
    `DamagedLineError` for another that is not JSON, or that `take` refuses with a usual error."""
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
        """Append bytes, and return when they are on the disk; or remove a written part and raise `OutputError`."""
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
    """Hold a lock. Raise `held` if another process holds it for `wait_s` seconds, and `OutputError`."""
    import filelock

    with write_errors(lock_file, "SPECGEN_CACHE and SPECGEN_DATA choose other folders"):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = filelock.FileLock(lock_file, timeout=wait_s).acquire()
        except filelock.Timeout:
            raise held from None
    with lock:
        yield


@contextlib.contextmanager
def write_errors(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an `OSError`, but not that of a pipe nobody reads, into an `OutputError` that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "make room on the disk" if error.errno == errno.ENOSPC else hint
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint) from error
