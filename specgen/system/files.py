"""Files that are replaced as a whole, or locked; JSON; TOML that users write."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from specgen.errors import OutputError, SpecgenError, UsageError

# --- replacing files ------------------------------------------------------------------------------

#: The ending of the names of new files. It stays if their process is killed.
NEW = ".new"


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """Make an empty file next to `path`, which the caller writes and then moves there.

    Raises:
        OSError: Also if `path` must not be replaced, such as a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=NEW)
    os.close(descriptor)
    new = Path(name)
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file at once, so that no reader finds half of it.

    The file keeps its mode, and only the user may read a new one. A link stays a link, and a device
    or a pipe is written to.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    with new_beside(path) as new:
        new.write_bytes(data)
        with contextlib.suppress(OSError):
            new.chmod(path.stat().st_mode)
        new.replace(path)


def replace_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON value, and make its folder; lone surrogates become escapes.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


def open_private(file: str, flags: int) -> int:
    """Open a file, as an `opener` of `open`; only the user may read one that it makes."""
    return os.open(file, flags | os.O_CREAT, 0o600)


@contextlib.contextmanager
def write_errors(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an `OSError` in the block into an `OutputError` that names the file.

    The error of a pipe that nobody reads passes through.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            hint = "make room on the disk"
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint) from error


@contextlib.contextmanager
def locked(lock_file: Path, held: SpecgenError, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock within the block.

    Args:
        lock_file: The file to lock.
        held: What is raised if another process holds the lock.
        wait_s: How long to wait for that process, in seconds.

    Raises:
        OutputError: If the lock file cannot be made.
    """
    import filelock

    with write_errors(lock_file, "SPECGEN_CACHE and SPECGEN_DATA choose other folders"):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = filelock.FileLock(lock_file, timeout=wait_s).acquire()
        except filelock.Timeout:
            raise held from None
    with lock:
        yield


# --- about files ----------------------------------------------------------------------------------


def version_of(file: Path) -> tuple[int, int, int]:
    """Return a file's inode, size and time: they change if it is replaced or written to.

    Raises:
        OSError: If it cannot be accessed.
    """
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def existing_parent(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def make_room(files: Iterable[Path], n_bytes: int, most_bytes: int) -> bool:
    """Delete the least recently used files until a new one fits.

    Args:
        files: The files that share the room.
        n_bytes: The size of the new file.
        most_bytes: The size of the room.

    Returns:
        Whether it fits. If the room is too small even without the others, nothing is deleted.
    """
    oldest_first = sorted(files, key=lambda path: path.stat().st_mtime)
    if n_bytes > most_bytes:
        return False
    excess_bytes = sum(path.stat().st_size for path in oldest_first) + n_bytes - most_bytes
    for path in oldest_first:
        if excess_bytes <= 0:
            break
        excess_bytes -= path.stat().st_size
        path.unlink(missing_ok=True)
    return True


# --- JSON -----------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """Convert a value to what JSON can hold.

    Dataclasses become objects, tuples lists; paths, infinities and NaN become texts.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


#: Characters that JSON allows, but which control terminals, or which readers take for the end of a
#: line.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON in UTF-8.

    Infinities and NaN become null, and lone surrogates escapes.
    """
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        finite = json.loads(json.dumps(value), parse_constant=lambda _name: None)
        line = json.dumps(finite, ensure_ascii=False)
    line = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
    return line.encode("utf-8", "backslashreplace") + b"\n"


def digest_of(value: Any) -> str:
    """Return a short name for a JSON value: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def read_object(file: Path | None) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if none can be read."""
    if file is None:
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


#: The number of results that `KeptResults` keeps.
_N_KEPT = 512


class KeptResults:
    """The latest results in a JSON file, by key. Without a file, or if it fails, none are kept."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def read(self) -> dict[str, Any]:
        """Return the results, oldest first. Their values may have been damaged."""
        results = read_object(self._file).get("results")
        return results if isinstance(results, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Write new results, which are JSON values, after the others."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            known = {key: value for key, value in self.read().items() if key not in new}
            latest = [*known.items(), *new.items()][-_N_KEPT:]
            replace_json(self._file, {"results": dict(latest)})


# --- TOML -----------------------------------------------------------------------------------------


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file that a user wrote.

    Raises:
        UsageError: If it cannot be read, or is not TOML.
    """
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
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error}", correct(file)) from error
    except ValueError as error:
        raise UsageError(f"{file} is not TOML: {error}", correct(file)) from error


def correct(file: object) -> str:
    """Return the hint for a damaged file of the user."""
    return f"correct {file}, or move it away"
