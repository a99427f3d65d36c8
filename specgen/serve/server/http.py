"""Bodies of requests, responses to refused ones, and streams of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic_core import from_json
from starlette.datastructures import Headers
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
        RequestError: If the body is compressed, too large, not complete in time, or not a JSON
            object.
    """
    _check_uncompressed(request)
    try:
        reading = _read_body(request, limits.body_bytes)
        data = await asyncio.wait_for(reading, limits.client_s or None)
    except asyncio.TimeoutError:
        raise RequestError(408, "the body did not arrive in time", code="timeout") from None
    except ClientDisconnect:
        raise RequestError(400, "the body is incomplete") from None
    try:
        body = _parse_json(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object", code="invalid_json")
    if len(data) > limits.body_bytes > 0 and len(data) - _image_size(body) > limits.body_bytes:
        raise _too_large_error(f"{limits.body_bytes} bytes, not counting images")
    return body


def _check_uncompressed(request: Request) -> None:
    """Raise `RequestError` if the body of a request is compressed."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"the body is compressed ({encoding[:40]}): send it without Content-Encoding"
        raise RequestError(
            415,
            message,
            code="unsupported_encoding",
            headers={"Accept-Encoding": "identity"},
        )


#: A run of base64 characters that is too long for most texts: a part of an image or another file.
#: Some clients escape slashes.
_ENCODED_RUN = re.compile(rb"[A-Za-z0-9+/=_\\-]{512,}")
#: How many times the limit a body may have with its images. They are replaced by a remark later.
_MAX_WITH_IMAGES = 16
#: The size of the blocks whose images are found. Shorter pieces of a body are joined.
_BLOCK_BYTES = 64 * 1024
#: The fields that contain images and other files, in the formats of all APIs.
_FILE_FIELDS = frozenset(["data", "file_data", "image", "image_url", "images", "url"])


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Return a body; raise `RequestError` if it has more than `max_bytes` bytes (0 for no limit).

    Images do not count, since they are left out. Here, any long run of base64 characters is taken
    for one; once the body is parsed, `read_json` checks the size again, without the fields of
    images. A body that is too large even with images is refused before it is read if its size is
    announced.
    """
    if max_bytes == 0:
        return await request.body()
    max_bytes_with_images = _MAX_WITH_IMAGES * max_bytes
    announced_size = request.headers.get("content-length", "")
    is_number = announced_size.isascii() and announced_size.isdigit()
    if is_number and int(announced_size) > max_bytes_with_images:
        raise _too_large_error(f"{max_bytes_with_images} bytes")
    data = bytearray()
    n_checked = 0  # the bytes whose images were found
    n_text_bytes = 0  # those among them that belong to no image
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes_with_images:
            raise _too_large_error(f"{max_bytes_with_images} bytes")
        # The stream ends with an empty chunk.
        if len(data) - n_checked >= _BLOCK_BYTES or not chunk:
            n_text_bytes += len(_ENCODED_RUN.sub(b"", data[n_checked:]))
            n_checked = len(data)
        if n_text_bytes > max_bytes:
            raise _too_large_error(f"{max_bytes} bytes, not counting images")
    return bytes(data)


def _image_size(body: Any) -> int:
    """Return the number of characters of all images and other files in a body."""
    n_characters = 0
    pending = [("", body)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += ((name, item) for item in value)
        elif isinstance(value, str) and name in _FILE_FIELDS:
            n_characters += len(value)
    return n_characters


def _too_large_error(size: str) -> RequestError:
    message = f"the body has more than {size}; the server's option --limit-body allows more"
    return RequestError(413, message, code="request_too_large")


def _parse_json(data: bytes) -> Any:
    """Parse JSON, and replace lone surrogates; raise `ValueError` if it is not valid.

    A byte order mark before it is skipped, and UTF-16 and UTF-32 are converted.
    """
    encoding = json.detect_encoding(data)
    if encoding != "utf-8":
        data = data.decode(encoding).encode()
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if "hex escape" not in str(error):
            raise
    # Agents that shorten texts may cut a surrogate pair in two. The text stays in their
    # conversation, so refusing it would end their session; the lone half is replaced instead.
    repaired = json.dumps(json.loads(data), ensure_ascii=False).encode(errors="replace")
    return from_json(repaired, allow_inf_nan=False)


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Return the result of `work`, which is cancelled if the client disconnects.

    Args:
        receive: Receives the messages of the client's connection.
        work: The work for the client.

    Raises:
        ClientDisconnect: If the client has disconnected before the work was done.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        return await work_task
    finally:
        for task in (work_task, disconnect_task):
            # Cancel until it ends: before Python 3.12, `asyncio.wait_for`, which the work may use,
            # can lose a cancellation.
            while not task.done():
                task.cancel()
                await asyncio.wait((task,), timeout=0.1)
            if not task.cancelled():
                task.exception()  # asyncio logs exceptions that were never retrieved


async def _until_disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


# --- responses ------------------------------------------------------------------------------------


def is_for_anthropic(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's API.

    Its paths for messages are its own. OpenAI's API has the same paths for models, where the
    header that all of Anthropic's SDKs send tells the two apart.
    """
    return scope["path"].startswith("/v1/messages") or "anthropic-version" in Headers(scope=scope)


def refusal(error: RequestError, scope: Scope) -> JSONResponse:
    """Return the response with an error, in the form of the API that the request is for."""
    body = error.body()
    if is_for_anthropic(scope):
        body = error_body(body)
    elif scope["path"].startswith("/api/"):  # Ollama's
        body = {"error": error.message}
    return JSONResponse(body, error.status, headers=error.headers)


#: The time without data after which the first comment is sent, in seconds: soon, to show the client
#: that its request has arrived.
_FIRST_COMMENT_S = 0.2
#: The time between later comments, in seconds, which keep proxies from closing the stream.
_KEEP_ALIVE_S = 5.0
_COMMENT = b": waiting\n\n"


class EventStream(StreamingResponse):
    """A stream of JSON values that is kept open while there is no new one.

    Args:
        values: The values.
        on_end: Called once, whatever ends the stream: all values are sent, or the client has
            disconnected or does not read.
        client_s: The maximum time for which the client may accept no data, in seconds; 0 for no
            limit.
        stream_format: ``events`` are server-sent events, which end with ``data: [DONE]``.
            ``named`` are server-sent events that are named after the field ``type`` of their
            values, without such an end. ``lines`` are JSON lines.
        keep_alive_event: The value to send while there is no other. With None, a comment is sent
            instead, or nothing in ``lines``.
    """

    def __init__(
        self,
        values: AsyncIterator[Mapping[str, Any]],
        on_end: Callable[[], None],
        client_s: float,
        *,
        stream_format: Literal["events", "named", "lines"] = "events",
        keep_alive_event: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            self._encoded_events(values),
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            media_type="application/x-ndjson" if stream_format == "lines" else "text/event-stream",
        )
        self._on_end = on_end
        self._client_s = client_s or None
        self._stream_format = stream_format
        self._keep_alive = b"" if stream_format == "lines" else _COMMENT
        if keep_alive_event is not None:
            self._keep_alive = self._encode(keep_alive_event)

    async def __call__(
        self,
        _scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send the values until they end, the client disconnects, or does not read for too long."""

        async def send_in_time(message: Message) -> None:
            await asyncio.wait_for(send(message), self._client_s)

        try:
            # If the client has disconnected, or does not read, nobody needs the rest.
            with contextlib.suppress(ClientDisconnect, asyncio.TimeoutError):
                await while_connected(receive, self.stream_response(send_in_time))
        finally:
            self._on_end()

    async def _encoded_events(
        self, values: AsyncIterator[Mapping[str, Any]]
    ) -> AsyncIterator[bytes]:
        """Yield the encoded values, and `keep_alive_event` or a comment while there is none."""
        end: Mapping[str, Any] = {}  # what `anext` returns after the last value
        timeout_s = _FIRST_COMMENT_S
        while True:
            next_value = asyncio.ensure_future(anext(values, end))
            try:
                while True:
                    # The timeout ends only the wait; the value is still awaited.
                    done, _ = await asyncio.wait((next_value,), timeout=timeout_s)
                    if done:
                        break
                    timeout_s = _KEEP_ALIVE_S
                    yield self._keep_alive
                value = next_value.result()
            finally:
                next_value.cancel()
            if value is end:
                break
            yield self._encode(value)
        if self._stream_format == "events":
            yield b"data: [DONE]\n\n"

    def _encode(self, value: Mapping[str, Any]) -> bytes:
        """Return a value as bytes, in the format of the stream."""
        data = json.dumps(value)
        if self._stream_format == "lines":
            return f"{data}\n".encode()
        if self._stream_format == "named":
            return f"event: {value['type']}\ndata: {data}\n\n".encode()
        return f"data: {data}\n\n".encode()
