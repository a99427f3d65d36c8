"""First-use measurements: how long decodes take, and how often a draft agrees with the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from specgen.drafters.kind import Key
from specgen.method.backend import Backend
from specgen.method.tables import CostTable
from specgen.session.agreement import N_KNOWN, N_TOKENS, TEXT, read_states, sample_agreement
from specgen.session.costs import (
    MIN_SIZES,
    Costs,
    complete,
    expected_gain,
    is_measured,
    timed_batch_sizes,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.prompts import Prompt, tokenize
from specgen.session.session import MAX_SEQUENCES, Session
from specgen.system.machine import LoadOfOthers, is_busy
from specgen.system.units import seconds_text
from specgen.text.hidden_trail import StatesBackend
from specgen.text.text_state import TextState

#: Batch sizes to time for a draft model: drafted tokens, the tokens of the last round, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)
#: The numbers of answers at once that are considered. A larger number must give at least so many times the
#: tokens per second, since each answer needs memory.
_AT_ONCE, _LEAST_GAIN = (1, 2, 4, 8, 16), 1.05
#: The size, in tokens, of the contexts in which decodes are timed if their costs are not known.
_N_SHORT = 256


def is_pair_measured(session: Session, draft: Key | None) -> bool:
    """Return whether the costs of the target, up to the largest batch of a round, and of a draft model
    are known."""
    own = is_measured(session.costs.table(), session.n_rows_max)
    return own and (draft is None or is_measured(session.costs.table(draft)))


def known_costs(session: Session, draft: Key) -> Costs | None:
    """Return the costs of the target and of a draft model; None if they are not known, or only for one
    size of batches."""
    if not is_pair_measured(session, draft):
        return None
    known = session.costs.table().known
    sizes = {n: seconds for n, seconds in known.items() if n <= session.n_rows_max}
    table = session.costs.table(draft)
    n_at_once = session.draft.n_at_once if session.draft is not None else 1
    token_s = table.seconds(n_at_once) / n_at_once
    return Costs(sizes, token_s) if len(sizes) > 1 else None


def measure_costs(session: Session, draft: Path) -> Costs | None:
    """Return the costs of the target and of its draft model `draft`. Costs that are not known are measured.
    None if a round has no room for a draft. Raises `MemoryLimitError` if the contexts do not fit into
    memory, and `BackendError` if a decode fails."""
    if not is_pair_measured(session, draft):
        _measure(session)
    return known_costs(session, draft)


def short_context(session: Session) -> int:
    """Return the size, in tokens, of a context in which only costs are measured."""
    n_train = session.target.n_ctx_train
    return min(_N_SHORT, n_train) if n_train > 0 else _N_SHORT


def calibrate(session: Session, interrupted: Callable[[], bool] = lambda: False) -> str:
    """Measure what drafting costs here and how often the draft agrees with the target, if costs decide how much is
    drafted and this is not known, in short contexts of their own. Return a sentence that says so; empty if all
    was known. Raise what `measure_if_new` raises, and `MemoryLimitError`."""
    draft = session.draft
    if not session.options.drafting.is_by_cost or draft is None:
        return ""
    if is_pair_measured(session, draft.timed) and not _wants_agreement(session):
        return ""
    took = seconds_text(_measure(session, interrupted))
    again = "; the machine was busy, so they will be measured again" * session.costs.was_busy
    return f"measured the costs of drafting and the expected acceptance in {took}{again}"


def _measure(session: Session, interrupted: Callable[[], bool] = lambda: False) -> float:
    """Call `measure_if_new` with short contexts."""
    with session.contexts(short_context(session)) as (target, drafts):
        return measure_if_new(session, target, drafts, interrupted)


def measure_if_new(
    session: Session,
    target: Backend,
    drafts: Sequence[Backend],
    interrupted: Callable[[], bool] = lambda: False,
) -> float:
    """Measure the costs of decodes and, if costs decide how much is drafted, how often a draft model
    agrees with the target. Results that are known are not measured again. The contexts must be empty.
    Return the seconds that this took; 0 if everything was known.

    If other programs slowed the measurement down (`ModelCosts.was_busy`), its costs are kept for a few runs only:
    by the table of a busy machine perhaps no draft pays, and then no decode would correct it. Raise
    `KeyboardInterrupt` if `interrupted` returns True between decodes; that measurement is not kept."""
    started, costs = session.clock(), session.costs
    timed = session.draft.timed if session.draft is not None else None
    is_known = is_pair_measured(session, timed)
    if not is_known:
        load = LoadOfOthers()
        sizes = timed_batch_sizes(max(MIN_SIZES, session.n_rows_max))
        complete(costs.table(), target, sizes, session.n_rows_max, interrupted)
        if drafts and timed is not None:
            complete(costs.table(timed), drafts[0], _DRAFT_SIZES, interrupted=interrupted)
        costs.was_busy = is_busy(load.share)
        if costs.was_busy:
            costs.keep_briefly(timed)
    is_sampled = bool(drafts) and _sample_agreement(session, target, drafts, interrupted)
    return session.clock() - started if is_sampled or not is_known else 0.0


def fastest_parallel(
    session: Session, n_answers: int, interrupted: Callable[[], bool] = lambda: False
) -> int:
    """Return the number of answers at once that gives most tokens per second, by the costs of the
    target's batches. Costs that are not known are measured now. Raise `MemoryLimitError`."""
    if n_answers < 2:
        return 1
    table = target_costs(session, interrupted)
    n_most = min(n_answers, MAX_SEQUENCES // session.n_sequences_max)
    best = 1
    for n in _AT_ONCE:
        is_faster = n / table.seconds(n) > _LEAST_GAIN * best / table.seconds(best)
        if n <= n_most and is_faster:
            best = n
    return best


def target_costs(session: Session, interrupted: Callable[[], bool] = lambda: False) -> CostTable:
    """Return the costs of the target. If they are not known, they are measured now. Raise
    `MemoryLimitError`, and `KeyboardInterrupt` if interrupted."""
    if not is_measured(session.costs.table()):
        _measure(session, interrupted)
    return session.costs.table()


def tokens_read_in(
    session: Session, seconds: float, interrupted: Callable[[], bool] = lambda: False
) -> int:
    """Return how many tokens of a prompt the target reads in `seconds`, by its costs. Raise what
    `target_costs` raises."""
    table = target_costs(session, interrupted)
    n_rows = max(table.known)
    return int(seconds * n_rows / table.seconds(n_rows))


def _wants_agreement(session: Session) -> bool:
    """Return whether the draft's agreement with the target is to be measured: it is not known, and the draft would
    pay if it always agreed."""
    draft, acceptance = session.draft, DrafterFactory(session).acceptance()
    if draft is None or draft.timed is None or draft.reads == "cache":
        return False
    is_known = draft.origin in acceptance and acceptance[draft.origin].n_judged >= N_KNOWN
    if is_known or not session.options.drafting.is_by_cost:
        return False
    costs = known_costs(session, draft.timed)
    return costs is not None and expected_gain(costs, 1.0).speedup > 1.0


def _sample_agreement(
    session: Session,
    target: Backend,
    drafts: Sequence[Backend],
    interrupted: Callable[[], bool],
) -> bool:
    """Measure how often the draft agrees with the target, if that is wanted. Return whether anything was
    measured."""
    if not _wants_agreement(session):
        return False
    tokens = tokenize(session.target.vocabulary, TEXT, parse_special=False)[:N_TOKENS]
    # The most likely tokens are compared, whatever the user's samplers are.
    factory, state = DrafterFactory(session), TextState(())
    drafter = factory.chain_drafter(Prompt(TEXT, tuple(tokens[:1])), drafts, state)
    if isinstance(drafts[0], StatesBackend):
        read_states(target, tokens[: target.n_ctx], drafts[0].trails[0])
    try:
        n_compared = sample_agreement(
            target,
            drafter,
            state,
            tokens,
            factory.acceptance(),
            is_translated=session.own_vocabulary is not None,
            interrupted=interrupted,
        )
        return n_compared > 0
    finally:
        for each in drafts:
            each.remove(0)
