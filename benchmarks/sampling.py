"""Time of samplers: microseconds per row, for each alone and for chains, by vocabulary size.

    python benchmarks/sampling.py

The logits are normally distributed with a standard deviation of 3. Each figure is the lowest of
several means, which is the time when no other program runs. A sampler without top-k works on the
whole vocabulary. "masked" is a chain with a grammar that allows every tenth token at no cost;
"asked" is the number of tokens that the grammar had to check.

Prints a table on stderr and one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import timeit
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from specgen.options import SamplerOptions
from specgen.system.arrays import BoolArray, Logits, TokenArray, best
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.dry import DryBreakers, dry_penalties

VOCABULARIES = (12, 151_936)
N_ROWS = 8
N_HISTORY = 4096
N_REPEATS = 7
#: The approximate seconds of one repeat.
REPEAT_S = 0.02

OFF = SamplerOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
ALONE = {
    "softmax": OFF,
    "temperature": replace(OFF, temperature=0.8),
    "dynamic temperature": replace(OFF, dynatemp_range=0.5),
    "top-k": replace(OFF, top_k=40),
    "top-p": replace(OFF, top_p=0.95),
    "min-p": replace(OFF, min_p=0.05),
    "typical": replace(OFF, typical_p=0.9),
    "top-n-sigma": replace(OFF, top_n_sigma=1.0),
    "XTC": replace(OFF, xtc_probability=0.5, xtc_threshold=0.01),
}
DEFAULT = SamplerOptions(temperature=0.8)
CHAINS = {
    "default": DEFAULT,
    "default + bias": replace(DEFAULT, logit_bias=((3, -2.0),)),
    "default + penalties": replace(DEFAULT, repeat_penalty=1.1),
    "default + DRY": replace(DEFAULT, dry_multiplier=0.8, dry_last_n=-1),
    "default + typical": replace(DEFAULT, typical_p=0.9),
    "default + top-n-sigma": replace(DEFAULT, top_n_sigma=1.0),
    "default + XTC": replace(DEFAULT, xtc_probability=0.5, xtc_threshold=0.01),
    "greedy": replace(DEFAULT, temperature=0.0),
    "greedy + penalties": replace(DEFAULT, temperature=0.0, repeat_penalty=1.1),
}


def main() -> int:
    argparse.ArgumentParser(description="Measure the time of samplers.").parse_args()
    result = {
        "unit": "microseconds per row",
        "samplers": {name: sizes(options) for name, options in (ALONE | CHAINS).items()},
        "masked": {name: masked(CHAINS[name]) for name in ("greedy", "default")},
        "top-40 of rows": {str(n): rows_together(n) for n in (1, 4, N_ROWS)},
        f"DRY's search in {N_HISTORY} tokens": searches(),
    }
    for heading, figures in result.items():
        if isinstance(figures, dict):
            print(f"\n{heading}", file=sys.stderr)
            for name, values in figures.items():
                cells = "".join(f"{key:>14} {value:>9}" for key, value in values.items())
                print(f"  {name:<24}{cells}", file=sys.stderr)
    print(json.dumps(result, indent=1))
    return 0


def microseconds(call: Callable[[], object]) -> float:
    """The lowest mean time of a call over several repeats, after a warm-up."""
    timer = timeit.Timer(call)
    n = max(1, int(REPEAT_S / max(timer.timeit(3) / 3, 1e-9)))
    return round(min(timer.repeat(N_REPEATS, n)) / n * 1e6, 1)


def row(n_vocab: int) -> Logits:
    return np.random.default_rng(n_vocab).normal(0.0, 3.0, n_vocab).astype(np.float32)


def sizes(options: SamplerOptions) -> dict[str, float]:
    """The time of a sampler by the size of the vocabulary."""
    sampler = Sampler(options)
    figures = {}
    for n_vocab in VOCABULARIES:
        logits = row(n_vocab)
        history = np.random.default_rng(1).integers(0, n_vocab, N_HISTORY)
        figures[str(n_vocab)] = microseconds(
            lambda logits=logits, history=history: sampler.distribution(logits, history)  # type: ignore[misc]
        )
    return figures


def masked(options: SamplerOptions) -> dict[str, float]:
    """The time of a chain with a grammar, for a large vocabulary."""
    logits = row(VOCABULARIES[-1])
    allowed = np.random.default_rng(2).random(len(logits)) < 0.1
    sampler = Sampler(options)
    n_asked = 0

    def allows(token_ids: TokenArray) -> BoolArray:
        nonlocal n_asked
        n_asked += len(token_ids)
        answer: BoolArray = allowed[token_ids]
        return answer

    sampler.distribution(logits, allows=allows)
    n_asked_once = n_asked
    return {
        "time": microseconds(lambda: sampler.distribution(logits, allows=allows)),
        "asked": n_asked_once,
    }


def rows_together(n_rows: int) -> dict[str, float]:
    """The time to find the 40 best tokens of each row, one by one and for all rows together."""
    logits = np.tile(row(VOCABULARIES[-1]), (n_rows, 1))
    one_by_one = [best(each, 40).tolist() for each in logits]
    assert [each.tolist() for each in best_of_rows(logits, 40)] == one_by_one
    return {
        "one by one": round(microseconds(lambda: [best(each, 40) for each in logits]) / n_rows, 1),
        "together": round(microseconds(lambda: best_of_rows(logits, 40)) / n_rows, 1),
    }


def best_of_rows(logits: Logits, n: int) -> list[TokenArray]:
    """Compute `best` of every row of float32[n_rows, n_vocab], each step for all rows at once."""
    group = 64
    n_rows, n_vocab = logits.shape
    n_groups = n_vocab // group
    n_grouped = n_groups * group
    table = logits[:, :n_grouped].reshape(n_rows, group, n_groups)
    maxima = table.max(axis=1)
    bounds = np.partition(maxima, n_groups - n, axis=1)[:, n_groups - n]
    in_row, column = np.nonzero(maxima >= bounds[:, None])
    hit, at = np.nonzero(table[in_row, :, column] >= bounds[in_row, None])
    rest_row, rest = np.nonzero(logits[:, n_grouped:] >= bounds[:, None])
    owners = np.concatenate((in_row[hit], rest_row))
    token_ids = np.concatenate((at * n_groups + column[hit], rest + n_grouped))
    # By row, then by descending logit, then by id.
    order = np.lexsort((token_ids, -logits[owners, token_ids], owners))
    owners, token_ids = owners[order], token_ids[order]
    starts = owners.searchsorted(np.arange(n_rows))
    return [token_ids[start : start + n] for start in starts.tolist()]


def searches() -> dict[str, dict[str, float]]:
    """The time of DRY alone, for several kinds of texts."""
    rng = np.random.default_rng(4)
    texts = {
        "random": rng.integers(0, 1000, N_HISTORY),
        "few words": rng.integers(0, 5, N_HISTORY),
        "period 300": np.resize(rng.integers(0, 1000, 300), N_HISTORY),
        "period 7": np.resize(np.arange(7), N_HISTORY),
        "one token": np.zeros(N_HISTORY, np.int64),
    }
    breakers = DryBreakers({5: frozenset([()])})

    def search(text: TokenArray) -> object:
        return dry_penalties(text, breakers, multiplier=0.8, base=1.75, allowed_length=2, last_n=-1)

    return {
        name: {"time": microseconds(lambda text=text: search(text))}  # type: ignore[misc]
        for name, text in texts.items()
    }


if __name__ == "__main__":
    sys.exit(main())
