"""The lines of a batch, and the file with their results, which a restart continues.

A line is a request in OpenAI's form, a simple object, or a text.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from pydantic_core import from_json

from specgen.errors import OutputError, PromptError, UsageError
from specgen.serve.formats.fields import Fields, parse
from specgen.serve.formats.parsed_request import Defaults, ParsedRequest, RequestKind
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.single_request import read_request
from specgen.system.files import (
    decode_text,
    encoding_of,
    is_writable,
    locked,
    real_path,
    replace_bytes,
    to_line,
    write_errors,
)
from specgen.system.folders import cache_folder
from specgen.system.quantities import counted

_log = logging.getLogger("specgen.serve.batch")

# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineError:
    """The reason why a line has no answer."""

    #: The kind of error, for programs.
    code: str
    #: The reason, for people.
    message: str


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input."""

    #: The number of the line, from 1.
    number: int
    #: The name that the line gives itself, or else made from its number; unique in the batch.
    custom_id: str
    #: A hash of the request: two lines with the same digest ask for the same answer.
    digest: str
    #: The request, or the error if the line is not a valid request.
    request: ParsedRequest | LineError

    @property
    def identity(self) -> str:
        """The id of the line's result, which is unique even among lines with the same digest."""
        return _hash(f"{self.custom_id}\0{self.digest}".encode())


class _BatchBody(Fields, extra="forbid"):
    """A line in OpenAI's form."""

    url: Literal["/v1/chat/completions", "/v1/completions"]
    method: Literal["POST"] = "POST"
    body: dict[str, Any]


_URL_KINDS: dict[str, RequestKind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}


class _CustomId(Fields, coerce_numbers_to_str=True):
    custom_id: str = ""


