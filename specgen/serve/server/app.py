"""The server's paths and their handlers."""

from __future__ import annotations

import asyncio
import datetime
import functools
import logging
import mimetypes
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specgen import __version__
from specgen.errors import SpecgenError, UsageError
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.answers import AnswerWriter, Json
from specgen.serve.formats.messages import PING, read_messages
from specgen.serve.formats.openai import (
    ChatWriter,
    embedding_response,
    read_chat,
    read_completion,
    read_embedding_request,
    read_infill,
)
from specgen.serve.formats.request import (
    BodyError,
    Fields,
    Integer,
    Request,
    check_tokens,
    parse,
    with_call_form,
)
from specgen.serve.formats.responses import read_response_request
from specgen.serve.server.http import (
    AccessCheck,
    EventStream,
    RequestError,
    read_json,
    while_connected,
)
from specgen.serve.server.jobs import Insert, Job, ServedEmbedder, ServedModel
from specgen.serve.server.metrics import ServerMetrics
from specgen.serve.server.model_pool import ModelPool, Place
from specgen.serve.server.options import Limits, ServerOptions
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt, template_of
from specgen.session.prompts.infill import infill_prompt
from specgen.session.session import Session
from specgen.system.files import as_json

# Some machines map .js to plain text, and browsers do not run such a script.
for _ending in (".js", ".mjs"):
    mimetypes.add_type("text/javascript", _ending)
#: The page's own files only: no scripts or styles from elsewhere, or in the answers of a model, and no look-up
#: of the hosts that an answer has links to.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Cache-Control": "no-cache",
}
_STATUS_WRONG_METHOD = 405
#: Headers that Anthropic's clients send from web pages.
_CLIENT_HEADERS = (
    "Anthropic-Beta",
    "Anthropic-Dangerous-Direct-Browser-Access",
    "Anthropic-Version",
)
_STATUS_CLIENT_GONE = 499
#: Fields from which a grammar is made.
_GRAMMAR_FIELDS = (
    "grammar",
    "json_schema",
    "response_format",
    "text",
    "output_config",
    "output_format",
)
_log = logging.getLogger("specgen.serve.server")


