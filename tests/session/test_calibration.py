"""What decodes cost: which sizes are timed, for how long, without a trace; and what a draft is expected to gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from specgen.method.backend import Batch
from specgen.method.tables import CostTable
from specgen.session.calibration import (
    ACCEPTANCE,
    Costs,
    complete,
    expected_gain,
    measure_sizes,
    timed_batch_sizes,
)
from specgen.system.arrays import Logits
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language


@dataclass(slots=True)
class TimedBackend(FakeBackend):
    """Decodes in `seconds(n_rows, n_decodes)` of its own clock, and notes what it decoded."""

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


def timed_sizes(model: TimedBackend) -> list[int]:
    """What was decoded after the few tokens with which the context begins."""
    return model.sizes[1:]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("sizes", [(1,), timed_batch_sizes(17), (1, 2, 3, 4, 8, 16, 64)])
def test_each_size_has_its_seconds_and_the_context_is_empty_again(
    sizes: Sequence[int], recurrent: bool
) -> None:
    model = backend(lambda rows, _: 0.010 + 0.001 * rows, recurrent=recurrent)
    found = measure_sizes(model, sizes, 100.0)
    assert found == pytest.approx({size: 0.010 + 0.001 * size for size in sizes})
    assert list(found) == sorted(found)
    assert model.length(0) == 0
    assert not model.closed
    # Each three times.
    assert sorted(timed_sizes(model)) == sorted(3 * list(sizes))


@pytest.mark.parametrize(
    ("budget_s", "expected"),
    [
        (0.5, [1, 2]),  # two sizes are timed anyway
        (3.5, [1, 2, 4]),
        (8.5, [1, 2, 4, 3, 5, 6, 7, 1]),
        (1e9, 3 * [1, 2, 4, 3, 5, 6, 7]),
    ],
)
def test_after_the_budget_nothing_new_is_begun(budget_s: float, expected: list[int]) -> None:
    """Each decode takes a second, those with which the context begins too."""
    model = backend(lambda *_: 1.0)
    found = measure_sizes(model, range(1, 8), budget_s)
    assert timed_sizes(model) == expected
    assert set(found) == set(expected)
    assert model.length(0) == 0


def test_a_context_without_room_leaves_larger_batches_out() -> None:
    # Four cells are taken by the beginning of a text.
    found = measure_sizes(backend(n_ctx=12), timed_batch_sizes(17), 1e9)
    assert list(found) == list(range(1, 9))
    assert list(measure_sizes(backend(n_batch=5), (1, 2, 4, 8, 16), 1e9)) == [1, 2, 4]
    assert list(measure_sizes(backend(n_ctx=2), (1, 2), 1e9)) == [1]
    assert list(measure_sizes(backend(n_ctx=1), (1, 2), 1e9)) == [1]


def test_a_moment_of_disturbance_does_not_count() -> None:
    # The whole first pass takes ten times as long.
    model = backend(lambda rows, n: (0.001 + 0.0001 * rows) * (10 if n <= 1 + 5 else 1))
    found = measure_sizes(model, range(1, 6), 1e9)
    assert found == pytest.approx({n: 0.001 + 0.0001 * n for n in range(1, 6)})
    # Of two samples the quicker one.
    slow_once = backend(lambda _, n: 1.0 if n == 1 + 4 else 0.1)
    assert measure_sizes(slow_once, (1, 2, 3), 1.0)[1] == pytest.approx(0.1)


def test_an_interrupt_ends_it_between_decodes_and_nothing_is_kept() -> None:
    model, table, answers = backend(), CostTable(), iter([False, False, True])
    with pytest.raises(KeyboardInterrupt):
        complete(table, model, timed_batch_sizes(8), interrupted=lambda: next(answers))
    assert len(timed_sizes(model)) == 2
    assert not table.known


# --- what to expect

COSTS = Costs({1: 0.03, 2: 0.04, 3: 0.05, 4: 0.06}, 0.002)
#: A machine on which the rows of a batch cost nearly as much as tokens one by one.
DEAR = Costs({1: 31.7, 2: 56.0, 3: 77.0, 4: 98.0}, 8.7)


def test_the_expected_speed_up_is_that_of_the_best_number_of_tokens() -> None:
    # 1: 3 * 1.7 / (4 + 0.2), 2: 3 * 2.19 / (5 + 0.4), 3: 3 * 2.533 / (6 + 0.6)
    expected = expected_gain(COSTS)
    assert expected.n_drafted == 2
    assert expected.speedup == pytest.approx(3 * 2.19 / 5.4)
    assert expected.batch_tokens == pytest.approx(5 / 3)
    assert expected.token_tokens == pytest.approx(0.2 / 3)
    assert expected.free_speedup == pytest.approx(3 * 2.19 / 5)
    assert expected.is_worth_it
    assert not expected.rules_out_all


def test_a_batch_that_seemed_to_cost_less_than_a_token_is_not_believed() -> None:
    expected = expected_gain(Costs({1: 0.3, 2: 0.1, 4: 0.05}, 1e-9))
    assert expected.speedup == pytest.approx(sum(ACCEPTANCE**depth for depth in range(4)))
    assert expected.batch_tokens == pytest.approx(1.0)
