"""HTTP: errors, bodies, streams of events, who may ask, connections, and the life of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import mimetypes
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, TypeVar

import uvicorn
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specgen.serve.formats.messages import error_body
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.model_pool import ModelPool
from specgen.serve.server.options import Limits, ServerOptions, is_loopback

# --- requests and responses -----------------------------------------------------------------------


_T = TypeVar("_T")
#: Seconds without data after which a comment is sent: soon, so that a client knows that it is
#: heard, and then now and then, to keep the stream open, in proxies too.
FIRST_COMMENT_S, _KEEP_ALIVE_S = 0.2, 5.0
_COMMENT = b": waiting\n\n"


def refusal(error: RequestError, path: str) -> JSONResponse:
    """Return the response to a request, in the form of the API that has this path."""
    body = error.body()
    if path.startswith("/v1/messages"):
        body = error_body(body)
    elif path.startswith("/api/"):  # ollama's
        body = {"error": error.message}
    return JSONResponse(body, error.status, headers=error.headers)


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the JSON object in a request's body. Raise `RequestError`."""
    try:
        data = await asyncio.wait_for(_read(request, limits.body_bytes), limits.client_s or None)
    except asyncio.TimeoutError:
        raise RequestError(408, "the body did not come in time", code="timeout") from None
    except ClientDisconnect:
        raise RequestError(400, "the body is cut off") from None
    try:
        try:
            body = from_json(data, allow_inf_nan=False)
        except ValueError as error:
            if "hex escape" not in str(error):
                raise
            # Agents that cut texts cut characters in two. A refusal would end their session for
            # good.
            whole = json.dumps(json.loads(data), ensure_ascii=False).encode(errors="replace")
            body = from_json(whole, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object", code="invalid_json")
    return body


async def _read(request: Request, n_most: int) -> bytes:
    length, data = request.headers.get("content-length", ""), bytearray()
    n_bytes = int(length) if length.isascii() and length.isdigit() else 0
    if not n_bytes > n_most > 0:
        async for chunk in request.stream():
            data += chunk
            if len(data) > n_most > 0:
                break
        else:
            return bytes(data)
    what = f"the body has more than {n_most} bytes"
    raise RequestError(413, what, code="request_too_large")


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Return the result of `work`; if the client disconnects first, cancel it, raise
    `ClientDisconnect`.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        for each in (task, gone):
            while not each.done():  # asyncio.wait_for may lose a cancellation, before Python 3.12
                each.cancel()
                await asyncio.wait((each,), timeout=0.1)
            if not each.cancelled():
                each.exception()  # so that nobody complains that it was not looked at


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of JSON values: of lines, or of server-sent events. The name of a ``named`` one is
    its `type`; others end with `data: [DONE]`. While there is none, an `alive` event, or a comment,
    keeps the stream open.

    `on_end` is called once, whatever ends the stream: everything is sent, the client disconnects,
    or it accepts no data for `client_s` seconds.
    """

    def __init__(
        self,
        values: AsyncIterator[Mapping[str, Any]],
        on_end: Callable[[], None],
        client_s: float,
        *,
        form: Literal["events", "named", "lines"] = "events",
        alive: Mapping[str, Any] | None = None,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        kind = "application/x-ndjson" if form == "lines" else "text/event-stream"
        super().__init__(self._events(values), headers=headers, media_type=kind)
        self._on_end, self._client_s, self._form = on_end, client_s or None, form
        self._alive = b"" if form == "lines" else _COMMENT
        if alive is not None:
            self._alive = self._encoded(alive)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._client_s)

        try:
            # A client that has gone, or does not read: give up.
            with contextlib.suppress(ClientDisconnect, asyncio.TimeoutError):
                await while_connected(receive, self.stream_response(send_in_time))
        finally:
            self._on_end()

    async def _events(self, values: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
        nothing: Mapping[str, Any] = {}
        patience_s = FIRST_COMMENT_S
        while True:
            # The timeout ends only the wait; a slow step goes on.
            following = asyncio.ensure_future(anext(values, nothing))
            try:
                while not (await asyncio.wait((following,), timeout=patience_s))[0]:
                    patience_s = _KEEP_ALIVE_S
                    yield self._alive
                value = following.result()
            finally:
                following.cancel()
            if value is nothing:
                break
            yield self._encoded(value)
        if self._form == "events":
            yield b"data: [DONE]\n\n"

    def _encoded(self, value: Mapping[str, Any]) -> bytes:
        if self._form == "lines":
            return f"{json.dumps(value)}\n".encode()
        name = f"event: {value['type']}\n" if self._form == "named" else ""
        return f"{name}data: {json.dumps(value)}\n\n".encode()


# --- the page ---------------------------------------------------------------------------------------

# Some machines map .js to plain text, and browsers do not run such a script.
for _ending in (".js", ".mjs"):
    mimetypes.add_type("text/javascript", _ending)
#: The page's own files only: no scripts or styles from elsewhere, or in the answers of a model, and
#: no look-up of the hosts that an answer has links to.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Cache-Control": "no-cache",
}


class _PageFiles(StaticFiles):
    """The files of the page, with its headers."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_PAGE_HEADERS)
        return response


PAGE = _PageFiles(directory=Path(__file__).parent / "page")


# --- access ---------------------------------------------------------------------------------------

#: Paths that need no key: the health checks, and the page, which asks for the key.
_OPEN = ("/health", "/v1/health", "/")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class AccessCheck:
    """Refuses requests without one of the keys, if there are keys, and those from pages of other
    origins unless they are allowed: a browser sends requests for any page. Without keys, requests
    for a host name other than the loopback's are refused as well, since a page can let its own name
    point to this machine (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str]
    ) -> None:
        self._app, self._origins = app, origins
        self._keys = [key.encode() for key in keys]
        self._names = {host.lower(), *_LOOPBACK_NAMES} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._check(scope["method"], scope["path"], Headers(scope=scope))
        app: ASGIApp = self._app if error is None else refusal(error, scope["path"])
        await app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> RequestError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        is_allowed = "*" in self._origins or origin in self._origins
        if origin is not None and not is_allowed and origin.partition("://")[2] != host:
            what = f"pages of {origin} may not use this server"
            return RequestError(403, what, "origin_not_allowed")
        if not self._keys:
            name = re.sub(r":[0-9]*\Z", "", host).strip("[]").lower()
            if self._names is not None and name not in self._names:
                what = f"this server does not answer for {host!r}"
                return RequestError(403, what, "host_not_allowed")
            return None
        if path in _OPEN or path.startswith("/page/") or method == "OPTIONS":
            return None
        # The headers of OpenAI's and of Anthropic's clients. Every key is compared, in constant
        # time, so that the time reveals nothing about them.
        scheme, _, key = headers.get("authorization", "").partition(" ")
        keys = [key if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        given = [key.strip().encode("utf-8", "surrogateescape") for key in keys]
        if sum(hmac.compare_digest(data, key) for data in given for key in self._keys):
            return None
        what = "no key, or a wrong one: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
        return RequestError(401, what, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


# --- the life of the server ---------------------------------------------------------------------

#: Connections that the system may accept before the server does.
_BACKLOG = 128
#: Connections at once; many systems allow 1024 descriptors.
N_CONNECTIONS = 500
#: Seconds for sending the ends of answers that were cut short.
_FLUSH_S = 5.0


class DrainingServer(uvicorn.Server):
    """A server with the models of a pool. Told to end, it waits for its answers, but not longer
    than `drain_s` seconds; a second signal ends them at once. `ready` is called when requests are
    accepted.
    """

    def __init__(
        self,
        app: ASGIApp,
        pool: ModelPool,
        options: ServerOptions,
        *,
        is_verbose: bool = False,
        ready: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=type("Protocol", (_TimedProtocol,), {"head_s": options.limits.client_s}),
            ws="none",
            backlog=_BACKLOG,
            limit_concurrency=N_CONNECTIONS,  # more get status 503
            log_config=None,
            # specgen's own log has the errors; a client that does not read its answer is none.
            log_level="info" if is_verbose else "critical",
            access_log=is_verbose,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(options.drain_s + _FLUSH_S),
        )
        super().__init__(config)
        self._pool, self._drain_s = pool, options.drain_s
        self._ready, self._note = ready, note

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._pool.failure is not None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's own method, this does not raise the signal again at the end: being told
        # to end is no failure.
        if self.should_exit:
            self._pool.cancel_all()
            return
        self.should_exit = True
        n_open = self._pool.n_open
        if n_open:
            again = "again to end them now" if sig == signal.SIGINT else f"{self._drain_s:g} s"
            answers = "1 answer" if n_open == 1 else f"{n_open} answers"
            self._note(f"ending after {answers} ({again})")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        drain_s = 0.0 if self._pool.failure is not None else self._drain_s
        cut = loop.call_later(drain_s, self._pool.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()
            self._pool.cancel_all()


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 on a connection that is closed if the head of a request does not come in `head_s`
    seconds (0: no limit).
    """

    head_s: ClassVar[float] = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head(None)

    def on_response_complete(self) -> None:
        last = self.cycle
        super().on_response_complete()
        self._await_head(last)

    def _await_head(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if `last` is its last request still when the time is over."""

        def check() -> None:
            if self.cycle is last:
                self.transport.close()

        if self.head_s > 0:
            self.loop.call_later(self.head_s, check)
