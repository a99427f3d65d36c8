"""The results of a batch: they are appended to a file line by line, and a restart reads it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from specgen.errors import OutputError, UsageError
from specgen.serve.batch.lines import Line, LineError
from specgen.system.files import (
    AppendedFile,
    DamagedLineError,
    replace_bytes,
    take_lines,
    to_line,
    write_errors,
)

#: The field of a result with specgen's own data for a restart: what was asked, and with what settings.
OWN = "specgen"

#: Writes a result whole, and raises `OutputError` if it cannot; what was written before is kept.
Write: TypeAlias = Callable[[Mapping[str, Any]], None]


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


@dataclass(slots=True)
class Earlier:
    """The results that a file already has."""

    #: custom_id to the digest of what was asked.
    digests: dict[str, str] = field(default_factory=dict)
    #: custom_ids whose result is an error.
    errors: set[str] = field(default_factory=set)
    #: The different settings of the results.
    settings: list[dict[str, Any]] = field(default_factory=list)
    #: The bytes of the file that are results, and whether the last of them ends a line.
    n_bytes: int = 0
    ends_line: bool = True
    #: Whether a torn result follows them.
    is_torn: bool = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Take up a result. Raise `KeyError`, `TypeError` or `ValueError` if it is none."""
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


def read_results(path: Path) -> Earlier:
    """Read the results in a file. A last line that was torn when a process was killed is left out; a file
    that does not exist has none. Raise `OutputError` if it cannot be read, or has a line that is no result."""
    found = Earlier()
    try:
        data = path.read_bytes()
        found.n_bytes = take_lines(data, found.take)
    except FileNotFoundError:
        return found
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error
    except DamagedLineError as error:
        raise OutputError(
            f"{path}: line {error.number} is not a result of specgen batch",
            hint="name another file, or repair that line",
        ) from None
    found.is_torn = found.n_bytes < len(data)
    found.ends_line = data[: found.n_bytes].endswith(b"\n") or not found.n_bytes
    return found


def check_same(
    lines: Sequence[Line], earlier: Earlier, settings: Mapping[str, Any], name: str
) -> None:
    """Raise `UsageError` if the results in the file `name` have other settings, or belong to other lines."""
    hint = "name another file, or keep those results with --allow-mixed"
    for before in earlier.settings:
        differs = [
            f"{key} {_shown(before.get(key))} (now {_shown(settings.get(key))})"
            for key in sorted({*settings, *before})
            if settings.get(key) != before.get(key)
        ]
        if differs:
            raise UsageError(f"{name} has results of other settings: {', '.join(differs)}", hint)
    asked = {line.custom_id: line for line in lines}
    for custom_id, digest in earlier.digests.items():
        line = asked.get(custom_id)
        if line is None:
            raise UsageError(f"{name} has a result for {custom_id!r}, which nothing asks for", hint)
        if line.digest != digest:
            raise UsageError(
                f"{name} has a result for {custom_id!r}, which asked something else than line "
                f"{line.number} does now",
                "--retry-errors answers it again" if custom_id in earlier.errors else hint,
            )


def _shown(value: Any) -> str:
    return "as by default" if value is None else json.dumps(value)


def without_errors(path: Path, earlier: Earlier) -> Earlier:
    """Drop the results that are errors from a file, which is replaced whole; return its results then. Raise
    `OutputError`."""
    with write_errors(path):
        lines = path.read_bytes()[: earlier.n_bytes].split(b"\n")
        kept = [raw for raw in lines if raw.strip() and json.loads(raw)["error"] is None]
        replace_bytes(path, b"".join(raw + b"\n" for raw in kept))
    return read_results(path)


@contextlib.contextmanager
def appending(path: Path, earlier: Earlier) -> Iterator[Write]:
    """Open a file to append to its results; anything after them is cut off. A result is on the disk when
    `Write` returns; one that does not fit is removed again. Raise `OutputError`."""
    with AppendedFile.opened(path) as file:
        file.cut(earlier.n_bytes)
        if not earlier.ends_line:
            file.append(b"\n")
        yield lambda record: file.append(to_line(record))


def streaming(stream: BinaryIO, name: str = "standard output") -> Write:
    """Return what writes results to a stream, which a restart cannot continue. It raises `BrokenPipeError` if
    nobody reads."""

    def write(record: Mapping[str, Any]) -> None:
        with write_errors(Path(name)):
            stream.write(to_line(record))
            stream.flush()

    return write
