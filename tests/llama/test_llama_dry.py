"""DRY against llama.cpp's own, on vocabularies with breakers of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from specgen.llama import LlamaModel
from specgen.method.backend import Vocabulary
from specgen.options import SamplerOptions
from specgen.text.sampling import DryBreakers, Sampler
from tests.helpers.llama_samplers import assert_same, native_distribution
from tests.tiny import TinyConfig, write_tiny_model


@dataclass(frozen=True)
class Model:
    vocabulary: Vocabulary
    native: Any
    known: dict[tuple[str, ...], DryBreakers] = field(default_factory=dict)

    def breakers(self, texts: tuple[str, ...]) -> DryBreakers:
        if texts not in self.known:
            self.known[texts] = DryBreakers.of(self.vocabulary, texts)
        return self.known[texts]

    def tokens(self, text: str) -> list[int]:
        return self.vocabulary.tokenize(text, add_special=False, parse_special=True)


@pytest.fixture(scope="module", params=["bpe", "spm"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("dry") / "tiny.gguf"
    # Padding, whose tokens have names but no text.
    write_tiny_model(Path(path), TinyConfig(tokenizer=request.param, n_vocab=600))
    loaded = LlamaModel(path)
    try:
        yield Model(loaded.vocabulary, llama_cpp.llama_model_get_vocab(loaded.handle))
    finally:
        loaded.close()


def dry(**changes: Any) -> SamplerOptions:
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "dry_multiplier": 0.8,
        "dry_last_n": -1,
    }
    return SamplerOptions(**defaults | changes)


def check(model: Model, options: SamplerOptions, history: list[int], seed: int = 0) -> None:
    breakers = model.breakers(options.dry_breakers)
    logits = np.random.default_rng(seed).normal(0.0, 3.0, 600).astype(np.float32)
    before = logits.copy()
    ours = Sampler(options, breakers).distribution(logits, np.array(history, np.int64))
    assert (logits == before).all()
    assert_same(ours, native_distribution(logits, options, history, model.native))


#: Breakers of one token and of several, within tokens, across them, within a character, names of
#: control tokens, and what is longer than llama.cpp reads.
BREAKERS: list[tuple[str, ...]] = [
    (),
    ("\n", ":", '"', "*"),
    (" the",),
    ("the",),
    (" return self",),
    ("rn self",),
    ("n s", "urn", "\n\n\n"),
    ("é😀",),
    ("😀é",),
    ("the", "e in"),
    ("<|im_end|>\n", "_end|> in"),
    ("im_end",),
    (" ",),
    ("", "e t"),
    ("in the of the in the of the in the of the in the of the in",),
]
WORDS = (
    " the", " return", " self", "tion", " in", " of", "\n", "\n\n", "é", "😀", "a", ":", "th", "e",
    "<|im_end|>", " def",
)  # fmt: skip


@pytest.mark.parametrize("breakers", BREAKERS, ids=lambda breakers: "|".join(breakers) or "none")
def test_breakers_limit_repetitions_as_in_llama_cpp(
    model: Model, breakers: tuple[str, ...]
) -> None:
    rng = random.Random(str(breakers))
    for seed in range(20):
        # A passage, something else, and the passage's beginning once more.
        passage = [rng.choice(WORDS) for _ in range(rng.randint(3, 12))]
        if rng.random() < 0.5:
            passage.insert(rng.randrange(len(passage)), "".join(breakers))
        between = [rng.choice(WORDS) for _ in range(rng.randint(0, 6))]
        text = passage + between + passage[: rng.randint(1, len(passage))]
        history = model.tokens("".join(text))
        options = dry(dry_breakers=breakers, dry_allowed_length=rng.choice((1, 1, 2, 3)))
        check(model, options, history, seed)


@pytest.mark.parametrize("allowed_length", [-1, 0, 1, 2, 4, 30])
@pytest.mark.parametrize("last_n", [0, 1, 2, 3, 10, 64, -1])
def test_windows_and_allowed_lengths(model: Model, allowed_length: int, last_n: int) -> None:
    # Other histories in each case.
    chance = random.Random(f"{allowed_length} {last_n}")
    for seed in range(4):
        rng = random.Random(chance.random())
        history = [rng.randrange(3) + 60 for _ in range(rng.randint(0, 90))]
        options = dry(dry_allowed_length=allowed_length, dry_last_n=last_n, dry_breakers=())
        check(model, options, history, seed)


@pytest.mark.parametrize("base", [0.5, 1.0, 1.0000001, 1.1, 1.75, 4.0, 100.0])
@pytest.mark.parametrize("multiplier", [0.0, 0.1, 5.0])
def test_bases_and_the_largest_exponent(model: Model, base: float, multiplier: float) -> None:
    """Where base ** length is beyond float32, as for long repetitions of one token."""
    texts = [[65] * 400, [65, 66] * 200, list(range(65, 90)) * 12, [*range(65, 90), 70] * 12]
    for seed, history in enumerate(texts):
        options = dry(dry_base=base, dry_multiplier=multiplier, dry_breakers=("\n",))
        check(model, options, history, seed)


def test_dry_within_a_chain_after_top_k(model: Model) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        history = [rng.randrange(40) for _ in range(200)]
        options = dry(
            samplers=("top_k", "dry", "temperature", "min_p"),
            top_k=50,
            temperature=0.7,
            min_p=0.01,
            dry_allowed_length=1,
            dry_multiplier=3.0,
        )
        check(model, options, history, seed)
