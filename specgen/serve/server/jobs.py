"""The threads of loaded models: one steps an engine for its jobs, another makes embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
_log = logging.getLogger("specgen.serve.server")


class Turns:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_asked = 0
        self._n_done = 0

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
    """One HTTP request, whose events go from the engine's thread to an event loop."""

    def __init__(
        self,
        answers: Iterable[Request],
        submitted_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        #: Its requests to the engine.
        self.answers = tuple(answers)
        #: When the HTTP request came, by the monotonic clock.
        self.submitted_s = submitted_s
        #: Whether the server ended it.
        self.is_cut = False
        self._open = dict(enumerate(self.answers))
        self._loop = loop
        self._queue: asyncio.Queue[JobEvent | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[JobEvent]:
        """Yield the events until all answers are done. To be consumed in the job's event loop."""
        while (event := await self._queue.get()) is not None:
            yield event

    @property
    def n_open(self) -> int:
        """The number of answers that are not done."""
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
        if not news:
            return
        is_last = not self._open

        def put() -> None:
            for event in news:
                self._queue.put_nowait(event)
            if is_last:
                self._queue.put_nowait(None)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(put)

    def fail(self, error: SpecgenError) -> None:
        """End all answers with an error."""
        self._open.clear()
        self.send([(0, error)])


# --- generated text -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was just loaded, and its engine."""

    session: Session
    engine: Engine
    #: What is closed after the engine.
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    #: Called by the engine's thread while no answer is generated: with True before one begins, with
    #: False after the last.
    between_answers: Callable[[bool], None] = lambda _begins: None


class ServedModel:
    """A model that generates text, and a thread that steps its engine while there are jobs.

    Args:
        name: The name that requests give.
        opened: The model.
        metrics: Counts its work.
        n_waiting: How many answers may wait for a free slot.
        turns: Held for each step, so that engines take turns with all cores.
        idle: Called after the last answer.
        note: Gets sentences about long prompts.
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
        self.session = opened.session
        self.engine = opened.engine
        self.target: LlamaModel = opened.session.target
        #: The number of answers that are generated at once.
        self.n_parallel = opened.engine.n_parallel
        #: The number of answers that are generated or waiting.
        self.n_open = 0
        #: What ended the thread, a bug or a lost worker. All answers have failed then.
        self.failure: BaseException | None = None
        self._opened = opened
        self._metrics = metrics
        self._n_waiting = n_waiting
        self._turns = turns
        self._idle = idle
        self._prefill_notes = _PrefillNotes(name, note)
        #: Guards `n_open`, `failure` and what follows.
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
        """Submit answers, all or none, from any thread.

        Args:
            inserts: Insert the answers into the engine.
            loop: The event loop that gets their events.

        Raises:
            RequestError: Too many answers are waiting.
            BackendError: The thread has ended.
            SpecgenError: An answer cannot be inserted.
        """
        submitted_s = time.monotonic()
        with self._changed:
            self._check_running()
            self.check_room(len(inserts))
            self.n_open += len(inserts)
        answers: list[Request] = []
        try:
            # Without the lock: a grammar may take long, and the thread goes on meanwhile.
            answers.extend(insert(self.engine) for insert in inserts)
            job = Job(answers, submitted_s, loop)
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
            raise self._ended()

    def _ended(self) -> BackendError:
        if self.failure is not None:
            return BackendError("the engine has failed, and the server ends")
        return BackendError("the engine is closed")

    def cancel(self, job: Job) -> None:
        """End the answers of a job as they are: those that wait at once, others within a round."""
        ended: list[FinishedEvent] = []
        for answer in job.answers:
            if not answer.is_done:
                event = self.engine.cancel(answer)
                if event is not None:
                    ended.append(event)
        if ended:
            self._metrics.count_events(ended)
            self._pass_on([job])
            self._idle()

    def cancel_all(self) -> None:
        """End all answers, since the server ends."""
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
            self._is_closing = True
            jobs = self._jobs
            self._jobs = []
            self.n_open -= sum(job.n_open for job in jobs)
            self._metrics.show_load(self.n_open, self.n_parallel)
        for job in jobs:
            job.fail(self._ended())

    def _answer_jobs(self) -> None:
        """Step the engine while there are jobs, until the model is closed."""
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
        plain_token_s = self._plain_token_s()
        started_s = time.perf_counter()
        try:
            events = self.engine.step()
        except WorkerLostError:  # nothing more can be decoded: the server ends
            raise
        except BackendError as error:  # all answers of the round have failed
            _log.error("%s: %s", self._metrics.model, error.message)
            return
        except Exception:  # noqa: BLE001 - a bug: the round's answers have failed, others go on
            _log.exception("%s: a round failed", self._metrics.model)
            return
        seconds = time.perf_counter() - started_s
        self._metrics.count_events(events)
        self._prefill_notes.observe(events)
        has_begun = any(isinstance(event, PromptEvent) for event in events)
        if plain_token_s is not None and not has_begun:
            self._metrics.count_round(events, seconds, plain_token_s)

    def _plain_token_s(self) -> float | None:
        """Return the expected time of a token in the next round if nothing drafts, in seconds.

        None if it is not known, if no answer has begun, or if the round has a prefill.
        """
        busy = [slot.request for slot in self.engine.slots if slot.request is not None]
        if not busy or any(request.state == "prefill" for request in busy):
            return None
        table = self.session.costs.table(n_past=busy[0].running.n_prompt)
        if not table:
            return None
        return table.seconds(len(busy)) / len(busy)

    def _pass_on(self, jobs: Sequence[Job]) -> None:
        """Send the new events of jobs to their clients.

        The answers count as done before that: a client that has the last one may ask again.
        """
        now_s = time.monotonic()
        for job in jobs:
            with self._changed:  # another thread may cancel it
                n_open_before = job.n_open
                news = job.take()
                n_done = n_open_before - job.n_open
                self._metrics.count_times(news, now_s - job.submitted_s)
                if n_done:
                    self.n_open -= n_done
                    if not job.n_open:
                        self._jobs.remove(job)
                    self._metrics.show_load(self.n_open, self.n_parallel)
                job.send(news)


class _PrefillNotes:
    """Notes when the prefill of a long prompt begins, and when its answer does."""

    #: The fewest new tokens of a long prompt.
    N_NEW = 1000

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        self._name = name
        self._note = note
        #: When the prefill began, by the answer's number.
        self._since_s: dict[int, float] = {}

    def observe(self, events: Iterable[Event]) -> None:
        """Note what the events of a round tell about long prompts."""
        for event in events:
            number = event.sequence
            if isinstance(event, ReadingEvent) and number not in self._since_s:
                self._observe_first_piece(event)
            elif isinstance(event, (CommittedEvent, FinishedEvent)) and number in self._since_s:
                seconds = seconds_text(event.time_s - self._since_s.pop(number))
                what = "the answer begins" if isinstance(event, CommittedEvent) else "cancelled"
                self._note(f"{self._name}: {what} after {seconds}")

    def _observe_first_piece(self, event: ReadingEvent) -> None:
        n_new = event.n_prompt_tokens - event.n_cached_tokens
        if n_new <= self.N_NEW or not event.spent_s:
            return
        self._since_s[event.sequence] = event.time_s - event.spent_s
        n_in_memory = event.n_cached_tokens - event.n_loaded_tokens
        cached = f"{n_in_memory} in memory, {event.n_loaded_tokens} from disk"
        expected = seconds_text(event.spent_s + event.left_s)
        self._note(f"{self._name}: reading {n_new} tokens ({cached}), about {expected}")


# --- embeddings -----------------------------------------------------------------------------------


_T = TypeVar("_T")


class ServedEmbedder:
    """An embedding model, and a thread for it.

    Args:
        name: The name that requests give.
        embedder: The model.
        metrics: Counts its work.
        n_waiting: How many requests may wait while one is answered.
        turns: Held for each text.
    """

    #: Requests that are answered at once.
    n_parallel = 1
    #: What ended the thread: nothing, since an error ends its request only.
    failure: BaseException | None = None

    def __init__(
        self,
        name: str,
        embedder: Embedder,
        metrics: Metrics,
        n_waiting: int,
        turns: Turns,
    ) -> None:
        self.name = name
        self.embedder = embedder
        self.target = embedder.model
        #: The number of requests that are answered or waiting.
        self.n_open = 0
        self._metrics = metrics
        self._n_waiting = n_waiting
        self._turns = turns
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specgen-embeddings")
        self._is_ending = False

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        encoded: Callable[[Hidden], _T],
    ) -> list[_T]:
        """Return the `encoded` vectors of texts. Requests take turns, a text each.

        Raises:
            RequestError: Too many requests are waiting, or the server ends.
        """
        if self.n_open > self._n_waiting:
            raise RequestError.queue_full()
        loop = asyncio.get_running_loop()
        self.n_open += 1
        self._metrics.show_load(self.n_open, self.n_parallel)
        try:
            vectors: list[_T] = []
            for tokens in texts:
                if self._is_ending:
                    raise RequestError.ending()
                vector = await loop.run_in_executor(self._thread, self._embed, tokens, encoded)
                vectors.append(vector)
            return vectors
        finally:
            self.n_open -= 1
            self._metrics.show_load(self.n_open, self.n_parallel)

    def _embed(self, tokens: Sequence[int], encoded: Callable[[Hidden], _T]) -> _T:
        with self._turns:
            started_s = time.perf_counter()
            vector = self.embedder.embed(tokens)
            self._metrics.count_text(len(tokens), time.perf_counter() - started_s)
        return encoded(vector)

    def cancel_all(self) -> None:
        """End all requests after their current texts, since the server ends."""
        self._is_ending = True

    def close(self) -> None:
        """End the thread after its current text, and free the model. May be called twice."""
        self._thread.shutdown(wait=True)
        self.embedder.close()
