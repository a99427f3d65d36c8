"""The server's paths and their handlers."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specgen import __version__
from specgen.engine.loaded_models import Models
from specgen.engine.prompts import template_of
from specgen.errors import SpecgenError
from specgen.serving.openai_format.request import BodyError, read_request, with_call_form
from specgen.serving.server.access import AccessCheck
from specgen.serving.server.errors import RequestError
from specgen.serving.server.http import EventStream, read_json, while_connected
from specgen.serving.server.job_request import (
    Endpoint,
    ServerRequest,
    answer_requests,
    read_server_request,
)
from specgen.serving.server.job_response import (
    InfillResponseBuilder,
    ResponseBuilder,
    TranslatedResponseBuilder,
)
from specgen.serving.server.jobs import EngineThread, Job, QueueFullError
from specgen.serving.server.metrics import Metrics
from specgen.serving.server.options import ServerOptions
from specgen.system.json_values import as_json

_T = TypeVar("_T")
_PAGE = Path(__file__).parent / "page"
#: Set here, since some machines map .js to plain text, and browsers do not run such a script.
_PAGE_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
#: The page's own files only: no scripts or styles from elsewhere, or in the answers of a model.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_STATUS_WRONG_METHOD = 405
_STATUS_CLIENT_GONE = 499
_log = logging.getLogger("specgen.serving.server")


class Server:
    """Answers requests with a session's engine, which `thread` steps. Use it as a context manager."""

    def __init__(
        self, loaded: Models, thread: EngineThread, metrics: Metrics, options: ServerOptions
    ) -> None:
        self._loaded = loaded
        self._thread = thread
        self._metrics = metrics
        self._options = options
        self._limits = options.limits
        self._model = options.alias or loaded.target.name.removesuffix(".gguf")
        self._started = int(time.time())
        #: The thread that builds and tokenizes prompts, one after the other, while the event loop goes on.
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="specgen-prompts")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._preparing.shutdown(wait=False, cancel_futures=True)

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route("/", self._page),
            Route("/page/{name}", self._page_file),
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
            self._post("/v1/embeddings", self._embed),
            self._post("/infill", functools.partial(self._complete, "infill")),
            self._post("/tokenize", self._tokenize),
            self._post("/detokenize", self._detokenize),
            self._post("/apply-template", self._apply_template),
        ]
        options = self._options
        middleware = [Middleware(_Counted, metrics=self._metrics)]
        if options.cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=options.cors_origins,
                    allow_methods=["GET", "POST"],
                    allow_headers=["Authorization", "Content-Type"],
                )
            )
        middleware.append(
            Middleware(
                AccessCheck,
                keys=options.api_keys,
                host=options.host,
                origins=options.cors_origins,
            )
        )
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: _no_such_path, Exception: _failed},
        )

    def _post(
        self, path: str, answer: Callable[[Request, Mapping[str, Any]], Awaitable[Response]]
    ) -> Route:
        """Return a route whose requests have a JSON object as their body."""

        async def respond(request: Request) -> Response:
            try:
                return await answer(request, await read_json(request, self._limits))
            except RequestError as error:
                return error.response()
            except SpecgenError as error:
                return RequestError.of(error).response()
            except ClientDisconnect:
                return Response(status_code=_STATUS_CLIENT_GONE)

        return Route(path, respond, methods=["POST"])

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._preparing, work, *arguments)

    # --- answers -----------------------------------------------------------------------------

    async def _complete(
        self, endpoint: Endpoint, request: Request, body: Mapping[str, Any]
    ) -> Response:
        loop = asyncio.get_running_loop()
        asked, job = await self._in_thread(self._submit, endpoint, body, loop)
        is_translated = asked.translation is not None
        make = TranslatedResponseBuilder if is_translated else ResponseBuilder
        answering = (InfillResponseBuilder if endpoint == "infill" else make)(
            asked,
            job,
            self._thread,
            model=self._model,
            created=int(time.time()),
            limit_s=self._limits.request_s,
        )
        if asked.streams:
            client_s = self._limits.client_s
            return EventStream(answering.chunks(), answering.end, client_s, named=is_translated)
        return JSONResponse(await while_connected(request, answering.body()))

    def _submit(
        self, endpoint: Endpoint, body: Mapping[str, Any], loop: asyncio.AbstractEventLoop
    ) -> tuple[ServerRequest, Job]:
        """Read a body and submit its answers to the engine. Raise `RequestError`, `SpecgenError`."""
        asked = read_server_request(endpoint, body, self._loaded, self._limits)
        engine = self._thread.engine
        n_most = engine.n_parallel + self._limits.n_waiting
        if asked.n_answers > n_most:
            raise BodyError("n", f"{asked.n_answers} answers; there is room for at most {n_most}")
        try:
            self._thread.check_room(asked.n_answers)
            asks = answer_requests(asked, self._loaded, engine.n_ctx, self._limits)
            return asked, self._thread.submit(asks, loop)
        except QueueFullError as error:
            headers = {"Retry-After": str(error.retry_s)}
            raise RequestError(429, str(error), code="queue_full", headers=headers) from None

    # --- texts and tokens --------------------------------------------------------------------

    async def _tokenize(self, _request: Request, body: Mapping[str, Any]) -> Response:
        content = _field(body, "content", str)
        add_special = _field(body, "add_special", bool, default=False)
        parse_special = _field(body, "parse_special", bool, default=True)
        with_pieces = _field(body, "with_pieces", bool, default=False)
        vocabulary = self._loaded.target.vocabulary

        def tokens() -> list[Any]:
            found = vocabulary.tokenize(
                _utf8(content), add_special=add_special, parse_special=parse_special
            )
            if not with_pieces:
                return list(found)
            return [
                {"id": token, "piece": _piece(vocabulary.token_bytes(token))} for token in found
            ]

        return JSONResponse({"tokens": await self._in_thread(tokens)})

    async def _detokenize(self, _request: Request, body: Mapping[str, Any]) -> Response:
        tokens = _field(body, "tokens", list)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise BodyError("tokens", "it is no list of whole numbers")
        if not tokens:
            return JSONResponse({"content": ""})
        prompt = await self._in_thread(self._loaded.prompts.of_tokens, tokens)
        return JSONResponse({"content": prompt.text})

    async def _embed(self, _request: Request, _body: Mapping[str, Any]) -> Response:
        what = f"specgen generates text and has no embeddings: {self._model} cannot answer this"
        raise RequestError(400, f"{what}; ask llama.cpp's server", code="unsupported")

    async def _apply_template(self, _request: Request, body: Mapping[str, Any]) -> Response:
        options = self._loaded.options
        asked = read_request("chat", body, options.sampler, options.generation)
        template = template_of(self._loaded.target, has_tools=True)
        asked = with_call_form(asked, template)
        conversation = functools.partial(
            self._loaded.prompts.of_messages,
            asked.messages,
            tools=asked.tool_definitions,
            variables=asked.template_variables,
        )
        prompt = await self._in_thread(conversation)
        return JSONResponse({"prompt": prompt.text})

    # --- the server itself -------------------------------------------------------------------

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        model = self._loaded.target
        own = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "specgen",
            "meta": {"n_vocab": model.vocabulary.n_tokens, "n_ctx_train": model.n_ctx_train},
        }
        asked = request.path_params.get("model")
        if asked is None:
            return JSONResponse({"object": "list", "data": [own]})
        if asked != self._model:
            error = RequestError(404, f"there is no model {asked!r}", code="model_not_found")
            return error.response()
        return JSONResponse(own)

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _props(self, _request: Request) -> Response:
        loaded, engine = self._loaded, self._thread.engine
        template = loaded.target.chat_template()
        return JSONResponse(
            {
                "model_alias": self._model,
                "total_slots": engine.n_parallel,
                "default_generation_settings": {
                    "n_ctx": engine.n_ctx,
                    "params": {
                        **as_json(loaded.options.sampler),
                        "max_tokens": loaded.options.generation.max_tokens,
                    },
                },
                "draft": loaded.drafts.name,
                "kernels": loaded.target.kernels,
                "chat_template": template or "",
                "has_chat_template": template is not None,
                "build_info": f"specgen {__version__}",
            }
        )

    async def _slots(self, _request: Request) -> Response:
        n_ctx = self._thread.engine.n_ctx
        return JSONResponse(
            [
                {
                    "id": slot.number,
                    "n_ctx": n_ctx,
                    "is_processing": slot.request is not None,
                    "n_prompt_tokens": slot.n_prompt,
                    "n_prompt_tokens_processed": slot.n_read,
                    "n_decoded": slot.n_answer,
                }
                for slot in self._thread.engine.slots
            ]
        )

    async def _page(self, _request: Request) -> Response:
        return _page_response(_PAGE / "index.html")

    async def _page_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        known = {file.name: file for file in _PAGE.iterdir() if file.is_file()}
        if name not in known:
            return RequestError(404, "there is no such file", code="not_found").response()
        return _page_response(known[name])


