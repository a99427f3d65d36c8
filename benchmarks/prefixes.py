r"""How much of an agent's prompts is prefilled again, across sessions and restarts of the server.

    python -m benchmarks.prefixes -m 1.5b.gguf --requests FOLDER --json prefixes.jsonl \
        claude-a1 claude-a2 restart claude-a3 restart claude-b1

The names are requests that `benchmarks/record_requests.py` wrote to FOLDER. They are sent to one
engine in this order; `restart` closes the engine and opens a new one.

Prints a line for each request, with these token counts:

- prompt: all tokens of the prompt;
- shared: the tokens before the first difference from any earlier prompt;
- reused: the tokens that were in a KV cache;
- loaded: the reused tokens that were loaded from disk;
- prefilled: the tokens that were decoded;
- lost: the shared tokens that were decoded again.

Only tokens are counted, so a tiny model can stand in for a real one. It needs `--quick`, because it
decodes a prefix as quickly as it loads one, and would store nothing. Each run begins with an empty
prefix store.
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
_COUNTS = ("prompt", "shared", "reused", "loaded", "prefilled", "lost")
_READERS: dict[str, Reader] = {
    "messages": read_messages,
    "responses": read_response_request,
    "completions": read_chat,
}


@dataclass(frozen=True)
class Reuse:
    """How the tokens of a prompt were processed."""

    request: str
    #: The number of restarts before the request.
    n_restarts: int
    n_prompt: int
    #: The tokens before the first difference from any earlier prompt.
    n_shared: int
    #: The tokens that were in a KV cache, and were not decoded.
    n_reused: int
    #: The reused tokens that were loaded from disk.
    n_loaded: int
    #: The tokens that were decoded.
    n_prefilled: int
    #: The shared tokens that were decoded again.
    n_lost: int
    #: Seconds until the first token.
    first_token_s: float


class Replay:
    """Sends recorded requests to an engine, and counts the tokens that each one reuses."""

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
            n_prefilled=len(prompt.tokens) - n_reused,
            n_lost=max(0, n_shared - n_reused),
            first_token_s=round(time.perf_counter() - started_s, 2),
        )


def main() -> None:
    parser = parser_of(__doc__, ctx_size=32768)
    parser.add_argument("--requests", type=Path, required=True, help="the folder of the requests")
    parser.add_argument("--parallel", type=int, default=4, help="slots of the engine")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="store every prefix: the model stands in for a real one",
    )
    parser.add_argument("steps", nargs="+", help=f"names of requests, and {RESTART!r}")
    arguments = parser.parse_args()
    choose_kernels(wanted_in(os.environ), cache_folder())
    if arguments.quick:
        prefix_store.BYTES_PER_S = math.inf
    with tempfile.TemporaryDirectory(prefix="specgen-") as cache:
        _replay(arguments, Path(cache))


def _replay(arguments: argparse.Namespace, cache: Path) -> None:
    options = SessionOptions(
        arguments.target,
        "none",
        target_context=ContextOptions(n_ctx=arguments.ctx_size),
        drafting=DraftOptions(ngrams=False),
        generation=GenerationOptions(max_tokens=1, reports_prefill=True),
        cache=cache,
        prefixes=PrefixOptions(),
    )
    replay = Replay(options, arguments.parallel)
    reuses: list[Reuse] = []
    print("request", *_COUNTS, "first token", sep="\t")
    for step in arguments.steps:
        if step == RESTART:
            replay.restart()
            print(RESTART)
            continue
        reuse = replay.send(arguments.requests / f"{step}.json")
        reuses.append(reuse)
        counts = [getattr(reuse, f"n_{name}") for name in _COUNTS]
        print(step, *counts, f"{reuse.first_token_s} s", sep="\t", flush=True)
    replay.close()
    if arguments.json is not None:
        with arguments.json.open("a") as file:
            for reuse in reuses:
                line = {"target": arguments.target.stem, **asdict(reuse)}
                file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
