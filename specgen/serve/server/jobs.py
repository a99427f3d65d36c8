"""The threads of loaded models: one steps an engine for its jobs, another makes embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from specgen.errors import BackendError, SpecgenError, WorkerLostError
from specgen.events import CommittedEvent, Event, FinishedEvent, PrefillEvent, PromptEvent
from specgen.llama.embeddings import Embedder
from specgen.llama.model import LlamaModel
from specgen.serve.formats.engine_requests import Insert
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.metrics import Metrics
from specgen.session.engine import Engine
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Hidden
from specgen.system.quantities import seconds_text

#: The number of an answer within its job, and an event of that answer or the error that ended it.
JobEvent: TypeAlias = tuple[int, Event | SpecgenError]
_log = logging.getLogger("specgen.serve.server")


class FairLock:
    """A lock that threads get in the order in which they ask for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: The number of turns that were asked for.
        self._n_requested = 0
        #: The number of turns that are over.
        self._n_done = 0

    def __enter__(self) -> None:
        with self._changed:
            turn = self._n_requested
            self._n_requested += 1
            self._changed.wait_for(lambda: self._n_done == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._n_done += 1
            self._changed.notify_all()


class Job:
    """The answers to one HTTP request, whose events go from the engine's thread to an event loop.

    Args:
        answers: Its requests to the engine.
        submitted_s: The time of the HTTP request, by the monotonic clock.
        loop: The event loop that gets the events.
    """

    def __init__(
        self,
        answers: Iterable[Request],
        submitted_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        #: Its requests to the engine.
        self.answers = tuple(answers)
        #: The time of the HTTP request, by the monotonic clock.
        self.submitted_s = submitted_s
        #: Whether the server ended its answers because it shuts down.
        self.is_cut = False
        #: The answers that are not done, by their numbers.
        self._open = dict(enumerate(self.answers))
        self._loop = loop
        #: The events for the client; None follows the last one.
        self._queue: asyncio.Queue[JobEvent | None] = asyncio.Queue()

    async def events(self) -> AsyncIterator[JobEvent]:
        """Yield the events until all answers are done. To be consumed in the job's event loop."""
        while True:
            event = await self._queue.get()
            if event is None:
                return
            yield event

    @property
    def n_open(self) -> int:
        """The number of answers that are not done."""
        return len(self._open)

    def take_events(self) -> list[JobEvent]:
        """Remove the new events of the answers from the engine's requests, and return them.

        An answer that is done is no longer open. Called by the thread that steps the engine.
        """
        new_events: list[JobEvent] = []
        for number, answer in list(self._open.items()):
            events, are_last = answer.take_events()
            new_events += ((number, event) for event in events)
            if answer.failure is not None:
                new_events.append((number, answer.failure))
            if are_last:
                del self._open[number]
        return new_events

    def send(self, new_events: Sequence[JobEvent]) -> None:
        """Queue events for the client, without waiting for it: it may be slow, or gone.

        If no answer is open, these events are the last ones.
        """
        if not new_events:
            return
        is_last = not self._open

        def put() -> None:
            for event in new_events:
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
    #: The resources to close after the engine.
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    #: Called by the engine's thread when no answer is being generated, and one may begin now.
    before_answers: Callable[[], None] = lambda: None
    #: Called by the engine's thread when the last answer has ended.
    after_answers: Callable[[], None] = lambda: None


class ServedModel:
    """A model that generates text, and a thread that steps its engine while there are jobs.

    Args:
        name: The name that requests give.
        opened: The model.
        metrics: Counts its work.
        n_waiting: The maximum number of answers that wait for a free slot.
        turns: Held for each step, so that engines take turns with all cores.
        idle: Called when no answer is being generated any more.
        note: Gets sentences about long prompts, for the user.
    """

    def __init__(
        self,
        name: str,
        opened: OpenedModel,
        metrics: Metrics,
        n_waiting: int,
        turns: FairLock,
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
        #: The exception that ended the thread, from a bug or a lost worker; None if there was none.
        #: After it, all answers have failed.
        self.failure: BaseException | None = None
        self._opened = opened
        self._metrics = metrics
        self._n_waiting = n_waiting
        self._turns = turns
        self._idle = idle
        self._prefill_notes = _PrefillNotes(name, note)
        #: Held while an answer is scored, so that only one at a time needs contexts for that.
        self.scoring = threading.Lock()
        #: Guards `n_open`, `failure`, `_jobs` and `_is_closing`; notified when the last two change.
        self._changed = threading.Condition()
        #: The jobs that have open answers.
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
        """Raise `RequestError` if the queue has no room for `n_answers` more answers."""
        if self.n_open + n_answers > self.n_parallel + self._n_waiting:
            raise RequestError.queue_full()

    def submit(
        self,
        inserts: Sequence[Insert],
        loop: asyncio.AbstractEventLoop,
    ) -> Job:
        """Submit answers, all or none, from any thread.

        Args:
            inserts: A function for each answer, which inserts it into the engine.
            loop: The event loop that gets the events of the answers.

        Raises:
            RequestError: If too many answers are waiting.
            BackendError: If the thread has ended.
            SpecgenError: If an answer cannot be inserted.
        """
        submitted_s = time.monotonic()
        with self._changed:
            self._check_running()
            self.check_room(len(inserts))
            self.n_open += len(inserts)
        answers: list[Request] = []
        try:
            # Without the lock, so that the thread goes on: compiling a grammar may take long.
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
        """Raise `BackendError` if the thread has ended, or is about to."""
        if self._is_closing or self.failure is not None:
            raise self._ended_error()

    def _ended_error(self) -> BackendError:
        if self.failure is not None:
            return BackendError("the engine has failed, and the server is shutting down")
        return BackendError("the engine is closed")

    @contextlib.contextmanager
    def decoding_turn(self) -> Iterator[None]:
        """Let no engine decode within the block, for a decode in a context of its own."""
        with self._turns, self.engine.stepping:
            yield

    def cancel(self, job: Job) -> None:
        """End the answers of a job with the text that they have.

        Answers that wait end at once, others with the engine's next round.
        """
        finished_events: list[FinishedEvent] = []
        for answer in job.answers:
            if not answer.is_done:
                finished = self.engine.cancel(answer)
                if finished is not None:
                    finished_events.append(finished)
        if finished_events:
            self._metrics.count_events(finished_events)
            self._pass_on([job])
            self._idle()

    def cancel_all(self) -> None:
        """End all answers with the text that they have, since the server shuts down."""
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            job.is_cut = True
            self.cancel(job)

    # --- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        """Answer jobs until the model is closed or the thread fails, then fail the open jobs."""
        failure: BaseException | None = None
        try:
            self._answer_jobs()
        except BaseException as error:  # noqa: BLE001 - clients must not wait for an ended thread
            failure = error
        with self._changed:
            self.failure = failure
            self._is_closing = True
            jobs = self._jobs
            self._jobs = []
            self.n_open -= sum(job.n_open for job in jobs)
            self._metrics.show_load(self.n_open, self.n_parallel)
        for job in jobs:
            job.fail(self._ended_error())

    def _answer_jobs(self) -> None:
        """Step the engine while there are jobs, until the model is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing)
                if self._is_closing:
                    return
                jobs = list(self._jobs)
            # A round, which may begin answers that wait.
            with self._turns:
                if not self.engine.n_busy:
                    self._opened.before_answers()
                self._step()
            self._pass_on(jobs)
            # The turn is over here, so that other models can decode before this one learns.
            if not self.engine.n_busy:
                with self._turns:
                    self._opened.after_answers()
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
        """Return the expected seconds per token of the next round without drafting.

        Returns:
            None if no costs are measured, if no answer is generated, or if the round has a prefill.
        """
        requests = [slot.request for slot in self.engine.slots if slot.request is not None]
        if not requests or any(request.state == "prefill" for request in requests):
            return None
        table = self.session.costs.table(n_past=requests[0].running.n_prompt)
        if not table:
            return None
        # Without drafting, each answer gets one token per decode.
        n_tokens = len(requests)
        return table.seconds(n_tokens) / n_tokens

    def _pass_on(self, jobs: Sequence[Job]) -> None:
        """Send the new events of jobs to their clients, and count the answers that are done."""
        now_s = time.monotonic()
        for job in jobs:
            with self._changed:  # another thread may cancel the job
                n_open_before = job.n_open
                new_events = job.take_events()
                n_done = n_open_before - job.n_open
                self._metrics.count_times(new_events, now_s - job.submitted_s)
                # Free the room in the queue before sending: a client that has its last event may
                # send its next request at once.
                if n_done:
                    self.n_open -= n_done
                    if not job.n_open:
                        self._jobs.remove(job)
                    self._metrics.show_load(self.n_open, self.n_parallel)
                job.send(new_events)


class _PrefillNotes:
    """Tells the user when the prefill of a long prompt begins, and when its answer does."""

    #: A prompt is long if it has more uncached tokens than this.
    LONG_PROMPT_TOKENS = 1000

    def __init__(self, name: str, note: Callable[[str], None]) -> None:
        self._name = name
        self._note = note
        #: The start times of unfinished prefills that were noted, by the answer's number.
        self._started_s: dict[int, float] = {}

    def observe(self, events: Iterable[Event]) -> None:
        """Write a note for each event at which the prefill of a long prompt begins or ends."""
        for event in events:
            number = event.sequence
            if isinstance(event, PrefillEvent) and number not in self._started_s:
                self._note_start(event)
            elif isinstance(event, (CommittedEvent, FinishedEvent)) and number in self._started_s:
                seconds = seconds_text(event.time_s - self._started_s.pop(number))
                outcome = "the answer begins" if isinstance(event, CommittedEvent) else "cancelled"
                self._note(f"{self._name}: {outcome} after {seconds}")

    def _note_start(self, event: PrefillEvent) -> None:
        """Write a note about the first progress of a prefill, if the prompt is long."""
        n_new = event.n_prompt_tokens - event.n_cached_tokens
        if n_new <= self.LONG_PROMPT_TOKENS or not event.spent_s:
            return
        self._started_s[event.sequence] = event.time_s - event.spent_s
        n_in_memory = event.n_cached_tokens - event.n_loaded_tokens
        cached = f"{n_in_memory} in memory, {event.n_loaded_tokens} from disk"
        expected = seconds_text(event.spent_s + event.left_s)
        self._note(f"{self._name}: prefilling {n_new} tokens ({cached}), about {expected}")


# --- embeddings -----------------------------------------------------------------------------------


_T = TypeVar("_T")


class ServedEmbedder:
    """An embedding model, and a thread for it.

    Args:
        name: The name that requests give.
        embedder: The model.
        metrics: Counts its work.
        n_waiting: The maximum number of requests that wait while one is answered.
        turns: Held for each text, so that models take turns with all cores.
    """

    #: The number of requests that are answered at once.
    n_parallel = 1
    #: Always None: an error ends only its request, never the thread.
    failure: BaseException | None = None

    def __init__(
        self,
        name: str,
        embedder: Embedder,
        metrics: Metrics,
        n_waiting: int,
        turns: FairLock,
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
        """Return the vectors of texts in the form that `encoded` gives them.

        Requests take turns, one text each.

        Args:
            texts: The tokens of each text.
            encoded: Encodes a vector, in the model's thread.

        Raises:
            RequestError: If too many requests are waiting, or the server shuts down.
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
                    raise RequestError.shutting_down()
                vector = await loop.run_in_executor(self._thread, self._embed, tokens, encoded)
                vectors.append(vector)
            return vectors
        finally:
            self.n_open -= 1
            self._metrics.show_load(self.n_open, self.n_parallel)

    def _embed(
        self,
        tokens: Sequence[int],
        encoded: Callable[[Hidden], _T],
    ) -> _T:
        with self._turns:
            started_s = time.perf_counter()
            vector = self.embedder.embed(tokens)
            self._metrics.count_text(len(tokens), time.perf_counter() - started_s)
        return encoded(vector)

    def cancel_all(self) -> None:
        """End all requests after their current texts, since the server shuts down."""
        self._is_ending = True

    def close(self) -> None:
        """End the thread after its current text, and free the model. May be called twice."""
        self._thread.shutdown(wait=True)
        self.embedder.close()
