"""The endpoints that describe the server and its models."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specgen import __version__
from specgen.serve.formats.fields import Json
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.server.capabilities import capabilities_of
from specgen.serve.server.http import is_for_anthropic
from specgen.serve.server.jobs import ServedModel
from specgen.serve.server.model_pool import ModelPool, PooledModel
from specgen.session.request import Slot
from specgen.system.files import as_json

#: The first version of Ollama with all features that specgen has. Ollama's clients check it.
_OLLAMA_VERSION = "0.9.0"


class ServerInfo:
    """Answers GET requests about a server."""

    def __init__(self, pool: ModelPool, *, has_keys: bool) -> None:
        self._pool = pool
        self._has_keys = has_keys
        #: The time of the server's start, in seconds since 1970.
        self._started = int(time.time())

    async def health(self, _request: HttpRequest) -> Response:
        """Return that the server is up, and with several models, which of them are loaded."""
        content: Json = {"status": "ok"}
        models = self._pool.models
        # This path needs no key, so it must not reveal the models of a server whose others do.
        if len(models) > 1 and not self._has_keys:
            content["models"] = {name: pooled.status for name, pooled in models.items()}
        return JSONResponse(content)

    async def version(self, _request: HttpRequest) -> Response:
        """Return specgen's version."""
        return JSONResponse({"version": __version__, "specgen": __version__})

    async def ollama_version(self, _request: HttpRequest) -> Response:
        """Return a version of Ollama, which its clients compare with the one that they need."""
        return JSONResponse({"version": _OLLAMA_VERSION, "specgen": __version__})

    async def models(self, request: HttpRequest) -> Response:
        """Return all models, in OpenAI's form with more fields, or in Anthropic's.

        Parameters for pages are ignored: all models are on the first page.
        """
        pooled_models = self._pool.models.values()
        if is_for_anthropic(request.scope):
            entries = [_anthropic_entry(pooled, self._started) for pooled in pooled_models]
            page = {
                "data": entries,
                "first_id": entries[0]["id"],
                "last_id": entries[-1]["id"],
                "has_more": False,
            }
            return JSONResponse(page)
        entries = [_model_entry(pooled, self._started) for pooled in pooled_models]
        return JSONResponse({"object": "list", "data": entries})

    async def model(self, request: HttpRequest) -> Response:
        """Return the model that would answer requests for the name in the path.

        Agents look their model up before the first request for an answer. If there is only one
        model, it answers to any name in both.
        """
        pooled = self._pool.find(request.path_params["model"])
        if is_for_anthropic(request.scope):
            return JSONResponse(_anthropic_entry(pooled, self._started))
        return JSONResponse(_model_entry(pooled, self._started))

    async def metrics(self, _request: HttpRequest) -> Response:
        """Return figures in Prometheus's format."""
        return Response(self._pool.metrics.text(), media_type="text/plain; version=0.0.4")

    async def props(self, request: HttpRequest) -> Response:
        """Return the settings of a model, in the form of llama.cpp's server with more fields."""
        pooled = self._pool.find(request.query_params.get("model"))
        content: Json = {
            "model_alias": pooled.entry.name,
            "build_info": f"specgen {__version__}",
        }
        if isinstance(pooled.model, ServedModel):
            content |= _settings(pooled.model)
        return JSONResponse(content)

    async def slots(self, request: HttpRequest) -> Response:
        """Return the state of each slot of the loaded models, in the form of llama.cpp's server."""
        name = request.query_params.get("model")
        states: list[Json] = []
        for model in self._pool.loaded:
            if isinstance(model, ServedModel) and name in (None, model.name):
                states += (_slot_state(model, slot) for slot in model.engine.slots)
        return JSONResponse(states)

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """Return special tokens and the chat template, in the form of vLLM's server."""
        model = self._pool.find(request.query_params.get("model")).model
        if not isinstance(model, ServedModel):
            raise RequestError(503, "the model is not loaded", "model_not_loaded")
        vocabulary = model.target.vocabulary
        content: Json = {}
        for role, token in vocabulary.special_tokens().items():
            content[f"{role}_token"] = None
            if token >= 0:
                content[f"{role}_token"] = vocabulary.token_text(token)
        content["chat_template"] = model.target.chat_template()
        return JSONResponse(content)


def _model_entry(pooled: PooledModel, created: int) -> Json:
    """Return a model's entry in a list of models.

    Its ``status`` has the form of llama.cpp's server with several models. Fields that need the
    loaded model are left out if it is not loaded.
    """
    entry: Json = {
        "id": pooled.entry.name,
        "object": "model",
        "created": created,
        "owned_by": "specgen",
        "type": "embeddings" if pooled.entry.embeds else "llm",
        "status": {"value": pooled.status, "failed": pooled.failure is not None},
    }
    model = pooled.model
    n_ctx = _n_ctx(pooled)
    if model is not None:
        entry["capabilities"] = capabilities_of(model.target)
        entry["max_model_len"] = n_ctx
        entry["meta"] = {
            "n_vocab": model.target.vocabulary.n_tokens,
            "n_ctx": n_ctx,
            "n_ctx_train": model.target.n_ctx_train,
        }
    return entry


def _anthropic_entry(pooled: PooledModel, created: int) -> Json:
    """Return a model's entry in Anthropic's form, with all fields that its SDKs declare.

    A field is null if specgen does not know it, or not before the model is loaded.
    """
    n_ctx = _n_ctx(pooled)
    return {
        "id": pooled.entry.name,
        "type": "model",
        "display_name": pooled.entry.name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).isoformat(),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": n_ctx,
        "max_tokens": n_ctx,
        "capabilities": None,
    }


def _n_ctx(pooled: PooledModel) -> int | None:
    """Return the size of a model's context; None if the model is not loaded."""
    model = pooled.model
    if model is None:
        return None
    return model.engine.n_ctx if isinstance(model, ServedModel) else model.embedder.n_ctx


def _settings(model: ServedModel) -> Json:
    """Return the settings of a loaded model, in the form of llama.cpp's server."""
    session = model.session
    options = session.options
    template = session.target.chat_template()
    params = as_json(options.sampler)
    params["max_tokens"] = options.generation.max_tokens
    return {
        "model_path": session.target.name,
        "total_slots": model.engine.n_parallel,
        "default_generation_settings": {"n_ctx": model.engine.n_ctx, "params": params},
        "draft": session.draft_name,
        "kernels": session.target.kernels,
        "chat_template": template or "",
        "has_chat_template": template is not None,
    }


def _slot_state(model: ServedModel, slot: Slot) -> Json:
    """Return the state of a slot; the counts are 0 if it is free."""
    request = slot.request  # read only once: the engine's thread may free the slot at any time
    answer = None if request is None else request.answer
    state: Json = {
        "id": slot.number,
        "model": model.name,
        "n_ctx": model.engine.n_ctx,
        "is_processing": answer is not None,
        "n_prompt_tokens": 0,
        "n_prompt_tokens_processed": 0,
        "n_decoded": 0,
    }
    if answer is not None:
        state["n_prompt_tokens"] = answer.n_prompt
        state["n_prompt_tokens_processed"] = answer.n_prefilled
        state["n_decoded"] = answer.n_answer
    return state
