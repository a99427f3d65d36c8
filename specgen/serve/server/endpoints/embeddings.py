"""The endpoints that make embeddings of texts."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specgen.serve.formats.embeddings import WriteEmbeddings, read_embedding_request
from specgen.serve.formats.fields import Json
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.http import while_connected
from specgen.serve.server.jobs import ServedEmbedder
from specgen.serve.server.options import Limits


async def embed(
    write: WriteEmbeddings,
    limits: Limits,
    model: ServedEmbedder,
    http_request: HttpRequest,
    body: Json,
) -> Response:
    """Answer a request for embeddings.

    Args:
        write: Writes the body of the response.
        limits: The limits of requests.
        model: The model, which is leased.
        http_request: The request.
        body: Its body.

    Raises:
        RequestError: If the vectors are not done in time, or too many requests are waiting.
    """
    request = await run_in_threadpool(read_embedding_request, body, model.embedder)
    limit_s = limits.request_s or None
    try:
        work = asyncio.wait_for(model.embed(request.tokens, request.encoded), limit_s)
        vectors = await while_connected(http_request.receive, work)
    except asyncio.TimeoutError:
        message = f"the embeddings were not finished within {limit_s:g} s"
        raise RequestError(503, message, code="timeout") from None
    n_tokens = sum(len(tokens) for tokens in request.tokens)
    content = write(vectors, n_tokens, model.name, request.warnings)
    return Response(content, media_type="application/json")
