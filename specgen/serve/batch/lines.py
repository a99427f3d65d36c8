"""The lines of a batch (OpenAI's form, a simple object, or a text), and their results, which a
restart reads.
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

_URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


class _Envelope(Fields, extra="forbid"):
    """A line in OpenAI's form."""

    url: Literal["/v1/chat/completions", "/v1/completions"]
    method: Literal["POST"] = "POST"
    body: dict[str, Any]


class _Named(Fields, coerce_numbers_to_str=True):
    custom_id: str = ""


#: The field of a result with specgen's own data for a restart: what was asked, and with what
#: settings.
OWN = "specgen"
_log = logging.getLogger("specgen.serve.batch")


@dataclass(frozen=True, slots=True)
class LineError:
    """The reason why a line has no answer: a word for programs, and a sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input, counted from 1. Two lines with the same `digest` ask for the same
    answer.
    """

    number: int
    custom_id: str
    digest: str
    request: ParsedRequest | LineError

    @property
    def identity(self) -> str:
        """The id of the line's result: lines that ask for the same have different ones."""
        return _hash(f"{self.custom_id}\0{self.digest}".encode())


def read_lines(data: bytes, name: str, defaults: Defaults) -> list[BatchLine]:
    """Return the lines that are not empty; an error stands for a request that cannot be read. Raise
    `PromptError`.
    """
    lines: list[BatchLine] = []
    numbers: dict[str, int] = {}
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _read(number, raw.strip(), defaults)
        if (first := numbers.get(line.custom_id)) is not None:
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


def _read(number: int, raw: bytes, defaults: Defaults) -> BatchLine:
    """Read a line; its custom_id is empty if it has none. Whatever goes wrong is the line's error."""
    custom_id, digest = "", _hash(raw)
    request: ParsedRequest | LineError
    try:
        text = raw.decode("utf-8")
        body: dict[str, Any] = {"prompt": text}
        if text.startswith("{"):
            try:
                body = from_json(text)
            except ValueError as error:
                what = f"the line is not JSON: {error}"
                return BatchLine(number, custom_id, digest, LineError("invalid_json", what))
        custom_id = parse(_Named, {"custom_id": body.pop("custom_id", None)}).custom_id
        # The order of fields, and white space between them, ask for nothing else.
        digest = _hash(json.dumps(body, sort_keys=True).encode())
        request = read_request(*_asked(body), defaults)
    except UnicodeDecodeError as error:
        what = f"the line is not UTF-8: byte {raw[error.start]:#04x} at offset {error.start}"
        request = LineError("invalid_utf8", what)
    except BodyError as error:
        request = LineError("invalid_request", error.message)
    except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
        request = unexpected(error, number)
    return BatchLine(number, custom_id, digest, request)


def unexpected(error: Exception, number: int) -> LineError:
    """Return the error of a line that a bug of specgen ended, whose traceback goes to the log."""
    _log.error("line %d failed", number, exc_info=error)
    return LineError("bug", f"specgen failed: {type(error).__name__}: {error}")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _asked(body: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    if not {"body", "url", "method"} & body.keys():
        return ("chat" if "messages" in body else "prompt"), body
    asked = parse(_Envelope, body)
    return _URLS[asked.url], asked.body


# --- results

#: Writes a result whole, and raises `OutputError` if it cannot; what was written before is kept.
Write: TypeAlias = Callable[[Mapping[str, Any]], None]


def result_of(
    line: BatchLine, settings: Mapping[str, Any], response: Any, error: LineError | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line.identity}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if error is None else {"code": error.code, "message": error.message},
        OWN: {"request": line.digest, "settings": settings},
    }


@dataclass(slots=True)
class Earlier:
    """The results that a file already has."""

    #: custom_id to the digest of what was asked.
    digests: dict[str, str] = field(default_factory=dict)
    #: custom_ids whose result is an error.
    errors: set[str] = field(default_factory=set)
    #: The different settings of the results.
    settings: list[dict[str, Any]] = field(default_factory=list)
    #: The bytes of the file that are results, whether the last one ends its line, and whether a
    #: torn one follows.
    n_bytes: int = 0
    ends_line: bool = True
    is_torn: bool = False

    def take(self, record: Mapping[str, Any]) -> None:
        custom_id, own = record["custom_id"], record[OWN]
        settings, digest = dict(own["settings"]), own["request"]
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
        self, lines: Sequence[BatchLine], settings: Mapping[str, Any], name: str
    ) -> None:
        """Raise `UsageError` if the results in the file `name` have other settings, or belong to
        other lines.
        """
        hint = "name another file, or keep those results with --allow-mixed"

        def value(of: Mapping[str, Any], key: str) -> str:
            return json.dumps(of[key]) if key in of else "as by default"

        for before in self.settings:
            differ = [
                f"{key} {value(before, key)} (now {value(settings, key)})"
                for key in sorted({*settings, *before})
                if settings.get(key) != before.get(key)
            ]
            if differ:
                raise UsageError(f"{name} has results of other settings: {', '.join(differ)}", hint)
        asked = {line.custom_id: line for line in lines}
        for custom_id, digest in self.digests.items():
            line, what = asked.get(custom_id), f"{name} has a result for {custom_id!r}, which"
            if line is None:
                raise UsageError(f"{what} nothing asks for", hint)
            if line.digest != digest:
                raise UsageError(
                    f"{what} asked something else than line {line.number} does now",
                    "--retry-errors answers it again" if custom_id in self.errors else hint,
                )


def read_results(path: Path) -> Earlier:
    """Return a file's results; a torn last line is left out. Raise `OutputError` for a line that is
    none.
    """
    found = Earlier()
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
                what = f"line {number} is not a result of specgen batch"
                hint = "name another file, or repair that line"
                raise OutputError(f"{path}: {what}", hint) from None
        found.n_bytes += len(raw) + (not is_last)
    found.ends_line = data[: found.n_bytes][-1:] in (b"", b"\n")
    return found


@contextlib.contextmanager
def continued(path: Path, *, retry_errors: bool = False) -> Iterator[tuple[Earlier, Write]]:
    """Yield a file's results, and what appends to them while no other process can; a torn result is
    cut off, and with `retry_errors` errors are dropped. A result is on the disk when `Write`
    returns. Raise `OutputError`.
    """
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    held = OutputError(
        f"{path}: another specgen batch is writing to it",
        hint="wait until it has ended, or name another file",
    )
    with locked(cache_folder() / "locks" / f"{name}.lock", held):
        earlier = read_results(path)
        if retry_errors and earlier.errors:
            with write_errors(path):
                lines = path.read_bytes()[: earlier.n_bytes].split(b"\n")
                kept = [raw for raw in lines if raw.strip() and json.loads(raw)["error"] is None]
                replace_bytes(path, b"".join(raw + b"\n" for raw in kept))
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


def _append(path: Path, descriptor: int, data: bytes) -> None:
    """Append bytes, and return when they are on the disk; or remove a written part and raise
    `OutputError`.
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
