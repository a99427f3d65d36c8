"""`specgen batch --on`: servers answer the lines; each gets a line when it has a free slot.

A line belongs to one server at a time. If a server dies, hangs or is busy, its line goes back to the others,
and the server is tried again later. Each result is written once. Any server with OpenAI's API will do.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from specgen.batch.lines import Line, LineError
from specgen.batch.results import Results, result_of
from specgen.batch.runner import Tally
from specgen.errors import BackendError, UsageError
from specgen.openai_format.request import field_name

#: Requests at once to a server that does not report its slots.
_N_SLOTS = 4
#: Seconds: to connect; between health checks; of silence after which a server counts as dead.
_CONNECT_S = 10.0
_WATCH_S = 5.0
_DEAD_S = 30.0
#: Seconds before a server is tried again: after the first failure, and at most.
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0
#: The number of failed attempts after which a line is an error: the line may be what ends the servers.
_MOST_ATTEMPTS = 5
#: Statuses after which another try may succeed.
_BUSY = frozenset([408, 425, 429, 500, 502, 503, 504])
#: Statuses that refuse every request.
_NO_ACCESS = frozenset([401, 403])
#: Fields that constrain the form of an answer.
_FORMS = frozenset(["grammar", "json_schema", "response_format"])
#: Seconds between checks for Ctrl-C.
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults for requests: `fields` of the body, from the command line, and how a plain prompt becomes a
    request. `chat` says whether it is a user's turn; None means: if the server's model has a template."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    chat: bool | None = None
    system: str | None = None


@dataclass(eq=False)
class Host:
    """A server. `url` ends before the path."""

    url: str
    key: str | None = None
    n_slots: int = _N_SLOTS
    model: str = ""
    has_template: bool = True
    #: Failures since the last response of any kind.
    n_failures: int = 0
    #: The reason why it is not used any more.
    refused: str | None = None
    _open: set[http.client.HTTPConnection] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def request(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send one request in its own connection; return status, headers and body. Without a timeout it waits
        while the server lives. Raises `OSError` or `HTTPException`."""
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s or _CONNECT_S)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            data = None if body is None else json.dumps(body).encode("utf-8", "backslashreplace")
            connection.request(method, f"{parts.path.rstrip('/')}{path}", data, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def cut_off(self) -> None:
        """Abort the running requests: each raises an error."""
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    try:
                        connection.sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue

    def look(self) -> None:
        """Ask the server for its properties. Raises `OSError` or `HTTPException` if it does not respond, and
        `UsageError` if it needs a key."""
        status, _, data = self.request("GET", "/v1/models", timeout_s=_CONNECT_S)
        if status in _NO_ACCESS:
            raise UsageError(
                f"{self.url}: the server answers with status {status}: {_message(data)}",
                hint="put the server's key into SPECGEN_API_KEY",
            )
        models = _object(data).get("data")
        if isinstance(models, list) and models and isinstance(models[0], dict):
            self.model = str(models[0].get("id", ""))
        status, _, data = self.request("GET", "/props", timeout_s=_CONNECT_S)
        props = _object(data) if status == http.client.OK else {}
        n_slots = props.get("total_slots")
        if isinstance(n_slots, int) and n_slots > 0:
            self.n_slots = n_slots
        self.has_template = bool(props.get("has_chat_template", True))


def read_urls(text: str) -> list[str]:
    """Read a list of URLs with commas. Raises `UsageError`."""
    urls = [url.strip().rstrip("/").removesuffix("/v1") for url in text.split(",") if url.strip()]
    for url in urls:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise UsageError(f"--on {url}: not the URL of a server", "give http://HOST:PORT")
    if not urls:
        raise UsageError(
            "--on names no server", hint="give http://HOST:PORT; separate several with commas"
        )
    if len(set(urls)) < len(urls):
        raise UsageError("--on names a server twice")
    return urls


def find_hosts(urls: Sequence[str], key: str | None, n_slots: int | None) -> list[Host]:
    """Return the servers at these URLs with their properties; those that do not respond now may do so later.
    Raises `BackendError` if none responds, `UsageError` if one needs a key, or if their models differ."""
    hosts = [Host(url, key) for url in urls]
    problems: list[str] = []
    for host in hosts:
        try:
            host.look()
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"{host.url}: {_reason(error)}")
        if n_slots is not None:
            host.n_slots = n_slots
    if len(problems) == len(hosts):
        raise BackendError("no server answers: " + "; ".join(problems))
    models = {host.model: host for host in hosts if host.model}
    if len(models) > 1:
        said = ", ".join(f"{host.url} has {name}" for name, host in models.items())
        raise UsageError(f"the servers have different models: {said}")
    for host in hosts:
        host.model = host.model or next(iter(models), "")
    return hosts


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a line's request."""

    line: Line
    response: dict[str, Any] | None
    error: LineError | None


