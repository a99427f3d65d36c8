"""One pass of a batch over a Ray cluster, in a separate process. Only this module and `ray_actor` import Ray.

`specgen batch --ray` starts it as a child process. So Ray's logs stay out of the command's streams, and if
Ray fails in any way, written results stay and the command ends. It reads a pickled `RayJob` from standard
input, writes messages to standard output, a line of JSON each, and ends when its standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from specgen import __version__
from specgen.errors import BackendError, ModelFileError, SpecgenError, UsageError
from specgen.serving.batch.line_worker import N_AT_ONCE, WorkerJob
from specgen.serving.batch.lines import Line
from specgen.serving.batch.placement import Node, Placement, place
from specgen.serving.batch.ray_actor import REACH_S, Actor, ActorRegistry, look

#: Each line is a block of Ray Data, up to this number of blocks; of more lines, a block has several.
_MOST_BLOCKS = 10_000
#: Seconds for the nodes to report what they have, and between checks of the actors.
_PROBE_S, _LOOK_S = 60.0, 1.0
#: Seconds of silence, while actors load or have lines, after which a pass ends: the next pass uses others.
_SILENT_S = 30.0
#: Seconds for Ray to end.
_END_S = 4.0
#: The failures without an answer in between that are allowed, as a multiple of the number of actors.
_MOST_FAILURES = 3
#: The size of the object store if Ray is started here: lines and results are small.
_STORE_BYTES = 200_000_000

Emit = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RayJob:
    """The description of a pass.

    `address` is ``local``, ``auto`` or the address of a cluster. `n_attempts` counts, by custom_id, how often
    earlier passes began a line. `files` are paths that each node must have, with their sizes in bytes. A pass
    ends after `patience_s` seconds if no actor has started.
    """

    address: str
    worker: WorkerJob
    lines: tuple[Line, ...]
    n_attempts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    cpus_per_worker: float | None = None
    gpus_per_worker: float | None = None
    patience_s: float = 120.0


class Pass:
    """Gets the lines of a job answered; `emit` gets a message for each event."""

    def __init__(self, job: RayJob, emit: Emit) -> None:
        self._job = job
        self._emit = emit
        self._n_actors = 0
        self._n_starts_told = self._n_failures_told = 0
        #: Failures of actors up to the last answer.
        self._n_failures_before = 0
        self._nodes: dict[str, str] = {}

    def run(self) -> None:
        """Run the job. Raise `UsageError`, `BackendError`, `ModelFileError`, and every error of Ray."""
        ray = _connect(self._job.address)
        nodes = _nodes(ray)
        job = self._job
        placement = place(nodes, len(job.lines), job.cpus_per_worker, job.gpus_per_worker)
        self._n_actors = placement.n_actors
        self._nodes = {node.identity: node.name for node in placement.nodes}
        self._emit({"kind": "placed", **_said(placement)})
        self._probe(ray, placement)
        here = ray.get_runtime_context().get_node_id()
        desk = (
            ray.remote(ActorRegistry)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=_on_node(here))
            .remote(dict(job.n_attempts))
        )
        results: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_collect, args=(job, placement, desk, results), daemon=True).start()
        self._follow(ray, desk, results)
        state = _state(ray, desk)
        self._tell(ray, state)
        self._emit({"kind": "end", "n_attempts": state["n_attempts"] if state else {}})

    def _probe(self, ray: Any, placement: Placement) -> None:
        """Check that the nodes have what an actor needs."""
        job = self._job
        asked = ray.remote(look)
        refs = {
            asked.options(
                num_cpus=0, max_retries=0, scheduling_strategy=_on_node(node.identity)
            ).remote(list(job.files)): node
            for node in placement.nodes
        }
        ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=_PROBE_S)
        if late:
            names = ", ".join(refs[ref].name for ref in late[:3])
            raise BackendError(f"the Ray node {names} has not answered within {_PROBE_S:.0f} s")
        for ref in ready:
            _check_node(refs[ref].name, _found(ray, ref, refs[ref].name), job.files)

    def _follow(self, ray: Any, desk: Any, results: SimpleQueue[Any]) -> None:
        """Pass results on until all are there, or all actors are silent."""
        heard = looked = time.monotonic()
        while True:
            try:
                found = results.get(timeout=_LOOK_S)
            except Empty:
                found = ()
            if found is None:
                return
            if isinstance(found, BaseException):
                self._tell(ray, _state(ray, desk), is_end=True)
                raise found
            for raw in found:
                self._emit({"kind": "result", **json.loads(raw)})
            now = time.monotonic()
            if found:
                heard, self._n_failures_before = now, self._n_failures_told
            if now - looked < _LOOK_S:
                continue
            looked = now
            state = _state(ray, desk)
            self._tell(ray, state)
            if state is not None and state["silent_s"] is not None:
                heard = max(heard, now - state["silent_s"])
            if self._is_silent(ray, now - heard, state["n_ready"] if state else 1):
                return

    def _is_silent(self, ray: Any, silent_s: float, n_ready: int) -> bool:
        if n_ready == 0:
            if silent_s > self._job.patience_s:
                raise BackendError(
                    f"no actor has started within {silent_s:.0f} s: {_free(ray)}",
                    hint="wait until the cluster has free CPUs or GPUs, or ask for fewer with "
                    "--cpus-per-worker and --gpus-per-worker",
                )
            return False
        if silent_s <= _SILENT_S:
            return False
        self._note(
            f"no actor with open lines has reported for {silent_s:.0f} s: others get the lines"
        )
        return True

    def _tell(self, ray: Any, state: Mapping[str, Any] | None, *, is_end: bool = False) -> None:
        """Report actors and nodes that come and go. Raise the last actor's error if actors do nothing but
        fail."""
        alive = {node.identity: node.name for node in _nodes(ray)}
        for identity in self._nodes.keys() - alive.keys():
            self._note(f"the Ray node {self._nodes.pop(identity)} is gone; others get its lines")
        if state is None:
            return
        starts, failures = state["starts"], state["failures"]
        for node, _, message, _ in failures[self._n_failures_told :]:
            self._note(f"an actor on {node} has failed: {message}")
        for node in starts[max(self._n_actors, self._n_starts_told) :]:
            self._note(f"an actor is started again, on {node}")
        self._n_starts_told, self._n_failures_told = len(starts), len(failures)
        n_failures = len(failures) - self._n_failures_before
        if n_failures > (0 if is_end else _MOST_FAILURES * self._n_actors):
            node, kind, message, hint = failures[-1]
            raise _error(kind, f"the Ray node {node}: {message}", hint)

    def _note(self, text: str) -> None:
        self._emit({"kind": "note", "text": text})


def _collect(job: RayJob, placement: Placement, desk: Any, results: SimpleQueue[Any]) -> None:
    """Put the results of Ray Data into the queue, a block at a time; None at the end, and an exception if
    there is one."""
    try:
        from ray import data

        context = data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        # Another actor gets the lines of one that fails; lines without a result are asked again.
        context.max_errored_blocks = -1
        context.max_consecutive_actor_init_deaths = placement.n_actors
        n_blocks = min(len(job.lines), _MOST_BLOCKS)
        n_lines = -(-len(job.lines) // n_blocks)
        n_at_once = min(job.worker.parallel or N_AT_ONCE, -(-len(job.lines) // placement.n_actors))
        n_calls = n_at_once if n_lines == 1 else -(-n_at_once // n_lines) + 1
        rows = [{"line": pickle.dumps(line)} for line in job.lines]
        dataset = data.from_items(rows, override_num_blocks=n_blocks).map_batches(
            Actor,
            fn_constructor_args=(job.worker, desk),
            batch_size=None,
            num_cpus=placement.cpus,
            num_gpus=placement.gpus or None,
            compute=data.ActorPoolStrategy(
                size=placement.n_actors,
                max_tasks_in_flight_per_actor=n_calls,
                max_concurrent_calls_per_actor=n_calls,
                enable_true_multi_threading=True,
            ),
        )
        for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
            results.put([bytes(raw) for raw in batch["result"]])
        results.put(None)
    except BaseException as error:  # noqa: BLE001 - the main thread waits for it
        results.put(error)


def _connect(address: str) -> Any:
    """Connect to Ray. Raise `UsageError` if it is not installed, `BackendError` if nothing responds."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError(
            f"--ray needs {error.name}, which is not installed", hint="pip install 'specgen[ray]'"
        ) from error
    if address == "local":
        ray.init("local", include_dashboard=False, object_store_memory=_STORE_BYTES)
        return ray
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if named.rpartition(":")[2].isdigit():
        _reach(named)
    try:
        ray.init(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "auto":
            raise BackendError(
                "no Ray cluster runs on this machine, and RAY_ADDRESS names none",
                hint="`ray start --head` starts one; --ray local uses this machine alone",
            ) from error
        raise BackendError(
            f"--ray {address}: {_first_line(error)}",
            hint="run the command on a machine of the cluster; `ray start --address` adds this one",
        ) from error
    return ray


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else _first_line(error)
        raise BackendError(
            f"--ray {address}: no Ray cluster answers there: {reason}",
            hint="`ray start --head` prints its address",
        ) from error


def _nodes(ray: Any) -> list[Node]:
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            name = node["NodeManagerAddress"]
            found.append(Node(node["NodeID"], name, has.get("CPU", 0.0), has.get("GPU", 0.0)))
    return found


def _said(placement: Placement) -> dict[str, Any]:
    return {
        "n_actors": placement.n_actors,
        "n_nodes": len(placement.nodes),
        "cpus": placement.cpus,
        "gpus": placement.gpus,
        "notes": placement.notes,
    }


def _on_node(identity: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(identity, soft=False)


def _found(ray: Any, ref: Any, name: str) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = ray.get(ref)
    except Exception as error:
        if "No module named 'specgen'" in str(error):
            raise BackendError(
                f"specgen is not installed on the Ray node {name}",
                hint="install the same version on each node",
            ) from error
        raise BackendError(f"the Ray node {name}: {_first_line(error)}") from error
    return found


def _check_node(name: str, found: Mapping[str, Any], files: Mapping[str, int]) -> None:
    if found["version"] != __version__:
        raise BackendError(
            f"the Ray node {name} has specgen {found['version']}, this machine {__version__}",
            hint="install the same version on each node",
        )
    for path, n_bytes in files.items():
        size = found["sizes"][path]
        if size is None:
            raise ModelFileError(
                f"the Ray node {name} has no file {path}",
                hint="each node reads the models from its own disk: put them at the same path on each",
            )
        if size != n_bytes:
            raise ModelFileError(
                f"{path} has {size} bytes on the Ray node {name}, but {n_bytes} on this machine",
                hint="put the same file on each node",
            )


def _state(ray: Any, desk: Any) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = ray.get(desk.state.remote(), timeout=REACH_S)
    except ray.exceptions.RayError:
        return None
    return state


def _free(ray: Any) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [
        f"{free.get(kind, 0.0):g} of {total[kind]:g} {kind}s"
        for kind in ("CPU", "GPU")
        if kind in total
    ]
    return f"{' and '.join(parts) or 'none of its CPUs'} are free"


def _error(kind: str, message: str, hint: str | None) -> SpecgenError:
    import specgen.errors

    found = getattr(specgen.errors, kind, BackendError)
    error: SpecgenError = found(message, hint)
    return error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


_ending = threading.Lock()


def _end() -> NoReturn:
    """End this process, the processes of Ray that it started, and its actors, within a bounded time."""
    with _ending:
        threading.Timer(_END_S, os._exit, (0,)).start()
        with contextlib.suppress(Exception):
            import ray

            ray.shutdown()
        os._exit(0)


def _end_with_parent() -> None:
    """End when the parent has gone or closed the pipe, whatever Ray is doing."""
    while sys.stdin.buffer.read(4096):
        pass
    _end()


def main() -> None:
    """Run a pass."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that Ray's output does not mix with messages
    lock = threading.Lock()

    def emit(message: Mapping[str, Any]) -> None:
        with lock:
            out.write(json.dumps(message).encode() + b"\n")
            out.flush()

    job: RayJob = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        Pass(job, emit).run()
    except SpecgenError as error:
        emit(
            {
                "kind": "error",
                "class": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
            }
        )
    except Exception as error:  # noqa: BLE001 - Ray's: --verbose shows its traceback
        traceback.print_exc()
        emit(
            {
                "kind": "error",
                "class": "BackendError",
                "message": f"Ray: {_first_line(error)}",
                "hint": None,
            }
        )
    out.close()
    _end()
