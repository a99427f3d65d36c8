"""Answers the lines of a batch, as many at once as the engine has room for."""

from __future__ import annotations

import datetime
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent, Piece
from specgen.options import GenerationOptions
from specgen.serve.batch.lines import Line, LineError, unexpected
from specgen.serve.batch.results import Results, result_of
from specgen.serve.formats.chat_answer import completion_body
from specgen.serve.formats.request import Request, check_tokens, with_call_form
from specgen.session.engine import Engine
from specgen.session.loaded_models import Models
from specgen.session.prompts import Prompt, template_of
from specgen.session.request import Request as EngineRequest
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

    def prompt(self, loaded: Models, request: Request) -> Prompt:
        """Return the prompt of a request. Raise `UsageError`, `PromptError`."""
        if request.kind == "chat":
            return loaded.prompts.of_messages(
                request.messages,
                now=self.now,
                tools=request.tool_definitions,
                variables=request.template_variables,
            )
        if request.tokens is not None:
            return loaded.prompts.of_tokens(request.tokens)
        if request.kind == "completion":
            return loaded.prompts.of_text(request.text, chat=False)
        return loaded.prompts.of_text(
            request.text, chat=self.chat, system=self.system, now=self.now
        )


@dataclass(frozen=True, slots=True)
class Task:
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

    `settings` is written with each result, `wall_clock` gives seconds since 1970, and `note` gets sentences
    for the user.
    """

    def __init__(
        self,
        loaded: Models,
        prompting: Prompting,
        results: Results,
        settings: Mapping[str, Any],
        *,
        wall_clock: Callable[[], float],
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._loaded = loaded
        self._prompting = prompting
        self._results = results
        self._settings = settings
        self._wall_clock = wall_clock
        self._note = note
        self.tally = Tally()
        self._in_making: dict[int, tuple[Task, EngineRequest, list[Piece]]] = {}

    def prepare(
        self, lines: Sequence[Line], interrupted: Callable[[], bool] = lambda: False
    ) -> list[Task]:
        """Return the lines that can be answered, in the order to answer them in; write the errors of the
        others. Raise `OutputError`."""
        self.tally.n_lines = len(lines)
        tasks: list[Task] = []
        for line in lines:
            if interrupted():
                break
            found = self.task(line)
            if isinstance(found, Task):
                tasks.append(found)
            else:
                self._fail(line, found)
        return [tasks[number] for number in order_by_prefix([task.tokens for task in tasks])]

    def task(self, line: Line) -> Task | LineError:
        """Return a line with the room that its answer takes, or the reason why it cannot be answered."""
        request = line.request
        if isinstance(request, LineError):
            return request
        loaded = self._loaded
        try:
            template = template_of(loaded.target, has_tools=True)
            request = with_call_form(request, template)
            check_tokens(request, loaded.target.vocabulary.n_tokens)
            prompt = self._prompting.prompt(loaded, request)
            n_ctx = loaded.context_size(len(prompt.tokens), request.generation.max_tokens)
        except (PromptError, UsageError) as error:
            return _line_error(error)
        except SpecgenError:
            raise
        except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
            return unexpected(error, line.number)
        return Task(line, request, np.array(prompt.tokens, np.int32), n_ctx)

    def run(
        self,
        engine: Engine,
        tasks: Sequence[Task] | deque[Task],
        interrupted: Callable[[], bool] = lambda: False,
        report: Callable[[Tally], None] = lambda _tally: None,
    ) -> None:
        """Make the answers. `report` gets the counts so far, and may append to `tasks` if that is a deque,
        which is emptied.

        After an interruption, or an error of the target, unfinished answers are not written; a later run
        asks for them again. Raise `BackendError`, `OutputError`."""
        waiting = tasks if isinstance(tasks, deque) else deque(tasks)
        while (waiting or self._in_making) and not interrupted():
            while waiting and len(self._in_making) < engine.n_parallel:
                self._submit(engine, waiting.popleft())
            try:
                self._count(engine.step())
            finally:
                self._write_finished()
            report(self.tally)

    def _submit(self, engine: Engine, task: Task) -> None:
        try:
            prompt = self._prompting.prompt(self._loaded, task.request)
            generation = _ending_within(task.request.generation, task.n_ctx, len(prompt.tokens))
            answer = engine.insert(prompt, sampling=task.request.sampling, generation=generation)
        except (PromptError, UsageError) as error:
            self._fail(task.line, _line_error(error))
        except SpecgenError:
            raise
        except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
            self._fail(task.line, unexpected(error, task.line.number))
        else:
            self._in_making[answer.index] = (task, answer, [])

    def _count(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CommittedEvent):
                self.tally.n_tokens += len(event.pieces)
                task, _, pieces = self._in_making[event.sequence]
                if task.request.generation.logprobs is not None:
                    pieces += event.pieces
            elif isinstance(event, NoticeEvent):
                self._note(event.message)

    def _write_finished(self) -> None:
        for index, (task, answer, pieces) in list(self._in_making.items()):
            answer.events.clear()
            if not answer.is_done:
                continue
            del self._in_making[index]
            finished = answer.finished
            if answer.failure is not None:
                self._fail(task.line, _line_error(answer.failure))
            elif finished is not None and finished.finish_reason != "interrupted":
                try:
                    response = self._response(task, answer, finished, pieces)
                except Exception as error:  # noqa: BLE001 - it ends this line, not the batch
                    self._fail(task.line, unexpected(error, task.line.number))
                    continue
                tally = self.tally
                tally.n_answers += 1
                tally.n_prompt_tokens += finished.n_prompt_tokens
                tally.n_cached_tokens += finished.n_cached_tokens
                tally.n_drafted += finished.n_drafted
                tally.n_accepted += finished.n_accepted
                self._results.write(result_of(task.line, self._settings, response, None))

    def _response(
        self, task: Task, answer: EngineRequest, finished: FinishedEvent, pieces: list[Piece]
    ) -> dict[str, Any]:
        identity = task.line.identity
        body = completion_body(
            task.request.kind,
            finished,
            pieces,
            identity=identity,
            created=int(self._wall_clock()),
            model=self._loaded.target.name,
            has_logprobs=task.request.generation.logprobs is not None,
            parser=task.request.parser(answer.prompt.text),
            warnings=task.request.warnings,
            stop_string=task.request.stop_string(finished),
        )
        return {"status_code": 200, "request_id": f"req-{identity}", "body": body}

    def _fail(self, line: Line, error: LineError) -> None:
        self.tally.n_errors += 1
        self._results.write(result_of(line, self._settings, None, error))


def _ending_within(generation: GenerationOptions, n_ctx: int, n_prompt: int) -> GenerationOptions:
    """Return the same options, ending where the context of `specgen run` would be full. The batch's context
    may be larger, since it fits the largest answer."""
    n_most = n_ctx + 1 - n_prompt
    if 0 <= generation.max_tokens <= n_most:
        return generation
    return replace(generation, max_tokens=n_most)


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
        if n >= least:
            groups[-1].append(number)
        else:
            groups.append([number])
    return [number for group in sorted(groups, key=min) for number in group]
