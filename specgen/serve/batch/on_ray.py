"""Answer the lines of a batch with the actors of a Ray cluster, and write the results here.

If an actor fails, its lines have no results, and the next run of the batch answers them. No other
module imports Ray.
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

#: The number of portions per actor into which lines are divided, so that fast actors can get more
#: of them than slow ones.
_N_PORTIONS = 4
#: The minimum size of a portion, as a multiple of the number of answers at once: at the end of a
#: portion, an actor generates fewer answers at once than it could.
_MIN_LINES_PER_SLOT = 4
#: The assumed number of answers at once if the actors choose it themselves.
_ASSUMED_PARALLEL = 16
#: The number of decimals that Ray accepts in a number of CPUs or GPUs.
_N_DECIMALS = 4
#: Time between checks for Ctrl-C, in seconds.
_CHECK_S = 0.2
#: Time limit for connecting to a cluster, in seconds.
_CONNECT_S = 10.0
#: The size of the object store if Ray is started here. Lines and results are small.
_STORE_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster, and the resources that each actor gets."""

    #: ``local``, ``auto`` or HOST:PORT.
    address: str
    #: The CPUs of an actor; None to divide those of the largest node among its actors.
    cpus_per_worker: float | None = None
    #: The GPUs of an actor; None for all GPUs of the node with the most.
    gpus_per_worker: float | None = None
    #: The time to wait until an actor starts.
    patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ActorJob:
    """Everything that an actor needs to answer lines. It can be pickled."""

    #: Loads the models on the actor's node.
    open_session: Callable[[], Session]
    prompting: Prompting
    #: The settings that affect the answers, written into each result.
    settings: Mapping[str, Any]
    #: The number of answers to generate at once; None for the fastest number.
    parallel: int | None
    #: The paths that each node must have, with their sizes in bytes.
    files: Mapping[str, int]


# --- where actors run -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of actors that a cluster has room for, and the resources of each."""

    n_actors: int
    #: The CPUs of an actor.
    cpus: float
    #: The GPUs of an actor.
    gpus: float


def place(
    nodes: Sequence[tuple[float, float]],
    cpus: float | None,
    gpus: float | None,
) -> Placement:
    """Place as many actors on a cluster as it has room for.

    Args:
        nodes: The CPUs and GPUs of each node.
        cpus: The CPUs of an actor; None for those of the largest node, divided by the number of
            actors that its GPUs allow.
        gpus: The GPUs of an actor; None for all GPUs of the node with the most.

    Raises:
        BackendError: If no node has room for an actor.
    """
    if gpus is None:
        gpus = max((node_gpus for _, node_gpus in nodes), default=0.0)
    if cpus is None:
        cpus = _default_cpus(nodes, gpus) or 1.0
    gpus = round(gpus, _N_DECIMALS)
    cpus = round(cpus, _N_DECIMALS)
    n_actors = sum(_n_fitting(node, cpus, gpus) for node in nodes)
    if not n_actors:
        kinds = sorted(set(nodes), reverse=True)
        available = "; ".join(f"{n_cpus:g} CPUs and {n_gpus:g} GPUs" for n_cpus, n_gpus in kinds)
        raise BackendError(
            f"no Ray node has {cpus:g} CPUs and {gpus:g} GPUs for an actor; "
            f"nodes have {available or 'none'}",
            hint="see --cpus-per-worker and --gpus-per-worker",
        )
    return Placement(n_actors, cpus, gpus)


def _default_cpus(nodes: Sequence[tuple[float, float]], gpus: float) -> float:
    """Return the CPUs for each actor on the largest node that has `gpus` GPUs; 0 if none has."""
    suitable_nodes = [node for node in nodes if node[1] >= gpus]
    node_cpus, node_gpus = max(suitable_nodes, default=(0.0, 0.0))
    if not gpus:
        return node_cpus
    n_actors = max(1, _n_shares(node_gpus, gpus))
    return node_cpus // n_actors


def _n_fitting(
    node: tuple[float, float],
    cpus: float,
    gpus: float,
) -> int:
    """Return the number of actors that a node has room for."""
    node_cpus, node_gpus = node
    n_actors = _n_shares(node_cpus, cpus)
    if gpus:
        n_actors = min(n_actors, _n_shares(node_gpus, gpus))
    return n_actors


