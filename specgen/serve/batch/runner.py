"""Answers the lines of a batch, as many at once as the engine has room for."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, NoticeEvent
from specgen.serve.batch.lines import BatchLine, LineError, Write, result_of, unexpected
from specgen.serve.formats.answer_writer import AnswerContext
from specgen.serve.formats.model_adaptation import for_model
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.session.calibration import calibrate, target_costs
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request as EngineRequest
from specgen.session.session import MAX_SEQUENCES, Session
from specgen.text.overlap import common_prefix_length

#: What a batch's counts add up of its answers' summaries.
_SUMMED = ("n_prompt_tokens", "n_cached_tokens", "n_drafted", "n_accepted")
#: Prompts are neighbours if they share this many tokens more than all do: worth more than their
#: order.
_N_SHARED = 16


@dataclass(frozen=True, slots=True)
class Prompting:
    """How texts become prompts: `chat` and `system` for lines that are one; `now` is for templates."""

    chat: bool | None
    system: str | None
    now: datetime.datetime

    def prompt(self, session: Session, request: ParsedRequest) -> Prompt:
        return request.prompt(session.prompts, self.now, chat=self.chat, system=self.system)


@dataclass(frozen=True, slots=True)
class _Task:
    """A line that can be answered, its prompt, and the context size for both."""

    line: BatchLine
    request: ParsedRequest
    prompt: Prompt
    n_ctx: int


@dataclass(slots=True)
class BatchStats:
    """The counts of a batch so far, unfinished answers' tokens included; some prompt tokens were
    cached.
    """

    n_lines: int = 0
    n_answers: int = 0
    n_errors: int = 0
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def n_done(self) -> int:
        return self.n_answers + self.n_errors


class BatchRun:
    """Makes the answers of a batch, `parallel` at once (None: the fastest number), and writes each,
    with `settings`, when it is finished. `wall_clock` gives seconds since 1970, and `note` gets
    sentences for the user.
    """

    def __init__(
        self,
        session: Session,
        prompting: Prompting,
        write: Write,
        settings: Mapping[str, Any],
        *,
        parallel: int | None,
        wall_clock: Callable[[], float],
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._session, self._prompting, self._write = session, prompting, write
        self._settings, self._wall_clock, self._note = settings, wall_clock, note
        self.stats = BatchStats()
        self._parallel, self._n_parallel = parallel, 0
        self._in_making: dict[int, tuple[_Task, EngineRequest, list[CommittedEvent]]] = {}

    @property
    def where(self) -> str:
        return f"{self._n_parallel} at once"

    def run(
        self, lines: Sequence[BatchLine], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[BatchStats, None, None]:
        """Answer the lines; yield the counts after each round. Unfinished answers are not written."""
        tasks, session = self._prepare(lines, interrupted), self._session
        yield self.stats
        if not tasks or interrupted():
            return
        calibrate(session, interrupted)
        n_parallel = self._parallel or _fastest_parallel(session, len(tasks), interrupted)
        n_ctx = max(task.n_ctx for task in tasks)
        make = Engine if self._parallel is not None else Engine.largest
        with make(session, n_parallel=n_parallel, n_ctx=n_ctx, interrupted=interrupted) as engine:
            self._n_parallel = engine.n_parallel
            try:
                while (tasks or self._in_making) and not interrupted():
                    while tasks and len(self._in_making) < engine.n_parallel:
                        self._submit(engine, tasks.popleft())
                    try:
                        self._count(engine.step())
                    finally:
                        self._write_finished()
                    yield self.stats
            finally:
                session.measurements.save()

    def _prepare(self, lines: Sequence[BatchLine], interrupted: Callable[[], bool]) -> deque[_Task]:
        """Return the lines that can be answered, in that order; write the errors of the others."""
        session, self.stats.n_lines = self._session, len(lines)
        tasks: list[_Task] = []
        for line in lines:
            if interrupted():
                break
            if isinstance(line.request, LineError):
                self._fail(line, line.request)
                continue
            with self._line_errors(line):
                request = for_model(line.request, session.target)
                prompt = self._prompting.prompt(session, request)
                n_ctx = session.context_size(len(prompt.tokens), request.generation.max_tokens)
                tasks.append(_Task(line, request, prompt, n_ctx))
        order = order_by_prefix([task.prompt.tokens for task in tasks])
        return deque(tasks[number] for number in order)

    @contextlib.contextmanager
    def _line_errors(self, line: BatchLine) -> Iterator[None]:
        """Write what goes wrong with a line as its result; other errors of specgen end the batch."""
        try:
            yield
        except (PromptError, UsageError) as error:
            self._fail(line, _line_error(error))
        except SpecgenError:
            raise
        except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
            self._fail(line, unexpected(error, line.number))

    def _submit(self, engine: Engine, task: _Task) -> None:
        with self._line_errors(task.line):
            # The engine's context fits the largest answer; this one ends where that of `specgen
            # run` is full.
            generation, n_most = task.request.generation, task.n_ctx + 1 - len(task.prompt.tokens)
            if not 0 <= generation.max_tokens <= n_most:
                generation = replace(generation, max_tokens=n_most)
            how: dict[str, Any] = {"sampling": task.request.sampling, "generation": generation}
            answer = engine.insert(task.prompt, **how)
            self._in_making[answer.index] = (task, answer, [])

    def _count(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CommittedEvent):
                self.stats.n_tokens += len(event.pieces)
                self._in_making[event.sequence][2].append(event)
            elif isinstance(event, NoticeEvent):
                self._note(event.message)

    def _write_finished(self) -> None:
        for index, (task, answer, committed) in list(self._in_making.items()):
            answer.events.clear()
            if not answer.is_done:
                continue
            del self._in_making[index]
            finished, line = answer.finished, task.line
            if answer.failure is not None:
                self._fail(line, _line_error(answer.failure))
            elif finished is not None and finished.finish_reason != "interrupted":
                result: dict[str, Any] | None = None
                with self._line_errors(line):
                    context = AnswerContext(
                        [task.request],
                        [answer.prompt.text],
                        identity=line.identity,
                        created=int(self._wall_clock()),
                        model=self._session.target.name,
                    )
                    writer = task.request.writer(context)
                    events: list[Event] = [*committed, finished]
                    for event in events:
                        writer.feed(0, event)
                    about = {"status_code": 200, "request_id": f"req-{line.identity}"}
                    response = {**about, "body": writer.whole()}
                    result = result_of(line, self._settings, response, None)
                if result is not None:
                    self._write(result)
                    self.stats.n_answers += 1
                    for name in _SUMMED:
                        n = getattr(self.stats, name) + getattr(finished, name)
                        setattr(self.stats, name, n)

    def _fail(self, line: BatchLine, error: LineError) -> None:
        self.stats.n_errors += 1
        self._write(result_of(line, self._settings, None, error))


def _line_error(error: SpecgenError) -> LineError:
    code = "invalid_request" if isinstance(error, UsageError) else "failed"
    code = "invalid_prompt" if isinstance(error, PromptError) else code
    return LineError(code, "; ".join(filter(None, (error.message, error.hint))))


def order_by_prefix(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the prompts' numbers so that those with a long common beginning stand together."""
    by_tokens = sorted(range(len(prompts)), key=prompts.__getitem__)
    if len(by_tokens) < 2:
        return by_tokens
    pairs = itertools.pairwise(by_tokens)
    common = [common_prefix_length(prompts[one], prompts[other]) for one, other in pairs]
    # In sorted order, the first and the last share exactly what all share.
    least = min(common) + _N_SHARED
    groups = [[by_tokens[0]]]
    for number, n in zip(by_tokens[1:], common, strict=True):
        if n < least:
            groups.append([])
        groups[-1].append(number)
    return [number for group in sorted(groups, key=min) for number in group]


#: The numbers of answers at once; a larger one must be faster by this factor, since it needs
#: memory.
_AT_ONCE, _LEAST_GAIN = (1, 2, 4, 8, 16), 1.05


def _fastest_parallel(session: Session, n_answers: int, interrupted: Callable[[], bool]) -> int:
    """Return the number of answers at once that gives most tokens per second, by the target's
    costs.
    """
    if n_answers < 2:
        return 1
    table = target_costs(session, interrupted)
    n_most = min(n_answers, MAX_SEQUENCES // session.n_sequences_max)
    best = 1
    for n in _AT_ONCE:
        is_faster = n / table.seconds(n) > _LEAST_GAIN * best / table.seconds(best)
        if n <= n_most and is_faster:
            best = n
    return best
