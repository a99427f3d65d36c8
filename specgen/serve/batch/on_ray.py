"""Lines of a batch answered by actors of a Ray cluster.

Ray places the actors, starts them again when they die, and retries their lines. This module gives lines to
actors and writes the results, so a batch resumes from its results file wherever it began. It alone imports
Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from specgen import __version__
from specgen.errors import BackendError, ModelFileError, SpecgenError
from specgen.serve.batch.line_worker import N_AT_ONCE, Answered, LineWorker, WorkerJob
from specgen.serve.batch.lines import Line, LineError
from specgen.serve.batch.results import Results, result_of
from specgen.serve.batch.runner import Tally

#: How often Ray retries a line whose actor died. Then the line is asked once more, without others beside it,
#: and retried as often: it may be what ends the actors.
_N_RETRIES = 2
#: The number of windows of lines that may be lost in a row before the batch is given up.
_MOST_LOST = 4
#: Seconds: between checks for Ctrl-C, between checks of the nodes, and to reach a cluster.
_LOOK_S, NODES_S, _REACH_S = 0.2, 2.0, 10.0
#: The size of the object store if Ray is started here: lines and results are small.
_STORE_BYTES = 200_000_000
#: Exit code of an actor whose engine has failed; Ray starts another one.
_FAILED = 70


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster, and the CPUs and GPUs of an actor there; None takes those of the largest node.

    `address` is ``local``, ``auto`` or HOST:PORT. A batch ends after `patience_s` seconds without a started
    actor.
    """

    address: str
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster, and all of its CPUs and GPUs."""

    identity: str
    address: str
    n_cpus: float
    n_gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of actors that a cluster has room for, and the CPUs and GPUs of each."""

    n_actors: int
    cpus: float
    gpus: float


