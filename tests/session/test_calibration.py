"""Measuring costs and numbers of threads: what is timed, for how long, what remains of it, and the
speed-up that is estimated from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.library import llama_cpp
from specgen.measure.threads import measure_threads
from specgen.method.backend import Backend, Batch
from specgen.options import ContextOptions, SessionOptions
from specgen.session import calibration
from specgen.session.calibration import (
    ASSUMED_ACCEPTANCE,
    PairCosts,
    calibrate,
    expected_speedup,
    is_pair_measured,
    measure_costs,
    measure_sizes,
    timed_batch_sizes,
)
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore, Threads
from specgen.session.session import Session
from specgen.system import machine
from specgen.system.arrays import Logits
from specgen.system.machine import CoreTime
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language


@dataclass(slots=True)
class TimedBackend(FakeBackend):
    """Decodes in `seconds(n_rows, n_decodes)` of its own clock, and records what it decoded."""

    seconds: Callable[[int, int], float] = lambda _rows, _decodes: 0.01
    sizes: list[int] = field(default_factory=list)
    wanted: list[list[bool]] = field(default_factory=list)

    def decode(self, batch: Batch) -> Logits:
        # The zero-argument super() does not know the class that slots=True makes.
        logits = FakeBackend.decode(self, batch)
        self.decode_s += self.seconds(len(batch), self.n_decodes)
        self.sizes.append(len(batch))
        self.wanted.append(list(batch.wants_logits))
        return logits


def backend(
    seconds: Callable[[int, int], float] = lambda _rows, _decodes: 0.01, **changes: Any
) -> TimedBackend:
    sizes = {"n_ctx": 256, "n_batch": 64, "n_outputs": 64, **changes}
    language = random_language(26, seed=3)
    return TimedBackend(FakeVocabulary.letters(26), language, seconds=seconds, **sizes)


def always(budget_s: float) -> Callable[[], float]:
    """The budget of a machine whose load does not change."""
    return lambda: budget_s


def timed_sizes(model: TimedBackend) -> list[int]:
    """What was decoded after the few tokens with which the context begins."""
    return model.sizes[1:]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("sizes", [(1,), timed_batch_sizes(17), (1, 2, 3, 4, 8, 16, 64)])
def test_each_size_is_measured_and_the_context_is_empty_afterwards(
    sizes: Sequence[int], recurrent: bool
) -> None:
    model = backend(lambda rows, _: 0.010 + 0.001 * rows, recurrent=recurrent)
    found = measure_sizes(model, sizes, always(100.0))
    assert found == pytest.approx({size: 0.010 + 0.001 * size for size in sizes})
    assert list(found) == sorted(found)
    assert model.length(0) == 0
    assert not model.closed
    # Each three times.
    assert sorted(timed_sizes(model)) == sorted(3 * list(sizes))


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [
        (0.5, [1, 2, 4]),  # three sizes are timed anyway
        (3.5, [1, 2, 4]),
        (8.5, [1, 2, 4, 3, 5, 6, 7, 1]),
        (1e9, 3 * [1, 2, 4, 3, 5, 6, 7]),
    ],
)
def test_after_the_budget_nothing_new_is_begun(budget_s: float, expected: list[int]) -> None:
    """Each decode takes a second, those with which the context begins too."""
    model = backend(lambda *_: 1.0)
    found = measure_sizes(model, range(1, 8), always(budget_s))
    assert timed_sizes(model) == expected
    assert set(found) == set(expected)
    assert model.length(0) == 0


def test_a_context_without_room_leaves_larger_batches_out() -> None:
    # Four cells are taken by the beginning of a text.
    found = measure_sizes(backend(n_ctx=12), timed_batch_sizes(17), always(1e9))
    assert list(found) == list(range(1, 9))
    assert list(measure_sizes(backend(n_batch=5), (1, 2, 4, 8, 16), always(1e9))) == [1, 2, 4]
    assert list(measure_sizes(backend(n_ctx=2), (1, 2), always(1e9))) == [1]
    assert list(measure_sizes(backend(n_ctx=1), (1, 2), always(1e9))) == [1]


def test_a_moment_of_disturbance_does_not_count() -> None:
    # The whole first pass takes ten times as long.
    model = backend(lambda rows, n: (0.001 + 0.0001 * rows) * (10 if n <= 1 + 5 else 1))
    found = measure_sizes(model, range(1, 6), always(1e9))
    assert found == pytest.approx({n: 0.001 + 0.0001 * n for n in range(1, 6)})
    # Of two samples the quicker one.
    slow_once = backend(lambda _, n: 1.0 if n == 1 + 4 else 0.1)
    assert measure_sizes(slow_once, (1, 2, 3), always(1.0))[1] == pytest.approx(0.1)


def test_where_graphs_are_replayed_the_third_decode_of_a_size_counts() -> None:
    model = backend(lambda rows, n: rows * (0.01 if n % 3 == 1 else 0.05), replays_graphs=True)
    assert measure_sizes(model, (1, 2, 3), always(1e9)) == pytest.approx(
        {1: 0.01, 2: 0.02, 3: 0.03}
    )


def test_an_interrupt_ends_it_between_decodes() -> None:
    model = backend()
    answers = iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        measure_sizes(model, timed_batch_sizes(8), always(1.0), lambda: next(answers))
    assert len(timed_sizes(model)) == 2


# --- what to expect

COSTS = PairCosts({1: 0.03, 2: 0.04, 3: 0.05, 4: 0.06}, 0.002)


def test_the_expected_speed_up_is_that_of_the_best_number_of_tokens() -> None:
    # 1: 3 * 1.7 / (4 + 0.2), 2: 3 * 2.19 / (5 + 0.4), 3: 3 * 2.533 / (6 + 0.6)
    assert expected_speedup(COSTS) == pytest.approx(3 * 2.19 / 5.4)
    # A batch that seemed to cost less than a token is not believed.
    expected = expected_speedup(PairCosts({1: 0.3, 2: 0.1, 4: 0.05}, 1e-9))
    assert expected == pytest.approx(sum(ASSUMED_ACCEPTANCE**depth for depth in range(4)))


# --- threads that were measured


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
    target = tiny_models / "target.gguf"
    draft = tiny_models / "draft.gguf"
    measurements = MeasurementStore()
    measurements.keep_threads(target, ContextOptions(), Threads(1, 2))
    measurements.keep_threads(draft, ContextOptions(), Threads(2, 1))

    def threads(context: ContextOptions) -> list[tuple[int, int]]:
        options = SessionOptions(target, draft, target_context=context, draft_context=context)
        with (
            Session(options, time.perf_counter, measurements) as loaded,
            loaded.contexts(64) as (target_backend, (draft_backend,)),
        ):
            return [threads_of(target_backend), threads_of(draft_backend)]

    assert threads(ContextOptions()) == [(1, 2), (2, 1)]
    assert threads(ContextOptions(n_threads=1)) == [(1, 1), (1, 1)]
    # With all layers on a GPU, or none, it is another matter.
    other = measurements.threads(target, ContextOptions(n_gpu_layers=0))
    assert other is None


def test_costs_are_those_of_the_threads_that_are_taken(tiny_models: Path) -> None:
    measurements = MeasurementStore()
    options = SessionOptions(tiny_models / "target.gguf", "none")
    with Session(options, time.perf_counter, measurements) as loaded:
        before = loaded.costs.table()
        before.set_seconds(1, 0.5)
        measurements.keep_threads(options.target, options.target_context, Threads(77, 78))
        assert not loaded.costs.table()
        loaded.costs.table().set_seconds(1, 0.25)
        named = ContextOptions(n_threads=77, n_threads_batch=78)
        assert measurements.costs(options.target, named).table().known == {1: 0.25}
        loaded.costs.of(None).forget()
        assert not loaded.costs.table()
        assert before.known == {1: 0.5}


# --- what is stored


class Load:
    """Counts of core time in which other programs take a share of the cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        self.share = share
        self._n_counts = 0
        self._busy_s = 0.0
        monkeypatch.setattr(machine, "core_time", self)

    def __call__(self) -> CoreTime:
        self._n_counts += 1
        self._busy_s += 10.0 * self.share
        return CoreTime(10.0 * self._n_counts, busy_s=self._busy_s, own_s=0.0)


