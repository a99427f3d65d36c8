"""Greedy speculative tokens against plain ones, on real models and prompts.

    python benchmarks/lossless.py --target big.gguf --draft small.gguf --prompts prompts.jsonl

The prompts are JSON Lines with `turns` (the first is used) or `prompt`, and perhaps a
`category`; a few of each category are taken in turn. For each, the answer is generated
plainly and with the draft. At the first token that differs the target is asked once more, one
token at a time as plain decoding does: a gap between the two tokens' logits that is within the
rounding of llama.cpp's batches is a near-tie, a large one would be a defect.

Prints a line a prompt on stderr and one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.answers import answer, chat_text, read_prompts
from specgen.arrays import Logits
from specgen.backend.base import Batch
from specgen.backend.llama import LlamaBackend
from specgen.events import FinishedEvent
from specgen.options import ContextOptions, DraftOptions, FlashAttention, GenerationOptions
from specgen.session import DraftSource, Session, SessionOptions


def main() -> int:
    arguments = parse_arguments()
    draft: DraftSource = (
        "ngram" if arguments.draft == "ngram" else Path(arguments.draft).expanduser()
    )
    plain = session_options(arguments, "none")
    fast = session_options(arguments, draft)
    results = []
    with Session(plain, time.perf_counter) as alone, Session(fast, time.perf_counter) as pair:
        prompts = some_of_each(read_prompts(arguments.prompts), arguments.n)
        for number, (category, prompt) in enumerate(prompts):
            text = chat_text(alone, prompt)
            expected, found = answer(alone, text), answer(pair, text)
            result: dict[str, object] = {
                "prompt": number,
                "category": category,
                "n_tokens": expected.n_tokens,
                "equal": expected.token_ids == found.token_ids,
                "acceptance_rate": found.acceptance_rate,
                "speedup": ratio(found.tokens_per_s, expected.tokens_per_s),
                "loop_share": found.loop_s / found.wall_s,
            }
            if not result["equal"]:
                result["difference"] = difference(alone, text, expected, found)
            print(json.dumps(result), file=sys.stderr, flush=True)
            results.append(result)
    n_equal = sum(bool(result["equal"]) for result in results)
    print(json.dumps({"n_prompts": len(results), "n_equal": n_equal, "prompts": results}))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="greedy speculative tokens against plain ones")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--draft", required=True, help="a GGUF file, or ngram")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("-n", type=int, default=20, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto")
    return parser.parse_args()


def session_options(arguments: argparse.Namespace, draft: DraftSource) -> SessionOptions:
    flash_attention: FlashAttention = arguments.flash_attn
    context = ContextOptions(flash_attention=flash_attention)
    return SessionOptions(
        target=arguments.target,
        draft=draft,
        drafting=DraftOptions(max_tokens=arguments.draft_max, p_min=0.0),
        generation=GenerationOptions(max_tokens=arguments.max_tokens),
        target_context=context,
        draft_context=context,
    )


def some_of_each(prompts: list[tuple[str, str]], n: int) -> list[tuple[str, str]]:
    """Take `n` (category, prompt) pairs, going round the categories."""
    by_category: dict[str, list[str]] = {}
    for category, prompt in prompts:
        by_category.setdefault(category, []).append(prompt)
    rounds = max(map(len, by_category.values()))
    in_turn = [
        (category, of_category[number])
        for number in range(rounds)
        for category, of_category in by_category.items()
        if number < len(of_category)
    ]
    return in_turn[:n]


def difference(
    session: Session, text: str, expected: FinishedEvent, found: FinishedEvent
) -> dict[str, object]:
    """The first differing token, and the logits that plain decoding gives to both."""
    position = next(
        (
            i
            for i, (a, b) in enumerate(zip(expected.token_ids, found.token_ids, strict=False))
            if a != b
        ),
        min(expected.n_tokens, found.n_tokens),
    )
    tokens = session.tokenize(text, parse_special=True)
    row = logits_after(session, tokens, expected.token_ids[:position])
    ends = session.target_model.vocabulary.end_tokens()

    def token(finished: FinishedEvent) -> int:
        if position < finished.n_tokens:
            return finished.token_ids[position]
        return max(ends, key=lambda end: float(row[end]))

    ours, theirs = token(expected), token(found)
    return {
        "position": position,
        "plain_token": ours,
        "speculative_token": theirs,
        "plain_logit": float(row[ours]),
        "speculative_logit": float(row[theirs]),
        "gap": float(row[ours] - row[theirs]),
    }


def logits_after(session: Session, prompt: Sequence[int], answer: Sequence[int]) -> Logits:
    """The target's logits after a prompt and an answer, decoded as plain decoding does."""
    options = ContextOptions()
    backend = LlamaBackend(
        session.target_model,
        options,
        n_ctx=len(prompt) + len(answer),
        clock=time.perf_counter,
    )
    batch = Batch()
    row: Logits | None = None
    for position, token in enumerate((*prompt, *answer)):
        last_of_prompt = position >= len(prompt) - 1
        batch.add(token, position, (0,), last_of_prompt)
        if last_of_prompt or len(batch) == backend.n_batch:
            logits = backend.decode(batch)
            row = logits[-1].copy() if last_of_prompt else None
            batch = Batch()
    backend.close()
    assert row is not None
    return row


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


if __name__ == "__main__":
    sys.exit(main())
