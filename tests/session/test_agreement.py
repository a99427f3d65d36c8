"""How often a draft agrees with a target, before the two draft together."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from specgen.events import FinishedEvent, NoticeEvent
from specgen.method.tables import AcceptanceRates
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SessionOptions,
)
from specgen.session.agreement import (
    N_KNOWN,
    greedy_tokens,
)
from specgen.session.calibration import measure_if_new
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import generate
from specgen.session.memory import Memory
from specgen.session.session import Session
from tests.helpers.fake_backend import (
    FakeBackend,
    FakeVocabulary,
    random_language,
)
from tests.helpers.tiny import write_respelled_model
from tests.tiny import TinyConfig, write_tiny_model

N_VOCAB = 12
VOCABULARY = FakeVocabulary.letters(N_VOCAB)
LANGUAGE = random_language(N_VOCAB, seed=7)


def target(n_outputs: int = 8, n_batch: int = 16, n_ctx: int = 64) -> FakeBackend:
    return FakeBackend(VOCABULARY, LANGUAGE, n_ctx=n_ctx, n_batch=n_batch, n_outputs=n_outputs)


# --- in a session

#: Peaked enough that most of its tokens are sure.
TARGET = TinyConfig(logit_scale=6.0, control_scale=1.0)
#: A machine on which drafts pay if they are right.
GOOD = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3, 17: 1.5}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agreement")
    configs = {
        "target": TARGET,
        "itself": TARGET,
        "other": TinyConfig(logit_scale=6.0, control_scale=1.0, seed=99),
        "mamba": TinyConfig(architecture="mamba", logit_scale=6.0),
        "mamba again": TinyConfig(architecture="mamba", logit_scale=6.0),
    }
    for name, config in configs.items():
        write_tiny_model(folder / f"{name}.gguf", config)
    write_respelled_model(folder / "respelled.gguf", TARGET)
    return folder


def loaded(
    models: Path, draft: str, memory: Memory | None = None, name: str = "target", **changes: object
) -> Session:
    context = ContextOptions(n_threads=1, flash_attention="off")
    drafting = DraftOptions(**{"policy": "cost", "max_tokens": 4, **changes})  # type: ignore[arg-type]
    options = SessionOptions(
        models / f"{name}.gguf",
        models / f"{draft}.gguf",
        drafting=drafting,
        generation=GenerationOptions(max_tokens=8),
        target_context=context,
        draft_context=context,
    )
    return Session(options, time.perf_counter, memory)


def fill(opened: Session, target_s: dict[int, float], draft_s: float) -> None:
    """Let a session know what decodes cost."""
    draft = opened.options.draft
    assert isinstance(draft, Path)
    for size, seconds in target_s.items():
        opened.costs.table().start(size, seconds)
    for size in (1, 2, 4):
        opened.costs.table(draft).start(size, draft_s)


def sampled(opened: Session) -> AcceptanceRates | None:
    fill(opened, GOOD, 0.01)
    with opened.contexts(256) as (target_backend, drafts):
        measure_if_new(opened, target_backend, drafts)
        (draft_backend,) = drafts
        assert target_backend.length(0) == 0
        assert draft_backend.length(0) == 0
        # And of use: a prompt can be decoded in them.
        for backend in (target_backend, draft_backend):
            assert len(list(greedy_tokens(backend, [1, 2, 3], 3))) == 1
    return DrafterFactory(opened).acceptance().get("model")


@pytest.mark.parametrize("name", ["target", "mamba"])
@pytest.mark.parametrize("draft", ["itself", "other", "mamba again"])
def test_a_session_knows_a_draft_before_the_first_answer(
    models: Path, name: str, draft: str
) -> None:
    with loaded(models, draft, name=name) as opened:
        found = sampled(opened)
    assert found is not None
    assert found.n_judged >= N_KNOWN
    rate = found.counts.n_accepted.sum() / found.n_judged
    if (name, draft) in {("target", "itself"), ("mamba", "mamba again")}:
        assert rate == 1.0
    else:
        assert rate < 0.5


def test_a_draft_with_another_vocabulary_is_judged_by_its_translation(models: Path) -> None:
    with loaded(models, "respelled") as opened:
        assert opened.own_vocabulary is not None
        alike = sampled(opened)
    with loaded(models, "respelled", name="other") as opened:
        other = sampled(opened)
    assert alike is not None
    assert other is not None
    rates = [found.counts.n_accepted.sum() / found.n_judged for found in (alike, other)]
    assert rates[0] > 0.5 > rates[1]


def test_what_is_known_is_not_looked_at_again(models: Path) -> None:
    memory = Memory()
    with loaded(models, "itself", memory) as opened:
        first = sampled(opened)
        assert first is not None
        n_judged = first.n_judged
    with loaded(models, "itself", memory) as opened:
        again = sampled(opened)
        assert again is first
        assert again.n_judged == n_judged
        with opened.contexts(256) as contexts:
            assert measure_if_new(opened, *contexts) == 0.0


def test_what_could_not_matter_is_not_looked_at(models: Path) -> None:
    with loaded(models, "itself", policy="fixed") as opened:
        assert sampled(opened) is None
    with loaded(models, "itself") as opened:
        fill(opened, GOOD, 5.0)
        with opened.contexts(256) as contexts:
            assert measure_if_new(opened, *contexts) == 0.0
        assert "model" not in DrafterFactory(opened).acceptance()


def test_an_answer_is_the_same_with_and_without_the_look(models: Path) -> None:
    def run(memory: Memory) -> tuple[tuple[int, ...], list[str]]:
        with loaded(models, "other", memory) as opened:
            fill(opened, GOOD, 0.01)
            events = list(generate(opened, opened.prompts.of_text("def add(a, b):", chat=False)))
        assert isinstance(events[-1], FinishedEvent)
        notices = [event.message for event in events if isinstance(event, NoticeEvent)]
        return events[-1].token_ids, notices

    memory = Memory()
    first, again = run(memory), run(memory)
    assert first[0] == again[0]
    assert len(first[1]) == 1
    assert again[1] == []
