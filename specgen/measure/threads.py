"""How many threads a model decodes with, for a single row and for batches, chosen by measurement.

A single row waits for the memory, a batch computes. So each may be fastest with its own number of
threads. Neither has to be the number of cores, on a machine whose cores differ or that has other
work to do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specgen.method.backend import Backend
from specgen.session.calibration import begin, time_batch
from specgen.session.memory import Threads

#: Rows of the batch that is timed: as many as the batch of a round usually has.
BATCH_ROWS = 6
#: With up to this many cores every number of threads is tried; with more, these shares of the cores.
_FEW_CORES = 4
_SHARES = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
#: A number that is faster than the default by less than this share counts as noise; it also has to be
#: faster in at least this share of the rounds.
_MARGIN = 0.03
_MAJORITY = 0.75
#: Rounds in which each number is timed once; with fewer than `_N_LEAST` nothing is changed. After `_N_ALL` rounds,
#: or once the budget of time is spent, only the quickest numbers so far are timed.
_N_ROUNDS, _N_LEAST, _N_ALL = 9, 4, 2
#: `_N_LEAST` rounds may take this many times the budget.
_PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """The numbers of threads that were `chosen`, and the median seconds of a single row and of a batch
    of `BATCH_ROWS`, by the number of threads. `default` is the number without a measurement."""

    chosen: Threads
    default: int
    single_s: dict[int, float]
    batch_s: dict[int, float]


class ThreadedBackend(Backend, Protocol):
    """A backend whose number of threads can be changed."""

    def set_threads(self, n_single: int, n_batch: int) -> None:
        """Decode one row with `n_single` threads from now on, and more rows with `n_batch`."""
        ...


def thread_counts(n_cores: int, n_logical: int, n_usable: int) -> list[int]:
    """Return the numbers of threads to try, ascending, on a machine with `n_cores` physical and
    `n_logical` logical cores, of which this process may use `n_usable` logical ones."""
    if n_cores <= _FEW_CORES:
        counts = set(range(1, n_cores + 1))
    else:
        counts = {round(share * n_cores) for share in _SHARES} | {n_cores}
    return sorted({*counts, n_logical, max(1, min(n_usable, n_logical))})


def measure_threads(
    backend: ThreadedBackend,
    counts: Collection[int],
    default: int,
    budget_s: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> ThreadTimes:
    """Return the best of these numbers of threads and of `default`, which the backend then uses. Its
    context is empty before and afterwards.

    All numbers are timed in turns, a row and a batch each, since a machine's speed changes. After about
    `budget_s` seconds of decoding only the rounds that a choice needs are started. If `interrupted` is
    true, the default stays. Raise `BackendError`.
    """
    backend.set_threads(default, default)
    text = begin(backend)
    #: Seconds by round, then by number of threads.
    singles: list[dict[int, float]] = []
    batches: list[dict[int, float]] = []
    left = [default, *(count for count in sorted(counts, reverse=True) if count != default)]
    before_s = backend.decode_s
    for number in range(_N_ROUNDS if len(left) > 1 else 0):
        spent_s = backend.decode_s - before_s
        if spent_s > (_PATIENCE if number < _N_LEAST else 1.0) * budget_s:
            break
        if number == _N_ALL or (spent_s > budget_s and singles):
            best = _quickest([singles, batches], left) - {default}
            left = [default, *sorted(best, reverse=True)]
        single_s, batch_s = _round(backend, text, left, interrupted)
        if interrupted():
            singles, batches = [], []
            break
        singles.append(single_s)
        batches.append(batch_s)
    backend.remove(0)
    chosen = Threads(choose_threads(singles, default), choose_threads(batches, default))
    backend.set_threads(chosen.n_single, chosen.n_batch)
    return ThreadTimes(chosen, default, _medians(singles), _medians(batches))


def choose_threads(rounds: Sequence[Mapping[int, float]], default: int) -> int:
    """Return the number of threads that takes the least time, from the seconds by number of each round;
    `default` unless another one is clearly faster."""
    best, least = default, 1.0 - _MARGIN
    for count in sorted({count for seconds in rounds for count in seconds} - {default}):
        ratios = [s[count] / s[default] for s in rounds if count in s and default in s]
        if len(ratios) < _N_LEAST:
            continue
        share = sum(ratio < 1.0 for ratio in ratios) / len(ratios)
        if statistics.median(ratios) < least and share >= _MAJORITY:
            best, least = count, statistics.median(ratios)
    return best


def _round(
    backend: ThreadedBackend,
    text: Sequence[int],
    counts: Sequence[int],
    interrupted: Callable[[], bool],
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the seconds of a row and of a batch with each number of threads; of fewer if
    interrupted."""
    single_s: dict[int, float] = {}
    batch_s: dict[int, float] = {}
    for count in counts:
        if interrupted():
            break
        backend.set_threads(count, count)
        # The first decode after a change may have to start threads: it is not timed.
        time_batch(backend, text, 1)
        for n_rows, seconds in ((1, single_s), (BATCH_ROWS, batch_s)):
            found = time_batch(backend, text, n_rows)
            if found is not None and found > 0.0:
                seconds[count] = found
    return single_s, batch_s


def _quickest(kinds: Sequence[Sequence[Mapping[int, float]]], counts: Collection[int]) -> set[int]:
    """Return the numbers that are fastest so far, for single rows and for batches."""
    found: set[int] = set()
    for rounds in kinds:
        medians = {n: s for n, s in _medians(rounds).items() if n in counts}
        found |= {min(medians, key=lambda count: medians[count])} if medians else set()
    return found


def _medians(rounds: Sequence[Mapping[int, float]]) -> dict[int, float]:
    counts = sorted({count for seconds in rounds for count in seconds})
    return {
        count: statistics.median([seconds[count] for seconds in rounds if count in seconds])
        for count in counts
    }