def read_lines(
    data: bytes,
    name: str,
    defaults: Defaults,
) -> list[BatchLine]:
    """Read the lines of a file that are not empty. An invalid line has an error as its request.

    Args:
        data: The content of the file.
        name: Its name, for messages.
        defaults: The values of fields that a line leaves out.

    Raises:
        PromptError: If there are no lines, two have the same custom_id, or the file is damaged
            UTF-16.
    """
    lines: list[BatchLine] = []
    numbers: dict[str, int] = {}  # the lines' numbers by custom_id
    for number, raw in enumerate(_as_utf_8(data, name).split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _read_line(number, raw.strip(), defaults)
        if line.custom_id in numbers:
            first = numbers[line.custom_id]
            raise PromptError(
                f"{name}: custom_id {line.custom_id!r} is on lines {first} and {number}",
                hint="give each line its own custom_id, or none: then it is the line's number",
            )
        if line.custom_id:
            numbers[line.custom_id] = number
        lines.append(line)
    if not lines:
        raise PromptError(f"{name} has no lines", hint="write a request or a prompt on each line")
    return [line if line.custom_id else _numbered(line, numbers) for line in lines]


def _as_utf_8(data: bytes, name: str) -> bytes:
    """Return the content of a file in UTF-8, whose lines may be damaged, without a mark."""
    encoding = encoding_of(data)
    if encoding.codec == "utf-8":
        return data.removeprefix(encoding.mark)
    return decode_text(data, name, PromptError).encode()


def notes_on(lines: Sequence[BatchLine]) -> Iterator[str]:
    """Yield a note about each mistake in lines: an error, or a field that specgen ignores.

    A mistake of several lines is one note, which names the first of them.
    """
    numbers: dict[str, list[int]] = {}  # the lines' numbers by the mistake
    for line in lines:
        if isinstance(line.request, LineError):
            mistakes: tuple[str, ...] = (f"not answered: {line.request.message}",)
        else:
            mistakes = line.request.warnings
        for mistake in mistakes:
            numbers.setdefault(mistake, []).append(line.number)
    for mistake, (first, *others) in numbers.items():
        place = f"line {first}"
        if others:
            place += f" and {counted(len(others), 'other')}"
        yield f"{place}: {mistake}"


def _numbered(line: BatchLine, taken_ids: Container[str]) -> BatchLine:
    """Return a line with its number as its custom_id, after ``line`` if that is taken."""
    custom_id = str(line.number)
    while custom_id in taken_ids:
        custom_id = f"line {custom_id}"
    return replace(line, custom_id=custom_id)


def _read_line(number: int, raw: bytes, defaults: Defaults) -> BatchLine:
    """Read a line. Its custom_id is empty if it has none; any exception becomes its error."""
    custom_id = ""
    digest = _hash(raw)
    request: ParsedRequest | LineError
    try:
        body = _line_body(raw)
        custom_id = parse(_CustomId, {"custom_id": body.pop("custom_id", None)}).custom_id
        # The order of fields and the white space between them do not matter to the digest.
        digest = _hash(json.dumps(body, sort_keys=True).encode())
        request = _read_body(body, defaults)
    except UnicodeDecodeError as error:
        reason = f"the line is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}"
        request = LineError("invalid_utf8", reason)
    except _NulError:
        request = LineError("invalid_text", "the line is not text: it has a NUL byte")
    except _InvalidJsonError as error:
        request = LineError("invalid_json", f"the line is not JSON: {error}")
    except BodyError as error:
        request = LineError("invalid_request", error.message)
    except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
        request = unexpected(error, number)
    return BatchLine(number, custom_id, digest, request)


class _NulError(Exception):
    """A line has a NUL byte, as binary files have."""


class _InvalidJsonError(Exception):
    """A line begins with a brace, but is not JSON."""


def _line_body(raw: bytes) -> dict[str, Any]:
    """Return the object on a line; any other text becomes the prompt of an object.

    Raises:
        UnicodeDecodeError: If the line is not UTF-8.
        _NulError: If the line has a NUL byte.
        _InvalidJsonError: If the line begins with a brace, but is not JSON.
    """
    text = raw.decode("utf-8")
    if "\0" in text:
        raise _NulError
    if not text.startswith("{"):
        return {"prompt": text}
    try:
        body: dict[str, Any] = from_json(text)
    except ValueError as error:
        raise _InvalidJsonError(str(error)) from error
    return body


def _read_body(body: dict[str, Any], defaults: Defaults) -> ParsedRequest:
    """Read a line in OpenAI's form, or a simple object; raise `BodyError` if it is not valid."""
    if body.keys() & {"body", "url", "method"}:
        envelope = parse(_BatchBody, body)
        return read_request(_URL_KINDS[envelope.url], envelope.body, defaults)
    return read_request("chat" if "messages" in body else "prompt", body, defaults)


def unexpected(error: Exception, number: int) -> LineError:
    """Log an unexpected exception with its traceback, and return it as a line's error."""
    _log.error("line %d failed", number, exc_info=error)
    return LineError("bug", f"specgen failed: {type(error).__name__}: {error}")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- results --------------------------------------------------------------------------------------

#: Writes a result completely, or raises `OutputError` and leaves the earlier results as they are.
Write: TypeAlias = Callable[[Mapping[str, Any]], None]
#: The field of a result that only specgen has: the line's digest and the settings, for a restart.
OWN = "specgen"
_HINT_MIXED = "name another file, or keep those results with --allow-mixed"


def result_of(
    line: BatchLine,
    settings: Mapping[str, Any],
    response: Any,
    error: LineError | None,
) -> dict[str, Any]:
    """Return the result of a line in OpenAI's form.

    Args:
        line: The line.
        settings: The settings of the batch.
        response: The response; None if there is an error.
        error: The error; None if there is a response.
    """
    return {
        "id": f"batch_req_{line.identity}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if error is None else {"code": error.code, "message": error.message},
        OWN: {"request": line.digest, "settings": settings},
    }


@dataclass(slots=True)
class EarlierResults:
    """The results that a file already has."""

    #: The digests of the lines that have a result, by custom_id.
    digests: dict[str, str] = field(default_factory=dict)
    #: The custom_ids of the lines whose result is an error.
    errors: set[str] = field(default_factory=set)
    #: The settings of the results, each only once.
    settings: list[dict[str, Any]] = field(default_factory=list)
    #: The size of the complete results in the file.
    n_bytes: int = 0
    #: Whether a line break follows the last complete result.
    ends_line: bool = True
    #: Whether an incomplete result follows.
    is_torn: bool = False

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a result.

        Raises:
            ValueError: If there is a result of that line already.
            KeyError, TypeError, AttributeError: If the record is not a result.
        """
        custom_id = record["custom_id"]
        digest = record[OWN]["request"]
        settings = dict(record[OWN]["settings"])
        if not isinstance(custom_id, str) or not isinstance(digest, str):
            raise TypeError
        if custom_id in self.digests:
            raise ValueError(custom_id)
        if record["error"] is not None:
            self.errors.add(custom_id)
        self.digests[custom_id] = digest
        if settings not in self.settings:
            self.settings.append(settings)

    def check_same(
        self,
        lines: Sequence[BatchLine],
        settings: Mapping[str, Any],
        name: str,
    ) -> None:
        """Check that the results belong to this batch.

        Args:
            lines: The lines of this batch.
            settings: Its settings.
            name: The name of the file with the results, for messages.

        Raises:
            UsageError: If results have other settings, or belong to other lines.
        """
        for earlier_settings in self.settings:
            differences = _differences(earlier_settings, settings)
            if differences:
                message = f"{name} has results with other settings: {', '.join(differences)}"
                raise UsageError(message, _HINT_MIXED)
        lines_by_id = {line.custom_id: line for line in lines}
        for custom_id, digest in self.digests.items():
            line = lines_by_id.get(custom_id)
            subject = f"{name} has a result for {custom_id!r}"
            if line is None:
                raise UsageError(f"{subject}, which nothing asks for", _HINT_MIXED)
            if line.digest != digest:
                hint = _HINT_MIXED
                if custom_id in self.errors:
                    hint = "--retry-errors answers it again"
                message = f"{subject}, but line {line.number} now asks something else"
                raise UsageError(message, hint)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each setting that differs, with its earlier and its present value."""

    def value_text(settings: Mapping[str, Any], key: str) -> str:
        if key not in settings:
            return "as by default"
        return json.dumps(settings[key])

    return [
        f"{key} {value_text(before, key)} (now {value_text(now, key)})"
        for key in sorted({*now, *before})
        if now.get(key) != before.get(key)
    ]


def read_results(path: Path) -> EarlierResults:
    """Read the results in a file; an incomplete one at its end is left out.

    Raises:
        OutputError: If the file cannot be read, or any other line is not a result.
    """
    earlier = EarlierResults()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return earlier
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, start=1):
        is_last = number == len(lines)
        if raw.strip():
            try:
                earlier.add(json.loads(raw))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if is_last:
                    earlier.is_torn = True
                    break
                raise OutputError(
                    f"{path}: line {number} is not a result of specgen batch",
                    hint="name another file, or repair that line",
                ) from None
        earlier.n_bytes += len(raw)
        if not is_last:
            earlier.n_bytes += len(b"\n")
    results = data[: earlier.n_bytes]
    earlier.ends_line = not results or results.endswith(b"\n")
    return earlier


