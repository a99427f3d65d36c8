"""Answer lines of a batch from any number of threads, with one engine that stays loaded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from specgen.batch.lines import Line
from specgen.batch.runner import Batch, Prompting, Tally, Task
from specgen.engine.engine import Engine
from specgen.engine.parallel import fastest_parallel, largest_engine
from specgen.engine.session import Session
from specgen.errors import BackendError

#: Where nobody says how many answers are made at once, no more lines than these are taken at once.
N_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a worker needs to know besides the lines. It can be pickled if `open_session` can.

    `parallel` is how many answers are made at once; None is what is measured to be fastest. `largest` are
    the lines that are thought to need most room: the caches are made for them.
    """

    open_session: Callable[[], Session]
    prompting: Prompting
    settings: Mapping[str, Any]
    parallel: int | None
    largest: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """A result as it is written, and what its drafts and the prefix cache were worth."""

    record: Mapping[str, Any]
    n_drafted: int = 0
    n_accepted: int = 0
    n_cached_tokens: int = 0


class LineWorker:
    """Makes the answers of lines in a thread of its own. Use it as a context manager.

    The answers are those of `Batch`, with the same results. A line that needs more room than the caches
    have waits until they are free, and can be made anew. Raises what opening the session raises.
    """

    def __init__(
        self,
        job: WorkerJob,
        on_failure: Callable[[str], None],
        on_start: Callable[[Sequence[Line]], None] = lambda _lines: None,
    ) -> None:
        """In the thread, `on_start` is told of lines before they are begun, and `on_failure` what ended it;
        nobody is answered after that."""
        self._on_failure, self._on_start = on_failure, on_start
        self._parallel = job.parallel
        self._changed = threading.Condition()
        self._incoming: deque[Line] = deque()
        self._alone: deque[Line] = deque()
        self._too_large: deque[Task] = deque()
        self._replies: dict[str, Future[Answered]] = {}
        self._is_over = False
        self._session = job.open_session()
        self._engine: Engine | None = None
        self._n_ctx = 0
        self._batch = Batch(self._session, job.prompting, self, job.settings, wall_clock=time.time)
        self._told = Tally()
        tasks = [self._batch.task(line) for line in job.largest]
        largest = [task.n_ctx for task in tasks if isinstance(task, Task)]
        if largest:  # what does not fit the memory is to be known at once
            try:
                self._engine_for(max(largest))
            except BaseException:
                self._session.close()
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
            stack.callback(self._session.close)
            if self._engine is not None:
                self._engine.close()

    def ask(self, line: Line, *, alone: bool = False) -> Future[Answered]:
        """Have a line answered, beside others or `alone`. Who asks for a line that is in the making
        gets the same answer. The future has a `BackendError` if the worker fails; raises that if it
        has failed."""
        with self._changed:
            if self._is_over:
                raise BackendError("the worker has ended")
            reply = self._replies.get(line.custom_id)
            if reply is None:
                reply = self._replies[line.custom_id] = Future()
                (self._alone if alone else self._incoming).append(line)
                self._changed.notify()
        return reply

    @property
    def n_open(self) -> int:
        """How many lines are not answered."""
        return len(self._replies)

    # --- in the thread --------------------------------------------------------------------------

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a result of the batch: it goes to whoever asked for it."""
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
        """Wait for lines; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._alone or self._incoming)
            return not self._is_over

    def _answer_some(self) -> bool:
        """Answer what can be answered with one set of caches; False if nothing waits."""
        tasks, is_alone = self._next()
        if not tasks:
            return bool(self._alone or self._incoming)
        engine = self._engine_for(max(task.n_ctx for task in tasks))

        def add(_tally: Tally) -> None:
            """Between rounds: take what came meanwhile, unless something waits for free caches."""
            if is_alone or self._alone or self._too_large:
                return
            for task in self._batch.prepare(self._take()):
                (tasks if task.n_ctx <= self._n_ctx else self._too_large).append(task)

        self._batch.run(engine, tasks, lambda: self._is_over, add)
        self._session.memory.save()
        return not self._is_over

    def _next(self) -> tuple[deque[Task], bool]:
        """The tasks that come next, and whether they are to be alone."""
        if self._too_large:
            tasks, self._too_large = self._too_large, deque()
            return tasks, False
        with self._changed:
            line = self._alone.popleft() if self._alone else None
        if line is None:
            lines = self._take()
        else:
            lines = [line]
            self._on_start(lines)
        return deque(self._batch.prepare(lines)), line is not None

    def _take(self) -> list[Line]:
        with self._changed:
            lines = list(self._incoming)
            self._incoming.clear()
        if lines:
            self._on_start(lines)
        return lines

    def _engine_for(self, n_ctx: int) -> Engine:
        """The engine, made anew if its caches are too small. Nothing is in the making."""
        if self._engine is not None and n_ctx <= self._n_ctx:
            return self._engine
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._parallel is not None:
            n_parallel = self._parallel
        else:
            n_parallel = fastest_parallel(self._session, N_AT_ONCE)
        self._engine = largest_engine(
            self._session, n_parallel, n_ctx, is_fixed=self._parallel is not None
        )
        self._n_ctx = n_ctx
        return self._engine


__all__ = ["N_AT_ONCE", "Answered", "LineWorker", "WorkerJob"]
