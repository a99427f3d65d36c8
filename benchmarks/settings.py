r"""Draft settings against plain decoding, on a pair of real models.

    python benchmarks/settings.py --target big.gguf --prompts benchmarks/prompts.jsonl \
        small.gguf:draft_max=3 small.gguf:draft_max=8,draft_p_min=0.75 ngram:ngram_min=3

Each prompt is answered plainly and with every setting, one after the other, so that a machine
that slows down slows all of them; greedy, in the model's chat template. Compared are tokens
per second after the first token. Prints the speed-up over plain decoding by category (means
over the prompts) on stderr, and one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.answers import answer, chat_text, read_prompts
from specgen.options import DraftOptions, GenerationOptions
from specgen.session import DraftSource, Session, SessionOptions

_FIELDS = {
    "draft_max": ("max_tokens", int),
    "draft_min": ("min_tokens", int),
    "draft_p_min": ("p_min", float),
    "ngram_min": ("ngram_min", int),
    "ngram_max": ("ngram_max", int),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="draft settings against plain decoding")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("settings", nargs="+", help="DRAFT[:option=value,...]")
    arguments = parser.parse_args()
    speedups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    results = []
    with contextlib.ExitStack() as stack:
        sessions = {
            setting: stack.enter_context(open_session(arguments, setting))
            for setting in ("none", *arguments.settings)
        }
        for category, prompt in read_prompts(arguments.prompts):
            text = chat_text(sessions["none"], prompt)
            plain = answer(sessions["none"], text)
            for setting in arguments.settings:
                fast = answer(sessions[setting], text, estimate_gain=True)
                if plain.tokens_per_s is None or fast.tokens_per_s is None:
                    continue
                speedup = fast.tokens_per_s / plain.tokens_per_s
                speedups[setting][category].append(speedup)
                results.append(
                    {
                        "category": category,
                        "setting": setting,
                        "plain_tokens_per_s": round(plain.tokens_per_s, 2),
                        "tokens_per_s": round(fast.tokens_per_s, 2),
                        "speedup": round(speedup, 3),
                        "estimated_speedup": fast.estimated_speedup,
                        "acceptance_rate": fast.acceptance_rate,
                        "mean_accepted_length": fast.mean_accepted_length,
                        "loop_share": fast.loop_s / fast.wall_s,
                        "equal": fast.token_ids == plain.token_ids,
                    }
                )
    for setting, by_category in speedups.items():
        means = {category: geometric_mean(values) for category, values in by_category.items()}
        print(
            setting.rpartition("/")[2],
            " ".join(f"{category} {mean:.2f}," for category, mean in means.items()),
            f"all {geometric_mean(list(means.values())):.2f}",
            file=sys.stderr,
        )
    print(json.dumps(results))
    return 0


def open_session(arguments: argparse.Namespace, setting: str) -> Session:
    name, _, values = setting.partition(":")
    changes = {}
    for assignment in filter(None, values.split(",")):
        key, _, value = assignment.partition("=")
        field, kind = _FIELDS[key]
        changes[field] = kind(value)
    draft: DraftSource = Path(name)
    if name in ("ngram", "none"):
        draft = "ngram" if name == "ngram" else "none"
    options = SessionOptions(
        target=arguments.target,
        draft=draft,
        drafting=DraftOptions(**changes),
        generation=GenerationOptions(max_tokens=arguments.max_tokens),
    )
    return Session(options, time.perf_counter)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    sys.exit(main())
