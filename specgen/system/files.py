"""Files that are replaced whole, or locked; JSON; TOML that users write."""

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
from typing import Any, TypeVar

from specgen.errors import OutputError, SpecgenError, UsageError

_File = TypeVar("_File", bound=PurePath)
#: The name of a file of a large model that is cut into several: "name-00002-of-00003.gguf".
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
#: The ending of the names of new files. A file whose process was killed keeps it.
NEW = ".new"


@contextlib.contextmanager
def new_beside(path: Path) -> Iterator[Path]:
    """Make an empty file beside `path`, which the caller writes and moves there with `replace`.
    Raise `OSError`, also if `path` is something that must not be replaced, such as a device.
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


def parts_of(file: _File) -> list[_File]:
    """Return the paths of all files of a model, of which `file` is one."""
    shard = SHARD.fullmatch(file.name)
    if shard is None:
        return [file]
    stem, n = shard["stem"], int(shard["count"])
    return [file.with_name(f"{stem}-{part:05d}-of-{n:05d}.gguf") for part in range(1, n + 1)]


def version_of(file: Path) -> tuple[int, int, int]:
    """Return inode, size and time of a file, which change if it is replaced or written to. Raise
    `OSError`.
    """
    about = file.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


def digest_of(value: Any) -> str:
    """Return a short name for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def existing_parent(path: Path) -> Path:
    """Return the path itself if it exists, else the nearest folder above it that does."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def make_room(files: Iterable[Path], n_bytes: int, most_bytes: int) -> bool:
    """Delete the least recently used files until `n_bytes` more fit; return whether that is
    possible.
    """
    found = sorted(files, key=lambda path: path.stat().st_mtime)
    excess = sum(path.stat().st_size for path in found) + n_bytes - most_bytes
    for path in found if n_bytes <= most_bytes else ():
        if excess > 0:
            excess -= path.stat().st_size
            path.unlink(missing_ok=True)
    return excess <= 0


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file through one of `new_beside`; its rights stay, and a new one is the user's
    alone. A device or a pipe is written to, and a link stays a link.
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


def open_private(file: str, flags: int) -> int:
    """Open a file as an `opener` of `open`; make one that only its user may read if there is none."""
    return os.open(file, flags | os.O_CREAT, 0o600)


def replace_json(path: Path, value: Any) -> None:
    """Replace a file by a JSON value, and make its folder; lone surrogates become escapes. Raise
    `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_bytes(path, text.encode("utf-8", "backslashreplace"))


def read_object(file: Path | None) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none that can be read."""
    found: object = None
    if file is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(file.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


#: The results that a file keeps.
_N_KEPT = 512


class KeptResults:
    """The latest results in a JSON file, by key. What cannot be read or written keeps nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def read(self) -> dict[str, Any]:
        results = read_object(self._file).get("results")
        return results if isinstance(results, dict) else {}

    def add(self, new: Mapping[str, Any]) -> None:
        """Write new results, which are JSON values, after the others."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            known = {key: value for key, value in self.read().items() if key not in new}
            latest = dict([*known.items(), *new.items()][-_N_KEPT:])
            replace_json(self._file, {"results": latest})


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
    """Convert dataclasses, dictionaries, lists, tuples, paths, infinities and NaN to what JSON can
    hold.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_infinite or isinstance(value, PurePath) else value


#: Valid in JSON, but a terminal may obey these characters, and readers may take them for line
#: breaks.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029]")


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON in UTF-8. Numbers that JSON lacks become null, lone
    surrogates escapes.
    """
    try:
        line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(value), parse_constant=lambda _name: None)
        line = json.dumps(known, ensure_ascii=False)
    line = _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
    return line.encode("utf-8", "backslashreplace") + b"\n"


@contextlib.contextmanager
def locked(lock_file: Path, held: SpecgenError, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock. Raise `held` if another process holds it for `wait_s` seconds, and
    `OutputError`.
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


@contextlib.contextmanager
def write_errors(path: Path, hint: str | None = None) -> Iterator[None]:
    """Turn an `OSError`, but not that of a pipe nobody reads, into an `OutputError` that names the
    file.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "make room on the disk" if error.errno == errno.ENOSPC else hint
        raise OutputError(f"{path}: cannot be written: {error.strerror}", hint) from error
