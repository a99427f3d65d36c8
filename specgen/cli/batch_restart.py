"""``specgen batch --rpc`` when a worker is lost: the command restarts itself and waits for the worker.

In a process that lost a worker, llama.cpp's RPC client cannot connect again. It also keeps its connections to
the other workers, which serve one program at a time. So a new process replaces this one (`exec`) and
continues at the end of the file of results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from specgen.cli.process import Interrupt
from specgen.errors import WorkerLostError
from specgen.options import Workers

#: Gives the new process the number of missing lines, and how often it was restarted since that number
#: changed.
_VARIABLE = "SPECGEN_BATCH_RESTARTS"
#: The most restarts for the same number of missing lines: the lines may be what ends the workers.
_MOST = 5
#: Seconds between two checks of the workers, and the most that a check waits for an answer.
_PAUSE_S = 1.0
_PROBE_S = 5.0


def with_workers(
    workers: Workers | None,
    answer: Callable[[], int],
    *,
    n_missing: int,
    can_restart: bool,
    patience_s: float,
    note: Callable[[str], None],
) -> int:
    """Return what `answer` returns, the exit code.

    If it loses a worker and `can_restart` is set, a new process replaces this one. The new one waits for
    all workers, at most `patience_s` seconds, and generates the missing answers, now at most `n_missing`.
    Raise `WorkerLostError`: at once if the first process cannot find a worker, whose name may be mistyped."""
    if workers is None:
        return answer()
    if code := _wait(workers, patience_s if _VARIABLE in os.environ else 0.0, note):
        return code
    try:
        return answer()
    except WorkerLostError as error:
        if not can_restart:
            raise
        _restart(n_missing, error, note)


def _restart(n_missing: int, error: WorkerLostError, note: Callable[[str], None]) -> NoReturn:
    """Replace the process by one that waits for the workers (`_wait`) and generates the missing answers.
    Raise `error` if that was done too often without a new result, or is not possible."""
    before, times = _told()
    times = 1 if n_missing != before else times + 1
    if times > _MOST or not hasattr(os, "fork"):  # Windows does not replace processes
        raise error
    note(f"{error.message}; starting again")
    os.environ[_VARIABLE] = f"{n_missing} {times}"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # llama.cpp's connections would stay open in the new process.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _wait(workers: Workers, patience_s: float, note: Callable[[str], None]) -> int:
    """Wait until all workers respond; return 0, or the exit code of a signal that came meanwhile. Raise
    `WorkerLostError` if they do not within `patience_s` seconds."""
    until = time.monotonic() + patience_s
    is_told = False
    with Interrupt() as stop:
        while not stop():
            error = _missing(workers)
            if error is None:
                return 0
            if time.monotonic() > until:
                raise error
            if not is_told:
                note(f"{error.message}; waiting for all workers, {patience_s:g} s at most")
                is_told = True
            time.sleep(_PAUSE_S)
    return stop.exit_code


def _missing(workers: Workers) -> WorkerLostError | None:
    """Return the error of the first worker that does not respond."""
    from specgen.system.worker_probe import probe

    try:
        for endpoint in workers.endpoints:
            probe(endpoint, _PROBE_S)
    except WorkerLostError as error:
        return error
    return None


def _told() -> tuple[int, int]:
    """Return the state that the process before passed on; (-1, 0) without one."""
    n_missing, _, times = os.environ.get(_VARIABLE, "").partition(" ")
    return (int(n_missing), int(times)) if n_missing.isdigit() and times.isdigit() else (-1, 0)