def _n_shares(resource: float, share: float) -> int:
    """Return how often a share fits into a resource: 0.2 fits into 1 five times.

    `1 // 0.2` would be 4, since no float is exactly 0.2. Like Ray, it counts in the smallest units.
    """
    units: int = 10**_N_DECIMALS
    return round(resource * units) // max(1, round(share * units))


# --- the cluster ----------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(
    cluster: Cluster,
    *,
    verbose: bool,
    ray: Any = None,
) -> Iterator[Any]:
    """Yield the module of Ray, connected to a cluster.

    Args:
        cluster: The cluster.
        verbose: Whether Ray's messages go to standard error. Otherwise they are dropped.
        ray: Another module to use, already connected.

    Raises:
        BackendError: If no cluster answers at the address.
    """
    with contextlib.ExitStack() as stack:
        # Ray prints messages of its processes to standard output, whatever its log level is.
        sink = sys.stderr if verbose else stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(sink))
        ray = ray or _connect(cluster.address, verbose=verbose)
        stack.callback(ray.shutdown)
        yield ray


def _connect(address: str, *, verbose: bool) -> Any:
    """Import Ray and connect it to a cluster; raise `BackendError` if no cluster answers."""
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
            "`ray start --address` adds this machine, and --ray local uses this one alone; "
            "a cluster with a token needs RAY_AUTH_MODE=token on every machine",
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Raise `OSError` at once if nothing listens at an address. Ray itself would try for long."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


