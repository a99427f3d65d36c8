"""Gemma 4 assistants: small drafts that read the cache of their target."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from specgen.decoding.backend import Batch
from specgen.decoding.draft import Draft
from specgen.decoding.drafters import AssistantDrafter
from specgen.engine.engine import Engine, generate
from specgen.engine.loaded_models import Models
from specgen.errors import BackendError, PairError
from specgen.events import FinishedEvent, NoticeEvent
from specgen.llama.gemma4_assistant import AssistantContext
from specgen.measure.selection.trial import measure_target, try_draft
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    parse_tree,
)
from specgen.testing.tiny import TinyConfig, write_tiny_model
from tests.helpers.cli import Specgen
from tests.helpers.gemma4_assistant import write_assistant, write_gemma4
from tests.helpers.states_drafts import PROMPT, answer, watched_drafts

CONTEXT = ContextOptions(n_threads=1, flash_attention="off", cache_type_k="f32", cache_type_v="f32")
FIXED = DraftOptions(policy="fixed", max_tokens=3, p_min=0.0, ngrams=False, verifier="match")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant")
    write_gemma4(folder / "target.gguf")
    write_assistant(folder / "draft.gguf")
    return folder


@contextmanager
def loaded(
    folder: Path,
    drafting: DraftOptions = FIXED,
    sampler: SamplerOptions | None = None,
    max_tokens: int = 40,
) -> Iterator[Models]:
    options = SessionOptions(
        target=folder / "target.gguf",
        draft=folder / "draft.gguf",
        sampler=sampler or SamplerOptions(temperature=0.0),
        drafting=drafting,
        generation=GenerationOptions(max_tokens=max_tokens, ignore_eos=True),
        target_context=CONTEXT,
        draft_context=CONTEXT,
    )
    with Models(options, time.perf_counter) as models:
        yield models


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Draft]:
    """What was drafted behind each text."""
    return watched_drafts(monkeypatch, AssistantDrafter)


def drafted_anew(models: Models, text: Sequence[int], n: int) -> list[int]:
    """The likeliest tokens behind a text that the target reads in one batch."""
    n_read = len(text) - 1
    with models.contexts(256) as (target, draft):
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


@pytest.mark.parametrize("tree", ["off", "auto"])
@pytest.mark.parametrize("ngrams", [False, True])
def test_several_answers_at_once_say_what_the_target_says(
    folder: Path, tree: str, ngrams: bool
) -> None:
    """With common beginnings, and branches that n-grams draft."""
    prompts = [f"{PROMPT}{more}" for more in ("", " a", " a b", "", " c", " a b c")] + [PROMPT * 3]
    drafting = DraftOptions(
        policy="fixed", max_tokens=4, p_min=0.0, tree=parse_tree(tree), ngrams=ngrams
    )
    with loaded(folder, drafting, max_tokens=24) as models:
        with Engine(models, n_parallel=2, n_ctx=128) as engine:
            requests = [engine.insert(prompt) for prompt in prompts]
            list(engine.run())
            fast = [request.finished for request in requests]
        models.change_draft("none")
        with Engine(models, n_parallel=2, n_ctx=128) as engine:
            plain = engine.answers(prompts)
    assert [each.text for each in fast if each is not None] == plain
    assert sum(each.n_accepted for each in fast if each is not None) > 0


def test_the_last_position_of_the_context_is_reached(folder: Path) -> None:
    said: list[tuple[int, ...]] = []
    with loaded(folder, max_tokens=-1) as models:
        for draft in (folder / "draft.gguf", "none"):
            models.change_draft(draft)
            with Engine(models, n_ctx=64) as engine:
                events = list(engine.stream(engine.insert(PROMPT)))
            assert isinstance(events[-1], FinishedEvent)
            assert events[-1].finish_reason == "context"
            assert not [event for event in events if isinstance(event, NoticeEvent)]
            said.append(events[-1].token_ids)
    assert said[0] == said[1]


def test_costs_decide_how_much_is_drafted(folder: Path) -> None:
    with loaded(folder, DraftOptions(policy="cost")) as models:
        events = list(generate(models, models.prompts.of_text(PROMPT * 2)))
        models.change_draft("none")
        assert isinstance(events[-1], FinishedEvent)
        assert events[-1].token_ids == answer(models, PROMPT * 2).token_ids


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
        Models(SessionOptions(target=target, draft=draft), time.perf_counter)


def test_the_command_line_drafts_with_an_assistant(folder: Path, specgen: Specgen) -> None:
    target, draft = str(folder / "target.gguf"), str(folder / "draft.gguf")
    found = specgen("run", "-m", target, "-md", draft, "-n", "8", "--raw", PROMPT)
    plain = specgen("run", "-m", target, "-md", "none", "-n", "8", "--raw", PROMPT)
    assert found.code == 0
    assert found.out == plain.out
    alone = specgen("run", "-m", draft, "-n", "8", PROMPT)
    assert alone.code == 4
    assert "a draft of one target (gemma4-assistant)" in alone.err
