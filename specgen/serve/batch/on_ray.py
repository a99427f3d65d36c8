"""Lines of a batch answered by the actors of a Ray cluster, while the results are written here.

If an actor ends, the next run of the batch answers its lines. This module alone imports Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from specgen import __version__
from specgen.errors import BackendError, ModelFileError, SpecgenError
from specgen.serve.batch.lines import BatchLine, Write
from specgen.serve.batch.runner import BatchRun, BatchStats, Prompting
from specgen.session.session import Session
from specgen.system.quantities import counted

#: Each actor gets its lines in at least this many portions: at the end of one, it generates fewer
#: answers at once than it could.
_N_PORTIONS = 4
#: The number of answers at once, for the length of portions, if the actors measure it.
_N_AT_ONCE = 16
#: Time between checks for Ctrl-C, in seconds.
_CHECK_S = 0.2
#: Time to reach a cluster, in seconds.
_REACH_S = 10.0
#: The size of the object store if Ray is started here: lines and results are small.
_STORE_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster, and what an actor gets of it."""

    #: ``local``, ``auto`` or HOST:PORT.
    address: str
    #: The CPUs of an actor; None: those of the largest node, divided among its actors.
    cpus_per_worker: float | None = None
    #: The GPUs of an actor; None: those of the largest node.
    gpus_per_worker: float | None = None
    #: How long to wait until an actor starts.
    patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ActorJob:
    """What an actor does. It can be pickled."""

    open_session: Callable[[], Session]
    prompting: Prompting
    settings: Mapping[str, Any]
    parallel: int | None
    #: Paths that each node must have, with their sizes in bytes.
    files: Mapping[str, int]


# --- where actors run -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """How many actors a cluster has room for, and what each of them gets."""

    n_actors: int
    cpus: float
    gpus: float


def place(
    nodes: Sequence[tuple[float, float]],
    cpus: float | None,
    gpus: float | None,
) -> Placement:
    """Place as many actors on a cluster as it has room for.

    Args:
        nodes: The CPUs and GPUs of each node.
        cpus: The CPUs of an actor; None: those of the largest node, divided by the number of
            actors that its GPUs allow.
        gpus: The GPUs of an actor; None: those of the node with most.

    Raises:
        BackendError: No node has room for an actor.
    """
    if gpus is None:
        gpus = max((node_gpus for _, node_gpus in nodes), default=0.0)
    if cpus is None:
        cpus = _cpus_of_largest(nodes, gpus) or 1.0
    n_actors = sum(_n_fitting(node, cpus, gpus) for node in nodes)
    if not n_actors:
        most_cpus, most_gpus = max(nodes, default=(0.0, 0.0))
        raise BackendError(
            f"no Ray node has {cpus:g} CPUs and {gpus:g} GPUs for an actor: "
            f"the largest has {most_cpus:g} CPUs, {most_gpus:g} GPUs",
            hint="see --cpus-per-worker and --gpus-per-worker",
        )
    return Placement(n_actors, cpus, gpus)


def _cpus_of_largest(nodes: Sequence[tuple[float, float]], gpus: float) -> float:
    """Return the CPUs for each actor on the largest node that has `gpus` GPUs."""
    able = [node for node in nodes if node[1] >= gpus]
    cpus, node_gpus = max(able, default=(0.0, 0.0))
    if not gpus:
        return cpus
    return cpus // max(1, node_gpus // gpus)


