"""How many draft tokens each verification rule accepts, on real models and prompts.

    python benchmarks/acceptance.py --target big.gguf --draft small.gguf --prompts prompts.jsonl

Two measurements, on the same prompts:

*Runs*: answers are generated with each verifier, and accepted tokens are counted. A round begins
where the last draft was rejected, which is often where the draft model predicts badly.

*Positions*: answers are sampled from the target alone. At evenly spaced positions in them, the
draft model drafts twice: once by sampling, once by taking its most likely tokens. The target's
distributions along a draft give the *expected* number of accepted tokens exactly, for every rule at
once. The only randomness left is in the positions and in the drafted tokens.

- residual, block: the sampled draft, verified token by token or as a block;
- match: the most likely draft, compared with tokens sampled from the target (as in llama.cpp);
- match, sampled: the sampled draft, compared in the same way.

It also sweeps the draft's temperature and top-k, and reports for each the probability that residual
sampling accepts the first token, which is the sum of min(target, draft).

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

from benchmarks.answers import answer, format_prompt
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
    if arguments.measure != "positions":
        result["runs"] = [
            run(arguments, prompts, temperature, verifier)
            for temperature in arguments.temp
            for verifier in arguments.verifiers
        ]
    if arguments.measure != "runs":
        result["positions"] = [
            measure_positions(arguments, prompts, temperature) for temperature in arguments.temp
        ]
    print(json.dumps(result))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How many draft tokens each verifier accepts.")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--draft", required=True, type=Path)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--measure", choices=("both", "runs", "positions"), default="both")
    parser.add_argument("--temp", type=float, nargs="+", default=[0.6, 0.8, 1.0])
    parser.add_argument("--verifiers", nargs="+", choices=VERIFIERS, default=VERIFIERS)
    parser.add_argument("-n", type=int, default=24, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum tokens per answer")
    parser.add_argument("--every", type=int, default=4, help="tokens between two positions")
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
    """Generate an answer to each prompt, and count accepted tokens."""
    n_tokens = n_rounds = n_drafted = n_accepted = 0
    with Session(options(arguments, temperature, verifier), time.perf_counter) as loaded:
        for prompt in prompts:
            finished = answer(loaded, prompt)
            n_tokens += finished.n_tokens
            n_rounds += finished.n_rounds
            n_drafted += finished.n_drafted
            n_accepted += finished.n_accepted
    result: dict[str, object] = {
        "temperature": temperature,
        "verifier": verifier,
        "n_tokens": n_tokens,
        "acceptance_rate": n_accepted / n_drafted,
        "mean_accepted_length": 1.0 + n_accepted / n_rounds,
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def measure_positions(
    arguments: argparse.Namespace, prompts: Sequence[str], temperature: float
) -> dict[str, object]:
    """Compute the expected number of accepted tokens at evenly spaced positions of answers."""
    session_options = options(arguments, temperature)
    target_options = session_options.sampler
    accepted: defaultdict[str, list[float]] = defaultdict(list)
    first_token: defaultdict[str, list[float]] = defaultdict(list)
    rng = np.random.default_rng(1)
    sampler = Sampler(target_options)
    sweep = {
        f"temperature x {factor}": Sampler(with_relative_temperature(target_options, factor))
        for factor in RELATIVE_TEMPERATURES
    }
    sweep |= {f"top-k {k}": Sampler(replace(target_options, top_k=k)) for k in TOP_K}
    with Session(session_options, time.perf_counter) as loaded:
        for number, prompt in enumerate(prompts):
            formatted = format_prompt(loaded, prompt)
            n_prompt = len(formatted.tokens)
            n_ctx = loaded.context_size(n_prompt)
            with loaded.contexts(n_ctx) as (target, (draft, *_)):
                generation = DrafterFactory(loaded).new_answer(formatted, n_ctx, (), number)
                loop = AnswerLoop(target, time.perf_counter)
                while not (generation.is_started or generation.is_finished):
                    loop.prefill(generation)
                while generation.finish_reason is None:
                    if (len(generation.tokens) - n_prompt) % arguments.every == 1:
                        position = Position(target, draft, generation.tokens, arguments.draft_max)
                        for rule, expected in position.expected_accepted(sampler, rng).items():
                            accepted[rule].append(expected)
                        for name, draft_sampler in sweep.items():
                            first_token[name].append(position.overlap(sampler, draft_sampler))
                    loop.round([generation])
            print(f"temperature {temperature}: prompt {number + 1}", file=sys.stderr, flush=True)
    n = arguments.draft_max
    return {
        "temperature": temperature,
        "n_positions": len(accepted["residual"]),
        "rules": {
            rule: {
                "acceptance_rate": float(np.mean(values)) / n,
                "mean_accepted_length": 1.0 + float(np.mean(values)),
                "standard_error": float(np.std(values) / np.sqrt(len(values))) / n,
            }
            for rule, values in accepted.items()
        },
        "first_token_by_draft_sampler": {
            name: float(np.mean(values)) for name, values in first_token.items()
        },
    }


def with_relative_temperature(sampler: SamplerOptions, factor: float) -> SamplerOptions:
    return replace(sampler, temperature=sampler.temperature * factor)


class Position:
    """A position in a text, with the logits of both models for the next token."""

    def __init__(
        self, target: Backend, draft: Backend, text: Sequence[int], n_drafted: int
    ) -> None:
        self._target = target
        self._draft = draft
        self._text = list(text)
        self._n_drafted = n_drafted
        self._target_root = logits_after(target, self._text, [])[0]
        self._draft_root = logits_after(draft, self._text, [])[0]

    def overlap(self, target_sampler: Sampler, draft_sampler: Sampler) -> float:
        """The sum of min(target, draft) for the next token."""
        target = target_sampler.distribution(self._target_root)
        return 1.0 - target.excess(draft_sampler.distribution(self._draft_root))

    def expected_accepted(self, sampler: Sampler, rng: np.random.Generator) -> dict[str, float]:
        """The expected number of accepted tokens by rule."""
        sampled, drafts = self._drafted(sampler, rng)
        likeliest, _ = self._drafted(None, rng)
        targets = self._target_distributions(sampler, sampled)
        return {
            "residual": by_token(sampled, targets, drafts),
            "block": as_a_block(sampled, targets, drafts),
            "match": by_match(likeliest, self._target_distributions(sampler, likeliest)),
            "match, sampled": by_match(sampled, targets),
        }

    def _target_distributions(self, sampler: Sampler, draft: Sequence[int]) -> list[Distribution]:
        rows = logits_after(self._target, self._text, draft)
        return [sampler.distribution(row) for row in rows]

    def _drafted(
        self, sampler: Sampler | None, rng: np.random.Generator
    ) -> tuple[list[int], list[Distribution]]:
        """Draft tokens; return them with the distributions that they were sampled from.

        Without a sampler, the draft consists of the most likely tokens.
        """
        tokens: list[int] = []
        distributions: list[Distribution] = []
        row = self._draft_root
        while True:
            source = (
                sampler.distribution(row) if sampler else Distribution.certain(int(row.argmax()))
            )
            tokens.append(source.sample(rng))
            distributions.append(source)
            if len(tokens) == self._n_drafted:
                return tokens, distributions
            row = logits_after(self._draft, self._text, tokens)[-1]


def logits_after(backend: Backend, text: Sequence[int], draft: Sequence[int]) -> list[Logits]:
    """Return the logits after a text and after each token of a draft, copies of float32[n_vocab].

    Afterwards the cache holds the text without its last token, as it does before a round.
    """
    n_cached = min(backend.length(0), len(text) - 1)
    backend.remove(0, n_cached)
    tokens = [*text, *draft]
    rows: list[Logits] = []
    n_batch = backend.n_batch
    for start in range(n_cached, len(tokens), n_batch if n_cached == 0 else len(tokens)):
        batch = Batch()
        for position in range(start, min(start + n_batch, len(tokens))):
            batch.add(tokens[position], position, (0,), position >= len(text) - 1)
        if sum(batch.wants_logits) > backend.n_outputs:  # a draft model outputs a single row
            batch.wants_logits[:-1] = [False] * (len(batch) - 1)
        rows += [row.copy() for row in backend.decode(batch)]
    backend.remove(0, len(text) - 1)
    return rows


def by_token(
    tokens: Sequence[int], targets: Sequence[Distribution], drafts: Sequence[Distribution]
) -> float:
    """The expected number of tokens that `ResidualVerifier` accepts."""
    expected = 0.0
    cumulative = 1.0
    for token, target, draft in zip(tokens, targets, drafts, strict=False):
        cumulative *= min(1.0, target.probability(token) / draft.probability(token))
        expected += cumulative
    return expected


def as_a_block(
    tokens: Sequence[int], targets: Sequence[Distribution], drafts: Sequence[Distribution]
) -> float:
    """The expected number of tokens that `BlockVerifier` accepts."""
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
    expected = 0.0
    # The probability that no prefix of at least this length is accepted.
    none_longer = 1.0
    for chance in reversed(chances):
        none_longer *= 1.0 - chance
        expected += 1.0 - none_longer
    return expected


def by_match(tokens: Sequence[int], targets: Sequence[Distribution]) -> float:
    """The expected number of tokens that `MatchVerifier` accepts."""
    expected = 0.0
    cumulative = 1.0
    for token, target in zip(tokens, targets, strict=False):
        cumulative *= target.probability(token)
        expected += cumulative
    return expected


if __name__ == "__main__":
    sys.exit(main())
