"""The server's paths and their handlers."""

from __future__ import annotations

import asyncio
import datetime
import logging
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from pydantic import AliasChoices, Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specgen import __version__
from specgen.errors import PromptLengthError, SpecgenError
from specgen.events import CommittedEvent, Event, FinishedEvent
from specgen.serve.formats.answer_writer import AnswerContext, AnswerWriter
from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.completions import read_completion
from specgen.serve.formats.embeddings import embedding_response, read_embedding_request
from specgen.serve.formats.fields import Fields, Integer, Json, parse
from specgen.serve.formats.llama_server import read_infill, read_llama_cpp_completion
from specgen.serve.formats.messages import read_messages
from specgen.serve.formats.model_adaptation import for_model
from specgen.serve.formats.ollama import (
    ollama_embeddings,
    read_ollama_chat,
    read_ollama_generate,
)
from specgen.serve.formats.parsed_request import Defaults, ParsedRequest, ParsedRequests
from specgen.serve.formats.request_errors import BodyError, RequestError
from specgen.serve.formats.responses import read_response_request
from specgen.serve.server.http import (
    PAGE,
    AccessCheck,
    DrainingServer,
    EventStream,
    read_json,
    refusal,
    while_connected,
)
from specgen.serve.server.jobs import Insert, Job, ServedEmbedder, ServedModel
from specgen.serve.server.metrics import ServerMetrics
from specgen.serve.server.model_pool import ModelPool, abilities
from specgen.serve.server.options import ServerOptions
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.prompts.infill import infill_prompt
from specgen.system.files import as_json

#: Reads a body; the command line gives the defaults.
Reader: TypeAlias = Callable[[Json, Defaults], ParsedRequests]
#: Some clients leave out ``/v1``.
_READERS: Mapping[str, Reader] = {
    "/v1/messages": read_messages,
    "/v1/completions": read_completion,
    "/completions": partial(read_llama_cpp_completion, or_openai=True),
    "/completion": read_llama_cpp_completion,
    **dict.fromkeys(["/chat/completions", "/v1/chat/completions"], read_chat),
    **dict.fromkeys(["/responses", "/v1/responses"], read_response_request),
    **dict.fromkeys(["/infill", "/v1/infill"], read_infill),
    "/api/chat": read_ollama_chat,
    "/api/generate": read_ollama_generate,
}
#: Writes the response with the vectors of inputs.
_EMBEDDINGS: Mapping[str, Callable[..., bytes]] = {
    **dict.fromkeys(["/embeddings", "/v1/embeddings"], embedding_response),
    **dict.fromkeys(["/api/embed", "/api/embeddings"], ollama_embeddings),
}
_log = logging.getLogger("specgen.serve.server")


async def _page(request: HttpRequest) -> Response:
    return await PAGE.get_response("index.html", request.scope)


class _TokenizeBody(Fields):
    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(
        False, validation_alias=AliasChoices("add_special", "add_special_tokens")
    )
    parse_special: bool = True
    with_pieces: bool = False


class _DetokenizeBody(Fields):
    tokens: list[Integer]


