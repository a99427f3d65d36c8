"""Turns the body of a request into answers for the engine, and their events into the response."""

from __future__ import annotations

import asyncio
import datetime
import functools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from specgen.errors import SpecgenError
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.chat_answer import ChatWriter
from specgen.serve.formats.chat_request import read_chat, read_completion, read_infill
from specgen.serve.formats.fields import BodyError
from specgen.serve.formats.messages import read_messages
from specgen.serve.formats.request import Request, check_tokens, with_call_form
from specgen.serve.formats.responses import read_response_request
from specgen.serve.server.http import RequestError
from specgen.serve.server.jobs import Insert, Job, ServedModel
from specgen.serve.server.options import Limits
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt, template_of
from specgen.session.prompts.infill import infill_prompt
from specgen.session.session import Session

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
    endpoint: Endpoint, body: Mapping[str, Any], session: Session, limits: Limits
) -> tuple[Request, ...]:
    """Read a body, with a request for each of its prompts. The options of the command line give the defaults
    of its fields, and the target's chat template the form of tool calls. Raise `BodyError`."""
    options, template = session.options, template_of(session.target, has_tools=True)
    found = _READ[endpoint](body, options.sampler, options.generation)
    n_answers = found[0].n * len(found)
    if n_answers > limits.n_answers > 0:
        raise BodyError("n", f"{n_answers} answers; at most {limits.n_answers} are allowed")
    return tuple(with_call_form(request, template) for request in found)


def answer_requests(
    requests: Sequence[Request], session: Session, n_ctx: int, limits: Limits
) -> list[Insert]:
    """Return what to submit to an engine with contexts of `n_ctx` tokens: all answers to the first prompt,
    then those to the next. Raise `UsageError`, `PromptError`, and `RequestError` for a prompt that does not
    fit."""
    asks: list[Insert] = []
    for request in requests:
        check_tokens(request, session.target.vocabulary.n_tokens)
        generation = request.generation
        if limits.answer_tokens > 0 and not 0 <= generation.max_tokens <= limits.answer_tokens:
            generation = replace(generation, max_tokens=limits.answer_tokens)
        prompt = prompt_of(replace(request, generation=generation), session, n_ctx)
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


def prompt_of(request: Request, session: Session, n_ctx: int) -> Prompt:
    """Return the prompt of a request. Raise `UsageError`, `PromptError`."""
    if request.gap is not None:
        # The far ends of a long text matter little: the text is cut to leave room for an answer.
        n_answer = request.generation.max_tokens
        n_room = max(n_ctx // 4, n_ctx - (n_answer if n_answer >= 0 else n_ctx // 4))
        return infill_prompt(session.target, session.own_vocabulary, request.gap, n_room)[0]
    now = datetime.datetime.now().astimezone()
    return request.prompt(replace(session.prompts, n_ctx=n_ctx), now)


def _check_length(n_tokens: int, n_ctx: int, n_most: int) -> None:
    if n_tokens > n_ctx or n_tokens > n_most > 0:
        limit = f"but the context has {n_ctx}"
        if n_tokens <= n_ctx:
            limit = f"at most {n_most} are allowed"
        message = f"the prompt has {n_tokens} tokens; {limit}"
        raise RequestError(400, message, code="context_length_exceeded")


# --- responses ------------------------------------------------------------------------------------


class ResponseBuilder:
    """Makes the response to the `requests` of a body from the events of its `job`: in the form of OpenAI's API,
    or of the one that the request's writer has.

    `created` is in seconds since 1970. After `limit_s` seconds (0: never) the answers end as they are."""

    def __init__(
        self,
        requests: Sequence[Request],
        job: Job,
        served: ServedModel,
        *,
        created: int,
        limit_s: float,
    ) -> None:
        self._job = job
        self._served = served
        self._limit_s = limit_s
        identity, make = uuid.uuid4().hex, requests[0].writer
        prompts = [answer.prompt.text for answer in job.answers]
        self._chat = ChatWriter(
            requests, prompts, identity=identity, created=created, model=served.name
        )
        self._writer = None if make is None else make(identity, created, served.name)

    def end(self) -> None:
        """End the unfinished answers, since nobody waits for them."""
        self._served.cancel(self._job)

    async def body(self) -> dict[str, Any]:
        """Return the whole response. Raise `RequestError` if an answer failed."""
        async for _ in self._chat_chunks():
            pass
        body = self._chat.whole()
        return body if self._writer is None else self._writer.whole(body)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the response in chunks. If an answer fails, the last chunk is an error."""
        if self._writer is not None:
            for event in self._writer.begin(len(self._job.answers[0].prompt.tokens)):
                yield event
        try:
            async for chunk in self._chat_chunks():
                for event in self._written(chunk):
                    yield event
        except RequestError as error:
            for event in self._written(error.body()):
                yield event

    def _written(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        return [chunk] if self._writer is None else self._writer.feed(chunk)

    async def _chat_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks in OpenAI's form. Raise `RequestError` if an answer failed."""
        limit = None
        if self._limit_s > 0:
            limit = asyncio.get_running_loop().call_later(self._limit_s, self.end)
        try:
            for chunk in self._chat.begin():
                yield chunk
            async for number, event in self._job.events():
                if isinstance(event, SpecgenError):
                    raise RequestError.of(event)
                for chunk in self._chat.feed(number, event):
                    yield chunk
        finally:
            if limit is not None:
                limit.cancel()
            self.end()
