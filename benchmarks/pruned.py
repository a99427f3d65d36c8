r"""Drafts that are their target without some of its blocks: what they say, cost and would gain.

    specgen draft data -m 1.5b.gguf --tokens 40000
    python benchmarks/pruned.py curve -m 1.5b.gguf --sizes 1 2 4 6 8 > pruned-15.json
    python benchmarks/pruned.py compare -m 135m.gguf --size 5 --sets 100 --seeds 0 1 2 > pruned-search.json
    python benchmarks/pruned.py pays > pruned-pays.json

`curve` searches for the best set of each size, by the text in the cache folder; what was judged is kept
beside the draft, so it may be called again and goes on. Then each is written in Q4_0, timed beside
the target by turns, and judged by answers that the search did not look at.

`compare` gives several ways to search the same number of sets: the best agreement after so many of them.
Every set is judged once, and remembered, so more seeds take little longer.

`pays` needs no model: with what batches cost (shared by all who measured them in BENCHMARKS.md and in
the lab notes), the least agreement at which a draft gains a tenth, by the time of its token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from specgen.engine.calibration.gain import Costs, expected_gain
from specgen.engine.loaded_models import Models
from specgen.llama import default_threads
from specgen.llama.kernel_checks import choose_kernels, wanted_in
from specgen.models import cache_folder, identify
from specgen.options import ContextOptions, SessionOptions
from specgen.system.machine import look_at_machine
from specgen.training.draft_files import pruned_file, text_folder
from specgen.training.pruned_weights import check_prunable, write_pruned
from specgen.training.pruning import (
    N_JUDGED,
    Judge,
    PrunedCosts,
    agreement_of,
    judged_texts,
    timed_share,
)
from specgen.training.pruning_search import Blocks, Evaluations, Speedup, search
from specgen.training.target_text import TargetText

#: Places of other answers that a file is judged by.
_N_HELD_BACK = 768
#: Batch costs by rows, as shares of a token's time: llama.cpp's kernels on AVX-512 VNNI, ours there, F16
#: with AMX, and what a model would have whose rows cost a hundredth or a twentieth of a token, as where
#: reading the weights takes all the time.
_WORLDS: dict[str, dict[int, float]] = {
    "Q4_K_M, llama.cpp": {1: 1.0, 2: 1.4, 4: 1.5, 8: 2.7, 16: 3.4},
    "Q4_K_M, our kernels": {1: 1.0, 2: 1.06, 4: 1.19, 8: 1.48, 16: 2.5},
    "F16, our kernels": {1: 1.0, 2: 1.04, 4: 1.12, 8: 1.30, 16: 2.1},
    "rows at 0.05": {1: 1.0, 16: 1.75},
    "rows at 0.01": {1: 1.0, 16: 1.15},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["curve", "compare", "pays"])
    parser.add_argument("-m", "--target", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 6, 8, 10, 12])
    parser.add_argument("--size", type=int, default=5)
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--places", type=int, default=N_JUDGED)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--search-only", action="store_true")
    asked = parser.parse_args()
    if asked.what == "pays":
        found: object = pays()
    else:
        print(choose_kernels(wanted_in(os.environ), cache_folder()).label, file=sys.stderr)
        found = curve(asked) if asked.what == "curve" else compare(asked)
    print(json.dumps(found, indent=1))


def curve(asked: argparse.Namespace) -> dict[str, object]:
    """The best set that was found of each size, and what a draft without it would gain."""
    until_s = time.monotonic() + 60.0 * asked.minutes
    with judging(asked) as (loaded, text, judged):
        n_before, started_s = len(judged.known), time.monotonic()
        best = {}
        for size in asked.sizes:

            def is_enough(size: int = size) -> bool:
                n_judged = sum(len(blocks) == size for blocks in judged.known)
                return bool(time.monotonic() > until_s or n_judged >= asked.sets)

            best[size] = search(
                judged,
                lambda _n, agreement: agreement,
                loaded.target.n_layer,
                is_over=is_enough,
                progress=_tell,
                sizes=[size],
            )
        n_new = len(judged.known) - n_before
        took_s = (time.monotonic() - started_s) / n_new if n_new else None
        searched = {size: judged.known[blocks] for size, blocks in best.items() if blocks}
        print(f"\n{n_new} sets judged, {took_s} s each; {searched}", file=sys.stderr)
        figures: list[dict[str, object]] = []
        folder = pruned_folder(asked.target)
        if asked.search_only:
            return {"searched": searched}
        seen = {t.prompt for t in judged_texts(text.answers, asked.places, held_back=False)}
        others = [
            dataclasses.replace(answer, is_held_back=True)
            for answer in text.answers
            if answer.prompt_tokens not in seen
        ]
        held_back = judged_texts(others, _N_HELD_BACK, held_back=True)
        costs = PrunedCosts(loaded, folder)
        for size, blocks in {0: frozenset[int](), **best}.items():
            if blocks is None:
                continue
            file = folder / "curve.gguf"
            write_pruned(asked.target, blocks, file, default_threads())
            with loaded.contexts(256, drafts=False) as (own, _):
                cost = timed_share(loaded, own, file)
            agreement = agreement_of(file, loaded, held_back)
            file.unlink()
            figures.append(
                {
                    "n_left_out": size,
                    "left_out": sorted(blocks),
                    "agreement_searched": searched.get(size),
                    "agreement": agreement,
                    "cost_expected": costs.cost(size),
                    "cost": cost,
                    "speedup": costs.speedup_at(cost, agreement),
                }
            )
            print(figures[-1], file=sys.stderr)
        return {
            "target": loaded.target.name,
            "n_layer": loaded.target.n_layer,
            "kernels": loaded.target.kernels,
            "n_sets_judged": len(judged.known),
            "n_places": asked.places,
            "set_s": took_s,
            "batch_s": costs.batch_s,
            "drafts": figures,
            "machine": dataclasses.asdict(look_at_machine()),
        }


def compare(asked: argparse.Namespace) -> dict[str, object]:
    """The best of some ways to search, after so many sets."""
    with judging(asked) as (loaded, _, judged):
        n_layer, sizes = loaded.target.n_layer, [asked.size]
        value: Speedup = _agreement
        if asked.size == 0:
            sizes, value = list(range(1, n_layer // 2 + 1)), _expected(n_layer)

        def bayesian(agreement: Agreed, rng: np.random.Generator) -> None:
            search(
                agreement,
                value,
                n_layer,
                is_over=lambda: False,
                progress=lambda *_: None,
                sizes=sizes,
                seed=int(rng.integers(2**31)),
            )

        ways: dict[str, Callable[[Agreed, np.random.Generator], None]] = {
            "ranking": lambda agreement, _: ranking(agreement, n_layer, sizes),
            "greedy": lambda agreement, _: greedy(agreement, n_layer, sizes),
            "random": lambda agreement, rng: at_random(agreement, n_layer, sizes, rng),
            "bayesian": bayesian,
        }
        found: dict[str, list[object]] = {}
        for name, way in ways.items():
            for seed in asked.seeds if name in ("random", "bayesian") else [0]:
                agreement = Agreed(judged, asked.sets)
                with contextlib.suppress(EnoughError):
                    way(agreement, np.random.default_rng(seed))
                found.setdefault(name, []).append(agreement.best_after(sizes, value))
                print(name, seed, found[name][-1], file=sys.stderr)
        return {
            "target": loaded.target.name,
            "n_layer": n_layer,
            "size": asked.size,
            "n_places": asked.places,
            "best_after": found,
        }


class EnoughError(Exception):
    """As many sets were asked for as are allowed."""


class Agreed(Evaluations):
    """Looks up sets in what was judged by others, and remembers which it was asked for."""

    def __init__(self, judged: Evaluations, n_most: int) -> None:
        self._judged = judged
        self._n_most = n_most
        self.known: dict[Blocks, float] = {}

    def __call__(self, left_out: Blocks) -> float:
        if left_out not in self.known:
            if len(self.known) >= self._n_most:
                raise EnoughError
            self.known[left_out] = self._judged(left_out)
        return self.known[left_out]

    def best_after(self, sizes: Sequence[int], value: Speedup) -> dict[str, float]:
        """The best value of a set of these sizes among the first so many."""
        found, best = {}, 0.0
        for number, (left_out, agreement) in enumerate(self.known.items(), 1):
            if len(left_out) in sizes:
                best = max(best, value(len(left_out), agreement))
            if number % 25 == 0 or number == len(self.known):
                found[str(number)] = best
        return found


def ranking(agreement: Evaluations, n_layer: int, sizes: Sequence[int]) -> None:
    """The blocks that do least harm by themselves."""
    single = {block: agreement(frozenset({block})) for block in range(1, n_layer)}
    ranked = sorted(single, key=lambda block: -single[block])
    for size in sizes:
        agreement(frozenset(ranked[:size]))


def greedy(agreement: Evaluations, n_layer: int, sizes: Sequence[int]) -> None:
    """One block after the other, each time the one that does least harm. What a block did before bounds
    what it does now, so that not all are looked at each time."""
    bound = {block: agreement(frozenset({block})) for block in range(1, n_layer)}
    left_out: Blocks = frozenset()
    while len(left_out) < max(sizes):
        seen: set[int] = set()
        while True:
            block = max(bound.keys() - left_out, key=lambda block: bound[block])
            if block in seen:
                break
            seen.add(block)
            bound[block] = agreement(left_out | {block})
        left_out |= {block}


def at_random(
    agreement: Evaluations, n_layer: int, sizes: Sequence[int], rng: np.random.Generator
) -> None:
    """Any sets."""
    while True:
        size = rng.choice(sizes)
        agreement(frozenset(rng.choice(np.arange(1, n_layer), size, replace=False).tolist()))


def _agreement(_n_left_out: int, agreement: float) -> float:
    return agreement


def _expected(n_layer: int) -> Speedup:
    """For a target whose rows cost 0.05 of a token, and whose blocks in Q4_0 take 0.27 of its time, the
    rest 0.03."""

    def value(n_left_out: int, agreement: float) -> float:
        cost = 0.03 + 0.27 * (1.0 - n_left_out / n_layer)
        return expected_gain(Costs(_WORLDS["rows at 0.05"], cost), agreement).speedup

    return value


def pays() -> dict[str, dict[str, float | None]]:
    """The least agreement that gains a tenth, by the costs of batches and of the draft's token."""
    found: dict[str, dict[str, float | None]] = {}
    for name, batch_s in _WORLDS.items():
        found[name] = {}
        for cost in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
            enough = [
                agreement
                for agreement in np.linspace(0.0, 1.0, 201)
                if expected_gain(Costs(batch_s, cost), float(agreement)).is_worth_it
            ]
            found[name][f"{cost:.1f}"] = round(float(enough[0]), 3) if enough else None
    return found