def _page_response(file: Path) -> Response:
    return FileResponse(file, headers=_PAGE_HEADERS, media_type=_PAGE_TYPES[file.suffix])


class _Counted:
    """Counts responses by their status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(message["status"])
            await send(message)

        await self._app(scope, receive, counting)


async def _no_such_path(request: Request, error: Exception) -> Response:
    """Respond to Starlette's own refusals: an unknown path, or a method that a path does not support."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    if error.status_code == _STATUS_WRONG_METHOD:
        what = f"this path takes {(error.headers or {}).get('Allow')}"
    else:
        paths = [route.path for route in request.app.routes if isinstance(route, Route)]
        what = f"there is no such path; there are {', '.join(paths)}"
    return RequestError(error.status_code, f"{asked}: {what}", headers=error.headers).response()


async def _failed(request: Request, error: Exception) -> Response:
    """Respond to a bug; its traceback goes to the server's log."""
    _log.error("%s failed", request.url.path, exc_info=error)
    return RequestError(500, "the server failed; its log says how", code="bug").response()


def _field(body: Mapping[str, Any], name: str, kind: type, *, default: Any = None) -> Any:
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind):
        words = {str: "a text", bool: "true or false", list: "a list"}
        raise BodyError(name, f"it is not {words[kind]}")
    return value


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BodyError("content", f"half a surrogate pair at character {error.start}") from None
    return text


def _piece(data: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they alone are no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


__all__ = ["Server"]
