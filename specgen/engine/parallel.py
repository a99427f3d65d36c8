"""How many answers to make at once: as many as is fastest, and as the memory has room for."""

from __future__ import annotations

from collections.abc import Callable

from specgen.engine.engine import MAX_SEQUENCES, Engine
from specgen.engine.measurements import measure_if_new
from specgen.engine.session import Session
from specgen.errors import MemoryLimitError

#: Numbers of answers at once that are looked at.
_CHOICES = (1, 2, 4, 8, 16)
#: More answers at once are taken if that makes so many times as many tokens a second: each needs
#: memory.
_LEAST_GAIN = 1.05
#: Tokens of the contexts that decodes are timed in, where their costs are not known.
_N_CTX = 512


def fastest_parallel(
    session: Session, n_answers: int, interrupted: Callable[[], bool] = lambda: False
) -> int:
    """The number of answers at once that makes most tokens a second, by the measured costs of the
    target's batches; they are measured now if they are not known. Raises `MemoryLimitError`."""
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
    """An engine for up to `n_parallel` answers of `n_ctx` tokens each, and fewer if the memory has no
    room for as many, unless the number `is_fixed`; `interrupted` and `learn_alone` are the engine's.
    Raises `MemoryLimitError`."""
    while True:
        try:
            return Engine(
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
