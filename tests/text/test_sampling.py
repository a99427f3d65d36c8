"""Properties of all chains of samplers, DRY, and grammar masks.
`tests/llama/test_llama_sampling.py` compares samplers with llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from specgen.errors import BackendError, NoTokenAllowedError
from specgen.sampler_options import (
    DEFAULT_SAMPLERS,
    SamplerName,
    SamplerOptions,
    parse_samplers,
)
from specgen.system.arrays import BoolArray, Logits, TokenArray, best
from specgen.text.sampling.chain import Sampler, mixture
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.raw_probabilities import likeliest, numpy_likeliest
from tests.helpers.exact_distributions import distribution

#: Few distinct values make ties likely.
VALUES = st.sampled_from([-np.inf, -30.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 30.0]) | st.floats(
    -50, 50, width=32
)


def rows(max_size: int = 400) -> st.SearchStrategy[Logits]:
    shapes = st.integers(1, max_size)
    arrays = hnp.arrays(np.float32, shapes, elements=VALUES)
    return arrays.filter(lambda row: bool(np.isfinite(row.max())))


HISTORIES = hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(0, 12))


@st.composite
def chains(draw: st.DrawFn) -> SamplerOptions:
    """Any samplers in any order, each as likely on as off."""

    def maybe(off: float, *values: float) -> float:
        return draw(st.sampled_from([off, *values]))

    order = draw(st.permutations(DEFAULT_SAMPLERS))
    return SamplerOptions(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=int(maybe(0, 1, 5, 40)),
        top_p=maybe(1.0, 0.5, 0.9),
        min_p=maybe(0.0, 0.05, 0.5),
        samplers=tuple(order[: draw(st.integers(0, len(order)))]),
        repeat_last_n=int(maybe(64, -1, 3)),
        repeat_penalty=maybe(1.0, 1.2),
        presence_penalty=maybe(0.0, 0.7),
        frequency_penalty=maybe(0.0, 0.1),
        dry_multiplier=maybe(0.0, 0.8),
        dry_allowed_length=int(maybe(1, 2)),
        dry_last_n=int(maybe(64, -1, 10)),
        typical_p=maybe(1.0, 0.4, 0.9),
        top_n_sigma=maybe(-1.0, 0.8),
        xtc_probability=maybe(0.0, 0.4, 1.0),
        xtc_threshold=maybe(0.1, 0.01),
        dynatemp_range=maybe(0.0, 0.0, 0.5),
        logit_bias=draw(st.sampled_from([(), ((2, 1.5),), ((0, -4.0), (500, 2.0))])),
    )


@given(rows(3000), st.integers(0, 300))
def test_the_best_are_the_largest_and_the_lowest_ids_among_equals(row: Logits, k: int) -> None:
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
    expected = [token for token in ranked if row[token] > -np.inf]
    assert best(row, k).tolist() == expected


#: From a row of logits and n to the n most likely tokens and their probabilities.
Search: TypeAlias = Callable[[Logits, int], tuple[list[int], list[float]]]


@pytest.fixture(params=["kernels", "numpy"])
def search(request: pytest.FixtureRequest) -> Search:
    """The two ways to find the most likely tokens of a row."""
    if request.param == "numpy":
        return numpy_likeliest
    request.getfixturevalue("kernels")
    return likeliest


@pytest.mark.parametrize("n_vocab", [5, 4096, 4097, 30_000])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_the_likeliest_have_their_softmax_probabilities(
    search: Search, n_vocab: int, shift: float
) -> None:
    rng = np.random.default_rng(n_vocab)
    row = (rng.normal(0.0, 4.0, n_vocab) + shift).astype(np.float32)
    row[n_vocab // 3 : n_vocab // 2] = -np.inf
    row[-1] = row[0] = row.max()
    before = row.copy()
    tokens, chances = search(row, 4)
    assert np.array_equal(row, before)
    assert tokens == best(row, 4).tolist()
    assert search(row, 9)[0] == best(row, 9).tolist()
    masses = np.exp(row.astype(np.float64) - row.max())
    assert chances == pytest.approx((masses / masses.sum())[tokens], rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.1])
def test_logits_that_are_not_numbers_are_refused(
    bad: float, temperature: float, k: int, penalty: float
) -> None:
    row = np.full(500, bad if bad == -np.inf else 0.0, np.float32)
    row[77] = bad
    options = SamplerOptions(temperature, k, 1.0, repeat_penalty=penalty)
    with pytest.raises(BackendError):
        Sampler(options).distribution(row, np.array([77, 3]))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_logits_that_are_not_numbers_have_no_likeliest_token(search: Search, bad: float) -> None:
    row = np.full(500, bad if bad == -np.inf else 0.0, np.float32)
    row[77] = bad
    with pytest.raises(BackendError):
        search(row, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_every_token_is_an_error(temperature: float) -> None:
    options = SamplerOptions(temperature, logit_bias=((0, -np.inf), (1, -np.inf)))
    row = np.array([1.0, 2.0], np.float32)
    with pytest.raises(BackendError, match="leave no token"):
        Sampler(options).distribution(row)
    assert row.tolist() == [1.0, 2.0]


@settings(max_examples=300)
@given(rows(), HISTORIES, chains())
def test_any_chain_makes_a_distribution_and_leaves_the_logits_alone(
    row: Logits, history: TokenArray, options: SamplerOptions
) -> None:
    before = row.copy()
    sampler = Sampler(options)
    result = sampler.distribution(row, history)
    assert (row == before).all()
    assert result.probs.sum() == pytest.approx(1.0)
    assert (result.probs > 0.0).all()
    assert (np.diff(result.token_ids) > 0).all()
    assert (row[result.token_ids] > -np.inf).all()
    if not sampler.is_random:
        assert len(result.token_ids) == 1
    if sampler.greedy:
        assert len(result.token_ids) <= 2 ** options.samplers.count("xtc")


@given(rows(100), HISTORIES, HISTORIES, chains())
def test_only_the_last_tokens_it_asks_for_matter(
    row: Logits, history: TokenArray, drafted: TokenArray, options: SamplerOptions
) -> None:
    sampler = Sampler(options)
    text = np.concatenate((history, drafted))
    n = sampler.n_history
    whole = sampler.distribution(row, text)
    part = sampler.distribution(row, text[max(0, len(text) - n) :] if n >= 0 else text)
    assert part.token_ids.tolist() == whole.token_ids.tolist()
    assert part.probs.tolist() == whole.probs.tolist()


def test_without_a_temperature_among_the_samplers_tokens_are_drawn_at_temperature_1() -> None:
    row = np.array([1.0, 2.0, 0.0], np.float32)
    options = SamplerOptions(temperature=0.0, top_k=2, top_p=1.0, min_p=0.0, samplers=("top_k",))
    assert not options.greedy
    assert Sampler(options).is_random
    found = distribution(row, options)
    assert found.token_ids.tolist() == [0, 1]
    assert found.probs[1] / found.probs[0] == pytest.approx(np.e)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [5e-324, 1e-308, 1e-39, 1e-37])
@pytest.mark.parametrize("dynatemp_range", [0.0, 5e-324])
@pytest.mark.parametrize("later", [(), ("top_p",), ("min_p", "typ_p"), ("top_n_sigma",)])
def test_a_tiny_temperature_keeps_the_most_likely_token(
    value: float, dynatemp_range: float, later: tuple[SamplerName, ...]
) -> None:
    options = SamplerOptions(
        temperature=value,
        dynatemp_range=dynatemp_range,
        samplers=("temperature", *later),
        typical_p=0.5,
        top_n_sigma=1.0,
    )
    row = np.array([1.0, 20.0, 20.001, -300.0], np.float32)
    found = Sampler(options).distribution(row)
    assert found.token_ids.tolist() == [2]
    assert found.probs.tolist() == [1.0]


def test_a_dynamic_temperature_around_zero_is_not_greedy() -> None:
    options = SamplerOptions(temperature=0.0, dynatemp_range=1.0, min_p=0.0, top_p=1.0)
    assert not options.greedy
    flat = np.zeros(4, np.float32)
    assert distribution(flat, options).probs.tolist() == [0.25] * 4


def test_tokens_of_the_text_that_the_row_does_not_have_are_ignored() -> None:
    """A draft model may know fewer tokens than the target."""
    row = np.array([1.0, 2.0, 3.0], np.float32)
    for samplers in (DEFAULT_SAMPLERS, ("temperature", "penalties"), ("top_k", "penalties")):
        options = SamplerOptions(
            temperature=0.9,
            min_p=0.0,
            presence_penalty=1.0,
            samplers=samplers,
            logit_bias=((7, 1),),
        )
        found = Sampler(options).distribution(row, np.array([2, 9, 2]))
        expected = Sampler(options).distribution(row, np.array([2, 2]))
        assert found.probs.tolist() == expected.probs.tolist()


PROBS = hnp.arrays(np.float64, 8, elements=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0])).filter(
    lambda probs: bool(probs.sum() > 0)
)


def sparse(probs: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Distribution:
    ids = np.flatnonzero(probs)
    return Distribution(ids, probs[ids] / probs.sum())


def dense(source: Distribution) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    probs = np.zeros(8)
    probs[source.token_ids] = source.probs
    return probs


@given(PROBS, PROBS, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_a_mixture_is_the_weighted_sum(
    first: np.ndarray[tuple[int], np.dtype[np.float64]],
    second: np.ndarray[tuple[int], np.dtype[np.float64]],
    weight: float,
) -> None:
    mixed = mixture(weight, sparse(first), sparse(second))
    expected = weight * first / first.sum() + (1 - weight) * second / second.sum()
    assert dense(mixed) == pytest.approx(expected, abs=1e-12)
    assert (mixed.probs > 0).all()
    assert (np.diff(mixed.token_ids) > 0).all()


class Fixed:
    """A generator of one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    source = Distribution(np.array([2, 5, 9]), np.array([0.25, 0.5, 0.25]))
    for value, token in [(0.0, 2), (0.2499, 2), (0.25, 5), (0.7499, 5), (0.75, 9), (0.99999, 9)]:
        assert source.sample(Fixed(value)) == token  # type: ignore[arg-type]
    assert source.probability(5) == 0.5
    assert source.probability(4) == 0.0
    assert source.probability(10) == 0.0