class _PageFiles(StaticFiles):
    """The files of the page, with its headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


_PAGE = _PageFiles(directory=Path(__file__).parent / "page")


async def _page(request: HttpRequest) -> Response:
    return await _PAGE.get_response("index.html", request.scope)


class _TokenizeBody(Fields):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class _DetokenizeBody(Fields):
    tokens: list[Integer]


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


class Server:
    """Answers requests with the models of a pool."""

    def __init__(self, pool: ModelPool, options: ServerOptions) -> None:
        self._pool = pool
        self._options = options
        self._limits = options.limits
        self._started = int(time.time())

    def app(self) -> ASGIApp:
        routes = [
            Route("/health", self._health),
            Route("/v1/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            Route("/metrics", self._show_metrics),
            Route("/props", self._props),
            Route("/slots", self._slots),
            self._post("/v1/chat/completions", functools.partial(self._complete, "chat")),
            self._post("/v1/completions", functools.partial(self._complete, "completion")),
            self._post("/v1/responses", functools.partial(self._complete, "responses")),
            self._post("/v1/embeddings", self._embed, embeds=True),
            self._post("/v1/messages", functools.partial(self._complete, "messages")),
            self._work("/v1/messages/count_tokens", self._count_tokens),
            self._post("/infill", functools.partial(self._complete, "infill")),
            self._work("/tokenize", _tokenize),
            self._work("/detokenize", _detokenize),
            self._work("/apply-template", self._apply_template),
            Route("/", _page),
            Mount("/page", _PAGE),
        ]
        options = self._options
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key", *_CLIENT_HEADERS],
        )
        return Starlette(
            routes=routes,
            middleware=[
                Middleware(_Counted, metrics=self._pool.metrics),
                *([cors] if options.cors_origins else []),
                Middleware(AccessCheck, options.api_keys, options.host, options.cors_origins),
            ],
            exception_handlers={
                HTTPException: _no_such_path,
                **dict.fromkeys((RequestError, SpecgenError, ClientDisconnect), _refused),
                Exception: _failed,
            },
        )

    def _post(
        self,
        path: str,
        answer: Callable[[Any, HttpRequest, Mapping[str, Any]], Awaitable[Response]],
        *,
        embeds: bool = False,
    ) -> Route:
        """Return a route whose requests have a JSON object as their body, which names a model that generates text, or
        that `embeds`. The model stays loaded until its answers are submitted, and then until they are generated."""

        async def respond(request: HttpRequest) -> Response:
            body = await read_json(request, self._limits)
            place = self._pool.find(body.get("model"))
            if place.entry.embeds != embeds:
                raise _wrong_kind(place.entry.name, embeds=not embeds)
            model = await while_connected(request.receive, self._pool.lease(place))
            try:
                return await answer(model, request, body)
            finally:
                self._pool.release(place)

        return Route(path, respond, methods=["POST"])

    # --- answers -----------------------------------------------------------------------------

    async def _complete(
        self, endpoint: Endpoint, model: ServedModel, request: HttpRequest, body: Mapping[str, Any]
    ) -> Response:
        loop = asyncio.get_running_loop()
        requests, job = await run_in_threadpool(self._submit, model, endpoint, body, loop)
        writer: AnswerWriter = (requests[0].writer or ChatWriter)(
            requests,
            [answer.prompt.text for answer in job.answers],
            identity=uuid.uuid4().hex,
            created=int(time.time()),
            model=model.name,
        )
        end = functools.partial(model.cancel, job)
        chunks = _chunks(writer, job, end, self._limits.request_s)
        if requests[0].streams:
            return EventStream(
                _until_failure(writer, chunks),
                end,
                self._limits.client_s,
                named=endpoint in ("messages", "responses"),
                alive=PING if endpoint == "messages" else None,
            )
        return JSONResponse(await while_connected(request.receive, _whole(writer, chunks)))

    def _submit(
        self,
        model: ServedModel,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
    ) -> tuple[tuple[Request, ...], Job]:
        """Read a body and submit its answers to the engine. Raise `RequestError`, `SpecgenError`."""
        requests = read_requests(endpoint, body, model.session, self._limits)
        engine, n_answers = model.engine, requests[0].n * len(requests)
        n_most = engine.n_parallel + self._limits.n_waiting
        if n_answers > n_most:
            raise BodyError("n", f"{n_answers} answers; there is room for at most {n_most}")
        try:
            model.check_room(n_answers)
            asks = answer_requests(requests, model.session, engine.n_ctx, self._limits)
            return requests, model.submit(asks, loop)
        except UsageError as error:
            field = next((name for name in _GRAMMAR_FIELDS if body.get(name) is not None), None)
            if field is None or "grammar" not in error.message or isinstance(error, BodyError):
                raise
            raise BodyError(field, error.message) from None

    # --- texts and tokens --------------------------------------------------------------------

    def _work(self, path: str, work: Callable[[ServedModel, Mapping[str, Any]], Any]) -> Route:
        """Return a route whose response is what `work` makes of a body, in a thread."""

        async def answer(
            model: ServedModel, _request: HttpRequest, body: Mapping[str, Any]
        ) -> Response:
            return JSONResponse(await run_in_threadpool(work, model, body))

        return self._post(path, answer)

    def _count_tokens(self, model: ServedModel, body: Mapping[str, Any]) -> Any:
        (asked,) = read_requests("messages", body, model.session, self._limits)
        return {"input_tokens": len(prompt_of(asked, model.session, model.engine.n_ctx).tokens)}

    def _apply_template(self, model: ServedModel, body: Mapping[str, Any]) -> Any:
        (asked,) = read_requests("chat", body, model.session, self._limits)
        return {"prompt": prompt_of(asked, model.session, model.engine.n_ctx).text}

    async def _embed(
        self, model: ServedEmbedder, request: HttpRequest, body: Mapping[str, Any]
    ) -> Response:
        asked = await run_in_threadpool(read_embedding_request, body, model.embedder)
        limit_s = self._limits.request_s or None
        try:
            work = asyncio.wait_for(model.embed(asked.tokens, asked.encoded), limit_s)
            vectors = await while_connected(request.receive, work)
        except asyncio.TimeoutError:
            message = f"the embeddings were not done in {limit_s:g} s"
            raise RequestError(503, message, code="timeout") from None
        n_tokens = sum(map(len, asked.tokens))
        content = embedding_response(vectors, n_tokens, model.name, asked.warnings)
        return Response(content, media_type="application/json")

    # --- the server itself -------------------------------------------------------------------

    async def _health(self, _request: HttpRequest) -> Response:
        about: dict[str, Any] = {"status": "ok"}
        places = self._pool.places
        if len(places) > 1 and not self._options.api_keys:  # the path needs no key
            about["models"] = {name: place.status for name, place in places.items()}
        return JSONResponse(about)

    async def _models(self, request: HttpRequest) -> Response:
        name, places = request.path_params.get("model"), self._pool.places
        if name is None:
            return JSONResponse({"object": "list", "data": [*map(self._about, places.values())]})
        if name not in places:
            raise RequestError(404, f"there is no model {name!r}", code="model_not_found")
        return JSONResponse(self._about(places[name]))

    def _about(self, place: Place) -> dict[str, Any]:
        """Return what a list of models says of one. `status` has the form of llama.cpp's server with several
        models."""
        model = place.served
        about = {
            "id": place.entry.name,
            "object": "model",
            "created": self._started,
            "owned_by": "specgen",
            "type": "embeddings" if place.entry.embeds else "llm",
            "status": {"value": place.status, "failed": place.failure is not None},
        }
        if model is not None:
            about["meta"] = {
                "n_vocab": model.target.vocabulary.n_tokens,
                "n_ctx_train": model.target.n_ctx_train,
            }
        return about

    async def _show_metrics(self, _request: HttpRequest) -> Response:
        return Response(self._pool.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _props(self, request: HttpRequest) -> Response:
        place = self._pool.find(request.query_params.get("model"))
        model = place.served
        about = {"model_alias": place.entry.name, "build_info": f"specgen {__version__}"}
        if not isinstance(model, ServedModel):
            return JSONResponse(about)
        session, engine = model.session, model.engine
        template = session.target.chat_template()
        return JSONResponse(
            {
                **about,
                "total_slots": engine.n_parallel,
                "default_generation_settings": {
                    "n_ctx": engine.n_ctx,
                    "params": {
                        **as_json(session.options.sampler),
                        "max_tokens": session.options.generation.max_tokens,
                    },
                },
                "draft": session.draft_name,
                "kernels": session.target.kernels,
                "chat_template": template or "",
                "has_chat_template": template is not None,
            }
        )

    async def _slots(self, request: HttpRequest) -> Response:
        asked = request.query_params.get("model")
        return JSONResponse(
            [
                {
                    "id": slot.number,
                    "model": model.name,
                    "n_ctx": model.engine.n_ctx,
                    "is_processing": (answer := slot.sequence) is not None,
                    "n_prompt_tokens": answer.n_prompt if answer else 0,
                    "n_prompt_tokens_processed": answer.n_read if answer else 0,
                    "n_decoded": answer.n_answer if answer else 0,
                }
                for model in self._pool.loaded
                if isinstance(model, ServedModel) and asked in (None, model.name)
                for slot in model.engine.slots
            ]
        )


class _Counted:
    """Counts responses by their status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(message["status"])
            await send(message)

        await self._app(scope, receive, counting)


