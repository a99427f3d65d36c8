"""The specgen command in a process of its own that need not import anything: a fork of this one."""

from __future__ import annotations

import atexit
import os
import pwd
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

#: Bytes of address space: what is mapped counts, libraries too.
_MEMORY_BYTES = 6 * 2**30
_POLL_S = 0.005
_FILE_BYTES = 2**30


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `code` is negative for a signal, None if it took too long."""

    code: int | None
    out: bytes
    err: str
    seconds: float


def run_forked(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str | None],
    *,
    stdin: bytes = b"",
    limit_s: float = 60.0,
) -> Outcome:
    """Run a command in a folder, with limits on time, memory, and what it writes to a file. There
    must be no threads in this process. Of the environment, None takes a variable away; without HOME
    the user is not in the list of users either.
    """
    streams = [folder / name for name in (".stdin", ".stdout", ".stderr")]
    streams[0].write_bytes(stdin)
    for stream in streams[1:]:
        stream.write_bytes(b"")
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be(arguments, folder, environment, streams)
    code = _exit_code(child, limit_s)
    seconds = time.monotonic() - started
    out, err = (stream.read_bytes() for stream in streams[1:])
    return Outcome(code, out, err.decode("utf-8", "replace"), seconds)


def _exit_code(child: int, limit_s: float) -> int | None:
    """Wait for the child; return None if it took too long and was killed."""
    deadline = time.monotonic() + limit_s
    ended = 0
    status = 0
    try:
        while not ended and time.monotonic() <= deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                time.sleep(_POLL_S)
    finally:
        # Also after Ctrl-C, which does not reach the child in its own session.
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _be(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str | None],
    streams: Sequence[Path],
) -> NoReturn:
    """Be the command, in the child."""
    code = 1
    try:
        os.setsid()
        for number, path in enumerate(streams):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND
            os.dup2(os.open(path, flags), number)
        os.chdir(folder)
        _set_variables(environment)
        limits = {"AS": _MEMORY_BYTES, "FSIZE": _FILE_BYTES, "CORE": 0}
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        sys.argv = ["specgen", *arguments]
        from specgen.__main__ import main

        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _set_variables(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "HOME" not in os.environ:
        for function in ("getpwuid", "getpwnam"):
            setattr(pwd, function, _unknown_user)


def _unknown_user(who: object) -> NoReturn:
    raise KeyError(who)
