"""Replace or lock files; read and write JSON; read the user's texts and TOML."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import secrets
import sys
import tempfile
import unicodedata
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
NEW_SUFFIX = ".new"
#: The mode of new files that only the user may read.
PRIVATE = 0o600
#: The mode of new files whose readers the user's umask decides about.
BY_UMASK = 0o666
#: Error numbers of a file that cannot be replaced, although it might be written: its folder is
#: read-only, it is a mount of its own, as in containers, or its name leaves no room for a suffix.
_NOT_REPLACEABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.ENAMETOOLONG}


@contextlib.contextmanager
def new_beside(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Create an empty file next to `path`, for the caller to write and then move to `path`.

    If it is not moved, it is deleted after the block.

    Args:
        path: The file.
        mode: The mode of the new file; the umask is subtracted.

    Raises:
        OSError: If the file cannot be created, or `path` must not be replaced, such as a device.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}{NEW_SUFFIX}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    os.close(descriptor)
    try:
        yield new
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def replace_bytes(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Replace the content of a file atomically, so that no reader finds half of it.

    An existing file keeps its mode. If the path is a link, the file that it leads to is replaced. A
    device or a pipe is written to.

    Args:
        path: The file.
        data: The new content.
        mode: The mode of a new file; the umask is subtracted.

    Raises:
        OSError: If it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = real_path(path)
    with new_beside(path, mode) as new:
        new.write_bytes(data)
        with contextlib.suppress(OSError):
            new.chmod(path.stat().st_mode)
        new.replace(path)


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user asked for, atomically if possible.

    An existing file keeps its mode; the user's umask decides about a new one. A file that cannot be
    replaced, because of its folder, is overwritten.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        replace_bytes(path, data, BY_UMASK)
    except OSError as error:
        if error.errno not in _NOT_REPLACEABLE:
            raise
        path.write_bytes(data)


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
    error_if_held: SpecgenError,
    wait_s: float = 0.0,
) -> Iterator[None]:
    """Hold a lock within the block.

    Args:
        lock_file: The file to lock. It is created if need be.
        error_if_held: The error to raise if another process holds the lock.
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
            raise error_if_held from None
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


def real_path(path: Path) -> Path:
    """Return the absolute path that a path leads to by its links.

    Unlike `Path.resolve`, it never raises: what cannot be followed stays as it is, such as links in
    a circle, and a relative path while the working directory is deleted.
    """
    try:
        return Path(os.path.realpath(path))
    except OSError:
        return path


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


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and in its subfolders, which may be links to folders elsewhere.

    A link is not followed if that would visit a folder twice, or all that surrounds `folder`: users
    keep links to `/`, too. What cannot be listed is left out.
    """
    visited = [real_path(folder)]
    for parent, folder_names, file_names in os.walk(folder, followlinks=True):
        for name in file_names:
            path = Path(parent, name)
            if named_file(path) is not None:
                yield path
        followed = []
        for name in folder_names:
            path = Path(parent, name)
            if path.is_symlink():
                place = real_path(path)
                is_visited = any(place.is_relative_to(each) for each in visited)
                if is_visited or visited[0].is_relative_to(place):
                    continue
                visited.append(place)
            followed.append(name)
        folder_names[:] = followed  # in place: `os.walk` goes on with what is in this list


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
        files: The existing files. A file is used when its time is updated. Other processes may
            delete files meanwhile.
        n_bytes: The size of the new file.
        max_bytes: The maximum total size of all files, the new one included.

    Returns:
        Whether it fits. A new file larger than `max_bytes` cannot fit, so nothing is deleted then.
    """
    if n_bytes > max_bytes:
        return False
    statuses: dict[Path, os.stat_result] = {}
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            statuses[path] = path.stat()
    excess_bytes = sum(status.st_size for status in statuses.values()) + n_bytes - max_bytes
    for path in sorted(statuses, key=lambda path: statuses[path].st_mtime):
        if excess_bytes <= 0:
            break
        excess_bytes -= statuses[path].st_size
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


# --- texts ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class TextEncoding:
    """How a text file is encoded."""

    #: Python's name of the encoding.
    codec: str
    #: The byte order mark at the beginning of the file; empty if it has none.
    mark: bytes = b""

    def encode(self, text: str) -> bytes:
        """Return a text as the content of such a file; lone surrogates become question marks."""
        return self.mark + text.encode(self.codec, "replace")


_UTF_8 = TextEncoding("utf-8")
#: The encodings that a byte order mark tells. The mark of UTF-32 begins with that of UTF-16.
_MARKED_ENCODINGS = (
    TextEncoding("utf-8", codecs.BOM_UTF8),
    TextEncoding("utf-32-le", codecs.BOM_UTF32_LE),
    TextEncoding("utf-32-be", codecs.BOM_UTF32_BE),
    TextEncoding("utf-16-le", codecs.BOM_UTF16_LE),
    TextEncoding("utf-16-be", codecs.BOM_UTF16_BE),
)
#: The number of bytes from which UTF-16 without a mark is recognized.
_N_SAMPLE_BYTES = 1 << 16
#: Control characters that texts may have: tab, line break, form feed, carriage return, escape.
_TEXT_CONTROLS = frozenset("\t\n\f\r\x1b")
#: Unicode's categories of characters that texts do not have: control, surrogate, unassigned.
_BINARY_CATEGORIES = frozenset({"Cc", "Cs", "Cn"})


