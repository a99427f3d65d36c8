r"""Throughput of a server with 1 to 8 users, with and without drafts, compared with llama.cpp's.

    python benchmarks/server.py -m 1.5b.gguf -md 135m.gguf --peer-draft 0.5b.gguf \
        --prompts prompts.jsonl --peer llama-server --json out.json

1, 2, 4 and 8 users ask each server in turn for the same answers. Each user sends the next request
as soon as the last answer is complete. Answers are greedy and streamed. Each server has eight
slots, and is restarted for each number of users, so that no prompt is in its cache. `--peer` is
llama.cpp's server, which runs without a draft, with a draft model, and with a draft model and
n-grams. A first request is not counted, nor is what specgen measures when a draft is used for the
first time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.answers import n_equal, parser_of, prompts_of, running, write_json

N_USERS = (1, 2, 4, 8)
_FIRST_PORT = 18440
#: How long to wait for an answer.
_TIMEOUT_S = 900.0
#: The percentile of the times to first token that is reported in addition to the median.
_HIGH = 0.95


@dataclass(frozen=True)
class Contender:
    """A server, and how it is started."""

    name: str
    command: tuple[str, ...]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a user received, and when."""

    text: str
    n_tokens: int
    #: Seconds from the request to the first text.
    first_s: float
    #: Seconds from the request to the end.
    whole_s: float


def main() -> None:
    parser = parser_of(__doc__, count=16, max_tokens=64, ctx_size=2048)
    parser.add_argument("-md", "--draft", action="append", default=[], help="a draft of specgen")
    parser.add_argument("--peer", help="the program of llama.cpp's server")
    parser.add_argument("--peer-draft", type=Path, help="a draft model for llama.cpp's server")
    arguments = parser.parse_args()
    prompts = prompts_of(arguments)
    runs: list[dict[str, Any]] = []
    texts: list[str] = []
    for n in N_USERS:
        for contender in _contenders(arguments):
            with running(contender.command, contender.url):
                _load(contender, ["What is a fox?"], 1, arguments.max_tokens)
                answers, seconds = _load(contender, prompts, n, arguments.max_tokens)
            texts = texts or [answer.text for answer in answers]
            run = {"contender": contender.name, "n_users": n, **_figures(answers, seconds)}
            run["n_equal"] = n_equal((answer.text for answer in answers), texts)
            print(json.dumps(run), flush=True)
            runs.append(run)
    about = {"target": arguments.target.name, "n_prompts": len(prompts), "runs": runs}
    write_json(arguments.json, {**about, "max_tokens": arguments.max_tokens})


def _contenders(arguments: argparse.Namespace) -> Iterator[Contender]:
    ports = itertools.count(_FIRST_PORT)
    slots = max(N_USERS)
    target = str(arguments.target)
    for draft in ("none", *arguments.draft):
        port = next(ports)
        command = [sys.executable, "-m", "specgen", "serve", "-m", target, "-md", draft, "-q"]
        command += ["--parallel", str(slots), "-c", str(arguments.ctx_size), "--port", str(port)]
        yield Contender(f"specgen, {Path(draft).name}", tuple(command), port)
    if not arguments.peer:
        return
    settings: list[tuple[str, list[str]]] = [("no draft", [])]
    if arguments.peer_draft:
        model = ["-md", str(arguments.peer_draft)]
        ngrams = ["--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"]
        settings.append((arguments.peer_draft.name, [*model, "--spec-type", "draft-simple"]))
        both = [*model, *ngrams, "--spec-type", "ngram-simple,draft-simple"]
        settings.append((f"{arguments.peer_draft.name} and n-grams", both))
    for name, options in settings:
        port = next(ports)
        command = [arguments.peer, "-m", target, "-np", str(slots), "--no-webui", *options]
        command += ["-c", str(slots * arguments.ctx_size), "--port", str(port)]
        yield Contender(f"llama-server, {name}", tuple(command), port)


def _load(
    contender: Contender, prompts: Sequence[str], n_users: int, max_tokens: int
) -> tuple[list[Answer], float]:
    """Let users ask a server.

    Returns:
        The answers in the order of the prompts, and the seconds until the last one was complete.
    """
    with (
        # A connection for each request, because not every server keeps one open after a stream.
        httpx.Client(
            base_url=contender.url,
            timeout=_TIMEOUT_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client,
        ThreadPoolExecutor(n_users) as users,
    ):
        started = time.perf_counter()
        try:
            answers = list(users.map(lambda prompt: ask(client, prompt, max_tokens), prompts))
        except httpx.HTTPError as error:
            sys.exit(f"{contender.name}: {error}")
        return answers, time.perf_counter() - started


def ask(client: httpx.Client, prompt: str, max_tokens: int) -> Answer:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = ""
    n_tokens = 0
    first_s = 0.0
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            part = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if part:
                first_s = first_s or time.perf_counter() - started
                text += part
            if chunk.get("usage"):
                n_tokens = chunk["usage"]["completion_tokens"]
    return Answer(text, n_tokens, first_s, time.perf_counter() - started)


def _figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    first_s = sorted(answer.first_s for answer in answers)
    speeds = [
        (answer.n_tokens - 1) / (answer.whole_s - answer.first_s)
        for answer in answers
        if answer.n_tokens > 1
    ]
    n_tokens = sum(answer.n_tokens for answer in answers)
    return {
        "tokens_per_s": round(n_tokens / seconds, 1),
        "tokens_per_s_of_a_user": round(statistics.median(speeds), 1),
        "first_token_s": round(statistics.median(first_s), 2),
        "first_token_high_s": round(first_s[min(len(first_s) - 1, int(_HIGH * len(first_s)))], 2),
        "answer_s": round(statistics.median(answer.whole_s for answer in answers), 2),
        "n_tokens": n_tokens,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
