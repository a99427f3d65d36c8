"""Lines of a batch answered by actors of a Ray cluster, some at a time; the results are written
here. If an actor ends, the next run of the batch answers its lines. This module alone imports Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from specgen import __version__
from specgen.errors import BackendError, ModelFileError, SpecgenError
from specgen.serve.batch.lines import BatchLine, Write
from specgen.serve.batch.runner import BatchRun, BatchStats, Prompting
from specgen.session.session import Session

#: An actor gets its lines in at least this many portions: at the end of one, not all places are in
#: use.
_N_PORTIONS = 4
#: Assumed for the length of portions if the number of answers at once is measured by the actors.
_N_AT_ONCE = 16
#: Seconds between checks for Ctrl-C, and to reach a cluster.
_LOOK_S, _REACH_S = 0.2, 10.0
#: The size of the object store if Ray is started here: lines and results are small.
_STORE_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster at ``local``, ``auto`` or HOST:PORT, and an actor's CPUs and GPUs; None: the
    largest node's.
    """

    address: str
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ActorJob:
    """What an actor does, which can be pickled. Each node must have `files`, paths with their sizes
    in bytes.
    """

    open_session: Callable[[], Session]
    prompting: Prompting
    settings: Mapping[str, Any]
    parallel: int | None
    files: Mapping[str, int]


