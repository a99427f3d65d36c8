"""Measure with how many threads a model decodes fastest.

Decoding a single row is limited by memory, and decoding a batch by computation. So each has a
thread count of its own.
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
from specgen.system.machine import usable_threads

if TYPE_CHECKING:
    from specgen.llama import LlamaBackend
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: Seconds of decoding to spend on one model.
THREADS_BUDGET_S = 20.0
#: The minimum number of rounds: with fewer of them the default is kept.
_MIN_ROUNDS = 4
#: The maximum number of rounds.
_MAX_ROUNDS = 9
#: Until the minimum number of rounds is reached, the budget is this many times larger.
_PATIENCE = 3.0
#: The number of rows of the timed batch, which is typical of a round that drafts.
BATCH_ROWS = 6
#: A thread count is only chosen if it is faster than the default by at least this share...
_MARGIN = 0.03
#: ... and if it is faster in at least this share of the rounds.
_MAJORITY = 0.75

#: Seconds per decode, by thread count.
_Times: TypeAlias = dict[int, float]


def tune_threads(
    session: Session,
    model: Path,
    interrupted: Callable[[], bool],
    progress: Progress,
    *,
    is_draft: bool,
) -> dict[str, Threads]:
    """Measure the fastest thread counts of a session's target or draft, and store them.

    Args:
        session: The session.
        model: The file of the target or the draft.
        interrupted: Whether to stop.
        progress: Receives the name of the current step, how much of it is done, and the total.
        is_draft: Whether the model is the session's draft.

    Returns:
        The thread counts by the model's name; empty if the user gave some, if the target is
        streamed, if the draft has no context to measure, or if interrupted.
    """
    options = session.options.draft_context if is_draft else session.options.target_context
    is_given = options.n_threads is not None or options.n_threads_batch is not None
    # A pass of a streamed target takes as long as its reads from disk, with any threads.
    is_limited_by_disk = session.target.is_streamed and not is_draft
    if is_given or is_limited_by_disk or interrupted():
        return {}
    progress(f"threads for {model.name}", 0, 1)
    default = default_threads()
    counts = thread_counts(default, usable_threads().amount)
    with session.contexts(short_context(session), drafts=is_draft) as (target, drafts):
        if is_draft and not drafts:  # the draft has no context of its own
            return {}
        backend = drafts[0] if is_draft else target
        fastest = measure_threads(
            backend,
            counts,
            default,
            THREADS_BUDGET_S,
            interrupted,
        )
    if interrupted():
        return {}
    session.measurements.keep_threads(model, options, fastest)
    return {model.name: fastest}


def thread_counts(n_cores: int, n_threads_max: int) -> list[int]:
    """Return the thread counts to try, in ascending order.

    These are the multiples of an eighth of the cores, from a quarter to all, and the number of
    threads that can run at once.

    Args:
        n_cores: The default number of threads, which is the number of usable physical cores.
        n_threads_max: The number of threads of this process that can run at once.
    """
    shares = {n_cores * eighths // 8 for eighths in range(2, 9)} - {0}
    return sorted({*shares, n_threads_max})


def measure_threads(
    backend: LlamaBackend,
    counts: Collection[int],
    default: int,
    budget_s: float,
    interrupted: Callable[[], bool] = never,
) -> Threads:
    """Measure the fastest thread counts of a backend, and set them.

    All thread counts are timed in each round, since a machine's speed changes over time.

    Args:
        backend: The backend, whose context is empty before and after.
        counts: The thread counts to try, in addition to `default`.
        default: The thread count that is kept unless another one is clearly faster.
        budget_s: Seconds of decoding after which no more rounds begin.
        interrupted: Whether to stop and keep the default.

    Returns:
        The thread counts for single rows and for batches.
    """
    backend.set_threads(default, default)
    fastest = Threads(default, default)
    tried_counts = sorted({default, *counts}, reverse=True)
    if len(tried_counts) == 1:
        return fastest
    text = begin_text(backend)
    started_s = backend.decode_s
    # The times of single rows and of batches, one element per round.
    single_rounds: list[_Times] = []
    batch_rounds: list[_Times] = []
    for n_rounds in range(_MAX_ROUNDS):
        patience = _PATIENCE if n_rounds < _MIN_ROUNDS else 1.0
        if interrupted() or backend.decode_s - started_s > patience * budget_s:
            break
        single_s, batch_s = _time_round(backend, text, tried_counts, interrupted)
        single_rounds.append(single_s)
        batch_rounds.append(batch_s)
    backend.remove(0)
    if not interrupted():
        fastest = Threads(
            choose_threads(single_rounds, default),
            choose_threads(batch_rounds, default),
        )
    backend.set_threads(fastest.n_single, fastest.n_batch)
    return fastest


def _time_round(
    backend: LlamaBackend,
    text: Sequence[int],
    counts: Sequence[int],
    interrupted: Callable[[], bool],
) -> tuple[_Times, _Times]:
    """Time a single row and a batch once with each thread count, up to an interruption.

    Args:
        backend: The backend.
        text: The tokens that the batches consist of.
        counts: The thread counts.
        interrupted: Whether to stop.

    Returns:
        The seconds of a single row, and those of a batch, by thread count. Batches for which the
        context has no room are left out.
    """
    single_s: _Times = {}
    batch_s: _Times = {}
    for count in counts:
        if interrupted():
            break
        backend.set_threads(count, count)
        # The first decode after a change may have to start threads, so its time is not used.
        time_batch(backend, text, 1)
        for n_rows, times_s in ((1, single_s), (BATCH_ROWS, batch_s)):
            seconds = time_batch(backend, text, n_rows)
            if seconds:
                times_s[count] = seconds
    return single_s, batch_s


def choose_threads(rounds: Sequence[Mapping[int, float]], default: int) -> int:
    """Return the fastest thread count; `default` unless another one is clearly faster.

    Args:
        rounds: Seconds per decode by thread count, for each round.
        default: The thread count with which the others are compared.
    """
    best = default
    best_ratio = 1.0 - _MARGIN
    # An interrupted round may lack the default.
    comparable = [times for times in rounds if default in times]
    for count in sorted({count for times in comparable for count in times} - {default}):
        ratios = [times[count] / times[default] for times in comparable if count in times]
        if len(ratios) < _MIN_ROUNDS:
            continue
        median_ratio = statistics.median(ratios)
        n_faster = sum(ratio < 1.0 for ratio in ratios)
        if median_ratio < best_ratio and n_faster >= _MAJORITY * len(ratios):
            best = count
            best_ratio = median_ratio
    return best