def test_a_certain_token_does_not_move_the_generator() -> None:
    rng = np.random.default_rng(5)
    state = rng.bit_generator.state
    assert Distribution.certain(7).sample(rng) == 7
    assert rng.bit_generator.state == state
    Distribution(np.array([1, 2]), np.array([0.5, 0.5])).sample(rng)
    assert rng.bit_generator.state != state


def test_the_names_of_the_samplers() -> None:
    assert parse_samplers(";".join(DEFAULT_SAMPLERS)) == DEFAULT_SAMPLERS
    assert parse_samplers("top-k; TOPP,min-p , typ;nucleus;temp;topnsigma") == (
        "top_k",
        "top_p",
        "min_p",
        "typ_p",
        "top_p",
        "temperature",
        "top_n_sigma",
    )
    assert parse_samplers("") == ()
    assert parse_samplers("temp") == ("temperature",)
    assert parse_samplers("edskypmxt") == DEFAULT_SAMPLERS
    assert parse_samplers("tky") == ("temperature", "top_k", "typ_p")
    for text in ("top_q", "top_k;mirostat", "kq", "top_k top_p"):
        with pytest.raises(ValueError, match=r"^there is no sampler '[^\n]*$"):
            parse_samplers(text)


# --- a grammar's mask: the result is that of masking everything first, for few questions


