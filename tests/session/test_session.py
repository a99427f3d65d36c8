"""Complete answers on tiny models through llama.cpp."""

from __future__ import annotations

import functools
import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PromptError
from specgen.events import Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.llama.library import llama_cpp
from specgen.session import session as session_module
from specgen.session.engine import generate
from specgen.session.session import Session
from tests.helpers.common import EXACT
from tests.helpers.sessions import answered, finished, folder_with, opened, options_of
from tests.tiny import TinyConfig

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
#: Peaked enough that a difference in rounding does not change the most likely token.
TARGET = TinyConfig(logit_scale=6.0, control_scale=1.0, n_vocab=384)


models = folder_with(
    target=TARGET,
    perfect=TARGET,
    good=TARGET.draft(0.02),
    short=replace(TARGET, n_ctx_train=60),
    **{"no bos": replace(TARGET, add_bos=False)},
)


def session_on(
    models: Path, draft: str = "none", target: str = "target", n_ctx: int | None = None, **more: Any
) -> Session:
    context = replace(EXACT, n_ctx=n_ctx)
    choices = {"context": context, "drafting": {"ngram_min": 1}, **more}
    return opened(models / f"{target}.gguf", draft, **choices)


def run(session: Session, prompt: str = PROMPT) -> list[Event]:
    with session:
        return list(generate(session, session.prompts.of_text(prompt, chat=False)))


@functools.cache
def plain_answer(models: Path) -> FinishedEvent:
    return finished(run(session_on(models)))


def test_a_short_answer_is_not_compared_with_plain_decoding(models: Path) -> None:
    for n_tokens in (29, 30):
        with session_on(models, "perfect", n_tokens=n_tokens) as loaded:
            for n_rows in (1, 5):
                loaded.costs.table().set_seconds(n_rows, 0.001 * n_rows)
            fast = answered(loaded, PROMPT)
        assert fast.n_accepted > 0
        known = (fast.plain_tokens_per_s, fast.estimated_speedup, fast.estimated_whole_speedup)
        assert all(value is not None for value in known) == (fast.n_tokens >= 30)
        assert (fast.estimate is None) == (fast.n_tokens < 30)


def test_no_gain_is_larger_than_the_tokens_of_a_pass_allow(models: Path) -> None:
    with session_on(models, "perfect", n_tokens=60) as loaded:
        for n_rows, seconds in (
            (1, 1.0),
            (2, 0.001),
            (32, 0.001),
        ):  # measured while others computed
            loaded.costs.table().set_seconds(n_rows, seconds)
        fast = answered(loaded, PROMPT)
        assert fast.n_accepted > 0
        assert fast.estimate is not None
        assert fast.estimate.startswith("not known")
        known = (fast.plain_tokens_per_s, fast.estimated_speedup, fast.estimated_whole_speedup)
        assert known == (None, None, None)
        # A rough estimate is the upper limit then.
        loaded.costs.of(None).mark(are_rough=True)
        rough = answered(loaded, PROMPT)
        assert rough.estimate_is_rough
        assert rough.estimated_speedup == rough.mean_accepted_length


def test_prompts_that_do_not_fit_are_refused_with_numbers(models: Path) -> None:
    n_prompt = plain_answer(models).n_prompt_tokens
    with pytest.raises(PromptError, match=f"{n_prompt} tokens, but the context has {n_prompt - 1}"):
        run(session_on(models, n_ctx=n_prompt - 1))
    assert finished(run(session_on(models, n_ctx=n_prompt))).n_tokens == 1
    with pytest.raises(PromptError) as caught:
        run(session_on(models, target="short"), PROMPT * 4)
    assert "trained with a context of 60" in str(caught.value.hint)
    with pytest.raises(PromptError, match="empty"):
        run(session_on(models, target="no bos"), "")


def test_the_context_is_as_large_as_needed_and_no_larger_than_trained(models: Path) -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"n_tokens": 10}, 256),
        ({"n_tokens": 300}, 512),
        ({"n_ctx": 0}, 4096),
        ({"n_ctx": 77}, 77),
        ({"target": "short"}, 60),
        ({"target": "short", "n_ctx": 100}, 100),
    ]
    events: list[Event] = []
    for changes, n_ctx in cases:
        events = run(session_on(models, **changes))
        assert isinstance(events[0], PromptEvent)
        assert events[0].n_ctx == n_ctx
    notices = [event.message for event in events if isinstance(event, NoticeEvent)]
    (notice,) = notices
    assert notice == (
        "short.gguf was trained with 60 tokens of context, "
        "but the context has 100: expect poor text"
    )
    with pytest.raises(MemoryLimitError):
        run(session_on(models, n_ctx=1_000_000_000))


class Freed:
    """Records what llama.cpp is told to free: the models of contexts, and models."""

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
    loaded = session_on(models, "good")
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
def test_an_answer_does_not_continue_in_a_closed_session(
    models: Path, monkeypatch: pytest.MonkeyPatch, draft: str, n_events: int
) -> None:
    freed = Freed(monkeypatch)
    loaded = session_on(models, draft)
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


def test_an_answer_continues_when_its_draft_is_replaced(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = Freed(monkeypatch)
    with session_on(models, "good") as loaded:
        stream = generate(loaded, loaded.prompts.of_text(PROMPT, chat=False))
        before = [next(stream) for _ in range(6)]
        loaded.change_draft("none")
        assert freed.models == []
        assert finished([*before, *stream]).token_ids == plain_answer(models).token_ids
        assert len(freed.models) == 1
    assert len(freed.models) == 2


# --- drafts that are loaded ahead


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that llama.cpp loads, each after the name of the thread."""
    monkeypatch.setattr(session_module, "MIN_AHEAD_BYTES", 0)
    found: list[str] = []
    load = llama_cpp.llama_model_load_from_file

    def counted(path: bytes, *arguments: object) -> object:
        found.append(f"{threading.current_thread().name}: {Path(path.decode()).name}")
        return load(path, *arguments)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", counted)
    return found


def test_a_draft_that_is_loaded_ahead_is_loaded_once(models: Path, loads: list[str]) -> None:
    chosen = options_of(models / "target.gguf", "good")
    with Session(chosen, time.perf_counter, draft_ahead=chosen.draft) as loaded:
        assert loaded.draft is not None
        assert loaded.draft.models[0].path == models / "good.gguf"
    assert sorted(loads) == ["MainThread: target.gguf", "load ahead: good.gguf"]
    with Session(chosen, time.perf_counter):  # nothing holds the weights
        pass
    assert sorted(loads[2:]) == ["MainThread: good.gguf", "MainThread: target.gguf"]
    plain = replace(chosen, draft="none")
    with Session(plain, time.perf_counter, draft_ahead=chosen.draft) as loaded:  # for nothing
        assert loaded.draft is None
    with Session(chosen, time.perf_counter):
        pass
    assert loads.count("MainThread: good.gguf") == 2


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_errors_are_those_of_loading_one_after_the_other(
    models: Path, tmp_path: Path, loads: list[str], broken: str
) -> None:
    """A file that is cut off is noticed by llama.cpp only, whose log names the reason."""
    whole = (models / "good.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-64])
    chosen = options_of(models / "target.gguf", "good")
    chosen = replace(chosen, target=cut) if broken == "target" else replace(chosen, draft=cut)
    messages = []
    for ahead in (chosen.draft, "none"):
        with pytest.raises(ModelFileError) as caught:
            Session(chosen, time.perf_counter, draft_ahead=ahead)
        messages.append(caught.value.message)
    assert messages[0] == messages[1]
    assert "cut.gguf" in messages[0]
