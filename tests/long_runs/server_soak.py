"""Send a server hours of real life: valid and invalid requests, and clients that leave.

    python -m tests.long_runs.server_soak --minutes 60 -- -m target.gguf -md draft.gguf

starts `specgen serve` with the options after ``--``, also with ``--models`` (the first model gets
most requests), and looks for

- texts that differ from the server's earlier answer to the same request, with or without drafts,
  alone or alongside others (this needs batch-invariant rows: the kernels, or F32 caches on the CPU
  without flash attention),
- malformed responses, and responses that blame the server (5xx),
- slots, file descriptors, threads or memory that are not released.

It prints a line for each finding and, now and then, the server's memory, file descriptors and
threads. The figures at the end are JSON: how often each kind of request ended in which way, some of
these samples, and the findings. The exit code is 1 if anything was found. Ctrl-C ends the run
early.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from tests.helpers.formats import CHAT, MESSAGES, RESPONSES
from tests.long_runs.mutated_json import mutated

_SYSTEM = "You are a helpful assistant that answers in one or two short sentences. " * 4
_PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "def fibonacci(n):",
    "List three colours, then list them again.",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "Translate 'good morning' into French, German and Italian.",
    "ünïcödé → 漢字 🦊",
    "x",
)
_LONG = "The cat sat on the mat. The dog lay by the door. " * 40
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
#: How much more often the first model is asked than each other one.
_N_FIRST = 12
_OK = 200
_TOO_MANY = 429
#: Statuses that are right for a request that was mutated.
_REFUSALS = (400, 404, 405, 413, 422, _TOO_MANY)
#: Megabytes and descriptors that may come and go.
_SLACK_MB = 64
_SLACK_FILES = 8
#: The fewest samples of a quarter of the time that are compared.
_N_SAMPLES = 3
_PATIENCE_S = 180.0


class Soak:
    """A running server, its users, and what was found."""

    def __init__(
        self, url: str, process: psutil.Process, seed: int, until: float, least: int
    ) -> None:
        self._url, self._process, self._seed = url, process, seed
        self._started = time.monotonic()
        self._until, self._least = until, least
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[str] = []
        self.samples: list[dict[str, Any]] = []
        models = httpx.get(f"{url}/v1/models", timeout=_PATIENCE_S).json()["data"]
        self._texts, self._embeddings = (
            [model["id"] for model in models if model["type"] == kind]
            for kind in ("llm", "embeddings")
        )

    # --- users ---------------------------------------------------------------------------------

    def use(self, number: int) -> None:
        """Be a user until the time is over."""
        chance = random.Random(1000 * self._seed + number)
        acts: list[tuple[float, Callable[[httpx.Client, random.Random], str]]] = [
            (20, self._ask),
            (10, self._ask_wrongly),
            (2, self._look),
        ]
        with httpx.Client(base_url=self._url, timeout=_PATIENCE_S) as client:
            while not (self._has_time_passed() or self._is_over()):
                (_, act), *_ = chance.choices(acts, [weight for weight, _ in acts])
                try:
                    kind = act(client, chance)
                except (httpx.HTTPError, OSError) as error:
                    self._find(f"{act.__name__}: {type(error).__name__}: {error}")
                    kind = "no response"
                with self._lock:
                    self.counts[f"{act.__name__.lstrip('_')}: {kind}"] += 1
                time.sleep(chance.random() * 0.2)

    def end(self) -> None:
        """Let each user finish its request, and send no more."""
        self._until = time.monotonic()
        self._least = 0

    def _has_time_passed(self) -> bool:
        """Whether it has, and enough was seen, however slow the machine is."""
        seen = min(self.counts[kind] for kind in ("texts compared", "ask_wrongly: 400"))
        return time.monotonic() >= self._until and seen >= self._least

    def _is_over(self) -> bool:
        return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE

    def _request(self, chance: random.Random) -> tuple[str, dict[str, Any]]:
        """A path, and a right body."""
        prompt = chance.choice(_PROMPTS)
        if chance.random() < 0.1:
            prompt = _LONG[: chance.randrange(1, len(_LONG))]
        body: dict[str, Any] = {"max_tokens": chance.choice([1, 2, 8, 24, 64])}
        body["model"] = self._model(chance)
        kind = chance.random()
        path = "/v1/chat/completions" if kind < 0.6 else "/v1/completions"
        if kind < 0.6:
            system = [{"role": "system", "content": _SYSTEM}] * (chance.random() < 0.5)
            body["messages"] = [*system, {"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if chance.random() < 0.4:
            # Draws of a draft model give other draws than the target alone, unless they have to
            # match.
            body |= {"temperature": chance.choice([0.5, 1.0]), "seed": chance.randrange(3)}
            body["speculative"] = {"verifier": "match"}
            body["top_p"] = chance.choice([0.9, 1.0])
        if chance.random() < 0.1:
            form = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
            body["response_format"] = form
        if chance.random() < 0.1:
            body["stop"] = [" the", "\n\n"]
        if chance.random() < 0.1:
            body["n"] = 2
        return path, body

    def _model(self, chance: random.Random) -> str:
        """The name of a model: mostly the first one, so that others are loaded and unloaded now and
        then.
        """
        name: str = chance.choice([*self._texts[:1] * _N_FIRST, *self._texts[1:]])
        return name

    def _with_wish(self, body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
        """The same with other wishes of drafts, which change nothing in the text."""
        wish = dict(body.get("speculative", {}))
        wish |= chance.choice([{}, {"draft": False}, {"max": 2}, {"max": 8}])
        return {**body, "speculative": wish}

    def _ask(self, client: httpx.Client, chance: random.Random) -> str:
        """Request a text, complete or as a stream, which may be cut off in the middle."""
        path, body = self._request(chance)
        texts: collections.defaultdict[int, str] = collections.defaultdict(str)
        streams = chance.random() < 0.5
        n_lines = chance.choice([None, None, chance.randrange(8)]) if streams else None
        asked = {**self._with_wish(body, chance), "stream": streams}
        with client.stream("POST", path, json=asked) as response:
            if response.status_code != _OK:
                return self._refused(f"{path} {json.dumps(body)}", response)
            for number, line in enumerate(response.iter_lines()):
                if n_lines is not None and number >= n_lines:
                    return "gone"
                if line in ("", "data: [DONE]") or line.startswith(":"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self._find(f"{path} {json.dumps(body)}: {chunk}")
                    return "error"
                for choice in chunk["choices"]:
                    said = choice.get("delta") or choice.get("message") or {}
                    part = choice["text"] if "text" in choice else said.get("content")
                    texts[choice["index"]] += part or ""
        for number, text in texts.items():
            self._compare(path, body, number, text)
        return "answered"

    def _refused(self, what: str, response: httpx.Response) -> str:
        """Record the rejection of a valid request, unless there are too many of them."""
        said = response.read().decode()
        if response.status_code == _TOO_MANY and "retry-after" in response.headers:
            return "too many"
        self._find(f"{what}: {response.status_code} {said[:300]}")
        return "refused"

    def _any_request(self, chance: random.Random) -> tuple[str, dict[str, Any]]:
        """A path, and a right body, of all that there are."""
        path, body = self._request(chance)
        messages, responses = MESSAGES, RESPONSES
        if chance.random() < 0.5:  # most templates of tests take no tools
            messages = {**_without_tools(MESSAGES), "messages": MESSAGES["messages"][:2]}
            items = [item for item in RESPONSES["input"] if "call_id" not in item]
            responses = {**_without_tools(RESPONSES), "input": items}
        streams = {"stream": chance.random() < 0.5}
        embedding = {"input": ["a", [1, 2]], "encoding_format": "float", "dimensions": 3}
        others: list[tuple[float, str, dict[str, Any]]] = [
            (40, "/v1/chat/completions", CHAT),
            (9, "/infill", {"input_prefix": "a", "input_suffix": "b", "max_tokens": 3}),
            (6, "/tokenize", {"content": "a b", "with_pieces": True}),
            (6, "/detokenize", {"tokens": [1, 2, 3]}),
            (6, "/apply-template", {"messages": [{"role": "user", "content": "x"}]}),
            (5, "/v1/messages", {**messages, **streams}),
            (4, "/v1/messages/count_tokens", {**messages, **streams}),
            (9, "/v1/responses", {**responses, **streams}),
            (6 if self._embeddings else 0, "/v1/embeddings", embedding),
            (9, path, body),
        ]
        ((_, path, body),) = chance.choices(others, [weight for weight, *_ in others])
        body = {**body, "max_tokens": 4} if "max_tokens" in body else body
        names = self._embeddings if path == "/v1/embeddings" else [self._model(chance)]
        return path, {**body, "model": chance.choice(names)}

    def _ask_wrongly(self, client: httpx.Client, chance: random.Random) -> str:
        path, body = self._any_request(chance)
        data = mutated(body, chance)
        headers = {"Content-Type": "application/json"}
        response = client.post(path, content=data, headers=headers)
        status = response.status_code
        if status != _OK and status not in _REFUSALS:
            self._find(f"{path} {data[:500]!r}: {status} {response.text[:300]}")
        elif status != _OK and "message" not in response.json().get("error", {}):
            self._find(f"{path} {data[:500]!r}: {status} without an error: {response.text[:300]}")
        return str(status)

    def _look(self, client: httpx.Client, chance: random.Random) -> str:
        path = chance.choice(
            ["/", "/page/page.js", "/health", "/props", "/slots", "/metrics", "/v1/models"]
        )
        path += f"?model={self._model(chance)}" if path == "/props" else ""
        response = client.get(path)
        if response.status_code != _OK:
            self._find(f"{path}: {response.status_code} {response.text[:200]}")
        return "seen"

    # --- what is compared ------------------------------------------------------------------------

    def _compare(self, path: str, body: dict[str, Any], number: int, text: str) -> None:
        asked = json.dumps([path, body, number], sort_keys=True)
        with self._lock:
            known = self._known.setdefault(asked, text)
            self.counts["texts compared" if known is not text else "texts seen first"] += 1
        if known != text:
            self._find(f"{asked}: {text!r} is not {known!r}")

    def _find(self, what: str) -> None:
        with self._lock:
            self.findings.append(what)
        print(f"finding: {what}", file=sys.stderr, flush=True)

    def sample(self) -> dict[str, Any]:
        """What the server holds now: megabytes of memory of its own, descriptors, threads."""
        memory = self._process.memory_full_info()
        models = httpx.get(f"{self._url}/v1/models", timeout=_PATIENCE_S).json()["data"]
        found = {
            "minute": round((time.monotonic() - self._started) / 60, 2),
            "loaded": ", ".join(m["id"] for m in models if m["status"]["value"] == "loaded"),
            "memory_mb": round(memory.uss / 2**20, 1),
            "n_files": self._process.num_fds(),
            "n_threads": self._process.num_threads(),
        }
        self.samples.append(found)
        return found

    def check_rest(self) -> None:
        """With all users gone: everything is given back."""
        deadline = time.monotonic() + _PATIENCE_S
        with httpx.Client(base_url=self._url, timeout=_PATIENCE_S) as client:
            while any(slot["is_processing"] for slot in client.get("/slots").json()):
                if time.monotonic() > deadline:
                    self._find("a slot is not given back")
                    return
                time.sleep(0.2)
            for name in ("requests_processing", "requests_deferred"):
                values = re.findall(rf"specgen:{name}{{.*}} (.*)", client.get("/metrics").text)
                if set(values) != {"0.0"}:
                    self._find(f"{name} is not 0")
        self.sample()
        quarter = len(self.samples) // 4 or 1
        early, late = self.samples[quarter : 2 * quarter + 1], self.samples[-quarter:]
        for name, slack in (("n_files", _SLACK_FILES), ("memory_mb", _SLACK_MB)):
            # The most that the same models took: models that are being unloaded leave their memory
            # bit by bit.
            for loaded in {sample["loaded"] for sample in early} & {s["loaded"] for s in late}:
                before, after = (
                    [sample[name] for sample in samples if sample["loaded"] == loaded]
                    for samples in (early, late)
                )
                is_enough = min(len(before), len(after)) >= _N_SAMPLES
                if is_enough and max(after) > max(before) + slack:
                    self._find(f"{name} with {loaded}: {max(before)} became {max(after)}")


def _without_tools(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}


def soaked(process: subprocess.Popen[str], soak: Soak, n_users: int, pause_s: float) -> None:
    """Let users at the server until their time is over, or until Ctrl-C, and stop the server."""
    users = [threading.Thread(target=soak.use, args=(number,)) for number in range(n_users)]
    for user in users:
        user.start()
    try:
        while any(user.is_alive() for user in users):
            time.sleep(pause_s)
            if process.poll() is not None:
                soak.findings.append(f"the server ended with {process.returncode}")
                break
            print(soak.sample(), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: the figures are for the time so far", file=sys.stderr, flush=True)
    finally:
        soak.end()
        for user in users:
            user.join()
    if process.poll() is None:
        soak.check_rest()
        process.send_signal(signal.SIGTERM)
        code = process.wait(_PATIENCE_S)
        if code:
            soak.findings.append(f"the server ended with {code}")


def main() -> int:
    """Run a server and its users."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="how long to send requests (default: 60)"
    )
    least = "go on until so many texts were compared, and so many wrong requests refused"
    parser.add_argument("--least", type=int, default=0, metavar="NUMBER", help=least)
    parser.add_argument("--users", type=int, default=8, help="at the same time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other requests")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of specgen serve, after --")
    options = parser.parse_args()
    command = [sys.executable, "-m", "specgen", "serve", "--port", "0", *options.options]
    # In a session of its own, so that Ctrl-C ends the users first.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" ")[2]
        if not url:
            print("the server did not start", file=sys.stderr)
            return process.wait()
        try:
            until = time.monotonic() + 60.0 * options.minutes
            soak = Soak(url, psutil.Process(process.pid), options.seed, until, options.least)
            soaked(process, soak, options.users, max(1.0, 60.0 * options.minutes / 120))
        finally:
            process.terminate()
    figures = {
        "counts": dict(sorted(soak.counts.items())),
        "samples": soak.samples[:: len(soak.samples) // 8 or 1],
        "findings": soak.findings,
    }
    print(json.dumps(figures, indent=1))
    return 1 if soak.findings else 0


if __name__ == "__main__":
    sys.exit(main())
