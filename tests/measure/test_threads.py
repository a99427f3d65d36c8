"""Numbers of threads: which are tried, which is chosen, and who keeps to them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.library import llama_cpp
from specgen.measure.search import choose_threads, measure_threads, thread_counts
from specgen.method.backend import Batch
from specgen.options import ContextOptions, SessionOptions
from specgen.session.calibration import is_pair_measured, measure_if_new
from specgen.session.memory import Memory, Threads
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.system.machine import CoreTime
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language

# --- which are tried


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ((1, 1, 1), [1]),
        ((2, 2, 2), [1, 2]),
        ((4, 8, 8), [1, 2, 3, 4, 8]),
        ((4, 8, 2), [1, 2, 3, 4, 8]),
        ((16, 16, 16), [4, 6, 8, 10, 12, 14, 16]),
        ((64, 128, 48), [16, 24, 32, 40, 48, 56, 64, 128]),
        ((64, 128, 6), [6, 16, 24, 32, 40, 48, 56, 64, 128]),
    ],
)
def test_a_few_sensible_numbers_are_tried(cores: tuple[int, int, int], expected: list[int]) -> None:
    assert thread_counts(*cores) == expected


# --- which is chosen


def test_noise_changes_nothing() -> None:
    assert choose_threads([{2: 1.0, 1: 0.98}] * 9, 2) == 2  # by too little
    assert choose_threads([{2: 1.0, 1: 0.5}] * 3, 2) == 2  # too seldom
    uneven = [{2: 1.0, 1: 0.9}] * 6 + [{2: 1.0, 1: 1.1}] * 3  # and not always
    assert choose_threads(uneven, 2) == 2
    assert choose_threads([], 2) == 2
    assert choose_threads([{1: 0.5}] * 9, 2) == 2


# --- measuring


@dataclass(slots=True)
class ThreadedFake(FakeBackend):
    """Decodes in `seconds(n_threads, n_rows)`."""

    seconds: Callable[[int, int], float] = lambda _threads, _rows: 0.01
    threads: tuple[int, int] = (1, 1)
    timed: list[tuple[int, int]] = field(default_factory=list)

    def set_threads(self, n_single: int, n_batch: int) -> None:
        self.threads = (n_single, n_batch)

    def decode(self, batch: Batch) -> Logits:
        # The zero-argument super() does not know the class that slots=True makes.
        logits = FakeBackend.decode(self, batch)
        n_rows = len(batch)
        n_threads = self.threads[n_rows > 1]
        self.timed.append((n_threads, n_rows))
        self.decode_s += self.seconds(n_threads, n_rows)
        return logits


def fake(seconds: Callable[[int, int], float], n_ctx: int = 64) -> ThreadedFake:
    vocabulary = FakeVocabulary.letters(26)
    return ThreadedFake(vocabulary, random_language(26, seed=3), n_ctx=n_ctx, seconds=seconds)


def measured(backend: ThreadedFake, *arguments: Any) -> Threads:
    return measure_threads(cast(LlamaBackend, backend), *arguments)


def test_rows_and_batches_get_their_own_number() -> None:
    # A row is quickest with 2 threads; a batch, with as many as there are.
    backend = fake(lambda threads, rows: 0.1 / threads if rows > 1 else 0.05 + abs(threads - 2))
    assert measured(backend, [1, 2, 3, 4], 4, 1e9) == Threads(2, 4)
    assert backend.threads == (2, 4)
    assert backend.length(0) == 0
    assert {n for n, _ in backend.timed} == {1, 2, 3, 4}


def test_time_is_limited_and_then_nothing_is_changed() -> None:
    backend = fake(lambda threads, _: 1.0 / threads)
    assert measured(backend, [1, 2, 8], 2, 1.0) == Threads(2, 2)
    assert len(backend.timed) < 20


def test_an_interruption_leaves_the_usual_number() -> None:
    def interrupted() -> bool:
        return len(backend.timed) > 30

    backend = fake(lambda threads, _: 1.0 / threads)
    assert measured(backend, [1, 2, 4], 2, 1e9, interrupted) == Threads(2, 2)
    assert 30 < len(backend.timed) < 36
    assert backend.threads == (2, 2)
    assert backend.length(0) == 0


def test_where_there_is_nothing_to_choose_nothing_is_timed() -> None:
    backend = fake(lambda *_: 1.0)
    assert measured(backend, [1], 1, 1e9) == Threads(1, 1)
    assert len(backend.timed) < 5
    small = fake(lambda *_: 1.0, n_ctx=5)
    assert measured(small, [1, 2], 2, 1e9).n_batch == 2
    assert small.length(0) == 0


# --- llama.cpp


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
        before.start(1, 0.5)
        memory.keep_threads(options.target, options.target_context, Threads(77, 78))
        assert not loaded.costs.table()
        loaded.costs.table().start(1, 0.25)
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


@pytest.mark.parametrize(
    "entry",
    [
        *(3, None, [], {}, {"n_single": 2}, {"n_single": 2.0, "n_batch": 2}),
        *({"n_single": 2, "n_batch": n} for n in (0, -1, 513, True, "2")),
    ],
)
def test_numbers_that_make_no_sense_are_not_taken(
    tmp_path: Path, tiny_models: Path, entry: Any
) -> None:
    file, target = tmp_path / "learnt.json", tiny_models / "target.gguf"
    memory = Memory(file)
    memory.keep_threads(target, ContextOptions(), Threads(3, 4))
    memory.save()
    document = json.loads(file.read_text(encoding="utf-8"))
    (key,) = document["threads"]
    document["threads"][key] = entry
    file.write_text(json.dumps(document), encoding="utf-8")
    assert Memory(file).threads(target, ContextOptions()) is None
