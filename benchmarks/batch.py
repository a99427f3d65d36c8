r"""Throughput of `specgen batch`, prefill included, compared with llama.cpp's server.

    python benchmarks/batch.py -m 1.5b.gguf -md 135m.gguf --prompts prompts.jsonl \
        --server llama-server --json out.json

The prompts are answered 1, 2, 4 and 8 at a time by the code of `specgen batch`, without a draft and
with each draft model, and by llama.cpp's server with the same number of slots and of concurrent
clients. Contenders with the same number of slots run one after the other. Decoding is greedy, with
the same maximum length for all. Loading models is not counted, nor is what specgen measures when a
draft is used for the first time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from benchmarks.answers import drafts_of, opened, parser_of, prompts_of, running, write_json
from specgen.llama.kernels.admission import choose_kernels
from specgen.options import DraftSource, GenerationOptions
from specgen.serve.batch.lines import read_lines
from specgen.serve.batch.runner import BatchRun, Prompting
from specgen.serve.formats.parsed_request import Defaults
from specgen.session.measurement_store import MeasurementStore
from specgen.system.folders import cache_folder

N_AT_ONCE = (1, 2, 4, 8)
PORT = 18435
URL = f"http://127.0.0.1:{PORT}"


class InMemoryResults:
    """Keeps the texts of a batch in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        choice = record["response"]["body"]["choices"][0]
        self.texts[record["custom_id"]] = choice["message"]["content"]


def main() -> None:
    parser = parser_of(__doc__, count=40, max_tokens=64, ctx_size=2048, drafts=True)
    parser.add_argument("--server", help="the program of llama.cpp's server")
    arguments = parser.parse_args()
    choose_kernels("auto", cache_folder())
    prompts = prompts_of(arguments)
    measurements = MeasurementStore()
    plain: dict[str, str] = {}
    runs: list[dict[str, Any]] = []
    for n in N_AT_ONCE:
        for name, draft in drafts_of(arguments.draft, ngrams=False).items():
            seconds, n_tokens, texts = _specgen(arguments, draft, prompts, n, measurements)
            plain = plain or texts
            equal = sum(texts[key] == plain[key] for key in plain)
            runs.append(_run(f"specgen, {name}", n, seconds, n_tokens, equal))
        if arguments.server:
            seconds, n_tokens = _server(arguments, prompts, n)
            runs.append(_run("llama-server", n, seconds, n_tokens, None))
    about = {"target": arguments.target.name, "n_prompts": len(prompts), "runs": runs}
    write_json(arguments.json, about)


def _run(name: str, n: int, seconds: float, n_tokens: int, n_equal: int | None) -> dict[str, Any]:
    speed = round(n_tokens / seconds, 1)
    print(f"{name}\t{n}\t{speed}\t{n_tokens}\t{n_equal}", flush=True)
    return {
        "contender": name,
        "at_once": n,
        "tokens_per_s": speed,
        "n_tokens": n_tokens,
        "seconds": round(seconds, 2),
        "n_equal": n_equal,
    }


def _specgen(
    arguments: argparse.Namespace,
    draft: DraftSource,
    prompts: list[str],
    n: int,
    measurements: MeasurementStore,
) -> tuple[float, int, dict[str, str]]:
    """Run a batch; return its seconds, its number of tokens and its texts."""
    generation = GenerationOptions(max_tokens=arguments.max_tokens)
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts).encode()
    with opened(arguments.target, draft, arguments.max_tokens, measurements) as loaded:
        results = InMemoryResults()
        prompting = Prompting(None, None, datetime.datetime.now().astimezone())
        job = BatchRun(loaded, prompting, results.write, {}, parallel=n, wall_clock=time.time)
        started = time.perf_counter()
        for _ in job.run(read_lines(lines, "prompts", Defaults(generation=generation))):
            pass
        return time.perf_counter() - started, job.stats.n_tokens, results.texts


def _server(arguments: argparse.Namespace, prompts: list[str], n: int) -> tuple[float, int]:
    """Ask llama.cpp's server with a client for each slot; return the seconds and the tokens."""
    command = [arguments.server, "-m", str(arguments.target), "-np", str(n)]
    command += ["-c", str(n * arguments.ctx_size), "--port", str(PORT), "--no-webui"]

    def ask(prompt: str) -> int:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        answer = requests.post(
            f"{URL}/v1/chat/completions",
            json={**body, "max_tokens": arguments.max_tokens},
            timeout=600,
        ).json()
        return int(answer["usage"]["completion_tokens"])

    with running(command, URL):
        started = time.perf_counter()
        with ThreadPoolExecutor(n) as clients:
            n_tokens = sum(clients.map(ask, prompts))
        return time.perf_counter() - started, n_tokens


if __name__ == "__main__":
    main()
