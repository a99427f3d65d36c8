r"""How much more often a draft's top token is its target's after training.

    specgen draft data -m 1.5b.gguf --tokens 40000
    python benchmarks/distil.py -m 1.5b.gguf -md 135m.gguf --text FOLDER --rate 0.006 \
        -o trained.gguf

FOLDER is what `specgen draft data` prints. Prints one JSON object: the share of the held-out
answers' tokens that are the draft's top token, before and after training, and the amount of
training text. `--tokens` trains on the first answers only, which shows what more text would gain.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from specgen.llama import LlamaModel
from specgen.measure.prompts import FIXED_NOW, read_prompts
from specgen.system.machine import describe_machine
from specgen.train.distillation import RATE, distil
from specgen.train.draft_builder import OWN_PROMPTS
from specgen.train.target_text import TargetText, TrainingText, training_texts
from specgen.train.training_loop import Budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--prompts", type=Path, help="the prompts of the answers (default: specgen's own prompts)"
    )
    parser.add_argument("--tokens", type=int, default=sys.maxsize, help="tokens to train on")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    target, draft = LlamaModel(arguments.target), LlamaModel(arguments.draft)
    with contextlib.closing(target), contextlib.closing(draft):
        prompts = read_prompts(arguments.prompts or OWN_PROMPTS)
        text = TargetText(arguments.text, prompts)
        texts = training_texts(text, target, draft, FIXED_NOW)
    texts = _first(texts, arguments.tokens)
    budget = Budget(
        time.monotonic, time.monotonic() + 60.0 * arguments.minutes, progress=_show_progress
    )
    agreement = distil(arguments.draft, texts, arguments.output, budget, rate=arguments.rate)
    assert agreement is not None, "nothing interrupts it"
    print(file=sys.stderr)
    figures = {
        "target": target.name,
        "draft": draft.name,
        "rate": arguments.rate,
        "n_tokens_learnt": _n_tokens(texts, is_held_back=False),
        "n_tokens_judged": _n_tokens(texts, is_held_back=True),
        **dataclasses.asdict(agreement),
        "cpu": describe_machine().cpu,
    }
    print(json.dumps(figures))


def _first(texts: Sequence[TrainingText], n_tokens: int) -> list[TrainingText]:
    """Return the first training answers, up to a number of tokens, and all held-out answers."""
    kept, n_kept = [], 0
    for text in texts:
        n_kept += 0 if text.is_held_back else len(text.answer_tokens)
        if text.is_held_back or n_kept <= n_tokens:
            kept.append(text)
    return kept


def _n_tokens(texts: Sequence[TrainingText], *, is_held_back: bool) -> int:
    return sum(len(text.answer_tokens) for text in texts if text.is_held_back == is_held_back)


def _show_progress(n_done: int, n_steps: int) -> None:
    print(f"\r{n_done}/{n_steps} ", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