@contextlib.contextmanager
def judging(asked: argparse.Namespace) -> Iterator[tuple[Models, TargetText, Evaluations]]:
    """A target with its text, and what was judged of it so far."""
    context = ContextOptions(n_threads=asked.threads)
    options = SessionOptions(
        target=asked.target, draft="none", target_context=context, draft_context=context
    )
    with Models(options, time.perf_counter) as loaded:
        model = loaded.target
        check_prunable(model)
        text = TargetText(pruned_folder(asked.target) / "text", model.n_embd)
        texts = judged_texts(text.answers, asked.places, held_back=False)
        record = pruned_folder(asked.target) / "curve.judged"
        with (
            Judge(model, loaded.costs.context_options(), texts, loaded.clock) as judge,
            Evaluations.opened(record, f"{asked.places} places", judge.agreement) as judged,
        ):
            yield loaded, text, judged


def pruned_folder(target: Path) -> Path:
    identity = identify(target)
    assert identity is not None, f"{target} is no file"
    assert (
        text_folder(cache_folder(), identity).parent == pruned_file(cache_folder(), identity).parent
    )
    return pruned_file(cache_folder(), identity).parent


def _tell(what: str, done: int, total: int) -> None:
    print(f"\r{what}: {done} of {total}   ", end="", file=sys.stderr)


__all__: Sequence[str] = ()

if __name__ == "__main__":
    main()
