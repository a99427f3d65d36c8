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
_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}
#: The error of a pipe whose reader went away.
_CLOSED_PIPE = errno.EINVAL if os.name == "nt" else errno.EPIPE


class _LossyStderr(io.FileIO):
    """Standard error: what cannot be written, as on a full disk, is lost.

    An answer goes on without its notes.
    """

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed, as daemons close them.

    The next file that is opened would get its number. The null device of standard output cannot be
    written to (EBADF), so that no lost answer counts as written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
        descriptor = os.open(os.devnull, flags)  # the lowest free number: that of the stream
        os.set_inheritable(descriptor, True)
        stream = open(  # noqa: SIM115 - open to the end of the process, as those it replaces
            descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False
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
        OutputError: The output cannot be written.
        typer.Exit: A pipe's reader went away.
    """
    try:
        yield
    except OSError as error:
        # Windows reports a closed pipe by another error.
        is_closed_pipe = isinstance(error, BrokenPipeError) or error.errno == _CLOSED_PIPE
        if not is_closed_pipe and error.errno not in _NOT_WRITTEN:
            raise
        _abandon_stdout()
        if is_closed_pipe:
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        is_closed = error.errno == errno.EBADF
        reason = "standard output is closed" if is_closed else error.strerror
        hint = "make room on the disk" if error.errno == errno.ENOSPC else None
        raise OutputError(f"the output could not be written: {reason}", hint) from error


def flush_or_abandon_stdout() -> None:
    """Write what is in the buffer of standard output, or discard it if that fails."""
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def _abandon_stdout() -> None:
    """Discard what is in the buffer: the interpreter would write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(code: int) -> NoReturn:
    """Exit with this code: in the usual way, or at once if native code was left running."""
    if not left_running.is_set():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
