"""Turn the events of a job into the response, whole or streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgen.errors import SpecgenError
from specgen.events import CommittedEvent, Event, FinishedEvent, Piece
from specgen.serve.formats.chat_answer import (
    Answer,
    ChunkWriter,
    completion_body,
    figures,
    finish_reason,
    is_cut,
)
from specgen.serve.formats.request import Request
from specgen.serve.formats.tool_calls import AnswerParser
from specgen.serve.server.errors import RequestError
from specgen.serve.server.jobs import EngineThread, Job
from specgen.session.thoughts import ThoughtReader


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
