"""Turn the events of a job into the response, whole or streamed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from specgen.errors import SpecgenError
from specgen.events import CommittedEvent, Event, FinishedEvent, Piece
from specgen.serve.formats.openai.answer_parser import AnswerParser
from specgen.serve.formats.openai.chunks import ChunkWriter
from specgen.serve.formats.openai.merge import merged_bodies, merged_figures
from specgen.serve.formats.openai.request import Request
from specgen.serve.formats.openai.response import completion_body, finish_reason, is_cut
from specgen.serve.formats.openai.translation import AnswerWriter
from specgen.serve.server.errors import RequestError
from specgen.serve.server.job_request import ServerRequest
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
    """Makes the response to a request from the events of its `job`.

    `created` is in seconds since 1970. After `limit_s` seconds (0: never) the answers end as they are."""

    def __init__(
        self,
        asked: ServerRequest,
        job: Job,
        thread: EngineThread,
        *,
        model: str,
        created: int,
        limit_s: float,
    ) -> None:
        self._asked = asked
        self._job = job
        self._thread = thread
        self._model = model
        self._created = created
        self._limit_s = limit_s
        self._identity = uuid.uuid4().hex
        self._kind = asked.requests[0].kind
        self._has_logprobs = asked.requests[0].generation.logprobs is not None
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
        return self._with_echo(merged_bodies(self._bodies(), self._asked.n))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the response in chunks. If an answer fails, the last chunk is an error."""
        writer = ChunkWriter(
            self._kind,
            identity=self._identity,
            created=self._created,
            model=self._model,
            has_logprobs=self._has_logprobs,
            has_pieces=self._asked.wish.pieces,
        )
        for number in range(len(self._collected)):
            first = writer.first(number)
            if first is not None:
                yield first
        n_open = len(self._collected)
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
                    more = {} if n_open or self._asked.has_usage_alone else self._figures()
                    yield writer.last(number, finish_reason(event, parser), stop_string, more)
        except RequestError as error:
            yield error.body()
            return
        finally:
            self.end()
        if self._asked.has_usage_alone:
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
        return self._asked.requests[number // self._asked.n]

    def _parser(self, number: int) -> AnswerParser | None:
        """Return a new parser for an answer."""
        return self._request(number).parser(self._job.answers[number].prompt.text)

    def _bodies(self) -> list[dict[str, Any]]:
        """Return a body for each answer, as if it were the only one."""
        return [
            completion_body(
                self._kind,
                collected.finished,
                collected.pieces,
                identity=self._identity,
                created=self._created,
                model=self._model,
                has_logprobs=self._has_logprobs,
                parser=self._parser(number),
                n_reasoning_tokens=collected.n_reasoning_tokens,
                warnings=self._request(number).warnings,
                stop_string=self._request(number).stop_string(collected.finished),
            )
            for number, collected in enumerate(self._collected)
            if collected.finished is not None
        ]

    def _figures(self) -> dict[str, Any]:
        """Return `usage`, `speculative` and `timings` of the response."""
        return self._with_echo(merged_figures(self._bodies(), self._asked.n))

    def _with_echo(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with the request's wishes about drafts in `speculative`."""
        wish = self._asked.wish
        echo = {"draft": wish.draft, "max": wish.max, "verifier": wish.verifier}
        return {**body, "speculative": {**echo, **body["speculative"]}}


class TranslatedResponseBuilder(ResponseBuilder):
    """Makes the response in the form of another API: the chat's, translated."""

    async def body(self) -> dict[str, Any]:
        """Return the whole response. Raise `RequestError` if an answer failed."""
        return self._writer().whole(await super().body())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the response."""
        writer = self._writer()
        for event in writer.begin(len(self._job.answers[0].prompt.tokens)):
            yield event
        async for chunk in super().chunks():
            for event in writer.feed(chunk):
                yield event

    def _writer(self) -> AnswerWriter:
        assert self._asked.translation is not None
        return self._asked.translation.writer(self._identity, self._created, self._model)


class InfillResponseBuilder(ResponseBuilder):
    """Makes the response in the form of llama.cpp's server, for a text with a gap."""

    async def body(self) -> dict[str, Any]:
        """Return the whole response. Raise `RequestError` if an answer failed."""
        body = await super().body()
        return _as_llama_cpp(body, body["choices"][0]["text"], is_end=True)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the response in chunks."""
        async for chunk in super().chunks():
            if "error" in chunk:
                yield chunk
                continue
            choice = chunk["choices"][0]
            is_end = choice["finish_reason"] is not None
            yield _as_llama_cpp(chunk, choice["text"], is_end=is_end)


def _as_llama_cpp(body: dict[str, Any], content: str, *, is_end: bool) -> dict[str, Any]:
    """Return a body with the fields of llama.cpp's server."""
    found: dict[str, Any] = {"index": 0, "content": content, "stop": is_end, "model": body["model"]}
    if is_end:
        usage = body["usage"]
        reason = body["choices"][0]["finish_reason"]
        found |= {
            "stop_type": "eos" if reason == "stop" else "limit",
            "truncated": False,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "timings": body["timings"],
            "speculative": body["speculative"],
        }
    if "pieces" in body:
        found["pieces"] = body["pieces"]
    return found