def _n_fitting(node: tuple[float, float], cpus: float, gpus: float) -> int:
    node_cpus, node_gpus = node
    n_actors = node_cpus // cpus
    if gpus:
        n_actors = min(n_actors, node_gpus // gpus)
    return int(n_actors)


# --- the cluster ----------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(cluster: Cluster, *, verbose: bool, ray: Any = None) -> Iterator[Any]:
    """Yield the module of Ray, connected to a cluster.

    Args:
        cluster: The cluster.
        verbose: Whether Ray's messages go to standard error, or nowhere.
        ray: Another module to use, already connected.

    Raises:
        BackendError: Nothing answers at the cluster's address.
    """
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

    settings: dict[str, Any] = {}
    if not verbose:
        settings |= {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address == "local":
        settings |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        _check_reachable(address)
        ray.init(address, **settings)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        raise BackendError(
            f"--ray {address}: no Ray cluster answers there: {_first_line(error)}",
            hint="run the command on a machine of the cluster: `ray start --head` starts one, "
            "`ray start --address` adds this machine, and --ray local uses this one alone",
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nothing listens at an address: Ray itself would try for long."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


class RayBatch:
    """Gets the lines of a batch answered by a cluster.

    Args:
        ray: The module of Ray, `connected` to the cluster.
        cluster: The cluster.
        job: What each actor does.
        write: Writes a result.

    Raises:
        BackendError: The cluster has no room for an actor.
    """

    def __init__(self, ray: Any, cluster: Cluster, job: ActorJob, write: Write) -> None:
        self._ray = ray
        self._cluster = cluster
        self._job = job
        self._write = write
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        sizes = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes]
        self._placement = place(sizes, cluster.cpus_per_worker, cluster.gpus_per_worker)
        self.n_actors = self._placement.n_actors
        self.stats = BatchStats()
        self._n_lines = 0
        #: The lines that no actor has yet.
        self._portions: deque[Sequence[BatchLine]] = deque()
        #: The actors that load their models, by what tells that they are ready.
        self._starting: dict[Any, Any] = {}
        #: The actors that answer, by their streams of results.
        self._answering: dict[Any, Any] = {}
        self._stats_by_stream: dict[Any, BatchStats] = {}
        self._why_lost = ""

    @property
    def where(self) -> str:
        """Who generates the answers, for a summary."""
        return counted(self.n_actors, "Ray actor")

    def run(
        self,
        lines: Sequence[BatchLine],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generator[BatchStats, None, None]:
        """Get lines answered; yield the counts now and then.

        Raises:
            BackendError: No actor has started in time, or some ended before all lines were
                answered.
            SpecgenError: What went wrong when an actor started.
        """
        self._n_lines = len(lines)
        self.stats.n_lines = len(lines)
        self.n_actors = min(self.n_actors, len(lines))
        self._portions.extend(self._portions_of(lines))
        self._start_actors()
        active_s = time.monotonic()
        while self._is_going_on and not interrupted():
            waited_for = [*self._answering, *self._starting]
            ready, _ = self._ray.wait(waited_for, timeout=_CHECK_S)
            for each in ready:
                if each in self._starting:
                    self._take_started(each)
                else:
                    self._take_results(each)
            yield self.stats
            if self._answering:
                active_s = time.monotonic()
            elif time.monotonic() - active_s > self._cluster.patience_s:
                raise BackendError(
                    f"no actor has started within {self._cluster.patience_s:.0f} s",
                    hint="wait until CPUs or GPUs are free, or ask for fewer (--cpus-per-worker)",
                )
        n_left = len(lines) - self.stats.n_done
        if n_left and not interrupted():
            raise BackendError(
                f"{n_left} of {len(lines)} lines have no answer, since their actors ended: "
                f"{self._why_lost}",
                hint="run it again to answer them; --verbose shows what the actors print",
            )

    @property
    def _is_going_on(self) -> bool:
        """Whether results may still come."""
        return bool(self._answering) or bool(self._portions and self._starting)

    def _portions_of(self, lines: Sequence[BatchLine]) -> Iterator[Sequence[BatchLine]]:
        """Divide lines so that a fast actor can get more of them than a slow one."""
        n_lines_each = _divided_up(len(lines), max(1, self.n_actors))
        n_least = _N_PORTIONS * (self._job.parallel or _N_AT_ONCE)
        n = min(n_lines_each, max(n_least, _divided_up(n_lines_each, _N_PORTIONS)))
        return (lines[start : start + n] for start in range(0, len(lines), n))

    def _start_actors(self) -> None:
        factory = self._ray.remote(Actor).options(
            num_cpus=self._placement.cpus,
            num_gpus=self._placement.gpus,
            scheduling_strategy="SPREAD",
        )
        for _ in range(self.n_actors):
            actor = factory.remote(self._job, __version__)
            self._starting[actor.ready.remote()] = actor

    def _take_started(self, ready: Any) -> None:
        """Give an actor that has started its first lines. Raise its error if it cannot start."""
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, SpecgenError):
                raise cause from error
            reason = _first_line(error)
            if "No module named 'specgen'" in str(error):
                reason = "specgen is not installed on a Ray node"
            hint = "each node needs the same version of specgen"
            raise BackendError(f"an actor cannot start: {reason}", hint) from error
        self._give_lines(self._starting.pop(ready))

    def _take_results(self, stream: Any) -> None:
        """Write the next results of an actor; at their end, give it more lines."""
        try:
            records, self._stats_by_stream[stream] = self._ray.get(next(stream))
        except StopIteration:
            self._give_lines(self._answering.pop(stream))
            return
        except self._ray.exceptions.RayError as error:
            del self._answering[stream]
            self._why_lost = _first_line(getattr(error, "cause", None) or error)
            return
        self.stats = _total(self._stats_by_stream.values())
        self.stats.n_lines = self._n_lines
        for record in records:
            self._write(record)

    def _give_lines(self, actor: Any) -> None:
        if self._portions:
            answer = actor.answer.options(num_returns="streaming")
            self._answering[answer.remote(self._portions.popleft())] = actor


def _total(stats: Iterable[BatchStats]) -> BatchStats:
    columns = zip(*(astuple(each) for each in stats), strict=True)
    return BatchStats(*(sum(column) for column in columns))


def _divided_up(number: int, divisor: int) -> int:
    """Return a quotient, rounded up."""
    return -(-number // divisor)


# --- on the nodes ---------------------------------------------------------------------------------


class Actor:
    """What Ray runs on a node, once or several times. It loads the models once."""

    def __init__(self, job: ActorJob, version: str) -> None:
        self._job = job
        #: Why it cannot answer; `ready` raises it.
        self._error: SpecgenError | None = None
        try:
            _check_node(job, version)
            self._session = job.open_session()
        except SpecgenError as error:
            message = f"the Ray node {socket.gethostname()}: {error.message}"
            self._error = type(error)(message, error.hint)

    def ready(self) -> None:
        """Return when lines can be answered. Raise `SpecgenError` if they cannot."""
        if self._error is not None:
            raise self._error

    def answer(
        self, lines: Sequence[BatchLine]
    ) -> Iterator[tuple[list[Mapping[str, Any]], BatchStats]]:
        """Yield the results of lines as they come, and the counts so far."""
        records: list[Mapping[str, Any]] = []
        batch = BatchRun(
            self._session,
            self._job.prompting,
            records.append,
            self._job.settings,
            parallel=self._job.parallel,
            wall_clock=time.time,
        )
        for stats in batch.run(lines):
            if records:
                yield list(records), stats
                records.clear()


def _check_node(job: ActorJob, version: str) -> None:
    """Raise `SpecgenError` if a node has another version of specgen, or other files."""
    if version != __version__:
        raise BackendError(
            f"specgen {__version__} is installed there, and {version} on this machine",
            hint="install the same version on each node",
        )
    for name, n_bytes in job.files.items():
        path = Path(name)
        problem = f"there is no file {name}"
        if path.exists():
            n_found = path.stat().st_size
            if n_found == n_bytes:
                continue
            problem = f"{name} has {n_found} bytes there, but {n_bytes} on this machine"
        hint = "each node needs the models on its own disk, at the same paths"
        raise ModelFileError(problem, hint)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
