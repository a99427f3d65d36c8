r"""Speed-up of draft settings over plain decoding, with real models.

    python benchmarks/settings.py --target big.gguf --prompts benchmarks/prompts.jsonl \
        small.gguf:draft_max=3 small.gguf:draft_max=8,draft_p_min=0.75 ngram:ngram_min=3

Each prompt is answered plainly and then with every setting, so that all of them are affected if the
machine slows down. Prompts are in the model's chat template, and the temperature is 0 without
--temp. The speed is that after the first token. Prints the speed-ups over plain decoding by
category (geometric means) to stderr, and one JSON list to stdout. The variable SPECGEN_KERNELS
chooses the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.answers import answer, bench_prompts, read_setting
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.options import ContextOptions, GenerationOptions, SamplerOptions, SessionOptions
from specgen.session.session import Session
from specgen.system.folders import cache_folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare draft settings with plain decoding.")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--count", type=int, default=0, help="prompts per category; 0: all")
    parser.add_argument("settings", nargs="+", help="DRAFT[:option=value,...]")
    arguments = parser.parse_args()
    prompts = bench_prompts(arguments.prompts, arguments.count)
    speedups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    results = []
    print(choose_kernels(wanted_in(os.environ), cache_folder()).label, file=sys.stderr)
    with contextlib.ExitStack() as stack:
        sessions = {
            setting: stack.enter_context(open_session(arguments, setting))
            for setting in ("none", *arguments.settings)
        }
        for prompt in prompts:
            plain = answer(sessions["none"], prompt.text)
            for setting in arguments.settings:
                fast = answer(sessions[setting], prompt.text)
                if plain.tokens_per_s is None or fast.tokens_per_s is None:
                    continue
                speedup = fast.tokens_per_s / plain.tokens_per_s
                speedups[setting][prompt.category].append(speedup)
                results.append(
                    {
                        "category": prompt.category,
                        "setting": setting,
                        "plain_tokens_per_s": round(plain.tokens_per_s, 2),
                        "tokens_per_s": round(fast.tokens_per_s, 2),
                        "speedup": round(speedup, 3),
                        "estimated_speedup": fast.estimated_speedup,
                        "acceptance_rate": fast.acceptance_rate,
                        "mean_accepted_length": fast.mean_accepted_length,
                        "n_rounds": fast.n_rounds,
                        "n_drafted": fast.n_drafted,
                        "n_accepted": fast.n_accepted,
                        "loop_share": fast.loop_s / fast.wall_s,
                        "equal": fast.token_ids == plain.token_ids,
                    }
                )
    for setting, by_category in speedups.items():
        means = {
            category: statistics.geometric_mean(values) for category, values in by_category.items()
        }
        print(
            setting.rpartition("/")[2],
            " ".join(f"{category} {mean:.2f}," for category, mean in means.items()),
            f"all {statistics.geometric_mean(list(means.values())):.2f}",
            file=sys.stderr,
        )
    print(json.dumps(results))
    return 0


def open_session(arguments: argparse.Namespace, setting: str) -> Session:
    draft, drafting = read_setting(setting)
    options = SessionOptions(
        target=arguments.target,
        draft=draft,
        drafting=drafting,
        sampler=SamplerOptions(temperature=arguments.temp, seed=1),
        generation=GenerationOptions(max_tokens=arguments.max_tokens),
        target_context=ContextOptions(n_threads=arguments.threads),
        draft_context=ContextOptions(n_threads=arguments.threads),
    )
    return Session(options, time.perf_counter)


if __name__ == "__main__":
    sys.exit(main())
