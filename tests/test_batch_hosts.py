"""`specgen batch --on`: lines answered by servers that die, hang, refuse and come back."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from specgen.batch import on_hosts
from specgen.batch.lines import read_lines
from specgen.batch.on_hosts import Defaults, Host, HostsBatch, find_hosts, read_urls, request_of
from specgen.errors import BackendError, UsageError
from specgen.openai_format.request import Request
from specgen.options import GenerationOptions, SamplerOptions
from tests.helpers_batch import (
    PATIENCE_S,
    Collected,
    answers,
    greedy_and_seeded,
    wait_for_results,
)
from tests.helpers_cli import Specgen

#: What a server answers: a status, headers, and a body; None hangs up.
Reply = tuple[int, dict[str, str], Any] | None


class FakeServer:
    """A server whose answers a test decides, by the body of the request."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply], *, port: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                bodies = {
                    "/v1/models": {"data": [{"id": "t.gguf"}]},
                    "/props": {"total_slots": 2, "has_chat_template": True},
                }
                self._send(200, {}, bodies.get(self.path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append({"path": self.path, **body})
                server.keys.append(self.headers["Authorization"])
                found = reply(body)
                if found is None:
                    self.close_connection = True
                    self.connection.close()
                else:
                    self._send(*found)

            def _send(self, status: int, headers: Mapping[str, str], body: Any) -> None:
                data = json.dumps(body).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def said(body: Mapping[str, Any]) -> Reply:
    """An answer that tells what was asked."""
    text = body.get("prompt") or body["messages"][-1]["content"]
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return 200, {}, {"choices": [{"text": f"answer to {text}"}], "usage": usage}


def lines_of(*rows: str | dict[str, Any]) -> list[Any]:
    data = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return read_lines(data.encode(), "in", SamplerOptions(), GenerationOptions())


def run(
    hosts: list[Host],
    lines: list[Any],
    *,
    patience_s: float = 30.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[HostsBatch, Collected, list[str]]:
    results, notes = Collected(), list[str]()
    job = HostsBatch(
        hosts,
        Defaults(),
        results,
        {"target": "t.gguf"},
        clock=time.monotonic,
        patience_s=patience_s,
        note=notes.append,
    )
    job.run(lines, interrupted)
    return job, results, notes


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are asked again at once, and looked at often."""
    monkeypatch.setattr(on_hosts, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(on_hosts, "_MOST_WAIT_S", 0.05)
    monkeypatch.setattr(on_hosts, "_WATCH_S", 0.1)


PROMPTS = [f"prompt {number}" for number in range(40)]


def test_every_line_is_answered_once_and_all_servers_work() -> None:
    is_asked = threading.Event(), threading.Event()

    def when_both_are_asked(own: int) -> Callable[[dict[str, Any]], Reply]:
        def reply(body: dict[str, Any]) -> Reply:
            is_asked[own].set()
            assert is_asked[1 - own].wait(PATIENCE_S)
            return said(body)

        return reply

    with FakeServer(when_both_are_asked(0)) as one, FakeServer(when_both_are_asked(1)) as other:
        hosts = find_hosts([one.url, other.url], None, None)
        assert [host.n_slots for host in hosts] == [2, 2]
        job, results, _ = run(hosts, lines_of(*PROMPTS))
        assert len(one.bodies) + len(other.bodies) == len(PROMPTS)
    assert [results.text(str(n + 1)) for n in range(40)] == [f"answer to {p}" for p in PROMPTS]
    assert (job.tally.n_answers, job.tally.n_tokens) == (40, 80)


def test_a_busy_server_is_asked_again() -> None:
    tries = Counter[str]()

    def busy_at_first(body: dict[str, Any]) -> Reply:
        text = body["messages"][-1]["content"]
        tries[text] += 1
        busy: Reply = (503, {"Retry-After": "0"}, {"error": {"message": "all slots are busy"}})
        return busy if tries[text] < 3 else said(body)

    with FakeServer(busy_at_first) as server:
        _, results, notes = run(find_hosts([server.url], None, 1), lines_of(*PROMPTS[:5]))
    assert len(results.records) == 5
    assert all(record["error"] is None for record in results.records.values())
    assert any("503: all slots are busy" in note for note in notes)
    assert any("answers again" in note for note in notes)


def test_what_a_server_refuses_is_an_error_and_is_not_asked_again() -> None:
    def picky(body: dict[str, Any]) -> Reply:
        if "3" in body["messages"][-1]["content"]:
            return 400, {}, {"error": {"message": "no threes", "code": "invalid"}}
        return said(body)

    with FakeServer(picky) as server:
        job, results, _ = run(find_hosts([server.url], None, None), lines_of(*PROMPTS[:8]))
        assert len(server.bodies) == 8
    error = {"code": "invalid_request", "message": "no threes"}
    assert results.records["4"]["error"] == error
    assert (job.tally.n_answers, job.tally.n_errors) == (7, 1)


def test_lines_of_a_server_that_hangs_up_go_to_the_others() -> None:
    n = Counter[str]()
    is_dead = threading.Event()

    def dying(body: dict[str, Any]) -> Reply:
        n["asked"] += 1
        if n["asked"] <= 3:
            return said(body)
        is_dead.set()
        return None

    def slower(body: dict[str, Any]) -> Reply:
        assert is_dead.wait(PATIENCE_S)
        return said(body)

    with FakeServer(dying) as one, FakeServer(slower) as other:
        _, results, notes = run(find_hosts([one.url, other.url], None, 1), lines_of(*PROMPTS))
    assert len(results.records) == 40
    assert all(record["error"] is None for record in results.records.values())
    assert any("its lines go to the others" in note for note in notes)


def test_a_line_that_never_comes_back_is_an_error() -> None:
    def killed_by(body: dict[str, Any]) -> Reply:
        return None if "2" in body["messages"][-1]["content"] else said(body)

    with FakeServer(killed_by) as one, FakeServer(killed_by) as other:
        _, results, _ = run(find_hosts([one.url, other.url], None, 1), lines_of(*PROMPTS[:6]))
    assert len(results.records) == 6
    assert results.records["3"]["error"]["code"] == "failed"
    assert "given up after 5 attempts" in results.records["3"]["error"]["message"]


def test_a_server_that_says_nothing_any_more_is_cut_off() -> None:
    """It takes a request and is silent; its health is, too."""
    gone = threading.Event()

    def hanging(body: dict[str, Any]) -> Reply:
        gone.wait(PATIENCE_S)
        return None

    with FakeServer(hanging) as one, FakeServer(said) as other:
        hosts = find_hosts([one.url, other.url], None, 1)
        plain = Host.request

        def silent(self: Host, method: str, path: str, body: Any = None, **kw: Any) -> Any:
            if self is hosts[0] and path == "/health":
                raise TimeoutError
            return plain(self, method, path, body, **kw)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_hosts, "_DEAD_S", 0.5)
            patch.setattr(Host, "request", silent)
            _, results, _ = run(hosts, lines_of(*PROMPTS[:10]))
        gone.set()
    assert len(results.records) == 10
    assert all(record["error"] is None for record in results.records.values())


def test_when_all_are_silent_what_is_done_is_kept() -> None:
    server = FakeServer(said)
    hosts = find_hosts([server.url], None, 1)
    n = Counter[str]()

    def dies(body: dict[str, Any]) -> Reply:
        n["asked"] += 1
        return said(body) if n["asked"] <= 4 else None

    server.close()
    with FakeServer(dies, port=server.port) as again:
        results = Collected()
        job = HostsBatch(
            hosts, Defaults(), results, {}, clock=time.monotonic, patience_s=0.4, note=print
        )

        def closes_after_four() -> bool:
            if len(results.records) == 4 and not n["closed"]:
                n["closed"] += 1
                again.close()
            return False

        with pytest.raises(BackendError, match="no server has answered for"):
            job.run(lines_of(*PROMPTS[:10]), closes_after_four)
    assert len(results.records) == 4


def test_no_server_at_all_is_told_at_once() -> None:
    with FakeServer(said) as server:
        url = server.url
    with pytest.raises(BackendError, match="no server answers: http://127.0.0.1:"):
        find_hosts([url], None, None)


def test_a_server_that_wants_a_key_gets_it_or_is_refused() -> None:
    def locked(body: dict[str, Any]) -> Reply:
        return 401, {}, {"error": {"message": "no key, or a wrong one"}}

    with FakeServer(said) as server:
        run(find_hosts([server.url], "secret", 1), lines_of("a"))
        assert server.keys == ["Bearer secret"]
    with FakeServer(locked) as server, pytest.raises(BackendError, match="401: no key"):
        run(find_hosts([server.url], None, 1), lines_of("a"))


def test_an_interruption_waits_for_no_answer() -> None:
    started, goes_on = threading.Event(), threading.Event()
    waited: list[bool] = []

    def slow(body: dict[str, Any]) -> Reply:
        started.set()
        waited.append(goes_on.wait(PATIENCE_S))
        return said(body)

    with FakeServer(slow) as server:
        _, results, _ = run(
            find_hosts([server.url], None, 1), lines_of(*PROMPTS), interrupted=started.is_set
        )
        assert waited == []
        goes_on.set()
    assert not results.records


def test_lines_that_cannot_be_read_are_not_asked() -> None:
    with FakeServer(said) as server:
        _, results, _ = run(find_hosts([server.url], None, 1), lines_of("a", '{"prompt": 7}'))
        assert len(server.bodies) == 1
    assert results.records["2"]["error"]["code"] == "invalid_request"


# --- what is asked


HOST = Host("http://h", model="t.gguf")
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("line", "defaults", "path", "body"),
    [
        ("hi", Defaults(), "chat/completions", {"messages": [USER]}),
        ("hi", Defaults(chat=False), "completions", {"prompt": "hi"}),
        (
            "hi",
            Defaults({"temperature": 0.5, "max_tokens": 9}, system="Be brief."),
            "chat/completions",
            {
                "messages": [{"role": "system", "content": "Be brief."}, USER],
                "temperature": 0.5,
                "max_tokens": 9,
            },
        ),
        (
            {"prompt": "hi", "system": "S", "max_completion_tokens": 5},
            Defaults({"max_tokens": 9}),
            "chat/completions",
            {
                "messages": [{"role": "system", "content": "S"}, USER],
                "max_completion_tokens": 5,
            },
        ),
        (
            {"messages": [USER], "response_format": {"type": "json_object"}},
            Defaults({"grammar": 'root ::= "a"'}),
            "chat/completions",
            {"messages": [USER], "response_format": {"type": "json_object"}},
        ),
        (
            {
                "custom_id": "x",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "hi", "seed": None, "model": "other"},
            },
            Defaults({"seed": 4}),
            "completions",
            {"prompt": "hi", "seed": 4, "model": "other"},
        ),
        ({"prompt": [1, 2]}, Defaults(), "completions", {"prompt": [1, 2]}),
    ],
)
def test_requests_are_those_of_the_local_batch(
    line: Any, defaults: Defaults, path: str, body: dict[str, Any]
) -> None:
    (read,) = lines_of(line)
    assert isinstance(read.request, Request)
    assert request_of(read, defaults, HOST) == (f"/v1/{path}", {"model": "t.gguf", **body})


def test_a_model_without_a_template_continues_texts() -> None:
    (read,) = lines_of("hi")
    plain = Host("http://h", has_template=False)
    assert request_of(read, Defaults(), plain) == ("/v1/completions", {"prompt": "hi"})


@pytest.mark.parametrize(
    "text",
    ["", " , ", "localhost:8080", "ftp://h", "http://", "http://h:99999", "http://a,http://a"],
)
def test_what_is_no_list_of_servers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--on"):
        read_urls(text)


def test_urls_may_end_as_clients_have_them() -> None:
    assert read_urls("http://a:1/v1, https://b/") == ["http://a:1", "https://b"]


# --- real servers


@contextlib.contextmanager
def serving(target: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "specgen", "serve", "-m", str(target), "-md", "ngram"]
    command += ["--port", str(port), "-t", "1", "-np", "2", "-c", "512"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), process.communicate()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_answers_are_those_of_one_machine_though_a_server_is_killed(
    target: Path, tmp_path: Path, specgen: Specgen
) -> None:
    """Greedy lines and lines with a seed; a server is killed in the middle and comes back, and so is
    the client."""
    source = tmp_path / "in.jsonl"
    rows = greedy_and_seeded(40, n_tokens=60)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    local = specgen(
        "batch", source, tmp_path / "local.jsonl", "-m", target, "-md", "none", "-t", "1"
    )
    assert local.code == 0, local.err
    out = tmp_path / "out.jsonl"
    with contextlib.ExitStack() as stack:
        first, url_1 = stack.enter_context(serving(target))
        _, url_2 = stack.enter_context(serving(target))
        command = [sys.executable, "-m", "specgen", "batch", str(source), str(out)]
        command += ["--on", f"{url_1},{url_2}"]
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

        wait_for_results(out, 4, client)
        first.send_signal(signal.SIGKILL)
        wait_for_results(out, 8, client)
        client.kill()
        client.communicate()
        n_before = out.read_bytes().count(b"\n")
        assert n_before < 40
        stack.enter_context(serving(target, int(url_1.rsplit(":", 1)[1])))
        again = specgen("batch", source, out, "--on", f"{url_1},{url_2}")
        assert again.code == 0, again.err
        assert f"has results for {n_before} of 40 lines" in again.err
    assert answers(out) == answers(tmp_path / "local.jsonl")


@pytest.mark.parametrize(
    "options", [("-m", "x.gguf"), ("-md", "ngram"), ("--draft-max", "3"), ("-t", "2"), ("-c", "99")]
)
def test_options_that_servers_decide_are_refused(
    specgen: Specgen, tmp_path: Path, options: tuple[str, str]
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("a\n")
    result = specgen("batch", source, tmp_path / "o", "--on", "http://127.0.0.1:1", *options)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
