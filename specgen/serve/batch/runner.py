"""Answer the lines of a batch, as many at once as the engine has room for."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent, PrefillEvent
from specgen.llama.native_context import MAX_SEQUENCES
from specgen.serve.batch.lines import BatchLine, LineError, Write, result_of, unexpected
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.engine_requests import inserts_of
from specgen.serve.formats.model_adaptation import for_model
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.session.calibration import calibrate, target_costs
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request as EngineRequest
from specgen.session.session import Session
from specgen.text.overlap import common_prefix_length


@dataclass(frozen=True, slots=True)
class Prompting:
    """How the prompts of a batch are rendered."""

    #: Whether a line that is only a text is rendered as a user's turn; None for whether the model
    #: has a chat template.
    chat: bool | None
    #: The system message of such a line.
    system: str | None
    #: The time, for chat templates.
    now: datetime.datetime

    def prompt(self, session: Session, request: ParsedRequest) -> Prompt:
        """Render the prompt of a request, with the exceptions of `ParsedRequest.prompt`."""
        return request.prompt(session.prompts, self.now, chat=self.chat, system=self.system)


@dataclass(slots=True)
class BatchStats:
    """The counts of a batch so far."""

    n_lines: int = 0
    n_answers: int = 0
    n_errors: int = 0
    #: The tokens of all answers, including unfinished ones.
    n_tokens: int = 0
    #: The tokens of prompts, as all following counts only of finished answers.
    n_prompt_tokens: int = 0
    #: The tokens of prompts that were in the cache.
    n_cached_tokens: int = 0
    #: The drafted positions, and how many of them were accepted.
    n_positions: int = 0
    n_accepted: int = 0

    @property
    def n_done(self) -> int:
        """The number of lines that have a result."""
        return self.n_answers + self.n_errors

    def add_answer(self, finished: FinishedEvent) -> None:
        """Count a finished answer, except for its tokens, which were counted as they came."""
        self.n_answers += 1
        self.n_prompt_tokens += finished.n_prompt_tokens
        self.n_cached_tokens += finished.n_cached_tokens
        self.n_positions += finished.n_positions
        self.n_accepted += finished.n_accepted


@dataclass(frozen=True, slots=True)
class _PreparedLine:
    """A line that can be answered."""

    line: BatchLine
    request: ParsedRequest
    prompt: Prompt
    #: The context size that prompt and answer need, in tokens.
    n_ctx: int


@dataclass(frozen=True, slots=True)
class _OpenAnswer:
    """An answer that is being generated."""

    prepared: _PreparedLine
    request: EngineRequest
    #: The events so far that have tokens: those of the answer, and of the prompt if it is echoed.
    events: list[Event] = field(default_factory=list)


class BatchRun:
    """Generates the answers of a batch, and writes each result as soon as it is finished.

    Args:
        session: The models.
        prompting: How prompts are rendered.
        write: Writes a result.
        settings: The settings that affect the answers, written into each result.
        parallel: The number of answers to generate at once; None for the fastest number.
        wall_clock: Returns seconds since 1970.
        note: Gets sentences for the user.
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
        self.stats = BatchStats()
        self._session = session
        self._prompting = prompting
        self._write = write
        self._settings = settings
        self._parallel = parallel
        self._wall_clock = wall_clock
        self._note = note
        #: The number of answers that the engine generates at once.
        self._n_parallel = 0
        #: The answers that are being generated, by the indices of their requests.
        self._open_answers: dict[int, _OpenAnswer] = {}

    @property
    def where(self) -> str:
        """The number of answers at once, in words for a summary."""
        return f"{self._n_parallel} at once"

    def run(
        self,
        lines: Sequence[BatchLine],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generator[BatchStats, None, None]:
        """Answer lines; yield the counts after each round.

        Args:
            lines: The lines.
            interrupted: Returns whether to stop. Unfinished answers are not written then.
        """
        self.stats.n_lines = len(lines)
        prepared_lines = deque(self._prepare(lines, interrupted))
        yield self.stats
        if not prepared_lines or interrupted():
            return
        calibrate(self._session, interrupted)
        with self._open_engine(prepared_lines, interrupted) as engine:
            self._n_parallel = engine.n_parallel
            try:
                while (prepared_lines or self._open_answers) and not interrupted():
                    while prepared_lines and len(self._open_answers) < engine.n_parallel:
                        self._insert(engine, prepared_lines.popleft())
                    try:
                        self._observe(engine.step())
                    finally:
                        self._write_finished()
                    yield self.stats
            finally:
                self._session.measurements.save()

    def _open_engine(
        self, prepared_lines: Sequence[_PreparedLine], interrupted: Callable[[], bool]
    ) -> Engine:
        """Open an engine for the given number of answers at once, or for the fastest that fits."""
        n_ctx = max(prepared.n_ctx for prepared in prepared_lines)
        if self._parallel is not None:
            return Engine(
                self._session,
                n_parallel=self._parallel,
                n_ctx=n_ctx,
                interrupted=interrupted,
            )
        n_parallel = _fastest_parallel(self._session, len(prepared_lines), interrupted)
        return Engine.largest(
            self._session,
            n_parallel=n_parallel,
            n_ctx=n_ctx,
            interrupted=interrupted,
        )

    def _prepare(
        self, lines: Iterable[BatchLine], interrupted: Callable[[], bool]
    ) -> list[_PreparedLine]:
        """Return the lines that can be answered, and write the errors of the others.

        They are in the order in which they are answered, with similar prompts together.
        """
        prepared_lines: list[_PreparedLine] = []
        for line in lines:
            if interrupted():
                break
            if isinstance(line.request, LineError):
                self._fail(line, line.request)
                continue
            with self._line_errors(line):
                prepared_lines.append(self._prepared(line, line.request))
        for notice in dict.fromkeys(prepared.prompt.notice for prepared in prepared_lines):
            if notice:
                self._note(notice)
        order = order_by_prefix([prepared.prompt.tokens for prepared in prepared_lines])
        return [prepared_lines[number] for number in order]

    def _prepared(
        self,
        line: BatchLine,
        request: ParsedRequest,
    ) -> _PreparedLine:
        request = for_model(request, self._session.target)
        prompt = self._prompting.prompt(self._session, request)
        n_ctx = self._session.context_size(len(prompt.tokens), request.generation.max_tokens)
        return _PreparedLine(line, request, prompt, n_ctx)

    @contextlib.contextmanager
    def _line_errors(self, line: BatchLine) -> Iterator[None]:
        """Write an invalid prompt or request, or a bug, as the error of a line.

        Other errors of specgen, such as a failed backend, end the batch.
        """
        try:
            yield
        except (PromptError, UsageError) as error:
            self._fail(line, _line_error(error))
        except SpecgenError:
            raise
        except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
            self._fail(line, unexpected(error, line.number))

    def _insert(self, engine: Engine, prepared: _PreparedLine) -> None:
        """Begin the answer to a line."""
        # All answers share a context that fits the largest one. To get the same text as from
        # `specgen run`, each ends where its own context would be full: at one token more than fit,
        # since the last token is not decoded.
        generation = prepared.request.generation
        max_tokens = prepared.n_ctx + 1 - len(prepared.prompt.tokens)
        if not 0 <= generation.max_tokens <= max_tokens:
            generation = replace(generation, max_tokens=max_tokens)
        with self._line_errors(prepared.line):
            limited_request = replace(prepared.request, generation=generation)
            (insert,) = inserts_of(limited_request, prepared.prompt)  # a line has one answer
            request = insert(engine)
            self._open_answers[request.index] = _OpenAnswer(prepared, request)

    def _observe(self, events: Iterable[Event]) -> None:
        """Keep the events with tokens, and pass on notices."""
        for event in events:
            if isinstance(event, CommittedEvent):
                self.stats.n_tokens += len(event.pieces)
                self._open_answers[event.sequence].events.append(event)
            elif isinstance(event, PrefillEvent):
                self._open_answers[event.sequence].events.append(event)
            elif isinstance(event, NoticeEvent):
                self._note(event.message)

    def _write_finished(self) -> None:
        """Write the results of the answers that are done."""
        for index, answer in list(self._open_answers.items()):
            request = answer.request
            request.events.clear()
            if not request.is_done:
                continue
            del self._open_answers[index]
            if request.failure is not None:
                self._fail(answer.prepared.line, _line_error(request.failure))
            elif request.finished is not None and request.finished.finish_reason != "interrupted":
                self._write_answer(answer, request.finished)

    def _write_answer(
        self,
        answer: _OpenAnswer,
        finished: FinishedEvent,
    ) -> None:
        """Write a finished answer, or the error if its response cannot be made."""
        line = answer.prepared.line
        #: None if the error was written instead.
        result: dict[str, Any] | None = None
        with self._line_errors(line):
            response = {
                "status_code": 200,
                "request_id": f"req-{line.identity}",
                "body": self._body(answer, finished),
            }
            result = result_of(line, self._settings, response, None)
        if result is not None:
            self._write(result)
            self.stats.add_answer(finished)

    def _body(
        self,
        answer: _OpenAnswer,
        finished: FinishedEvent,
    ) -> dict[str, Any]:
        """Return the body of the response that the server would send."""
        prepared = answer.prepared
        context = AnswerContext(
            [prepared.request],
            prompts=[prepared.prompt.text],
            identity=prepared.line.identity,
            created=int(self._wall_clock()),
            model=self._session.target.name,
        )
        writer: AnswerWriter = prepared.request.writer(context)
        # The chunks of a stream are not needed, only what the writer makes of them in the end.
        writer.begin(len(prepared.prompt.tokens))
        for event in (*answer.events, finished):
            writer.feed(0, event)
        return writer.whole()

    def _fail(self, line: BatchLine, error: LineError) -> None:
        """Write an error as the result of a line."""
        self.stats.n_errors += 1
        self._write(result_of(line, self._settings, None, error))


def _line_error(error: SpecgenError) -> LineError:
    """Return an error of specgen in the form for a line's result."""
    code = "failed"
    if isinstance(error, PromptError):
        code = "invalid_prompt"
    elif isinstance(error, UsageError):
        code = "invalid_request"
    message = error.message
    if error.hint:
        message += f"; {error.hint}"
    return LineError(code, message)


# --- the order of the answers, and their number ---------------------------------------------------

#: Prompts are answered next to each other if their common prefix is longer than that of all prompts
#: by at least this number of tokens: then the cache saves its prefill.
_N_SHARED = 16


def order_by_prefix(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the indices of prompts, with those that have a long common prefix next to each other.

    Otherwise the order stays as it is.
    """
    # In the order of their tokens, prompts with a common prefix are neighbours.
    by_tokens = sorted(range(len(prompts)), key=lambda index: prompts[index])
    if len(by_tokens) < 2:
        return by_tokens
    n_common = [
        common_prefix_length(prompts[index], prompts[next_index])
        for index, next_index in itertools.pairwise(by_tokens)
    ]
    # The shortest prefix that two neighbours share is the one that all prompts share.
    min_common = min(n_common) + _N_SHARED
    groups = [[by_tokens[0]]]
    for index, n_common_with_previous in zip(by_tokens[1:], n_common, strict=True):
        if n_common_with_previous < min_common:
            groups.append([])
        groups[-1].append(index)
    return [index for group in sorted(groups, key=min) for index in group]


#: The numbers of answers at once that are considered.
_PARALLEL_CHOICES = (1, 2, 4, 8, 16)
#: The minimum factor by which a larger number must be faster, since it needs more memory.
_MIN_GAIN = 1.05


def _fastest_parallel(
    session: Session,
    n_answers: int,
    interrupted: Callable[[], bool],
) -> int:
    """Return the number of answers at once that gives the most tokens per second.

    It is calculated from the measured costs of the target's decodes, without drafting.

    Args:
        session: The models.
        n_answers: The number of answers of the batch.
        interrupted: Returns whether to stop measuring.
    """
    if n_answers < 2:
        return 1
    table = target_costs(session, interrupted)
    max_parallel = min(n_answers, MAX_SEQUENCES // session.n_sequences_max)
    best = 1
    for n_parallel in _PARALLEL_CHOICES:
        if n_parallel > max_parallel:
            break
        tokens_per_s = n_parallel / table.seconds(n_parallel)
        if tokens_per_s > _MIN_GAIN * best / table.seconds(best):
            best = n_parallel
    return best
