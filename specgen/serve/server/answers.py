"""Turns the body of a request into answers for the engine, and their events into the response."""

from __future__ import annotations

import asyncio
import datetime
import functools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from specgen.errors import SpecgenError
from specgen.events import CommittedEvent, Event, FinishedEvent, Piece
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.chat_answer import (
    Answer,
    ChunkWriter,
    completion_body,
    figures,
    finish_reason,
    is_cut,
)
from specgen.serve.formats.chat_request import read_chat, read_completion, read_infill
from specgen.serve.formats.fields import BodyError
from specgen.serve.formats.messages_request import read_messages
from specgen.serve.formats.request import Request, check_tokens, with_call_form
from specgen.serve.formats.responses_request import read_response_request
from specgen.serve.formats.tool_calls import AnswerParser
from specgen.serve.server.http import RequestError
from specgen.serve.server.jobs import EngineThread, Insert, Job
from specgen.serve.server.options import Limits
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt, template_of
from specgen.session.prompts.infill import infill_prompt
from specgen.session.session import Session
from specgen.session.thoughts import ThoughtReader

# --- requests -------------------------------------------------------------------------------------


#: ``chat``, ``completion`` and ``responses`` are OpenAI's; ``messages`` is Anthropic's; ``infill`` is
#: llama.cpp's, for a text with a gap.
Endpoint: TypeAlias = Literal["chat", "completion", "infill", "messages", "responses"]
_READ: Mapping[
    Endpoint,
    Callable[[Mapping[str, Any], SamplerOptions, GenerationOptions], tuple[Request, ...]],
] = {
    "chat": read_chat,
    "completion": read_completion,
    "infill": read_infill,
    "messages": read_messages,
    "responses": read_response_request,
}


def read_requests(
    endpoint: Endpoint, body: Mapping[str, Any], loaded: Session, limits: Limits
) -> tuple[Request, ...]:
    """Read a body, with a request for each of its prompts. The options of the command line give the defaults
    of its fields, and the target's chat template the form of tool calls. Raise `BodyError`."""
    options, template = loaded.options, template_of(loaded.target, has_tools=True)
    found = _READ[endpoint](body, options.sampler, options.generation)
    n_answers = found[0].n * len(found)
    if n_answers > limits.n_answers > 0:
        raise BodyError("n", f"{n_answers} answers; at most {limits.n_answers} are allowed")
    return tuple(with_call_form(request, template) for request in found)


def answer_requests(
    requests: Sequence[Request], loaded: Session, n_ctx: int, limits: Limits
) -> list[Insert]:
    """Return what to submit to an engine with contexts of `n_ctx` tokens: all answers to the first prompt,
    then those to the next. Raise `UsageError`, `PromptError`, and `RequestError` for a prompt that does not
    fit."""
    asks: list[Insert] = []
    for request in requests:
        check_tokens(request, loaded.target.vocabulary.n_tokens)
        generation = request.generation
        if limits.answer_tokens > 0 and not 0 <= generation.max_tokens <= limits.answer_tokens:
            generation = replace(generation, max_tokens=limits.answer_tokens)
        prompt = prompt_of(replace(request, generation=generation), loaded, n_ctx)
        _check_length(len(prompt.tokens), n_ctx, limits.prompt_tokens)
        wish, sampling = request.speculative, request.sampling
        for number in range(request.n):
            own = sampling
            if sampling.seed >= 0:
                own = replace(sampling, seed=sampling.seed + number)
            insert = functools.partial(
                Engine.insert,
                prompt=prompt,
                sampling=own,
                generation=generation,
                draft=wish.draft,
                n_drafted_max=wish.max,
                verifier=wish.verifier,
            )
            asks.append(insert)
    return asks


