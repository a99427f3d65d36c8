"""The numbers of threads: which are tried, how they are timed, and which is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from specgen.llama import LlamaBackend
from specgen.measure.threads import choose_threads, measure_threads, thread_counts
from specgen.method.backend import Batch
from specgen.session.measurement_store import Threads
from specgen.system.arrays import Logits
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language

# --- which are tried


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ((1, 1), [1]),
        ((1, 2), [1, 2]),
        ((4, 8), [1, 2, 3, 4, 8]),
        ((64, 128), [16, 24, 32, 40, 48, 56, 64, 128]),
    ],
)
def test_a_few_sensible_numbers_are_tried(cores: tuple[int, int], expected: list[int]) -> None:
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


def test_single_rows_and_batches_get_their_own_number_of_threads() -> None:
    # A row is quickest with 2 threads; a batch, with as many as there are.
    backend = fake(lambda threads, rows: 0.1 / threads if rows > 1 else 0.05 + abs(threads - 2))
    assert measured(backend, [1, 2, 3, 4], 4, 1e9) == Threads(2, 4)
    assert backend.threads == (2, 4)
    assert backend.length(0) == 0
    assert {n for n, _ in backend.timed} == {1, 2, 3, 4}


def test_an_interruption_leaves_the_usual_number() -> None:
    def interrupted() -> bool:
        return len(backend.timed) > 30

    backend = fake(lambda threads, _: 1.0 / threads)
    assert measured(backend, [1, 2, 4], 2, 1e9, interrupted) == Threads(2, 2)
    assert 30 < len(backend.timed) < 36
    assert backend.threads == (2, 2)
    assert backend.length(0) == 0