class HostsBatch:
    """Sends the lines of a batch to servers, and writes the results as they come.

    `settings` is written with each result, and `note` gets a sentence when a server comes or goes. The batch
    ends if all servers are silent for `patience_s` seconds; `clock` gives seconds.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        defaults: Defaults,
        results: Results,
        settings: Mapping[str, Any],
        *,
        clock: Callable[[], float],
        patience_s: float,
        note: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._hosts = hosts
        self._defaults = defaults
        self._results = results
        self._settings = settings
        self._clock = clock
        self._patience_s = patience_s
        self._note = note
        self.tally = Tally()
        self._waiting: deque[Line] = deque()
        self._n_attempts: dict[str, int] = {}
        self._outcomes: SimpleQueue[_Outcome | str] = SimpleQueue()
        self._changed = threading.Condition()
        self._is_over = False
        self._heard_s = clock()

    def run(
        self,
        lines: Sequence[Line],
        interrupted: Callable[[], bool] = lambda: False,
        report: Callable[[Tally], None] = lambda _tally: None,
    ) -> None:
        """Get the lines answered. After an interruption, unfinished answers are dropped; a later run asks for
        them again. Raises `BackendError` if all servers are silent for too long, `OutputError`."""
        self.tally.n_lines = len(lines)
        for line in lines:
            if isinstance(line.request, LineError):
                self._write(_Outcome(line, None, line.request))
            else:
                self._waiting.append(line)
        n_left = len(self._waiting)
        threads = [
            threading.Thread(target=self._work, args=(host,), daemon=True)
            for host in self._hosts
            for _ in range(min(host.n_slots, max(1, n_left)))
        ]
        threads += [
            threading.Thread(target=self._watch, args=(host,), daemon=True) for host in self._hosts
        ]
        for thread in threads:
            thread.start()
        try:
            while n_left and not interrupted():
                n_left -= self._take_outcomes()
                report(self.tally)
                if n_left:
                    self._check_patience()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            for host in self._hosts:
                host.cut_off()

    def _take_outcomes(self) -> int:
        """Write the results that have come, after a short wait; return how many lines they are."""
        n_written, wait_s = 0, _LOOK_S
        while True:
            try:
                outcome = self._outcomes.get(timeout=wait_s)
            except Empty:
                return n_written
            wait_s = 0.0001
            if isinstance(outcome, str):
                self._note(outcome)
            else:
                self._write(outcome)
                n_written += 1

    def _check_patience(self) -> None:
        if all(host.refused is not None for host in self._hosts):
            said = "; ".join(f"{host.url}: {host.refused}" for host in self._hosts)
            raise BackendError(f"no server takes requests: {said}")
        silent_s = self._clock() - self._heard_s
        all_fail = all(host.n_failures or host.refused for host in self._hosts)
        if all_fail and silent_s > self._patience_s:
            raise BackendError(
                f"no server has answered for {silent_s:.0f} seconds",
                hint="start the same command again: it goes on with the missing lines",
            )

    def _write(self, outcome: _Outcome) -> None:
        tally, body = self.tally, (outcome.response or {}).get("body")
        if outcome.error is not None:
            tally.n_errors += 1
        else:
            tally.n_answers += 1
            usage = body.get("usage") if isinstance(body, dict) else None
            if isinstance(usage, dict):
                tally.n_tokens += _count(usage.get("completion_tokens"))
                tally.n_prompt_tokens += _count(usage.get("prompt_tokens"))
        self._results.write(
            result_of(outcome.line, self._settings, outcome.response, outcome.error)
        )

    # --- in threads -----------------------------------------------------------------------------

    def _work(self, host: Host) -> None:
        """Send lines to a server, one after the other, until the batch is over."""
        while host.refused is None:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                line = self._waiting.popleft()
            pause_s = self._ask(host, line)
            if pause_s:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, timeout=pause_s)

    def _ask(self, host: Host, line: Line) -> float:
        """Send a line to a server; return the seconds to wait before the next one."""
        path, body = request_of(line, self._defaults, host)
        try:
            status, headers, data = host.request("POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            is_begun = not isinstance(error, ConnectionRefusedError | socket.gaierror)
            return self._give_back(host, line, _reason(error), counts=is_begun)
        self._heard_s = self._clock()
        if status in _NO_ACCESS:
            host.refused = f"{status}: {_message(data)}"
            self._outcomes.put(f"{host.url} is not asked any more: {host.refused}")
            self._put_back(line)
            return 0.0
        if status in _BUSY:
            problem = f"{status}: {_message(data)}"
            return self._give_back(
                host, line, problem, counts=True, after=headers.get("Retry-After")
            )
        found = _object(data)
        if status == http.client.OK and found:
            identity = headers.get("x-request-id") or f"req-{line.digest}"
            response = {"status_code": status, "request_id": identity, "body": found}
            self._done(host, _Outcome(line, response, None))
            return 0.0
        code = "invalid_request" if 400 <= status < 500 else "failed"
        message = _message(data) if found else f"{status}, and no JSON"
        self._done(host, _Outcome(line, None, LineError(code, message)))
        return 0.0

    def _done(self, host: Host, outcome: _Outcome) -> None:
        if host.n_failures:
            self._outcomes.put(f"{host.url} answers again")
        host.n_failures = 0
        self._outcomes.put(outcome)

    def _give_back(
        self, host: Host, line: Line, problem: str, *, counts: bool, after: str | None = None
    ) -> float:
        if self._is_over:
            return 0.0
        if counts:
            n = self._n_attempts[line.custom_id] = self._n_attempts.get(line.custom_id, 0) + 1
            if n >= _MOST_ATTEMPTS:
                message = f"given up after {n} attempts; the last: {problem}"
                self._outcomes.put(_Outcome(line, None, LineError("failed", message)))
                return 0.0
        self._put_back(line)
        if not host.n_failures:
            self._outcomes.put(f"{host.url}: {problem}; its lines go to the others")
        host.n_failures += 1
        wait_s = min(_MOST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(host.n_failures - 1, 10))
        if after is not None and after.isdigit():
            wait_s = max(wait_s, min(float(after), _MOST_WAIT_S))
        return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def _put_back(self, line: Line) -> None:
        with self._changed:
            self._waiting.appendleft(line)
            self._changed.notify()

    def _watch(self, host: Host) -> None:
        """Abort the requests of a silent server: after a power failure it does not even close connections."""
        heard_s = self._clock()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_over, timeout=_WATCH_S):
                    return
            try:
                host.request("GET", "/health", timeout_s=_WATCH_S)
                heard_s = self._clock()
            except (OSError, http.client.HTTPException):
                if self._clock() - heard_s > _DEAD_S:
                    host.cut_off()


def request_of(line: Line, defaults: Defaults, host: Host) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a line's request."""
    request = line.request
    assert not isinstance(request, LineError), "such a line is not asked"
    own = {name: value for name, value in line.fields.items() if value is not None}
    said = {field_name(name) for name in own}
    if said & _FORMS:
        said |= _FORMS  # an answer has one form
    body = {name: value for name, value in defaults.fields.items() if name not in said} | own
    if host.model:
        body.setdefault("model", host.model)
    if request.kind == "completion" or "messages" in body:
        return ("/v1/completions" if request.kind == "completion" else "/v1/chat/completions"), body
    chat = defaults.chat if defaults.chat is not None else host.has_template
    system = body.pop("system", defaults.system)
    if request.tokens is not None or (not chat and system is None):
        return "/v1/completions", body
    turns = [] if system is None else [{"role": "system", "content": system}]
    body.pop("prompt")
    body["messages"] = [*turns, {"role": "user", "content": request.text or _last_text(request)}]
    return "/v1/chat/completions", body


def _last_text(request: Any) -> str:
    """Return the user's text of a line that has its own system message."""
    return str(request.messages[-1].content)


def _object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the data is none."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(data: bytes) -> str:
    """Return a server's error message, in a line."""
    error = _object(data).get("error")
    text = error.get("message") if isinstance(error, dict) else error
    if not isinstance(text, str):
        text = data[:200].decode("utf-8", "replace")
    return " ".join(text.split()) or "no reason given"


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    text = getattr(error, "strerror", None) or str(error)
    return text or type(error).__name__