def encoding_of(data: bytes) -> TextEncoding:
    """Return how a text is encoded, given its content or its first line.

    UTF-16, which PowerShell writes, is recognized without a byte order mark, too. Any other text is
    taken for UTF-8.
    """
    for encoding in _MARKED_ENCODINGS:
        if data.startswith(encoding.mark):
            return encoding
    sample = data[:_N_SAMPLE_BYTES]
    if b"\0" in sample:
        for codec in ("utf-16-le", "utf-16-be"):
            if _is_utf_16(sample, codec):
                return TextEncoding(codec)
    return _UTF_8


def _is_utf_16(sample: bytes, codec: str) -> bool:
    """Return whether the beginning of a file is text in UTF-16, and not a text with stray NULs."""
    # A line of a stream may end within a line break of UTF-16.
    if len(sample) % 2 and not sample.endswith(b"\n"):
        return False
    try:
        # Incrementally, since the sample may end within a character.
        text = codecs.getincrementaldecoder(codec)().decode(sample)
    except UnicodeDecodeError:
        return False
    has_ascii = any(char.isascii() for char in text)
    has_binary = any(
        unicodedata.category(char) in _BINARY_CATEGORIES
        for char in set(text).difference(_TEXT_CONTROLS)
    )
    n_misread = sum(_is_misread_ascii(ord(char)) for char in text)
    return has_ascii and not has_binary and 2 * n_misread < len(text)


def _is_misread_ascii(code_point: int) -> bool:
    """Return whether a character in UTF-16 may be two characters of ASCII.

    Fewer than half of the characters of Chinese are like that. Symbols and Japanese kana are left
    out, since texts may consist of them.
    """
    high, low = divmod(code_point, 256)
    return 0x31 <= high < 127 and 32 <= low < 127


class TextDecoder:
    """Decodes a text that comes in pieces. The first piece must be a whole line at least."""

    def __init__(
        self,
        name: str,
        error_class: type[SpecgenError],
    ) -> None:
        """Begin a text.

        Args:
            name: The name of the text in messages.
            error_class: The class of the error to raise if it is not text.
        """
        self._name = name
        self._error_class = error_class
        #: How the text is encoded; None before the first piece.
        self._encoding: TextEncoding | None = None
        self._decoder: codecs.IncrementalDecoder | None = None
        #: The number of line breaks in the pieces so far.
        self._n_breaks = 0

    def decode(self, data: bytes, *, final: bool = False) -> str:
        """Return the text of a piece, without a byte order mark.

        Args:
            data: The piece.
            final: Whether it is the last one.

        Raises:
            SpecgenError: If it is not valid in its encoding, or has NULs, as binary files have.
        """
        if self._encoding is None or self._decoder is None:
            self._encoding = encoding_of(data)
            self._decoder = codecs.getincrementaldecoder(self._encoding.codec)()
            data = data[len(self._encoding.mark) :]
        codec = self._encoding.codec
        try:
            text = self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(codec, "ignore")
            if codec == "utf-8" and b"\0" in error.object:
                before = error.object[: error.object.index(b"\0")].decode(codec, "ignore")
                raise self._nul_error(before) from None
            name = codec.upper().removesuffix("-LE").removesuffix("-BE")
            raise self._error_class(
                f"{self._name} is not {name}: byte {error.object[error.start]:#04x} "
                f"on line {self._line_after(before)}",
                "convert it first, for example with iconv -f LATIN1 -t UTF-8",
            ) from None
        before, nul, _ = text.partition("\0")
        if nul:
            raise self._nul_error(before)
        self._n_breaks += text.count("\n")
        return text

    def _nul_error(self, before: str) -> SpecgenError:
        """Return the error for a NUL after a text, which continues the pieces so far."""
        return self._error_class(
            f"{self._name} is not text: it has a NUL byte on line {self._line_after(before)}",
            "give a text file, in UTF-8 or UTF-16",
        )

    def _line_after(self, text: str) -> int:
        """Return the number of the line that follows a text, which continues the pieces so far."""
        return self._n_breaks + text.count("\n") + 1


def decode_text(
    data: bytes,
    name: str,
    error_class: type[SpecgenError],
) -> str:
    """Return the text in the content of a file: UTF-8, or UTF-16, with or without a mark.

    Args:
        data: The content.
        name: The name of the file in messages.
        error_class: The class of the error to raise if it is not text.
    """
    return TextDecoder(name, error_class).decode(data, final=True)


def decode_lines(
    stream: Iterable[bytes],
    name: str,
    error_class: type[SpecgenError],
) -> Iterator[str]:
    """Yield the lines of a text as they come, without their line breaks.

    Args:
        stream: The lines as bytes: what is between two line feeds.
        name: The name of the stream in messages.
        error_class: The class of the error to raise at a line that is not text.
    """
    decoder = TextDecoder(name, error_class)
    rest = ""
    for raw in stream:
        # In UTF-16, a raw line may end in the middle of the line break.
        *lines, rest = (rest + decoder.decode(raw)).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def read_text(
    path: Path,
    name: str,
    error_class: type[SpecgenError],
) -> str:
    """Return the text of a file that the user named.

    Args:
        path: The file.
        name: Its name in messages, which may begin with the option that names it.
        error_class: The class of the error to raise if it cannot be read, or is not text.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise error_class(f"{name}: cannot be read: {error.strerror or error}") from error
    return decode_text(data, name, error_class)


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

    text = read_text(file, str(file), UsageError)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise UsageError(f"{file} is nested too deeply", correction_hint(file)) from error
    except ValueError as error:
        raise UsageError(f"{file} is not TOML: {error}", correction_hint(file)) from error


def correction_hint(file: object) -> str:
    """Return the hint for an invalid file that the user wrote."""
    return f"correct {file}, or move it away"