@pytest.fixture
def pair(tiny_models: Path) -> SessionOptions:
    return SessionOptions(tiny_models / "target.gguf", tiny_models / "draft.gguf")


@pytest.mark.parametrize("share_of_others", [0.0, 0.2, 0.4, 1.0])
def test_costs_of_a_busy_machine_are_marked_and_kept_for_some_minutes(
    share_of_others: float,
    tmp_path: Path,
    pair: SessionOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "learnt.json"
    draft = Path(pair.draft)
    is_busy = share_of_others > 0.25
    Load(monkeypatch, share_of_others)
    measurements = MeasurementStore(file, wall_clock=lambda: 1000.0)
    with Session(pair, time.perf_counter, measurements) as loaded:
        calibrate(loaded)
        assert is_pair_measured(loaded, draft)
        assert loaded.costs.of(None).are_rough == is_busy
        assert loaded.costs.of(draft).are_rough == is_busy
        sizes = set(loaded.costs.table().known)
        took_s = dict(loaded.setup_s)
        measure_costs(loaded)  # known by now
        assert loaded.setup_s == took_s
    for wall_s in (1000.0, 1000.0 + 4 * 60, 1000.0 + 10 * 60, 500.0):
        is_recent = 1000.0 <= wall_s < 1000.0 + 5 * 60
        later = MeasurementStore(file, wall_clock=partial(float, wall_s))
        with Session(pair, time.perf_counter, later) as loaded:
            assert is_pair_measured(loaded, draft) == (is_recent or not is_busy)
            assert loaded.costs.of(None).are_rough == (is_recent and is_busy)
            if is_pair_measured(loaded, draft):
                assert set(loaded.costs.table().known) == sizes


def test_rough_costs_are_measured_again_in_the_same_process(
    tmp_path: Path, pair: SessionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_s = [1000.0]
    load = Load(monkeypatch, 1.0)
    file = tmp_path / "learnt.json"
    measurements = MeasurementStore(file, wall_clock=lambda: wall_s[0])
    with (
        Session(pair, time.perf_counter, measurements) as loaded,
        Engine(loaded, n_ctx=64) as engine,
    ):
        assert "rough" in calibrate(loaded)

        def measuring_s() -> float:
            """Answer, and return the time of the measurement before it."""
            engine.insert(loaded.prompts.of_text("Once", chat=False))
            *_, finished = engine.run()
            assert isinstance(finished, FinishedEvent)
            return finished.measuring_s

        measured = dict(loaded.costs.table().known)
        assert measuring_s() > 0.0  # by `calibrate`
        measurements.save()
        (target, *_) = (
            entry["batch_s"]
            for key, entry in json.loads(file.read_text())["rough"].items()
            if '"depth": 0' in key and "target.gguf" in key
        )
        assert set(target) == set(map(str, measured))
        assert target["1"] != round(measured[1], 7)  # the answer refined it
        load.share = 0.0
        wall_s[0] += 60.0
        assert measuring_s() == 0.0
        assert loaded.costs.of(None).are_rough
        wall_s[0] += 600.0
        assert measuring_s() > 0.0
        assert not loaded.costs.of(None).are_rough
        measurements.save()
    with Session(pair, time.perf_counter, MeasurementStore(file)) as loaded:
        assert is_pair_measured(loaded, Path(pair.draft))
        assert not loaded.costs.of(None).are_rough
    assert not json.loads(file.read_text())["rough"]


def test_a_busy_machine_is_measured_for_a_shorter_time(
    pair: SessionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets_s = []

    def measured(
        _backend: Backend, sizes: Sequence[int], budget_s: Callable[[], float], _stop: object
    ) -> dict[int, float]:
        budgets_s.append(budget_s())
        return dict.fromkeys(sizes, 0.01)

    monkeypatch.setattr(calibration, "measure_sizes", measured)
    for share in (0.0, 1.0):
        Load(monkeypatch, share)
        with Session(pair, time.perf_counter) as loaded:
            measure_costs(loaded)
    quiet, busy = budgets_s[:2], budgets_s[2:]
    assert sum(busy) <= sum(quiet) / 3


def test_costs_of_an_idle_machine_survive_a_busy_answer(
    tmp_path: Path, pair: SessionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "learnt.json"
    load = Load(monkeypatch, 0.0)
    measurements = MeasurementStore(file)
    with (
        Session(pair, time.perf_counter, measurements) as loaded,
        Engine(loaded, n_ctx=64) as engine,
    ):
        calibrate(loaded)
        load.share = 1.0
        engine.insert(loaded.prompts.of_text("Once", chat=False))
        list(engine.run())
        measurements.save()
    with Session(pair, time.perf_counter, MeasurementStore(file)) as loaded:
        assert is_pair_measured(loaded, Path(pair.draft))
        assert not loaded.costs.of(None).are_rough


@pytest.mark.parametrize("share_of_others", [0.0, 1.0])
def test_an_answer_on_a_busy_machine_teaches_no_costs(
    share_of_others: float, tmp_path: Path, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "learnt.json"
    times = (CoreTime(10.0 * n, (4.0 + 6.0 * share_of_others) * n, 4.0 * n) for n in count())
    monkeypatch.setattr(machine, "core_time", lambda: next(times))
    options = SessionOptions(tiny_models / "target.gguf", tiny_models / "draft.gguf")
    measurements = MeasurementStore(file)
    with (
        Session(options, time.perf_counter, measurements) as loaded,
        Engine(loaded, n_ctx=64) as engine,
    ):
        engine.insert(loaded.prompts.of_text("Once", chat=False))
        list(engine.run())
    measurements.save()
    with Session(options, time.perf_counter, MeasurementStore(file)) as loaded:
        assert bool(loaded.costs.table()) == (not share_of_others)