def prompt_of(request: Request, loaded: Session, n_ctx: int) -> Prompt:
    """Return the prompt of a request. Raise `UsageError`, `PromptError`."""
    if request.gap is not None:
        # The far ends of a long text matter little: the text is cut to leave room for an answer.
        n_answer = request.generation.max_tokens
        n_room = max(n_ctx // 4, n_ctx - (n_answer if n_answer >= 0 else n_ctx // 4))
        return infill_prompt(loaded.target, loaded.own_vocabulary, request.gap, n_room).prompt
    now = datetime.datetime.now().astimezone()
    return request.prompt(replace(loaded.prompts, n_ctx=n_ctx), now)


def _check_length(n_tokens: int, n_ctx: int, n_most: int) -> None:
    what = ""
    if n_tokens > n_ctx:
        what = f"but the context has {n_ctx}"
    elif n_tokens > n_most > 0:
        what = f"at most {n_most} are allowed"
    if what:
        message = f"the prompt has {n_tokens} tokens; {what}"
        raise RequestError(400, message, code="context_length_exceeded")


# --- responses ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _AnswerEvents:
    """The events of one answer that the response needs."""

    thoughts: ThoughtReader | None
    pieces: list[Piece] = field(default_factory=list)
    finished: FinishedEvent | None = None
    n_reasoning_tokens: int = 0

    def count_reasoning(self, pieces: tuple[Piece, ...]) -> None:
        """Count the tokens of the thinking block."""
        thoughts = self.thoughts
        if thoughts is None:
            return
        for piece in pieces:
            was_past, was_open = thoughts.is_past, thoughts.is_open
            if was_past:
                return
            thoughts.feed(piece.text)
            self.n_reasoning_tokens += 1
            if thoughts.is_past and not was_open:  # there was none
                self.n_reasoning_tokens = 0


class ResponseBuilder:
    """Makes the response to the `requests` of a body from the events of its `job`: in the form of OpenAI's API,
    or of the one that the request's writer has.

    `created` is in seconds since 1970. After `limit_s` seconds (0: never) the answers end as they are."""

    def __init__(
        self,
        requests: Sequence[Request],
        job: Job,
        thread: EngineThread,
        *,
        model: str,
        created: int,
        limit_s: float,
    ) -> None:
        self._requests = requests
        self._first = requests[0]
        self._job = job
        self._thread = thread
        self._model = model
        self._created = created
        self._limit_s = limit_s
        self._identity = uuid.uuid4().hex
        self._kind = self._first.kind
        self._has_logprobs = self._first.generation.logprobs is not None
        self._collected = [
            _AnswerEvents(self._request(number).thought_reader(answer.prompt.text))
            for number, answer in enumerate(job.answers)
        ]

    def end(self) -> None:
        """End the unfinished answers, since nobody waits for them."""
        self._thread.cancel(self._job)

    async def body(self) -> dict[str, Any]:
        """Return the whole response. Raise `RequestError` if an answer failed."""
        try:
            async for _ in self._events():
                pass
        finally:
            self.end()
        body = self._chat_body()
        if self._first.writer is not None:
            return self._first.writer(self._identity, self._created, self._model).whole(body)
        return body

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the response in chunks. If an answer fails, the last chunk is an error."""
        return self._chat_chunks() if self._first.writer is None else self._written_chunks()

    async def _written_chunks(self) -> AsyncIterator[dict[str, Any]]:
        assert self._first.writer is not None
        writer = self._first.writer(self._identity, self._created, self._model)
        for event in writer.begin(len(self._job.answers[0].prompt.tokens)):
            yield event
        async for chunk in self._chat_chunks():
            for event in writer.feed(chunk):
                yield event

    async def _chat_chunks(self) -> AsyncIterator[dict[str, Any]]:
        writer = ChunkWriter(
            self._kind,
            identity=self._identity,
            created=self._created,
            model=self._model,
            has_logprobs=self._has_logprobs,
            has_pieces=self._first.speculative.pieces,
        )
        n_open = len(self._collected)
        for number in range(n_open):
            for chunk in writer.first(number):
                yield chunk
        parsers = [self._parser(number) for number in range(n_open)]
        try:
            async for number, event in self._events():
                parser = parsers[number]
                if isinstance(event, CommittedEvent):
                    deltas = parser.feed(event.text) if parser is not None else None
                    for chunk in writer.text(number, event, deltas):
                        yield chunk
                elif isinstance(event, FinishedEvent):
                    n_open -= 1
                    stop_string = self._request(number).stop_string(event)
                    if parser is not None:
                        for delta in parser.finish(is_cut=is_cut(event, stop_string)):
                            yield writer.delta(number, delta)
                    more = {} if n_open or self._first.has_usage_alone else self._figures()
                    yield writer.last(number, finish_reason(event, parser), stop_string, more)
        except RequestError as error:
            yield error.body()
            return
        finally:
            self.end()
        if self._first.has_usage_alone:
            yield writer.without_choice(self._figures())

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all answers; keep those for the body. Raise `RequestError` if one failed."""
        limit = None
        if self._limit_s > 0:
            limit = asyncio.get_running_loop().call_later(self._limit_s, self.end)
        try:
            async for number, event in self._job.events():
                if isinstance(event, SpecgenError):
                    raise RequestError.of(event)
                collected = self._collected[number]
                if isinstance(event, CommittedEvent):
                    collected.count_reasoning(event.pieces)
                    if self._has_logprobs:
                        collected.pieces += event.pieces
                elif isinstance(event, FinishedEvent):
                    collected.finished = event
                yield number, event
        finally:
            if limit is not None:
                limit.cancel()

    def _request(self, number: int) -> Request:
        """Return the request of an answer."""
        return self._requests[number // self._first.n]

    def _parser(self, number: int) -> AnswerParser | None:
        """Return a new parser for an answer."""
        return self._request(number).parser(self._job.answers[number].prompt.text)

    def _answers(self) -> list[Answer]:
        """Return the finished answers, each with a new parser."""
        return [
            Answer(
                collected.finished,
                collected.pieces if self._has_logprobs else None,
                self._parser(number),
                self._request(number).stop_string(collected.finished),
                collected.n_reasoning_tokens,
            )
            for number, collected in enumerate(self._collected)
            if collected.finished is not None
        ]

    def _chat_body(self) -> dict[str, Any]:
        """Return the response in OpenAI's form."""
        body = completion_body(
            self._kind,
            self._answers(),
            identity=self._identity,
            created=self._created,
            model=self._model,
            warnings=self._first.warnings,
            n_for_each_prompt=self._first.n,
        )
        return self._with_wish(body)

    def _figures(self) -> dict[str, Any]:
        """Return the figures of the response, for its last chunk."""
        return self._with_wish(figures(self._answers(), self._first.warnings, self._first.n))

    def _with_wish(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with the request's wishes about drafts in `speculative`."""
        wish = self._first.speculative
        echo = {"draft": wish.draft, "max": wish.max, "verifier": wish.verifier}
        return {**body, "speculative": {**echo, **body["speculative"]}}
