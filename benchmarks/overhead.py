"""What specgen itself costs, apart from the models' arithmetic.

    python benchmarks/overhead.py

On a tiny model the arithmetic is next to nothing, and what is left is the loop: choosing,
sampling, verifying, text, events. Its time (`loop_s`) is measured for answers with drafts of
several lengths, and a round's and a drafted token's shares are fitted to it by least squares:
loop_s = n_rounds x round + n_drafted x token. Medians over several answers, after a warm-up.

Prints one JSON object: microseconds a round and a drafted token, for greedy decoding with a
draft model and with n-grams, and for sampling at temperature 1.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import answers
from specgen.events import FinishedEvent
from specgen.options import ContextOptions, DraftOptions, GenerationOptions, SamplerOptions
from specgen.session import DraftSource, Session, SessionOptions
from specgen.tiny import TinyConfig, write_tiny_model

PROMPT = "the sum of the sum is the sum of the sum is the sum of"
DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
N_RUNS = 7
N_TOKENS = 400


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        target = write_tiny_model(Path(folder) / "target.gguf", TinyConfig())
        draft = write_tiny_model(Path(folder) / "draft.gguf", TinyConfig().draft(0.02))
        result = {
            "greedy, draft model": fit(target, draft, SamplerOptions()),
            "greedy, n-grams": fit(target, "ngram", SamplerOptions()),
            "temperature 1, draft model": fit(target, draft, SamplerOptions(1.0, seed=1)),
        }
    print(json.dumps(result, indent=1))
    return 0


def fit(target: Path, draft: DraftSource, sampler: SamplerOptions) -> dict[str, object]:
    """Microseconds a round and a drafted token, and the measurements they come from."""
    rows, loop_us, runs = [], [], []
    for n_draft in DRAFT_LENGTHS:
        finished = [answer(target, draft, sampler, n_draft) for _ in range(N_RUNS + 1)][1:]
        median_s = statistics.median(event.loop_s for event in finished)
        last = finished[-1]
        rows.append((last.n_rounds, last.n_drafted))
        loop_us.append(median_s * 1e6)
        runs.append(
            {
                "draft_max": n_draft,
                "n_rounds": last.n_rounds,
                "n_drafted": last.n_drafted,
                "n_accepted": last.n_accepted,
                "loop_us_a_round": round(median_s * 1e6 / last.n_rounds, 1),
            }
        )
    (a_round, a_token), *_ = np.linalg.lstsq(np.array(rows, float), np.array(loop_us), rcond=None)
    return {
        "us_a_round": round(float(a_round), 1),
        "us_a_drafted_token": round(float(a_token), 1),
        "runs": runs,
    }


def answer(
    target: Path, draft: DraftSource, sampler: SamplerOptions, n_draft: int
) -> FinishedEvent:
    context = ContextOptions(n_threads=1)
    options = SessionOptions(
        target=target,
        draft=draft,
        sampler=sampler,
        drafting=DraftOptions(max_tokens=n_draft, p_min=1e-9, ngram_min=1),
        generation=GenerationOptions(max_tokens=N_TOKENS, ignore_eos=True),
        target_context=context,
        draft_context=context,
    )
    with Session(options, time.perf_counter) as session:
        return answers.answer(session, PROMPT)


if __name__ == "__main__":
    sys.exit(main())
