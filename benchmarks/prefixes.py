r"""How much of agents' prompts is read again, across sessions and restarts of the server.

    python -m benchmarks.prefixes -m 1.5b.gguf --requests FOLDER --json prefixes.jsonl \
        claude-a1 claude-a2 restart claude-a3 restart claude-b1

The names are requests that `benchmarks/record_requests.py` wrote to FOLDER. They are sent to one
engine, in this order; `restart` closes it and opens another one. For each request, this prints the
tokens of its prompt, those before the first difference from any earlier prompt, those that were
reused (and how many of them were loaded from the disk), and those that were decoded.

Only tokens are counted, so a tiny model may stand in for a real one. It needs `--quick`: it decodes
as quickly as it loads, and would store nothing. Each run begins with an empty store.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.answers import parser_of
from specgen.events import PrefillEvent
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    PrefixOptions,
    SessionOptions,
)
from specgen.serve.formats.chat_completions import read_chat
from specgen.serve.formats.engine_requests import Reader, parse_requests, prompt_of
from specgen.serve.formats.messages import read_messages
from specgen.serve.formats.responses import read_response_request
from specgen.session import prefix_store
from specgen.session.engine import Engine
from specgen.session.session import Session
from specgen.system.folders import cache_folder
from specgen.text.overlap import common_prefix_length

RESTART = "restart"
#: The fields of `Reuse` that are printed.
_COUNTS = ("prompt", "shared", "reused", "loaded", "read", "lost")
_READERS: dict[str, Reader] = {
    "messages": read_messages,
    "responses": read_response_request,
    "completions": read_chat,
}


@dataclass(frozen=True)
class Reuse:
    """What became of the tokens of a prompt."""

    request: str
    #: The number of restarts before it.
    n_restarts: int
    n_prompt: int
    #: The tokens before the first difference from any earlier prompt.
    n_shared: int
    #: The tokens that were not decoded again...
    n_reused: int
    #: ...because they were loaded from the disk.
    n_loaded: int
    n_read: int
    #: The shared tokens that were decoded again.
    n_lost: int
    #: Seconds until the first token.
    first_token_s: float


class Replay:
    """Sends recorded requests to an engine, and counts what each one reuses."""

    def __init__(self, options: SessionOptions, n_slots: int) -> None:
        self._options = options
        self._n_slots = n_slots
        self._earlier: list[Sequence[int]] = []
        self._n_restarts = -1
        self._open()

    def _open(self) -> None:
        self._session = Session(self._options, time.perf_counter)
        self._engine = Engine.largest(self._session, n_parallel=self._n_slots)
        self._n_restarts += 1

    def close(self) -> None:
        self._engine.close()
        self._session.close()

    def restart(self) -> None:
        self.close()
        self._open()

    def send(self, file: Path) -> Reuse:
        recorded = json.loads(file.read_text())
        reader = _READERS[recorded["path"].rpartition("/")[2]]
        body = {**recorded["body"], "stream": False}
        (request,) = parse_requests(reader, self._session, body)
        prompt = prompt_of(request, self._session, self._engine.n_ctx)
        shared = [common_prefix_length(each, prompt.tokens) for each in self._earlier]
        n_shared = min(max(shared, default=0), len(prompt.tokens) - 1)
        self._earlier.append(prompt.tokens)

        inserted = self._engine.insert(prompt)
        started_s = time.perf_counter()
        n_loaded = 0
        for event in self._engine.stream(inserted):
            if isinstance(event, PrefillEvent):
                n_loaded = event.n_loaded_tokens
        n_reused = inserted.usage.cached_tokens
        return Reuse(
            request=file.stem,
            n_restarts=self._n_restarts,
            n_prompt=len(prompt.tokens),
            n_shared=n_shared,
            n_reused=n_reused,
            n_loaded=n_loaded,
            n_read=len(prompt.tokens) - n_reused,
            n_lost=max(0, n_shared - n_reused),
            first_token_s=round(time.perf_counter() - started_s, 2),
        )


def main() -> None:
    parser = parser_of(__doc__, ctx_size=32768)
    parser.add_argument("--requests", type=Path, required=True, help="the folder of the requests")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model stands in for a real one"
    )
    parser.add_argument("steps", nargs="+", help=f"names of requests, and {RESTART!r}")
    asked = parser.parse_args()
    choose_kernels(wanted_in(os.environ), cache_folder())
    if asked.quick:
        prefix_store.BYTES_PER_S = math.inf
    with tempfile.TemporaryDirectory(prefix="specgen-") as cache:
        _replay(asked, Path(cache))


def _replay(asked: argparse.Namespace, cache: Path) -> None:
    options = SessionOptions(
        asked.target,
        "none",
        target_context=ContextOptions(n_ctx=asked.ctx_size),
        drafting=DraftOptions(ngrams=False),
        generation=GenerationOptions(max_tokens=1, reports_prefill=True),
        cache=cache,
        prefixes=PrefixOptions(),
    )
    replay = Replay(options, asked.parallel)
    found: list[Reuse] = []
    print("request", *_COUNTS, "first token", sep="\t")
    for step in asked.steps:
        if step == RESTART:
            replay.restart()
            print(RESTART)
            continue
        reuse = replay.send(asked.requests / f"{step}.json")
        found.append(reuse)
        counts = [getattr(reuse, f"n_{name}") for name in _COUNTS]
        print(step, *counts, f"{reuse.first_token_s} s", sep="\t", flush=True)
    replay.close()
    if asked.json is not None:
        with asked.json.open("a") as file:
            for reuse in found:
                line = {"target": asked.target.stem, **asdict(reuse)}
                file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
