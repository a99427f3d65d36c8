"""The threads of served models: one steps an engine, another one makes embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from specgen.errors import BackendError, SpecgenError, WorkerLostError
from specgen.events import CommittedEvent, Event, FinishedEvent, PromptEvent, ReadingEvent
from specgen.llama.embeddings import Embedder
from specgen.llama.model import LlamaModel
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.metrics import Metrics
from specgen.session.engine import Engine
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Hidden
from specgen.system.quantities import seconds_text

#: The number of an answer in its job, and an event of that answer or the error that ended it.
JobEvent: TypeAlias = tuple[int, Event | SpecgenError]
#: Inserts an answer into an engine.
Insert: TypeAlias = Callable[[Engine], Request]
_BROKEN = "the engine has failed, and the server ends"
_CLOSING = "the engine is closed"
#: New tokens of a prompt whose reading is noted.
_MANY_TOKENS = 1000
_log = logging.getLogger("specgen.serve.server")


class Turns:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_asked, self._n_done = 0, 0

    def __enter__(self) -> None:
        with self._changed:
            turn = self._n_asked
            self._n_asked += 1
            self._changed.wait_for(lambda: self._n_done == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._n_done += 1
            self._changed.notify_all()


class Job:
    """One HTTP request: `answers` are its requests to the engine."""

    def __init__(
        self, answers: Sequence[Request], submitted_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.answers, self.submitted_s = tuple(answers), submitted_s
        #: Whether the server ended it.
        self.is_cut = False
        self._open = dict(enumerate(answers))
        self._loop = loop
        self._queue: asyncio.Queue[JobEvent | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[JobEvent]:
        """Yield the events until all answers are done. To be consumed in the job's event loop."""
        while (event := await self._queue.get()) is not None:
            yield event

    @property
    def n_open(self) -> int:
        return len(self._open)

    def take(self) -> list[JobEvent]:
        """Return the new events of the answers. Called by the thread that steps the engine."""
        news: list[JobEvent] = []
        for number, answer in list(self._open.items()):
            is_done = answer.is_done  # read before the events, so that none is missed
            while answer.events:
                news.append((number, answer.events.popleft()))
            if answer.failure is not None:
                news.append((number, answer.failure))
            if is_done:
                del self._open[number]
        return news

    def send(self, news: Sequence[JobEvent]) -> None:
        """Queue events for the client, without waiting: it may be slow, or gone."""
        is_last = not self._open

        def put() -> None:
            for event in news:
                self._queue.put_nowait(event)
            if is_last:
                self._queue.put_nowait(None)

        if news:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(put)

    def fail(self, error: SpecgenError) -> None:
        self._open.clear()
        self.send([(0, error)])


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was loaded, its engine, and what is closed after it. The engine's thread calls
    `between_answers` while no answer is generated: with True before one begins, with False after
    the last.
    """

    session: Session
    engine: Engine
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    between_answers: Callable[[bool], None] = lambda _begins: None


class ServedModel:
    """A model that generates text, and a thread that steps its engine while there are jobs.

    `n_waiting` answers may wait for a free slot. `turns` is held for each step, so that engines
    take turns with all cores. `idle` is called after the last answer. `note` gets lines about long
    prompts. `failure` is the exception that ended the thread, a bug or a lost worker; all answers
    have failed then.
    """

    def __init__(
        self,
        name: str,
        opened: OpenedModel,
        metrics: Metrics,
        n_waiting: int,
        turns: Turns,
        idle: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.name = name
        self.session, self.engine = opened.session, opened.engine
        self.target: LlamaModel = opened.session.target
        #: The number of answers that are generated at once, and of those that are generated or
        #: waiting.
        self.n_parallel, self.n_open = opened.engine.n_parallel, 0
        self.failure: BaseException | None = None
        self._opened, self._metrics, self._n_waiting = opened, metrics, n_waiting
        self._turns, self._idle, self._note = turns, idle, note
        #: When the reading of long prompts began, by the answer's number.
        self._reading_since_s: dict[int, float] = {}
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="specgen-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and free the contexts and the models. May be called twice."""
        with self._opened.resources:
            with self._changed:
                self._is_closing = True
                self._changed.notify()
            self._thread.join()
            self.engine.close()

    def check_room(self, n_answers: int) -> None:
        """Raise `RequestError` if there is no room for `n_answers` more answers."""
        if self.n_open + n_answers > self.n_parallel + self._n_waiting:
            raise RequestError.queue_full()

    def submit(self, inserts: Sequence[Insert], loop: asyncio.AbstractEventLoop) -> Job:
        """Submit answers, from any thread; their events go to this event loop. Raise
        `RequestError`, what `Engine.insert` raises, and `BackendError` if the thread has ended;
        nothing is submitted then.
        """
        now = time.monotonic()
        with self._changed:
            self._check_running()
            self.check_room(len(inserts))
            self.n_open += len(inserts)
        answers: list[Request] = []
        try:  # without the lock: reading a grammar may take long, and the thread goes on meanwhile
            answers.extend(insert(self.engine) for insert in inserts)
            job = Job(answers, now, loop)
            with self._changed:
                self._check_running()
                self._jobs.append(job)
                self._metrics.show_load(self.n_open, self.n_parallel)
                self._changed.notify()
        except BaseException:
            for answer in answers:
                self.engine.cancel(answer)
            with self._changed:
                self.n_open -= len(inserts)
            raise
        return job

    def _check_running(self) -> None:
        if self._is_closing or self.failure is not None:
            raise BackendError(_BROKEN if self.failure is not None else _CLOSING)

    def cancel(self, job: Job) -> None:
        """End the answers of a job as they are: those that wait at once, others within a round."""
        unfinished = [answer for answer in job.answers if not answer.is_done]
        if ended := [*filter(None, map(self.engine.cancel, unfinished))]:
            self._metrics.count_events(ended)
            self._pass_on([job])
            self._idle()

    def cancel_all(self) -> None:
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            job.is_cut = True
            self.cancel(job)

    # --- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._answer_jobs()
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that has ended
            failure = error
        with self._changed:
            self.failure = failure
            jobs, self._jobs = self._jobs, []
            self.n_open -= sum(job.n_open for job in jobs)
            self._is_closing = True
            self._metrics.show_load(self.n_open, self.n_parallel)
        for job in jobs:
            job.fail(BackendError(_CLOSING if failure is None else _BROKEN))

    def _answer_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing)
                if self._is_closing:
                    return
                jobs = list(self._jobs)
            with self._turns:
                if not self.engine.n_busy:
                    self._opened.between_answers(True)
                self._step()
            self._pass_on(jobs)
            if not self.engine.n_busy:
                with self._turns:
                    self._opened.between_answers(False)
                self._idle()

    def _step(self) -> None:
        """Step the engine once. An error ends the answers of the round, not the server."""
        engine, plain_token_s = self.engine, self._plain_token_s()
        started = time.perf_counter()
        try:
            events = engine.step()
        except WorkerLostError:  # nothing more can be decoded: the server ends
            raise
        except BackendError as error:  # all answers of the round have failed
            _log.error("%s: %s", self._metrics.model, error.message)
            return
        except Exception:  # noqa: BLE001 - a bug: the answers of the round have failed, others go on
            _log.exception("%s: a round failed", self._metrics.model)
            return
        seconds = time.perf_counter() - started
        self._metrics.count_events(events)
        self._note_reading(events)
        has_begun = any(isinstance(event, PromptEvent) for event in events)
        if plain_token_s is not None and not has_begun:
            self._metrics.count_round(events, seconds, plain_token_s)

    def _plain_token_s(self) -> float | None:
        """Return the expected seconds of a token of the next round if nothing drafts, by the
        measured costs; None if they are not known, no answer has begun, or a prompt is read.
        """
        busy = [slot.request for slot in self.engine.slots if slot.request is not None]
        if not busy or any(request.state == "prefill" for request in busy):
            return None
        table = self._opened.session.costs.table(n_past=busy[0].running.n_prompt)
        return table.seconds(len(busy)) / len(busy) if table else None

    def _note_reading(self, events: Sequence[Event]) -> None:
        """Note when a long prompt begins to be read, and when its answer begins."""
        since_s = self._reading_since_s
        for event in events:
            number = event.sequence
            if isinstance(event, ReadingEvent) and number not in since_s:
                n_cached, n_loaded = event.n_cached_tokens, event.n_loaded_tokens
                n_new, expected_s = event.n_prompt_tokens - n_cached, event.spent_s + event.left_s
                if n_new > _MANY_TOKENS and event.spent_s:  # of the first piece
                    since_s[number] = event.time_s - event.spent_s
                    known = f"{n_cached - n_loaded} in memory, {n_loaded} from disk"
                    about = f"about {seconds_text(expected_s)}"
                    self._note(f"{self.name}: reading {n_new} tokens ({known}), {about}")
            elif isinstance(event, (CommittedEvent, FinishedEvent)) and number in since_s:
                seconds = seconds_text(event.time_s - since_s.pop(number))
                what = "the answer begins" if isinstance(event, CommittedEvent) else "cancelled"
                self._note(f"{self.name}: {what} after {seconds}")

    def _pass_on(self, jobs: Sequence[Job]) -> None:
        """Give requests their news. Answers count as done before: a client that has the last one
        may ask again.
        """
        now = time.monotonic()
        for job in jobs:
            with self._changed:  # another thread may cancel it
                n_open, news = job.n_open, job.take()
                self._metrics.count_times(news, now - job.submitted_s)
                if n_done := n_open - job.n_open:
                    self.n_open -= n_done
                    if not job.n_open:
                        self._jobs.remove(job)
                    self._metrics.show_load(self.n_open, self.n_parallel)
                job.send(news)


