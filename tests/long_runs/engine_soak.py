"""Very many tokens through engines with every kind of draft in turn: memory and descriptors stay flat, and
texts are those of plain decoding.

    python -m tests.long_runs.engine_soak -m target.gguf -md draft.gguf -md other-vocabulary.gguf --tokens 1000000

Rows have to be exact for the texts to be compared: use the kernels. Each engine makes eight answers at a time, some
greedy, some with a seed, some cancelled in the middle; one in ten is made again without drafts.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import sys
import time
from pathlib import Path

import psutil

from specgen.llama.kernels.admission import choose_kernels
from specgen.models import cache_folder
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    parse_tree,
)
from specgen.session.engine import Engine
from specgen.session.memory import Memory
from specgen.session.request import Request
from specgen.session.session import Session

_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "sky",
    "is",
    "blue",
    "red",
    "why",
    "how",
    "def",
    "return",
    "x",
    "y",
    "(",
    ")",
    ":",
    "1",
    "2",
    "3",
    "and",
    "or",
    "\n",
]
_N_ANSWERS = 48
_SLACK_MB = 64
#: Drafting with each kind of draft: by cost, and always.
_DRAFTING = {
    "by cost": DraftOptions(),
    "chains": DraftOptions(policy="fixed", max_tokens=4, verifier="match", tree=parse_tree("off")),
    "trees": DraftOptions(policy="fixed", max_tokens=8, verifier="match"),
}


class EngineSoak:
    """Sessions on one target, and what was found."""

    def __init__(self, target: Path, seed: int, n_threads: int | None) -> None:
        self._target = target
        self._n_threads = n_threads
        self._chance = random.Random(seed)
        self._memory = Memory()
        self._process = psutil.Process()
        self.n_tokens = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[str] = []
        self.samples: list[tuple[int, float, int]] = []

    def go_on(self, draft: DraftSource, drafting: DraftOptions) -> None:
        """Make answers with a draft."""
        name = Path(draft).name
        asked = [self._wish() for _ in range(_N_ANSWERS)]
        with (
            self._loaded(draft, drafting) as loaded,
            Engine(loaded, n_parallel=8, n_ctx=768) as engine,
        ):
            answers = [
                engine.insert(loaded.prompts.of_text(text, chat=False), sampling=sampling)
                for text, sampling in asked
            ]
            cancelled = {answer for answer in answers if self._chance.random() < 0.2}
            for _ in engine.run():
                for answer in [each for each in cancelled if not each.is_done]:
                    if self._chance.random() < 0.02:
                        engine.cancel(answer)
        for answer in answers:
            assert answer.finished is not None
            self.n_tokens += answer.finished.n_tokens
            self.counts[f"{name}: {answer.finished.finish_reason}"] += 1
            self.counts[f"{name}: accepted"] += answer.finished.n_accepted
        self._compare(name, asked, answers)
        memory = self._process.memory_full_info().uss / 2**20
        self.samples.append((self.n_tokens, round(memory, 1), self._process.num_fds()))

    def _loaded(self, draft: DraftSource, drafting: DraftOptions) -> Session:
        generation = GenerationOptions(max_tokens=200)
        context = ContextOptions(n_threads=self._n_threads)
        options = SessionOptions(
            self._target,
            draft,
            target_context=context,
            draft_context=context,
            drafting=drafting,
            generation=generation,
        )
        return Session(options, time.perf_counter, self._memory)

    def _wish(self) -> tuple[str, SamplerOptions]:
        n = self._chance.randrange(1, 120)
        text = " ".join(self._chance.choice(_WORDS) for _ in range(n))
        if self._chance.random() < 0.5:
            return text, SamplerOptions()
        return text, SamplerOptions(temperature=0.9, seed=self._chance.randrange(2**31))

    def _compare(
        self, name: str, asked: list[tuple[str, SamplerOptions]], answers: list[Request]
    ) -> None:
        chosen = [number for number in range(len(asked)) if self._chance.random() < 0.1]
        if not chosen:
            return
        with self._loaded("none", DraftOptions()) as plain, Engine(plain, n_ctx=768) as engine:
            for number in chosen:
                text, sampling = asked[number]
                again = engine.insert(plain.prompts.of_text(text, chat=False), sampling=sampling)
                collections.deque(engine.run(), maxlen=0)
                found, expected = answers[number].finished, again.finished
                assert found is not None
                assert expected is not None
                self.counts["texts compared"] += 1
                if expected.token_ids[: len(found.token_ids)] != found.token_ids:
                    self.findings.append(f"{name}, {sampling.seed}, {text!r}: another text")


def main() -> int:
    """Make tokens, and see what is kept of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, action="append", default=[])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int, help="one does not wait for other programs")
    asked = parser.parse_args()
    choose_kernels("auto", cache_folder())
    soak = EngineSoak(asked.target, asked.seed, asked.threads)
    drafts: list[DraftSource] = ["ngram", *asked.draft]
    for draft, name in itertools.cycle(itertools.product(drafts, _DRAFTING)):
        soak.go_on(draft, _DRAFTING[name])
        sample = soak.samples[-1]
        print(f"{draft}, {name}: tokens, MB and descriptors {sample}", file=sys.stderr, flush=True)
        if soak.findings or soak.n_tokens >= asked.tokens:
            break
    after_warm_up = soak.samples[len(soak.samples) // 4]
    last = soak.samples[-1]
    if last[1] > after_warm_up[1] + _SLACK_MB or last[2] > after_warm_up[2]:
        soak.findings.append(f"tokens, MB and descriptors: {after_warm_up} became {last}")
    some = soak.samples[:: len(soak.samples) // 8 or 1]
    figures = {"n_tokens": soak.n_tokens, "counts": dict(sorted(soak.counts.items()))}
    print(json.dumps({**figures, "samples": some, "findings": soak.findings}, indent=1))
    return 1 if soak.findings else 0


if __name__ == "__main__":
    sys.exit(main())
