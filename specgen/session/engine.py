"""The engine: generates several answers at once with loaded models, in caches that stay filled.

Each step starts the next request, prefills a chunk of one prompt, runs one round for all answers
that are being decoded, and completes those that are finished.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from specgen.errors import (
    BackendError,
    MemoryLimitError,
    OutputError,
    PromptError,
    SpecgenError,
    UsageError,
    WorkerLostError,
)
from specgen.events import Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.llama import LlamaBackend
from specgen.llama.native_context import MAX_SEQUENCES
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState, interrupted_event
from specgen.method.drafter import never
from specgen.option_values import checked_value, required, shown_value
from specgen.options import GenerationOptions, SamplerOptions, VerifierName
from specgen.session.calibration import Status, calibrate, no_status
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.kept_answers import KeptAnswer, keep_answer
from specgen.session.prefix_reuse import PrefixReuse
from specgen.session.prompts import Prompt
from specgen.session.request import Request, Slot
from specgen.session.scheduler import Scheduler
from specgen.session.session import Session
from specgen.system.files import as_json
from specgen.system.machine import LoadOfOthers, is_busy

#: While other answers are decoded, this many tokens of a prompt join their round if the target is
#: streamed: its pass takes as long as its reads from disk, which hide their computation.
_N_STREAMED_ALONGSIDE = 128


def _leave_unchanged(_request: Request, _answer: AnswerState) -> None:
    """Do nothing to prepare an answer."""


class Engine:
    """Generates up to `n_parallel` answers at once with the models of a session.

    The contexts stay open as long as the engine does: if a prompt begins like a text in a cache,
    only the rest of the prompt is decoded. An answer that fails or is cancelled does not affect
    the others. Several threads may use the engine: one at a time steps it, for all answers.

    The engine is a context manager. It does not close the session.
    """

    def __init__(
        self,
        session: Session,
        *,
        n_parallel: int = 1,
        n_ctx: int | None = None,
        interrupted: Callable[[], bool] = never,
        learn_alone: bool = False,
        prepare: Callable[[Request, AnswerState], None] = _leave_unchanged,
    ) -> None:
        """Open the contexts.

        Args:
            session: The loaded models.
            n_parallel: The maximum number of answers that are generated at once.
            n_ctx: The maximum number of tokens of one prompt and its answer; None uses the
                session's default.
            interrupted: Checked between decodes. Once it returns True, all answers end with the
                text that they have.
            learn_alone: Whether the drafts for an answer are independent of all other answers.
            prepare: Called with each request and its answer before the prompt is prefilled.

        Raises:
            MemoryLimitError: If the contexts do not fit into memory.
            UsageError: If `n_parallel` is below 1, or more than the shape of drafts allows.
        """
        required("session", Session, session)
        n_parallel = checked_value("n_parallel", int, n_parallel, {"min": 1})
        n_ctx = checked_value("n_ctx", int | None, n_ctx, {"min": 1})
        max_parallel = MAX_SEQUENCES // session.n_sequences_max
        if n_parallel > max_parallel:
            raise UsageError(
                f"{n_parallel} answers at once: "
                f"with drafts of this shape at most {max_parallel} are possible",
                hint="--tree off allows more",
            )
        #: The maximum number of tokens of one prompt and its answer.
        self.n_ctx = session.usual_n_ctx if n_ctx is None else session.target.limited_n_ctx(n_ctx)
        #: Held while the engine steps: as long as another thread holds it, nothing is decoded.
        self.stepping = threading.RLock()
        self._session = session
        self._factory = DrafterFactory(session, learn_alone)
        self._prepare = prepare
        self._notices: deque[str] = deque()
        self._resources = contextlib.ExitStack()
        self._resources.callback(self._factory.close)
        started_s = session.clock()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._resources.close)
            target, _ = self._resources.enter_context(
                session.contexts(self.n_ctx, drafts=False, n_slots=n_parallel)
            )
            #: The target's context, in which the answers are generated. Callers must not decode in
            #: it.
            self.target: LlamaBackend = target
            self._loop = AnswerLoop(target, session.clock, interrupted)
            self._scheduler = Scheduler(n_parallel, target)
            #: Equal shares of the caches, each with the request that it serves.
            self.slots = self._scheduler.slots
            #: Closes `draft_caches`.
            self._draft_resources = self._resources.enter_context(contextlib.ExitStack())
            #: The contexts of the draft: its own, then those of its second draft.
            self.draft_caches = self._open_draft_caches()
            wanted_sizes = [session.options.target_context.n_ctx, n_ctx]
            n_wanted = max((size for size in wanted_sizes if size is not None), default=None)
            self._notices.extend(session.notices(self.n_ctx, n_wanted))
            self._prefixes = PrefixReuse(session, target)
            self._resources.callback(self._prefixes.close)
            self.notify(self._prefixes.notice)
            session.count_setup(session.clock() - started_s)
            on_error.pop_all()

    @classmethod
    def largest(
        cls,
        session: Session,
        *,
        n_parallel: int,
        **options: Any,
    ) -> Engine:
        """Return an engine for `n_parallel` answers at once, or for fewer if memory is short.

        The number is halved until the contexts fit. If the models cannot decode several sequences
        at once, the engine is for one answer at a time, and its first answer has a notice.

        Args:
            session: The loaded models.
            n_parallel: The wanted number of answers at once.
            **options: More arguments of the constructor.

        Raises:
            MemoryLimitError: If the contexts for a single answer do not fit into memory.
            UsageError: If the shape of drafts does not allow so many answers at once.
        """
        why_one = None
        if n_parallel > 1:
            why_one = session.why_one_sequence
        if why_one is not None:
            n_parallel = 1
        while n_parallel > 1:
            with contextlib.suppress(MemoryLimitError):
                return cls(session, n_parallel=n_parallel, **options)
            n_parallel //= 2
        engine = cls(session, n_parallel=n_parallel, **options)
        if why_one is not None:
            engine.notify(f"{why_one}: answers are generated one at a time")
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the contexts. Unfinished answers fail with a `BackendError`."""
        with self.stepping:
            try:
                self._resources.close()
            finally:
                self._scheduler.close(BackendError("the engine is closed"))

    # --- requests ---------------------------------------------------------------------------------

    @property
    def n_parallel(self) -> int:
        """The number of answers that can be generated at once."""
        return len(self.slots)

    @property
    def n_busy(self) -> int:
        """The number of requests being served: their prompts are prefilled, or they decode."""
        return len(self._scheduler.busy)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._scheduler.is_idle

    def insert(
        self,
        prompt: str | Prompt,
        *,
        sampling: SamplerOptions | None = None,
        generation: GenerationOptions | None = None,
        draft: bool = True,
        n_drafted_max: int | None = None,
        verifier: VerifierName | None = None,
    ) -> Request:
        """Queue a request. Any thread may do that.

        For options that are None, the session's are used.

        Args:
            prompt: The prompt. A text becomes a user's turn in the model's chat template, if it
                has one.
            sampling: How tokens are chosen.
            generation: When the answer ends.
            draft: Whether to draft for this answer.
            n_drafted_max: The maximum number of tokens to draft in a round.
            verifier: How drafts are verified.

        Raises:
            PromptError: If the prompt is empty, has a token that the target lacks, or is longer
                than the context.
            UsageError: If an option is invalid.
            BackendError: If the engine is closed.
        """
        session = self._session
        if isinstance(prompt, str):
            prompt = session.prompts.of_text(prompt)
        if not isinstance(prompt, Prompt):
            raise UsageError(f"prompt: give a text or a Prompt, not {shown_value(prompt)}")
        self._check_tokens(prompt)
        if len(prompt.tokens) > self.n_ctx:
            raise PromptError(
                f"the prompt has {len(prompt.tokens)} tokens, but the context has {self.n_ctx}",
                hint=f"use a context of {len(prompt.tokens) + 1} tokens or more",
            )
        settings = session.settings.changed(
            session.target,
            sampling,
            generation,
            n_drafted_max=n_drafted_max,
            verifier=verifier,
            thoughts=prompt.thoughts,
        )
        seed = settings.sampling.seed
        if seed < 0:  # the user gave none
            seed = secrets.randbits(32)
        return self._scheduler.add(prompt, settings, seed, drafts=draft)

    def _check_tokens(self, prompt: Prompt) -> None:
        """Check the tokens of a prompt, which the caller may have made.

        Raises:
            PromptError: If there are none, or one that the target lacks.
            UsageError: If they are not a tuple of numbers.
        """
        tokens: Any = prompt.tokens
        are_numbers = all(hasattr(kind, "__index__") for kind in set(map(type, tokens)))
        if not isinstance(tokens, tuple) or not are_numbers:
            raise UsageError(f"tokens: give a tuple of numbers, not {shown_value(tokens)}")
        if not prompt.tokens:
            raise PromptError("the prompt is empty", hint="give something to continue")
        n_tokens = self._session.target.vocabulary.n_tokens
        for token in (min(prompt.tokens), max(prompt.tokens)):
            if not 0 <= token < n_tokens:
                name = self._session.target.name
                raise PromptError(f"there is no token {token}: {name} has {n_tokens} tokens")

    def cancel(self, request: Request) -> FinishedEvent | None:
        """End an answer with the text that it has so far. Any thread may do that.

        An answer that has begun ends at the next step, which returns its summary.

        Returns:
            The summary of a request that was still waiting: it leaves the queue at once. None for
            any other request.
        """
        required("request", Request, request)
        request.is_cancelled = True
        if not self._scheduler.drop(request):
            return None
        finished = interrupted_event(request.index, self._loop.now_s, len(request.prompt.tokens))
        self._publish(request, finished)
        request.finished = finished
        return finished

    def notify(self, message: str) -> None:
        """Let the next answer's events include a notice; an empty message is ignored."""
        if message:
            self._notices.append(message)

    def take_notices(self) -> list[str]:
        """Return the messages of `notify` that no answer has had yet, and forget them."""
        notices = list(self._notices)
        self._notices.clear()
        return notices

    def reload_draft(self) -> bool:
        """Load the draft model again, with the weights that it learnt last.

        After an error, the engine goes on without a draft.

        Returns:
            Whether it was loaded; False if answers are being generated, which need the old one.

        Raises:
            ModelFileError: If the weights cannot be loaded.
            MemoryLimitError: If they do not fit into memory.
        """
        with self.stepping:
            if self.n_busy:
                return False
            self._draft_resources.close()
            self.draft_caches = ()
            self._session.change_draft(self._session.draft_source)
            self.draft_caches = self._open_draft_caches()
            return True

    # --- steps ------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Advance all answers, and return their new events.

        If a slot is free, the next request starts. Then a chunk of one prompt is prefilled, and
        all answers whose prompt is complete run one round.

        Raises:
            BackendError: If the round's batch cannot be decoded: all of its answers have failed.
                (The error of a single answer is not raised; it becomes the request's `failure`.)
        """
        with self.stepping:
            events = self._begin_next()
            for request in self._scheduler.busy:
                if request.is_cancelled:  # free its slot at once
                    rest = request.running.interrupt(self._loop.now_s)
                    events += self._publish(request, *rest)
                    events += self._complete(request)
            request_to_prefill = self._scheduler.next_prefill()
            if request_to_prefill is None:
                return events + self._round()
            if self._scheduler.can_prefill_alongside(request_to_prefill):
                return events + self._round(request_to_prefill)
            return events + self._prefill_chunk(request_to_prefill) + self._round()

    def run(self) -> Iterator[Event]:
        """Step until all requests are done, and yield the events of all answers."""
        while not self.is_idle:
            yield from self.step()

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield the events of one answer until it is done; other answers advance meanwhile.

        Closing or dropping the iterator cancels the request.

        Raises:
            SpecgenError: If the answer failed. If a worker was lost, a summary of the text so far
                is yielded first.
            UsageError: If the request belongs to another engine.
        """
        required("request", Request, request)
        with self.stepping:  # no request is between the queue and its slot
            if not request.is_done and not self._scheduler.has(request):
                raise UsageError("the request belongs to another engine")
        events = self._events_of(request)
        # A generator that has not begun would not cancel the request when it is closed or dropped.
        next(events)
        return events

    def _events_of(self, request: Request) -> Generator[Any, None, None]:
        """Yield None, then the events of `stream`."""
        try:
            yield None
            while True:
                new_events, are_last = request.take_events()
                yield from new_events
                if are_last:
                    break
                try:
                    self.step()
                except WorkerLostError:
                    if request.state == "decoding":
                        yield from request.running.interrupt(self._loop.now_s)
                        yield request.running.finished_event(self._loop.now_s, None)
                    raise
                except BackendError:
                    pass  # The answers of a round have failed. If this is one of them, it is done.
        finally:
            if not request.is_done:  # the caller stopped reading
                self.cancel(request)
        if request.failure is not None:
            raise request.failure

    def _begin_next(self) -> list[Event]:
        """Start the next request if a slot is free, and return its first events.

        Its slot takes over the known prefix of its prompt, and the state of its answer is made.
        """
        was_idle = not self.n_busy
        request = self._scheduler.take_next()
        if request is None:
            return []
        if was_idle:
            self._measure_again()
        slot = request.slot
        assert slot is not None, "it was given one"
        request.load_of_others = LoadOfOthers()
        events: list[Event] = []
        with self._fail_on_error([request]):
            uses_cache = request.settings.generation.uses_cache
            plan = self._prefixes.begin(slot, request.prompt, uses_cache=uses_cache)
            answer = self._factory.new_answer(
                request.prompt,
                self.n_ctx,
                self.draft_caches,
                request.seed,
                request,
                slot.branches(self.target),
            )
            answer.n_loaded = plan.n_loaded
            answer.prefill_stops = plan.stops
            request.answer = answer
            self._prepare(request, answer)
            self._store_prefix(request)
            slot.request = request
            prompt_event = self._prompt_event(request)
            notices = [
                NoticeEvent(request.index, prompt_event.time_s, text)
                for text in self.take_notices()
            ]
            events += self._publish(request, prompt_event, *notices)
        return events

    def _measure_again(self) -> None:
        """Measure the costs of drafting again if they are rough and some minutes old."""
        draft = self._session.draft
        if draft is None:
            return
        costs = self._session.costs
        if not costs.of(None).are_outdated and not costs.of(draft.cost_key).are_outdated:
            return
        with contextlib.suppress(MemoryLimitError, BackendError):  # the rough costs remain
            self.notify(calibrate(self._session))

    def _prompt_event(self, request: Request) -> PromptEvent:
        """Return the first event of an answer: its prompt, its models and its settings."""
        session = self._session
        settings = request.settings
        draft = session.draft if request.drafts else None
        grammar = settings.generation.grammar
        return PromptEvent(
            sequence=request.index,
            time_s=self._loop.now_s,
            text=request.prompt.text,
            n_prompt_tokens=len(request.prompt.tokens),
            target=session.target.name,
            draft=draft.name if draft is not None else "none",
            translated=draft is not None and draft.own_vocabulary is not None,
            kernels=session.target.kernels,
            n_ctx=self.n_ctx,
            sampler=as_json(replace(settings.sampling, seed=request.seed)),
            verifier=settings.verifier,
            grammar=grammar.text if grammar is not None else None,
        )

    def _prefill_chunk(self, request: Request) -> list[Event]:
        """Prefill the next chunk of a prompt, and return the events."""

        def is_cancelled() -> bool:
            return request.is_cancelled

        events: list[Event] = []
        with self._fail_on_error([request]):
            n_max = self._scheduler.n_chunk_max()
            events += self._loop.prefill(request.running, n_max, is_cancelled)
            self._store_prefix(request)
            request.add_events(events)
            events += self._complete(request)
        return events

    def _round(self, request_to_prefill: Request | None = None) -> list[Event]:
        """Run one round for all answers whose prompt is complete, and return the events.

        Args:
            request_to_prefill: A chunk of its prompt is decoded in the same batch.
        """
        decoding = self._scheduler.decoding
        participants = list(decoding)
        decode = None
        if request_to_prefill is not None:
            participants.append(request_to_prefill)
        with self._fail_on_error(participants, raises=True):
            if request_to_prefill is not None:
                n_free_rows = _N_STREAMED_ALONGSIDE if self.target.model.is_streamed else 0
                decode = functools.partial(
                    self._loop.decode_alongside,
                    request_to_prefill.running,
                    self._session.costs.table(),
                    n_free_rows,
                )
            events = self._loop.round([request.running for request in decoding], decode)
        requests = {request.index: request for request in participants}
        for event in events:
            requests[event.sequence].add_events([event])
        if request_to_prefill is not None:
            self._store_prefix(request_to_prefill)
        for request in participants:
            events += self._complete(request)
        return events

    def _store_prefix(self, request: Request) -> None:
        """Store the prefix of a prompt on the disk, if prefill has just reached its end."""
        if request.slot is not None:
            self._prefixes.store(
                request.slot, functools.partial(self._loop.prefill_costs.seconds, 0)
            )

    # --- ends of answers --------------------------------------------------------------------------

    def _complete(self, request: Request) -> list[Event]:
        """Complete a request whose answer is finished: free its slot, and return its last events.

        Nothing happens to a request whose answer is not finished. The request of an answer with an
        error fails, and has no last events.
        """
        answer = request.running
        if not answer.is_finished:
            return []
        if answer.failure is not None:
            self._fail(request, answer.failure)
            return []
        notices: list[Event] = []
        try:
            self._keep(request.prompt, answer)
        except OutputError as error:  # the answer itself has not failed
            text = f"the answer is not kept for the draft: {error.message}"
            notices.append(NoticeEvent(request.index, self._loop.now_s, text))
        finished = self._summary(request)
        events = self._publish(request, *notices, finished)
        # This marks the request as done, so its events have to be queued before: another thread
        # may be waiting for them.
        request.finished = finished
        self._free(request)
        return events

    def _summary(self, request: Request) -> FinishedEvent:
        """Return the summary of a finished answer.

        If other programs kept the machine busy meanwhile, what its decodes changed in the costs is
        not written to disk, unless the costs are rough anyway.
        """
        answer = request.running
        costs = self._session.costs
        others_share = request.load_of_others.share if request.load_of_others is not None else None
        was_busy = is_busy(others_share)
        if was_busy:
            draft = self._session.draft
            costs.of(None).do_not_keep()
            if draft is not None:
                costs.of(draft.cost_key).do_not_keep()
        finished = self._loop.finish(
            answer,
            costs.table(n_past=answer.n_prompt),
            is_rough=was_busy or costs.of(None).are_rough,
        )
        if request.load_of_others is None:  # the answer has not begun
            return finished
        # The first answer after loading reports how long loading took.
        setup_s: dict[str, Any] = dict(self._session.setup_s)
        self._session.setup_s.clear()
        return replace(finished, others_share=others_share, **setup_s)

    def _keep(self, prompt: Prompt, finished: AnswerState) -> None:
        """Let later answers draft from a finished one, and store it if the options ask for that.

        Args:
            prompt: The prompt.
            finished: The answer.

        Raises:
            OutputError: If the draft cannot store the text, or the answer cannot be written for
                learning.
        """
        self._factory.find_phrases(finished)
        tokens = finished.tokens
        self._session.keep_text(tokens)
        folder = self._session.options.learning
        if folder is None:
            return
        answer = KeptAnswer(prompt.tokens, tuple(tokens[len(prompt.tokens) :]))
        draft = self._session.translated_draft
        if draft is not None and prompt.draft_tokens is not None:
            digest = draft.vocabulary.digest()
            answer = replace(answer, draft_prompt=prompt.draft_tokens, draft_vocabulary=digest)
        keep_answer(folder, answer)

    @contextlib.contextmanager
    def _fail_on_error(
        self, requests: Sequence[Request], *, raises: bool = False
    ) -> Iterator[None]:
        """Let the requests fail with any error that the block raises.

        After a `WorkerLostError` they do not fail, since another process may continue them. It is
        always raised again, as is an error that is not a `SpecgenError`.

        Args:
            requests: The requests that the block works for.
            raises: Whether to raise any other error again, too.
        """
        try:
            yield
        except WorkerLostError:
            for request in requests:
                if request.state == "waiting":
                    self._scheduler.put_back(request)
            raise
        except BaseException as error:  # even Ctrl-C, since it leaves the caches in disorder
            for request in requests:
                if request.answer is not None and request.answer.is_finished:
                    self._complete(request)
                else:
                    self._fail(request, error)
            if raises or not isinstance(error, SpecgenError):
                raise

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error.

        Its slot is emptied in all caches, since the error may have left any part of a decode there.
        """
        if not isinstance(error, SpecgenError):
            error = BackendError(f"the round was aborted: {type(error).__name__}")
        request.failure = error
        if request.slot is not None:
            self._clear(request.slot)
        self._free(request)

    def _clear(self, slot: Slot) -> None:
        """Remove the texts of all sequences of a slot from all caches."""
        for backend in (self.target, *self.draft_caches):
            branches = slot.branches(backend)
            for sequence in range(branches.first, branches.first + branches.n_branches):
                backend.remove(sequence)

    def _free(self, request: Request) -> None:
        """Make the slot of a request available to others. Its text stays in the caches."""
        if request.slot is not None:
            request.slot.request = None
        request.slot = None
        request.answer = None

    def _publish(self, request: Request, *events: Event) -> list[Event]:
        """Queue events for `stream`, and return them."""
        request.add_events(events)
        return list(events)

    def _open_draft_caches(self) -> tuple[LlamaBackend, ...]:
        contexts = self._session.draft_contexts(
            self.n_ctx, target=self.target, n_slots=self.n_parallel
        )
        return self._draft_resources.enter_context(contexts)


def generate(
    session: Session,
    prompt: Prompt,
    *,
    interrupted: Callable[[], bool] = never,
    status: Status = no_status,
) -> Generator[Event, None, None]:
    """Generate one answer in new contexts, and yield its events; the last is a `FinishedEvent`.

    The costs of drafting are measured first, if they are needed and not known.

    Args:
        session: The loaded models.
        prompt: The prompt.
        interrupted: Once it returns True, the answer ends with the text that it has.
        status: Shows the user what is being done.

    Raises:
        PromptError: If the prompt is too long.
        MemoryLimitError: If the contexts do not fit into memory.
        BackendError: If the models are closed, or a batch cannot be decoded.
    """
    n_ctx = session.context_size(len(prompt.tokens))
    calibration_notice = calibrate(session, interrupted, status)
    with Engine(session, n_ctx=n_ctx, interrupted=interrupted) as engine:
        engine.notify(calibration_notice)
        yield from engine.stream(engine.insert(prompt))
