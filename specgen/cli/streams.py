"""The standard streams when they fail, and the end of the process."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer

from specgen.errors import EXIT_BROKEN_PIPE, OutputError
from specgen.system.processes import left_running

#: Error numbers that mean that standard output cannot be written.
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}
#: How the null device replaces each standard stream: flags of the file, and mode of the stream.
#: In place of standard output it is read-only: writing an answer to it must fail, with EBADF, so
#: that no lost answer counts as written.
_NULL_DEVICES = {
    "stdin": (os.O_RDONLY, "r"),
    "stdout": (os.O_RDONLY, "w"),
    "stderr": (os.O_WRONLY, "w"),
}


class _LossyStderr(io.FileIO):
    """Standard error, which drops what cannot be written, as on a full disk.

    An answer then continues without its notes.
    """

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed, as daemons close them.

    Otherwise the next file that is opened would get the stream's number, and its output.
    """
    for name, (flags, mode) in _NULL_DEVICES.items():
        if getattr(sys, name) is not None:
            continue
        # The stream gets its own number: it is the lowest free one.
        descriptor = os.open(os.devnull, flags)
        os.set_inheritable(descriptor, True)
        stream = open(  # noqa: SIM115 - stays open until the process ends, as the original would
            descriptor,
            mode,
            encoding="utf-8",
            errors="backslashreplace",
            closefd=False,
        )
        setattr(sys, name, stream)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_LossyStderr(2, "w", closefd=False)),
        sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Translate errors of writing to standard output.

    Raises:
        OutputError: If the output cannot be written.
        typer.Exit: If the reader of a pipe has gone away.
    """
    try:
        yield
    except OSError as error:
        reader_is_gone = _is_broken_pipe(error)
        if not reader_is_gone and error.errno not in _UNWRITABLE:
            raise
        _abandon_stdout()
        if reader_is_gone:
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        raise _output_error(error) from error


def _is_broken_pipe(error: OSError) -> bool:
    if os.name == "nt" and error.errno == errno.EINVAL:  # Windows reports a broken pipe like this
        return True
    return isinstance(error, BrokenPipeError)


def _output_error(error: OSError) -> OutputError:
    """Return the error for a failed write, with its reason."""
    reason = error.strerror
    hint = None
    if error.errno == errno.EBADF:
        reason = "standard output is closed"
    elif error.errno == errno.ENOSPC:
        hint = "make room on the disk"
    return OutputError(f"the output could not be written: {reason}", hint)


def flush_or_abandon_stdout() -> None:
    """Write the buffer of standard output, or discard it if that fails."""
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def _abandon_stdout() -> None:
    """Redirect standard output to the null device.

    The interpreter flushes the buffer when it exits, which would fail again.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(code: int) -> NoReturn:
    """Exit with this code: the usual way, or at once if native code is still running.

    The usual way would run native destructors, which must not happen while it runs.
    """
    if not left_running.is_set():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