def place(nodes: Sequence[Node], cpus: float | None, gpus: float | None) -> Placement:
    """Return how many actors with `cpus` CPUs and `gpus` GPUs the nodes have room for.

    None takes all that the largest node has, so that each node of its size has one actor; if `gpus` is given,
    None divides the CPUs among that node's actors. Raise `BackendError` if no node has room.
    """
    if gpus is None:
        gpus = max((node.n_gpus for node in nodes), default=0.0)
    if cpus is None:
        able = [node for node in nodes if node.n_gpus >= gpus]
        largest = max(able, key=lambda node: node.n_cpus, default=Node("", "", 0.0))
        n_beside = max(1, int(largest.n_gpus // gpus)) if gpus else 1
        cpus = largest.n_cpus if n_beside == 1 else largest.n_cpus // n_beside
    wanted = cpus or 1.0, gpus
    n_actors = sum(
        int(min(node.n_cpus // wanted[0], node.n_gpus // gpus if gpus else float("inf")))
        for node in nodes
    )
    if not n_actors:
        most = max(((node.n_cpus, node.n_gpus) for node in nodes), default=(0.0, 0.0))
        raise BackendError(
            f"no Ray node has {_resources(*wanted)}: the largest has {_resources(*most)}",
            hint="see --cpus-per-worker and --gpus-per-worker",
        )
    return Placement(n_actors, *wanted)


class RayBatch:
    """Gets the lines of a batch answered by a cluster. Use it as a context manager: it connects at the start,
    and the actors end with it.

    `files` are paths that each node must have, with their sizes in bytes. `note` gets a sentence when a node
    goes or an actor is started again. With `verbose`, Ray's output goes to standard error. `ray` replaces the
    module in tests.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: WorkerJob,
        results: Results,
        *,
        files: Mapping[str, int] | None = None,
        note: Callable[[str], None] = lambda _text: None,
        verbose: bool = False,
        ray: Any = None,
    ) -> None:
        self._cluster, self._job, self._results = cluster, job, results
        self._files, self._note = dict(files or {}), note
        self._verbose = verbose
        self._ray = ray
        self.tally = Tally()
        self.n_actors = 0
        self._nodes: dict[str, Node] = {}
        self._placement = Placement(0, 0.0, 0.0)
        self._actors: list[Any] = []
        self._looked_s = 0.0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RayBatch:
        """Raise `BackendError` if the cluster cannot be reached, or has no room for an actor."""
        with contextlib.ExitStack() as stack:
            # Ray prints messages of its processes to standard output, whatever it is asked to log.
            sink = sys.stderr if self._verbose else stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(sink))
            if self._ray is None:
                self._ray = _connect(self._cluster.address, verbose=self._verbose)
            stack.callback(self._ray.shutdown)
            self._nodes = self._alive()
            self._placement = self._place()
            self._stack = stack.pop_all()
        return self

    def _place(self) -> Placement:
        cluster, nodes = self._cluster, list(self._nodes.values())
        placement = place(nodes, cluster.cpus_per_worker, cluster.gpus_per_worker)
        idle = [
            node.address
            for node in nodes
            if node.n_cpus and (node.n_cpus < placement.cpus or node.n_gpus < placement.gpus)
        ]
        if idle:
            self._note(
                f"{', '.join(idle[:3])}{' and others' if len(idle) > 3 else ''}: fewer than "
                f"{_resources(placement.cpus, placement.gpus)}, so no actor there; --cpus-per-worker asks "
                "for fewer"
            )
        return placement

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(
        self,
        lines: Sequence[Line],
        interrupted: Callable[[], bool] = lambda: False,
        report: Callable[[Tally], None] = lambda _tally: None,
    ) -> None:
        """Get the lines answered. After an interruption, unfinished answers are dropped; a later run asks for
        them again. Raise `BackendError`, `ModelFileError` and `OutputError`."""
        self.tally.n_lines = len(lines)
        readable: list[Line] = []
        for line in lines:
            if isinstance(line.request, LineError):
                self._fail(line, line.request)
            else:
                readable.append(line)
        if not readable:
            return
        self.n_actors = min(self._placement.n_actors, len(readable))
        n_at_once = min(self._job.parallel or N_AT_ONCE, -(-len(readable) // self.n_actors))
        options = {
            "num_cpus": self._placement.cpus,
            "num_gpus": self._placement.gpus,
            "max_restarts": -1,
            "max_task_retries": _N_RETRIES,
            "max_concurrency": n_at_once,
            "scheduling_strategy": "SPREAD",
        }
        actor = self._ray.remote(Actor).options(**options)
        self._actors = [
            actor.remote(self._job, self._files, __version__) for _ in range(self.n_actors)
        ]
        lost = self._answer(readable, n_at_once, interrupted, report)
        for line in self._answer(lost, 1, interrupted, report):
            n_attempts = 2 * (_N_RETRIES + 1)
            message = f"given up after {n_attempts} attempts: each time the actor ended before it had answered"
            self._fail(line, LineError("failed", message))
            report(self.tally)

    def _answer(
        self,
        lines: Sequence[Line],
        n_at_once: int,
        interrupted: Callable[[], bool],
        report: Callable[[Tally], None],
    ) -> list[Line]:
        """Give each actor `n_at_once` lines at a time; return those that Ray could get no answer to. An actor
        that is not needed any more ends, so that one of a lost node can start in its place."""
        ray, waiting, lost = self._ray, deque(lines), list[Line]()
        n_lost_in_row, began_s = 0, time.monotonic()
        starting = {actor.ready.remote(): actor for actor in self._actors} if waiting else {}
        running: dict[Any, tuple[Any, Line]] = {}
        free: deque[Any] = deque()
        restarted: set[str] = set()
        while (waiting or running) and not interrupted():
            while waiting and free:
                actor, line = free.popleft(), waiting.popleft()
                running[actor.answer.remote(line)] = actor, line
            done, _ = ray.wait([*running, *starting], timeout=_LOOK_S)
            for ref in done:
                if ref in starting:
                    self._check_started(ref)
                    free.extend([starting.pop(ref)] * n_at_once)
                    continue
                actor, line = running.pop(ref)
                free.append(actor)
                try:
                    where, answered = ray.get(ref)
                except ray.exceptions.RayError:
                    lost.append(line)
                    n_lost_in_row += 1
                    continue
                n_lost_in_row = 0
                self._take(answered)
                if where and where not in restarted:
                    restarted.add(where)
                    self._note(f"an actor was started again, on {where}")
            if done and not waiting:
                self._release(free, [actor for actor, _ in running.values()])
            report(self.tally)
            if n_lost_in_row >= _MOST_LOST * n_at_once * len(self._actors):
                raise BackendError(
                    f"the last {n_lost_in_row} lines have no answer: their actors ended",
                    hint="--verbose shows what the actors print",
                )
            self._look(0.0 if free or running else time.monotonic() - began_s)
        return lost

    def _check_started(self, ref: Any) -> None:
        """Raise the error of an actor that could not start."""
        try:
            self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, SpecgenError):
                raise cause from error
            is_missing = "No module named 'specgen'" in str(error)
            what = "specgen is not installed on a Ray node" if is_missing else _first_line(error)
            raise BackendError(
                f"an actor cannot start: {what}", hint="each node needs the same version of specgen"
            ) from error

    def _release(self, free: Collection[Any], busy: Collection[Any]) -> None:
        """End the actors that have started and have no lines, but not the last one."""
        idle = [actor for actor in self._actors if actor in free and actor not in busy]
        for actor in idle[: len(self._actors) - 1]:
            self._actors.remove(actor)
            self._ray.kill(actor)

    def _look(self, silent_s: float) -> None:
        """Note nodes that are gone. Raise `BackendError` if no actor starts, or none has room any more."""
        now = time.monotonic()
        if now - self._looked_s < NODES_S:
            return
        self._looked_s, before, self._nodes = now, self._nodes, self._alive()
        for identity in before.keys() - self._nodes.keys():
            self._note(f"the Ray node {before[identity].address} is gone; others get its lines")
        if before.keys() != self._nodes.keys():
            place(list(self._nodes.values()), self._placement.cpus, self._placement.gpus)
        if silent_s > self._cluster.patience_s:
            total, free = self._ray.cluster_resources(), self._ray.available_resources()
            raise BackendError(
                f"no actor has started within {silent_s:.0f} s: {free.get('CPU', 0.0):g} of "
                f"{total.get('CPU', 0.0):g} CPUs are free",
                hint="wait until the cluster has free CPUs or GPUs, or ask for fewer with "
                "--cpus-per-worker and --gpus-per-worker",
            )

    def _alive(self) -> dict[str, Node]:
        found = {}
        for node in self._ray.nodes():
            if node["Alive"]:
                identity, has = node["NodeID"], node["Resources"]
                address = node["NodeManagerAddress"]
                found[identity] = Node(identity, address, has.get("CPU", 0.0), has.get("GPU", 0.0))
        return found

    def _take(self, answered: Answered) -> None:
        self.tally.n_drafted += answered.n_drafted
        self.tally.n_accepted += answered.n_accepted
        self.tally.n_cached_tokens += answered.n_cached_tokens
        if answered.record["error"] is not None:
            self.tally.n_errors += 1
        else:
            usage = answered.record["response"]["body"]["usage"]
            self.tally.n_answers += 1
            self.tally.n_tokens += usage["completion_tokens"]
            self.tally.n_prompt_tokens += usage["prompt_tokens"]
        self._results.write(answered.record)

    def _fail(self, line: Line, error: LineError) -> None:
        self._take(Answered(result_of(line, self._job.settings, None, error)))


class Actor:
    """The actor that Ray runs, one or several on a node; it loads the models once."""

    def __init__(self, job: WorkerJob, files: Mapping[str, int], version: str) -> None:
        import ray

        context = ray.get_runtime_context()
        node = ray.util.get_node_ip_address()
        #: The node and the process, if Ray has started this actor again.
        self._where = (
            f"{node} (process {os.getpid()})" if context.was_current_actor_reconstructed else ""
        )
        self._error: SpecgenError | None = None
        try:
            _check_node(files, version)
            # An actor whose engine fails ends: Ray starts another one, which may do better.
            self._worker = LineWorker(job, lambda _message: os._exit(_FAILED)).__enter__()
        except SpecgenError as error:
            self._error = type(error)(f"the Ray node {node}: {error.message}", error.hint)

    def ready(self) -> None:
        """Return when the models are loaded. Raise the error with which they could not be."""
        if self._error is not None:
            raise self._error

    def answer(self, line: Line) -> tuple[str, Answered]:
        """Answer a line beside others; return also where, if this actor was started again."""
        self.ready()
        return self._where, self._worker.ask(line).result()


def _check_node(files: Mapping[str, int], version: str) -> None:
    """Check that a node has what an actor needs. Raise `BackendError` and `ModelFileError`."""
    if version != __version__:
        raise BackendError(
            f"specgen {__version__} is installed there, and {version} on this machine",
            hint="install the same version on each node",
        )
    for path, n_bytes in files.items():
        found = n_bytes_of(Path(path))
        if found is None:
            raise ModelFileError(
                f"there is no file {path}",
                hint="each node reads the models from its own disk: put them at the same path on each",
            )
        if found != n_bytes:
            raise ModelFileError(
                f"{path} has {found} bytes there, but {n_bytes} on this machine",
                hint="put the same file on each node",
            )


def n_bytes_of(path: Path) -> int | None:
    """Return the size of a file, 0 for a folder, and None if the path does not exist."""
    try:
        return 0 if path.is_dir() else path.stat().st_size
    except OSError:
        return None


def _connect(address: str, *, verbose: bool) -> Any:
    """Connect to Ray. Raise `BackendError` if nothing responds."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports nothing to others
    import ray

    quiet: dict[str, Any] = {} if verbose else {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address == "local":
        ray.init("local", include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
        return ray
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = named.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        if address == "auto":
            raise BackendError(
                "no Ray cluster runs on this machine, and RAY_ADDRESS names none",
                hint="`ray start --head` starts one; --ray local uses this machine alone",
            ) from error
        raise BackendError(
            f"--ray {address}: no Ray cluster answers there: {_first_line(error)}",
            hint="run the command on a machine of the cluster; `ray start --address` adds this one",
        ) from error
    return ray


def _resources(cpus: float, gpus: float) -> str:
    text = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    return text if not gpus else f"{text} and {gpus:g} GPU{'' if gpus == 1 else 's'}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
