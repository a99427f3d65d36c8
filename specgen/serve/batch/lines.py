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
from specgen.serve.formats.parsed_request import Defaults, Kind, ParsedRequest
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.single_request import read_request
from specgen.system.files import locked, replace_bytes, to_line, write_errors
from specgen.system.folders import cache_folder

_log = logging.getLogger("specgen.serve.batch")

# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineError:
    """The reason why a line has no answer."""

    #: A word for programs.
    code: str
    #: A sentence.
    message: str


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input."""

    #: Its number, from 1.
    number: int
    custom_id: str
    #: A hash of the request: two lines with the same one ask for the same answer.
    digest: str
    #: The request, or why the line is not one.
    request: ParsedRequest | LineError

    @property
    def identity(self) -> str:
        """The id of the line's result, which differs between lines that ask for the same."""
        return _hash(f"{self.custom_id}\0{self.digest}".encode())


class _BatchBody(Fields, extra="forbid"):
    """A line in OpenAI's form."""

    url: Literal["/v1/chat/completions", "/v1/completions"]
    method: Literal["POST"] = "POST"
    body: dict[str, Any]


_URL_KINDS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


class _CustomId(Fields, coerce_numbers_to_str=True):
    custom_id: str = ""


def read_lines(data: bytes, name: str, defaults: Defaults) -> list[BatchLine]:
    """Return the lines of a file that are not empty; some may be errors.

    Args:
        data: The content of the file.
        name: Its name, for messages.
        defaults: The values of fields that a line leaves out.

    Raises:
        PromptError: There are no lines, or two have the same custom_id.
    """
    lines: list[BatchLine] = []
    numbers: dict[str, int] = {}  # by custom_id
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
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


def _numbered(line: BatchLine, taken: Container[str]) -> BatchLine:
    """Return a line with its number as its custom_id, in words if another line has that number."""
    custom_id = str(line.number)
    while custom_id in taken:
        custom_id = f"line {custom_id}"
    return replace(line, custom_id=custom_id)


def _read_line(number: int, raw: bytes, defaults: Defaults) -> BatchLine:
    """Read a line; its custom_id is empty if it has none. All exceptions become its error."""
    custom_id = ""
    digest = _hash(raw)
    request: ParsedRequest | LineError
    try:
        body = _line_body(raw)
        custom_id = parse(_CustomId, {"custom_id": body.pop("custom_id", None)}).custom_id
        # The order of fields, and white space between them, ask for nothing else.
        digest = _hash(json.dumps(body, sort_keys=True).encode())
        request = _read_body(body, defaults)
    except UnicodeDecodeError as error:
        what = f"the line is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}"
        request = LineError("invalid_utf8", what)
    except _InvalidJsonError as error:
        request = LineError("invalid_json", f"the line is not JSON: {error}")
    except BodyError as error:
        request = LineError("invalid_request", error.message)
    except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
        request = unexpected(error, number)
    return BatchLine(number, custom_id, digest, request)


class _InvalidJsonError(Exception):
    """A line begins as JSON and is not."""


def _line_body(raw: bytes) -> dict[str, Any]:
    """Return the object on a line, or one with the line as its prompt."""
    text = raw.decode("utf-8")
    if not text.startswith("{"):
        return {"prompt": text}
    try:
        body: dict[str, Any] = from_json(text)
    except ValueError as error:
        raise _InvalidJsonError(str(error)) from error
    return body


def _read_body(body: dict[str, Any], defaults: Defaults) -> ParsedRequest:
    if body.keys() & {"body", "url", "method"}:
        envelope = parse(_BatchBody, body)
        return read_request(_URL_KINDS[envelope.url], envelope.body, defaults)
    return read_request("chat" if "messages" in body else "prompt", body, defaults)


def unexpected(error: Exception, number: int) -> LineError:
    """Return the error of a line that a bug of specgen ended, whose traceback goes to the log."""
    _log.error("line %d failed", number, exc_info=error)
    return LineError("bug", f"specgen failed: {type(error).__name__}: {error}")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- results --------------------------------------------------------------------------------------

#: Writes a result completely, or raises `OutputError` and keeps what was written before.
Write: TypeAlias = Callable[[Mapping[str, Any]], None]
#: The field of a result with what a restart needs: the line's digest, and the settings.
OWN = "specgen"
_HINT_MIXED = "name another file, or keep those results with --allow-mixed"


