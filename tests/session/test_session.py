"""Whole generations on tiny models through llama.cpp."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.errors import BackendError, MemoryLimitError, PromptError
from specgen.events import Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.llama.library import llama_cpp
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.engine import generate
from specgen.session.session import Session
from tests.tiny import TinyConfig, write_tiny_model

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
#: Peaked enough that a difference in rounding does not change the most likely token.
TARGET = TinyConfig(logit_scale=6.0, control_scale=1.0, n_vocab=384)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "target": TARGET,
        "perfect": TARGET,
        "good": TARGET.draft(0.02),
        "bad": TARGET.draft(1.5),
        "padded": replace(TARGET.draft(0.02), n_vocab=400),
        "short": replace(TARGET, n_ctx_train=60),
        "no bos": replace(TARGET, add_bos=False),
    }
    for name, config in configs.items():
        write_tiny_model(folder / f"{name}.gguf", config)
    return folder


def options(
    models: Path,
    target: str = "target",
    draft: str = "none",
    *,
    n_draft: int = 4,
    n_ctx: int | None = None,
    sampler: SamplerOptions | None = None,
    **generation: object,
) -> SessionOptions:
    source: DraftSource = models / f"{draft}.gguf"
    if draft == "none":
        source = "none"
    elif draft == "ngram":
        source = "ngram"
    # Without flash attention a row's result does not depend on the rows beside it, so that
    # texts can be compared token by token.
    context = ContextOptions(n_threads=1, n_ctx=n_ctx, flash_attention="off")
    return SessionOptions(
        target=models / f"{target}.gguf",
        draft=source,
        sampler=sampler or SamplerOptions(),
        drafting=DraftOptions(policy="fixed", max_tokens=n_draft, p_min=0.0, ngram_min=1),
        generation=GenerationOptions(**{"max_tokens": 40, **generation}),  # type: ignore[arg-type]
        target_context=context,
        draft_context=context,
    )


def run(options: SessionOptions, prompt: str = PROMPT) -> list[Event]:
    with Session(options, time.perf_counter) as loaded:
        return list(generate(loaded, loaded.prompts.of_text(prompt, chat=False)))


def finished(events: list[Event]) -> FinishedEvent:
    assert isinstance(events[-1], FinishedEvent)
    return events[-1]


@functools.cache
def plain_answer(models: Path, **changes: object) -> FinishedEvent:
    return finished(run(options(models, **changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("n_draft", [0, 1, 2, 4, 7, 16])
@pytest.mark.parametrize("draft", ["perfect", "good", "bad", "padded", "ngram"])
def test_greedy_text_equals_plain_text(models: Path, draft: str, n_draft: int) -> None:
    plain = plain_answer(models)
    fast = finished(run(options(models, draft=draft, n_draft=n_draft)))
    assert fast.token_ids == plain.token_ids
    assert fast.text == plain.text
    assert fast.finish_reason == plain.finish_reason
    if n_draft == 0:
        assert fast.n_drafted == 0
    elif draft == "perfect":
        assert fast.acceptance_rate == 1.0
        assert fast.n_rounds < plain.n_rounds


def test_a_short_answer_is_not_compared_with_plain_decoding(models: Path) -> None:
    for max_tokens in (29, 30):
        asked = options(models, draft="perfect", n_draft=4, max_tokens=max_tokens)
        with Session(asked, time.perf_counter) as loaded:
            for n_rows in (1, 5):
                loaded.costs.table().start(n_rows, 0.001 * n_rows)
            fast = finished(list(generate(loaded, loaded.prompts.of_text(PROMPT, chat=False))))
        assert fast.n_accepted > 0
        known = (fast.plain_tokens_per_s, fast.estimated_speedup, fast.estimated_whole_speedup)
        assert all(value is not None for value in known) == (fast.n_tokens >= 30)
        assert (fast.estimate is None) == (fast.n_tokens < 30)


@pytest.mark.parametrize("seed", range(6))
def test_the_end_of_text_is_exact(models: Path, seed: int) -> None:
    """At a high temperature the tiny model ends its texts early and at many places."""
    sampler = SamplerOptions(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    plain = finished(run(options(models, sampler=sampler, max_tokens=200)))
    fast = finished(run(options(models, draft="ngram", sampler=sampler, max_tokens=200)))
    assert fast.token_ids == plain.token_ids
    assert fast.finish_reason == plain.finish_reason
    endless = finished(run(options(models, sampler=sampler, max_tokens=200, ignore_eos=True)))
    assert endless.finish_reason == "length"


def test_prompts_that_do_not_fit_are_refused_with_numbers(models: Path) -> None:
    n_prompt = plain_answer(models).n_prompt_tokens
    with pytest.raises(PromptError, match=f"{n_prompt} tokens, but the context has {n_prompt - 1}"):
        run(options(models, n_ctx=n_prompt - 1))
    assert finished(run(options(models, n_ctx=n_prompt))).n_tokens == 1
    with pytest.raises(PromptError) as caught:
        run(options(models, target="short"), PROMPT * 4)
    assert "trained with a context of 60" in str(caught.value.hint)
    with pytest.raises(PromptError, match="empty"):
        run(options(models, target="no bos"), "")


def test_the_context_is_as_large_as_needed_and_no_larger_than_trained(models: Path) -> None:
    def n_ctx(**changes: object) -> int:
        event = run(options(models, **changes))[0]  # type: ignore[arg-type]
        assert isinstance(event, PromptEvent)
        return event.n_ctx

    assert n_ctx(max_tokens=10) == 256
    assert n_ctx(max_tokens=300) == 512
    assert n_ctx(n_ctx=0) == 4096
    assert n_ctx(n_ctx=77) == 77
    assert n_ctx(target="short") == 60
    with pytest.raises(MemoryLimitError):
        run(options(models, n_ctx=1_000_000_000))


def test_a_larger_context_than_trained_is_noted(models: Path) -> None:
    notices = [
        event.message
        for event in run(options(models, target="short", n_ctx=100))
        if isinstance(event, NoticeEvent)
    ]
    assert notices == [
        "short.gguf was trained with 60 tokens of context, but the context has 100: expect poor text"
    ]


class Freed:
    """What llama.cpp is told to free: the models of contexts, and models."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: list[int] = []
        self.models: list[int] = []
        free_context, free_model = llama_cpp.llama_free, llama_cpp.llama_model_free

        def note_context(context: object) -> None:
            model = llama_cpp.llama_get_model(context)
            assert model not in self.models, "the weights are needed until the context is freed"
            self.contexts.append(model)
            free_context(context)

        def note_model(model: int) -> None:
            self.models.append(model)
            free_model(model)

        monkeypatch.setattr(llama_cpp, "llama_free", note_context)
        monkeypatch.setattr(llama_cpp, "llama_model_free", note_model)


