"""Draft models: alone, with n-grams, and with their own drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.staged import DraftGuesser
from specgen.method.cascade import Cascade
from specgen.method.draft import Draft
from specgen.method.drafter import draft_alone, propose_together
from specgen.method.policy import FixedPolicy, RoundPlan, RoundResult
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.stopping import StoppingRule
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, SamplerOptions, parse_tree
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language
from tests.helpers.fake_generations import N_VOCAB, Clock, NoDrafter, draft_request, model_drafter

LANGUAGE = random_language(N_VOCAB, seed=2)
LETTERS = FakeVocabulary.letters(N_VOCAB)


def propose(drafter: ModelDrafter, context: Sequence[int], n_max: int, p_min: float = 0.0) -> Draft:
    """A draft of `n_max` tokens, or until one is less likely than `p_min`."""
    plan = replace(
        RoundPlan("fixed", n_max), stop=StoppingRule(p_min, needs_confidence=p_min > 0.0)
    )
    return draft_alone(drafter.propose(context, plan))


# --- a draft model


def test_an_interruption_ends_the_prefill_of_a_long_text() -> None:
    drafter, backend = model_drafter(LANGUAGE, LETTERS, n_batch=8)
    context = [n % N_VOCAB for n in range(100)]
    asked = iter(range(100))
    (proposal,) = propose_together(
        [drafter.propose(context, RoundPlan("fixed", 4))], Clock(), lambda: next(asked) >= 2
    )
    assert backend.length(0) == 16  # two pieces of 8
    assert (len(proposal.draft), proposal.error) == (0, None)


def test_drafting_stops_where_the_model_is_unsure() -> None:
    for p_min in (0.2, 0.4, 0.6, 0.9):
        drafter, _ = model_drafter(LANGUAGE, LETTERS)
        draft = propose(drafter, [1, 2, 3], 16, p_min)
        text = [1, 2, 3]
        for token in draft.tokens:
            row = LANGUAGE(tuple(text)).astype(np.float64)
            assert 1 / np.exp(row - row.max()).sum() >= p_min
            text.append(token)
        row = LANGUAGE(tuple(text)).astype(np.float64)
        assert len(draft) == 16 or 1 / np.exp(row - row.max()).sum() < p_min


def test_drafting_ends_with_an_end_token_and_skips_tokens_that_are_biased_away() -> None:
    first = int(LANGUAGE((1, 2, 3)).argmax())
    ending = FakeVocabulary.letters(N_VOCAB, ends=[first])
    drafter, _ = model_drafter(LANGUAGE, ending)
    assert propose(drafter, [1, 2, 3], 8).tokens == (first,)
    drafter, _ = model_drafter(LANGUAGE, ending, SamplerOptions(logit_bias=((first, -math.inf),)))
    draft = propose(drafter, [1, 2, 3], 8)
    assert len(draft) == 8
    assert first not in draft.tokens
    drafter, _ = model_drafter(LANGUAGE, LETTERS, n_shared_tokens=4)
    assert max(propose(drafter, [1, 2, 3], 8).tokens) < 4


# --- a text that outgrows the draft model's context


def grown(
    n_ctx: int, n_tokens: int, n_max: int = 4, n_step: int = 1
) -> Iterator[tuple[list[int], Draft, FakeBackend, int]]:
    """A text of random tokens that grows by `n_step` of them; after each step, the text, the
    draft, the backend and how many rows the proposal decoded."""
    drafter, backend = model_drafter(LANGUAGE, LETTERS, n_ctx=n_ctx, n_batch=8)
    tokens = np.random.default_rng(3).integers(0, N_VOCAB, n_tokens).tolist()
    for length in range(1, n_tokens + 1, n_step):
        n_before = backend.n_decoded_rows
        draft = propose(drafter, tokens[:length], n_max)
        yield tokens[:length], draft, backend, backend.n_decoded_rows - n_before


@pytest.mark.parametrize("n_ctx", [10, 11, 16, 33, 64])
@pytest.mark.parametrize("n_max", [1, 4, 8, 40])
@pytest.mark.parametrize("n_step", [1, 3])
def test_drafting_continues_when_the_text_outgrows_the_context(
    n_ctx: int, n_max: int, n_step: int
) -> None:
    n_rows = n_drafted = 0
    is_whole = True
    for context, draft, backend, n_decoded in grown(n_ctx, 5 * n_ctx, n_max, n_step):
        held = backend.text(0)
        n_ahead = max(0, len(draft) - 1)
        assert len(held) <= n_ctx
        seen = held[: len(held) - n_ahead]
        # The text's first few tokens and the latest; all of it while there is room.
        n_latest = len(seen) - 4
        is_whole = seen == tuple(context)
        assert is_whole or seen == (*context[:4], *context[len(context) - n_latest :])
        assert is_whole or len(seen) >= n_ctx // 2
        # What follows is the most likely text after what the model sees.
        assert 1 <= len(draft) <= n_max
        assert len(draft) == n_max or len(draft) >= max(1, n_ctx // 4)
        for node, token in enumerate(draft.tokens):
            assert token == int(LANGUAGE((*seen, *draft.tokens[:node])).argmax())
        n_drafted += len(draft)
        n_rows += n_decoded
    assert not is_whole
    # The drafted tokens, the text, and half a context whenever the rest is used up.
    assert n_rows <= n_drafted + (1 + (n_ctx / 2) / max(1, n_ctx / 4 - 4)) * 5 * n_ctx


@pytest.mark.parametrize("n_ctx", range(1, 10))
def test_a_tiny_context_is_used_while_it_lasts(n_ctx: int) -> None:
    """It is too small for a beginning and an end of the text."""
    lengths = [
        (len(context), len(draft)) for context, draft, _, _ in grown(n_ctx, 24) if len(draft)
    ]
    assert lengths[0][0] == 1
    assert max(context for context, _ in lengths) >= n_ctx - max(1, n_ctx // 4)
    assert all(context <= n_ctx for context, _ in lengths)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8))
def test_a_window_that_is_rewound_agrees_with_the_text(steps: list[tuple[int, int]]) -> None:
    rng = np.random.default_rng(4)
    drafter, backend = model_drafter(LANGUAGE, LETTERS, n_ctx=24)
    text: list[int] = []
    for n_kept, n_new in steps:
        if n_kept < len(text):
            drafter.rewind(n_kept)
            del text[n_kept:]
        text += rng.integers(0, N_VOCAB, n_new).tolist()
        draft = propose(drafter, text, 3)
        assert len(draft) == 3
        seen = backend.text(0)[:-2]
        n_latest = len(seen) - 4
        assert seen in (tuple(text), (*text[:4], *text[len(text) - n_latest :]))
        assert draft.tokens[0] == int(LANGUAGE(seen).argmax())


def test_a_window_of_a_long_text_is_read() -> None:
    rng = np.random.default_rng(5)
    drafter, backend = model_drafter(LANGUAGE, LETTERS, n_ctx=4096)
    text = rng.integers(0, N_VOCAB, 125).tolist()
    for n_new, n_seen in ((0, 125), (100, 225), (150, 64), (75, 139), (5, 144)):
        text += rng.integers(0, N_VOCAB, n_new).tolist()
        n_decoded, length = backend.n_decoded_rows, backend.length(0)
        assert drafter.n_to_decode(len(text)) <= 128
        draft = propose(drafter, text, 3)
        seen = backend.text(0)[:-2]
        assert seen == (*text[:4], *text[len(text) - (n_seen - 4) :])
        assert draft.tokens[0] == int(LANGUAGE(seen).argmax())
        n_read = 64 if n_seen == 64 else n_seen - length + 2
        assert backend.n_decoded_rows - n_decoded <= n_read + 2


TEXT = [1, 2, 3]


# --- tokens between the text and a draft


class NotingPipeline(SamplingPipeline):
    """A sampling pipeline that records the drafted tokens of each call."""

    def __init__(self, state: TextState) -> None:
        super().__init__(Sampler(SamplerOptions()), state)
        self.drafted: list[tuple[int, ...]] = []

    def distribution(self, logits: Logits, drafted: Sequence[int] = ()) -> Distribution:
        self.drafted.append(tuple(drafted))
        return super().distribution(logits, drafted)


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_model_knows_the_tokens_between_the_text_and_its_draft(is_tree: bool) -> None:
    """Penalties and grammars depend on it."""
    state = TextState(TEXT)
    pipeline = NotingPipeline(state)
    backend = FakeBackend(LETTERS, LANGUAGE, n_ctx=64, n_sequences=4)
    request = draft_request(state, pipeline, can_branch=is_tree, shape=parse_tree("1,1,1"))
    model = ModelDrafter(backend, request, n_shared_tokens=N_VOCAB)
    draft = draft_alone(model.propose([*TEXT, 4, 5], RoundPlan("fixed", 3), 2))
    assert len(draft) == 3
    assert pipeline.drafted[:3] == [(4, 5, *draft.tokens[:n]) for n in range(3)]


# --- a draft for the draft model


class Guessing(NoDrafter):
    """Guesses 4, 5, 6, 7."""

    def draft(self, context: Sequence[int], n_max: int) -> Draft:
        return Draft.chain([4, 5, 6, 7][:n_max], "model")


class NotingPolicy(FixedPolicy):
    """A policy that keeps the results of its rounds."""

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self.results: list[RoundResult] = []

    def observe(self, result: RoundResult) -> None:
        self.results.append(result)


@pytest.mark.parametrize(
    ("drafted", "n_right", "committed"),
    [
        ([9, 4, 5, 6, 7], 3, (4, 5, 6, 7)),
        ([9, 4, 5, 6], 3, (4, 5, 6)),
        ([9, 4, 8], 1, (4, 8)),
        ([9, 8], 0, (8,)),
    ],
)
def test_the_draft_models_own_tokens_settle_a_guess(
    drafted: list[int], n_right: int, committed: tuple[int, ...]
) -> None:
    policy = NotingPolicy(DraftOptions("fixed", 3, p_min=0.0))
    guesser = DraftGuesser(Cascade(model=Guessing()), policy)
    with pytest.raises(StopIteration) as ended:
        next(guesser.guess(TEXT, [9], 5, 0))
    assert list(ended.value.value) == [4, 5, 6]
    guesser.observe_decode(2.0)
    guesser.settle(drafted)
    guesser.settle(drafted)  # it is settled once
    (result,) = policy.results
    # Guesses after the last token that the model drafted are not judged.
    assert (result.draft.tokens, result.target_s) == ((4, 5, 6)[: len(committed)], 2.0)
    assert (result.path, result.committed) == (tuple(range(n_right)), committed)
    # The tokens that a decode confirms share its time.
    assert guesser.token_s(9.0) == pytest.approx(2.0 / (n_right + 1))
