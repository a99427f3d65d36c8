"""How much each way of judging drafts accepts, on real models and prompts.

    python benchmarks/acceptance.py --target big.gguf --draft small.gguf --prompts prompts.jsonl

Two measurements, on the same prompts:

*Runs*: answers are generated with each verifier, and accepted tokens counted. Rounds begin where
the last draft ended, which is often where the draft is bad.

*Places*: at evenly spaced places of answers that the target sampled itself, the draft model
drafts: once by drawing, once its most likely tokens. The target's distributions along the draft
then give the *expected* number of accepted tokens exactly, for every rule at once; no luck of the
draw is left but that of the places and of the drafted tokens.

- residual, block: the drawn draft, judged token by token or as a whole;
- match: the most likely draft, matched with the target's draws (what llama.cpp does);
- match, drawn: the drawn draft, matched.

For drafts drawn at other temperatures and top-k than the target's, the chance to accept the
first token by residual sampling, the sum of min(target, draft), is given too.

Prints progress on stderr and one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.answers import answer, begin
from specgen.measure.prompts import evenly_chosen, read_prompts
from specgen.method.answer_loop import AnswerLoop
from specgen.method.backend import Backend, Batch
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    VerifierName,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution

VERIFIERS: tuple[VerifierName, ...] = ("match", "residual", "block")
#: Draft temperatures relative to the target's, and top-k, of the sweep.
RELATIVE_TEMPERATURES = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
TOP_K = (1, 2, 4, 10, 40, 0)


def main() -> int:
    arguments = parse_arguments()
    prompts = evenly_chosen(read_prompts(arguments.prompts), arguments.n)
    result: dict[str, object] = {"draft_max": arguments.draft_max, "n_prompts": len(prompts)}
    if arguments.measure != "places":
        result["runs"] = [
            run(arguments, prompts, t, v) for t in arguments.temp for v in arguments.verifiers
        ]
    if arguments.measure != "runs":
        result["places"] = [measure(arguments, prompts, t) for t in arguments.temp]
    print(json.dumps(result))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="how much each verifier accepts")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--draft", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--measure", choices=("both", "runs", "places"), default="both")
    parser.add_argument("--temp", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--verifiers", nargs="+", choices=VERIFIERS, default=VERIFIERS)
    parser.add_argument("-n", type=int, default=24, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--every", type=int, default=4, help="a place every so many tokens")
    parser.add_argument("--draft-max", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def options(
    arguments: argparse.Namespace, temperature: float, verifier: VerifierName = "auto"
) -> SessionOptions:
    context = ContextOptions(n_threads=arguments.threads)
    return SessionOptions(
        target=arguments.target,
        draft=arguments.draft,
        sampler=SamplerOptions(temperature=temperature, seed=1),
        drafting=DraftOptions(max_tokens=arguments.draft_max, p_min=0.0, verifier=verifier),
        generation=GenerationOptions(max_tokens=arguments.max_tokens),
        target_context=context,
        draft_context=context,
    )


def run(
    arguments: argparse.Namespace,
    prompts: Sequence[str],
    temperature: float,
    verifier: VerifierName,
) -> dict[str, object]:
    """Generate an answer to each prompt and count."""
    n_tokens = n_rounds = n_drafted = n_accepted = 0
    with Session(options(arguments, temperature, verifier), time.perf_counter) as loaded:
        for prompt in prompts:
            found = answer(loaded, prompt)
            n_tokens += found.n_tokens
            n_rounds += found.n_rounds
            n_drafted += found.n_drafted
            n_accepted += found.n_accepted
    result: dict[str, object] = {
        "temperature": temperature,
        "verifier": verifier,
        "n_tokens": n_tokens,
        "acceptance_rate": n_accepted / n_drafted,
        "mean_accepted_length": 1.0 + n_accepted / n_rounds,
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def measure(
    arguments: argparse.Namespace, prompts: Sequence[str], temperature: float
) -> dict[str, object]:
    chosen = options(arguments, temperature)
    accepted: defaultdict[str, list[float]] = defaultdict(list)
    shaped: defaultdict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(1)
    sampler = Sampler(chosen.sampler)
    sweep = {f"temperature x {t}": Sampler(at(chosen.sampler, t)) for t in RELATIVE_TEMPERATURES}
    sweep |= {f"top-k {k}": Sampler(replace(chosen.sampler, top_k=k)) for k in TOP_K}
    with Session(chosen, time.perf_counter) as loaded:
        for number, prompt in enumerate(prompts):
            begun = begin(loaded, prompt)
            n_prompt = len(begun.tokens)
            n_ctx = loaded.context_size(n_prompt)
            with loaded.contexts(n_ctx) as (target, (draft, *_)):
                generation = DrafterFactory(loaded).new_answer(begun, n_ctx, (), number)
                loop = AnswerLoop(target, time.perf_counter)
                while not (generation.is_started or generation.is_finished):
                    loop.prefill(generation)
                while generation.finish_reason is None:
                    if (len(generation.tokens) - n_prompt) % arguments.every == 1:
                        place = Place(target, draft, generation.tokens, arguments.draft_max)
                        for rule, expected in place.accepted(sampler, rng).items():
                            accepted[rule].append(expected)
                        for name, draft_sampler in sweep.items():
                            shaped[name].append(place.shared(sampler, draft_sampler))
                    loop.round([generation])
            print(f"temperature {temperature}: prompt {number + 1}", file=sys.stderr, flush=True)
    n = arguments.draft_max
    return {
        "temperature": temperature,
        "n_places": len(accepted["residual"]),
        "rules": {
            rule: {
                "acceptance_rate": float(np.mean(values)) / n,
                "mean_accepted_length": 1.0 + float(np.mean(values)),
                "standard_error": float(np.std(values) / np.sqrt(len(values))) / n,
            }
            for rule, values in accepted.items()
        },
        "first_token_by_draft_shape": {k: float(np.mean(v)) for k, v in shaped.items()},
    }


def at(sampler: SamplerOptions, relative: float) -> SamplerOptions:
    return replace(sampler, temperature=sampler.temperature * relative)


class Place:
    """A place in a text, at which both models' caches can be asked what comes next."""

    def __init__(self, target: Backend, draft: Backend, text: Sequence[int], n: int) -> None:
        self._target, self._draft = target, draft
        self._text, self._n = list(text), n
        self._target_root = after(target, self._text, [])[0]
        self._draft_root = after(draft, self._text, [])[0]

    def shared(self, target_sampler: Sampler, draft_sampler: Sampler) -> float:
        """The sum of min(target, draft) for the next token."""
        target = target_sampler.distribution(self._target_root)
        return 1.0 - target.excess(draft_sampler.distribution(self._draft_root))

    def accepted(self, sampler: Sampler, rng: np.random.Generator) -> dict[str, float]:
        """The expected number of accepted tokens by rule."""
        drawn, drafts = self._drafted(sampler, rng)
        top, _ = self._drafted(None, rng)
        targets = [sampler.distribution(row) for row in after(self._target, self._text, drawn)]
        match = [sampler.distribution(row) for row in after(self._target, self._text, top)]
        return {
            "residual": by_token(drawn, targets, drafts),
            "block": as_a_block(drawn, targets, drafts),
            "match": by_match(top, match),
            "match, drawn": by_match(drawn, targets),
        }

    def _drafted(
        self, sampler: Sampler | None, rng: np.random.Generator
    ) -> tuple[list[int], list[Distribution]]:
        """A draft, and what its tokens were drawn from; without a sampler the likeliest one."""
        tokens: list[int] = []
        distributions: list[Distribution] = []
        row = self._draft_root
        while True:
            source = (
                sampler.distribution(row) if sampler else Distribution.certain(int(row.argmax()))
            )
            tokens.append(source.sample(rng))
            distributions.append(source)
            if len(tokens) == self._n:
                return tokens, distributions
            row = after(self._draft, self._text, tokens)[-1]


