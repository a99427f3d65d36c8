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
from specgen.batch.line_worker import Answered, LineWorker, WorkerJob
from specgen.batch.lines import Line, LineError
from specgen.batch.results import result_of
from specgen.errors import SpecgenError

#: So often a line may be begun and not come back before it is an error: it may be what ends the actors.
MOST_ATTEMPTS = 5
#: A line that was begun so often before is answered alone: nobody else's line is lost with it.
_N_TOGETHER = 2
#: Seconds to reach somebody, and between beats of an actor.
REACH_S, _BEAT_S = 10.0, 2.0
#: Exit code of an actor whose engine has failed; Ray starts another one.
_FAILED = 70


class Desk:
    """An actor beside the driver: knows which actors live, what they have begun, and why one ended."""

    def __init__(self, n_attempts: Mapping[str, int]) -> None:
        self._n_attempts = dict(n_attempts)
        self._seen: dict[str, tuple[float, bool, int]] = {}
        self._n_ready = 0
        self._starts: list[str] = []
        self._failures: list[tuple[str, str, str, str | None]] = []

    def n_attempts(self, custom_ids: Sequence[str]) -> list[int]:
        """How often these lines were begun."""
        return [self._n_attempts.get(custom_id, 0) for custom_id in custom_ids]

    def begin(self, custom_ids: Sequence[str]) -> None:
        """Count an attempt at these lines."""
        for custom_id in custom_ids:
            self._n_attempts[custom_id] = self._n_attempts.get(custom_id, 0) + 1

    def beat(self, actor: str, node: str, is_ready: bool, n_lines: int) -> None:
        """An actor lives, and is loading, or has so many lines in its hands."""
        before = self._seen.get(actor)
        if before is None:
            self._starts.append(node)
        if is_ready and (before is None or not before[1]):
            self._n_ready += 1
        self._seen[actor] = (time.monotonic(), is_ready, n_lines)

    def fail(self, node: str, kind: str, message: str, hint: str | None) -> None:
        """An actor cannot start, or has ended, with an error of this class."""
        self._failures.append((node, kind, message, hint))

    def state(self) -> dict[str, Any]:
        """What there is to know: how long ago an actor was heard that had something to do (seconds;
        None: never), how many have ever been ready, on which nodes they started, and what has failed."""
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
    """What Ray Data runs: one on a node, or several; loads the models once."""

    def __init__(self, job: WorkerJob, desk: Any) -> None:
        import ray

        self._desk, self._settings = desk, job.settings
        self._name = uuid.uuid4().hex
        self._node = _name_of(ray.get_runtime_context().get_node_id())
        self._worker: LineWorker | None = None
        self._beat()  # before anything else that the desk hears
        threading.Thread(target=self._go_on_beating, daemon=True).start()
        try:
            start = partial(self._ask_desk, "begin")
            self._worker = LineWorker(job, self._end, start).__enter__()
        except SpecgenError as error:
            failure = (self._node, type(error).__name__, error.message, error.hint)
            ray.get(desk.fail.remote(*failure), timeout=REACH_S)
            raise

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """Answer the lines of a block, pickled ones, beside those of other blocks: results as JSON."""
        assert self._worker is not None
        lines: list[Line] = [pickle.loads(raw) for raw in batch["line"]]  # noqa: S301 - our own
        replies: list[Any] = []
        before = self._ask_desk("n_attempts", lines) or [0] * len(lines)
        for line, n in zip(lines, before, strict=True):
            if n >= MOST_ATTEMPTS:
                replies.append(self._given_up(line, n))
            else:
                replies.append(self._worker.ask(line, alone=n >= _N_TOGETHER))
        answers = [each if isinstance(each, Answered) else each.result() for each in replies]
        return {"result": [json.dumps(asdict(answer)).encode() for answer in answers]}

    def _ask_desk(self, question: str, lines: Sequence[Line]) -> Any:
        """What the desk says to a question about lines; None while it is being started again."""
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
        """The engine has failed: another process may do better, and Ray starts one."""
        import ray

        with contextlib.suppress(Exception):
            failure = (self._node, "BackendError", message, None)
            ray.get(self._desk.fail.remote(*failure), timeout=REACH_S)
        os._exit(_FAILED)


def look(paths: Sequence[str]) -> dict[str, Any]:
    """What a node has: the version of specgen, and the sizes of files in bytes (None: no such file)."""
    return {"version": __version__, "sizes": {path: n_bytes_of(Path(path)) for path in paths}}


def n_bytes_of(path: Path) -> int | None:
    """The size of a file, 0 for a folder, and None for what is not there."""
    try:
        return 0 if path.is_dir() else path.stat().st_size
    except OSError:
        return None


def _name_of(identity: str) -> str:
    """A node as people know it: its address, and the beginning of its id."""
    import ray

    address = ray.util.get_node_ip_address()
    return f"{address} ({identity[:6]})"


__all__ = ["MOST_ATTEMPTS", "REACH_S", "Actor", "Desk", "look", "n_bytes_of"]