@contextlib.contextmanager
def continued(path: Path, *, retry_errors: bool = False) -> Iterator[tuple[EarlierResults, Write]]:
    """Open a file of results for a batch, and yield its results and a function that appends one.

    Meanwhile, no other specgen batch can write to the file, if there is a cache folder. An
    incomplete result at its end is cut off. A result is on the disk when the function returns.

    Args:
        path: The file; it is created if there is none.
        retry_errors: Whether results that are errors are removed from the file.

    Raises:
        OutputError: If the file cannot be read or written, or another process writes to it.
    """
    lock_name = hashlib.sha256(os.fsencode(real_path(path))).hexdigest()[:16]
    locked_error = OutputError(
        f"{path}: another specgen batch is writing to it",
        hint="wait until it has ended, or name another file",
    )
    cache = cache_folder()
    # Without a folder for the lock, the user has to keep two batches apart.
    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if is_writable(cache):
        lock = locked(cache / "locks" / f"{lock_name}.lock", locked_error)
    with lock:
        earlier = read_results(path)
        if retry_errors and earlier.errors:
            _drop_errors(path, earlier.n_bytes)
            earlier = read_results(path)
        with write_errors(path):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags, 0o666)
        try:
            with write_errors(path):  # fails for a pipe or a device
                os.ftruncate(descriptor, earlier.n_bytes)
            if not earlier.ends_line:
                _append(path, descriptor, b"\n")
            yield earlier, lambda record: _append(path, descriptor, to_line(record))
        finally:
            os.close(descriptor)


def _drop_errors(path: Path, n_bytes: int) -> None:
    """Remove the errors from the results in a file, which are its first `n_bytes` bytes."""
    with write_errors(path):
        lines = path.read_bytes()[:n_bytes].split(b"\n")
        kept = [raw for raw in lines if raw.strip() and json.loads(raw)["error"] is None]
        replace_bytes(path, b"".join(raw + b"\n" for raw in kept))


def _append(path: Path, descriptor: int, data: bytes) -> None:
    """Append bytes, and return when they are on the disk.

    Raises:
        OutputError: If they cannot be written. A part that was written is removed again.
    """
    start = os.lseek(descriptor, 0, os.SEEK_END)
    with write_errors(path):
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError as error:
            is_fsync_error = not data
            if is_fsync_error and error.errno == errno.EINVAL:  # a file system without fsync
                return
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise


def streaming(stream: BinaryIO, name: str = "standard output") -> Write:
    """Return a function that writes results to a stream, which a restart cannot continue."""

    def write(record: Mapping[str, Any]) -> None:
        with write_errors(Path(name)):
            stream.write(to_line(record))
            stream.flush()

    return write
