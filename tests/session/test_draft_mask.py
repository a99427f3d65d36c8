"""The mask token of a parallel draft: where it comes from, and what it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specgen.drafters.interface import DraftRequest
from specgen.drafters.model import DraftModel
from specgen.errors import UsageError
from specgen.events import DraftedEvent, FinishedEvent
from specgen.method.drafter import draft_alone
from specgen.method.policy import RoundPlan
from specgen.method.tables import AcceptanceRates
from specgen.options import DraftOptions, SamplerOptions, TreeShape
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import generate
from specgen.session.session import Session
from specgen.text.sampling import Sampler
from specgen.text.text_state import Shaper, TextState
from tests.helpers.sessions import finished, opened
from tests.tiny import Architecture, TinyConfig, write_tiny_model

MASK = 3
IN_METADATA = {"tokenizer.ggml.mask_token_id": MASK}
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
    helpers: tuple[Path, ...] = (),
) -> Session:
    config = TinyConfig(architecture=architecture, logit_scale=2.0, unprintable_scale=0.0)
    named = replace(config.draft(0.1), name=name)
    return opened(
        write_tiny_model(folder / "target.gguf", config),
        write_tiny_model(folder / f"{file}.gguf", named, metadata=metadata),
        helpers=helpers,
        drafting={"mask": mask, "tree": TreeShape("off"), "ngrams": False},
        n_draft=n_max,
        n_tokens=24,
        ignore_eos=True,
    )


def mask_of(session: Session) -> int | None:
    assert isinstance(session.draft, DraftModel)
    return session.draft.mask


@pytest.mark.parametrize(
    ("name", "file", "mask"),
    [
        ("PARD-Qwen2.5-0.5B", "draft", MASK),
        ("Pard Qwen3 0.6B", "draft", MASK),
        ("tiny", "PARD2-Qwen3-8B", MASK),
        ("tiny", "amd pard-llama", MASK),
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
        texts = {session.target.vocabulary.token_text(token): token for token in (70, MASK)}
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


# --- what is drafted


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
        shaper = Shaper(Sampler(SamplerOptions()), state)
        request = DraftRequest(state, shaper, np.random.default_rng(0), text, (draft,))
        drafter = session.draft.drafter(request)
        for token in (60, 61, 62):
            before = draft.n_decoded_rows
            draft_alone(drafter.propose(text, RoundPlan("fixed", 4)))
            # The unread tokens and the masks; a copied state may be a few tokens behind.
            assert draft.n_decoded_rows - before <= (50 if token == 60 else 1) + 3 + 3
            assert draft.text(0)[: len(text)] == text
            text.append(token)


def test_what_is_learnt_about_acceptance_is_kept_apart(tmp_path: Path) -> None:
    """The rows of masks are accepted less often than those of tokens."""
    with models(tmp_path, mask="3") as session:
        DrafterFactory(session).acceptance()["model"] = AcceptanceRates("model")
        assert "model" in DrafterFactory(session).acceptance()
        session.change_drafting(DraftOptions(mask="off"))
        assert "model" not in DrafterFactory(session).acceptance()
