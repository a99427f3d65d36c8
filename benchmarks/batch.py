r"""How many tokens a second come of a batch, prompts included, against llama.cpp's server.

    python benchmarks/batch.py -m 1.5b.gguf -md 135m.gguf --prompts prompts.jsonl \
        --server llama-server --json out.json

The prompts are answered 1, 2, 4 and 8 at a time by `specgen batch`'s own parts, without a draft and with
each draft model, and by llama.cpp's server with as many slots, asked by as many clients at once. All with
the same number of slots follow one another. Greedy, as many tokens for all. Loading models, and what
specgen measures of a draft on its first use, is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from specgen.engine.calibration.memory import Memory
from specgen.engine.engine import Engine
from specgen.engine.loaded_models import Models
from specgen.llama.kernel_checks import choose_kernels
from specgen.measure.proof import evenly_chosen, read_prompts
from specgen.models import cache_folder
from specgen.options import DraftSource, GenerationOptions, SamplerOptions, SessionOptions
from specgen.serving.batch.lines import read_lines
from specgen.serving.batch.runner import Batch, Prompting

N_AT_ONCE = (1, 2, 4, 8)
PORT = 18435


class Kept:
    """Results in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        choice = record["response"]["body"]["choices"][0]
        self.texts[record["custom_id"]] = choice["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, action="append", default=[])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-N", "--count", type=int, default=40)
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("-c", "--ctx-size", type=int, default=2048, help="for each answer")
    parser.add_argument("--server", help="llama.cpp's server")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    choose_kernels("auto", cache_folder())
    prompts = evenly_chosen(read_prompts(asked.prompts), asked.count)
    memory, plain, runs = Memory(), dict[str, str](), list[dict[str, Any]]()
    for n in N_AT_ONCE:
        for name, draft in _drafts(asked.draft):
            seconds, n_tokens, texts = _specgen(asked, draft, prompts, n, memory)
            plain = plain or texts
            n_equal = sum(texts[key] == plain[key] for key in plain)
            runs.append(_run(f"specgen, {name}", n, seconds, n_tokens, n_equal))
        if asked.server:
            seconds, n_tokens = _server(asked, prompts, n)
            runs.append(_run("llama-server", n, seconds, n_tokens, None))
    if asked.json is not None:
        about = {"target": asked.target.name, "n_prompts": len(prompts), "runs": runs}
        asked.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


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


def _drafts(models: list[Path]) -> Iterator[tuple[str, DraftSource]]:
    yield "none", "none"
    for path in models:
        yield path.name, path


def _specgen(
    asked: argparse.Namespace, draft: DraftSource, prompts: list[str], n: int, memory: Memory
) -> tuple[float, int, dict[str, str]]:
    """Seconds, tokens and texts of a batch."""
    generation = GenerationOptions(max_tokens=asked.max_tokens)
    options = SessionOptions(asked.target, draft, generation=generation)
    lines = "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts).encode()
    with Models(options, time.perf_counter, memory) as loaded:
        kept = Kept()
        prompting = Prompting(None, None, datetime.datetime.now().astimezone())
        job = Batch(loaded, prompting, kept, {}, wall_clock=time.time)
        with Engine(loaded, n_parallel=n, n_ctx=asked.ctx_size) as engine:
            started = time.perf_counter()
            tasks = job.prepare(read_lines(lines, "prompts", SamplerOptions(), generation))
            job.run(engine, tasks)
            return time.perf_counter() - started, job.tally.n_tokens, kept.texts


def _server(asked: argparse.Namespace, prompts: list[str], n: int) -> tuple[float, int]:
    """Seconds and tokens of as many clients as the server has slots."""
    command = [asked.server, "-m", str(asked.target), "-np", str(n)]
    command += ["-c", str(n * asked.ctx_size), "--port", str(PORT), "--no-webui"]

    def ask(prompt: str) -> int:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        answer = requests.post(
            f"http://127.0.0.1:{PORT}/v1/chat/completions",
            json={**body, "max_tokens": asked.max_tokens},
            timeout=600,
        ).json()
        return int(answer["usage"]["completion_tokens"])

    with _running(command):
        started = time.perf_counter()
        with ThreadPoolExecutor(n) as clients:
            n_tokens = sum(clients.map(ask, prompts))
        return time.perf_counter() - started, n_tokens


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    """A server, from when it is ready until the end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                if server.poll() is not None:
                    sys.exit(f"the server ended: {' '.join(command)}")
                try:
                    health = requests.get(f"http://127.0.0.1:{PORT}/health", timeout=5)
                except requests.ConnectionError:
                    health = None
                if health is not None and health.status_code == 200:
                    break
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
