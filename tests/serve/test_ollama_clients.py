"""Ollama's API as its typed clients parse it: every required field, with its type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict

from specgen.llama.model_description import ModelDescription
from specgen.options import GenerationOptions, SamplerOptions
from specgen.serve.formats.ollama_models import OllamaModel
from specgen.serve.server.jobs import FairLock, OpenedModel
from specgen.serve.server.model_pool import ModelEntry
from specgen.session.engine import Engine
from tests.helpers.server import N_CTX, Running, pooled, serves, session_of, wait_until
from tests.helpers.sessions import options_of
from tests.serve.test_server_tools import LARGE, TEMPLATE, tool
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

TURNS: list[dict[str, Any]] = [{"role": "user", "content": "the cat is in the"}]
OPTIONS = {"num_predict": 4}

server = serves(**LARGE)


class Typed(BaseModel):
    """An object whose fields must all be there, as decoders in Swift and Go want them."""

    model_config = ConfigDict(strict=True)


# --- OllamaKit, the library of Enchanted (its types in Swift; optional fields are left out) -------


class KitDetails(Typed):
    format: str
    family: str
    parameter_size: str
    quantization_level: str
    families: list[str]


class KitModel(Typed):
    name: str
    digest: str
    size: int
    modified_at: str
    details: KitDetails


class KitModels(Typed):
    models: list[KitModel]


class KitModelInfo(Typed):
    license: str
    template: str
    modelfile: str
    parameters: str


class KitMessage(Typed):
    role: str
    content: str


class KitChatLine(Typed):
    model: str
    created_at: str
    message: KitMessage
    done: bool


class KitGenerateLine(Typed):
    model: str
    created_at: str
    response: str
    done: bool


class LastLine(Typed):
    """The last line has these fields, too."""

    done_reason: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


# --- Ollama's own client (api/types.go) -----------------------------------------------------------


class GoDetails(KitDetails):
    parent_model: str
    context_length: int
    embedding_length: int


class GoModel(KitModel):
    model: str
    details: GoDetails
    capabilities: list[str]


class GoProcess(Typed):
    name: str
    model: str
    size: int
    digest: str
    details: GoDetails
    expires_at: str
    size_vram: int
    context_length: int


class GoShown(KitModelInfo):
    system: str
    details: GoDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def lines(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.post(path, **body).text.splitlines()]


def test_lists_and_descriptions_have_every_field(server: Running) -> None:
    listed = server.http.get("/api/tags").json()
    KitModels.model_validate(listed)
    model = GoModel.model_validate(listed["models"][0])
    assert datetime.fromisoformat(model.modified_at).tzinfo is not None
    file = server.session.options.target
    assert model.size == file.stat().st_size
    assert len(bytes.fromhex(model.digest)) == 32
    assert model.details.family == server.session.target.architecture
    assert model.details.families == [model.details.family]
    assert model.details.quantization_level == "F32"
    assert model.details.parameter_size[-1] in "KM"
    loaded = GoProcess.model_validate(server.http.get("/api/ps").json()["models"][0])
    assert datetime.fromisoformat(loaded.expires_at) > datetime.fromisoformat(model.modified_at)
    assert (loaded.digest, loaded.context_length) == (model.digest, server.engine.n_ctx)
    for body in ({"model": "target"}, {"name": "target:latest"}, {"model": "", "name": "target"}):
        shown = GoShown.model_validate(server.post("/api/show", **body).json())
        assert shown.template == TEMPLATE
        assert TEMPLATE in shown.modelfile
        assert "temperature" in shown.parameters
        assert shown.capabilities == model.capabilities
        assert shown.model_info["tokenizer.ggml.model"]
    assert server.http.head("/").status_code == 200


def test_parameters_without_a_value_are_not_shown() -> None:
    """oterm copies all parameters into its settings, and saves no number of tokens below 1."""

    def shown(**options: Any) -> dict[str, str]:
        sampler = SamplerOptions(seed=options.get("seed", -1))
        generation = GenerationOptions(max_tokens=options.get("num_predict", -1), stop=("###",))
        model = OllamaModel(
            "a", ModelDescription(), n_ctx=64, sampler=sampler, generation=generation
        )
        body = model.shown()
        lines = [line.split(maxsplit=1) for line in body["parameters"].splitlines()]
        assert all(f"PARAMETER {name} {value}" in body["modelfile"] for name, value in lines)
        return dict(lines)

    parameters = shown()
    assert parameters["num_ctx"] == "64"
    assert parameters["stop"] == '"###"'
    assert "-1" not in parameters.values()
    assert shown(seed=7, num_predict=9) == parameters | {"seed": "7", "num_predict": "9"}


def test_lines_have_every_field(server: Running) -> None:
    *_, last = lines(server, "/api/chat", model="a", messages=TURNS, options=OPTIONS)
    LastLine.model_validate(last)
    for line in lines(server, "/api/chat", model="a", messages=TURNS, **OPTIONS):
        KitChatLine.model_validate(line)
    for line in lines(server, "/api/generate", model="a", prompt="hi", images=None, **OPTIONS):
        KitGenerateLine.model_validate(line)
    asked: dict[str, Any] = {"messages": TURNS, "tools": [tool("weather", "C")]}
    *_, called, last = lines(server, "/api/chat", tool_choice="required", **asked)
    # Some clients read only the figures in the last line, as Ollama sends nothing else there.
    assert (called["done"], last["done"]) == (False, True)
    assert "tool_calls" not in last["message"]
    (call,) = called["message"]["tool_calls"]
    assert call["function"]["index"] == 0
    assert isinstance(call["function"]["arguments"], dict)


# --- context --------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_a_context_continues_the_conversation(server: Running, streams: bool) -> None:
    def asked(prompt: str, **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": prompt, "stream": streams, "options": OPTIONS, **more}
        return lines(server, "/api/generate", **body)[-1]

    first = asked("the cat is in the")
    context = first["context"]
    assert len(context) == first["prompt_eval_count"] + 4
    second = asked("and the dog", context=context)
    alone = asked("and the dog")
    assert second["context"][: len(context)] == context
    assert second["prompt_eval_count"] > len(context)
    assert len(second["context"]) <= len(context) + len(alone["context"])
    assert "context" not in asked("x", raw=True)
    # The same tokens as a prompt of their own are answered alike.
    tokens = second["context"][:-4]
    same = server.post("/v1/completions", prompt=tokens, max_tokens=4).json()
    asked_again = {"prompt": "and the dog", "context": context, "options": OPTIONS}
    again = server.post("/api/generate", stream=False, **asked_again).json()
    assert again["response"] == same["choices"][0]["text"]


def test_a_context_that_cannot_be_used_is_refused(server: Running) -> None:
    asked: dict[str, Any] = {"prompt": "x", "stream": False, "options": OPTIONS}
    for more in ({"context": [10**9]}, {"context": ["x"]}, {"context": [1], "raw": True}):
        found = server.post("/api/generate", **asked, **more)
        assert found.status_code == 400
        assert found.json()["error"]


# --- loading and unloading ------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: Path) -> Iterator[httpx.Client]:
    """A server of two models, coder and small:latest."""

    def entry(name: str) -> ModelEntry:
        config = TinyConfig(logit_scale=3.0, chat_template=CHATML_TEMPLATE)
        file = write_tiny_model(tmp_path / f"{name.partition(':')[0]}.gguf", config)

        def opened(turns: FairLock, _interrupted: object) -> OpenedModel:
            with ExitStack() as stack, turns:
                session = stack.enter_context(session_of(file))
                engine = Engine(session, n_parallel=2, n_ctx=N_CTX, learn_alone=True)
                return OpenedModel(session, engine, stack.pop_all())

        return ModelEntry(name, opened, n_bytes=1, options=options_of(file, "ngram"))

    with pooled([entry("coder"), entry("small:latest")], 2) as server:
        yield server.http


def loaded(http: httpx.Client) -> list[str]:
    return [model["name"] for model in http.get("/api/ps").json()["models"]]


def test_a_model_that_is_not_loaded_is_described_without_loading_it(several: httpx.Client) -> None:
    models = KitModels.model_validate(several.get("/api/tags").json()).models
    assert [model.name for model in models] == ["coder", "small:latest"]
    assert models[0].details.family == "llama"
    shown = GoShown.model_validate(several.post("/api/show", json={"model": "coder"}).json())
    assert shown.capabilities == ["completion", "chat"]
    assert shown.template == CHATML_TEMPLATE
    assert loaded(several) == []


def test_a_name_without_a_tag_is_that_with_the_tag_latest(several: httpx.Client) -> None:
    for name in ("coder", "coder:latest", "small", "small:latest"):
        asked = {"model": name, "messages": TURNS, "max_tokens": 1}
        assert several.post("/v1/chat/completions", json=asked).status_code == 200
        assert several.get(f"/v1/models/{name}").status_code == 200
    for name in ("coder:7b", "latest", ":latest"):
        asked = {"model": name, "messages": TURNS}
        assert several.post("/api/chat", json=asked).status_code == 404
        assert several.post("/api/show", json=asked).status_code == 404


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", "0m0s", 0.0])
def test_a_model_that_is_not_kept_is_unloaded(several: httpx.Client, keep_alive: Any) -> None:
    asked = {"model": "coder", "stream": False, "options": OPTIONS}
    several.post("/api/generate", json=asked)
    several.post("/api/generate", json={**asked, "model": "small"})
    assert loaded(several) == ["coder", "small:latest"]
    ended = several.post("/api/generate", json={**asked, "keep_alive": keep_alive}).json()
    assert (ended["done_reason"], ended["response"]) == ("unload", "")
    assert loaded(several) == ["small:latest"]
    # An answer comes first, if one is wanted.
    last = {**asked, "model": "small", "messages": TURNS, "keep_alive": keep_alive}
    assert several.post("/api/chat", json=last).json()["eval_count"] == 4
    wait_until(lambda: loaded(several) == [], "the model to be unloaded")
    ended = several.post("/api/chat", json={"model": "small", "keep_alive": keep_alive}).json()
    assert (ended["done_reason"], ended["message"]["content"]) == ("unload", "")
    assert loaded(several) == []


@pytest.mark.parametrize("keep_alive", ["0.1s", "100ms", 0.1, "0h0m0.1s"])
def test_a_model_that_is_kept_for_a_time_is_then_unloaded(
    several: httpx.Client, keep_alive: Any
) -> None:
    asked = {"model": "coder", "prompt": "x", "stream": False, "options": OPTIONS}
    found = several.post("/api/generate", json={**asked, "keep_alive": keep_alive}).json()
    assert found["done_reason"] == "length"
    wait_until(lambda: loaded(several) == [], "the model to be unloaded")
    # Loaded again, it stays, as at first.
    several.post("/api/generate", json=asked)
    assert expiry(several) is None


def expiry(http: httpx.Client) -> float | None:
    """Return after how many seconds the only loaded model will be unloaded; None for no limit."""
    (model,) = http.get("/api/ps").json()["models"]
    expires_at = datetime.fromisoformat(model["expires_at"])
    if expires_at.year == 2999:
        return None
    return (expires_at - datetime.now(timezone.utc)).total_seconds()


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        (3600, 3600),
        ("3600", 3600),
        (-1, None),
        ("-1", None),
        ("-1m", None),
        ("9999999h", None),
    ],
)
def test_the_list_of_loaded_models_shows_when_they_are_unloaded(
    several: httpx.Client, keep_alive: Any, seconds: float | None
) -> None:
    asked = {"model": "coder", "stream": False, "options": OPTIONS, "keep_alive": keep_alive}
    for kept in (asked, {**asked, "prompt": "x"}, {"model": "coder", "prompt": "x"}):
        # The last one does not tell how long, so that the time of the one before still counts.
        assert several.post("/api/generate", json=kept).status_code == 200
        found = expiry(several)
        assert found is None if seconds is None else found == pytest.approx(seconds, abs=60)


def test_the_last_request_decides_how_long_a_model_is_kept(several: httpx.Client) -> None:
    asked = {"model": "coder", "prompt": "x", "stream": False, "options": OPTIONS}
    several.post("/api/generate", json={**asked, "keep_alive": "1h"})
    several.post("/api/generate", json={**asked, "keep_alive": -1})
    assert expiry(several) is None
    several.post("/api/generate", json={**asked, "keep_alive": "1h"})
    several.post("/api/generate", json={**asked, "keep_alive": "0.1s"})
    wait_until(lambda: loaded(several) == [], "the model to be unloaded")


@pytest.mark.parametrize("keep_alive", ["", "-", "soon", "5 m", "5m!", False, [], {"m": 5}])
def test_an_invalid_time_is_rejected(several: httpx.Client, keep_alive: Any) -> None:
    asked = {"model": "coder", "prompt": "x", "keep_alive": keep_alive}
    for path in ("/api/generate", "/api/chat", "/api/embed"):
        refused = several.post(path, json=asked)
        assert refused.status_code == 400
        assert "keep_alive: give seconds, or a duration such as 5m" in str(refused.json()["error"])


# --- what Ollama does with models, and this server does not ---------------------------------------


def test_a_pull_of_an_existing_model_succeeds(several: httpx.Client) -> None:
    for body in ({"model": "coder"}, {"name": "small"}, {"model": "coder:latest", "stream": True}):
        found = several.post("/api/pull", json=body)
        assert [json.loads(line) for line in found.text.splitlines()] == [{"status": "success"}]
        assert found.headers["content-type"] == "application/x-ndjson"
    assert several.post("/api/pull", json={"model": "coder", "stream": False}).json() == {
        "status": "success"
    }
    refused = several.post("/api/pull", json={"model": "llama9"})
    assert refused.status_code == 404
    assert "no model 'llama9'" in refused.json()["error"]
    assert "does not download models" in refused.json()["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/delete"),
        ("POST", "/api/copy"),
        ("POST", "/api/create"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/sha256:0123"),
    ],
)
def test_models_cannot_be_changed(several: httpx.Client, method: str, path: str) -> None:
    refused = several.request(method, path, json={"model": "coder"})
    assert refused.status_code == 501
    assert "does not change models" in refused.json()["error"]
