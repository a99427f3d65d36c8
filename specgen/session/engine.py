"""The engine: generates several answers at once, and keeps the models loaded and the caches filled."""

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
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState, interrupted_event
from specgen.method.cost_table import CostTable
from specgen.models.files import prefixes_folder
from specgen.options import GenerationOptions, SamplerOptions, VerifierName
from specgen.session.calibration import Status, calibrate, no_status
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.kept_answers import KeptAnswer, keep_answer
from specgen.session.prefix_store import CachedContext, PrefixStore, PromptCache, marks_in
from specgen.session.prompts import Prompt
from specgen.session.request import Request, Slot
from specgen.session.scheduler import Scheduler
from specgen.session.session import MAX_SEQUENCES, Session
from specgen.system.files import as_json
from specgen.system.machine import LoadOfOthers, is_busy

#: Texts with fewer tokens are read again.
_LEAST_ANCHORED = 128


class Engine:
    """Generates up to `n_parallel` answers at once with loaded models, which it does not close; a
    context manager.

    `step` takes a request from the queue, reads its prompt in pieces, decodes its answer in rounds
    and settles it. The contexts stay open: of a prompt that begins like a text in a cache, only the
    rest is decoded. `n_ctx` is the room for one prompt and its answer. Once `interrupted` returns
    True, answers end with the text that they have. With `learn_alone`, drafts never depend on
    another text. `prepare` may change a request's answer before its prompt is read. Several threads
    may use the engine: one at a time steps it, for the answers of all. An answer that fails or is
    cancelled ends alone. Raises `MemoryLimitError` if the contexts do not fit into memory.
    """

    def __init__(
        self,
        session: Session,
        *,
        n_parallel: int = 1,
        n_ctx: int | None = None,
        interrupted: Callable[[], bool] = bool,  # never: bool() is False
        learn_alone: bool = False,
        prepare: Callable[[Request, AnswerState], None] = lambda _request, _generation: None,
    ) -> None:
        if n_parallel < 1:
            raise UsageError(f"{n_parallel} answers at once: give 1 or more")
        n_most = MAX_SEQUENCES // session.n_sequences_max
        if n_parallel > n_most:
            raise UsageError(
                f"{n_parallel} answers at once: with drafts of this shape at most {n_most} are possible",
                hint="--tree off allows more",
            )
        self._session = session
        self._factory = DrafterFactory(session, learn_alone)
        #: The room for one prompt and its answer, in tokens.
        self.n_ctx = n_ctx if n_ctx is not None else session.usual_n_ctx
        #: Held while the engine steps: as long as another thread holds it, nothing is decoded.
        self.stepping = threading.RLock()
        self._prepare = prepare
        self._notices: deque[str] = deque()
        self._prefixes: PrefixStore | None = None
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._resources.close)
            target, _ = self._resources.enter_context(
                session.contexts(self.n_ctx, drafts=False, n_slots=n_parallel)
            )
            #: The target's context, in which the answers are generated. Nobody else may decode in
            #: it.
            self.target: LlamaBackend = target
            self._loop = AnswerLoop(target, session.clock, interrupted)
            self._scheduler = Scheduler(n_parallel, target)
            #: The parts of the caches, and the request that each serves.
            self.slots = self._scheduler.slots
            self._draft_contexts = self._resources.enter_context(contextlib.ExitStack())
            #: The draft model's context, and those of the models that draft for it.
            self.drafts = self._open_drafts()
            self._notices.extend(session.notices(self.n_ctx))
            self._open_stores()
            on_error.pop_all()

    @classmethod
    def largest(cls, session: Session, *, n_parallel: int, **options: Any) -> Engine:
        """Return an engine for up to `n_parallel` answers: half as many until the contexts fit into
        memory, and 1 for models that cannot make several at once, with a notice. Raise
        `MemoryLimitError`.
        """
        why = session.why_one_sequence if n_parallel > 1 else None
        n_parallel = 1 if why else n_parallel
        while n_parallel > 1:
            with contextlib.suppress(MemoryLimitError):
                return cls(session, n_parallel=n_parallel, **options)
            n_parallel //= 2
        engine = cls(session, n_parallel=n_parallel, **options)
        engine.notify(f"{why}: answers are made one after the other" if why else "")
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the contexts. Answers that are not done fail."""
        with self.stepping:
            try:
                self._resources.close()
            finally:
                self._scheduler.close(BackendError("the engine is closed"))

    @property
    def n_parallel(self) -> int:
        return len(self.slots)

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
        """Queue a request, with the session's options unless others are given. A text becomes a
        user's turn in the model's chat template, if it has one. `n_drafted_max` limits the tokens
        that are drafted in a round. Raise `PromptError`, `UsageError`, and `BackendError` if the
        engine is closed.
        """
        session = self._session
        if isinstance(prompt, str):
            prompt = session.prompts.of_text(prompt)
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
        seed = seed if seed >= 0 else secrets.randbits(32)
        return self._scheduler.add(prompt, settings, seed, drafts=draft)

    def cancel(self, request: Request) -> FinishedEvent | None:
        """End an answer with the text that it has: at once while its prompt is read, else at the
        next step. One that waits leaves the queue; its summary is returned.
        """
        request.is_cancelled = True
        if not self._scheduler.drop(request):
            return None
        ended = interrupted_event(request.index, self._loop.now_s, len(request.prompt.tokens))
        self._pass_on(request, ended)
        request.finished = ended
        return ended

    def reload_draft(self) -> bool:
        """Load the draft model again, with the weights that it learnt last, unless answers are
        being generated; return whether that was done. After a `ModelFileError` or
        `MemoryLimitError` nothing drafts.
        """
        with self.stepping:
            if self.n_busy:
                return False
            self._draft_contexts.close()
            self.drafts = ()
            self._session.change_draft(self._session.draft_source)
            self.drafts = self._open_drafts()
            return True

    def notify(self, message: str) -> None:
        """Add a message to the events of the next answer, as a `NoticeEvent`; an empty one is none."""
        if message:
            self._notices.append(message)

    def take_notices(self) -> list[str]:
        notices = list(self._notices)
        self._notices.clear()
        return notices

    @property
    def n_busy(self) -> int:
        """How many answers are being generated, those whose prompt is read included."""
        return len(self._scheduler.busy)

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    def step(self) -> list[Event]:
        """Begin the next request if there is room for its answer, decode a piece of one prompt, and
        run one round of all answers that have started. Return the events. An answer that fails has
        a `failure` and no more events. Raise `BackendError` if all answers of the round fail, since
        its batch cannot be decoded.
        """
        with self.stepping:
            events = self._begin_next()
            for request in self._scheduler.busy:
                if request.is_cancelled:  # its slot is free for others at once
                    request.running.finish("interrupted")
                    events += self._settle(request)
            reading = self._scheduler.next_prefill()
            if reading is None or self._scheduler.can_prefill_alongside(reading):
                return events + self._round(reading)
            return events + self._read_piece(reading) + self._round()

    def run(self) -> Iterator[Event]:
        while not self.is_idle:
            yield from self.step()

    def stream(self, request: Request) -> Generator[Event, None, None]:
        """Yield the events of one answer until it is done; others advance at the same time. Raise
        what ended it early; if a worker was lost, a summary of the text so far comes first. To
        close the iterator cancels the request.
        """
        try:
            while True:
                is_done = request.is_done  # asked before its events: another thread may step
                while request.events:
                    yield request.events.popleft()
                if is_done:
                    break
                try:
                    self.step()
                except WorkerLostError:
                    if request.state == "decoding":
                        request.running.finish("interrupted")
                        yield request.running.finished_event(self._loop.now_s, None)
                    raise
        finally:
            if not request.is_done:  # nobody wants the rest
                self.cancel(request)
        if request.failure is not None:
            raise request.failure

    # --- contexts, and what is stored of them ------------------------------------------------

    def _open_drafts(self) -> tuple[LlamaBackend, ...]:
        own = self._session.draft_contexts(self.n_ctx, target=self.target, n_slots=self.n_parallel)
        return self._draft_contexts.enter_context(own)

    def _open_stores(self) -> None:
        """Let the contexts begin with the text of a prompt cache, and open the store of prefixes,
        where the options ask for them.
        """
        options, target = self._session.options, self.target
        context = CachedContext.of(target, options.target_context)
        if options.prompt_cache is not None:
            why = "is on other machines" if target.model.is_remote else ""
            if target.rollback != "cells":
                why = "has a recurrent state, which cannot go back to the end of a prompt"
            if why:
                self.notify(f"--prompt-cache has no effect: {self._session.target.name} {why}")
            else:
                cache = PromptCache(options.prompt_cache)
                self.notify(cache.restore(context))
                self._resources.callback(cache.save, context)
        wanted = options.prefixes
        if wanted is None or wanted.kept == "off" or options.cache is None:
            return
        if not target.model.is_remote:
            folder = prefixes_folder(options.cache)
            self._prefixes = PrefixStore(folder, wanted, context, self._session.clock)
            self._resources.callback(self._prefixes.close)

    def _extend_prefix(
        self, slot: Slot, prompt: Prompt, n_held: int, n_again: int
    ) -> tuple[int, tuple[int, ...]]:
        """Load more of a prompt than the slot's `n_held` tokens from the store. Return how many
        tokens were loaded, and where reading the prompt stops: where its state is stored and, for a
        model that cannot go back anywhere, before the answer's turn, behind which the next prompt
        may go on otherwise than this answer.
        """
        stops, n, n_loaded = [0], len(prompt.tokens), 0
        marks = marks_in(self.target.vocabulary, prompt.tokens) if n > _LEAST_ANCHORED else ()
        if self._prefixes is not None:
            n_loaded = self._prefixes.extend(slot, prompt, marks, n_held, n_again)
            stops.append(self._prefixes.due(slot.branches(self.target).first))
        if self.target.rollback != "cells" and n > _LEAST_ANCHORED:
            stops += marks[-1:]
        return n_loaded, tuple(stop for stop in stops if 0 < stop < n)

    def _store_prefix(self, request: Request) -> None:
        slot = request.slot
        if self._prefixes is not None and slot is not None:
            sequence = slot.branches(self.target).first
            reading_s = self._loop.prefill_costs.seconds(0, self._prefixes.due(sequence))
            self._prefixes.store(sequence, reading_s)

    # --- waiting, reading, decoding, done ----------------------------------------------------

    def _begin_next(self) -> list[Event]:
        request = self._scheduler.take_next()
        if request is None:
            return []
        slot, prompt, n_loaded, stops = request.slot, request.prompt, 0, tuple[int, ...]()
        assert slot is not None, "it was given one"
        request.load, events = LoadOfOthers(), list[Event]()
        with self._failing([request]):
            draft, uses_cache = self._session.draft, request.settings.generation.uses_cache
            # The state behind a prefix may be forgotten, and the first row of such a draft reads
            # it.
            n_again = int(draft is not None and draft.reads in ("all states", "cache"))
            tokens = prompt.tokens[: None if uses_cache else 1]
            n_held = slot.share_prefix(self.target, tokens, n_again=n_again)
            if uses_cache:
                n_loaded, stops = self._extend_prefix(slot, prompt, n_held, n_again)
            answer = self._factory.new_answer(
                prompt, self.n_ctx, self.drafts, request.seed, request
            )
            answer.n_loaded, answer.prefill_stops = n_loaded, stops
            request.answer = answer
            self._prepare(request, answer)
            self._store_prefix(request)
            slot.request = request
            begun = self._begun(request)
            notices = (
                NoticeEvent(request.index, begun.time_s, text) for text in self.take_notices()
            )
            events += self._pass_on(request, begun, *notices)
        return events

    def _begun(self, request: Request) -> PromptEvent:
        session, settings = self._session, request.settings
        draft, grammar = session.draft if request.drafts else None, settings.generation.grammar
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

    def _read_piece(self, request: Request) -> list[Event]:
        events: list[Event] = []
        with self._failing([request]):
            n_most, is_unwanted = self._scheduler.n_piece(), lambda: request.is_cancelled
            events += self._loop.prefill(request.running, n_most, is_unwanted)
            self._store_prefix(request)
            request.events.extend(events)
            events += self._settle(request)
        return events

    def _round(self, reading: Request | None = None) -> list[Event]:
        """Run a round of all answers that have begun. A piece of the prompt of `reading` is read in
        its batch.
        """
        decoding = self._scheduler.decoding
        busy = decoding if reading is None else [*decoding, reading]
        with self._failing(busy, raises=True):
            decode = None
            if reading is not None:
                costs = self._session.costs.table()
                decode = functools.partial(self._loop.decode_alongside, reading.running, costs)
            events = self._loop.round([request.running for request in decoding], decode)
        requests = {request.index: request for request in busy}
        for event in events:
            requests[event.sequence].events.append(event)
        if reading is not None:
            self._store_prefix(reading)
        for request in busy:
            events += self._settle(request)
        return events

    @contextlib.contextmanager
    def _failing(self, requests: Sequence[Request], *, raises: bool = False) -> Iterator[None]:
        """End the requests with what the block raises, which an error of ours does not leave unless
        it `raises`.
        """
        try:
            yield
        except WorkerLostError:  # the answers have not failed: another process may make them
            for request in requests:
                if request.state == "waiting":
                    self._scheduler.put_back(request)
            raise
        except BaseException as error:  # also Ctrl-C in the middle of a round
            for request in requests:
                if request.answer is not None and request.answer.is_finished:
                    self._settle(request)
                else:
                    self._fail(request, error)
            if raises or not isinstance(error, SpecgenError):
                raise

    def _settle(self, request: Request) -> list[Event]:
        """Free the slot of a request if its answer is finished, and return the events of its end."""
        answer = request.running
        if not answer.is_finished:
            return []
        if answer.failure is not None:
            self._fail(request, answer.failure)
            return []
        notices = []
        try:
            self._keep(request.prompt, answer.tokens)
        except OutputError as error:  # the answer itself has not failed
            text = f"the answer is not kept for the draft to learn from: {error.message}"
            notices.append(NoticeEvent(request.index, self._loop.now_s, text))
        costs = self._session.costs
        table = CostTable() if costs.was_busy else costs.table(n_past=answer.n_prompt)
        finished = self._loop.finish(answer, table)
        if request.load is not None:
            setup: dict[str, Any] = dict(self._session.setup_s)
            self._session.setup_s.clear()
            finished = replace(finished, others_share=request.load.share, **setup)
            if is_busy(finished.others_share):  # its decodes say nothing of what they cost
                draft = self._session.draft
                costs.do_not_keep(None, None if draft is None else draft.timed)
        events = self._pass_on(request, *notices, finished)
        request.finished = finished  # after its events: another thread may wait for them
        self._free(request)
        return events

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error, and clear its slot, whose state is uncertain."""
        if not isinstance(error, SpecgenError):
            error = BackendError(f"the round was broken off: {type(error).__name__}")
        request.failure = error
        if (slot := request.slot) is not None:
            for backend in (self.target, *self.drafts):
                own = slot.branches(backend)
                for sequence in range(own.first, own.first + own.n_branches):
                    backend.remove(sequence)
        self._free(request)

    def _free(self, request: Request) -> None:
        if request.slot is not None:
            request.slot.request = None
        request.slot = request.answer = None

    def _pass_on(self, request: Request, *events: Event) -> list[Event]:
        request.events.extend(events)
        return list(events)

    def _keep(self, prompt: Prompt, tokens: Sequence[int]) -> None:
        """Store a finished text for lookups of later answers and for drafts to learn from, if the
        options ask for that. Raise `OutputError` if it cannot be written for learning.
        """
        self._session.ngrams.keep_text(tokens)
        folder = self._session.options.learning
        if folder is None:
            return
        answer = KeptAnswer(prompt.tokens, tuple(tokens[len(prompt.tokens) :]))
        own = self._session.own_vocabulary
        if own is not None and prompt.draft_tokens is not None:
            digest = own.vocabulary.digest()
            answer = replace(answer, draft_prompt=prompt.draft_tokens, draft_vocabulary=digest)
        keep_answer(folder, answer)


def generate(
    session: Session,
    prompt: Prompt,
    *,
    interrupted: Callable[[], bool] = bool,
    status: Status = no_status,
) -> Generator[Event, None, None]:
    """Generate an answer in contexts of its own, and yield its events; the last one is a
    `FinishedEvent`. Raise `PromptError`, `MemoryLimitError`, and `BackendError` if the models are
    closed.
    """
    n_ctx, news = session.context_size(len(prompt.tokens)), calibrate(session, interrupted, status)
    with Engine(session, n_ctx=n_ctx, interrupted=interrupted) as engine:
        engine.notify(news)
        yield from engine.stream(engine.insert(prompt))