def test_weights_are_freed_after_the_contexts_of_an_abandoned_answer(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = Freed(monkeypatch)
    loaded = Session(options(models, draft="good"), time.perf_counter)
    stream = generate(loaded, loaded.prompts.of_text(PROMPT, chat=False))
    next(stream)
    loaded.close()
    assert freed.models == []
    del stream
    gc.collect()
    assert len(freed.contexts) == len(set(freed.models)) == len(freed.models) == 2
    loaded.close()
    assert len(freed.models) == 2


@pytest.mark.parametrize("n_events", [1, 5])
@pytest.mark.parametrize("draft", ["none", "good", "ngram"])
def test_an_answer_does_not_go_on_in_a_closed_session(
    models: Path, monkeypatch: pytest.MonkeyPatch, draft: str, n_events: int
) -> None:
    freed = Freed(monkeypatch)
    loaded = Session(options(models, draft=draft), time.perf_counter)
    prompt = loaded.prompts.of_text(PROMPT, chat=False)
    stream = generate(loaded, prompt)
    for _ in range(n_events):
        next(stream)
    loaded.close()
    with pytest.raises(BackendError, match=r"target\.gguf is closed"):
        list(stream)
    assert len(freed.contexts) == len(freed.models) == (2 if draft == "good" else 1)
    with pytest.raises(BackendError, match="closed"):
        next(generate(loaded, prompt))
    with pytest.raises(BackendError, match="closed"):
        loaded.prompts.of_text(PROMPT, chat=False)


def test_an_answer_goes_on_when_its_draft_is_replaced(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = Freed(monkeypatch)
    with Session(options(models, draft="good"), time.perf_counter) as loaded:
        stream = generate(loaded, loaded.prompts.of_text(PROMPT, chat=False))
        before = [next(stream) for _ in range(6)]
        loaded.change_draft("none")
        assert freed.models == []
        assert finished([*before, *stream]).token_ids == plain_answer(models).token_ids
        assert len(freed.models) == 1
    assert len(freed.models) == 2
