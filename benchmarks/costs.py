"""What a batch of n rows costs a model, with specgen's kernels and with llama.cpp's own code.

    python benchmarks/costs.py MODEL.gguf ... [--contexts 200 1300] [--turns 3] [--threads 2]
        [--sizes 1 2 4 8 16] [--kernels specgen llama.cpp]

Each turn is a process of its own for each of the two, one after the other, so that a slow minute of
the machine meets both. A process loads the model, reads a context of random tokens, and decodes
batches of each size several times; every row of a batch asks for logits, as in verification. What
is told of a size is the median over turns of the quickest decode of each: a decode is never
quicker than it can be, and what disturbs only adds.

Prints one JSON object for each model, context and code: milliseconds by number of rows, the ratio
to one row, seconds of loading and of reading the context, and resident memory (MiB; mapped pages of
the file apart). Of specgen's kernels, also how many times as fast as llama.cpp they are. The curves
are jagged and differ between machines, models and types of weights: whether a draft pays depends on
them more than on the draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 16, 20, 24, 28, 32)
N_PROMPT = 512
#: Lengths of a context at which the seconds of reading it so far are told.
READ = (1024, 2048, 4096, 8192, 16384, 32768)
N_REPEATS = 7
KERNELS = ("llama.cpp", "specgen")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--contexts", nargs="+", type=int, default=[200])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        (model,), (n_context,), (kernels,) = asked.models, asked.contexts, asked.kernels
        print(json.dumps(_measure(model, kernels, n_context, asked.threads, asked.sizes)))
        return 0
    for model in asked.models:
        for n_context in asked.contexts:
            for found in compare(model, n_context, asked):
                print(json.dumps(found), flush=True)
    return 0


def compare(model: Path, n_context: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What a model's batches cost with each code, measured by turns."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in asked.kernels}
    for _ in range(asked.turns):
        for name in asked.kernels:
            turns[name].append(measure(model, name, n_context, asked.threads, asked.sizes))
    results = []
    for name in asked.kernels:
        ms = {
            size: round(statistics.median(turn["ms"][size] for turn in turns[name]), 1)
            for size in turns[name][0]["ms"]
        }
        found: dict[str, Any] = {"model": model.name, "context": n_context, "kernels": name}
        found["ms"] = ms
        found["ratio"] = {size: round(value / ms["1"], 2) for size, value in ms.items()}
        found["read_s"] = turns[name][-1]["read_s"]
        for key in ("load_s", "context_s", "anonymous_mib", "mapped_mib"):
            found[key] = round(statistics.median(turn[key] for turn in turns[name]), 2)
        results.append(found)
    by_name = {found["kernels"]: found for found in results}
    if len(by_name) == len(KERNELS):
        theirs, ours = (by_name[name]["ms"] for name in KERNELS)
        by_name["specgen"]["times_as_fast"] = {
            size: round(theirs[size] / ours[size], 2) for size in ours
        }
    return results


def measure(
    path: Path, kernels: str, n_context: int, n_threads: int, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """One turn, in a process of its own."""
    command = [sys.executable, __file__, str(path), "--child", "--kernels", kernels]
    command += ["--contexts", str(n_context), "--threads", str(n_threads)]
    command += ["--sizes", *map(str, sizes)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def _measure(
    path: Path, kernels: str, n_context: int, n_threads: int, sizes: Sequence[int]
) -> dict[str, Any]:
    from specgen.llama import LlamaBackend, LlamaModel
    from specgen.llama.kernels.admission import choose_kernels
    from specgen.method.backend import Batch
    from specgen.options import ContextOptions

    choose_kernels("specgen" if kernels == "specgen" else "llama.cpp", Path(tempfile.mkdtemp()))
    started = time.perf_counter()
    model = LlamaModel(path)
    load_s = time.perf_counter() - started
    backend = LlamaBackend(
        model,
        ContextOptions(n_threads=n_threads),
        n_ctx=n_context + N_PROMPT,
        clock=time.perf_counter,
        n_outputs=max(sizes),
    )
    rng = np.random.default_rng(0)

    def decode(n: int, *, wants_logits: bool) -> float:
        batch = Batch()
        for token in rng.integers(100, model.vocabulary.n_tokens // 2, n).tolist():
            batch.add(token, backend.length(0) + len(batch), (0,), wants_logits)
        before = backend.decode_s
        backend.decode(batch)
        return backend.decode_s - before

    context_s, read_s = 0.0, {}
    for start in range(0, n_context, N_PROMPT):
        context_s += decode(min(N_PROMPT, n_context - start), wants_logits=False)
        if backend.length(0) in READ:
            read_s[backend.length(0)] = round(context_s, 2)
    memory = _memory_mib()
    seconds: dict[int, list[float]] = {size: [] for size in (*sizes, N_PROMPT)}
    for turn in range(N_REPEATS):
        for size, times in seconds.items():
            if size == N_PROMPT and turn >= 2:
                continue
            times.append(decode(size, wants_logits=size != N_PROMPT))
            backend.remove(0, n_context)
    backend.close()
    model.close()
    ms = {str(size): round(1000 * min(times), 1) for size, times in seconds.items()}
    return {"ms": ms, "load_s": load_s, "context_s": context_s, "read_s": read_s, **memory}


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
