"""Several models in one server: loaded on demand, unloaded when memory is short, with the same
answers as alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from specgen.errors import MemoryLimitError, ModelFileError
from specgen.events import FinishedEvent
from specgen.method.drafter import never
from specgen.options import ContextOptions, SessionOptions, staged
from specgen.serve.server.jobs import FairLock, OpenedModel, ServedModel
from specgen.serve.server.model_pool import ModelEntry
from specgen.serve.server.options import Limits, ServedOptions
from specgen.serve.server.served_models import ModelLoader
from specgen.session.engine import Engine, generate
from specgen.session.open import SILENT, WantedSession
from tests.helpers.server import FIXED, N_CTX, PATIENCE_S, Pooled, pooled, session_of, wait_until
from tests.helpers.sessions import folder_with
from tests.helpers.tiny import write_large_model
from tests.tiny import CHATML_TEMPLATE, TinyConfig

NAMES = ("a", "b", "c")
PROMPTS = ("the cat is in the", "one two three one two three one two", "a")


@dataclass
class Served(Pooled):
    """A server of the models a, b and c, and their names in the order in which they were loaded."""

    loads: list[str] = field(default_factory=list)

    def ask(self, model: str | None, prompt: str = PROMPTS[0], **body: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return self.http.post("/v1/completions", json={"prompt": prompt, **named, **body})

    @property
    def statuses(self) -> dict[str, str]:
        models = self.http.get("/v1/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in models}

    @contextlib.contextmanager
    def busy(self, model: str) -> Iterator[None]:
        """An answer of a model is under way meanwhile, and decodes nothing."""
        self.ask(model)
        # An answer that was sent still counts as open for a moment.
        wait_until(lambda: self.pool.n_open == 0, "the end of the first answer")
        body = {"model": model, "prompt": "x", "stream": True}
        served = self.pool.models[model].model
        assert isinstance(served, ServedModel)
        with (
            served.engine.stepping,
            self.http.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200
            yield


MODEL = TinyConfig(logit_scale=3.0, unprintable_scale=0.0, chat_template=CHATML_TEMPLATE)
CONFIGS = {name: replace(MODEL, seed=seed) for seed, name in enumerate(NAMES)}
DRAFTS = {f"{name}-draft": config.draft(0.1) for name, config in CONFIGS.items()}
files = folder_with(**CONFIGS, **DRAFTS)


@pytest.fixture(scope="module")
def expected(files: Path) -> dict[tuple[str, str], str]:
    """The text of each model alone."""
    found: dict[tuple[str, str], str] = {}
    for name in NAMES:
        with session_of(files / f"{name}.gguf", "none") as plain:
            for prompt in PROMPTS:
                *_, last = generate(plain, plain.prompts.of_text(prompt, chat=False))
                assert isinstance(last, FinishedEvent)
                found[name, prompt] = last.text
    assert len(set(found.values())) == len(found)
    return found


@contextlib.contextmanager
def serving(
    files: Path,
    *,
    n_loaded: int = 2,
    limits: Limits | None = None,
    before_load: Callable[[str], object] = lambda _name: None,
    at_close: Callable[[str], object] = lambda _name: None,
) -> Iterator[Served]:
    """Serve the models, of which `n_loaded` fit into memory."""
    loads: list[str] = []

    def entry(name: str) -> ModelEntry:
        def opened(turns: FairLock, _interrupted: Callable[[], bool]) -> OpenedModel:
            loads.append(name)
            before_load(name)
            drafting = replace(FIXED, verifier="match")
            with contextlib.ExitStack() as stack, turns:
                stack.callback(at_close, name)
                session = session_of(
                    files / f"{name}.gguf", files / f"{name}-draft.gguf", drafting=drafting
                )
                loaded = stack.enter_context(session)
                engine = Engine(loaded, n_parallel=2, n_ctx=N_CTX, learn_alone=True)
                return OpenedModel(loaded, engine, stack.pop_all())

        return ModelEntry(name, opened, n_bytes=1)

    with pooled([*map(entry, NAMES)], n_loaded, limits) as found:
        yield Served(found.http, found.pool, found.notes, loads)


@pytest.mark.parametrize("n_loaded", [1, 2, 3])
def test_answers_are_those_of_each_model_alone(
    files: Path, expected: dict[tuple[str, str], str], n_loaded: int
) -> None:
    """Whatever is loaded and unloaded meanwhile."""
    with serving(files, n_loaded=n_loaded) as server:

        def use(number: int) -> None:
            for turn in range(6):
                name = NAMES[(number + turn * (number % 2 + 1)) % len(NAMES)]
                prompt = PROMPTS[(number + turn) % len(PROMPTS)]
                answer = server.ask(name, prompt).json()
                assert answer["choices"][0]["text"] == expected[name, prompt]
                assert answer["model"] == name
                assert len(server.pool.loaded) <= n_loaded

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(use, number) for number in range(6)]:
                done.result()
        assert set(server.loads) == set(NAMES)


def test_a_model_that_is_used_after_its_time_stays_loaded(files: Path) -> None:
    """Its time ends while another model is being loaded, so it cannot be unloaded at once."""
    is_loading = threading.Event()
    goes_on = threading.Event()

    def wait(name: str) -> None:
        if name == "b":
            is_loading.set()
            assert goes_on.wait(PATIENCE_S)

    with serving(files, before_load=wait) as server, ThreadPoolExecutor(1) as pool:
        asked = {"model": "a", "prompt": "x", "stream": False, "options": {"num_predict": 1}}
        server.ask("a")
        other = pool.submit(server.ask, "b")
        assert is_loading.wait(PATIENCE_S)
        short = {**asked, "keep_alive": "0.001s"}
        assert server.http.post("/api/generate", json=short).status_code == 200
        wait_until(lambda: server.pool.models["a"].remaining_s < 0.0, "the end of its time")
        long = {**asked, "keep_alive": "1h"}
        assert server.http.post("/api/generate", json=long).status_code == 200
        goes_on.set()
        assert other.result().status_code == 200
        assert server.statuses == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert server.http.post("/api/generate", json={"model": "a", "keep_alive": 0}).is_success
        assert server.statuses == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        assert server.loads == ["a", "b"]


def test_the_least_recently_used_model_is_unloaded(files: Path) -> None:
    with serving(files) as server:
        assert server.statuses == dict.fromkeys(NAMES, "unloaded")
        for name in ("a", "b", "a"):
            assert server.ask(name).status_code == 200
        _, unloaded = server.pool.loaded
        assert server.ask("c").status_code == 200
        assert unloaded.target.is_closed
        assert server.statuses == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert server.loads == ["a", "b", "c"]
        assert [note for note in server.notes if note.startswith("unloaded")] == ["unloaded b"]
        figures = server.http.get("/metrics").text
        assert 'specgen:answers_total{finish_reason="length",model="a"} 2.0' in figures
        assert 'specgen:slots{model="b"} 0.0' in figures
        assert 'specgen:slots{model="c"} 2.0' in figures
        slots = server.http.get("/slots").json()
        assert [slot["model"] for slot in slots] == ["a", "a", "c", "c"]
        assert [slot["id"] for slot in server.http.get("/slots?model=c").json()] == [0, 1]


def test_a_model_that_fails_to_close_makes_room(
    files: Path, expected: dict[tuple[str, str], str]
) -> None:
    """For example, because what it learnt cannot be saved. Everything else of it is closed."""

    def fail(_name: str) -> None:
        if len(server.loads) < 4:
            raise OSError("the disk is full")

    with serving(files, n_loaded=1, at_close=fail) as server:
        for name in ("a", "b", "a", "c"):
            answer = server.ask(name)
            assert answer.json()["choices"][0]["text"] == expected[name, PROMPTS[0]]
            (loaded,) = server.pool.loaded
            assert loaded.name == name
        assert server.notes.count("unloaded a") == 2


def test_requests_are_refused_while_the_server_ends(files: Path) -> None:
    """On a connection that was open before, for example."""
    with serving(files) as server:
        server.ask("a")
        server.pool.cancel_all()
        for name in ("a", "b"):
            refused = server.ask(name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "ending")
        assert server.loads == ["a"]


def test_requests_for_one_model_load_it_once(files: Path) -> None:
    goes_on = threading.Event()
    with (
        serving(files, before_load=lambda _name: goes_on.wait(PATIENCE_S)) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        asked = [pool.submit(server.ask, "a") for _ in range(4)]
        wait_until(lambda: server.statuses["a"] == "loading", "the load")
        health = server.http.get("/health").json()  # the event loop goes on
        assert health["models"] == {"a": "loading", "b": "unloaded", "c": "unloaded"}
        wait_until(lambda: server.pool.n_open == 4, "the requests")
        goes_on.set()
        assert [each.result().status_code for each in asked] == [200] * 4
        assert server.loads == ["a"]


def test_a_busy_model_stays_and_the_request_waits(
    files: Path, expected: dict[tuple[str, str], str]
) -> None:
    with serving(files, n_loaded=1) as server, ThreadPoolExecutor(2) as pool:
        with server.busy("a"):
            asked = [pool.submit(server.ask, "b")]
            wait_until(lambda: server.pool.n_open == 2, "the request")
            # Later requests for the loaded model queue after it. Otherwise it could wait forever.
            asked.append(pool.submit(server.ask, "a"))
            wait_until(lambda: server.pool.n_open == 3, "the second request")
            assert server.statuses == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        for name, each in zip("ba", asked, strict=True):
            assert each.result().json()["choices"][0]["text"] == expected[name, PROMPTS[0]]
        assert server.loads == ["a", "b", "a"]


def test_the_queue_has_a_limit(files: Path) -> None:
    with (
        serving(files, n_loaded=1, limits=Limits(n_waiting=1)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        with server.busy("a"):
            waiting = pool.submit(server.ask, "b")
            wait_until(lambda: server.pool.n_open == 2, "the request")
            refused = server.ask("c")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
        assert waiting.result().status_code == 200


def test_waiting_is_limited_by_the_timeout_of_a_request(files: Path) -> None:
    with serving(files, n_loaded=1, limits=Limits(request_s=1.0)) as server, server.busy("a"):
        refused = server.ask("b")
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert error["code"] == "model_not_loaded"
        assert "the memory is full, and all loaded models are busy" in error["message"]


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(files: Path) -> None:
    broken = [True]

    def fail(name: str) -> None:
        if name == "b" and broken[0]:
            raise ModelFileError("b.gguf: it is damaged")

    with serving(files, before_load=fail) as server:
        answer = server.ask("b")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "model_not_loaded"
        assert "b cannot be loaded: b.gguf: it is damaged" in answer.json()["error"]["message"]
        status = server.http.get("/v1/models/b").json()["status"]
        assert status == {"value": "unloaded", "failed": True}
        assert server.ask("a").status_code == 200
        broken[0] = False
        assert server.ask("b").status_code == 200
        assert not server.http.get("/v1/models/b").json()["status"]["failed"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_unknown_names_are_refused_with_the_known_ones(files: Path, path: str) -> None:
    with serving(files) as server:
        answer = server.http.post(path, json={"model": "d", "prompt": "x", "content": "x"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "model_not_found"
        assert "the models are a, b, c" in error["message"]
        assert server.http.post(path, json={"prompt": "x"}).status_code == 400
        assert server.http.get("/props?model=d").status_code == 404
        assert server.http.get("/props?model=a").json()["model_alias"] == "a"
        assert server.http.get("/v1/models/d").json()["error"] == error
        assert server.http.get("/v1/models/b").json()["id"] == "b"
        assert server.loads == []


def test_unloaded_models_are_listed_in_anthropics_form(files: Path) -> None:
    with serving(files) as server:
        with anthropic.Anthropic(base_url=str(server.http.base_url), api_key="none") as client:
            models = list(client.models.list())
            with pytest.raises(anthropic.NotFoundError, match="the models are a, b, c"):
                client.models.retrieve("claude-opus-4-8")
        assert [model.id for model in models] == list(NAMES)
        assert {model.max_input_tokens for model in models} == {None}
        assert server.loads == []


def test_a_client_that_goes_away_while_it_waits_loads_nothing(files: Path) -> None:
    with serving(files, n_loaded=1) as server:
        with server.busy("a"):
            with pytest.raises(httpx.ReadTimeout):
                server.http.post("/v1/completions", json={"model": "b", "prompt": "x"}, timeout=0.2)
            wait_until(lambda: server.pool.n_open == 1, "the end of the request")
        assert server.ask("a").status_code == 200
        assert server.loads == ["a"]


def test_a_model_larger_than_its_memory_is_read_from_disk(tmp_path: Path) -> None:
    """Its weights use what its contexts leave of the memory of all models."""
    target = write_large_model(tmp_path / "large.gguf", 10**10)

    def served(**context: Any) -> ModelEntry:
        options = SessionOptions(target, "none", target_context=ContextOptions(**context))
        choice = staged(str(target), ["none"], None)
        loader = ModelLoader(SILENT, learns_across=False, stop=never, memory_bytes=6e9)
        return loader.entry("", ServedOptions(choice, lambda _: WantedSession(options)))

    assert served().n_bytes == 6e9
    with pytest.raises(MemoryLimitError, match="large needs about 10.* but --memory allows 6"):
        served(weights_memory="all")