def place(
    nodes: Sequence[tuple[float, float]], cpus: float | None, gpus: float | None
) -> tuple[int, float, float]:
    """Return how many actors nodes with these CPUs and GPUs have room for, and the CPUs and GPUs of
    each. None takes all of the largest node; `gpus` divide its CPUs. Raise `BackendError` if no
    node has room.
    """
    most = max(nodes, default=(0.0, 0.0))
    if gpus is None:
        gpus = max((node_gpus for _, node_gpus in nodes), default=0.0)
    if cpus is None:
        able = [node for node in nodes if node[1] >= gpus]
        cpus, node_gpus = max(able, default=(0.0, 0.0))
        cpus = (cpus // max(1, node_gpus // gpus) if gpus else cpus) or 1.0
    n_actors = sum(
        int(min(node_cpus // cpus, node_gpus // gpus if gpus else float("inf")))
        for node_cpus, node_gpus in nodes
    )
    if not n_actors:
        has = f"{most[0]:g} CPUs, {most[1]:g} GPUs"
        raise BackendError(
            f"no Ray node has {cpus:g} CPUs and {gpus:g} GPUs for an actor: the largest has {has}",
            hint="see --cpus-per-worker and --gpus-per-worker",
        )
    return n_actors, cpus, gpus


@contextlib.contextmanager
def connected(cluster: Cluster, *, verbose: bool, ray: Any = None) -> Iterator[Any]:
    """Yield the module of Ray, connected to a cluster. Raise `BackendError` if nothing answers."""
    with contextlib.ExitStack() as stack:
        # Ray prints messages of its processes to standard output, whatever it is asked to log.
        sink = sys.stderr if verbose else stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(sink))
        ray = ray or _connect(cluster.address, verbose=verbose)
        stack.callback(ray.shutdown)
        yield ray


def _connect(address: str, *, verbose: bool) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports nothing to others
    import ray

    how: dict[str, Any] = {} if verbose else {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address == "local":
        how |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        ray.init(address, **how)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        raise BackendError(
            f"--ray {address}: no Ray cluster answers there: {_first_line(error)}",
            hint="run the command on a machine of the cluster: `ray start --head` starts one, `ray start "
            "--address` adds this machine, and --ray local uses this one alone",
        ) from error
    return ray


class RayBatch:
    """Gets the lines of a batch answered by a cluster that `connected` has reached."""

    def __init__(self, ray: Any, cluster: Cluster, job: ActorJob, write: Write) -> None:
        """Raise `BackendError` if the cluster has no room for an actor."""
        self._ray, self._cluster, self._job, self._write = ray, cluster, job, write
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes]
        asked = cluster.cpus_per_worker, cluster.gpus_per_worker
        self.n_actors, self._cpus, self._gpus = place(has, *asked)
        self.stats = BatchStats()

    @property
    def where(self) -> str:
        return f"{self.n_actors} Ray actor{'' if self.n_actors == 1 else 's'}"

    def run(
        self, lines: Sequence[BatchLine], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[BatchStats, None, None]:
        """Get the lines answered; yield the counts now and then. Raise `BackendError` if actors
        ended early.
        """
        self.n_actors = min(self.n_actors, len(lines))
        self.stats.n_lines = len(lines)
        portions = deque(self._portions(lines))
        remote = self._ray.remote(Actor).options(
            num_cpus=self._cpus, num_gpus=self._gpus, scheduling_strategy="SPREAD"
        )
        actors = [remote.remote(self._job, __version__) for _ in range(self.n_actors)]
        starting = {actor.ready.remote(): actor for actor in actors}
        streams: dict[Any, Any] = {}  # by what an actor says next
        stats_by_stream: dict[Any, BatchStats] = {}
        why_lost, silent_since_s = "", time.monotonic()
        while (streams or (portions and starting)) and not interrupted():
            done, _ = self._ray.wait([*streams, *starting], timeout=_LOOK_S)
            for stream in done:
                if stream in starting:
                    self._check_started(stream)
                    actor = starting.pop(stream)
                else:
                    try:
                        records, stats_by_stream[stream] = self._ray.get(next(stream))
                        sums = map(sum, zip(*map(astuple, stats_by_stream.values()), strict=True))
                        self.stats = replace(BatchStats(*sums), n_lines=len(lines))
                        for record in records:
                            self._write(record)
                        continue
                    except StopIteration:
                        actor = streams.pop(stream)
                    except self._ray.exceptions.RayError as error:
                        del streams[stream]
                        why_lost = _first_line(getattr(error, "cause", None) or error)
                        continue
                if portions:
                    answer = actor.answer.options(num_returns="streaming")
                    streams[answer.remote(portions.popleft())] = actor
            yield self.stats
            if streams:
                silent_since_s = time.monotonic()
            elif time.monotonic() - silent_since_s > self._cluster.patience_s:
                hint = "wait until CPUs or GPUs are free, or ask for fewer (--cpus-per-worker)"
                what = f"no actor has started within {self._cluster.patience_s:.0f} s"
                raise BackendError(what, hint)
        n_left = len(lines) - self.stats.n_done
        if n_left and not interrupted():
            raise BackendError(
                f"{n_left} of {len(lines)} lines have no answer, since their actors ended: {why_lost}",
                hint="run it again to answer them; --verbose shows what the actors print",
            )

    def _portions(self, lines: Sequence[BatchLine]) -> Iterator[Sequence[BatchLine]]:
        n_each = -(-len(lines) // max(1, self.n_actors))
        n_least = _N_PORTIONS * (self._job.parallel or _N_AT_ONCE)
        n_each = min(n_each, max(n_least, -(-n_each // _N_PORTIONS)))
        return (lines[start : start + n_each] for start in range(0, len(lines), n_each))

    def _check_started(self, ref: Any) -> None:
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), SpecgenError):
                raise cause from error
            is_missing = "No module named 'specgen'" in str(error)
            what = "specgen is not installed on a Ray node" if is_missing else _first_line(error)
            hint = "each node needs the same version of specgen"
            raise BackendError(f"an actor cannot start: {what}", hint) from error


class Actor:
    """The actor that Ray runs, one or several on a node; it loads the models once."""

    def __init__(self, job: ActorJob, version: str) -> None:
        self._job = job
        self._error: SpecgenError | None = None
        try:
            if version != __version__:
                what = f"specgen {__version__} is installed there, and {version} on this machine"
                raise BackendError(what, "install the same version on each node")
            for path, n_bytes in job.files.items():
                found = Path(path).stat().st_size if Path(path).exists() else None
                if found != n_bytes:
                    what = f"{path} has {found} bytes there, but {n_bytes} on this machine"
                    what = f"there is no file {path}" if found is None else what
                    hint = "each node needs the models on its own disk, at the same paths"
                    raise ModelFileError(what, hint)
            self._session = job.open_session()
        except SpecgenError as error:
            where = f"the Ray node {socket.gethostname()}"
            self._error = type(error)(f"{where}: {error.message}", error.hint)

    def ready(self) -> None:
        if self._error is not None:
            raise self._error

    def answer(
        self, lines: Sequence[BatchLine]
    ) -> Iterator[tuple[list[Mapping[str, Any]], BatchStats]]:
        """Yield the results of lines as they come, and the counts so far."""
        job, records = self._job, list[Mapping[str, Any]]()
        how: dict[str, Any] = {"parallel": job.parallel, "wall_clock": time.time}
        batch = BatchRun(self._session, job.prompting, records.append, job.settings, **how)
        for stats in batch.run(lines):
            if records:
                yield list(records), stats
                records.clear()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
