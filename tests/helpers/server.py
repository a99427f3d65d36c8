"""A real server on the loopback, with tiny models."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from specgen.options import DraftOptions, DraftSource, SamplerOptions
from specgen.serve.server.app import Server
from specgen.serve.server.draining_server import DrainingServer
from specgen.serve.server.jobs import OpenedModel
from specgen.serve.server.model_pool import ModelEntry, ModelPool
from specgen.serve.server.options import Limits, ServerOptions, bound_socket, url_of
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from tests.helpers.sessions import options_of
from tests.tiny import TinyConfig, write_tiny_model

#: Drafts in every round, because measured costs of tiny models are too noisy for a policy.
FIXED = DraftOptions(policy="fixed", max_tokens=4, ngram_min=1)
N_CTX = 256
#: A time limit for events that are certain to come, even on a busy machine.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Running:
    """A server that is running."""

    url: str
    session: Session
    engine: Engine
    http: httpx.Client
    server: DrainingServer
    pool: ModelPool
    thread: threading.Thread

    @property
    def client(self) -> openai.OpenAI:
        """A client that does not retry."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        """The value of a metric at /metrics, with its labels if it has others than the model."""
        for line in self.http.get("/metrics").text.splitlines():
            without = re.sub(r'\{model="[^"]*"\}|model="[^"]*",|,model="[^"]*"', "", line)
            if without.startswith(f"specgen:{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"there is no {name}")

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Pause decoding in the block."""
        with self.engine.stepping:
            yield


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a condition that is certain to become true."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.005)


def session_of(
    target: Path,
    draft: DraftSource = "ngram",
    *,
    max_tokens: int = 24,
    sampler: SamplerOptions | None = None,
    drafting: DraftOptions = FIXED,
    clock: Callable[[], float] = time.perf_counter,
) -> Session:
    """A session whose rows are exact."""
    own = sampler or SamplerOptions()
    options = options_of(target, draft, sampler=own, drafting=drafting, n_tokens=max_tokens)
    return Session(options, clock, MeasurementStore())


@contextlib.contextmanager
def running(
    session: Session,
    options: ServerOptions | None = None,
    *,
    n_parallel: int = 4,
    n_ctx: int = N_CTX,
    learn_alone: bool = True,
    before_answers: Callable[[], None] = lambda: None,
    after_answers: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda _text: None,
) -> Iterator[Running]:
    """Run a server in a thread of this process, and close the session at the end."""
    options = options or ServerOptions(port=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(session)
        calibrate(session)
        engine = Engine(session, n_parallel=n_parallel, n_ctx=n_ctx, learn_alone=learn_alone)
        opened = OpenedModel(
            session, engine, before_answers=before_answers, after_answers=after_answers
        )
        name = options.alias or session.target.name.removesuffix(".gguf")
        entry = ModelEntry(name, lambda _turns, _interrupted: opened, options=session.options)
        pool = stack.enter_context(ModelPool([entry], options.limits, note=note))
        pool.load(name)
        server, thread, http = stack.enter_context(answering(pool, options))
        yield Running(str(http.base_url).rstrip("/"), session, engine, http, server, pool, thread)


@contextlib.contextmanager
def tiny_server(
    folder: Path,
    options: ServerOptions | None = None,
    *,
    draft: float | None = None,
    max_tokens: int = 24,
    n_parallel: int = 4,
    n_ctx: int = N_CTX,
    **config: Any,
) -> Iterator[Running]:
    """Run a server with a tiny model and a draft that differs by `draft` (None: n-grams)."""
    made = TinyConfig(**{"logit_scale": 6.0, "unprintable_scale": 0.0, **config})
    target = write_tiny_model(folder / "target.gguf", made)
    source: DraftSource = "ngram"
    if draft is not None:
        source = write_tiny_model(folder / "draft.gguf", made.draft(draft))
    session = session_of(target, source, max_tokens=max_tokens)
    with running(session, options, n_parallel=n_parallel, n_ctx=n_ctx) as server:
        yield server


def serves(**how: Any) -> Any:
    """Return a module fixture that runs such a server."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
        with tiny_server(tmp_path_factory.mktemp("served"), **how) as running:
            yield running

    return server


@dataclass
class Pooled:
    """A server with several models, and a record of which were loaded."""

    http: httpx.Client
    pool: ModelPool
    notes: list[str]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http.base_url}/v1", api_key="none", max_retries=0)


@contextlib.contextmanager
def pooled(
    entries: Sequence[ModelEntry], n_loaded: int, limits: Limits | None = None
) -> Iterator[Pooled]:
    """Serve models, of which `n_loaded` fit into memory."""
    options, notes = ServerOptions(port=0, limits=limits or Limits()), list[str]()
    with (
        ModelPool(entries, options.limits, n_loaded, notes.append) as pool,
        answering(pool, options) as (_, _, http),
    ):
        yield Pooled(http, pool, notes)


@contextlib.contextmanager
def answering(
    pool: ModelPool, options: ServerOptions
) -> Iterator[tuple[DrainingServer, threading.Thread, httpx.Client]]:
    """Answer requests with the models of a pool in a thread of this process, and give a client with
    the key.
    """
    keys = {"Authorization": f"Bearer {options.api_keys[0]}"} if options.api_keys else {}
    server = DrainingServer(Server(pool, options).app(), pool, options)
    with bound_socket(options.host, options.port, options.limits.client_s) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            wait_until(lambda: server.started, "the server")
            with httpx.Client(base_url=url_of(bound), headers=keys, timeout=PATIENCE_S) as http:
                yield server, thread, http
        finally:
            server.should_exit = True
            thread.join()
