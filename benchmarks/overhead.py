"""Overhead of specgen's own code, apart from the models' computations.

    python benchmarks/overhead.py

A tiny model takes almost no time to compute. What remains is the loop: the policy, sampling,
verification, text and events. Its time (`loop_s`) is measured for answers with drafts of several
lengths. A least-squares fit then splits it into a cost per round and a cost per drafted token:
loop_s = n_rounds x round + n_drafted x token. The fastest of several answers after a warm-up
counts, because other programs can only slow an answer down.

Drafts have a fixed length, or the length that the cost-aware policy chooses. That policy is given
invented costs by which drafting is free, so that it drafts as much as it may.

Prints one JSON object: the microseconds per round and per drafted token, for greedy decoding with a
draft model, with n-grams and with both, and for sampling at temperature 1. With a vocabulary of
150,000 tokens, the passes over the logits come on top: see `benchmarks/sampling.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import answers
from specgen.events import FinishedEvent
from specgen.method.cost_table import CostTable
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    PolicyName,
    SamplerOptions,
    SessionOptions,
    parse_tree,
)
from specgen.session.measurement_store import MeasurementStore, ModelCosts
from specgen.session.session import Session
from tests.tiny import TinyConfig, write_tiny_model

PROMPT = "the sum of the sum is the sum of the sum is the sum of"
DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
N_RUNS = 15
N_TOKENS = 400
#: Invented seconds of a decode by the target and by the draft, for all batch sizes.
TARGET_S = 1e-2
DRAFT_S = 1e-7


class ConstantCosts(CostTable):
    """Costs that never change: every decode is recorded with the time that was expected of it."""

    def observe(self, n_rows: int, seconds: float, n_sharing: int = 1) -> None:
        super().observe(n_rows, self.seconds(n_rows), n_sharing)


class ConstantMeasurements(MeasurementStore):
    """Has invented costs, those of a target and those of all other models."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target

    def costs(self, model: Path, context: ContextOptions) -> ModelCosts:
        costs = super().costs(model, context)
        table = costs.table(kind=ConstantCosts)
        if not table:
            for size in range(1, 65):
                table.set_seconds(size, TARGET_S if model == self._target else DRAFT_S)
        return costs


def main() -> int:
    argparse.ArgumentParser(description="Measure the overhead of specgen's own code.").parse_args()
    greedy = SamplerOptions()
    random = SamplerOptions(1.0, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        target = write_tiny_model(Path(folder) / "target.gguf", TinyConfig())
        draft = write_tiny_model(Path(folder) / "draft.gguf", TinyConfig().draft(0.02))
        result = {
            "greedy, draft model, fixed": fit(target, draft, greedy, "fixed"),
            "greedy, draft model, cost, chains": fit(target, draft, greedy, "cost", tree="off"),
            "greedy, draft model, cost, trees": fit(target, draft, greedy, "cost"),
            "greedy, n-grams, fixed": fit(target, "ngram", greedy, "fixed"),
            "greedy, n-grams, cost": fit(target, "ngram", greedy, "cost"),
            "greedy, both, cost, chains": fit(
                target, draft, greedy, "cost", tree="off", ngrams=True
            ),
            "temperature 1, draft model, fixed": fit(target, draft, random, "fixed"),
            "temperature 1, draft model, cost": fit(target, draft, random, "cost"),
        }
    print(json.dumps(result, indent=1))
    return 0


def fit(
    target: Path,
    draft: DraftSource,
    sampler: SamplerOptions,
    policy: PolicyName,
    *,
    tree: str = "auto",
    ngrams: bool = False,
) -> dict[str, object]:
    """Fit the microseconds per round and per drafted token; also return the measurements."""
    rows = []
    loop_us = []
    runs = []
    for n_draft in DRAFT_LENGTHS:
        drafting = DraftOptions(
            policy=policy,
            max_tokens=n_draft,
            p_min=1e-9,
            ngram_min=1,
            ngrams=ngrams,
            tree=parse_tree(tree),
        )
        finished = [answer(target, draft, sampler, drafting) for _ in range(N_RUNS + 1)][1:]
        best = min(finished, key=lambda event: event.loop_s)
        rows.append((best.n_rounds, best.n_drafted))
        loop_us.append(best.loop_s * 1e6)
        runs.append(
            {
                "draft_max": n_draft,
                "n_rounds": best.n_rounds,
                "n_drafted": best.n_drafted,
                "n_accepted": best.n_accepted,
                "loop_us_a_round": round(best.loop_s * 1e6 / best.n_rounds, 1),
            }
        )
    (round_us, token_us), *_ = np.linalg.lstsq(np.array(rows, float), np.array(loop_us), rcond=None)
    return {
        "us_a_round": round(float(round_us), 1),
        "us_a_drafted_token": round(float(token_us), 1),
        "runs": runs,
    }


def answer(
    target: Path, draft: DraftSource, sampler: SamplerOptions, drafting: DraftOptions
) -> FinishedEvent:
    context = ContextOptions(n_threads=1)
    options = SessionOptions(
        target=target,
        draft=draft,
        sampler=sampler,
        drafting=drafting,
        generation=GenerationOptions(max_tokens=N_TOKENS),
        target_context=context,
        draft_context=context,
    )
    with Session(options, time.perf_counter, ConstantMeasurements(target)) as loaded:
        return answers.answer(loaded, PROMPT)


if __name__ == "__main__":
    sys.exit(main())
