"""The engine: generates several answers at once, and keeps the models loaded and the caches filled."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.backend.llama import LlamaBackend
from specgen.engine.answer import Answer
from specgen.engine.contexts import usual_n_ctx
from specgen.engine.generation import Generation
from specgen.engine.loop import Loop
from specgen.engine.measurements import measure_if_costs_decide
from specgen.engine.notices import opening_notices
from specgen.engine.places import Place, Places, SlotState
from specgen.engine.prompts import Prompt
from specgen.errors import (
    BackendError,
    OutputError,
    PromptError,
    SpecgenError,
    UsageError,
    WorkerLostError,
)
from specgen.events import Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.json_values import as_json
from specgen.options import GenerationOptions, SamplerOptions, VerifierName

if TYPE_CHECKING:
    from specgen.engine.session import Session

__all__ = ["MAX_SEQUENCES", "Answer", "Engine"]

#: llama.cpp's limit for the sequences of a context.
MAX_SEQUENCES = 256
#: The most tokens of a prompt that are read between two rounds of other answers, which wait for them.
_N_READ_BESIDE = 64


class Engine:
    """Generates up to `n_parallel` answers at once with a session's models, and any number one after the
    other. Use it as a context manager; it does not close the session.

    The contexts stay open: if a prompt begins like a text that is still in a cache, only the rest of it is
    decoded, by the target and by the draft model. A round of several answers is one batch of the target.
    `n_ctx` is the room for one prompt and its answer, in tokens. By default it is that of the session's
    options, or 4096, or the target's training context if that is less.

    `interrupted` is called between decodes. If it returns True, the unfinished answers end with the text
    that they have; while costs are measured, `KeyboardInterrupt` is raised. `estimate_gain` allows a few
    decodes at the end of each answer to measure the cost of plain decoding. With `learn_alone`, the
    acceptance statistics that an answer adds are dropped with it, so that drafts of an answer never depend
    on the text of another one. `prepare` is called with each answer and its generation before the prompt is
    read, and may change the generation.

    Several threads may use the engine: one at a time steps it, for the answers of all. An answer that
    fails or is cancelled ends alone. Raises `MemoryLimitError` if the contexts do not fit into memory.
    """

    def __init__(
        self,
        session: Session,
        *,
        n_parallel: int = 1,
        n_ctx: int | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        estimate_gain: bool = False,
        learn_alone: bool = False,
        prepare: Callable[[Answer, Generation], None] = lambda _answer, _generation: None,
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
        self._n_ctx = (
            n_ctx if n_ctx is not None else usual_n_ctx(session.options, session.target_model)
        )
        #: Locks: the first is held while the queue changes, the second while the engine steps.
        self._lock, self._stepping = threading.Lock(), threading.RLock()
        self._waiting: deque[Answer] = deque()
        self._n_submitted = 0
        self._is_closed = False
        self._places = Places(n_parallel)
        self._estimates_gain = estimate_gain
        self._learn_alone = learn_alone
        self._prepare = prepare
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            target, _ = self._resources.enter_context(
                session.contexts(self._n_ctx, drafts=False, n_parts=n_parallel)
            )
            self._target = target
            self._loop = Loop(target, session.clock, interrupted)
            self._draft_contexts = self._resources.enter_context(contextlib.ExitStack())
            self._drafts = self._open_drafts()
            draft = self._drafts[0] if self._drafts else None
            #: Seconds that the measurement of drafting costs took; 0 if they were known.
            self.measured_s = measure_if_costs_decide(session, target, draft, interrupted)
            on_error.pop_all()
        self._notices = deque(opening_notices(session, self._n_ctx, self.measured_s))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the contexts. Answers that are not done fail. May be called twice."""
        with self._stepping:
            self._resources.close()
            with self._lock:
                self._is_closed = True
                waiting, self._waiting = list(self._waiting), deque()
            error = BackendError("the engine is closed")
            for answer in (*waiting, *(place.answer for place in self._places)):
                if answer is not None and not answer.is_done:
                    answer.failure = error
            for place in self._places:
                place.free()

    @property
    def n_parallel(self) -> int:
        """The most answers that are generated at once."""
        return len(self._places)

    @property
    def target(self) -> LlamaBackend:
        """The target's context, in which the answers are generated. Nobody else may decode in it."""
        return self._target

    @property
    def n_ctx(self) -> int:
        """The room for one prompt and its answer, in tokens."""
        return self._n_ctx

    def submit(
        self,
        prompt: str | Prompt,
        *,
        sampling: SamplerOptions | None = None,
        generation: GenerationOptions | None = None,
        draft: bool = True,
        n_drafted_max: int | None = None,
        verifier: VerifierName | None = None,
    ) -> Answer:
        """Queue an answer, with the session's options unless others are given. A text becomes a user's
        turn in the model's chat template, if it has one. Without `draft`, the answer is decoded plainly;
        `n_drafted_max` limits the tokens that are drafted in a round. Raises `PromptError` if the prompt
        is invalid or too long for the context, `UsageError` if the options cannot be met, and
        `BackendError` if the engine is closed."""
        session = self._session
        if isinstance(prompt, str):
            prompt = session.prompt(prompt)
        if len(prompt.tokens) > self._n_ctx:
            raise PromptError(
                f"the prompt has {len(prompt.tokens)} tokens, but the context has {self._n_ctx}",
                hint=f"use a context of {len(prompt.tokens) + 1} tokens or more",
            )
        settings = session.answer_settings(
            sampling, generation, n_drafted_max=n_drafted_max, verifier=verifier
        )
        seed = settings.sampling.seed
        seed = seed if seed >= 0 else secrets.randbits(32)
        with self._lock:
            if self._is_closed:
                raise BackendError("the engine is closed")
            answer = Answer(self._n_submitted, prompt, settings, seed, draft)
            self._n_submitted += 1
            self._waiting.append(answer)
        return answer

    def cancel(self, answer: Answer) -> None:
        """End an answer at the next step, with the text that it has by then."""
        answer.is_cancelled = True

    def reload_draft(self) -> bool:
        """Load the draft model again, with the weights that it learnt last, and return True. While
        answers are being generated, do nothing and return False. The draft model's new contexts are
        empty. Raises `ModelFileError` or `MemoryLimitError`; nothing drafts then."""
        with self._stepping:
            if self.n_busy:
                return False
            self._draft_contexts.close()
            self._drafts = ()
            self._session.reload_draft()
            self._drafts = self._open_drafts()
            return True

    def tell(self, message: str) -> None:
        """Add a message to the events of the next answer, as a `NoticeEvent`."""
        self._notices.append(message)

    def _open_drafts(self) -> tuple[LlamaBackend, ...]:
        """Open contexts of the draft model and of the models that draft for it."""
        contexts = self._session.draft_contexts(self._n_ctx, n_parts=len(self._places))
        return self._draft_contexts.enter_context(contexts)

    def take_notices(self) -> list[str]:
        """Return the messages that wait for the next answer. That answer no longer gets them."""
        notices = list(self._notices)
        self._notices.clear()
        return notices

    @property
    def n_busy(self) -> int:
        """The number of answers that are being generated, including those whose prompt is being read."""
        return self._places.n_busy

    @property
    def n_begun(self) -> int:
        """The number of unfinished answers that have their first token."""
        return len(self._places.begun())

    @property
    def is_reading(self) -> bool:
        """Whether a prompt is being read."""
        return self._places.reading() is not None

    def plain_round_s(self) -> float | None:
        """Return the expected seconds of a round without drafts for the answers that have begun, by the
        measured costs; None if there are none, or nothing was measured."""
        begun = self._places.begun()
        if not begun or begun[0].answer is None:
            return None
        n_past = len(begun[0].answer.prompt.tokens)
        table = self._session.costs.table(n_past=n_past)
        return table.seconds(len(begun)) if table else None

    def slot_states(self) -> list[SlotState]:
        """Return what each of the engine's slots is doing."""
        return [place.state for place in self._places]

    @property
    def is_idle(self) -> bool:
        """Whether no answer is waiting or being generated."""
        return not self._waiting and not self._places.n_busy

    def step(self) -> list[Event]:
        """Read a piece of one prompt, if one waits and there is room for its answer, and run one round of
        all answers that have begun. Return the events. Prompts are read one after the other, so that a
        prompt can share the cells of another one that begins alike. An answer that fails has a `failure`
        and no more events. Raises `BackendError` if the target cannot decode the round's batch; all
        answers of the round have failed then."""
        with self._stepping:
            return self._read() + self._round()

    def _round(self) -> list[Event]:
        """Run a round of all answers that have begun, and return its events."""
        busy = self._places.begun()
        answers: dict[int, Answer] = {}
        generations: list[Generation] = []
        for place in busy:
            assert place.answer is not None
            assert place.generation is not None
            answers[place.answer.index] = place.answer
            generations.append(place.generation)
            if place.answer.is_cancelled:
                place.generation.finish("interrupted")
        try:
            events = self._loop.round(generations)
        except WorkerLostError:  # the answers have not failed: another process may make them
            raise
        except BaseException as error:  # also Ctrl-C in the middle of a round
            for place, generation in zip(busy, generations, strict=True):
                if not generation.is_finished:
                    self._fail(place, _why(error))
                self._settle(place)
            raise
        for event in events:
            answers[event.sequence].events.append(event)
        for place in busy:
            events += self._settle(place)
        return events

    def run(self) -> Iterator[Event]:
        """Generate all queued answers, and yield their events as they come."""
        while not self.is_idle:
            yield from self.step()

    def stream(self, answer: Answer) -> Generator[Event, None, None]:
        """Yield the events of one answer until it is done; other answers advance at the same time. Raises
        the error that ended the answer early; if a worker was lost, a summary of the text so far comes
        first. If the iterator is closed early, the answer is cancelled."""
        try:
            while True:
                is_done = answer.is_done  # asked before its events: another thread may step
                while answer.events:
                    yield answer.events.popleft()
                if is_done:
                    break
                try:
                    self.step()
                except WorkerLostError:
                    yield from self._cut_short(answer)
                    raise
        finally:
            if not answer.is_done:  # nobody wants the rest
                self.cancel(answer)
        if answer.failure is not None:
            raise answer.failure

    def answers(self, prompts: Sequence[str | Prompt]) -> list[str]:
        """Return the answers to prompts, in their order. Up to `n_parallel` of them are generated at once.
        Raises the first failure."""
        asked = [self.submit(prompt) for prompt in prompts]
        for _ in self.run():
            pass
        return [answer.text for answer in asked]

    def _cut_short(self, answer: Answer) -> Iterator[Event]:
        """Yield the summary of an answer that has begun and cannot go on; the target decodes nothing."""
        for place in self._places:
            generation = place.generation
            if place.answer is answer and generation is not None and generation.is_started:
                generation.finish("interrupted")
                yield generation.finished_event(self._loop.now_s, None, "")

    # --- how answers begin and end -----------------------------------------------------------

    def _read(self) -> list[Event]:
        """Read a piece of the prompt that is being read, else of the next one in the queue if there is a
        free place for it. Return the events."""
        place = self._places.reading()
        if place is not None:
            return self._read_piece(place)
        if self.n_busy == self.n_parallel:
            return []
        with self._lock:
            if not self._waiting:
                return []
            answer = self._waiting.popleft()
        return self._begin(answer, self._places.free_place(answer.prompt.tokens, self._target))

    def _read_piece(self, place: Place) -> list[Event]:
        """Read a piece of a place's prompt, and return the events."""
        answer, generation = place.answer, place.generation
        assert answer is not None
        assert generation is not None
        n_most = None
        # Unless a row has the same bits in any batch, the pieces must be those of an answer alone.
        if self._places.begun() and self._session.target_model.has_equal_rows:
            n_most = _N_READ_BESIDE
        try:
            if answer.is_cancelled:
                generation.finish("interrupted")
            events = self._loop.read(generation, n_most)
        except WorkerLostError:
            raise
        except BaseException as error:
            self._fail(place, _why(error))
            if not isinstance(error, SpecgenError):
                raise
            return []
        answer.events.extend(events)
        return events + self._settle(place)

    def _begin(self, answer: Answer, place: Place) -> list[Event]:
        place.answer, place.used_last = answer, answer.index
        session, prompt, part = self._session, answer.prompt, place.part
        try:
            part.share_prefix(self._target, prompt.tokens)
            place.generation = session.generation(
                prompt,
                self._n_ctx,
                self._drafts[0] if self._drafts else None,
                answer.seed,
                helpers=self._drafts[1:],
                plain=not answer.drafts,
                settings=answer.settings,
                part=part,
                index=answer.index,
                learns_alone=self._learn_alone,
            )
            self._prepare(answer, place.generation)
            events: list[Event] = [self._prompt_event(answer)]
            while self._notices:
                message = self._notices.popleft()
                events.append(NoticeEvent(answer.index, self._loop.now_s, message))
        except WorkerLostError:
            raise
        except BaseException as error:
            self._fail(place, _why(error))
            if not isinstance(error, SpecgenError):
                raise
            return []
        answer.events.extend(events)
        return events + self._read_piece(place)

    def _prompt_event(self, answer: Answer) -> PromptEvent:
        """Return the event that describes the models and options of an answer."""
        session, prompt, settings = self._session, answer.prompt, answer.settings
        path = session.draft_path if answer.drafts else None
        grammar = settings.generation.grammar
        return PromptEvent(
            sequence=answer.index,
            time_s=self._loop.now_s,
            text=prompt.text,
            n_prompt_tokens=len(prompt.tokens),
            target=session.target_model.name,
            draft=session.draft_name if answer.drafts else "none",
            translation=session.translation(settings) if answer.drafts else None,
            draft_weights=session.costs.context_options(path).weights if path is not None else None,
            kernels=session.target_model.kernels,
            n_ctx=self._n_ctx,
            sampler=as_json(replace(settings.sampling, seed=answer.seed)),
            verifier=session.verifier_name(settings),
            grammar=grammar.text if grammar is not None else None,
        )

    def _settle(self, place: Place) -> list[Event]:
        """Free a place if its answer is done, and return the events of the answer's end."""
        answer, generation = place.answer, place.generation
        if answer is None or generation is None or not generation.is_finished:
            return []
        if generation.failure is not None:
            self._fail(place, generation.failure)
            return []
        notices: list[Event] = []
        try:
            self._session.keep_answer(answer.prompt, generation.tokens)
        except OutputError as error:  # the answer itself has not failed
            message = f"the answer is not kept for the draft to learn from: {error.message}"
            notices.append(NoticeEvent(answer.index, self._loop.now_s, message))
        events = notices + self._loop.finish(generation, estimate_gain=self._estimates_gain)
        answer.events.extend(events)
        (answer.finished,) = [event for event in events if isinstance(event, FinishedEvent)]
        place.free()
        return events

    def _fail(self, place: Place, error: SpecgenError) -> None:
        """End an answer with an error, and clear its part of the caches."""
        place.fail(error, (self._target, *self._drafts))


def _why(error: BaseException) -> SpecgenError:
    """Return the failure of the answers in a round that an exception ended."""
    if isinstance(error, SpecgenError):
        return error
    return BackendError(f"the round was broken off: {type(error).__name__}")