class Grammar:
    """Allows a set of tokens, and counts the tokens that it checks."""

    def __init__(self, allowed: BoolArray) -> None:
        self.allowed = allowed
        self.n_asked = 0

    def allows(self, token_ids: TokenArray) -> BoolArray:
        self.n_asked += len(token_ids)
        answer: BoolArray = self.allowed[token_ids]
        return answer


def only(n_vocab: int, token_ids: TokenArray) -> Grammar:
    allowed = np.zeros(n_vocab, np.bool_)
    allowed[token_ids] = True
    return Grammar(allowed)


@settings(max_examples=400)
@given(rows(300), HISTORIES, chains(), st.integers(0, 2**32 - 1), st.sampled_from([0.02, 0.3, 0.9]))
# Two tokens whose probabilities are equal in float32 only.
@example(
    np.array([2.9829764e-10, 0.0], np.float32),
    np.zeros(0, np.int64),
    SamplerOptions(temperature=0.0, samplers=("typ_p",), typical_p=0.4),
    0,
    0.9,
)
def test_asking_late_is_the_same_as_masking_first(
    row: Logits, history: TokenArray, options: SamplerOptions, seed: int, share: float
) -> None:
    grammar = Grammar(np.random.default_rng(seed).random(len(row)) < share)
    masked = np.where(grammar.allowed, row, np.float32(-np.inf))
    assume(masked.max() > -np.inf)
    before = row.copy()
    sampler = Sampler(options)
    found = sampler.distribution(row, history, grammar.allows)
    expected = sampler.distribution(masked, history)
    assert (row == before).all()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.probs == pytest.approx(expected.probs, rel=1e-5)


