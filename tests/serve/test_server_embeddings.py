"""/v1/embeddings: OpenAI's format with OpenAI's client, in a server that also generates text."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from specgen.llama.embeddings import Embedder
from specgen.serve.server.jobs import FairLock, ServedEmbedder
from specgen.serve.server.model_pool import ModelEntry
from specgen.serve.server.options import Limits
from tests.helpers.common import EXACT
from tests.helpers.server import N_CTX, Pooled, pooled, wait_until
from tests.tiny import TinyConfig, write_tiny_model

MODELS = {
    "encoder": (TinyConfig(architecture="bert", n_ctx_train=64), {}),
    "causal": (TinyConfig(architecture="qwen3"), {"qwen3.pooling_type": 3}),
}
TEXTS = ["the cat is in the house", "a dog"]


@dataclass
class Served(Pooled):
    """What was embedded, in this order; a text waits for `goes_on`."""

    embedded: list[list[int]] = field(default_factory=list)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def embed(self, model: str = "encoder", **body: Any) -> httpx.Response:
        return self.http.post("/v1/embeddings", json={"model": model, **body})


@contextlib.contextmanager
def serving(folder: Path, *names: str, limits: Limits | None = None) -> Iterator[Served]:
    embedded: list[list[int]] = []
    goes_on = threading.Event()
    goes_on.set()

    class Watched(Embedder):
        def embed(self, tokens: Any) -> Any:
            assert goes_on.wait(60)
            embedded.append([*tokens])
            return super().embed(tokens)

    def entry(name: str) -> ModelEntry:
        file = folder / f"{name}.gguf"
        if name in MODELS and not file.exists():
            config, metadata = MODELS[name]
            write_tiny_model(file, config, metadata=metadata)

        def opened(turns: FairLock, _interrupted: Callable[[], bool]) -> Embedder:
            with turns:
                return Watched(file, EXACT, N_CTX)  # the model of text is never loaded

        return ModelEntry(name, opened, n_bytes=1, embeds=name != "text")

    with pooled([*map(entry, names or (*MODELS, "text"))], 3, limits) as found:
        try:
            yield Served(found.http, found.pool, found.notes, embedded, goes_on)
        finally:
            goes_on.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder) as served:
        yield served


@pytest.fixture(scope="module")
def expected(folder: Path, server: Served) -> dict[str, list[Any]]:
    """The vectors of the texts, by the models alone."""
    found: dict[str, list[Any]] = {}
    for name in ("encoder", "causal"):
        with contextlib.closing(Embedder(folder / f"{name}.gguf", EXACT, N_CTX)) as embedder:
            found[name] = [embedder.embed(embedder.tokenize(text)) for text in TEXTS]
    return found


@pytest.mark.parametrize("model", ["encoder", "causal"])
@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openai_client_gets_the_vectors(
    server: Served, expected: dict[str, list[Any]], model: str, form: Any
) -> None:
    given = {} if form is None else {"encoding_format": form}
    with server.client as client:
        answer = client.embeddings.create(model=model, input=TEXTS, **given)
    assert (answer.object, answer.model) == ("list", model)
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    for each, vector in zip(answer.data, expected[model], strict=True):
        values: Any = each.embedding
        if form == "base64":  # the client decodes only what it asked for by itself
            values = np.frombuffer(base64.b64decode(values), "<f4")
        np.testing.assert_array_equal(np.asarray(values, np.float32), vector)


def test_inputs_are_texts_tokens_or_lists_of_them(
    folder: Path, server: Served, expected: dict[str, list[Any]]
) -> None:
    with contextlib.closing(Embedder(folder / "encoder.gguf", EXACT, N_CTX)) as embedder:
        tokens = [embedder.tokenize(text) for text in TEXTS]
    vectors = [vector.tolist() for vector in expected["encoder"]]
    for given, wanted in (
        (TEXTS[0], vectors[:1]),
        (tokens[0], vectors[:1]),
        (tokens, vectors),
        ([[tokens[0][0], TEXTS[0], tokens[0][-1]]], vectors[:1]),
        ({"prompt_string": TEXTS[0]}, vectors[:1]),
        ([TEXTS[0], tokens[1]], vectors),
    ):
        answer = server.embed(input=given).json()
        assert [each["embedding"] for each in answer["data"]] == wanted
        assert answer["usage"]["total_tokens"] == sum(map(len, tokens[: len(wanted)]))
        assert "warnings" not in answer


def test_ollamas_clients_get_the_vectors(server: Served, expected: dict[str, list[Any]]) -> None:
    vectors = [vector.tolist() for vector in expected["encoder"]]
    body = {"model": "encoder", "truncate": True, "keep_alive": "5m"}
    answer = server.http.post("/api/embed", json={**body, "input": TEXTS}).json()
    assert (answer["embeddings"], answer["model"]) == (vectors, "encoder")
    assert answer["prompt_eval_count"] > len(TEXTS)
    assert answer["warnings"] == ["truncate: ignored, since specgen has no such field"]
    older = server.http.post("/api/embeddings", json={**body, "prompt": TEXTS[0]}).json()
    assert older["embedding"] == vectors[0]
    refused = server.http.post("/api/embed", json={"model": "text", "input": "x"})
    assert (refused.status_code, "no embeddings" in refused.json()["error"]) == (400, True)


def test_vectors_are_cut_to_the_dimensions(server: Served, expected: dict[str, list[Any]]) -> None:
    answer = server.embed(input=TEXTS, dimensions=5).json()
    for each, vector in zip(answer["data"], expected["encoder"], strict=True):
        shorter = vector[:5] / np.linalg.norm(vector[:5])
        np.testing.assert_allclose(each["embedding"], shorter, rtol=1e-6)
    assert answer["warnings"][0].startswith("dimensions:")


@pytest.mark.parametrize(
    ("body", "field", "what"),
    [
        ({}, "input", "not a text"),
        ({"input": []}, "input", "not a text"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": ["a", []]}, "input[1]", "not a text"),
        ({"input": [[1, True]]}, "input[0]", "not a text"),
        ({"input": [3, 10**30]}, "input", "there is no token 1000"),
        ({"input": [-1]}, "input", "there is no token -1"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": ["a", "a cat " * 60]}, "input[1]", "tokens, but the context has 64"),
        ({"input": "a " * 300_000}, "input", "600000 bytes"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "dimensions": 65}, "dimensions", "more than 64"),
        ({"input": "a", "dimensions": 0}, "dimensions", "give 1 or more, not 0"),
    ],
)
def test_wrong_requests_name_the_field(
    server: Served, body: dict[str, Any], field: str, what: str
) -> None:
    n_before = len(server.embedded)
    response = server.http.post(
        "/v1/embeddings", content=json.dumps({"model": "encoder", **body}).encode()
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert what in error["message"]
    assert len(server.embedded) == n_before


def test_models_of_the_other_kind_are_refused_unloaded(folder: Path) -> None:
    with serving(folder) as server:
        refused = server.embed("text", input="x")
        assert refused.status_code == 400
        assert "text generates text and makes no embeddings" in refused.json()["error"]["message"]
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            refused = server.http.post(path, json={"model": "causal"})
            assert refused.status_code == 400
            assert "use /v1/embeddings" in refused.json()["error"]["message"]
        assert not server.pool.loaded


def test_a_model_alone_answers_by_any_name(folder: Path) -> None:
    with serving(folder, "encoder") as server:
        assert server.embed("any", input="x").json()["model"] == "encoder"
        assert server.http.get("/slots").json() == []
        assert server.http.get("/props").json()["model_alias"] == "encoder"
        assert server.http.get("/health").json()["status"] == "ok"
        (model,) = server.http.get("/v1/models").json()["data"]
        assert (model["type"], model["meta"]["n_ctx_train"]) == ("embeddings", 64)
        assert 'prompt_tokens_total{model="encoder"} 3.0' in server.http.get("/metrics").text


def test_requests_take_turns(folder: Path) -> None:
    """A long request does not hold up a short one, and only a limited number waits."""
    with serving(folder, "encoder", limits=Limits(n_waiting=1)) as server:
        server.embed(input="x")
        (model,) = server.pool.loaded
        server.goes_on.clear()
        answers: list[httpx.Response] = []

        def ask(n_texts: int) -> threading.Thread:
            def use() -> None:
                answers.append(server.embed(input=[[4]] * n_texts))

            thread = threading.Thread(target=use)
            n_open = model.n_open
            thread.start()
            wait_until(lambda: model.n_open == n_open + 1, "the request")
            return thread

        long, short = ask(50), ask(2)
        assert server.embed(input="x").status_code == 429
        server.goes_on.set()
        for thread in (short, long):
            thread.join()
        assert [len(answer.json()["data"]) for answer in answers] == [2, 50]


def test_a_client_that_goes_ends_its_request(folder: Path) -> None:
    with serving(folder, "encoder") as server:
        server.embed(input="x")
        (model,) = server.pool.loaded
        assert isinstance(model, ServedEmbedder)
        n_before = len(server.embedded)
        server.goes_on.clear()
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/embeddings", json={"input": [[4]] * 2000}, timeout=0.5)
        wait_until(lambda: not model.n_open, "its end")
        server.goes_on.set()
        assert server.embed(input="x").status_code == 200
        assert len(server.embedded) <= n_before + 2


def test_a_request_that_takes_too_long_times_out(folder: Path) -> None:
    with serving(folder, "encoder", limits=Limits(request_s=0.3)) as server:
        server.goes_on.clear()
        refused = server.embed(input="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "timeout")
