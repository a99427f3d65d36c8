"""How many tokens a second come of several answers at once, against one after the other.

    python benchmarks/several.py -m 1.5b.gguf -md 135m.gguf --prompts prompts.jsonl --json out.json

The same answers are made 1, 2, 4 and 8 at a time, without drafts, with n-grams and with each draft
model, by turns (every way once, then every way again). A ratio compares tokens a second with those of one
after the other without drafts in the same turn; given is the geometric mean of the turns. Reading the
prompts is counted apart. All texts must be those of one after the other without drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specgen.engine.calibration.memory import Memory
from specgen.engine.engine import Engine
from specgen.engine.loaded_models import Models
from specgen.llama.kernel_checks import choose_kernels
from specgen.measure.proof import evenly_chosen, read_prompts
from specgen.models import cache_folder
from specgen.options import DraftSource, GenerationOptions, SessionOptions

N_AT_ONCE = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, action="append", default=[])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("-N", "--count", type=int, default=16)
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("-c", "--ctx-size", type=int, default=1536)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    choose_kernels("auto", cache_folder())
    prompts = evenly_chosen(read_prompts(asked.prompts), asked.count)
    memory = Memory()
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    texts: list[str] = []
    for turn in range(asked.turns):
        for name, draft in _drafts(asked.draft):
            options = SessionOptions(
                asked.target, draft, generation=GenerationOptions(max_tokens=asked.max_tokens)
            )
            with Models(options, time.perf_counter, memory) as loaded:
                for n in N_AT_ONCE:
                    run = _answers(loaded, prompts, n, asked.ctx_size)
                    texts = texts or run["texts"]
                    run["n_equal"] = sum(
                        a == b for a, b in zip(run.pop("texts"), texts, strict=True)
                    )
                    found.setdefault((name, n), []).append(run)
                    print(f"turn {turn + 1}: {name}, {n} at once: {run}", file=sys.stderr)
    plain = [run["tokens_per_s"] for run in found["none", 1]]
    ways = []
    for (name, n), runs in found.items():
        ratios = [run["tokens_per_s"] / speed for run, speed in zip(runs, plain, strict=True)]
        ratio = round(geometric_mean(ratios), 2)
        print(f"{name}\t{n}\t{ratio}\t" + "\t".join(str(run["tokens_per_s"]) for run in runs))
        ways.append({"draft": name, "at_once": n, "ratio": ratio, "turns": runs})
    if asked.json is not None:
        about = {"target": asked.target.name, "n_prompts": len(prompts), "ways": ways}
        asked.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _drafts(models: list[Path]) -> Iterator[tuple[str, DraftSource]]:
    yield "none", "none"
    yield "ngram", "ngram"
    for path in models:
        yield path.name, path


def _answers(loaded: Models, prompts: list[str], n: int, n_ctx: int) -> dict[str, Any]:
    """Make all answers, n at once; figures, and the texts."""
    with Engine(loaded, n_parallel=n, n_ctx=n_ctx) as engine:
        started = loaded.clock()
        asked = [engine.insert(prompt) for prompt in prompts]
        for _ in engine.run():
            pass
        seconds = loaded.clock() - started
    done = [answer.finished for answer in asked if answer.finished is not None]
    prompt_s = sum(finished.prompt_s for finished in done)
    n_tokens = sum(finished.n_tokens for finished in done)
    n_drafted = sum(finished.n_drafted for finished in done)
    return {
        "n_tokens": n_tokens,
        "prompt_s": round(prompt_s, 2),
        "tokens_per_s": round(n_tokens / (seconds - prompt_s), 1),
        "draft_s": round(sum(finished.draft_s for finished in done), 2),
        "target_s": round(sum(finished.target_s for finished in done) - prompt_s, 2),
        "own_s": round(sum(finished.loop_s for finished in done), 2),
        "n_drafted": n_drafted,
        "n_accepted": sum(finished.n_accepted for finished in done),
        "texts": [finished.text for finished in done],
    }


if __name__ == "__main__":
    main()
