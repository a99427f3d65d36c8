"""Generated answers: an HTTP request becomes requests to the engine, and a response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specgen.errors import PromptLengthError, SpecgenError
from specgen.events import CommittedEvent, Event, FinishedEvent
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.engine_requests import (
    Insert,
    Reader,
    inserts_of,
    parse_requests,
)
from specgen.serve.formats.fields import Json
from specgen.serve.formats.old_turns import fitting_prompt
from specgen.serve.formats.parsed_request import ParsedRequest, ParsedRequests
from specgen.serve.formats.request_errors import BodyError, RequestError
from specgen.serve.server.http import EventStream, while_connected
from specgen.serve.server.jobs import Job, ServedModel
from specgen.serve.server.options import Limits
from specgen.session.prompts import Prompt


async def generate(
    read: Reader,
    limits: Limits,
    model: ServedModel,
    http_request: HttpRequest,
    body: Json,
) -> Response:
    """Answer a request for generated text, as a whole or as a stream.

    Args:
        read: Reads the body.
        limits: The limits of requests.
        model: The model, which is leased.
        http_request: The request.
        body: Its body.
    """
    loop = asyncio.get_running_loop()
    requests, job = await run_in_threadpool(_submit, read, limits, model, body, loop)
    context = AnswerContext(
        requests,
        prompts=[answer.prompt.text for answer in job.answers],
        identity=uuid.uuid4().hex,
        created=int(time.time()),
        model=model.name,
        prompt_tokens=[answer.prompt.tokens for answer in job.answers],
    )
    writer: AnswerWriter = requests[0].writer(context)
    streams = requests[0].streams
    end = partial(model.cancel, job)
    chunks = _chunks(writer, job, end, limits.request_s, streams=streams)
    if streams:
        return EventStream(
            chunks,
            end,
            limits.client_s,
            stream_format=writer.stream_format,
            keep_alive_event=writer.keep_alive_event,
        )
    return JSONResponse(await while_connected(http_request.receive, _whole(writer, chunks)))


# --- reading and submitting -----------------------------------------------------------------------


def _submit(
    read: Reader,
    limits: Limits,
    model: ServedModel,
    body: Json,
    loop: asyncio.AbstractEventLoop,
) -> tuple[ParsedRequests, Job]:
    """Read a body and submit its answers: all to the first prompt, then those to the next.

    Raises:
        RequestError: If too many requests are waiting.
        SpecgenError: If the body is not valid or wants too many answers, or the engine has failed.
    """
    requests = parse_requests(read, model.session, body)
    n_answers = requests[0].n * len(requests)
    max_answers = model.n_parallel + limits.n_waiting
    if limits.n_answers > 0:
        max_answers = min(max_answers, limits.n_answers)
    if n_answers > max_answers:
        raise BodyError("n", f"{n_answers} answers; at most {max_answers} are allowed")
    # Check the queue before the prompts are tokenized, which may take long.
    model.check_room(n_answers)

    limited_requests: list[ParsedRequest] = []
    inserts: list[Insert] = []
    for request in requests:
        limited_request, prompt = _within_limits(request, model, limits)
        limited_requests.append(limited_request)
        inserts += inserts_of(limited_request, prompt)
    return tuple(limited_requests), model.submit(inserts, loop)


def _within_limits(
    request: ParsedRequest,
    model: ServedModel,
    limits: Limits,
) -> tuple[ParsedRequest, Prompt]:
    """Return a request within the server's limits, and its prompt.

    Raises:
        PromptError: If the prompt exceeds the limits.
    """
    generation = request.generation
    if limits.answer_tokens > 0 and not 0 <= generation.max_tokens <= limits.answer_tokens:
        generation = replace(generation, max_tokens=limits.answer_tokens)
        request = replace(request, generation=generation)
    n_ctx = model.engine.n_ctx
    max_tokens = _max_prompt_tokens(n_ctx, limits)
    request, prompt = fitting_prompt(request, model.session, n_ctx, max_tokens)
    _check_length(len(prompt.tokens), max_tokens, n_ctx)
    return request, prompt


def _max_prompt_tokens(n_ctx: int, limits: Limits) -> int:
    """Return the number of tokens that a prompt may have, by the context and the server's limit."""
    if limits.prompt_tokens > 0:
        return min(n_ctx, limits.prompt_tokens)
    return n_ctx


def _check_length(n_tokens: int, max_tokens: int, n_ctx: int) -> None:
    """Raise `PromptLengthError` if a prompt has more than `max_tokens` tokens."""
    if n_tokens > max_tokens:
        limit = f"at most {max_tokens} are allowed"
        if max_tokens == n_ctx:
            limit = f"the context has {n_ctx}"
        message = f"the prompt has {n_tokens} tokens, but {limit}"
        raise PromptLengthError(message, n_tokens, max_tokens)


# --- writing --------------------------------------------------------------------------------------


async def _chunks(
    writer: AnswerWriter,
    job: Job,
    end: Callable[[], None],
    limit_s: float,
    *,
    streams: bool,
) -> AsyncIterator[Json]:
    """Yield the chunks of a job's answers, and end the answers if the consumer stops.

    Args:
        writer: Writes the chunks.
        job: The answers.
        end: Ends the answers with the text that they have.
        limit_s: The time after which they are ended, in seconds; 0 for no limit.
        streams: Whether the chunks are sent. If so, an error becomes the last chunk.

    Raises:
        RequestError: If an answer has failed, and the chunks are not sent.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_later(limit_s, end) if limit_s > 0 else None
    first_token_s: float | None = None
    try:
        for chunk in writer.begin(len(job.answers[0].prompt.tokens)):
            yield chunk
        async for number, event in job.events():
            if isinstance(event, SpecgenError) or _is_empty(event):
                error = _failure(event, job, limit_s)
                if not streams:
                    raise error
                for chunk in writer.fail(error.body()):
                    yield chunk
                return
            for chunk in writer.feed(number, event):
                yield chunk
            if isinstance(event, CommittedEvent):
                if first_token_s is None:
                    first_token_s = loop.time()
                if writer.is_over(number, loop.time() - first_token_s):
                    end()
    finally:
        if timer is not None:
            timer.cancel()
        end()


def _is_empty(event: Event) -> bool:
    """Return whether an answer was ended before its first token.

    That is reported as an error, since an empty answer would look like a complete one.
    """
    return (
        isinstance(event, FinishedEvent)
        and event.finish_reason == "interrupted"
        and event.n_tokens == 0
    )


def _failure(
    event: Event | SpecgenError,
    job: Job,
    limit_s: float,
) -> RequestError:
    """Return the error of an answer that has failed, or was ended before its first token."""
    if isinstance(event, SpecgenError):
        return RequestError.of(event)
    if job.is_cut:
        return RequestError.shutting_down()
    return RequestError(503, f"no token was generated within {limit_s:g} s", "timeout")


async def _whole(writer: AnswerWriter, chunks: AsyncIterator[Json]) -> Json:
    """Return the whole response, when its chunks have all been written."""
    async for _ in chunks:
        pass
    return writer.whole()
