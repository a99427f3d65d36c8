"""Gemma 4 assistants: small drafts that read the cache of their target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from specgen.drafters.gemma4 import AssistantDrafter
from specgen.errors import BackendError, PairError
from specgen.llama.draft_contexts import AssistantContext
from specgen.measure.trial import measure_target, try_draft
from specgen.method.backend import Batch
from specgen.method.draft import Draft
from specgen.options import (
    DraftOptions,
    GenerationOptions,
    SessionOptions,
)
from specgen.session.session import Session
from tests.helpers.cli import Specgen
from tests.helpers.common import EXACT
from tests.helpers.gemma4_assistant import write_assistant, write_gemma4
from tests.helpers.states_drafts import PROMPT, answer, watched_drafts
from tests.tiny import TinyConfig, write_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant")
    write_gemma4(folder / "target.gguf")
    write_assistant(folder / "draft.gguf")
    return folder


def loaded(folder: Path) -> Session:
    options = SessionOptions(
        target=folder / "target.gguf",
        draft=folder / "draft.gguf",
        drafting=DraftOptions(policy="fixed", max_tokens=3, p_min=0.0, ngrams=False),
        generation=GenerationOptions(max_tokens=40, ignore_eos=True),
        target_context=EXACT,
        draft_context=EXACT,
    )
    return Session(options, time.perf_counter)


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Draft]:
    """What was drafted behind each text."""
    return watched_drafts(monkeypatch, AssistantDrafter)


def drafted_anew(models: Session, text: Sequence[int], n: int) -> list[int]:
    """The likeliest tokens behind a text that the target reads in one batch."""
    n_read = len(text) - 1
    with models.contexts(256) as (target, (draft,)):
        assert isinstance(draft, AssistantContext)
        batch = Batch()
        for position, token in enumerate(text[:-1]):
            batch.add(token, position, (0,), position == n_read - 1)
        state, token = target.decode_hidden(batch, all_rows=True)[1][-1].copy(), text[-1]
        tokens: list[int] = []
        while len(tokens) < n:
            row = draft.decode(Batch([token], [n_read], [(0,)], [True], [state]))[0]
            token, state = int(row.argmax()), draft.state(0)
            tokens.append(token)
        return tokens


def test_drafts_are_what_the_whole_text_anew_gives(
    folder: Path, proposed: dict[tuple[int, ...], Draft]
) -> None:
    """Whatever was accepted or dropped before."""
    with loaded(folder) as models:
        said = answer(models)
        assert said.n_drafted > said.n_accepted > 0
        for text, draft in proposed.items():
            assert list(draft.tokens) == drafted_anew(models, text, 3)[: len(draft)]


def test_trials_are_refused(folder: Path) -> None:
    with loaded(folder) as models:
        models.change_draft("none")
        baseline = measure_target(models, [PROMPT])
        assert baseline is not None
        models.change_draft(folder / "draft.gguf")
        with pytest.raises(BackendError, match=r"draft.gguf: it reads the target's cache"):
            try_draft(models, baseline)


@pytest.mark.parametrize("case", ["architecture", "hidden states", "heads"])
def test_another_target_is_refused_by_name(folder: Path, tmp_path: Path, case: str) -> None:
    target, draft = folder / "target.gguf", tmp_path / "draft.gguf"
    reason = case
    write_assistant(draft, n_target=96 if case == "hidden states" else 64)
    if case == "architecture":
        target, reason = tmp_path / "target.gguf", "drafts for Gemma 4, and not for llama"
        write_tiny_model(target, TinyConfig())
    if case == "heads":
        target, reason = tmp_path / "target.gguf", "the keys of the target's last two layers"
        write_gemma4(target, n_head_kv=2)
    with pytest.raises(PairError, match=rf"draft.gguf cannot draft for target.gguf: .*{reason}"):
        Session(SessionOptions(target=target, draft=draft), time.perf_counter)


def test_the_command_line_drafts_with_an_assistant(folder: Path, specgen: Specgen) -> None:
    target, draft = str(folder / "target.gguf"), str(folder / "draft.gguf")
    found = specgen("run", "-m", target, "-md", draft, "-n", "8", "--raw", PROMPT)
    plain = specgen("run", "-m", target, "-md", "none", "-n", "8", "--raw", PROMPT)
    assert found.code == 0
    assert found.out == plain.out
    alone = specgen("run", "-m", draft, "-n", "8", PROMPT)
    assert alone.code == 4
    assert "a draft of one target (gemma4-assistant)" in alone.err
