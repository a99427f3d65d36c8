"""The server's application: the tables of its endpoints, and what all requests have in common.

A new endpoint is a line in one of the tables, and a function in `specgen.serve.server.endpoints`.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specgen.errors import SpecgenError
from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.completions import read_completion, read_fim_completion
from specgen.serve.formats.embeddings import WriteEmbeddings, embedding_response
from specgen.serve.formats.engine_requests import Reader
from specgen.serve.formats.fields import Json
from specgen.serve.formats.llama_server import read_infill, read_llama_cpp_completion
from specgen.serve.formats.messages import read_messages
from specgen.serve.formats.ollama import (
    keep_alive_s,
    ollama_embeddings,
    read_ollama_chat,
    read_ollama_generate,
    unload_answer,
)
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.formats.responses import read_response_request
from specgen.serve.server.access import LOCAL_ORIGINS, KeyCheck, PageCheck
from specgen.serve.server.draining_server import DrainingServer
from specgen.serve.server.endpoints import ollama_info, tokens
from specgen.serve.server.endpoints.embeddings import embed
from specgen.serve.server.endpoints.generation import generate
from specgen.serve.server.endpoints.server_info import ServerInfo
from specgen.serve.server.endpoints.token_probabilities import token_probabilities
from specgen.serve.server.http import read_json, refusal, while_connected
from specgen.serve.server.jobs import ServedModel
from specgen.serve.server.metrics import ServerMetrics
from specgen.serve.server.model_pool import ModelPool
from specgen.serve.server.options import Limits, ServerOptions
from specgen.serve.server.page_files import PAGE

_log = logging.getLogger("specgen.serve.server")

# --- the endpoints --------------------------------------------------------------------------------
# A path with and one without /v1 are the same endpoint: some clients leave it out.

#: POST: generates answers. The value reads a body in the format of an API.
_GENERATION: Mapping[str, Reader] = {
    # OpenAI's API.
    "/v1/chat/completions": read_chat,
    "/chat/completions": read_chat,
    "/v1/responses": read_response_request,
    "/responses": read_response_request,
    "/v1/completions": read_completion,
    # Anthropic's.
    "/v1/messages": read_messages,
    # Mistral's, which editors use for fill-in-the-middle.
    "/v1/fim/completions": read_fim_completion,
    "/fim/completions": read_fim_completion,
    # That of llama.cpp's server.
    "/completion": read_llama_cpp_completion,
    "/completions": partial(read_llama_cpp_completion, or_openai=True),
    "/v1/infill": read_infill,
    "/infill": read_infill,
    # Ollama's.
    "/api/chat": read_ollama_chat,
    "/api/generate": read_ollama_generate,
}

#: POST: makes embeddings. The value writes the response.
_EMBEDDINGS: Mapping[str, WriteEmbeddings] = {
    "/v1/embeddings": embedding_response,
    "/embeddings": embedding_response,
    "/api/embed": ollama_embeddings,
    "/api/embeddings": ollama_embeddings,
}

#: POST: asks a model about texts, or about itself. The value makes the response from the body, in a
#: thread.
_QUERIES: Mapping[str, Callable[[ServedModel, Json], Json]] = {
    "/v1/messages/count_tokens": tokens.count_message_tokens,
    "/v1/chat/completions/input_tokens": partial(tokens.count_input_tokens, read_chat),
    "/chat/completions/input_tokens": partial(tokens.count_input_tokens, read_chat),
    "/v1/responses/input_tokens": partial(tokens.count_input_tokens, read_response_request),
    "/responses/input_tokens": partial(tokens.count_input_tokens, read_response_request),
    "/v1/chat/completions/token_probabilities": token_probabilities,
    "/chat/completions/token_probabilities": token_probabilities,
    "/apply-template": tokens.apply_template,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
}

#: GET: describes the server. The value is a method of `ServerInfo`.
_INFO: Mapping[str, Callable[[ServerInfo, HttpRequest], Awaitable[Response]]] = {
    "/v1/health": ServerInfo.health,
    "/health": ServerInfo.health,
    "/v1/models": ServerInfo.models,
    "/models": ServerInfo.models,
    "/v1/models/{model:path}": ServerInfo.model,
    "/models/{model:path}": ServerInfo.model,
    "/version": ServerInfo.version,
    "/metrics": ServerInfo.metrics,
    "/props": ServerInfo.props,
    "/slots": ServerInfo.slots,
    "/tokenizer_info": ServerInfo.tokenizer_info,
    "/api/version": ServerInfo.ollama_version,
}

#: GET: describes the models in Ollama's form. The value makes the response.
_OLLAMA_INFO: Mapping[str, Callable[[ModelPool, HttpRequest], Awaitable[Response]]] = {
    "/api/tags": ollama_info.list_models,
    "/api/ps": ollama_info.list_loaded_models,
}

#: POST: tells about a model in Ollama's form. The value makes the response.
_OLLAMA_MODELS: Mapping[str, Callable[[ModelPool, Limits, HttpRequest], Awaitable[Response]]] = {
    "/api/show": ollama_info.show_model,
    "/api/pull": ollama_info.pull_model,
}

#: The endpoints of Ollama's API that change models, with their methods. They are refused.
_OLLAMA_CHANGES: Mapping[str, str] = {
    "/api/blobs/{digest}": "POST",
    "/api/copy": "POST",
    "/api/create": "POST",
    "/api/delete": "DELETE",
    "/api/push": "POST",
}

#: Answers a request with a model that generates text, or one for embeddings.
_ModelHandler: TypeAlias = Callable[[Any, HttpRequest, Json], Awaitable[Response]]


class Server:
    """Answers requests with the models of a pool."""

    def __init__(self, pool: ModelPool, options: ServerOptions) -> None:
        self._pool = pool
        self._options = options
        self._limits = options.limits

    def app(self) -> ASGIApp:
        """Return the application, for any ASGI server."""
        host = self._options.host
        keys = self._options.api_keys
        origins = self._options.cors_origins
        middleware = [
            Middleware(_outermost, metrics=self._pool.metrics),
            Middleware(PageCheck, host, origins, has_keys=bool(keys)),
            # An allowed page can read the responses, including those that refuse its key.
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_origin_regex=LOCAL_ORIGINS,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],  # client libraries send many headers of their own
            ),
            Middleware(KeyCheck, keys),
        ]
        handled_errors = (HTTPException, RequestError, SpecgenError, ClientDisconnect, Exception)
        app = Starlette(
            routes=self._routes(),
            middleware=middleware,
            exception_handlers=dict.fromkeys(handled_errors, _error_response),
        )
        app.router.redirect_slashes = False
        return app

    def _routes(self) -> list[BaseRoute]:
        """Return the routes to all endpoints, and to the chat page."""
        info = ServerInfo(self._pool, has_keys=bool(self._options.api_keys))
        routes: list[BaseRoute] = []
        for path, show in _INFO.items():
            routes.append(Route(path, partial(show, info)))
        for path, list_models in _OLLAMA_INFO.items():
            routes.append(Route(path, partial(list_models, self._pool)))
        for path, answer in _OLLAMA_MODELS.items():
            routes.append(Route(path, partial(answer, self._pool, self._limits), methods=["POST"]))
        for path, method in _OLLAMA_CHANGES.items():
            routes.append(Route(path, ollama_info.refuse_change, methods=[method]))
        for path, read in _GENERATION.items():
            routes.append(self._post(path, partial(generate, read, self._limits)))
        for path, write in _EMBEDDINGS.items():
            handler = partial(embed, write, self._limits)
            routes.append(self._post(path, handler, embeds=True))
        for path, work in _QUERIES.items():
            routes.append(self._post(path, partial(_answer_in_thread, work)))
        return [*routes, Route("/", _page), Mount("/page", PAGE)]

    def _post(
        self,
        path: str,
        handler: _ModelHandler,
        *,
        embeds: bool = False,
    ) -> Route:
        """Return a route to an endpoint that uses the model named in the body.

        The handler has a lease of the model until it returns its response. After that, unfinished
        answers keep the model loaded. Requests of Ollama's API may tell how long it then stays
        loaded.

        Args:
            path: The path.
            handler: Answers the request.
            embeds: Whether the endpoint needs an embedding model. Otherwise it needs one that
                generates text.
        """

        async def respond(request: HttpRequest) -> Response:
            body = await read_json(request, self._limits)
            pooled = self._pool.find(body.get("model"))
            keep_s = keep_alive_s(body) if path.startswith("/api/") else None
            if keep_s == 0.0:
                answer = unload_answer(path, body, pooled.entry.name)
                if answer is not None:  # nothing else is asked for
                    await self._pool.unload(pooled)
                    return JSONResponse(answer)
            if pooled.entry.embeds != embeds:
                raise _wrong_model_error(pooled.entry.name, embeds=embeds)
            model = await while_connected(request.receive, self._pool.lease(pooled))
            if keep_s is not None:
                self._pool.keep(pooled, keep_s)
            try:
                return await handler(model, request, body)
            finally:
                self._pool.release(pooled)

        return Route(path, respond, methods=["POST"])


async def _answer_in_thread(
    work: Callable[[ServedModel, Json], Json],
    model: ServedModel,
    _request: HttpRequest,
    body: Json,
) -> Response:
    """Answer a query: `work` makes the response from the body, in a thread."""
    return JSONResponse(await run_in_threadpool(work, model, body))


def _wrong_model_error(name: str, *, embeds: bool) -> RequestError:
    """Return the error for a model of the other kind than the endpoint needs."""
    reason = "is an embedding model and generates no text: use /v1/embeddings"
    if embeds:
        reason = "generates text and makes no embeddings: serve an embedding model for that"
    return RequestError(400, f"{name} {reason}", "unsupported", "model")


async def _page(request: HttpRequest) -> Response:
    return await PAGE.get_response("index.html", request.scope)


# --- around each request --------------------------------------------------------------------------


def _outermost(app: ASGIApp, metrics: ServerMetrics) -> ASGIApp:
    """Wrap an app so that it counts responses by status and ignores a slash at the end of paths.

    The slash is removed rather than redirected, since many clients do not follow a redirection of
    a POST.
    """

    async def wrapped_app(
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.count_response(message["status"])
            await send(message)

        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, send_and_count)

    return wrapped_app


async def _error_response(request: HttpRequest, error: Exception) -> Response:
    """Turn an exception into a response, in the format of the request's API.

    An unexpected exception is a bug: it is logged with its traceback.
    """
    scope = request.scope
    path = scope["path"]
    match error:
        case ClientDisconnect():  # nobody reads this response; the metrics count nginx's status
            return Response(status_code=499)
        case RequestError():
            return refusal(error, scope)
        case SpecgenError():
            return refusal(RequestError.of(error), scope)
        case HTTPException():  # an unknown path or method
            message = f"{request.method} {path}: {error.detail.lower()}"
            request_error = RequestError(error.status_code, message, headers=error.headers)
            return refusal(request_error, scope)
    _log.error("%s failed", path, exc_info=error)
    return refusal(RequestError(500, "internal error; see the server's log", "bug"), scope)


# --- running --------------------------------------------------------------------------------------


def serve(
    pool: ModelPool,
    options: ServerOptions,
    bound: socket.socket,
    *,
    is_verbose: bool = False,
    ready: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _text: None,
) -> None:
    """Answer requests on a socket until SIGTERM or Ctrl-C.

    Args:
        pool: The models.
        options: The options of the server.
        bound: The socket, bound to an address.
        is_verbose: Whether requests are logged.
        ready: Called when requests are accepted.
        note: Gets sentences for the user.

    Raises:
        BaseException: If the thread of an engine has failed, from a bug or a lost worker.
    """
    # Let a thread that parses a body give up Python's global lock sooner than by default: the
    # engine's thread needs that lock during a decode, to check whether to go on.
    sys.setswitchinterval(0.0005)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    _log.setLevel(logging.INFO)
    app = Server(pool, options).app()
    server = DrainingServer(app, pool, options, is_verbose=is_verbose, ready=ready, note=note)
    server.run(sockets=[bound])
    if pool.failure is not None:
        raise pool.failure
