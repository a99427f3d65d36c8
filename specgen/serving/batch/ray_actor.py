"""The Ray actors: one answers lines, and one keeps track of the others."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from specgen import __version__
from specgen.errors import SpecgenError
from specgen.serving.batch.line_worker import Answered, LineWorker, WorkerJob
from specgen.serving.batch.lines import Line, LineError
from specgen.serving.batch.results import result_of

#: The number of attempts without a result after which a line is an error: the line may be what ends the
#: actors.
MOST_ATTEMPTS = 5
#: A line with this many earlier attempts is answered alone, so that no other line is lost with it.
N_TOGETHER = 2
#: Seconds to reach another actor, and between heartbeats of an actor.
REACH_S, _BEAT_S = 10.0, 2.0
#: Exit code of an actor whose engine has failed; Ray starts another one.
_FAILED = 70


class ActorRegistry:
    """An actor beside the driver. It records which actors live, what they have begun, and why one ended."""

    def __init__(self, n_attempts: Mapping[str, int]) -> None:
        self._n_attempts = dict(n_attempts)
        self._seen: dict[str, tuple[float, bool, int]] = {}
        self._n_ready = 0
        self._starts: list[str] = []
        self._failures: list[tuple[str, str, str, str | None]] = []

    def n_attempts(self, custom_ids: Sequence[str]) -> list[int]:
        """Return how often each of these lines was begun."""
        return [self._n_attempts.get(custom_id, 0) for custom_id in custom_ids]

    def begin(self, custom_ids: Sequence[str]) -> None:
        """Count an attempt at these lines."""
        for custom_id in custom_ids:
            self._n_attempts[custom_id] = self._n_attempts.get(custom_id, 0) + 1

    def beat(self, actor: str, node: str, is_ready: bool, n_lines: int) -> None:
        """Record a heartbeat: the actor is loading, or has `n_lines` unfinished lines."""
        before = self._seen.get(actor)
        if before is None:
            self._starts.append(node)
        if is_ready and (before is None or not before[1]):
            self._n_ready += 1
        self._seen[actor] = (time.monotonic(), is_ready, n_lines)

    def fail(self, node: str, kind: str, message: str, hint: str | None) -> None:
        """Record that an actor cannot start or has ended, with an error of the class `kind`."""
        self._failures.append((node, kind, message, hint))

    def state(self) -> dict[str, Any]:
        """Return the state: the seconds since the last heartbeat of an actor with something to do (None:
        never), how many actors have ever been ready, the nodes on which they started, and the failures."""
        now = time.monotonic()
        busy = [now - at for at, is_ready, n in self._seen.values() if n or not is_ready]
        return {
            "silent_s": min(busy, default=None),
            "n_ready": self._n_ready,
            "starts": self._starts,
            "failures": self._failures,
            "n_attempts": self._n_attempts,
        }


class Actor:
    """The actor that Ray Data runs, one or several on a node; it loads the models once."""

    def __init__(self, job: WorkerJob, desk: Any) -> None:
        import ray

        self._desk, self._settings = desk, job.settings
        self._name = uuid.uuid4().hex
        self._node = _name_of(ray.get_runtime_context().get_node_id())
        self._worker: LineWorker | None = None
        self._beat()  # before any other call to the desk
        threading.Thread(target=self._go_on_beating, daemon=True).start()
        try:
            start = partial(self._ask_desk, "begin")
            self._worker = LineWorker(job, self._end, start).__enter__()
        except SpecgenError as error:
            failure = (self._node, type(error).__name__, error.message, error.hint)
            ray.get(desk.fail.remote(*failure), timeout=REACH_S)
            raise

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """Answer the pickled lines of a block, beside those of other blocks; return the results as JSON."""
        assert self._worker is not None
        lines: list[Line] = [pickle.loads(raw) for raw in batch["line"]]  # noqa: S301 - our own
        replies: list[Any] = []
        before = self._ask_desk("n_attempts", lines) or [0] * len(lines)
        for line, n in zip(lines, before, strict=True):
            if n >= MOST_ATTEMPTS:
                replies.append(self._given_up(line, n))
            else:
                replies.append(self._worker.ask(line, alone=n >= N_TOGETHER))
        answers = [each if isinstance(each, Answered) else each.result() for each in replies]
        return {"result": [json.dumps(asdict(answer)).encode() for answer in answers]}

    def _ask_desk(self, question: str, lines: Sequence[Line]) -> Any:
        """Return the desk's reply to a question about lines; None while the desk is restarted."""
        import ray

        custom_ids = [line.custom_id for line in lines]
        try:
            return ray.get(getattr(self._desk, question).remote(custom_ids), timeout=REACH_S)
        except ray.exceptions.RayError:
            return None

    def _given_up(self, line: Line, n: int) -> Answered:
        message = f"given up after {n} attempts: each actor that tried ended before it had answered"
        return Answered(result_of(line, self._settings, None, LineError("failed", message)))

    def _go_on_beating(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            self._beat()

    def _beat(self) -> None:
        worker = self._worker
        with contextlib.suppress(Exception):  # the desk is being started again
            n_open = 0 if worker is None else worker.n_open
            self._desk.beat.remote(self._name, self._node, worker is not None, n_open)

    def _end(self, message: str) -> None:
        """End this process, since its engine has failed: Ray starts another one, which may do better."""
        import ray

        with contextlib.suppress(Exception):
            failure = (self._node, "BackendError", message, None)
            ray.get(self._desk.fail.remote(*failure), timeout=REACH_S)
        os._exit(_FAILED)


def look(paths: Sequence[str]) -> dict[str, Any]:
    """Return the version of specgen on a node, and the sizes of files in bytes (None: no such file)."""
    return {"version": __version__, "sizes": {path: n_bytes_of(Path(path)) for path in paths}}


def n_bytes_of(path: Path) -> int | None:
    """Return the size of a file, 0 for a folder, and None if the path does not exist."""
    try:
        return 0 if path.is_dir() else path.stat().st_size
    except OSError:
        return None


def _name_of(identity: str) -> str:
    """Return a node's name for people: its address, and the beginning of its id."""
    import ray

    address = ray.util.get_node_ip_address()
    return f"{address} ({identity[:6]})"


__all__ = ["MOST_ATTEMPTS", "REACH_S", "Actor", "ActorRegistry", "look", "n_bytes_of"]