def result_of(
    line: BatchLine,
    settings: Mapping[str, Any],
    response: Any,
    error: LineError | None,
) -> dict[str, Any]:
    """Return the result of a line, in OpenAI's form: a response, or an error."""
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

    #: The digests of the lines that they belong to, by custom_id.
    digests: dict[str, str] = field(default_factory=dict)
    #: The custom_ids of the errors among them.
    errors: set[str] = field(default_factory=set)
    #: Their different settings.
    settings: list[dict[str, Any]] = field(default_factory=list)
    #: The size of the results in the file.
    n_bytes: int = 0
    #: Whether the last one ends its line.
    ends_line: bool = True
    #: Whether an incomplete result follows.
    is_torn: bool = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a result. Raise an exception if it is not one, or the second one of a line."""
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
        """Raise `UsageError` if the results have other settings, or belong to other lines.

        Args:
            lines: The lines of this batch.
            settings: Its settings.
            name: The name of the file with the results, for messages.
        """
        for before in self.settings:
            differing = _differences(before, settings)
            if differing:
                message = f"{name} has results of other settings: {', '.join(differing)}"
                raise UsageError(message, _HINT_MIXED)
        lines_by_id = {line.custom_id: line for line in lines}
        for custom_id, digest in self.digests.items():
            line = lines_by_id.get(custom_id)
            result = f"{name} has a result for {custom_id!r}"
            if line is None:
                raise UsageError(f"{result}, which nothing asks for", _HINT_MIXED)
            if line.digest != digest:
                hint = _HINT_MIXED
                if custom_id in self.errors:
                    hint = "--retry-errors answers it again"
                message = f"{result}, which asked something else than line {line.number} does now"
                raise UsageError(message, hint)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two settings, in words."""

    def value(settings: Mapping[str, Any], key: str) -> str:
        return json.dumps(settings[key]) if key in settings else "as by default"

    return [
        f"{key} {value(before, key)} (now {value(now, key)})"
        for key in sorted({*now, *before})
        if now.get(key) != before.get(key)
    ]


def read_results(path: Path) -> EarlierResults:
    """Return a file's results, without an incomplete one at its end.

    Raises:
        OutputError: The file cannot be read, or another line is not a result.
    """
    found = EarlierResults()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return found
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, start=1):
        is_last = number == len(lines)
        if raw.strip():
            try:
                found.take(json.loads(raw))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                if is_last:
                    found.is_torn = True
                    break
                raise OutputError(
                    f"{path}: line {number} is not a result of specgen batch",
                    hint="name another file, or repair that line",
                ) from None
        found.n_bytes += len(raw)
        if not is_last:
            found.n_bytes += len(b"\n")
    results = data[: found.n_bytes]
    found.ends_line = not results or results.endswith(b"\n")
    return found


@contextlib.contextmanager
def continued(path: Path, *, retry_errors: bool = False) -> Iterator[tuple[EarlierResults, Write]]:
    """Yield a file's results, and what appends to them, while no other process can.

    An incomplete result is cut off. A result is on the disk when `Write` returns.

    Args:
        path: The file; it is created if there is none.
        retry_errors: Whether results that are errors are dropped.

    Raises:
        OutputError: The file cannot be read or written, or another process writes to it.
    """
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    held = OutputError(
        f"{path}: another specgen batch is writing to it",
        hint="wait until it has ended, or name another file",
    )
    with locked(cache_folder() / "locks" / f"{name}.lock", held):
        earlier = read_results(path)
        if retry_errors and earlier.errors:
            _drop_errors(path, earlier.n_bytes)
            earlier = read_results(path)
        with write_errors(path):
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            descriptor = os.open(path, flags, 0o666)
        try:
            with write_errors(path):  # a pipe or a device cannot be cut
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
        OutputError: They could not be written; a written part is removed.
    """
    start = os.lseek(descriptor, 0, os.SEEK_END)
    with write_errors(path):
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError as error:
            if not data and error.errno == errno.EINVAL:  # a file system without fsync
                return
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise


def streaming(stream: BinaryIO, name: str = "standard output") -> Write:
    """Return what writes results to a stream, which a restart cannot continue."""

    def write(record: Mapping[str, Any]) -> None:
        with write_errors(Path(name)):
            stream.write(to_line(record))
            stream.flush()

    return write
