"""Ollama's endpoints that describe models: ``/api/tags``, ``/api/ps`` and ``/api/show``."""

from __future__ import annotations

import functools
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specgen.errors import SpecgenError
from specgen.llama import LlamaModel
from specgen.llama.library import has_gpu
from specgen.llama.model_description import ModelDescription, describe_model
from specgen.options import SessionOptions
from specgen.serve.formats.fields import Json
from specgen.serve.formats.ollama_models import OllamaModel
from specgen.serve.server.capabilities import capabilities_of
from specgen.serve.server.http import read_json
from specgen.serve.server.jobs import ServedModel
from specgen.serve.server.model_pool import ModelPool, PooledModel
from specgen.serve.server.options import Limits
from specgen.session.session import usual_n_ctx


async def list_models(pool: ModelPool, _request: HttpRequest) -> Response:
    """Return all models."""
    entries = await run_in_threadpool(_entries, pool)
    return JSONResponse({"models": entries})


def _entries(pool: ModelPool) -> list[Json]:
    return [_described(pooled).listed() for pooled in pool.models.values()]


async def list_loaded_models(pool: ModelPool, _request: HttpRequest) -> Response:
    """Return the loaded models."""
    entries = await run_in_threadpool(_loaded_entries, pool)
    return JSONResponse({"models": entries})


def _loaded_entries(pool: ModelPool) -> list[Json]:
    entries: list[Json] = []
    for pooled in pool.models.values():
        model = pooled.model
        if model is None:
            continue
        description = _described(pooled)
        n_bytes = pooled.entry.n_bytes or description.description.n_bytes
        on_gpu = has_gpu() and "on the GPU" in model.target.kernels
        entries.append(description.running(n_bytes, n_bytes if on_gpu else 0))
    return entries


async def show_model(
    pool: ModelPool,
    limits: Limits,
    request: HttpRequest,
) -> Response:
    """Return the description of a model, which is not loaded for that."""
    body = await read_json(request, limits)
    pooled = pool.find(body.get("model") or body.get("name"))
    return JSONResponse(await run_in_threadpool(_shown, pooled))


def _shown(pooled: PooledModel) -> Json:
    return _described(pooled, reads_vocabulary=True).shown()


def _described(pooled: PooledModel, *, reads_vocabulary: bool = False) -> OllamaModel:
    """Return what is known about a model.

    Args:
        pooled: The model.
        reads_vocabulary: Whether to read its vocabulary if it is not loaded, which its capabilities
            depend on. That may take a second.
    """
    options = pooled.entry.options
    file: Path | None = options.target if options is not None else None
    template = options.target_context.chat_template if options is not None else None
    capabilities: list[str] | None = None
    n_ctx = 0
    model = pooled.model
    if model is not None:
        file = model.target.file
        template = model.target.chat_template()
        capabilities = capabilities_of(model.target)
        n_ctx = model.engine.n_ctx if isinstance(model, ServedModel) else model.embedder.n_ctx
        if isinstance(model, ServedModel):
            options = model.session.options
    description = ModelDescription() if file is None else _description_of(file)
    if model is None and options is not None:
        n_ctx = usual_n_ctx(options.target_context.n_ctx, description.n_ctx_train)
        if pooled.entry.embeds:
            capabilities = ["embedding"]
        elif reads_vocabulary:
            capabilities = list(_capabilities_in(options.target, template))
    if template is None:
        template = description.chat_template
    options = options or SessionOptions(Path())
    return OllamaModel(
        pooled.entry.name,
        description,
        capabilities,
        template,
        n_ctx,
        options.sampler,
        options.generation,
    )


def _description_of(file: Path) -> ModelDescription:
    """Return the description of a file; an empty one if it cannot be read any more."""
    try:
        return describe_model(file)
    except (SpecgenError, OSError):
        return ModelDescription()


@functools.lru_cache(maxsize=1000)
def _capabilities_in(file: Path, template: str | None) -> tuple[str, ...]:
    """Return the capabilities of the model in a file; `template` replaces its chat template."""
    model = LlamaModel(file, vocabulary_only=True)
    try:
        model.own_template = template
        return tuple(capabilities_of(model))
    finally:
        model.close()