async def _no_such_path(request: HttpRequest, error: Exception) -> Response:
    """Respond to Starlette's own refusals: an unknown path, or a method that a path does not support."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == _STATUS_WRONG_METHOD:
        what = f"this path takes {(error.headers or {}).get('Allow')}"
    else:
        routes = [route.path for route in request.app.routes if isinstance(route, Route)]
        paths = [path for path in routes if "{" not in path]  # patterns are of no use to a reader
        what = f"there is no such path; there are {', '.join(paths)}"
    refusal = RequestError(error.status_code, f"{asked}: {what}", headers=error.headers)
    return refusal.response(request.url.path)


async def _refused(request: HttpRequest, error: Exception) -> Response:
    """Respond to a request that cannot be answered; without an error if its client has gone."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_STATUS_CLIENT_GONE)
    refusal = RequestError.of(error) if isinstance(error, SpecgenError) else error
    assert isinstance(refusal, RequestError)
    return refusal.response(request.url.path)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    """Respond to a bug; its traceback goes to the server's log."""
    _log.error("%s failed", request.url.path, exc_info=error)
    bug = RequestError(500, "the server failed; its log says how", code="bug")
    return bug.response(request.url.path)


def _wrong_kind(name: str, *, embeds: bool) -> RequestError:
    if embeds:
        what = f"{name} is an embedding model and generates no text: ask it at /v1/embeddings"
    else:
        what = f"{name} generates text and has no embeddings: serve an embedding model for them"
    return RequestError(400, what, code="unsupported", param="model")


def _tokenize(model: ServedModel, body: Mapping[str, Any]) -> Any:
    asked, vocabulary = parse(_TokenizeBody, body), model.target.vocabulary
    found = vocabulary.tokenize(
        asked.content, add_special=asked.add_special, parse_special=asked.parse_special
    )
    if not asked.with_pieces:
        return {"tokens": list(found)}
    pieces = [{"id": token, "piece": _piece(vocabulary.token_bytes(token))} for token in found]
    return {"tokens": pieces}


def _detokenize(model: ServedModel, body: Mapping[str, Any]) -> Any:
    tokens = parse(_DetokenizeBody, body).tokens
    return {"content": model.session.prompts.of_tokens(tokens).text if tokens else ""}


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


# --- answers --------------------------------------------------------------------------------------


async def _chunks(
    writer: AnswerWriter, job: Job, end: Callable[[], None], limit_s: float
) -> AsyncIterator[Json]:
    """Yield the chunks of a job's answers, which `end` ends as they are: after `limit_s` seconds (0: never), and
    when nobody waits for them. Raise `RequestError` if an answer failed."""
    limit = asyncio.get_running_loop().call_later(limit_s, end) if limit_s > 0 else None
    try:
        for chunk in writer.begin(len(job.answers[0].prompt.tokens)):
            yield chunk
        async for number, event in job.events():
            if isinstance(event, SpecgenError):
                raise RequestError.of(event)
            for chunk in writer.feed(number, event):
                yield chunk
    finally:
        if limit is not None:
            limit.cancel()
        end()


async def _until_failure(writer: AnswerWriter, chunks: AsyncIterator[Json]) -> AsyncIterator[Json]:
    """Yield chunks. If an answer fails, the last one is an error."""
    try:
        async for chunk in chunks:
            yield chunk
    except RequestError as error:
        for chunk in writer.fail(error.body()):
            yield chunk


async def _whole(writer: AnswerWriter, chunks: AsyncIterator[Json]) -> Json:
    async for _ in chunks:
        pass
    return writer.whole()
