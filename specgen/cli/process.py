"""The process: signals, standard streams that cannot be written, and its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import typer

from specgen.errors import EXIT_BROKEN_PIPE, OutputError
from specgen.system.processes import has_left_running

#: Ctrl-C; what `kill` sends; a closed terminal (not on Windows).
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
#: Error numbers that mean that standard output cannot be written.
_NOT_WRITTEN = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN}
_CLOSED_PIPE = errno.EINVAL if os.name == "nt" else errno.EPIPE


class Interrupt:
    """A context manager in which the first signal only sets a flag, as a decode cannot be stopped in the middle. A second
    one raises KeyboardInterrupt, which ends the process with the signal's exit code, if it `ends_process`."""

    def __init__(self, *, ends_process: bool = True) -> None:
        self._ends_process = ends_process
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def __call__(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """The exit code by which a shell reports the signal; 0 without a signal."""
        return 0 if self._received is None else 128 + self._received

    def __enter__(self) -> Interrupt:
        self._received = None
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is KeyboardInterrupt and self._received is not None and self._ends_process:
            raise SystemExit(self.exit_code)

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            raise KeyboardInterrupt
        self._received = signal_number


def open_missing_streams() -> None:
    """Open the null device for each closed standard stream, as of daemons: the next file would get its number. To
    standard output, writing fails with EBADF, so that no lost answer counts as written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            descriptor = os.open(os.devnull, flags)  # the lowest free number: that of the stream
            os.set_inheritable(descriptor, True)
            stream = open(  # noqa: SIM115 - open to the end of the process, as those it replaces
                descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Turn errors of writing to standard output into `OutputError`, or `typer.Exit` if a pipe's reader went away."""
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
    """Write the rest of stdout's buffer, or discard it if that fails."""
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def _abandon_stdout() -> None:
    """Discard the rest of stdout's buffer: the interpreter flushes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_process(code: int) -> NoReturn:
    """Exit with this code: in the usual way, or at once if native code was left running."""
    if not has_left_running():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
