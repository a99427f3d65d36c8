"""A parallel draft model: what it predicts in one decode, and what is in its cache then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.parallel import ParallelDrafter
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import CostAwarePolicy, Offer, RoundPlan
from specgen.method.tables import CostTable
from specgen.options import DraftOptions, SamplerOptions, parse_tree
from specgen.text.text_state import TextState
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language
from tests.helpers.fake_generations import GREEDY, N_VOCAB, draft_request

LANGUAGE = random_language(N_VOCAB, seed=2)
LETTERS = FakeVocabulary.letters(N_VOCAB)
MASK = N_VOCAB - 1


def parallel(
    sampler: SamplerOptions = GREEDY, backend: FakeBackend | None = None, **fields: Any
) -> tuple[ParallelDrafter, FakeBackend]:
    """A parallel draft, its request having these `fields`."""
    backend = backend or FakeBackend(LETTERS, LANGUAGE, n_sequences=1)
    request = draft_request(TextState(()), sampler, **fields)
    return ParallelDrafter(backend, request, mask=MASK, n_shared_tokens=N_VOCAB), backend


def propose(drafter: ParallelDrafter, text: Sequence[int], n_max: int) -> Draft:
    return draft_alone(drafter.propose(text, RoundPlan("fixed", n_max)))


def predicted(text: Sequence[int], n: int) -> list[int]:
    """The likeliest tokens of the rows behind a text with masks."""
    return [int(LANGUAGE((*text, *[MASK] * i)).argmax()) for i in range(n)]


# --- one proposal


@pytest.mark.parametrize("n_max", [1, 2, 5, 16])
def test_one_decode_of_the_text_and_masks_predicts_all_tokens(n_max: int) -> None:
    drafter, backend = parallel()
    draft = propose(drafter, [1, 2, 3], n_max)
    assert list(draft.tokens) == predicted([1, 2, 3], n_max)
    assert draft.is_chain
    assert not draft.is_drawn
    assert backend.n_decodes == 1
    assert backend.decoded == [1, 2, 3, *[MASK] * (n_max - 1)]
    assert backend.text(0) == (1, 2, 3)


# --- the cache


steps = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=8
)


@given(steps, st.booleans())
def test_whatever_becomes_of_drafts_the_next_one_is_that_of_a_fresh_drafter(
    steps: list[tuple[int, int, int]], recurrent: bool
) -> None:
    rng = np.random.default_rng(4)
    drafter, backend = parallel(
        backend=FakeBackend(LETTERS, LANGUAGE, n_batch=6, n_sequences=1, recurrent=recurrent)
    )
    text: list[int] = []
    for n_kept, n_new, n_max in steps:
        if n_kept < len(text) and not recurrent:
            drafter.rewind(n_kept)
            del text[n_kept:]
        text += rng.integers(0, N_VOCAB, n_new).tolist()
        draft = propose(drafter, text, n_max)
        assert list(draft.tokens) == predicted(text, n_max)
        assert backend.text(0) == tuple(text)


def test_all_nodes_of_a_depth_have_children_from_one_row() -> None:
    sampler = SamplerOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
    drafter, backend = parallel(
        sampler, draws=False, branches=True, shape=parse_tree("3,2,1"), n_max=16
    )
    draft = propose(drafter, [1, 2, 3], 15)
    assert backend.decoded == [1, 2, 3, MASK, MASK]
    assert backend.text(0) == (1, 2, 3)
    likeliest = [LANGUAGE((1, 2, 3, *[MASK] * i)).argsort()[::-1] for i in range(3)]
    depths: list[int] = []
    for node, parent in enumerate(draft.parents):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        siblings = [n for n in range(node) if draft.parents[n] == parent]
        assert draft.tokens[node] == likeliest[depths[node]][len(siblings)]
    assert depths.count(0) == 3
    assert depths.count(1) == depths.count(2) == 6


# --- the policy


def predicted_rows(first_s: float, row_s: float) -> int:
    """How many tokens are predicted where a row of the draft's decode costs so much; 0 without a decode."""
    target = CostTable({n: 1.0 + 0.05 * n for n in range(1, 18)})
    own = CostTable({n: first_s + row_s * (n - 1) for n in range(1, 40)})
    drafter, backend = parallel(costs=own, n_max=16)
    policy = CostAwarePolicy(DraftOptions(max_tokens=16), target)
    plan = policy.plan(Offer(400, 16, drafter="model", price=drafter.price(1)))
    if plan.n_max:
        draft_alone(drafter.propose([1], plan))
    else:
        assert plan.reason == "row cost"
    return len(backend.decoded)


def test_the_decode_predicts_the_more_tokens_the_cheaper_its_rows_are() -> None:
    chosen = [predicted_rows(0.05, row_s) for row_s in (0.001, 0.02, 0.2, 2.0)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 4
    assert chosen[-1] <= 1
    assert predicted_rows(1.5, 1.5) == 0


def test_the_price_is_that_of_one_decode() -> None:
    costs = CostTable({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5, 64: 10.0})
    drafter, backend = parallel(costs=costs, n_max=6)
    price = drafter.price(1)
    assert price.seconds(1) == costs.seconds(1)
    assert price.seconds(6) == costs.seconds(6)
    propose(drafter, [1, 2, 3], 4)
    # Two accepted tokens and the target's own are read with the masks.
    price = drafter.price(6)
    assert price.seconds(1) == pytest.approx(costs.seconds(3))
    assert price.seconds(4) == pytest.approx(costs.seconds(6))
    assert price.prefill_s == 0.0
    # More than a round can bring is prefill.
    assert drafter.price(60).prefill_s > 0.0
    assert backend.text(0) == (1, 2, 3)
