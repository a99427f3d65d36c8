"""The limits that protect the server and its requests from other requests."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from specgen.llama import LlamaVocabulary
from specgen.serve.server.metrics import Metrics
from specgen.serve.server.options import Limits, ServerOptions
from tests.helpers.server import Running, running, session_of, wait_until
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import CHATML_TEMPLATE

LIMITS = Limits(body_bytes=200_000, prompt_tokens=100, answer_tokens=40, n_waiting=2, client_s=1.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TinyConfig(
        logit_scale=6.0, chat_template=CHATML_TEMPLATE, unprintable_scale=0.0, n_ctx_train=8192
    )
    return write_tiny_model(tmp_path_factory.mktemp("limits") / "target.gguf", config)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(session_of(model), ServerOptions(port=0, limits=LIMITS), n_parallel=1) as server:
        yield server


def test_a_body_that_is_too_large_is_refused(server: Running) -> None:
    found = server.http.post("/v1/completions", content=b" " * 200_001)
    assert found.status_code == 413
    assert found.json()["error"]["code"] == "request_too_large"

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        yield from [b" " * 50_000] * 5

    assert server.http.post("/v1/completions", content=pieces()).status_code == 413


def test_images_do_not_count_towards_the_limit(server: Running) -> None:
    """They are left out, wherever they are and however the client escapes base64."""
    text = {"type": "text", "text": "hi"}
    for image in ("abcd" * 100_000, "ab/d" * 100_000):
        url = f"data:image/png;base64,{image}"
        parts = [text, {"type": "image_url", "image_url": {"url": url}}]
        body = json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
        for content in (body, body.replace("/", "\\/")):
            found = server.http.post("/v1/chat/completions", content=content)
            assert found.status_code == 200, found.text
    many = b" " + b"abcd" * 1_000_000
    assert server.http.post("/v1/completions", content=many).status_code == 413
    for prompt in ("a few words " * 20_000, "x" * 200_000):
        found = server.post("/v1/completions", prompt=prompt)
        assert found.status_code == 413
        assert "200000 bytes" in found.json()["error"]["message"]
        assert "--limit-body" in found.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_body_in_another_encoding_of_unicode_is_read(server: Running, encoding: str) -> None:
    body = json.dumps({"prompt": "é", "max_tokens": 0, "echo": True}, ensure_ascii=False)
    found = server.http.post("/v1/completions", content=body.encode(encoding))
    assert found.json()["choices"][0]["text"] == "é"


def test_a_compressed_body_is_refused(server: Running) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    found = server.http.post("/v1/completions", content=body, headers={"Content-Encoding": "gzip"})
    assert found.status_code == 415
    assert found.headers["Accept-Encoding"] == "identity"
    assert "gzip" in found.json()["error"]["message"]
    same = {"Content-Encoding": "identity"}
    assert server.http.post("/v1/completions", content="{}", headers=same).status_code == 400


def test_a_prompt_that_is_too_long_is_refused(server: Running) -> None:
    found = server.post("/v1/completions", prompt="x" * 150)
    assert found.status_code == 400
    assert "100 are allowed" in found.json()["error"]["message"]


def test_an_answer_is_cut_at_the_limit(server: Running) -> None:
    for n_tokens in (1000, -1):
        asked: Any = {"prompt": "x", "ignore_eos": True, "max_tokens": n_tokens}
        body = server.post("/v1/completions", **asked).json()
        assert body["usage"]["completion_tokens"] == 40
        assert body["choices"][0]["finish_reason"] == "length"


def test_a_full_queue_refuses_further_requests(server: Running) -> None:
    with ThreadPoolExecutor() as pool:
        with server.standing_still():
            waiting = [
                pool.submit(server.post, "/v1/completions", prompt="x", max_tokens=4)
                for _ in range(3)
            ]
            wait_until(lambda: server.metric("requests_deferred") == 2, "the queue")
            assert server.metric("requests_processing") == 1
            with server.client as client, pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="any", prompt="x", max_tokens=4)
            assert int(caught.value.response.headers["Retry-After"]) >= 1
            assert caught.value.code == "queue_full"
            assert server.http.get("/health").status_code == 200
        assert [each.result().status_code for each in waiting] == [200, 200, 200]
    assert server.post("/v1/completions", prompt="x", max_tokens=4).status_code == 200


def test_a_client_that_goes_away_leaves_the_queue_at_once(server: Running) -> None:
    with server.standing_still(), _connected(server) as stays:
        _ask(stays, prompt="x", max_tokens=4)
        wait_until(lambda: server.metric("requests_processing") == 1, "the first request")
        for streams in (True, False):
            with _connected(server) as gone:
                _ask(gone, prompt="x", max_tokens=4, stream=streams)
                wait_until(lambda: server.metric("requests_deferred") == 1, "the second")
            wait_until(lambda: server.metric("requests_deferred") == 0, "its end")
        assert server.metric('answers_total{finish_reason="interrupted"}') == 2
    wait_until(lambda: server.engine.is_idle, "the first answer")


def test_a_body_that_does_not_arrive_times_out(server: Running) -> None:
    with _connected(server) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 50\r\n\r\n{"
        )
        assert b" 408 " in slow.recv(100)
    assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


def test_a_time_limit_ends_an_answer(model: Path) -> None:
    options = ServerOptions(port=0, limits=Limits(request_s=0.3))
    with running(session_of(model, max_tokens=-1), options) as server:
        with ThreadPoolExecutor() as pool, server.standing_still():
            late = pool.submit(server.post, "/v1/completions", prompt="x", ignore_eos=True)
            found = late.result()
        # An empty answer would look like a whole one.
        assert found.status_code == 503
        assert found.json()["error"]["code"] == "timeout"
        begun = server.post("/v1/completions", prompt="x", ignore_eos=True).json()
        assert begun["choices"][0]["finish_reason"] == "length"
        assert begun["usage"]["completion_tokens"] > 0
        wait_until(lambda: server.engine.is_idle, "the end")


def test_a_client_that_does_not_read_is_disconnected(model: Path) -> None:
    """Others are answered meanwhile. Its answer is cancelled, and its connection closed."""
    options = ServerOptions(port=0, limits=Limits(client_s=3.0))
    with (
        running(session_of(model, max_tokens=-1), options, n_parallel=2, n_ctx=8192) as server,
        _connected(server, n_received=4096) as slow,
    ):
        # As much as possible about each token, so that it does not fit into the system's buffers.
        _ask(slow, prompt="x", ignore_eos=True, stream=True, logprobs=100)
        wait_until(lambda: server.metric("requests_processing") == 1, "the request")
        fast = server.post("/v1/completions", prompt="the cat", max_tokens=8)
        assert fast.status_code == 200
        wait_until(lambda: server.metric("requests_processing") == 0, "the end of the answer")
        assert server.metric('answers_total{finish_reason="interrupted"}') == 1
        # One connection is the test's own.
        wait_until(lambda: len(server.server.server_state.connections) == 1, "its end")


def test_answers_of_clients_that_go_away_are_cancelled(model: Path) -> None:
    with running(session_of(model, max_tokens=-1), n_parallel=2, n_ctx=8192) as server:
        for streams in (True, False):
            with _connected(server) as gone:
                _ask(gone, prompt="x", ignore_eos=True, stream=streams)
                wait_until(lambda: server.metric("requests_processing") == 1, "the request")
            wait_until(lambda: server.metric("requests_processing") == 0, "the end of the answer")
        assert server.metric('answers_total{finish_reason="interrupted"}') == 2
        assert server.metric("tokens_predicted_total") < 2 * 7000


# --- who may use it


def test_requests_need_a_valid_key(model: Path) -> None:
    options = ServerOptions(port=0, api_keys=("first", "second"))
    with running(session_of(model), options) as server:
        for key in ("first", "second"):
            with server.client.with_options(api_key=key) as client:
                assert client.models.list().data
        with (
            server.client.with_options(api_key="third") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        with httpx.Client(base_url=server.url) as nobody:
            for path in ("/v1/models", "/metrics", "/slots", "/props"):
                assert nobody.get(path).status_code == 401
            for path in ("/health", "/", "/page/page.js"):
                assert nobody.get(path).status_code == 200
            for header in (b"first", b"Basic first", b"Bearer", b"Bearer firs", b"Bearer \xff"):
                found = nobody.get("/v1/models", headers=[(b"Authorization", header)])
                assert found.status_code == 401


def test_requests_from_other_origins_and_hosts_are_refused(server: Running) -> None:
    get = server.http.get
    own = server.url.removeprefix("http://")
    assert get("/v1/models", headers={"Origin": server.url}).status_code == 200
    found = get("/v1/models", headers={"Origin": "https://example.org"})
    assert found.status_code == 403
    assert "--cors-origin" in found.json()["error"]["message"]
    assert get("/v1/models", headers={"Origin": "http://["}).status_code == 403
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "128.0.0.1"):
        found = get("/v1/models", headers={"Host": host})
        assert found.status_code == 403
        assert "--cors-origin" in found.json()["error"]["message"]
    for host in ("127.0.0.2", "127.1.2.3:80", "localhost.", "Localhost:80", "x.localhost", "[::1]"):
        assert get("/v1/models", headers={"Host": host}).status_code == 200, host
    assert get("/v1/models", headers={"Host": own}).status_code == 200
    assert get("/v1/models", headers={"Host": f"localhost:{own.split(':')[1]}"}).status_code == 200
    assert "access-control-allow-origin" not in get("/v1/models").headers


PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost",
        "http://localhost:5173",
        "https://localhost:8443",
        "http://127.0.0.1:3000",
        "http://127.1.2.3",
        "http://[::1]:8000",
    ],
)
def test_pages_from_this_machine_are_answered(server: Running, origin: str) -> None:
    asked = server.http.options("/v1/chat/completions", headers={"Origin": origin, **PREFLIGHT})
    assert asked.status_code == 200
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    body = {"prompt": "x", "max_tokens": 1}
    answered = server.http.post("/v1/completions", json=body, headers={"Origin": origin})
    assert answered.status_code == 200
    for response in (asked, answered):
        assert response.headers["access-control-allow-origin"] == origin
        assert "Origin" in response.headers["vary"]
        assert "access-control-allow-credentials" not in response.headers
    rebound = {"Origin": origin, "Host": "evil.example"}
    assert server.http.get("/v1/models", headers=rebound).status_code == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "http://localhost.evil.example",
        "http://localhost:5173.evil.example",
        "http://localhost@evil.example",
        "http://evil.example/http://localhost",
        "http://evil-localhost",
        "http://127.0.0.1.evil.example:80",
        "http://127.evil.example",
        "http://[::2]",
        "http://192.168.1.5:3000",
        "http://0.0.0.0:3000",
        "ftp://localhost",
        "file://localhost",
        "chrome-extension://abc",
        "file://",
        "null",
        "localhost",
        "",
    ],
)
def test_no_other_origin_is_taken_for_this_machine(server: Running, origin: str) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("POST", "/v1/completions"),
        ("OPTIONS", "/v1/chat/completions"),
    ):
        found = server.http.request(method, path, headers={"Origin": origin, **PREFLIGHT})
        assert found.status_code == 403, (method, path)
        assert "--cors-origin" in found.json()["error"]["message"]
        assert "access-control-allow-origin" not in found.headers


def test_a_page_from_this_machine_needs_a_key_if_there_are_keys(model: Path) -> None:
    with running(session_of(model), ServerOptions(port=0, api_keys=("first",))) as server:
        origin = {"Origin": "http://localhost:5173"}
        asked = server.http.options("/v1/models", headers={**origin, **PREFLIGHT})
        assert asked.status_code == 200
        with httpx.Client(base_url=server.url) as nobody:
            refused = nobody.get("/v1/models", headers=origin)
            assert refused.status_code == 401
            # Otherwise the page could not read why it was refused.
            assert refused.headers["access-control-allow-origin"] == origin["Origin"]
        assert server.http.get("/v1/models", headers=origin).status_code == 200


def test_pages_of_an_allowed_origin_are_answered(model: Path) -> None:
    origin = "https://example.org"
    with running(session_of(model), ServerOptions(port=0, cors_origins=(origin,))) as server:
        found = server.http.get("/v1/models", headers={"Origin": origin})
        assert found.headers["access-control-allow-origin"] == origin
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        sent = {"Access-Control-Request-Headers": "authorization, x-stainless-lang"}
        found = server.http.options("/v1/chat/completions", headers=asked | sent)
        assert found.status_code == 200
        assert "x-stainless-lang" in found.headers["access-control-allow-headers"]
        other = {"Origin": "https://example.com"}
        assert server.http.get("/v1/models", headers=other).status_code == 403
        refused = server.http.options("/v1/models", headers=other | PREFLIGHT)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "origin_not_allowed"


def test_no_response_reveals_a_path(server: Running, model: Path) -> None:
    texts = [server.http.get(path).text for path in ("/props", "/v1/models", "/metrics", "/slots")]
    texts.append(server.post("/v1/completions", prompt="x", max_tokens=2).text)
    texts.append(server.post("/v1/completions", prompt="x" * 150).text)
    for text in texts:
        assert str(model.parent) not in text


def _connected(server: Running, n_received: int | None = None) -> socket.socket:
    """A connection; `n_received` is the size of its buffer, in bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.socket()
    if n_received is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_received)
    made.settimeout(60)
    made.connect((host, int(port)))
    return made


