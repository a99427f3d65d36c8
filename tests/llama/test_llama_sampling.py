"""Our samplers agree with llama.cpp's, including DRY with all kinds of breakers."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specgen.llama import LlamaVocabulary
from specgen.options import DEFAULT_SAMPLERS, SamplerName, SamplerOptions
from specgen.system.arrays import Logits, TokenArray
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.dry import DryBreakers
from tests.helpers.common import UNFILTERED
from tests.helpers.llama_samplers import as_dict, assert_same, native_distribution
from tests.helpers.tiny import vocabulary_of

pytestmark = pytest.mark.slow


def options(**changes: object) -> SamplerOptions:
    return dataclasses.replace(UNFILTERED, **changes)  # type: ignore[arg-type]


def row(n_vocab: int, scale: float, seed: int) -> Logits:
    return np.random.default_rng(seed).normal(0.0, scale, n_vocab).astype(np.float32)


def with_impossible(logits: Logits, seed: int) -> Logits:
    """A fifth of the tokens, not the best one, cannot be."""
    chosen = np.random.default_rng(seed).random(len(logits)) < 0.2
    chosen[logits.argmax()] = False
    return np.where(chosen, np.float32(-np.inf), logits)


def spike(n_vocab: int) -> Logits:
    logits = np.full(n_vocab, -100.0, np.float32)
    logits[n_vocab // 2] = 100.0
    return logits


RANDOM_ROWS = {
    "flat-ish": row(300, 0.3, 1),
    "usual": row(300, 3.0, 2),
    "peaked": row(300, 12.0, 3),
    "large": row(3000, 4.0, 4),
    "tiny": row(2, 1.0, 5),
}
NASTY_ROWS = {
    "one token": np.array([1.5], np.float32),
    "constant": np.full(97, -2.5, np.float32),
    "ties": np.repeat(np.array([3.0, 2.0, 1.0, -4.0], np.float32), 16),
    "two equal best": np.array([0.0, 5.0, 1.0, 5.0], np.float32),
    "huge": row(200, 1e30, 6),
    "minute": row(200, 1e-30, 7),
    "negative": row(200, 2.0, 8) - 1000,
    "spike": spike(500),
    "impossible": with_impossible(row(300, 3.0, 9), 10),
    "all but one impossible": np.array([-np.inf, -np.inf, 0.5, -np.inf], np.float32),
}
ROWS = RANDOM_ROWS | NASTY_ROWS


def check(logits: Logits, chosen: SamplerOptions, history: TokenArray | None = None) -> None:
    text = np.zeros(0, np.int64) if history is None else history
    ours = Sampler(chosen).distribution(logits.copy(), text)
    assert_same(ours, native_distribution(logits, chosen, text.tolist()))


#: Rows in which no token's probability is zero in float32.
POSSIBLE = [name for name, r in ROWS.items() if float(r.max()) - float(r.min()) < 80]
#: None of them a multiple of 1/40, 1/97 or 1/200, the probabilities in flat rows: on the border
#: between two equal tokens, rounding decides.
SHARES = (0.0, 0.1013, 0.5127, 0.9017, 0.9501)
#: What each sampler is given.
ALONE: dict[str, list[dict[str, float]]] = {
    "top_k": [{"top_k": k} for k in (1, 2, 7, 299, 300, 10_000)],
    "top_p": [{"top_p": p} for p in SHARES],
    "min_p": [{"min_p": p} for p in (0.001, 0.05, 0.4, 1.0)],
    "typical": [{"typical_p": p} for p in SHARES],
    "top_n_sigma": [{"top_n_sigma": n} for n in (0.3, 1.0, 2.2, 100.0)],
    "temperature": [{"temperature": t} for t in (0.0, 0.01, 0.3, 0.8, 1.7, 20.0)],
    "dynamic temperature": [
        {"temperature": t, "dynatemp_range": spread, "dynatemp_exponent": exponent}
        for t, spread in ((0.8, 0.5), (1.0, 3.0), (0.0, 1.5))
        for exponent in (0.5, 1.0, 2.0)
    ],
}
#: Where llama.cpp's own arithmetic in float32 breaks: it squares logits, and divides them by
#: temperatures.
BREAKS = {"top_n_sigma": {"huge", "minute"}, "typical": {*ROWS} - {*POSSIBLE}}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sampler", ALONE)
def test_a_sampler_alone_and_after_top_k(sampler: str, name: str) -> None:
    if name in BREAKS.get(sampler, ()):
        pytest.skip("llama.cpp's arithmetic breaks")
    for given in ALONE[sampler]:
        if name == "huge" and sampler == "temperature" and given["temperature"] < 1.0:
            continue
        for k in (0, 40):
            check(ROWS[name], options(**{"top_k": k, **given}))


def test_typical_ignores_tokens_without_probability_where_llama_cpp_has_nan() -> None:
    """0 log 0 is NaN in llama.cpp, so every distance from the entropy is, and it sorts by
    these: no matter what p is, it keeps an arbitrary start of its list."""
    possible = row(50, 2.0, 11)
    padded = np.concatenate((possible, np.full(5, -np.inf, np.float32)))
    chosen = options(typical_p=0.5)
    ours = Sampler(chosen).distribution(padded)
    assert_same(ours, native_distribution(possible, chosen))
    # The most typical tokens are not the most likely ones here; llama.cpp takes the latter.
    theirs = native_distribution(padded, chosen)
    assert set(theirs) != set(as_dict(ours))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("threshold", [0.0, 0.004, 0.1, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("k", [0, 40])
def test_xtc_is_the_mixture_of_llama_cpps_two_outcomes(name: str, threshold: float, k: int) -> None:
    """At probability 1 it always excludes, at 0 it never does."""
    if name in ("impossible", "all but one impossible", "spike") and threshold == 0.0:
        pytest.skip("llama.cpp may keep a token whose probability is 0, and that one only")
    check(ROWS[name], options(xtc_probability=1.0, xtc_threshold=threshold, top_k=k))
    if name in ("constant", "ties", "minute"):
        return  # which of the equal tokens is kept is not defined there
    chosen = options(
        xtc_probability=0.3, xtc_threshold=threshold, top_k=k, min_p=0.001, temperature=0.9
    )
    with_removal, without = (
        native_distribution(ROWS[name], dataclasses.replace(chosen, xtc_probability=p))
        for p in (1.0, 0.0)
    )
    mixture = {
        token: 0.3 * with_removal.get(token, 0.0) + 0.7 * without.get(token, 0.0)
        for token in with_removal | without
    }
    assert_same(Sampler(chosen).distribution(ROWS[name].copy()), mixture)


def test_a_bias_of_the_same_token_twice_is_added_twice() -> None:
    pairs = ((3, 1.5), (7, -np.inf), (3, 1.0), (11, -2.0))
    for order in (DEFAULT_SAMPLERS, ("temperature", "top_k")):
        check(ROWS["usual"], options(logit_bias=pairs, top_k=20, samplers=order, temperature=0.7))


def random_options(rng: random.Random) -> SamplerOptions:
    """Any samplers in any order; each as likely on as off."""

    def maybe(off: float, *values: float) -> float:
        return rng.choice(values) if rng.random() < 0.5 else off

    samplers: list[SamplerName] = [name for name in DEFAULT_SAMPLERS if name != "dry"]
    if rng.random() < 0.7:
        rng.shuffle(samplers)
    return SamplerOptions(
        temperature=maybe(1.0, 0.0, 0.3, 0.8, 1.6),
        top_k=int(maybe(0, 3, 20, 60)),
        top_p=maybe(1.0, 0.3, 0.77, 0.943),
        min_p=maybe(0.0, 0.0123, 0.157),
        samplers=tuple(samplers[: rng.randint(3, 8)]),
        repeat_last_n=int(maybe(64, -1, 0, 1, 10)),
        repeat_penalty=maybe(1.0, 0.7, 1.1, 1.5),
        presence_penalty=maybe(0.0, 0.21, 1.3),
        frequency_penalty=maybe(0.0, -0.1, 0.12),
        typical_p=maybe(1.0, 0.33, 0.912),
        top_n_sigma=maybe(-1.0, 0.71, 1.93),
        xtc_probability=maybe(0.0, 1.0),
        xtc_threshold=rng.choice((0.023, 0.137)),
        dynatemp_range=maybe(0.0, 0.0, 0.45),
        dynatemp_exponent=rng.choice((1.0, 1.7)),
        logit_bias=((3, 2.25), (17, -1.5), (20, -np.inf)) if rng.random() < 0.3 else (),
    )


def breaks_typical(chosen: SamplerOptions) -> bool:
    """Whether llama.cpp's typical sampler may meet tokens whose probability is 0 in float32
    (see above): forbidden ones, or at a low temperature."""
    if "typ_p" not in chosen.samplers or chosen.typical_p >= 1.0:
        return False
    before = chosen.samplers[: chosen.samplers.index("typ_p")]
    return (
        bool(chosen.logit_bias)
        or (chosen.top_n_sigma > 0 and "top_n_sigma" in before)
        or "temperature" in before
    )


@pytest.mark.parametrize("seed", range(200))
def test_any_chain_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    chosen = random_options(rng)
    while breaks_typical(chosen):
        chosen = random_options(rng)
    logits = row(rng.choice((30, 150)), rng.choice((1.0, 2.5, 4.0)), seed)
    history = np.array([rng.randrange(30) for _ in range(rng.randint(0, 100))], np.int64)
    theirs = native_distribution(logits, chosen, history.tolist())
    before = logits.copy()
    ours = Sampler(chosen).distribution(logits, history)
    assert (logits == before).all()
    assert_same(ours, theirs)


def test_the_mixture_at_temperature_zero_has_two_certain_tokens() -> None:
    logits = np.array([2.0, 1.0, 1.9, -3.0], np.float32)
    chosen = options(temperature=0.0, xtc_probability=0.25, xtc_threshold=0.1)
    found = Sampler(chosen).distribution(logits)
    assert as_dict(found) == pytest.approx({0: 0.75, 1: 0.25})
    assert isinstance(found, Distribution)


# --- DRY


@pytest.fixture(scope="module", params=["bpe", "spm"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaVocabulary]:
    # Padding, whose tokens have names but no text.
    folder = tmp_path_factory.mktemp("dry")
    with vocabulary_of(folder, tokenizer=request.param, n_vocab=600) as found:
        yield found


def check_dry(
    vocabulary: LlamaVocabulary, history: list[int], seed: int = 0, **changes: Any
) -> None:
    chosen = options(**{"dry_multiplier": 0.8, "dry_last_n": -1, **changes})
    logits = row(600, 3.0, seed)
    before = logits.copy()
    ours = Sampler(chosen, DryBreakers.of(vocabulary, chosen.dry_breakers))
    found = ours.distribution(logits, np.array(history, np.int64))
    assert (logits == before).all()
    assert_same(found, native_distribution(logits, chosen, history, vocabulary.handle))


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
    vocabulary: LlamaVocabulary, breakers: tuple[str, ...]
) -> None:
    rng = random.Random(str(breakers))
    for seed in range(20):
        # A passage, something else, and the passage's beginning once more.
        passage = [rng.choice(WORDS) for _ in range(rng.randint(3, 12))]
        if rng.random() < 0.5:
            passage.insert(rng.randrange(len(passage)), "".join(breakers))
        between = [rng.choice(WORDS) for _ in range(rng.randint(0, 6))]
        text = passage + between + passage[: rng.randint(1, len(passage))]
        history = vocabulary.tokenize("".join(text), add_special=False, parse_special=True)
        allowed = rng.choice((1, 1, 2, 3))
        check_dry(vocabulary, history, seed, dry_breakers=breakers, dry_allowed_length=allowed)


@pytest.mark.parametrize("allowed_length", [0, 1, 2, 4, 30])
@pytest.mark.parametrize("last_n", [0, 1, 2, 3, 10, 64, -1])
def test_windows_and_allowed_lengths(
    vocabulary: LlamaVocabulary, allowed_length: int, last_n: int
) -> None:
    # Other histories in each case.
    chance = random.Random(f"{allowed_length} {last_n}")
    for seed in range(4):
        rng = random.Random(chance.random())
        history = [rng.randrange(3) + 60 for _ in range(rng.randint(0, 90))]
        limits = {"dry_allowed_length": allowed_length, "dry_last_n": last_n}
        check_dry(vocabulary, history, seed, dry_breakers=(), **limits)


@pytest.mark.parametrize("base", [0.5, 1.0, 1.0000001, 1.1, 1.75, 4.0, 100.0])
@pytest.mark.parametrize("multiplier", [0.0, 0.1, 5.0])
def test_bases_and_the_largest_exponent(
    vocabulary: LlamaVocabulary, base: float, multiplier: float
) -> None:
    """Where base ** length is beyond float32, as for long repetitions of one token."""
    texts = [[65] * 400, [65, 66] * 200, list(range(65, 90)) * 12, [*range(65, 90), 70] * 12]
    for seed, history in enumerate(texts):
        strength = {"dry_base": base, "dry_multiplier": multiplier}
        check_dry(vocabulary, history, seed, dry_breakers=("\n",), **strength)


def test_dry_within_a_chain_after_top_k(vocabulary: LlamaVocabulary) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        history = [rng.randrange(40) for _ in range(200)]
        check_dry(
            vocabulary,
            history,
            seed,
            samplers=("top_k", "dry", "temperature", "min_p"),
            top_k=50,
            temperature=0.7,
            min_p=0.01,
            dry_allowed_length=1,
            dry_multiplier=3.0,
        )
