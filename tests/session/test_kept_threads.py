"""Numbers of threads that were measured: who keeps to them, and when they are not taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.library import llama_cpp
from specgen.measure.search import measure_threads
from specgen.options import ContextOptions, SessionOptions
from specgen.session.calibration import is_pair_measured, measure_if_new
from specgen.session.engine import Engine
from specgen.session.memory import Memory, Threads
from specgen.session.session import Session
from specgen.system.machine import CoreTime


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(tiny_models / "target.gguf")
    yield model
    model.close()


def threads_of(backend: LlamaBackend) -> tuple[int, int]:
    handle = backend.handle
    return llama_cpp.llama_n_threads(handle), llama_cpp.llama_n_threads_batch(handle)


def test_the_number_of_threads_changes_in_an_open_context(model: LlamaModel) -> None:
    options = ContextOptions(n_threads=1, n_threads_batch=2)
    backend = LlamaBackend(model, options, n_ctx=64, clock=time.perf_counter, n_outputs=8)
    assert threads_of(backend) == (1, 2)
    chosen = measure_threads(backend, [1, 2], 1, 0.5)
    assert threads_of(backend) == (chosen.n_single, chosen.n_batch)
    backend.set_threads(2, 1)
    assert threads_of(backend) == (2, 1)
    for wrong in ((0, 1), (1, 0), (513, 1), (1, 513)):
        with pytest.raises(ValueError, match="512"):
            backend.set_threads(*wrong)
    assert threads_of(backend) == (2, 1)
    assert backend.length(0) == 0
    backend.close()


# --- who goes by it


def test_a_session_takes_what_was_kept_for_each_model(tiny_models: Path) -> None:
    target, draft = tiny_models / "target.gguf", tiny_models / "draft.gguf"
    memory = Memory()
    memory.keep_threads(target, ContextOptions(), Threads(1, 2))
    memory.keep_threads(draft, ContextOptions(), Threads(2, 1))

    def threads(context: ContextOptions) -> list[tuple[int, int]]:
        options = SessionOptions(target, draft, target_context=context, draft_context=context)
        with (
            Session(options, time.perf_counter, memory) as loaded,
            loaded.contexts(64) as (target_backend, (draft_backend,)),
        ):
            return [threads_of(target_backend), threads_of(draft_backend)]

    assert threads(ContextOptions()) == [(1, 2), (2, 1)]
    assert threads(ContextOptions(n_threads=1)) == [(1, 1), (1, 1)]
    # With all layers on a GPU, or none, it is another matter.
    other = memory.threads(target, ContextOptions(n_gpu_layers=0))
    assert other is None


def test_costs_are_those_of_the_threads_that_are_taken(tiny_models: Path) -> None:
    memory = Memory()
    options = SessionOptions(tiny_models / "target.gguf", "none")
    with Session(options, time.perf_counter, memory) as loaded:
        before = loaded.costs.table()
        before.set_seconds(1, 0.5)
        memory.keep_threads(options.target, options.target_context, Threads(77, 78))
        assert not loaded.costs.table()
        loaded.costs.table().set_seconds(1, 0.25)
        named = ContextOptions(n_threads=77, n_threads_batch=78)
        assert memory.costs(options.target, named).known == {1: 0.25}
        loaded.costs.forget()
        assert not loaded.costs.table()
        assert before.known == {1: 0.5}


# --- what is kept


@pytest.mark.parametrize("share_of_others", [0.0, 0.2, 0.4, 1.0])
def test_what_a_busy_machine_costs_holds_for_its_run_only(
    share_of_others: float, tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, draft = tmp_path / "learnt.json", tiny_models / "draft.gguf"
    times = iter([CoreTime(10.0, 4.0, 3.0), CoreTime(20.0, 6.0 + 10.0 * share_of_others, 5.0)])
    monkeypatch.setattr("specgen.system.machine.core_time", lambda: next(times))
    options = SessionOptions(tiny_models / "target.gguf", draft)
    memory = Memory(file)
    with Session(options, time.perf_counter, memory) as loaded, loaded.contexts(64) as contexts:
        assert measure_if_new(loaded, *contexts) > 0.0
        assert is_pair_measured(loaded, draft)
        assert loaded.costs.was_busy == (share_of_others > 0.25)
        assert measure_if_new(loaded, *contexts) == 0.0
    memory.save()
    with Session(options, time.perf_counter, Memory(file)) as loaded:
        assert is_pair_measured(loaded, draft) == (share_of_others <= 0.25)


@pytest.mark.parametrize("share_of_others", [0.0, 1.0])
def test_an_answer_on_a_busy_machine_teaches_no_costs(
    share_of_others: float, tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "learnt.json"
    times = (CoreTime(10.0 * n, (4.0 + 6.0 * share_of_others) * n, 4.0 * n) for n in count())
    monkeypatch.setattr("specgen.system.machine.core_time", lambda: next(times))
    options = SessionOptions(tiny_models / "target.gguf", tiny_models / "draft.gguf")
    memory = Memory(file)
    with Session(options, time.perf_counter, memory) as loaded, Engine(loaded, n_ctx=64) as engine:
        engine.insert(loaded.prompts.of_text("Once", chat=False))
        list(engine.run())
    memory.save()
    with Session(options, time.perf_counter, Memory(file)) as loaded:
        assert bool(loaded.costs.table()) == (not share_of_others)