class RayBatch:
    """Runs a batch on a cluster.

    Args:
        ray: The module of Ray, from `connected`.
        cluster: The cluster.
        job: The job of each actor.
        write: Writes a result.

    Raises:
        BackendError: If the cluster has no room for an actor.
    """

    def __init__(
        self,
        ray: Any,
        cluster: Cluster,
        job: ActorJob,
        write: Write,
    ) -> None:
        self._ray = ray
        self._cluster = cluster
        self._job = job
        self._write = write
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in resources]
        self._placement = place(nodes, cluster.cpus_per_worker, cluster.gpus_per_worker)
        self.n_actors = self._placement.n_actors
        self.stats = BatchStats()
        self._n_lines = 0
        #: The lines that no actor has yet.
        self._portions: deque[Sequence[BatchLine]] = deque()
        #: The actors that load their models, by the Ray references of their calls of `ready`.
        self._starting: dict[Any, Any] = {}
        #: The actors that answer lines, by their streams of results.
        self._answering: dict[Any, Any] = {}
        #: The last counts of each stream.
        self._stats_by_stream: dict[Any, BatchStats] = {}
        #: The first line of the error of the actor that failed last.
        self._last_failure = ""

    @property
    def where(self) -> str:
        """The number of actors, in words for a summary."""
        return counted(self.n_actors, "Ray actor")

    def run(
        self,
        lines: Sequence[BatchLine],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generator[BatchStats, None, None]:
        """Have lines answered; yield the counts several times a second.

        Args:
            lines: The lines.
            interrupted: Returns whether to stop.

        Raises:
            BackendError: If no actor starts in time, or actors fail before all lines are answered.
            SpecgenError: If an actor cannot start, its error.
        """
        self._n_lines = len(lines)
        self.stats.n_lines = len(lines)
        self.n_actors = min(self.n_actors, len(lines))
        self._portions.extend(self._portions_of(lines))
        self._start_actors()
        last_active_s = time.monotonic()
        while self._may_have_results and not interrupted():
            references = [*self._answering, *self._starting]
            ready_references, _ = self._ray.wait(references, timeout=_CHECK_S)
            for reference in ready_references:
                if reference in self._starting:
                    self._take_started(reference)
                else:
                    self._take_results(reference)
            yield self.stats
            if self._answering:
                last_active_s = time.monotonic()
            elif time.monotonic() - last_active_s > self._cluster.patience_s:
                raise BackendError(
                    f"no actor has started within {self._cluster.patience_s:.0f} s",
                    hint="wait until CPUs or GPUs are free, or ask for fewer (--cpus-per-worker)",
                )
        n_left = len(lines) - self.stats.n_done
        if n_left and not interrupted():
            raise BackendError(
                f"{n_left} of {len(lines)} lines have no answer, since their actors ended: "
                f"{self._last_failure}",
                hint="run it again to answer them; --verbose shows what the actors print",
            )

    @property
    def _may_have_results(self) -> bool:
        """Whether results may still come."""
        return bool(self._answering) or bool(self._portions and self._starting)

    def _portions_of(self, lines: Sequence[BatchLine]) -> Iterator[Sequence[BatchLine]]:
        """Divide lines into portions, so that a fast actor can get more of them than a slow one."""
        n_per_actor = _divided_up(len(lines), max(1, self.n_actors))
        # With few lines, portions are smaller than this, so that each actor gets one.
        min_size = _MIN_LINES_PER_SLOT * (self._job.parallel or _ASSUMED_PARALLEL)
        size = min(n_per_actor, max(min_size, _divided_up(n_per_actor, _N_PORTIONS)))
        return (lines[start : start + size] for start in range(0, len(lines), size))

    def _start_actors(self) -> None:
        """Start all actors, which begin to load their models."""
        factory = self._ray.remote(Actor).options(
            num_cpus=self._placement.cpus,
            num_gpus=self._placement.gpus,
            scheduling_strategy="SPREAD",
        )
        for _ in range(self.n_actors):
            actor = factory.remote(self._job, __version__)
            self._starting[actor.ready.remote()] = actor

    def _take_started(self, ready_reference: Any) -> None:
        """Give the first lines to an actor that has started; raise its error if it cannot start."""
        try:
            self._ray.get(ready_reference)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # the actor's own exception
            if isinstance(cause, SpecgenError):
                raise cause from error
            reason = _first_line(error)
            if "No module named 'specgen'" in str(error):
                reason = "specgen is not installed on a Ray node"
            hint = "each node needs the same version of specgen"
            raise BackendError(f"an actor cannot start: {reason}", hint) from error
        self._give_lines(self._starting.pop(ready_reference))

    def _take_results(self, stream: Any) -> None:
        """Write the next results of an actor; if its portion is done, give it another one."""
        try:
            records, self._stats_by_stream[stream] = self._ray.get(next(stream))
        except StopIteration:
            self._give_lines(self._answering.pop(stream))
            return
        except self._ray.exceptions.RayError as error:
            del self._answering[stream]
            self._last_failure = _first_line(getattr(error, "cause", None) or error)
            return
        self.stats = _total(self._stats_by_stream.values())
        self.stats.n_lines = self._n_lines
        for record in records:
            self._write(record)

    def _give_lines(self, actor: Any) -> None:
        """Give an actor the next portion, if one is left."""
        if self._portions:
            answer = actor.answer.options(num_returns="streaming")
            self._answering[answer.remote(self._portions.popleft())] = actor


def _total(stats: Iterable[BatchStats]) -> BatchStats:
    """Add up counts, field by field."""
    columns = zip(*(astuple(counts) for counts in stats), strict=True)
    return BatchStats(*(sum(column) for column in columns))


def _divided_up(number: int, divisor: int) -> int:
    """Return a quotient, rounded up."""
    return -(-number // divisor)


# --- on the nodes ---------------------------------------------------------------------------------


class Actor:
    """The process that Ray runs on a node. It loads the models once, and then answers portions.

    Args:
        job: Everything that it needs.
        version: The version of specgen on the machine that runs the batch.
    """

    def __init__(self, job: ActorJob, version: str) -> None:
        self._job = job
        #: The error if it cannot answer, which `ready` raises.
        self._error: SpecgenError | None = None
        try:
            _check_node(job, version)
            self._session = job.open_session()
        except SpecgenError as error:
            message = f"the Ray node {socket.gethostname()}: {error.message}"
            self._error = type(error)(message, error.hint)

    def ready(self) -> None:
        """Return when lines can be answered; raise `SpecgenError` if they cannot be."""
        if self._error is not None:
            raise self._error

    def answer(
        self, lines: Sequence[BatchLine]
    ) -> Iterator[tuple[list[Mapping[str, Any]], BatchStats]]:
        """Answer lines; yield new results, each time with the counts of these lines so far."""
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
            if records:  # the run has added results
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
            node_bytes = path.stat().st_size
            if node_bytes == n_bytes:
                continue
            problem = f"{name} has {node_bytes} bytes there, but {n_bytes} on this machine"
        hint = "each node needs the models on its own disk, at the same paths"
        raise ModelFileError(problem, hint)


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
