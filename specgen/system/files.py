"""Replace or lock files; read and write JSON; read the user's TOML."""

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

#: A folder in memory, which Linux has even if all disks are read-only.
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - the folder in it has a random name
#: In place of a folder in a home directory that is missing or may not be entered, as in containers
#: and services. Nothing can be in it, and nothing can be written to it.
NOWHERE = Path(os.devnull, "specgen")
#: The suffix of new files. If their process is killed, they are left behind.
NEW = ".new"


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """Create an empty file next to `path`, for the caller to write and then move to `path`.

    If it is not moved, it is deleted after the block.

    Raises:
        OSError: If the file cannot be created, or `path` must not be replaced, such as a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    descriptor, name = tempfile.mkstemp(
        dir=path.parent,
        prefix=f"{path.name}.",
        suffix=NEW,
    )
    os.close(descriptor)
    new = Path(name)
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically, so that no reader finds half of it.

    An existing file keeps its mode; a new one is readable only by the user. If the path is a link,
    the file that it leads to is replaced. A device or a pipe is written to.

    Raises:
        OSError: If it cannot be written.
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
    """Replace a file's content with a JSON value, and create its folder if need be.

    Lone surrogates become escapes.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


def open_private(file: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`; a new file is readable only by the user."""
    return os.open(file, flags | os.O_CREAT, 0o600)


@contextlib.contextmanager
def write_errors(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an `OSError` in the block into an `OutputError` that names the file.

    A `BrokenPipeError` (nobody reads the output any more) passes through.

    Args:
        path: The file that the block writes.
        hint: What to do about an error. If the disk is full, another hint is given.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            hint = "make room on the disk"
        reason = error.strerror
        if path.is_relative_to(NOWHERE):
            path = Path(path.name)
            reason = "there is no home directory that can be used"
        raise OutputError(f"{path}: cannot be written: {reason}", hint) from error


@contextlib.contextmanager
def locked(
    lock_file: Path,
    held: SpecgenError,
    wait_s: float = 0.0,
) -> Iterator[None]:
    """Hold a lock within the block.

    Args:
        lock_file: The file to lock. It is created if need be.
        held: The error to raise if another process holds the lock.
        wait_s: The number of seconds to wait for that process.

    Raises:
        OutputError: If the lock file cannot be created.
    """
    import filelock

    with write_errors(lock_file, "SPECGEN_CACHE and SPECGEN_DATA choose other folders"):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = filelock.FileLock(lock_file, timeout=wait_s).acquire()
        except filelock.Timeout:
            raise held from None
    with lock:  # releases it
        yield


# --- about files ----------------------------------------------------------------------------------


def path_of(text: str) -> Path:
    """Return the path that a text names, with the home folder in place of ``~`` or ``~USER``.

    If there is no such folder, nothing is replaced.
    """
    return Path(os.path.expanduser(text))  # noqa: PTH111 - `Path.expanduser` may raise


def named_path(name: str | Path) -> Path | None:
    """Return the path that a text names, if a file or a folder is there; else None.

    Every "is this text a file?" is asked here or of `named_file`. A text that cannot be a path (it
    is too long, or has a NUL) names none, and neither does one in a folder that the user may not
    enter.
    """
    path = path_of(name) if isinstance(name, str) else name
    return path if os.path.exists(path) else None  # noqa: PTH110 - `Path.exists` may raise


def named_file(name: str | Path) -> Path | None:
    """Return the path that a text names, if a file is there; else None, as in `named_path`."""
    path = path_of(name) if isinstance(name, str) else name
    return path if os.path.isfile(path) else None  # noqa: PTH113 - `Path.is_file` may raise


def version_of(file: Path) -> tuple[int, int, int]:
    """Return a file's inode, size and time of its last change (in nanoseconds).

    At least one of them changes if the file is replaced or written to.

    Raises:
        OSError: If it cannot be accessed.
    """
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def existing_parent(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    candidates = (path, *path.absolute().parents)
    return next(candidate for candidate in candidates if named_path(candidate) is not None)


def is_writable(folder: Path) -> bool:
    """Return whether files can be written below a folder, which need not exist yet."""
    existing = existing_parent(folder)
    return named_file(existing) is None and os.access(existing, os.W_OK | os.X_OK)


def scratch_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that is deleted at the end of a `with` block.

    Raises:
        OutputError: If no folder can be written.
    """
    # The system's folder for such files may be read-only, as in containers.
    for parent in (None, MEMORY_FOLDER):
        with contextlib.suppress(OSError):
            return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    raise OutputError("no folder for temporary files can be written", "TMPDIR names such a folder")


def make_room(
    files: Iterable[Path],
    n_bytes: int,
    max_bytes: int,
) -> bool:
    """Delete the least recently used files until a new one fits.

    Args:
        files: The existing files. A file is used when its time is updated.
        n_bytes: The size of the new file.
        max_bytes: The maximum total size of all files, the new one included.

    Returns:
        Whether it fits. A new file larger than `max_bytes` cannot fit, so nothing is deleted then.
    """
    oldest_first = sorted(files, key=lambda path: path.stat().st_mtime)
    if n_bytes > max_bytes:
        return False
    excess_bytes = sum(path.stat().st_size for path in oldest_first) + n_bytes - max_bytes
    for path in oldest_first:
        if excess_bytes <= 0:
            break
        excess_bytes -= path.stat().st_size
        path.unlink(missing_ok=True)
    return True


# --- JSON -----------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """Convert a value to one that JSON can represent.

    Dataclasses become objects, tuples become lists; paths, infinities and NaN become strings.
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


#: Characters that JSON allows, but that control terminals, or that some readers treat as the end of
#: a line.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON in UTF-8.

    Infinities and NaN become null, and lone surrogates escapes.
    """
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # the value contains infinities or NaN, which is rare
        finite = json.loads(json.dumps(value), parse_constant=lambda _name: None)
        line = json.dumps(finite, ensure_ascii=False)
    line = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
    return line.encode("utf-8", "backslashreplace") + b"\n"


def digest_of(value: Any) -> str:
    """Return a digest of a JSON value: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def read_object(file: Path | None) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no valid one."""
    if file is None:
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


#: The maximum number of results that `KeptResults` keeps.
_MAX_RESULTS = 512


class KeptResults:
    """A JSON file with the latest results of something that is costly to repeat, by key.

    Nothing is kept without a file, or if it cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def read(self) -> dict[str, Any]:
        """Return the results, oldest first. Their values may have been damaged."""
        results = read_object(self._file).get("results")
        return results if isinstance(results, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Add results, which are JSON values; the oldest ones are dropped if there are too many."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            known = {key: value for key, value in self.read().items() if key not in new}
            latest = [*known.items(), *new.items()][-_MAX_RESULTS:]
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
    """Return the hint for an invalid file that the user wrote."""
    return f"correct {file}, or move it away"
