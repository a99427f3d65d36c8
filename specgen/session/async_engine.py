"""Answers for the tasks of event loops: a thread steps the engine while a task waits."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from specgen.errors import BackendError, WorkerLostError
from specgen.events import CommittedEvent, Event
from specgen.session.engine import Engine
from specgen.session.request import Request


class AsyncEngine:
    """Generates the answers that tasks wait for, without blocking their event loops.

    All tasks, of any event loop, wait for the same steps, so that a thousand of them need one
    thread. Nothing is decoded while no task waits.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: One thread for all steps: OpenMP would make a team of threads for each further one.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specgen-async")
        #: Guards the fields below.
        self._lock = threading.Lock()
        #: The last step that was begun.
        self._step: Future[Any] | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the thread after its current step. Tasks that wait get a `BackendError`."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown()

    async def insert(self, insert: Callable[[], Request]) -> Request:
        """Insert a request in a thread, since tokenizing and compiling a grammar may take long.

        If the task is cancelled, so is the request.

        Args:
            insert: Inserts the request into the engine.
        """
        inserted = asyncio.get_running_loop().run_in_executor(None, insert)
        try:
            return await asyncio.shield(inserted)
        except asyncio.CancelledError:
            inserted.add_done_callback(self._cancel_inserted)
            raise

    def _cancel_inserted(self, inserted: asyncio.Future[Request]) -> None:
        """Cancel a request that nobody waits for any more, unless it was refused."""
        if not inserted.cancelled() and inserted.exception() is None:
            self._engine.cancel(inserted.result())

    async def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield the events of one answer until it is done; other answers advance meanwhile.

        Closing the iterator, or cancelling the task, cancels the request.

        Raises:
            SpecgenError: If the answer failed.
        """
        try:
            while True:
                new_events, are_last = request.take_events()
                for event in new_events:
                    yield event
                if are_last:
                    break
                await self._wait_for_step()
        finally:
            if not request.is_done:
                self._engine.cancel(request)
        if request.failure is not None:
            raise request.failure

    async def texts(self, request: Request) -> AsyncGenerator[str, None]:
        """Yield the text of an answer in pieces. The rest is as in `stream`."""
        async with contextlib.aclosing(self.stream(request)) as events:
            async for event in events:
                if isinstance(event, CommittedEvent) and event.text:
                    yield event.text

    async def _wait_for_step(self) -> None:
        """Wait until the current step is over, or a new one if there is none.

        Raises:
            BackendError: If the engine is closed, or a worker was lost.
        """
        # Shielded, since other tasks may be waiting for the same step.
        step = asyncio.shield(asyncio.wrap_future(self._current_step()))
        try:
            await step
        except BackendError as error:
            # The answers of the round have failed; others go on, unless nothing can be decoded.
            if isinstance(error, WorkerLostError):
                raise

    def _current_step(self) -> Future[Any]:
        """Return the step that is being done, or begin one."""
        with self._lock:
            if self._is_closed:
                raise BackendError("the engine is closed")
            if self._step is None or self._step.done():
                self._step = self._thread.submit(self._engine.step)
            return self._step