def after(backend: Backend, text: Sequence[int], draft: Sequence[int]) -> list[Logits]:
    """Return the rows after a text and after each token of a draft, copies of float32[n_vocab].

    As before a round, the cache then holds the text without its last token.
    """
    kept = min(backend.length(0), len(text) - 1)
    backend.remove(0, kept)
    whole = [*text, *draft]
    rows: list[Logits] = []
    n_batch = backend.n_batch
    for start in range(kept, len(whole), n_batch if kept == 0 else len(whole)):
        batch = Batch()
        for position in range(start, min(start + n_batch, len(whole))):
            batch.add(whole[position], position, (0,), position >= len(text) - 1)
        if sum(batch.wants_logits) > backend.n_outputs:  # a draft model has one row of logits
            batch.wants_logits[:-1] = [False] * (len(batch) - 1)
        rows += [row.copy() for row in backend.decode(batch)]
    backend.remove(0, len(text) - 1)
    return rows


def by_token(
    tokens: Sequence[int], targets: Sequence[Distribution], drafts: Sequence[Distribution]
) -> float:
    """Arithmetic of `ResidualVerifier`."""
    expected, alive = 0.0, 1.0
    for token, target, draft in zip(tokens, targets, drafts, strict=False):
        alive *= min(1.0, target.probability(token) / draft.probability(token))
        expected += alive
    return expected


def as_a_block(
    tokens: Sequence[int], targets: Sequence[Distribution], drafts: Sequence[Distribution]
) -> float:
    """Arithmetic of `BlockVerifier`."""
    ratio = 1.0
    chances: list[float] = []
    for index, token in enumerate(tokens):
        ratio *= targets[index].probability(token) / drafts[index].probability(token)
        ratio = min(1.0, ratio)
        if index + 1 == len(tokens):
            chances.append(ratio)
        else:
            excess = targets[index + 1].excess(drafts[index + 1], ratio)
            chances.append(excess / (excess + 1.0 - ratio) if excess > 0.0 else 0.0)
    expected, none_longer = 0.0, 1.0
    for chance in reversed(chances):
        none_longer *= 1.0 - chance
        expected += 1.0 - none_longer
    return expected


def by_match(tokens: Sequence[int], targets: Sequence[Distribution]) -> float:
    """Arithmetic of `MatchVerifier`."""
    expected, alive = 0.0, 1.0
    for token, target in zip(tokens, targets, strict=False):
        alive *= target.probability(token)
        expected += alive
    return expected


if __name__ == "__main__":
    sys.exit(main())