N_VOCAB = 100_000
LARGE = np.random.default_rng(1).normal(0.0, 3.0, N_VOCAB).astype(np.float32)
RANKED = (-LARGE).argsort(kind="stable")
GREEDY = SamplerOptions()
TOP_K = SamplerOptions(temperature=0.8)
MIN_P = SamplerOptions(temperature=0.8, top_k=0, top_p=1.0, min_p=0.1)
TOP_P = SamplerOptions(temperature=0.8, top_k=0)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 10, 100, 5000, 99_999])
def test_greedy_asks_about_few_more_than_come_before_the_best_allowed(rank: int) -> None:
    grammar = only(N_VOCAB, RANKED[rank::7])
    found = Sampler(GREEDY).distribution(LARGE, allows=grammar.allows)
    assert found.token_ids.tolist() == [RANKED[rank]]
    few = 1 if rank == 0 else 17 if rank < 16 else 1 + 16 + 128
    assert grammar.n_asked <= (few if rank < 128 else N_VOCAB + few)


@pytest.mark.parametrize("options", [GREEDY, TOP_K, MIN_P, TOP_P])
def test_a_grammar_that_allows_nothing_is_an_error(options: SamplerOptions) -> None:
    row = LARGE[:500].copy()
    row[3] = -np.inf
    for grammar in (only(500, np.zeros(0, np.int64)), only(500, np.array([3]))):
        with pytest.raises(NoTokenAllowedError, match="the grammar allows no token here"):
            Sampler(options).distribution(row, allows=grammar.allows)


def test_a_grammar_that_fails_leaves_the_logits_as_they_were() -> None:
    row = LARGE[:500].copy()

    def allows(token_ids: TokenArray) -> BoolArray:
        raise KeyError(len(token_ids))

    options = SamplerOptions(1.0, logit_bias=((3, 5.0),), repeat_penalty=2.0, dry_multiplier=1.0)
    with pytest.raises(KeyError):
        Sampler(options).distribution(row, np.array([5, 6, 7, 5, 6, 7]), allows)
    assert (row == LARGE[:500]).all()