# --- embeddings -----------------------------------------------------------------------------------


_T = TypeVar("_T")


class ServedEmbedder:
    """An embedding model; `n_waiting` requests may wait while one is answered. `turns` is held for
    each text.
    """

    #: Requests that are answered at once, and what ended the thread: an error ends its request
    #: only.
    n_parallel = 1
    failure: BaseException | None = None

    def __init__(
        self, name: str, embedder: Embedder, metrics: Metrics, n_waiting: int, turns: Turns
    ) -> None:
        self.name, self.embedder, self.target = name, embedder, embedder.model
        self.n_open = 0
        self._metrics, self._n_waiting, self._turns = metrics, n_waiting, turns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specgen-embeddings")
        self._is_ending = False

    async def embed(
        self, texts: Sequence[Sequence[int]], encoded: Callable[[Hidden], _T]
    ) -> list[_T]:
        """Return the `encoded` vectors of texts. Requests take turns, a text each. Raise
        `RequestError`.
        """
        if self.n_open > self._n_waiting:
            raise RequestError.queue_full()
        loop = asyncio.get_running_loop()
        self.n_open += 1
        self._metrics.show_load(self.n_open, self.n_parallel)
        try:
            found: list[_T] = []
            for tokens in texts:
                if self._is_ending:
                    raise RequestError.ending()
                found.append(await loop.run_in_executor(self._thread, self._embed, tokens, encoded))
            return found
        finally:
            self.n_open -= 1
            self._metrics.show_load(self.n_open, self.n_parallel)

    def _embed(self, tokens: Sequence[int], encoded: Callable[[Hidden], _T]) -> _T:
        with self._turns:
            started = time.perf_counter()
            vector = self.embedder.embed(tokens)
            self._metrics.count_text(len(tokens), time.perf_counter() - started)
        return encoded(vector)

    def cancel_all(self) -> None:
        self._is_ending = True

    def close(self) -> None:
        """End the thread after its current text, and free the model. May be called twice."""
        self._thread.shutdown(wait=True)
        self.embedder.close()
