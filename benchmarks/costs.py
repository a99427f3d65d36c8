"""What a batch of n tokens costs a model, for n from 1 to 128.

    python benchmarks/costs.py target.gguf draft.gguf

Medians of several decodes after 200 tokens of context; every row asks for logits, as in
verification. The curves are jagged and differ between machines, models and quantisations:
whether a draft pays depends on them more than on the draft.

Prints one JSON object a model: milliseconds by number of tokens. SPECGEN_KERNELS says who computes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from specgen.backend.base import Batch
from specgen.backend.llama import LlamaBackend, LlamaModel
from specgen.kernels import choose, wanted_in
from specgen.models import cache_folder
from specgen.options import ContextOptions

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64, 128)
N_CONTEXT = 200
N_RUNS = 7


def main() -> int:
    print(choose(wanted_in(os.environ), cache_folder()).label, file=sys.stderr)
    for name in sys.argv[1:]:
        print(json.dumps({"model": Path(name).name, "ms": costs(Path(name))}), flush=True)
    return 0


def costs(path: Path) -> dict[int, float]:
    model = LlamaModel(path)
    backend = LlamaBackend(
        model, ContextOptions(), n_ctx=512, clock=time.perf_counter, n_outputs=max(SIZES)
    )
    rng = np.random.default_rng(0)

    def decode(n: int, *, wants_logits: bool) -> float:
        batch = Batch()
        for token in rng.integers(100, model.vocabulary.n_tokens // 2, n).tolist():
            batch.add(token, backend.length(0) + len(batch), (0,), wants_logits)
        before = backend.decode_s
        backend.decode(batch)
        return backend.decode_s - before

    decode(N_CONTEXT, wants_logits=False)
    samples: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(N_RUNS):
        for size in SIZES:
            samples[size].append(decode(size, wants_logits=True))
            backend.remove(0, N_CONTEXT)
    backend.close()
    model.close()
    return {size: round(1000 * statistics.median(times), 1) for size, times in samples.items()}


if __name__ == "__main__":
    sys.exit(main())