def _ask(connection: socket.socket, **fields: Any) -> None:
    """Send a request, and do not wait for the response."""
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())


def test_a_bug_in_the_engines_thread_ends_the_server(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with running(session_of(model)) as server:
        monkeypatch.setattr(Metrics, "count_events", fail)
        found = server.post("/v1/completions", prompt="x")
        assert found.status_code == 500
        wait_until(lambda: isinstance(server.pool.failure, ZeroDivisionError), "the failure")
        wait_until(lambda: not server.thread.is_alive(), "the end")


# --- connections and preparations


def test_a_connection_without_a_complete_head_is_closed(server: Running) -> None:
    """Neither a silent connection nor one that sends a head byte by byte is kept."""
    for pieces in ([], [b"GET /health HTTP/1.1\r\n"], [b"GET / HTTP/1.1\r\n", *[b"A: b\r\n"] * 40]):
        with _connected(server) as slow:
            for piece in pieces:
                try:
                    slow.sendall(piece)
                except OSError:  # it is closed already
                    break
                time.sleep(0.05)
            assert _is_closed(slow)


def test_a_kept_connection_has_the_time_for_a_head_again(server: Running) -> None:
    with _connected(server) as kept:
        for _ in range(2):
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            data = b""
            while not data.endswith(b"}"):  # the body may come apart from the head
                data += kept.recv(1000) or pytest.fail("closed")
            assert b" 200 " in data
        kept.sendall(b"GET /health HTTP/1.1\r\n")
        assert _is_closed(kept)


def test_closed_connections_are_forgotten(server: Running) -> None:
    """Immediately, and not only when the time for the next head is over."""
    n_before = _n_in_memory(RequestResponseCycle)
    for _ in range(20):
        with _connected(server) as closed:
            closed.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert b" 200 " in _all_of(closed)
    for _ in range(20):
        assert server.http.get("/health").status_code == 200
    assert _n_in_memory(RequestResponseCycle) < n_before + 10


def _n_in_memory(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def test_small_writes_are_sent_at_once(server: Running) -> None:
    """A chunk does not wait until the client has acknowledged the one before."""
    with _connected(server):
        connections = server.server.server_state.connections
        wait_until(lambda: len(connections) > 0, "the connection")
        for each in list(connections):
            accepted = each.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_health_checks_of_http_1_0_are_answered(server: Running) -> None:
    """As haproxy's `option httpchk` and old monitors send them: without a Host."""
    for head in (b"GET /health HTTP/1.0\r\n\r\n", b"OPTIONS / HTTP/1.0\r\n\r\n"):
        with _connected(server) as checker:
            checker.sendall(head)
            status = _all_of(checker).split(b"\r\n")[0]
        assert status.split()[1] == (b"200" if b"GET" in head else b"405")


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_half_closes_gets_its_answer(server: Running, streams: bool) -> None:
    with _connected(server) as client:
        with server.standing_still():
            # The end arrives with the request, even on a busy machine: nothing is sent before it.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            _ask(client, prompt="x", max_tokens=4, stream=streams)
            client.shutdown(socket.SHUT_WR)
            wait_until(lambda: server.metric("requests_processing") == 1, "the answer")
            time.sleep(0.2)
        answer = _all_of(client)
    assert b" 200 " in answer
    assert b"timings" in answer


def test_a_request_ends_when_its_client_closes(server: Running) -> None:
    """Also before the first token, when it looks like one that has half-closed."""
    asked: Any = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
    with server.standing_still():
        with _connected(server) as client:
            _ask(client, **asked)
            wait_until(lambda: server.metric("requests_processing") == 1, "the answer")
        wait_until(lambda: not server.server.server_state.tasks, "the end of the request")


def test_a_broken_body_after_the_response_closes_the_connection(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """It may come late, from a client that is refused before it has sent everything."""
    with _connected(server) as client:
        head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head + b"1\r\nx\r\n")
        assert b" 404 " in client.recv(1000)
        client.sendall(b"no chunk\r\n")
        assert _is_closed(client)
    assert caplog.records == []


def test_a_client_that_half_closes_too_early_is_disconnected(server: Running) -> None:
    """Its body can never be complete."""
    with _connected(server) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        )
        client.shutdown(socket.SHUT_WR)
        assert _is_closed(client)


def test_a_request_is_refused_if_all_connections_are_being_answered(model: Path) -> None:
    options = ServerOptions(port=0, limits=Limits(n_connections=3))
    with (
        running(session_of(model), options) as server,
        contextlib.ExitStack() as stack,
        server.standing_still(),
    ):
        server.http.close()
        for _ in range(2):
            _ask(stack.enter_context(_connected(server)), prompt="x", max_tokens=2)
        wait_until(lambda: len(server.server.server_state.tasks) == 2, "the requests")
        late = stack.enter_context(_connected(server))
        _ask(late, prompt="x", max_tokens=2)
        assert b" 503 " in late.recv(100)


def test_connections_that_send_nothing_are_not_accepted_without_end(model: Path) -> None:
    options = ServerOptions(port=0, limits=Limits(n_connections=3))
    with running(session_of(model), options) as server, contextlib.ExitStack() as stack:
        server.http.close()
        connections = server.server.server_state.connections
        wait_until(lambda: not connections, "the end of the test's own connection")
        silent = [stack.enter_context(_connected(server)) for _ in range(103)]
        wait_until(lambda: len(connections) == 103, "the connections")
        assert _is_closed(stack.enter_context(_connected(server)))
        _ask(silent[0], prompt="x", max_tokens=2)
        assert b" 503 " in silent[0].recv(100)


def test_a_prompt_with_too_many_bytes_is_not_tokenized(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    tokenize = LlamaVocabulary.tokenize

    def watched(self: LlamaVocabulary, text: str, **how: bool) -> list[int]:
        tokenized.append(len(text))
        return tokenize(self, text, **how)

    with running(session_of(model)) as server:
        monkeypatch.setattr(LlamaVocabulary, "tokenize", watched)
        message = [{"role": "user", "content": "x" * 100_000}]
        for found in (
            server.post("/v1/completions", prompt="x" * 100_000),
            server.post("/v1/chat/completions", messages=message),
        ):
            assert found.status_code == 400
            assert found.json()["error"]["code"] == "context_length_exceeded"
        assert max(tokenized, default=0) < 1000


def test_clients_see_that_a_prompt_is_too_long(server: Running) -> None:
    """LangChain and LiteLLM look for these words in the message, and shorten the prompt."""
    messages = [{"role": "user", "content": "the cat " * 200}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/v1/completions", {"prompt": "the cat " * 200}),
        ("/v1/responses", {"input": messages}),
        ("/api/chat", {"messages": messages}),
    ):
        found = server.post(path, **body)
        assert found.status_code == 400, path
        assert "prompt is too long: " in found.text


def test_long_preparations_hold_up_no_short_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 300_000
    begun, go_on = threading.Semaphore(0), threading.Event()
    tokenize = LlamaVocabulary.tokenize

    def slow(self: LlamaVocabulary, text: str, **how: bool) -> list[int]:
        if text == long:
            begun.release()
            go_on.wait()
        return tokenize(self, text, **how)

    with running(session_of(model)) as server, ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(LlamaVocabulary, "tokenize", slow)
        try:
            waiting = [pool.submit(server.post, "/tokenize", content=long) for _ in range(8)]
            assert begun.acquire(timeout=60)
            assert begun.acquire(timeout=60)
            found = server.post("/v1/completions", prompt="the cat", max_tokens=2)
            assert found.status_code == 200
            assert not any(each.done() for each in waiting)
        finally:
            go_on.set()
        assert [each.result().status_code for each in waiting] == [200] * 8


def _all_of(connection: socket.socket) -> bytes:
    """Everything that the server sends until it closes the connection."""
    data = b""
    while piece := connection.recv(1000):
        data += piece
    return data


def _is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed a connection, and discard what it sends before."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True
