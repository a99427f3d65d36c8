"""How many tokens a pass of the target brings, of trees and of chains with as many tokens.

    python benchmarks/trees.py TARGET DRAFT [--temp T] [--nodes N] [--prompts FILE] [-n TOKENS]

Nothing is timed: what a row costs is left out of it, so every draft has N tokens (or, of a shape,
as many as it has). Whether that is worth it on a machine, its table of batches says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.answers import answer, bench_prompts
from specgen.method.cost_table import CostTable
from specgen.options import (
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    VerifierName,
    parse_tree,
)
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session


def ways(n: int) -> Iterator[tuple[str, DraftOptions]]:
    """Chains and trees of about n tokens."""

    def fixed(shape: str, verifier: VerifierName) -> DraftOptions:
        return DraftOptions(policy="fixed", tree=parse_tree(shape), verifier=verifier)

    chain = DraftOptions(policy="fixed", max_tokens=n, p_min=0.0, tree=parse_tree("off"))
    yield "chain, drawn, block", chain
    yield "chain, likeliest, match", replace(chain, verifier="match")
    yield (
        "tree, best first, match",
        DraftOptions(policy="cost", max_tokens=n, ngrams=False, verifier="match"),
    )
    for shape in SHAPES.get(n, ()):
        yield f"tree {shape}, drawn, residual", fixed(shape, "residual")
        if "x" in shape:
            yield f"tree {shape}, drawn, spectr", fixed(shape, "spectr")
        else:
            yield f"tree {shape}, drawn, block", fixed(shape, "block")
            yield f"tree {shape}, likeliest, match", fixed(shape, "match")


#: Shapes of exactly so many tokens.
SHAPES = {
    4: ("2,1", "2x2"),
    8: ("2,1,1,1", "2x4"),
    15: ("3,2,1", "3,1,1,1,1", "3x5"),
}


def free(table: CostTable, n_max: int, row_s: float) -> None:
    """Let all batches cost the same, but for a little, whatever is measured."""
    for n_rows in range(1, n_max + 2):
        table.set_seconds(n_rows, 1.0 + row_s * n_rows)
    setattr(table, "observe", lambda *_: None)  # noqa: B010 - a method


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--temp", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--only", help="those whose names hold one of these, with | between")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int)
    parser.add_argument("-n", type=int, default=64)
    asked = parser.parse_args()
    prompts = bench_prompts(asked.prompts, None)
    found: dict[str, list[float]] = {}
    for name, drafting in ways(asked.nodes):
        if asked.only and not any(part in name for part in asked.only.split("|")):
            continue
        options = SessionOptions(
            asked.target,
            asked.draft,
            sampler=SamplerOptions(temperature=asked.temp),
            drafting=drafting,
            generation=GenerationOptions(max_tokens=asked.n),
        )
        measurements = MeasurementStore()
        n_tokens = n_rounds = n_drafted = 0
        with Session(options, time.perf_counter, measurements) as loaded:
            if drafting.policy == "cost":
                free(loaded.costs.table(), drafting.n_max, 1e-4)
                table = loaded.costs.table(asked.draft)
                free(table, drafting.n_max, 0.0)
                for n_rows in table.known:
                    table.set_seconds(n_rows, 1e-6)
            for prompt in prompts[: asked.count]:
                finished = answer(loaded, prompt.text)
                if finished.mean_accepted_length is not None:
                    n_tokens += round(finished.mean_accepted_length * finished.n_rounds)
                    n_rounds += finished.n_rounds
                    n_drafted += finished.n_drafted
        found[name] = [n_tokens / n_rounds, n_drafted / n_rounds, n_rounds]
        best = max(values[0] for key, values in found.items() if key.startswith("chain"))
        print(
            f"{name:34} {n_tokens / n_rounds:5.2f} tokens per pass, "
            f"{n_drafted / n_rounds:5.1f} drafted, {n_rounds} passes, "
            f"{n_tokens / n_rounds / best:.3f} of the best chain",
            flush=True,
        )
    print(json.dumps({"temperature": asked.temp, "nodes": asked.nodes, "found": found}))


if __name__ == "__main__":
    main()
