"""Answers the lines of a batch, as many at once as the engine has room for."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, NoticeEvent
from specgen.serve.batch.lines import Line, LineError, unexpected
from specgen.serve.batch.results import Write, result_of
from specgen.serve.formats.openai import ChatWriter
from specgen.serve.formats.request import Request, check_tokens, with_call_form
from specgen.session.calibration import calibrate, fastest_parallel
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt, template_of
from specgen.session.request import Request as EngineRequest
from specgen.session.session import Session
from specgen.text.prefix import n_common

#: Prompts are neighbours if they share this many tokens more than all prompts do: decoding these tokens only
#: once is worth more than the order of the lines.
_N_SHARED = 16


@dataclass(frozen=True, slots=True)
class Prompting:
    """How texts of a batch become prompts: `chat` and `system` as in `Session.prompt`, for lines that are a
    prompt; `now` is the date that templates write."""

    chat: bool | None
    system: str | None
    now: datetime.datetime

    def prompt(self, session: Session, request: Request) -> Prompt:
        """Return the prompt of a request. Raise `UsageError`, `PromptError`."""
        return request.prompt(session.prompts, self.now, chat=self.chat, system=self.system)


@dataclass(frozen=True, slots=True)
class _Task:
    """A line that can be answered, and the room that it takes.

    `tokens` is the prompt, int32[n_tokens]; `n_ctx` has room for prompt and answer. The prompt is built again
    when its turn comes: kept as Python integers, the tokens of all lines would take ten times the memory.
    """

    line: Line
    request: Request
    tokens: NDArray[np.int32]
    n_ctx: int


@dataclass(slots=True)
class Tally:
    """The counts of a batch so far."""

    n_lines: int = 0
    n_answers: int = 0
    n_errors: int = 0
    #: Tokens of answers, unfinished ones included.
    n_tokens: int = 0
    #: Tokens of prompts, and those of them that were in the cache already.
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def n_done(self) -> int:
        return self.n_answers + self.n_errors


class Batch:
    """Makes the answers of a batch and writes each when it is finished.

    `settings` is written with each result. `parallel` answers are generated at once; None takes the fastest
    number by measurement. `wall_clock` gives seconds since 1970, and `note` gets sentences for the user.
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
        self.tally = Tally()
        self._parallel, self._n_parallel = parallel, 0
        self._in_making: dict[int, tuple[_Task, EngineRequest, list[CommittedEvent]]] = {}

    @property
    def where(self) -> str:
        """How many answers are generated at once, in words."""
        return f"{self._n_parallel} at once"

    def run(
        self, lines: Sequence[Line], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[Tally, None, None]:
        """Answer the lines. Yield the counts when the prompts are ready, and after each round.

        After an interruption, or an error of the target, unfinished answers are not written; a later run
        asks for them again. Raise `BackendError`, `OutputError`, and what opening an engine raises."""
        tasks = self._prepare(lines, interrupted)
        yield self.tally
        if not tasks or interrupted():
            return
        calibrate(self._session, interrupted)
        n_parallel = self._parallel or fastest_parallel(self._session, len(tasks), interrupted)
        with Engine.largest(
            self._session,
            n_parallel,
            max(task.n_ctx for task in tasks),
            is_fixed=self._parallel is not None,
            interrupted=interrupted,
        ) as engine:
            self._n_parallel = engine.n_parallel
            try:
                while (tasks or self._in_making) and not interrupted():
                    while tasks and len(self._in_making) < engine.n_parallel:
                        self._submit(engine, tasks.popleft())
                    try:
                        self._count(engine.step())
                    finally:
                        self._write_finished()
                    yield self.tally
            finally:
                self._session.memory.save()

    def _prepare(self, lines: Sequence[Line], interrupted: Callable[[], bool]) -> deque[_Task]:
        """Return the lines that can be answered, in the order to answer them in; write the errors of the
        others."""
        self.tally.n_lines = len(lines)
        tasks: list[_Task] = []
        for line in lines:
            if interrupted():
                break
            if isinstance(line.request, LineError):
                self._fail(line, line.request)
                continue
            with self._line_errors(line):
                tasks.append(self._task(line, line.request))
        return deque(tasks[number] for number in order_by_prefix([task.tokens for task in tasks]))

    def _task(self, line: Line, request: Request) -> _Task:
        session = self._session
        request = with_call_form(request, template_of(session.target, has_tools=True))
        check_tokens(request, session.target.vocabulary.n_tokens)
        prompt = self._prompting.prompt(session, request)
        n_ctx = session.context_size(len(prompt.tokens), request.generation.max_tokens)
        return _Task(line, request, np.array(prompt.tokens, np.int32), n_ctx)

    @contextlib.contextmanager
    def _line_errors(self, line: Line) -> Iterator[None]:
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
            prompt = self._prompting.prompt(self._session, task.request)
            # The engine's context fits the largest answer; this one ends where that of `specgen run` is full.
            generation, n_most = task.request.generation, task.n_ctx + 1 - len(prompt.tokens)
            if not 0 <= generation.max_tokens <= n_most:
                generation = replace(generation, max_tokens=n_most)
            answer = engine.insert(prompt, sampling=task.request.sampling, generation=generation)
            self._in_making[answer.index] = (task, answer, [])

    def _count(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CommittedEvent):
                self.tally.n_tokens += len(event.pieces)
                self._in_making[event.sequence][2].append(event)
            elif isinstance(event, NoticeEvent):
                self._note(event.message)

    def _write_finished(self) -> None:
        for index, (task, answer, committed) in list(self._in_making.items()):
            answer.events.clear()
            if not answer.is_done:
                continue
            del self._in_making[index]
            finished, tally = answer.finished, self.tally
            if answer.failure is not None:
                self._fail(task.line, _line_error(answer.failure))
            elif finished is not None and finished.finish_reason != "interrupted":
                try:
                    response = self._response(task, answer, [*committed, finished])
                except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
                    self._fail(task.line, unexpected(error, task.line.number))
                    continue
                tally.n_answers += 1
                tally.n_prompt_tokens += finished.n_prompt_tokens
                tally.n_cached_tokens += finished.n_cached_tokens
                tally.n_drafted += finished.n_drafted
                tally.n_accepted += finished.n_accepted
                self._write(result_of(task.line, self._settings, response, None))

    def _response(
        self, task: _Task, answer: EngineRequest, events: Sequence[Event]
    ) -> dict[str, Any]:
        identity = task.line.identity
        writer = ChatWriter(
            [task.request],
            [answer.prompt.text],
            identity=identity,
            created=int(self._wall_clock()),
            model=self._session.target.name,
        )
        for event in events:
            writer.feed(0, event)
        return {"status_code": 200, "request_id": f"req-{identity}", "body": writer.whole()}

    def _fail(self, line: Line, error: LineError) -> None:
        self.tally.n_errors += 1
        self._write(result_of(line, self._settings, None, error))


def _line_error(error: SpecgenError) -> LineError:
    code = "invalid_request" if isinstance(error, UsageError) else "failed"
    code = "invalid_prompt" if isinstance(error, PromptError) else code
    return LineError(
        code, error.message if error.hint is None else f"{error.message}; {error.hint}"
    )


def order_by_prefix(prompts: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the numbers of the prompts, int32[n_tokens] each, in the order to answer them in.

    Prompts with a long common beginning stand together, where the first of them stood; otherwise the given
    order stays.
    """
    tokens = [prompt.tolist() for prompt in prompts]
    by_tokens = sorted(range(len(prompts)), key=tokens.__getitem__)
    if len(by_tokens) < 2:
        return by_tokens
    common = [n_common(tokens[one], tokens[other]) for one, other in itertools.pairwise(by_tokens)]
    # In sorted order, the first and the last share exactly what all share.
    least = min(common) + _N_SHARED
    groups = [[by_tokens[0]]]
    for number, n in zip(by_tokens[1:], common, strict=True):
        if n < least:
            groups.append([])
        groups[-1].append(number)
    return [number for group in sorted(groups, key=min) for number in group]
