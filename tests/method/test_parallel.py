"""A parallel draft model: its mask token, its predictions in one decode, and its cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.interface import DraftRequest
from specgen.drafters.parallel import ParallelDrafter
from specgen.drafters.standalone import StandaloneDraft
from specgen.errors import UsageError
from specgen.events import DraftedEvent, FinishedEvent
from specgen.method.acceptance import AcceptanceCounts
from specgen.method.cost_table import CostTable
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import CostAwarePolicy, Offer, RoundPlan
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, SamplerOptions, TreeShape, parse_tree
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import generate
from specgen.session.session import Session
from specgen.text.sampling.chain import Sampler
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language
from tests.helpers.fake_generations import GREEDY, N_VOCAB, draft_request
from tests.helpers.sessions import finished, opened
from tests.tiny import Architecture, TinyConfig, write_tiny_model

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
    """The most likely tokens of the rows of a text and of the masks after it."""
    return [int(LANGUAGE((*text, *[MASK] * i)).argmax()) for i in range(n)]


# --- the cache


steps = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=8
)


@given(steps, st.booleans())
def test_the_next_draft_is_that_of_a_fresh_drafter_after_any_verdict(
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
        sampler, is_sampled=False, can_branch=True, shape=parse_tree("3,2,1"), n_max=16
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
    """How many tokens are predicted at a given cost of a row of the draft; 0 without a decode."""
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


# --- the mask: where it comes from, and what it changes for models of llama.cpp

NAMED_MASK = 3
IN_METADATA = {"tokenizer.ggml.mask_token_id": NAMED_MASK}
PROMPT = "the cat sat on the mat, and the dog sat on the"


def models(
    folder: Path,
    name: str = "PARD-Tiny",
    metadata: Mapping[str, int] | None = None,
    *,
    mask: str = "auto",
    file: str = "draft",
    architecture: Architecture = "llama",
    n_max: int = 4,
    further_drafts: tuple[Path, ...] = (),
) -> Session:
    config = TinyConfig(architecture=architecture, logit_scale=2.0, unprintable_scale=0.0)
    named = replace(config.draft(0.1), name=name)
    return opened(
        write_tiny_model(folder / "target.gguf", config),
        write_tiny_model(folder / f"{file}.gguf", named, metadata=metadata),
        further_drafts=further_drafts,
        drafting={"mask": mask, "tree": TreeShape("off"), "ngrams": False},
        n_draft=n_max,
        n_tokens=24,
        ignore_eos=True,
    )


def mask_of(session: Session) -> int | None:
    assert isinstance(session.draft, StandaloneDraft)
    return session.draft.mask


@pytest.mark.parametrize(
    ("name", "file", "mask"),
    [
        ("PARD-Qwen2.5-0.5B", "draft", NAMED_MASK),
        ("Pard Qwen3 0.6B", "draft", NAMED_MASK),
        ("tiny", "PARD2-Qwen3-8B", NAMED_MASK),
        ("tiny", "amd pard-llama", NAMED_MASK),
        # Ordinary models have masks too.
        ("tiny", "draft", None),
        ("Leopard-7B", "Gemma 3 270M It", None),
        ("spardish", "draft", None),
    ],
)
def test_a_file_that_names_the_method_and_a_mask_is_a_parallel_draft(
    tmp_path: Path, name: str, file: str, mask: int | None
) -> None:
    with models(tmp_path, name, IN_METADATA, file=file) as session:
        assert mask_of(session) == mask
        assert not any("mask" in notice for notice in session.notices(64))


def test_the_option_names_the_mask_by_its_number_or_its_text(tmp_path: Path) -> None:
    with models(tmp_path, "tiny", mask="7") as session:
        assert mask_of(session) == 7
        texts = {session.target.vocabulary.token_text(token): token for token in (70, NAMED_MASK)}
    for text, token in texts.items():
        with models(tmp_path, "tiny", mask=text) as session:
            assert mask_of(session) == token
    for mask, found in (("7", 7), ("off", None)):
        with models(tmp_path, "PARD", IN_METADATA, mask=mask) as session:
            assert mask_of(session) == found
    for mask, n_notices in (("auto", 1), ("off", 0)):  # its file names none
        with models(tmp_path, "PARD-Tiny", mask=mask) as session:
            assert mask_of(session) is None
            assert sum("--draft-mask" in notice for notice in session.notices(64)) == n_notices
    for mask in ("100000", "what is this"):
        with pytest.raises(UsageError, match="no such token"):
            models(tmp_path, mask=mask)


# --- drafts


def run(session: Session) -> tuple[list[DraftedEvent], FinishedEvent]:
    events = list(generate(session, session.prompts.of_text(PROMPT, chat=False)))
    return [event for event in events if isinstance(event, DraftedEvent)], finished(events)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mamba", "lfm2", "jamba"])
@pytest.mark.parametrize("n_max", [1, 4])
def test_a_round_takes_one_decode_of_the_draft_and_keeps_the_text(
    tmp_path: Path, architecture: Architecture, n_max: int
) -> None:
    with models(tmp_path, "tiny", architecture=architecture, n_max=n_max) as session:
        _, ordinary = run(session)
    with models(tmp_path, mask="3", architecture=architecture, n_max=n_max) as session:
        drafted, last = run(session)
        with session.contexts(256) as (target, (draft,)):
            assert draft.n_outputs == n_max
            assert target.n_outputs == n_max + 1
    assert last.token_ids == ordinary.token_ids
    assert len(drafted) > 3
    assert max(len(event.nodes) for event in drafted) == n_max
    if n_max == 1:
        assert last.n_accepted == ordinary.n_accepted


@pytest.mark.parametrize("architecture", ["llama", "mamba", "lfm2", "jamba"])
def test_the_prompt_is_not_read_again_to_drop_the_masks(
    tmp_path: Path, architecture: Architecture
) -> None:
    text = list(range(40, 90))
    with (
        models(tmp_path, mask="3", architecture=architecture) as session,
        session.contexts(256) as (_, (draft,)),
    ):
        assert session.draft is not None
        state = TextState(text)
        pipeline = SamplingPipeline(Sampler(SamplerOptions()), state)
        request = DraftRequest(state, pipeline, np.random.default_rng(0), text, (draft,))
        drafter = session.draft.drafter(request)
        for token in (60, 61, 62):
            before = draft.n_decoded_rows
            draft_alone(drafter.propose(text, RoundPlan("fixed", 4)))
            # The unread tokens and the masks; a copied state may be a few tokens behind.
            assert draft.n_decoded_rows - before <= (50 if token == 60 else 1) + 3 + 3
            assert draft.text(0)[: len(text)] == text
            text.append(token)


def test_acceptance_is_learnt_separately_for_parallel_drafts(tmp_path: Path) -> None:
    """The rows of masks are accepted less often than those of tokens."""
    with models(tmp_path, mask="3") as session:
        DrafterFactory(session).acceptance_counts()["model"] = AcceptanceCounts()
        assert "model" in DrafterFactory(session).acceptance_counts()
        session.change_drafting(DraftOptions(mask="off"))
        assert "model" not in DrafterFactory(session).acceptance_counts()
