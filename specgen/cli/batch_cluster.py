"""``specgen batch`` on several machines: a Ray cluster answers the lines, or workers hold the target's layers.

If a worker is lost (`--rpc`), the command restarts itself and waits for it: in a process that lost a worker,
llama.cpp's RPC client cannot connect again. It also keeps its connections to the other workers, which serve one
program at a time. So a new process replaces this one (`exec`) and continues at the end of the file of results.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli.output import Output
from specgen.cli.process import Interrupt
from specgen.errors import UsageError, WorkerLostError
from specgen.options import Contexts, DraftSource, KernelOptions, SessionOptions, Workers

if TYPE_CHECKING:
    from specgen.serve.batch.on_ray import ActorJob, Cluster
    from specgen.session.files import DraftChoice
    from specgen.session.session import Session


#: Gives the new process the number of missing lines, and how often it was restarted since that number
#: changed.
_VARIABLE = "SPECGEN_BATCH_RESTARTS"
#: The most restarts for the same number of missing lines: the lines may be what ends the workers.
_MOST = 5
#: Seconds between two checks of the workers, and the most that a check waits for an answer.
_PAUSE_S, _PROBE_S = 1.0, 5.0


def ray_cluster(
    address: str | None,
    machine: Contexts,
    per_worker: tuple[float | None, float | None],
    *,
    patience_s: float,
) -> Cluster | None:
    """Return the cluster of these options; None without one. Raise `UsageError` if Ray is not installed, the
    address is invalid, or other options exclude it."""
    if address is None:
        if per_worker != (None, None):
            raise UsageError("--cpus-per-worker and --gpus-per-worker go with --ray")
        return None
    if machine.target.workers is not None:
        raise UsageError("--ray and --rpc exclude each other")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "--ray needs ray, which is not installed", hint="pip install 'specgen-gguf[ray]'"
        )
    host, _, port = address.rpartition(":")
    if address not in {"local", "auto"} and not (host and "/" not in host and port.isdigit()):
        raise UsageError(
            f"--ray {address}: not the address of a cluster",
            hint="give HOST:PORT as `ray start --head` prints it, or auto, or local",
        )
    from specgen.serve.batch.on_ray import Cluster

    return Cluster(address, *per_worker, patience_s)


def open_on_node(
    options: SessionOptions, drafts: Sequence[DraftChoice], kernels: KernelOptions
) -> Session:
    """Load the models in an actor. Files that are made, and what is learnt, stay on the node."""
    from specgen.cli.model_loading import load, use_kernels
    from specgen.models import cache_folder

    quiet = Output(quiet=True)
    use_kernels(kernels, quiet)
    return load(replace(options, cache=cache_folder()), quiet, drafts)


def actor_job(
    options: SessionOptions,
    drafts: Sequence[DraftChoice],
    kernels: KernelOptions,
    cpus_per_worker: float | None,
    **how: Any,
) -> ActorJob:
    """Return what an actor does; `how` are the other fields of `ActorJob`. It has another working folder, so paths
    are absolute, and as many threads as it has CPUs, unless it has all of its node's. A draft that nobody named
    may be missing on a node."""
    from specgen.serve.batch.on_ray import ActorJob, n_bytes_of

    drafts = tuple(replace(each, draft=_absolute(each.draft)) for each in drafts)
    lookup_files = tuple(path.absolute() for path in options.drafting.lookup_files)
    options = replace(
        options,
        target=options.target.absolute(),
        draft=_absolute(options.draft),
        helpers=tuple(map(_absolute, options.helpers)),
        drafting=replace(options.drafting, lookup_files=lookup_files),
    )
    if cpus_per_worker is not None:
        n_threads = max(1, int(cpus_per_worker))
        for name in ("target_context", "draft_context"):
            context = getattr(options, name)
            threads = context.n_threads or n_threads
            options = replace(options, **{name: replace(context, n_threads=threads)})
    found = {each.draft for each in drafts if each.why}
    named = {options.target, options.draft, *options.helpers, *lookup_files} - found
    named |= {each.draft for each in drafts} - found
    sizes = {str(path): n_bytes_of(path) for path in named if isinstance(path, Path)}
    return ActorJob(
        partial(open_on_node, options, drafts, kernels),
        files={path: n_bytes for path, n_bytes in sizes.items() if n_bytes is not None},
        **how,
    )


def _absolute(source: DraftSource) -> DraftSource:
    return source.absolute() if isinstance(source, Path) else source


# --- workers -----------------------------------------------------------------------------------


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
        os.environ[_VARIABLE] = f"{n_missing} {n_times}"
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