class Server:
    """Answers requests with the models of a pool."""

    def __init__(self, pool: ModelPool, options: ServerOptions) -> None:
        self._pool = pool
        self._options = options
        self._limits = options.limits
        self._started = int(time.time())

    def app(self) -> ASGIApp:
        counted: list[tuple[str, Reader]] = [("/v1/messages/count_tokens", read_messages)]
        for path, read in _READERS.items():
            if path.endswith(("/chat/completions", "/responses")):
                counted.append((f"{path}/input_tokens", read))
        routes = [
            *(Route(f"{start}/health", self._health) for start in ("", "/v1")),
            *(Route(f"{start}/version", _version) for start in ("", "/api")),
            *(Route(f"/api/{name}", self._tags) for name in ("tags", "ps")),
            *(Route(f"{start}/models", self._models) for start in ("", "/v1")),
            *(Route(f"{start}/models/{{model:path}}", self._models) for start in ("", "/v1")),
            Route("/metrics", self._show_metrics),
            Route("/props", self._props),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/slots", self._slots),
            *(self._post(path, partial(self._complete, read)) for path, read in _READERS.items()),
            *(
                self._post(path, partial(self._embed, write), embeds=True)
                for path, write in _EMBEDDINGS.items()
            ),
            *(self._work(path, partial(self._count_tokens, read)) for path, read in counted),
            self._work("/api/show", self._show),
            self._work("/tokenize", _tokenize),
            self._work("/detokenize", _detokenize),
            self._work("/apply-template", self._apply_template),
            Route("/", _page),
            Mount("/page", PAGE),
        ]
        options = self._options
        # The clients' packages send many headers of their own.
        allowed: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        cors = Middleware(CORSMiddleware, allow_origins=options.cors_origins, **allowed)
        app = Starlette(
            routes=routes,
            middleware=[
                Middleware(_outermost, metrics=self._pool.metrics),
                *([cors] if options.cors_origins else []),
                Middleware(AccessCheck, options.api_keys, options.host, options.cors_origins),
            ],
            exception_handlers=dict.fromkeys(
                (HTTPException, RequestError, SpecgenError, ClientDisconnect, Exception), _refused
            ),
        )
        app.router.redirect_slashes = False
        return app

    def _post(
        self,
        path: str,
        answer: Callable[[Any, HttpRequest, Json], Awaitable[Response]],
        *,
        embeds: bool = False,
    ) -> Route:
        """Return a route whose requests have a JSON object as their body, which names a model that
        generates text, or that `embeds`. The model stays loaded until its answers are submitted,
        and then until they are generated.
        """

        async def respond(request: HttpRequest) -> Response:
            body = await read_json(request, self._limits)
            place = self._pool.find(body.get("model"))
            if place.entry.embeds != embeds:
                what = "is an embedding model and generates no text: ask it at /v1/embeddings"
                if embeds:
                    what = "generates text and has no embeddings: serve an embedding model for them"
                raise RequestError(400, f"{place.entry.name} {what}", "unsupported", "model")
            model = await while_connected(request.receive, self._pool.lease(place))
            try:
                return await answer(model, request, body)
            finally:
                self._pool.release(place)

        return Route(path, respond, methods=["POST"])

    # --- answers -----------------------------------------------------------------------------

    async def _complete(
        self, read: Reader, model: ServedModel, request: HttpRequest, body: Json
    ) -> Response:
        loop = asyncio.get_running_loop()
        requests, job = await run_in_threadpool(self._submit, model, read, body, loop)
        context = AnswerContext(
            requests,
            [answer.prompt.text for answer in job.answers],
            identity=uuid.uuid4().hex,
            created=int(time.time()),
            model=model.name,
        )
        writer: AnswerWriter = requests[0].writer(context)
        end, streams = partial(model.cancel, job), requests[0].streams
        chunks = _chunks(writer, job, end, self._limits.request_s, streams=streams)
        if streams:
            how: Any = {"form": writer.form, "alive": writer.alive}
            return EventStream(chunks, end, self._limits.client_s, **how)
        return JSONResponse(await while_connected(request.receive, _whole(writer, chunks)))

    def _read(self, model: ServedModel, read: Reader, body: Json) -> ParsedRequests:
        """Return a request for each prompt of a body. Raise `BodyError`."""
        options = model.session.options
        found = read(body, Defaults(options.sampler, options.generation))
        return tuple(for_model(request, model.target) for request in found)

    def _submit(
        self, model: ServedModel, read: Reader, body: Json, loop: asyncio.AbstractEventLoop
    ) -> tuple[ParsedRequests, Job]:
        """Read a body and submit its answers: all to the first prompt, then those to the next.
        Raise `RequestError`, `SpecgenError`.
        """
        requests, limits = self._read(model, read, body), self._limits
        n_answers, n_most = requests[0].n * len(requests), model.n_parallel + limits.n_waiting
        n_most = min(n_most, limits.n_answers or n_most)
        if n_answers > n_most:
            raise BodyError("n", f"{n_answers} answers; at most {n_most} are allowed")
        model.check_room(n_answers)
        asks: list[Insert] = []
        for request in requests:
            generation = request.generation
            if limits.answer_tokens > 0 and not 0 <= generation.max_tokens <= limits.answer_tokens:
                generation = replace(generation, max_tokens=limits.answer_tokens)
            prompt = _prompt(replace(request, generation=generation), model)
            n_tokens, n_ctx = len(prompt.tokens), model.engine.n_ctx
            if n_tokens > (n_fits := min(n_ctx, limits.prompt_tokens or n_ctx)):
                what = f"but the context has {n_ctx}"
                if n_fits < n_ctx:
                    what = f"at most {n_fits} are allowed"
                what = f"the prompt has {n_tokens} tokens; {what}"
                raise PromptLengthError(what, n_tokens, n_fits)
            wish, seed = request.speculative, request.sampling.seed
            asks += (
                partial(
                    Engine.insert,
                    prompt=prompt,
                    sampling=replace(request.sampling, seed=seed + number if seed >= 0 else seed),
                    generation=generation,
                    draft=wish.draft,
                    n_drafted_max=wish.max,
                    verifier=wish.verifier,
                )
                for number in range(request.n)
            )
        return requests, model.submit(asks, loop)

    # --- texts and tokens --------------------------------------------------------------------

    def _work(self, path: str, work: Callable[[ServedModel, Json], Any]) -> Route:
        """Return a route whose response is what `work` makes of a body, in a thread."""

        async def answer(model: ServedModel, _request: HttpRequest, body: Json) -> Response:
            return JSONResponse(await run_in_threadpool(work, model, body))

        return self._post(path, answer)

    def _count_tokens(self, read: Reader, model: ServedModel, body: Json) -> Any:
        (asked,) = self._read(model, read, body)
        counted = {"input_tokens": len(_prompt(asked, model, must_fit=False).tokens)}
        return counted if read is read_messages else {"object": "response.input_tokens", **counted}

    def _apply_template(self, model: ServedModel, body: Json) -> Any:
        (asked,) = self._read(model, read_chat, body)
        return {"prompt": _prompt(asked, model, must_fit=False).text}

    async def _embed(
        self, write: Callable[..., bytes], model: ServedEmbedder, request: HttpRequest, body: Json
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
        content = write(vectors, n_tokens, model.name, asked.warnings)
        return Response(content, media_type="application/json")

    # --- the server itself -------------------------------------------------------------------

    async def _health(self, _request: HttpRequest) -> Response:
        about: dict[str, Any] = {"status": "ok"}
        places = self._pool.places
        if len(places) > 1 and not self._options.api_keys:  # the path needs no key
            about["models"] = {name: place.status for name, place in places.items()}
        return JSONResponse(about)

    async def _models(self, request: HttpRequest) -> Response:
        name = request.path_params.get("model")
        found = {each: place.about(self._started) for each, place in self._pool.places.items()}
        if name is None:
            return JSONResponse({"object": "list", "data": [*found.values()]})
        if name not in found:
            raise RequestError(404, f"there is no model {name!r}", code="model_not_found")
        return JSONResponse(found[name])

    async def _tags(self, request: HttpRequest) -> Response:
        """Return the models in ollama's form: all, or those that are loaded."""
        loads = request.url.path.startswith("/api/ps")
        modified = datetime.datetime.fromtimestamp(self._started, datetime.timezone.utc)
        more = {"modified_at": modified.isoformat(), "digest": "", "details": {"format": "gguf"}}
        found = [
            {"name": name, "model": name, "size": place.entry.n_bytes, **more}
            for name, place in self._pool.places.items()
            if place.served is not None or not loads
        ]
        return JSONResponse({"models": found})

    def _show(self, model: ServedModel, _body: Json) -> Any:
        kind = model.target.architecture
        return {
            "capabilities": abilities(model),
            "details": {"format": "gguf", "family": kind, "families": [kind]},
            "model_info": {
                "general.architecture": kind,
                "general.basename": model.name,
                f"{kind}.context_length": model.engine.n_ctx,
            },
        }

    async def _tokenizer_info(self, request: HttpRequest) -> Response:
        """Return what vLLM's server says of a tokenizer."""
        model = self._pool.find(request.query_params.get("model")).served
        if not isinstance(model, ServedModel):
            raise RequestError(503, "the model is not loaded", "model_not_loaded")
        vocabulary = model.target.vocabulary
        names = {
            f"{role}_token": vocabulary.token_text(token) if token >= 0 else None
            for role, token in vocabulary.special_tokens().items()
        }
        return JSONResponse({**names, "chat_template": model.target.chat_template()})

    async def _show_metrics(self, _request: HttpRequest) -> Response:
        return Response(self._pool.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _props(self, request: HttpRequest) -> Response:
        place = self._pool.find(request.query_params.get("model"))
        model = place.served
        about: Json = {"model_alias": place.entry.name, "build_info": f"specgen {__version__}"}
        if isinstance(model, ServedModel):
            session, n_ctx = model.session, model.engine.n_ctx
            template, options = session.target.chat_template(), session.options
            params = as_json(options.sampler) | {"max_tokens": options.generation.max_tokens}
            about |= {
                "model_path": session.target.name,
                "total_slots": model.engine.n_parallel,
                "default_generation_settings": {"n_ctx": n_ctx, "params": params},
                "draft": session.draft_name,
                "kernels": session.target.kernels,
                "chat_template": template or "",
                "has_chat_template": template is not None,
            }
        return JSONResponse(about)

    async def _slots(self, request: HttpRequest) -> Response:
        asked, found = request.query_params.get("model"), list[Json]()
        for model in self._pool.loaded:
            if not isinstance(model, ServedModel) or asked not in (None, model.name):
                continue
            for slot in model.engine.slots:
                about = {"id": slot.number, "model": model.name, "n_ctx": model.engine.n_ctx}
                answer = getattr(slot.request, "answer", None)
                counts = (
                    (answer.n_prompt, answer.n_prefilled, answer.n_answer) if answer else (0, 0, 0)
                )
                names = ("n_prompt_tokens", "n_prompt_tokens_processed", "n_decoded")
                is_processing = {"is_processing": answer is not None}
                found.append(about | is_processing | dict(zip(names, counts, strict=True)))
        return JSONResponse(found)


async def _version(request: HttpRequest) -> Response:
    """Return the version; to ollama's clients, who compare it with what they need, the first of
    ollama with all that is answered here.
    """
    is_ollama = request.url.path.startswith("/api/")
    return JSONResponse({"version": "0.9.0" if is_ollama else __version__, "specgen": __version__})


def _outermost(app: ASGIApp, metrics: ServerMetrics) -> ASGIApp:
    """Return an app that counts responses by their status, and takes a path with a slash at its end
    for the one without: many clients follow no redirection of a POST.
    """

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.count_response(message["status"])
            await send(message)

        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, counting)

    return routed


async def _refused(request: HttpRequest, error: Exception) -> Response:
    """Respond to a request that cannot be answered; without an error if its client has gone. The
    traceback of a bug goes to the log.
    """
    path = request.url.path
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, SpecgenError):
        error = RequestError.of(error)
    elif isinstance(error, HTTPException):  # an unknown path or method
        what = f"{request.method} {path}: {error.detail.lower()}"
        error = RequestError(error.status_code, what, headers=error.headers)
    elif not isinstance(error, RequestError):
        _log.error("%s failed", path, exc_info=error)
        error = RequestError(500, "the server failed; its log says how", "bug")
    return refusal(error, path)


