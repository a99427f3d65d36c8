"""Ollama's endpoints about models: they describe those that the server has, and change none."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specgen.errors import SpecgenError
from specgen.llama import LlamaModel
from specgen.llama.library import has_gpu
from specgen.llama.model_description import ModelDescription, describe_model
from specgen.serve.formats.fields import Json
from specgen.serve.formats.ollama_models import OllamaModel
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.capabilities import capabilities_of
from specgen.serve.server.http import read_json
from specgen.serve.server.jobs import ServedModel
from specgen.serve.server.model_pool import LoadedModel, ModelEntry, ModelPool, PooledModel
from specgen.serve.server.options import Limits
from specgen.session.weights_memory import usual_n_ctx


async def list_models(pool: ModelPool, _request: HttpRequest) -> Response:
    """Return all models."""
    with pool.holding_loaded():
        entries = await run_in_threadpool(_entries, pool)
    return JSONResponse({"models": entries})


def _entries(pool: ModelPool) -> list[Json]:
    return [_described(pooled).listed() for pooled in pool.models.values()]


async def list_loaded_models(pool: ModelPool, _request: HttpRequest) -> Response:
    """Return the loaded models."""
    with pool.holding_loaded() as loaded:
        entries = await run_in_threadpool(_running_entries, loaded)
    return JSONResponse({"models": entries})


def _running_entries(loaded: Sequence[PooledModel]) -> list[Json]:
    entries: list[Json] = []
    for pooled in loaded:
        assert pooled.model is not None
        model = _described_loaded(pooled.entry, pooled.model)
        n_bytes = pooled.entry.n_bytes or model.description.n_bytes
        is_on_gpu = has_gpu() and "on the GPU" in pooled.model.target.kernels
        n_gpu_bytes = n_bytes if is_on_gpu else 0
        entries.append(model.running(n_bytes, n_gpu_bytes, pooled.remaining_s))
    return entries


async def show_model(
    pool: ModelPool,
    limits: Limits,
    request: HttpRequest,
) -> Response:
    """Return the description of a model, which is not loaded for that."""
    body = await read_json(request, limits)
    pooled = pool.find(body.get("model") or body.get("name"))
    with pool.holding_loaded():
        model = await run_in_threadpool(_described, pooled, reads_vocabulary=True)
    return JSONResponse(model.shown())


async def pull_model(
    pool: ModelPool,
    limits: Limits,
    request: HttpRequest,
) -> Response:
    """Return that a model is there, as Ollama does after a download.

    Programs pull a model before they use it, even if it is there already.

    Raises:
        RequestError: If it is not there, since this server downloads no models.
    """
    body = await read_json(request, limits)
    try:
        pool.find(body.get("model") or body.get("name"))
    except RequestError as error:
        hint = "this server does not download models, but 'specgen models pull' does"
        message = f"{error.message} ({hint})"
        raise replace(error, message=message) from None
    status = {"status": "success"}
    if body.get("stream") is False:
        return JSONResponse(status)
    return Response(f"{json.dumps(status)}\n", media_type="application/x-ndjson")


async def refuse_change(_request: HttpRequest) -> Response:
    """Refuse to change a model."""
    message = "this server does not change models: 'specgen models' does"
    raise RequestError(501, message, "unsupported")


def _described(pooled: PooledModel, *, reads_vocabulary: bool = False) -> OllamaModel:
    """Return what is known about a model.

    Args:
        pooled: The model.
        reads_vocabulary: Whether to read its vocabulary if it is not loaded, which its capabilities
            depend on. That may take a second.
    """
    if pooled.model is not None:
        return _described_loaded(pooled.entry, pooled.model)
    entry = pooled.entry
    if entry.options is None:
        return OllamaModel(entry.name, ModelDescription())
    options = entry.options
    context = options.target_context
    description = _description_of(options.target)
    capabilities: Sequence[str] | None = None
    if entry.embeds:
        capabilities = ["embedding"]
    elif reads_vocabulary:
        capabilities = _capabilities_in(options.target, context.chat_template, description.digest)
    return OllamaModel(
        entry.name,
        description,
        capabilities,
        context.chat_template or description.chat_template,
        usual_n_ctx(context.n_ctx, description.n_ctx_train),
        options.sampler,
        options.generation,
    )


def _described_loaded(entry: ModelEntry, model: LoadedModel) -> OllamaModel:
    """Return what is known about a loaded model, which the caller keeps loaded."""
    target = model.target
    described = OllamaModel(
        entry.name,
        _description_of(target.file),
        capabilities_of(target),
        target.chat_template() or "",
    )
    if not isinstance(model, ServedModel):
        return replace(described, n_ctx=model.embedder.n_ctx)
    options = model.session.options
    return replace(
        described,
        n_ctx=model.engine.n_ctx,
        sampler=options.sampler,
        generation=options.generation,
    )


def _description_of(file: Path) -> ModelDescription:
    """Return the description of a file; an empty one if it cannot be read any more."""
    try:
        return describe_model(file)
    except (SpecgenError, OSError):
        return ModelDescription()


@functools.lru_cache(maxsize=1000)
def _capabilities_in(
    file: Path,
    template: str | None,
    _digest: str,
) -> tuple[str, ...]:
    """Return the capabilities of the model in a file, which are read again when the file changes.

    Args:
        file: The file.
        template: The chat template that replaces that of the file; None for the file's own.
        _digest: The digest of the file.
    """
    model = LlamaModel(file, vocabulary_only=True)
    try:
        model.own_template = template
        return tuple(capabilities_of(model))
    finally:
        model.close()
