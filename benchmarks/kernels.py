"""What rows cost with specgen's kernels and with llama.cpp's own code, by turns.

    python benchmarks/kernels.py MODEL.gguf ... [--contexts 200 1300] [--turns 3] [--threads 2]

Each turn is a process of its own for each of the two, one after the other, so that a slow minute of
the machine meets both. A process loads the model, reads a context of random tokens, and decodes
batches of each size several times; every row of a batch asks for logits, as in verification. What
is told of a size is the median over turns of the quickest decode of each: a decode is never
quicker than it can be, and what disturbs only adds.

Prints one JSON object a model and context: milliseconds by number of rows, the ratio to one row, how
many times as fast as llama.cpp, seconds of loading, and resident memory (MiB; mapped pages of the
file apart).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32)
N_PROMPT = 512
N_REPEATS = 7
KERNELS = ("llama.cpp", "specgen")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--contexts", nargs="+", type=int, default=[200, 1300])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", choices=KERNELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        (model,), (n_context,) = arguments.models, arguments.contexts
        print(json.dumps(measure(model, arguments.child, n_context, arguments.threads)))
        return 0
    for model in arguments.models:
        for n_context in arguments.contexts:
            print(json.dumps(compare(model, n_context, arguments)), flush=True)
    return 0


def compare(model: Path, n_context: int, arguments: argparse.Namespace) -> dict[str, Any]:
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in KERNELS}
    for _ in range(arguments.turns):
        for name in KERNELS:
            command = [sys.executable, __file__, str(model), "--child", name]
            command += ["--contexts", str(n_context), "--threads", str(arguments.threads)]
            child = subprocess.run(command, capture_output=True, text=True, check=True)
            turns[name].append(json.loads(child.stdout))
    found: dict[str, Any] = {"model": model.name, "context": n_context}
    for name in KERNELS:
        ms = {
            size: round(statistics.median(turn["ms"][size] for turn in turns[name]), 1)
            for size in turns[name][0]["ms"]
        }
        found[name] = {
            "ms": ms,
            "ratio": {size: round(value / ms["1"], 2) for size, value in ms.items()},
            **{
                key: round(statistics.median(turn[key] for turn in turns[name]), 2)
                for key in ("load_s", "anonymous_mib", "mapped_mib")
            },
        }
    theirs, ours = found["llama.cpp"]["ms"], found["specgen"]["ms"]
    found["times_as_fast"] = {size: round(theirs[size] / ours[size], 2) for size in ours}
    return found


def measure(path: Path, kernels: str, n_context: int, n_threads: int) -> dict[str, Any]:
    from specgen.backend.base import Batch
    from specgen.backend.llama import LlamaBackend, LlamaModel
    from specgen.kernels import choose
    from specgen.options import ContextOptions

    choose("specgen" if kernels == "specgen" else "llama.cpp", Path(tempfile.mkdtemp()))
    started = time.perf_counter()
    model = LlamaModel(path)
    load_s = time.perf_counter() - started
    backend = LlamaBackend(
        model,
        ContextOptions(n_threads=n_threads),
        n_ctx=n_context + N_PROMPT,
        clock=time.perf_counter,
        n_outputs=max(SIZES),
    )
    rng = np.random.default_rng(0)

    def decode(n: int, *, wants_logits: bool) -> float:
        batch = Batch()
        for token in rng.integers(100, model.vocabulary.n_tokens // 2, n).tolist():
            batch.add(token, backend.length(0) + len(batch), (0,), wants_logits)
        before = backend.decode_s
        backend.decode(batch)
        return backend.decode_s - before

    for start in range(0, n_context, N_PROMPT):
        decode(min(N_PROMPT, n_context - start), wants_logits=False)
    memory = _memory_mib()
    seconds: dict[int, list[float]] = {size: [] for size in (*SIZES, N_PROMPT)}
    for turn in range(N_REPEATS):
        for size, times in seconds.items():
            if size == N_PROMPT and turn >= 2:
                continue
            times.append(decode(size, wants_logits=size != N_PROMPT))
            backend.remove(0, n_context)
    backend.close()
    model.close()
    ms = {str(size): 1000 * min(times) for size, times in seconds.items()}
    return {"ms": ms, "load_s": load_s, **memory}


def _memory_mib() -> dict[str, float]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in lines)
        if name in {"RssAnon", "RssFile"}
    }
    return {"anonymous_mib": kib["RssAnon"] / 1024, "mapped_mib": kib["RssFile"] / 1024}


if __name__ == "__main__":
    sys.exit(main())
