"""Bodies of requests, responses to refused ones, and streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from specgen.serve.formats.messages import error_body
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.options import Limits

_T = TypeVar("_T")


# --- requests -------------------------------------------------------------------------------------


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        RequestError: The body is too large, not complete in time, or not a JSON object.
    """
    try:
        reading = _read_body(request, limits.body_bytes)
        data = await asyncio.wait_for(reading, limits.client_s or None)
    except asyncio.TimeoutError:
        raise RequestError(408, "the body did not come in time", code="timeout") from None
    except ClientDisconnect:
        raise RequestError(400, "the body is cut off") from None
    try:
        body = _parse_json(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object", code="invalid_json")
    return body


async def _read_body(request: Request, n_most: int) -> bytes:
    """Return a body of at most `n_most` bytes; 0: of any size."""
    error = RequestError(413, f"the body has more than {n_most} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > n_most > 0:
        raise error
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > n_most > 0:
            raise error
    return bytes(data)


def _parse_json(data: bytes) -> Any:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if "hex escape" not in str(error):
            raise
    # A text has half of a surrogate pair, since agents that shorten texts cut characters in two.
    # A refusal would end their session for good, so the half is replaced.
    repaired = json.dumps(json.loads(data), ensure_ascii=False).encode(errors="replace")
    return from_json(repaired, allow_inf_nan=False)


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Return the result of `work`, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
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
                each.exception()  # asyncio logs exceptions that were never retrieved


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- responses ------------------------------------------------------------------------------------


def refusal(error: RequestError, path: str) -> JSONResponse:
    """Return the response to a request, in the form of the API that has this path."""
    body = error.body()
    if path.startswith("/v1/messages"):
        body = error_body(body)
    elif path.startswith("/api/"):  # Ollama's
        body = {"error": error.message}
    return JSONResponse(body, error.status, headers=error.headers)


#: The time without data after which a comment is sent, in seconds: soon at first, to show the
#: client that its request has arrived; then now and then, so that no proxy closes the stream.
_FIRST_COMMENT_S = 0.2
_KEEP_ALIVE_S = 5.0
_COMMENT = b": waiting\n\n"


class EventStream(StreamingResponse):
    """A stream of JSON values that stays open while there are none.

    Args:
        values: The values.
        on_end: Called once, whatever ends the stream: all values are sent, or the client has
            disconnected or does not read.
        client_s: How long the client may accept no data, in seconds; 0: no limit.
        form: ``events`` are server-sent events, which end with ``data: [DONE]``. ``named`` ones
            have the name that is in the value's `type`, and no such end. ``lines`` are lines.
        alive: The value to send while there is no other; None: a comment, or nothing in ``lines``.
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
        super().__init__(
            self._encoded_events(values),
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            media_type="application/x-ndjson" if form == "lines" else "text/event-stream",
        )
        self._on_end = on_end
        self._client_s = client_s or None
        self._form = form
        self._keep_alive = b"" if form == "lines" else _COMMENT
        if alive is not None:
            self._keep_alive = self._encode(alive)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._client_s)

        try:
            # If the client has gone, or does not read, nobody needs the rest.
            with contextlib.suppress(ClientDisconnect, asyncio.TimeoutError):
                await while_connected(receive, self.stream_response(send_in_time))
        finally:
            self._on_end()

    async def _encoded_events(
        self, values: AsyncIterator[Mapping[str, Any]]
    ) -> AsyncIterator[bytes]:
        end: Mapping[str, Any] = {}
        patience_s = _FIRST_COMMENT_S
        while True:
            following = asyncio.ensure_future(anext(values, end))
            try:
                # The timeout ends only the wait; a slow step goes on.
                while not (await asyncio.wait((following,), timeout=patience_s))[0]:
                    patience_s = _KEEP_ALIVE_S
                    yield self._keep_alive
                value = following.result()
            finally:
                following.cancel()
            if value is end:
                break
            yield self._encode(value)
        if self._form == "events":
            yield b"data: [DONE]\n\n"

    def _encode(self, value: Mapping[str, Any]) -> bytes:
        data = json.dumps(value)
        if self._form == "lines":
            return f"{data}\n".encode()
        if self._form == "named":
            return f"event: {value['type']}\ndata: {data}\n\n".encode()
        return f"data: {data}\n\n".encode()
