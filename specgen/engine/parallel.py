"""How many answers to generate at once: the fastest number that the memory has room for."""

from __future__ import annotations

from collections.abc import Callable

from specgen.engine.engine import MAX_SEQUENCES, Engine
from specgen.engine.measurements import measure_if_new
from specgen.engine.session import Session
from specgen.errors import MemoryLimitError

#: The numbers of answers at once that are considered.
_CHOICES = (1, 2, 4, 8, 16)
#: A larger number must give at least this many times the tokens per second, since each answer needs
#: memory.
_LEAST_GAIN = 1.05
#: The size, in tokens, of the contexts in which decodes are timed if their costs are not known.
_N_CTX = 512


def fastest_parallel(
    session: Session, n_answers: int, interrupted: Callable[[], bool] = lambda: False
) -> int:
    """Return the number of answers at once that gives most tokens per second, by the costs of the
    target's batches. Costs that are not known are measured now. Raises `MemoryLimitError`."""
    if n_answers < 2:
        return 1
    with session.contexts(_N_CTX) as (target, draft):
        measure_if_new(session, target, draft, interrupted)
    table = session.costs.table()
    n_most = min(n_answers, MAX_SEQUENCES // session.n_sequences_max)
    best = 1
    for n in _CHOICES:
        is_faster = n / table.seconds(n) > _LEAST_GAIN * best / table.seconds(best)
        if n <= n_most and is_faster:
            best = n
    return best


def largest_engine(
    session: Session,
    n_parallel: int,
    n_ctx: int | None,
    *,
    is_fixed: bool,
    interrupted: Callable[[], bool] = lambda: False,
    learn_alone: bool = False,
) -> Engine:
    """Return an engine for up to `n_parallel` answers of `n_ctx` tokens each. Unless the number
    `is_fixed`, it is halved until the contexts fit into memory, and 1 for models that cannot make several
    answers at once, with a notice. `interrupted` and `learn_alone` are the engine's. Raises
    `MemoryLimitError`, `UsageError` if a fixed number is not possible."""
    notice = None
    if not is_fixed and n_parallel > 1 and (why := session.why_one_sequence):
        n_parallel, notice = 1, f"{why}: answers are made one after the other"
    while True:
        try:
            engine = Engine(
                session,
                n_parallel=n_parallel,
                n_ctx=n_ctx,
                interrupted=interrupted,
                learn_alone=learn_alone,
            )
        except MemoryLimitError:
            if is_fixed or n_parallel == 1:
                raise
            n_parallel //= 2
            continue
        if notice is not None:
            engine.tell(notice)
        return engine