def _prompt(request: ParsedRequest, model: ServedModel, *, must_fit: bool = True) -> Prompt:
    """Return the prompt of a request; one that cannot fit is not even tokenized if it `must_fit`.
    Raise `UsageError`, `PromptError`.
    """
    session, n_ctx = model.session, model.engine.n_ctx
    if request.gap is not None:
        # The far ends of a long text matter little: the text is cut to leave room for an answer.
        n_answer = request.generation.max_tokens
        n_room = max(n_ctx // 4, n_ctx - (n_answer if n_answer >= 0 else n_ctx // 4))
        return infill_prompt(session.target, session.own_vocabulary, request.gap, n_room)[0]
    now = datetime.datetime.now().astimezone()
    return request.prompt(replace(session.prompts, n_ctx=n_ctx if must_fit else None), now)


def _tokenize(model: ServedModel, body: Json) -> Any:
    asked, vocabulary = parse(_TokenizeBody, body), model.target.vocabulary
    found = vocabulary.tokenize(
        asked.content, add_special=asked.add_special, parse_special=asked.parse_special
    )
    if not asked.with_pieces:
        return {"tokens": list(found)}
    pieces = [{"id": token, "piece": _piece(vocabulary.token_bytes(token))} for token in found]
    return {"tokens": pieces}


def _detokenize(model: ServedModel, body: Json) -> Any:
    tokens = parse(_DetokenizeBody, body).tokens
    text = model.session.prompts.of_tokens(tokens).text if tokens else ""
    return {"content": text, "prompt": text}  # in llama.cpp's words, and in vLLM's


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


# --- answers --------------------------------------------------------------------------------------


async def _chunks(
    writer: AnswerWriter, job: Job, end: Callable[[], None], limit_s: float, *, streams: bool
) -> AsyncIterator[Json]:
    """Yield the chunks of a job's answers, which `end` ends as they are: after `limit_s` seconds
    (0: never), and when nobody waits for them. If one fails, an error is the last chunk of a
    stream; else raise `RequestError`.
    """
    loop, started_s = asyncio.get_running_loop(), 0.0
    limit = loop.call_later(limit_s, end) if limit_s > 0 else None
    try:
        for chunk in writer.begin(len(job.answers[0].prompt.tokens)):
            yield chunk
        async for number, event in job.events():
            if isinstance(event, SpecgenError):
                error = RequestError.of(event)
            elif _is_cut(event):  # an empty answer would look like a whole one
                timeout = RequestError(503, f"no token came in {limit_s:g} s", "timeout")
                error = RequestError.ending() if job.is_cut else timeout
            else:
                for chunk in writer.feed(number, event):
                    yield chunk
                if isinstance(event, CommittedEvent):
                    started_s = started_s or loop.time()
                    if writer.is_over(number, loop.time() - started_s):
                        end()
                continue
            if not streams:
                raise error
            for chunk in writer.fail(error.body()):
                yield chunk
            break
    finally:
        if limit is not None:
            limit.cancel()
        end()


def _is_cut(event: Event) -> bool:
    return (
        isinstance(event, FinishedEvent)
        and event.finish_reason == "interrupted"
        and not event.n_tokens
    )


async def _whole(writer: AnswerWriter, chunks: AsyncIterator[Json]) -> Json:
    async for _ in chunks:
        pass
    return writer.whole()


def serve(pool: ModelPool, options: ServerOptions, bound: socket.socket, **how: Any) -> None:
    """Answer requests on a socket until SIGTERM or Ctrl-C; `how` are more arguments of
    `DrainingServer`. Raise the exception that ended the thread of an engine, if one did: a bug or a
    lost worker.
    """
    sys.setswitchinterval(
        0.0005
    )  # so that a body being read holds up no decode, which asks Python whether to go on
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("specgen.serve.server").setLevel(logging.INFO)
    DrainingServer(Server(pool, options).app(), pool, options, **how).run(sockets=[bound])
    if pool.failure is not None:
        raise pool.failure
