"""Tokens per pass of the target, for draft trees and chains with the same number of tokens.

    python benchmarks/trees.py TARGET DRAFT [--temp T] [--nodes N] [--prompts FILE] [-n TOKENS]

Nothing is timed. The cost of a row is ignored, so every draft has N tokens (or as many as its
shape). Whether a larger draft pays on a machine depends on the cost of batches there:
`benchmarks/costs.py` measures it.
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


def settings_of(n: int) -> Iterator[tuple[str, DraftOptions]]:
    """Yield chains and trees of about n tokens, by name."""

    def fixed(shape: str, verifier: VerifierName) -> DraftOptions:
        return DraftOptions(policy="fixed", tree=parse_tree(shape), verifier=verifier)

    chain = DraftOptions(policy="fixed", max_tokens=n, p_min=0.0, tree=parse_tree("off"))
    yield "chain, sampled, block", chain
    yield "chain, likeliest, match", replace(chain, verifier="match")
    yield (
        "tree, best first, match",
        DraftOptions(policy="cost", max_tokens=n, ngrams=False, verifier="match"),
    )
    for shape in SHAPES.get(n, ()):
        yield f"tree {shape}, sampled, residual", fixed(shape, "residual")
        if "x" in shape:
            yield f"tree {shape}, sampled, spectr", fixed(shape, "spectr")
        else:
            yield f"tree {shape}, sampled, block", fixed(shape, "block")
            yield f"tree {shape}, likeliest, match", fixed(shape, "match")


#: The shapes that have exactly this number of tokens.
SHAPES = {
    4: ("2,1", "2x2"),
    8: ("2,1,1,1", "2x4"),
    15: ("3,2,1", "3,1,1,1,1", "3x5"),
}


def set_constant_costs(table: CostTable, n_max: int, row_s: float) -> None:
    """Let batches of all sizes cost nearly the same, whatever is measured later.

    Args:
        table: The table to change.
        n_max: The longest draft.
        row_s: What each row adds to the cost of one second.
    """
    for n_rows in range(1, n_max + 2):
        table.set_seconds(n_rows, 1.0 + row_s * n_rows)
    setattr(table, "observe", lambda *_: None)  # noqa: B010 - mypy forbids assigning to a method


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--temp", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=8, help="tokens of a draft")
    parser.add_argument(
        "--only", help="only settings whose names contain this, or one of several parted by |"
    )
    parser.add_argument("--prompts", type=Path, help="default: the prompts of `specgen bench`")
    parser.add_argument("--count", type=int, help="number of prompts")
    parser.add_argument("-n", type=int, default=64, help="maximum tokens per answer")
    arguments = parser.parse_args()
    prompts = bench_prompts(arguments.prompts, None)
    results: dict[str, list[float]] = {}
    for name, drafting in settings_of(arguments.nodes):
        if arguments.only and not any(part in name for part in arguments.only.split("|")):
            continue
        options = SessionOptions(
            arguments.target,
            arguments.draft,
            sampler=SamplerOptions(temperature=arguments.temp),
            drafting=drafting,
            generation=GenerationOptions(max_tokens=arguments.n),
        )
        measurements = MeasurementStore()
        n_tokens = n_rounds = n_drafted = 0
        with Session(options, time.perf_counter, measurements) as loaded:
            if drafting.policy == "cost":
                set_constant_costs(loaded.costs.table(), drafting.n_max, 1e-4)
                table = loaded.costs.table(arguments.draft)
                set_constant_costs(table, drafting.n_max, 0.0)
                for n_rows in table.known:
                    table.set_seconds(n_rows, 1e-6)
            for prompt in prompts[: arguments.count]:
                finished = answer(loaded, prompt.text)
                if finished.mean_accepted_length is not None:
                    n_tokens += round(finished.mean_accepted_length * finished.n_rounds)
                    n_rounds += finished.n_rounds
                    n_drafted += finished.n_drafted
        results[name] = [n_tokens / n_rounds, n_drafted / n_rounds, n_rounds]
        best_chain = max(values[0] for key, values in results.items() if key.startswith("chain"))
        print(
            f"{name:34} {n_tokens / n_rounds:5.2f} tokens per pass, "
            f"{n_drafted / n_rounds:5.1f} drafted, {n_rounds} passes, "
            f"{n_tokens / n_rounds / best_chain:.3f} times the best chain",
            flush=True,
        )
    print(json.dumps({"temperature": arguments.temp, "nodes": arguments.nodes, "results": results}))


if __name__ == "__main__":
    main()
