"""Time of a decode by batch size, with specgen's kernels and with llama.cpp's.

    python benchmarks/costs.py MODEL.gguf ... [--contexts 200 1300] [--turns 3] [--threads 2]
        [--sizes 1 2 4 8 16] [--kernels specgen llama.cpp]

The two take turns, each in a separate process, so that a slow minute of the machine affects both. A
process loads the model, prefills a context of random tokens, and decodes batches of each size
several times. Every row of a batch outputs logits, as in verification. The time of a size is the
minimum of a turn, and the median of these minima over all turns: other programs can only slow a
decode down, so the minimum is closest to the time on an idle machine.

Prints one JSON object for each model, context and kind of kernels: milliseconds by number of rows,
the ratio to one row, the seconds that loading and the prefill took, and resident memory in MiB
(anonymous and file-mapped). For specgen's kernels it adds the speed-up over llama.cpp's. The curves
are not smooth, and differ between machines, models and weight types. Whether drafting pays depends
more on them than on the draft.
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
#: The batch size of the prefill, which is measured like the other sizes, but without logits.
N_PROMPT = 512
#: Lengths of the context at which the seconds of the prefill so far are reported.
REPORTED_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
N_REPEATS = 7
#: A batch of `N_PROMPT` tokens takes long, so it is repeated less often.
N_PREFILL_REPEATS = 2
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
    arguments = parser.parse_args()
    if arguments.child:
        (model,), (n_context,), (kernels,) = arguments.models, arguments.contexts, arguments.kernels
        print(json.dumps(_measure(model, kernels, n_context, arguments.threads, arguments.sizes)))
        return 0
    for model in arguments.models:
        for n_context in arguments.contexts:
            for result in compare(model, n_context, arguments):
                print(json.dumps(result), flush=True)
    return 0


def compare(model: Path, n_context: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a model's decodes with each kind of kernels, which take turns."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.kernels}
    for _ in range(arguments.turns):
        for name in arguments.kernels:
            turns[name].append(measure(model, name, n_context, arguments.threads, arguments.sizes))
    results = []
    for name in arguments.kernels:
        ms = {
            size: round(statistics.median(turn["ms"][size] for turn in turns[name]), 1)
            for size in turns[name][0]["ms"]
        }
        result: dict[str, Any] = {"model": model.name, "context": n_context, "kernels": name}
        result["ms"] = ms
        result["ratio"] = {size: round(value / ms["1"], 2) for size, value in ms.items()}
        result["prefill_s"] = turns[name][-1]["prefill_s"]
        for key in ("load_s", "context_s", "anonymous_mib", "mapped_mib"):
            result[key] = round(statistics.median(turn[key] for turn in turns[name]), 2)
        results.append(result)
    by_name = {result["kernels"]: result for result in results}
    if len(by_name) == len(KERNELS):
        llama_cpp_ms = by_name["llama.cpp"]["ms"]
        specgen_ms = by_name["specgen"]["ms"]
        by_name["specgen"]["times_as_fast"] = {
            size: round(llama_cpp_ms[size] / specgen_ms[size], 2) for size in specgen_ms
        }
    return results


def measure(
    path: Path, kernels: str, n_context: int, n_threads: int, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Measure one turn, in a separate process."""
    command = [sys.executable, __file__, str(path), "--child", "--kernels", kernels]
    command += ["--contexts", str(n_context), "--threads", str(n_threads)]
    command += ["--sizes", *map(str, sizes)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(child.stdout)
    return result


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

    context_s = 0.0
    prefill_s = {}
    for start in range(0, n_context, N_PROMPT):
        context_s += decode(min(N_PROMPT, n_context - start), wants_logits=False)
        if backend.length(0) in REPORTED_LENGTHS:
            prefill_s[backend.length(0)] = round(context_s, 2)
    memory = _memory_mib()
    seconds: dict[int, list[float]] = {size: [] for size in (*sizes, N_PROMPT)}
    for turn in range(N_REPEATS):
        for size, times in seconds.items():
            if size == N_PROMPT and turn >= N_PREFILL_REPEATS:
                continue
            times.append(decode(size, wants_logits=size != N_PROMPT))
            backend.remove(0, n_context)
    backend.close()
    model.close()
    ms = {str(size): round(1000 * min(times), 1) for size, times in seconds.items()}
    return {"ms": ms, "load_s": load_s, "context_s": context_s, "prefill_s": prefill_s, **memory}


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
