"""A grammar's mask: the result is that of masking everything first, for few questions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from specgen.method.distribution import NoTokenAllowedError
from specgen.options import SamplerOptions
from specgen.system.arrays import BoolArray, Logits, TokenArray
from specgen.text.sampling import Sampler
from tests.method.test_sampling import HISTORIES, chains, rows


class Grammar:
    """Allows a set of tokens and counts how many it was asked about."""

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


def test_top_k_asks_about_k_tokens_where_all_are_allowed() -> None:
    grammar = only(N_VOCAB, RANKED)
    found = Sampler(TOP_K).distribution(LARGE, allows=grammar.allows)
    assert found.probs.tolist() == Sampler(TOP_K).distribution(LARGE).probs.tolist()
    assert grammar.n_asked == 40


@pytest.mark.parametrize(
    "options",
    [TOP_P, MIN_P, SamplerOptions(temperature=0.8, top_n_sigma=1.0)],
    ids=["no top-k", "min-p", "top-n-sigma first"],
)
def test_where_all_of_the_mask_matters_all_is_asked_once(options: SamplerOptions) -> None:
    grammar = only(N_VOCAB, RANKED[::2])
    Sampler(options).distribution(LARGE, allows=grammar.allows)
    assert grammar.n_asked == N_VOCAB


def test_tokens_that_cannot_be_anyway_are_not_asked_about() -> None:
    row = LARGE.copy()
    row[1000:] = -np.inf
    for options in (GREEDY, TOP_K, MIN_P, TOP_P):
        grammar = only(N_VOCAB, np.array([7]))
        found = Sampler(options).distribution(row, allows=grammar.allows)
        assert found.token_ids.tolist() == [7]
        assert grammar.n_asked <= 2000


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
