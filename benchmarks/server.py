r"""Throughput of a server with 1 to 8 users, with and without drafts, against llama.cpp's.

    python benchmarks/server.py -m 1.5b.gguf -md 135m.gguf --peer-draft 0.5b.gguf \
        --prompts prompts.jsonl --peer llama-server --json out.json

1, 2, 4 and 8 users ask each server in turn for the same answers: each user asks for the next one as
soon as the last one is there. Greedy, streamed. Each server has eight slots, and is started anew
for each number of users, so that no prompt is in its cache. `--peer` is llama.cpp's server, asked
with no draft and with two ways to draft. A first question is not counted, nor is what specgen
measures of a draft on its first use.
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
_PATIENCE_S = 900.0
#: Of times to the first token, beside the median.
_HIGH = 0.95


@dataclass(frozen=True)
class Contender:
    """A server that is asked."""

    name: str
    command: tuple[str, ...]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a user got, and when: seconds from the question to the first text and to the end."""

    text: str
    n_tokens: int
    first_s: float
    whole_s: float


def main() -> None:
    parser = parser_of(__doc__, count=16, max_tokens=64, ctx_size=2048)
    parser.add_argument("-md", "--draft", action="append", default=[], help="of specgen")
    parser.add_argument("--peer", help="llama.cpp's server")
    parser.add_argument("--peer-draft", type=Path, help="a draft that llama.cpp takes")
    asked = parser.parse_args()
    prompts = prompts_of(asked)
    runs: list[dict[str, Any]] = []
    texts: list[str] = []
    for n in N_USERS:
        for contender in _contenders(asked):
            with running(contender.command, contender.url):
                _load(contender, ["What is a fox?"], 1, asked.max_tokens)
                answers, seconds = _load(contender, prompts, n, asked.max_tokens)
            texts = texts or [answer.text for answer in answers]
            run = {"contender": contender.name, "n_users": n, **_figures(answers, seconds)}
            run["n_equal"] = n_equal((answer.text for answer in answers), texts)
            print(json.dumps(run), flush=True)
            runs.append(run)
    about = {"target": asked.target.name, "n_prompts": len(prompts), "runs": runs}
    write_json(asked.json, {**about, "max_tokens": asked.max_tokens})


def _contenders(asked: argparse.Namespace) -> Iterator[Contender]:
    ports = itertools.count(_FIRST_PORT)
    slots = max(N_USERS)
    target = str(asked.target)
    for draft in ("none", *asked.draft):
        port = next(ports)
        command = [sys.executable, "-m", "specgen", "serve", "-m", target, "-md", draft, "-q"]
        command += ["--parallel", str(slots), "-c", str(asked.ctx_size), "--port", str(port)]
        yield Contender(f"specgen, {Path(draft).name}", tuple(command), port)
    if not asked.peer:
        return
    ways: list[tuple[str, list[str]]] = [("no draft", [])]
    if asked.peer_draft:
        model, ngrams = ["-md", str(asked.peer_draft)], ["--spec-ngram-simple-size-n", "4"]
        ngrams += ["--spec-ngram-simple-size-m", "8"]
        ways.append((asked.peer_draft.name, [*model, "--spec-type", "draft-simple"]))
        both = [*model, *ngrams, "--spec-type", "ngram-simple,draft-simple"]
        ways.append((f"{asked.peer_draft.name} and n-grams", both))
    for name, options in ways:
        port = next(ports)
        command = [asked.peer, "-m", target, "-np", str(slots), "--no-webui", *options]
        command += ["-c", str(slots * asked.ctx_size), "--port", str(port)]
        yield Contender(f"llama-server, {name}", tuple(command), port)


def _load(
    contender: Contender, prompts: Sequence[str], n_users: int, max_tokens: int
) -> tuple[list[Answer], float]:
    """All answers, in the order of the prompts, and the seconds until the last one was there."""
    with (
        # A connection for each request: not every server keeps one open behind a stream.
        httpx.Client(
            base_url=contender.url,
            timeout=_PATIENCE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        ) as client,
        ThreadPoolExecutor(n_users) as users,
    ):
        started = time.perf_counter()
        try:
            answers = list(users.map(lambda p: ask(client, p, max_tokens), prompts))
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
    started, first, text, n_tokens = time.perf_counter(), 0.0, "", 0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            part = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if part:
                first = first or time.perf_counter() - started
                text += part
            if chunk.get("usage"):
                n_tokens = chunk["usage"]["completion_tokens"]
    return Answer(text, n_tokens, first, time.perf_counter() - started)


def _figures(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    first = sorted(answer.first_s for answer in answers)
    speeds = [
        (answer.n_tokens - 1) / (answer.whole_s - answer.first_s)
        for answer in answers
        if answer.n_tokens > 1
    ]
    n_tokens = sum(answer.n_tokens for answer in answers)
    return {
        "tokens_per_s": round(n_tokens / seconds, 1),
        "tokens_per_s_of_a_user": round(statistics.median(speeds), 1),
        "first_token_s": round(statistics.median(first), 2),
        "first_token_high_s": round(first[min(len(first) - 1, int(_HIGH * len(first)))], 2),
        "answer_s": round(statistics.median(answer.whole_s for answer in answers), 2),
        "n_tokens": n_tokens,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
