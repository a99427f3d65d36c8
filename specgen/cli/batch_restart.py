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
_PAUSE_S, _PROBE_S = 1.0, 5.0


def with_workers(
    workers: Workers | None,
    answer: Callable[[], int],
    *,
    n_missing: int,
    can_restart: bool,
    patience_s: float,
    note: Callable[[str], None],
) -> int:
    """Return the exit code that `answer` returns. If it loses a worker and `can_restart` is set, replace this
    process by one that waits for all workers, at most `patience_s` seconds, and generates the answers that are
    then missing, of now `n_missing`. Raise `WorkerLostError`: at once if the first process cannot find a
    worker, whose name may be mistyped, or if restarts bring no new result."""
    if workers is None:
        return answer()
    before = os.environ.get(_VARIABLE)
    if code := _wait(workers, 0.0 if before is None else patience_s, note):
        return code
    try:
        return answer()
    except WorkerLostError as error:
        n_before, _, times = (before or "").partition(" ")
        n_times = int(times or 0) + 1 if n_before == str(n_missing) else 1
        if not can_restart or n_times > _MOST or not hasattr(os, "fork"):  # Windows cannot exec
            raise
        note(f"{error.message}; starting again")
        _replace_process(f"{n_missing} {n_times}")


def _replace_process(state: str) -> NoReturn:
    os.environ[_VARIABLE] = state
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # llama.cpp's connections would stay open in the new process.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _wait(workers: Workers, patience_s: float, note: Callable[[str], None]) -> int:
    """Wait until all workers respond; return 0, or the exit code of a signal that came meanwhile. Raise
    `WorkerLostError` if they do not within `patience_s` seconds."""
    from specgen.system.worker_probe import probe

    until = time.monotonic() + patience_s
    is_told = False
    with Interrupt() as stop:
        while not stop():
            try:
                for endpoint in workers.endpoints:
                    probe(endpoint, _PROBE_S)
            except WorkerLostError as error:
                if time.monotonic() > until:
                    raise
                if not is_told:
                    note(f"{error.message}; waiting for all workers, {patience_s:g} s at most")
            else:
                return 0
            is_told = True
            time.sleep(_PAUSE_S)
    return stop.exit_code
