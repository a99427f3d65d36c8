"""What the server tells about itself and its models."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from specgen import __version__
from specgen.serve.formats.fields import Json
from specgen.serve.formats.request_errors import RequestError
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.serve.server.jobs import ServedModel
from specgen.serve.server.model_pool import LoadedModel, ModelPool, PooledModel
from specgen.session.prompts import template_of
from specgen.session.prompts.infill import InfillTokens
from specgen.session.prompts.thoughts import writes_thoughts
from specgen.session.request import Slot
from specgen.system.files import as_json

#: The first version of Ollama with all that is answered here: its clients ask for that.
_OLLAMA_VERSION = "0.9.0"


class ServerInfo:
    """Answers GET requests about a server."""

    def __init__(self, pool: ModelPool, *, has_keys: bool) -> None:
        self._pool = pool
        self._has_keys = has_keys
        #: In seconds since 1970.
        self._started = int(time.time())

    async def health(self, _request: HttpRequest) -> Response:
        """Return that the server is up, and which models are loaded."""
        content: Json = {"status": "ok"}
        models = self._pool.models
        # This path needs no key, so it tells nothing if others do.
        if len(models) > 1 and not self._has_keys:
            content["models"] = {name: pooled.status for name, pooled in models.items()}
        return JSONResponse(content)

    async def version(self, _request: HttpRequest) -> Response:
        """Return specgen's version."""
        return JSONResponse({"version": __version__, "specgen": __version__})

    async def ollama_version(self, _request: HttpRequest) -> Response:
        """Return a version of Ollama, which its clients compare with the one that they need."""
        return JSONResponse({"version": _OLLAMA_VERSION, "specgen": __version__})

    async def models(self, _request: HttpRequest) -> Response:
        """Return all models, in OpenAI's form with more fields."""
        found = [_model_entry(pooled, self._started) for pooled in self._pool.models.values()]
        return JSONResponse({"object": "list", "data": found})

    async def model(self, request: HttpRequest) -> Response:
        """Return one model, by its name in the path."""
        name = request.path_params["model"]
        pooled = self._pool.models.get(name)
        if pooled is None:
            raise RequestError(404, f"there is no model {name!r}", code="model_not_found")
        return JSONResponse(_model_entry(pooled, self._started))

    async def ollama_models(self, _request: HttpRequest) -> Response:
        """Return all models, in Ollama's form."""
        return self._ollama_list(self._pool.models.values())

    async def loaded_ollama_models(self, _request: HttpRequest) -> Response:
        """Return the loaded models, in Ollama's form."""
        loaded = [pooled for pooled in self._pool.models.values() if pooled.model is not None]
        return self._ollama_list(loaded)

    def _ollama_list(self, models: Iterable[PooledModel]) -> Response:
        started = datetime.datetime.fromtimestamp(self._started, datetime.timezone.utc)
        found = [
            {
                "name": pooled.entry.name,
                "model": pooled.entry.name,
                "size": pooled.entry.n_bytes,
                "modified_at": started.isoformat(),
                "digest": "",
                "details": {"format": "gguf"},
            }
            for pooled in models
        ]
        return JSONResponse({"models": found})

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
        """Return what each slot is doing, in the form of llama.cpp's server."""
        name = request.query_params.get("model")
        found: list[Json] = []
        for model in self._pool.loaded:
            if isinstance(model, ServedModel) and name in (None, model.name):
                found += (_slot_state(model, slot) for slot in model.engine.slots)
        return JSONResponse(found)

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """Return special tokens and the chat template, in the form of vLLM's server."""
        model = self._pool.find(request.query_params.get("model")).model
        if not isinstance(model, ServedModel):
            raise RequestError(503, "the model is not loaded", "model_not_loaded")
        vocabulary = model.target.vocabulary
        content: Json = {}
        for role, token in vocabulary.special_tokens().items():
            content[f"{role}_token"] = vocabulary.token_text(token) if token >= 0 else None
        content["chat_template"] = model.target.chat_template()
        return JSONResponse(content)


def show_model(model: ServedModel, _body: Json) -> Json:
    """Return what Ollama's server shows of a model."""
    architecture = model.target.architecture
    return {
        "capabilities": _capabilities(model),
        "details": {
            "format": "gguf",
            "family": architecture,
            "families": [architecture],
        },
        "model_info": {
            "general.architecture": architecture,
            "general.basename": model.name,
            f"{architecture}.context_length": model.engine.n_ctx,
        },
    }


def _model_entry(pooled: PooledModel, created: int) -> Json:
    """Return a model's entry in a list of models.

    `status` has the form of llama.cpp's server with several models.
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
    if model is not None:
        n_ctx = model.engine.n_ctx if isinstance(model, ServedModel) else model.embedder.n_ctx
        entry["capabilities"] = _capabilities(model)
        entry["max_model_len"] = n_ctx
        entry["meta"] = {
            "n_vocab": model.target.vocabulary.n_tokens,
            "n_ctx": n_ctx,
            "n_ctx_train": model.target.n_ctx_train,
        }
    return entry


def _capabilities(model: LoadedModel) -> list[str]:
    """Return what a model can do, in Ollama's words, and ``chat`` if it has a template."""
    if not isinstance(model, ServedModel):
        return ["embedding"]
    target = model.target
    template = template_of(target, has_tools=True) or ""
    able = {
        "completion": True,
        "chat": bool(template),
        "tools": form_of(template, target.vocabulary.has_control) is not None,
        "thinking": writes_thoughts(template),
        "insert": InfillTokens.of(target.vocabulary) is not None,
    }
    return [name for name, is_able in able.items() if is_able]


def _settings(model: ServedModel) -> Json:
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
    answer = slot.request.answer if slot.request is not None else None
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
