"""The results file of a batch: results are appended line by line, and a restart reads it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from specgen.errors import OutputError, UsageError
from specgen.serve.batch.lines import Line, LineError
from specgen.system.atomic_files import replace_bytes
from specgen.system.json_lines import (
    AppendedFile,
    DamagedLineError,
    take_lines,
    to_line,
    write_errors,
)

#: The field of a result with specgen's own data for a restart: what was asked, and with what settings.
OWN = "specgen"


def result_of(
    line: Line, settings: Mapping[str, Any], response: Any, error: LineError | None
) -> dict[str, Any]:
    """Return the result of a line, with a response or an error."""
    return {
        "id": f"batch_req_{line.identity}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if error is None else {"code": error.code, "message": error.message},
        OWN: {"request": line.digest, "settings": settings},
    }


class Results(Protocol):
    """Accepts results as they come."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a result whole. Raise `OutputError`; what was written before is kept."""


@dataclass(slots=True)
class Earlier:
    """The results that a file already has."""

    #: custom_id to the digest of what was asked.
    digests: dict[str, str] = field(default_factory=dict)
    #: custom_ids whose result is an error.
    errors: set[str] = field(default_factory=set)
    #: The settings of the first result; None if there is none.
    settings: dict[str, Any] | None = None
    #: custom_id of a result with other settings than the first one.
    mixed: str | None = None
    #: The bytes of the file that are results, and whether the last of them ends a line.
    n_bytes: int = 0
    ends_line: bool = True
    #: Whether a torn result follows them.
    is_torn: bool = False


def read_results(path: Path) -> Earlier:
    """Read the results in a file. A last line that was torn when a process was killed is left out; a file
    that does not exist has none.

    Raise `OutputError` if the file cannot be read, or has a line that is no result.
    """
    found = Earlier()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return found
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        found.n_bytes = take_lines(data, lambda record: _take(found, record))
    except DamagedLineError as error:
        raise OutputError(
            f"{path}: line {error.number} is not a result of specgen batch",
            hint="name another file, or repair that line",
        ) from None
    found.is_torn = found.n_bytes < len(data)
    found.ends_line = data[: found.n_bytes].endswith(b"\n") or not found.n_bytes
    return found


def _take(found: Earlier, record: Mapping[str, Any]) -> None:
    custom_id, own = record["custom_id"], record[OWN]
    settings, digest = dict(own["settings"]), own["request"]
    if not isinstance(custom_id, str) or not isinstance(digest, str):
        raise TypeError
    if custom_id in found.digests:
        raise ValueError(custom_id)
    if record["error"] is not None:
        found.errors.add(custom_id)
    found.digests[custom_id] = digest
    if found.settings is None:
        found.settings = settings
    elif settings != found.settings and found.mixed is None:
        found.mixed = custom_id


def missing(
    lines: Sequence[Line],
    earlier: Earlier,
    settings: Mapping[str, Any],
    name: str,
    *,
    allow_mixed: bool,
) -> list[Line]:
    """Return the lines without a result. Raise `UsageError` if the results have other settings or belong to
    other lines, unless that is allowed; such results are kept unchanged."""
    if not allow_mixed:
        _check_same(lines, earlier, settings, name)
    return [line for line in lines if line.custom_id not in earlier.digests]


def _check_same(
    lines: Sequence[Line], earlier: Earlier, settings: Mapping[str, Any], name: str
) -> None:
    hint = "name another file, or keep those results with --allow-mixed"
    if earlier.settings is not None and earlier.settings != settings:
        changed = sorted(
            key
            for key in {*settings, *earlier.settings}
            if settings.get(key) != earlier.settings.get(key)
        )
        what = ", ".join(
            f"{key} {_shown(earlier.settings.get(key))} (now {_shown(settings.get(key))})"
            for key in changed
        )
        raise UsageError(f"{name} has results of other settings: {what}", hint)
    if earlier.mixed is not None:
        raise UsageError(f"{name} has results of several settings, from {earlier.mixed!r} on", hint)
    asked = {line.custom_id: line for line in lines}
    for custom_id, digest in earlier.digests.items():
        line = asked.get(custom_id)
        if line is None:
            raise UsageError(f"{name} has a result for {custom_id!r}, which nothing asks for", hint)
        if line.digest != digest:
            is_error = custom_id in earlier.errors
            raise UsageError(
                f"{name} has {'an error' if is_error else 'a result'} for {custom_id!r}, which asked "
                f"something else than line {line.number} does now",
                "--retry-errors answers it again" if is_error else hint,
            )


def _shown(value: Any) -> str:
    return "as by default" if value is None else json.dumps(value)


class ResultsFile:
    """Appends results to a file."""

    def __init__(self, file: AppendedFile) -> None:
        self._file = file

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path, earlier: Earlier) -> Iterator[ResultsFile]:
        """Open the file to append to its results; anything after them is cut off. Raise `OutputError`."""
        with AppendedFile.opened(path) as file:
            file.cut(earlier.n_bytes)
            if not earlier.ends_line:
                file.append(b"\n")
            yield ResultsFile(file)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a result; it is on the disk when this returns. A result that does not fit is removed
        again. Raise `OutputError`."""
        self._file.append(to_line(record))


def without_errors(path: Path, earlier: Earlier) -> Earlier:
    """Drop the results that are errors from a file, which is replaced whole; return its results then. Raise
    `OutputError`."""
    with write_errors(path):
        lines = path.read_bytes()[: earlier.n_bytes].split(b"\n")
        kept = [raw for raw in lines if raw.strip() and json.loads(raw)["error"] is None]
        replace_bytes(path, b"".join(raw + b"\n" for raw in kept))
    return read_results(path)


class ResultsStream:
    """Writes results to a stream, which a restart cannot continue."""

    def __init__(self, stream: BinaryIO, name: str = "standard output") -> None:
        self._stream = stream
        self._name = name

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a result and flush. Raise `OutputError`, and `BrokenPipeError` if nobody reads."""
        with write_errors(Path(self._name)):
            self._stream.write(to_line(record))
            self._stream.flush()
