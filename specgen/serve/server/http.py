"""Requests and responses: who may ask, bodies, errors, streams of events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specgen.errors import (
    BackendError,
    PromptError,
    PromptLengthError,
    SpecgenError,
    UsageError,
)
from specgen.serve.formats.messages import error_body
from specgen.serve.formats.request import BodyError
from specgen.serve.server.options import Limits, is_loopback

# --- errors ---------------------------------------------------------------------------------------


#: The types of errors by their status, where OpenAI has one.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class RequestError(Exception):
    """A refused or failed request: the `status` of the response, and the content of its body.

    `param` is the wrong field, if there is one; `code` names the kind of error for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    @staticmethod
    def of(error: SpecgenError) -> RequestError:
        """Return the error for a client: 400 if the request is wrong, 500 if the model failed. Hints are left
        out, since they name options of the command line."""
        message = error.message
        if isinstance(error, BodyError):
            return RequestError(400, message, code="invalid_value", param=error.field)
        if isinstance(error, PromptLengthError):
            return RequestError(400, message, code="context_length_exceeded")
        if isinstance(error, PromptError | UsageError):
            return RequestError(400, message, code="invalid_request")
        if isinstance(error, BackendError):
            return RequestError(500, message, code="backend_error")
        return RequestError(500, message)

    @staticmethod
    def ending() -> RequestError:
        return RequestError(503, "the server ends", code="ending")

    @staticmethod
    def queue_full(retry_s: int) -> RequestError:
        """Return the error for a request without room; in about `retry_s` seconds there may be some."""
        message = f"too many answers are waiting; try again in {retry_s} s"
        headers = {"Retry-After": str(retry_s)}
        return RequestError(429, message, code="queue_full", headers=headers)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, path: str) -> JSONResponse:
        body = error_body(self.body()) if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, self.status, headers=self.headers)


# --- requests and responses -----------------------------------------------------------------------


_T = TypeVar("_T")
#: Seconds without data after which a comment is sent, to keep a stream open, in proxies too.
_KEEP_ALIVE_S = 15.0
_COMMENT = b": waiting\n\n"


async def read_json(request: Request, limits: Limits) -> Mapping[str, Any]:
    """Return the JSON object in a request's body. Raise `RequestError`."""
    try:
        data = await asyncio.wait_for(_read(request, limits.body_bytes), limits.client_s or None)
    except asyncio.TimeoutError:
        raise RequestError(408, "the body did not come in time", code="timeout") from None
    except ClientDisconnect:
        raise RequestError(400, "the body is cut off") from None
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
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
    """Return the result of `work`; if the client disconnects first, cancel it, raise `ClientDisconnect`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        for each in (task, gone):
            while (
                not each.done()
            ):  # a cancellation may be lost in asyncio.wait_for, before Python 3.12
                each.cancel()
                await asyncio.wait((each,), timeout=0.1)
            if not each.cancelled():
                each.exception()  # so that nobody complains that it was not looked at


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """A stream of server-sent events: JSON values, and `data: [DONE]` after the last one. If events are
    `named`, the name of each is its `type`, and the last one ends the stream.

    While there is no value, an `alive` event, or a comment, keeps the stream open. `on_end` is called once,
    whatever ends the stream: everything is sent, the client disconnects, or it accepts no data for `client_s`
    seconds.
    """

    def __init__(
        self,
        values: AsyncIterator[Mapping[str, Any]],
        on_end: Callable[[], None],
        client_s: float,
        *,
        named: bool = False,
        alive: Mapping[str, Any] | None = None,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._events(values), headers=headers, media_type="text/event-stream")
        self._on_end = on_end
        self._client_s = client_s or None
        self._named = named
        self._alive = _COMMENT if alive is None else self._encoded(alive)

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
        while True:
            # The timeout ends only the wait; a slow step goes on.
            following = asyncio.ensure_future(anext(values, nothing))
            try:
                while not (await asyncio.wait((following,), timeout=_KEEP_ALIVE_S))[0]:
                    yield self._alive
                value = following.result()
            finally:
                following.cancel()
            if value is nothing:
                break
            yield self._encoded(value)
        if not self._named:
            yield b"data: [DONE]\n\n"

    def _encoded(self, value: Mapping[str, Any]) -> bytes:
        name = f"event: {value['type']}\n" if self._named else ""
        return f"{name}data: {json.dumps(value)}\n\n".encode()


# --- access ---------------------------------------------------------------------------------------

#: Paths that need no key: the health check, and the page, which asks for the key.
_OPEN = ("/health", "/")
_OPEN_FOLDERS = ("/page/",)
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class AccessCheck:
    """Refuses requests without one of the keys, if there are keys: 401.

    A browser sends requests for any page that is open in it. Requests from pages of other origins are refused
    unless the origin is allowed: 403. Without keys, requests for a host name other than the loopback's are
    refused as well, since a page can let its own name point to this machine (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], host: str, origins: Sequence[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._names = {host.lower(), *_LOOPBACK_NAMES} if is_loopback(host) else None
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._check(scope["method"], scope["path"], Headers(scope=scope))
        app: ASGIApp = self._app if error is None else error.response(scope["path"])
        await app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> RequestError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        is_allowed = "*" in self._origins or origin in self._origins
        if origin is not None and not is_allowed and _site(origin) != host:
            return RequestError(
                403, f"pages of {origin} may not use this server", code="origin_not_allowed"
            )
        if self._keys:
            is_open = path in _OPEN or path.startswith(_OPEN_FOLDERS) or method == "OPTIONS"
            if not is_open and not self._knows(_keys_in(headers)):
                return RequestError(
                    401,
                    "no key, or a wrong one: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif self._names is not None and _host_name(host) not in self._names:
            return RequestError(
                403, f"this server does not answer for {host!r}", code="host_not_allowed"
            )
        return None

    def _knows(self, given: Sequence[bytes]) -> bool:
        """Return whether one of the given keys is known. Every key is compared, in constant time, so that
        the time reveals nothing about them."""
        found = [hmac.compare_digest(data, key) for data in given for key in self._keys]
        return any(found)


def _keys_in(headers: Headers) -> list[bytes]:
    """Return the keys that a request has: a client of OpenAI's API sends one header, one of Anthropic's the
    other."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    keys = [given if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return [key.strip().encode("utf-8", "surrogateescape") for key in keys]


def _site(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
