"""Answers lines of a batch for any number of threads, with one engine that stays loaded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from specgen.errors import BackendError
from specgen.serve.batch.lines import Line
from specgen.serve.batch.runner import Batch, Prompting, Tally, Task
from specgen.session.engine import Engine
from specgen.session.loaded_models import Models
from specgen.session.measurements import fastest_parallel

#: The number of lines that are taken at once if `parallel` is not given.
N_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The settings of a worker. It can be pickled if `open_session` can.

    `parallel` is the number of answers generated at once; None takes the fastest number by measurement.
    `largest` has the lines that probably need most room: the caches are made large enough for them.
    """

    open_session: Callable[[], Models]
    prompting: Prompting
    settings: Mapping[str, Any]
    parallel: int | None
    largest: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """A result as it is written, and the counts of its drafts and of the prefix cache."""

    record: Mapping[str, Any]
    n_drafted: int = 0
    n_accepted: int = 0
    n_cached_tokens: int = 0


class LineWorker:
    """Answers lines in a separate thread. Use it as a context manager.

    The results are those of `Batch`. A line that needs larger caches waits until no answer is in the
    caches, and they are made again. Raises what opening the models raises.
    """

    def __init__(self, job: WorkerJob, on_failure: Callable[[str], None]) -> None:
        """Start the thread. There, `on_failure` gets the error that ended it; no line is answered after
        that."""
        self._on_failure = on_failure
        self._parallel = job.parallel
        self._changed = threading.Condition()
        self._incoming: deque[Line] = deque()
        self._too_large: deque[Task] = deque()
        self._replies: dict[str, Future[Answered]] = {}
        self._is_over = False
        self._loaded = job.open_session()
        self._engine: Engine | None = None
        self._n_ctx = 0
        self._batch = Batch(self._loaded, job.prompting, self, job.settings, wall_clock=time.time)
        self._told = Tally()
        tasks = [self._batch.task(line) for line in job.largest]
        largest = [task.n_ctx for task in tasks if isinstance(task, Task)]
        if largest:  # so that too little memory shows at once
            try:
                self._engine_for(max(largest))
            except BaseException:
                self._loaded.close()
                raise
        self._thread = threading.Thread(target=self._run, name="specgen-lines", daemon=True)

    def __enter__(self) -> LineWorker:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        with contextlib.ExitStack() as stack:
            stack.callback(self._loaded.close)
            if self._engine is not None:
                self._engine.close()

    def ask(self, line: Line) -> Future[Answered]:
        """Submit a line, to be answered beside others. A line that is already being answered gives the same
        answer. The future gets a `BackendError` if the worker fails; this method raises it if the worker has
        failed before."""
        with self._changed:
            if self._is_over:
                raise BackendError("the worker has ended")
            reply = self._replies.get(line.custom_id)
            if reply is None:
                reply = self._replies[line.custom_id] = Future()
                self._incoming.append(line)
                self._changed.notify()
        return reply

    # --- in the thread --------------------------------------------------------------------------

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass a result of the batch to the futures that wait for it."""
        told, tally = self._told, self._batch.tally
        answered = Answered(
            record,
            tally.n_drafted - told.n_drafted,
            tally.n_accepted - told.n_accepted,
            tally.n_cached_tokens - told.n_cached_tokens,
        )
        told.n_drafted, told.n_accepted = tally.n_drafted, tally.n_accepted
        told.n_cached_tokens = tally.n_cached_tokens
        with self._changed:
            reply = self._replies.pop(str(record["custom_id"]))
        reply.set_result(answered)

    def _run(self) -> None:
        message = "the worker has ended"
        try:
            while self._wait():
                while self._answer_some():
                    pass
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that has ended
            message = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            self._on_failure(message)
        with self._changed:
            self._is_over = True
            replies, self._replies = list(self._replies.values()), {}
        for reply in replies:
            reply.set_exception(BackendError(message))

    def _wait(self) -> bool:
        """Wait for lines; return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._incoming)
            return not self._is_over

    def _answer_some(self) -> bool:
        """Answer the lines that fit one set of caches; return False if no line waits."""
        tasks, self._too_large = self._too_large or deque(self._next()), deque()
        if not tasks:
            return bool(self._incoming)
        engine = self._engine_for(max(task.n_ctx for task in tasks))

        def add(_tally: Tally) -> None:
            """Take new lines between rounds, unless a line waits for larger caches."""
            if not self._too_large:
                for task in self._next():
                    (tasks if task.n_ctx <= self._n_ctx else self._too_large).append(task)

        self._batch.run(engine, tasks, lambda: self._is_over, add)
        self._loaded.memory.save()
        return not self._is_over

    def _next(self) -> list[Task]:
        """Return the lines that have come and can be answered."""
        with self._changed:
            lines = list(self._incoming)
            self._incoming.clear()
        return self._batch.prepare(lines)

    def _engine_for(self, n_ctx: int) -> Engine:
        """Return the engine, made again if its caches are too small. No answer is being generated."""
        if self._engine is not None and n_ctx <= self._n_ctx:
            return self._engine
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._parallel is not None:
            n_parallel = self._parallel
        else:
            n_parallel = fastest_parallel(self._loaded, N_AT_ONCE)
        self._engine = Engine.largest(
            self._loaded, n_parallel, n_ctx, is_fixed=self._parallel is not None
        )
        self._n_ctx = n_ctx
        return self._engine
