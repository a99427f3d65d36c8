"""Several answers at once, from models that stay loaded and caches that stay filled."""

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

#: llama.cpp has no room for more sequences in a context.
MAX_SEQUENCES = 256
#: How much of a prompt is read between two rounds of other answers, in tokens: these wait for it.
_N_READ_BESIDE = 64


class Engine:
    """Makes up to `n_parallel` answers at once with a session's models, and any number one after the
    other. Use it as a context manager; it does not close the session.

    The contexts stay: a prompt that begins like a text that is still in a cache decodes only the
    rest, in the target and in the draft model alike. A round of several answers is one batch of the
    target. `n_ctx` is the room for one prompt and its answer, in tokens; by default as the session's
    options say, or 4096, or what the target was trained with if that is less.

    `interrupted` is asked between decodes; a yes ends the answers that are in the making with what
    there is of them, and raises `KeyboardInterrupt` while costs are measured. `estimate_gain` allows a few decodes at the end of each answer to learn what
    plain decoding costs. What is learnt of drafts in answers that `learn_alone` is forgotten with
    them: no answer is drafted for otherwise because of what another one said.

    All of it may be used from several threads: one at a time steps it, for the answers of all. An
    answer that fails, or is cancelled, ends alone. Raises `MemoryLimitError` if the contexts do not fit the memory.
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
        #: Held while the queue is changed, and while the engine steps.
        self._lock, self._stepping = threading.Lock(), threading.RLock()
        self._waiting: deque[Answer] = deque()
        self._n_submitted = 0
        self._is_closed = False
        self._places = Places(n_parallel)
        self._estimates_gain = estimate_gain
        self._learn_alone = learn_alone
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
            #: Seconds that it took to measure what drafting costs; 0 where that was known.
            self.measured_s = measure_if_costs_decide(session, target, draft, interrupted)
            on_error.pop_all()
        self._notices = deque(opening_notices(session, self._n_ctx, self.measured_s))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the contexts; answers that are not done fail. May be called twice."""
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
        """How many answers are made at once, at most."""
        return len(self._places)

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
        """Ask for an answer, with the session's options unless others are given. A text is a user's
        turn in the model's chat template, if it has one. Without `draft`, nothing drafts for it; no
        more than `n_drafted_max` tokens are drafted in a round. Raises `PromptError` if the prompt has
        no room in the context, or cannot be one, `UsageError` if the options cannot be met, and
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
        """End an answer with what there is of it, at the next step."""
        answer.is_cancelled = True

    def reload_draft(self) -> bool:
        """Load the draft model again, which drafts from the weights that it learnt last; False, and
        nothing is done, while answers are in the making. What it says next, it says of what it reads
        anew. Raises `ModelFileError` or `MemoryLimitError`; nothing drafts then."""
        with self._stepping:
            if self.n_busy:
                return False
            self._draft_contexts.close()
            self._drafts = ()
            self._session.reload_draft()
            self._drafts = self._open_drafts()
            return True

    def tell(self, message: str) -> None:
        """Let the next answer tell something, as a `NoticeEvent`."""
        self._notices.append(message)

    def _open_drafts(self) -> tuple[LlamaBackend, ...]:
        """Contexts of the draft model, and of what drafts for it."""
        contexts = self._session.draft_contexts(self._n_ctx, n_parts=len(self._places))
        return self._draft_contexts.enter_context(contexts)

    def take_notices(self) -> list[str]:
        """What should be known before the first answer, which does not tell it any more then."""
        notices = list(self._notices)
        self._notices.clear()
        return notices

    @property
    def n_busy(self) -> int:
        """How many answers are in the making."""
        return self._places.n_busy

    @property
    def n_begun(self) -> int:
        """How many answers are in the making, behind their first token."""
        return len(self._places.begun())

    @property
    def is_reading(self) -> bool:
        """Whether a prompt is being read."""
        return self._places.reading() is not None

    def plain_round_s(self) -> float | None:
        """Seconds of a round of the answers in the making if nothing drafted for them, by the
        measured costs; None if there are none, or nothing was measured."""
        begun = self._places.begun()
        if not begun or begun[0].answer is None:
            return None
        n_past = len(begun[0].answer.prompt.tokens)
        table = self._session.costs.table(n_past=n_past)
        return table.seconds(len(begun)) if table else None

    def slot_states(self) -> list[SlotState]:
        """What each of the engine's slots is doing."""
        return [place.state for place in self._places]

    @property
    def is_idle(self) -> bool:
        """Whether no answer is waiting or in the making."""
        return not self._waiting and not self._places.n_busy

    def step(self) -> list[Event]:
        """Read a piece of one prompt, if there is one to read and room for its answer, and make one
        round of all answers that are begun; their events. Prompts are read one after the other, so
        that one which begins like another shares what is read of that. An answer that fails has its
        `failure` then, and no more events. Raises `BackendError` if the target cannot decode the
        round's batch: all answers of it have failed then."""
        with self._stepping:
            return self._read() + self._round()

    def _round(self) -> list[Event]:
        """A round of all answers that are begun; their events."""
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
        except BaseException as error:  # Ctrl-C in the middle of a round too
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
        """Make all answers that were asked for; their events, as they come."""
        while not self.is_idle:
            yield from self.step()

    def stream(self, answer: Answer) -> Generator[Event, None, None]:
        """The events of one answer until it is done, making others beside it. Raises what ended it
        before its time; where a worker is lost, the summary of what there is comes before. An answer
        whose iterator is closed before is cancelled."""
        try:
            while True:
                is_done = answer.is_done  # before its events are looked at: another thread may step
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
        """The answers to prompts, in their order, as many at once as there is room for. Raises the
        first failure."""
        asked = [self.submit(prompt) for prompt in prompts]
        for _ in self.run():
            pass
        return [answer.text for answer in asked]

    def _cut_short(self, answer: Answer) -> Iterator[Event]:
        """The summary of an answer that was begun and cannot go on; the target decodes nothing more."""
        for place in self._places:
            generation = place.generation
            if place.answer is answer and generation is not None and generation.is_started:
                generation.finish("interrupted")
                yield generation.finished_event(self._loop.now_s, None, "")

    # --- how answers begin and end -----------------------------------------------------------

    def _read(self) -> list[Event]:
        """Read a piece of a prompt: of the one that is being read, else of the next one in the
        queue, if there is a free place for it."""
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
        """Read a piece of the prompt of a place; the events of that."""
        answer, generation = place.answer, place.generation
        assert answer is not None
        assert generation is not None
        n_most = None
        # Where rows are not the same bits in any batch, pieces are as without other answers.
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
        """The event that says what is going to run."""
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
        """Free a place whose answer is done; the events of its end."""
        answer, generation = place.answer, place.generation
        if answer is None or generation is None or not generation.is_finished:
            return []
        if generation.failure is not None:
            self._fail(place, generation.failure)
            return []
        notices: list[Event] = []
        try:
            self._session.keep_answer(answer.prompt, generation.tokens)
        except OutputError as error:  # the answer is there, whether or not it is kept
            message = f"the answer is not kept for the draft to learn from: {error.message}"
            notices.append(NoticeEvent(answer.index, self._loop.now_s, message))
        events = notices + self._loop.finish(generation, estimate_gain=self._estimates_gain)
        answer.events.extend(events)
        (answer.finished,) = [event for event in events if isinstance(event, FinishedEvent)]
        place.free()
        return events

    def _fail(self, place: Place, error: SpecgenError) -> None:
        """End an answer that cannot go on."""
        place.fail(error, (self._target, *self._drafts))


def _why(error: BaseException) -> SpecgenError:
    """What an answer fails with, for what broke off its round."""
    if isinstance(error, SpecgenError):
        return error
    return BackendError(f"the round was broken off: {type(error).__name__}")
