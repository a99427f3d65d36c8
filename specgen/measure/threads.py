"""The best numbers of threads.

A single row waits for memory and a batch computes, so each may want its own number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from specgen.llama import default_threads
from specgen.method.drafter import never
from specgen.session.calibration import begin_text, short_context, time_batch
from specgen.session.measurement_store import Threads
from specgen.system.machine import logical_cores, usable_cores

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: Seconds of decoding for one model.
THREADS_BUDGET_S = 20.0
#: The first rounds may take this many times longer: with fewer of them nothing is changed.
_PATIENCE = 3.0
_N_LEAST_ROUNDS = 4
#: The most rounds.
_N_ROUNDS = 9
#: Rows of the batch that is timed: as many as the batch of a round usually has.
BATCH_ROWS = 6
#: A number is chosen if it is faster than the default by this share...
_MARGIN = 0.03
#: ... and in this share of the rounds.
_MAJORITY = 0.75

#: The seconds of one decode by the number of threads.
_Times: TypeAlias = dict[int, float]


def tune_threads(
    session: Session,
    model: Path,
    interrupted: Callable[[], bool],
    progress: Progress,
    *,
    is_draft: bool,
) -> dict[str, Threads]:
    """Measure and keep the best numbers of threads of a session's target or draft.

    Returns:
        The numbers by the model's name; empty if the user named some, or if interrupted.
    """
    options = session.options.draft_context if is_draft else session.options.target_context
    is_named = options.n_threads is not None or options.n_threads_batch is not None
    if is_named or interrupted():
        return {}
    progress(f"threads for {model.name}", 0, 1)
    default = default_threads()
    n_logical = logical_cores()
    counts = thread_counts(default, n_logical, usable_cores() or n_logical)
    with session.contexts(short_context(session), drafts=is_draft) as (target, drafts):
        if is_draft and not drafts:
            return {}
        backend = drafts[0] if is_draft else target
        chosen = measure_threads(backend, counts, default, THREADS_BUDGET_S, interrupted)
    if interrupted():
        return {}
    session.measurements.keep_threads(model, options, chosen)
    return {model.name: chosen}


def thread_counts(n_cores: int, n_logical: int, n_usable: int) -> list[int]:
    """Return the numbers of threads to try, in ascending order.

    They are shares of the cores, and all logical and all usable ones.
    """
    shares = {n_cores * eighths // 8 for eighths in range(2, 9)} - {0}
    return sorted({*shares, n_logical, max(1, min(n_usable, n_logical))})


def measure_threads(
    backend: LlamaBackend,
    counts: Collection[int],
    default: int,
    budget_s: float,
    interrupted: Callable[[], bool] = never,
) -> Threads:
    """Return the best numbers of threads, which the backend then uses.

    All numbers are timed in turn, since a machine's speed changes.

    Args:
        backend: its context is empty before and after.
        counts: the numbers to try.
        default: another one to try, which stays unless others are clearly faster.
        budget_s: how many seconds of decoding this may take.
        interrupted: whether to stop; the default then stays.
    """
    backend.set_threads(default, default)
    chosen = Threads(default, default)
    tried = sorted({default, *counts}, reverse=True)
    if len(tried) == 1:
        return chosen
    text = begin_text(backend)
    started_s = backend.decode_s
    single: list[_Times] = []
    batch: list[_Times] = []
    for number in range(_N_ROUNDS):
        patience = _PATIENCE if number < _N_LEAST_ROUNDS else 1.0
        if interrupted() or backend.decode_s - started_s > patience * budget_s:
            break
        single.append({})
        batch.append({})
        for count in tried:
            if interrupted():
                break
            backend.set_threads(count, count)
            # The first decode after a change may have to start threads: it is not timed.
            time_batch(backend, text, 1)
            _time(backend, text, 1, count, single[-1])
            _time(backend, text, BATCH_ROWS, count, batch[-1])
    backend.remove(0)
    if not interrupted():
        chosen = Threads(choose_threads(single, default), choose_threads(batch, default))
    backend.set_threads(chosen.n_single, chosen.n_batch)
    return chosen


def _time(
    backend: LlamaBackend,
    text: list[int],
    n_rows: int,
    count: int,
    times: _Times,
) -> None:
    """Add the seconds of a batch to the times; a batch without room in the context has none."""
    seconds = time_batch(backend, text, n_rows)
    if seconds:
        times[count] = seconds


def choose_threads(rounds: Sequence[Mapping[int, float]], default: int) -> int:
    """Return the fastest number of threads; `default` unless another one is clearly faster.

    Args:
        rounds: the seconds of a decode by the number of threads, in each round.
        default: the number to which the others are compared.
    """
    best = default
    best_ratio = 1.0 - _MARGIN
    timed = [times for times in rounds if default in times]
    for count in sorted({count for times in timed for count in times} - {default}):
        ratios = [times[count] / times[default] for times in timed if count in times]
        if len(ratios) < _N_LEAST_ROUNDS:
            continue
        ratio = statistics.median(ratios)
        n_faster = sum(each < 1.0 for each in ratios)
        if ratio < best_ratio and n_faster >= _MAJORITY * len(ratios):
            best = count
            best_ratio = ratio
    return best
