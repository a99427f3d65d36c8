"""Calibration: measure what decodes cost on this machine, at first use.

`calibrate` is the entry point. It measures the costs that are not known yet and writes them into
the session's cost tables. Each answer then refines them (`method/cost_table.py`), and a file keeps
them (`measurement_store.py`). The expected speed-up of a draft that was never tried with its
target is computed from these costs; `specgen.measure.draft_trial` measures the actual speed-up.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from specgen.drafters.interface import Key
from specgen.method.backend import Backend, Batch
from specgen.method.cost_table import CostTable
from specgen.method.drafter import never
from specgen.session.session import Session
from specgen.system.machine import LoadOfOthers, is_busy

#: A typical acceptance rate for draft models of the target's own family that stop drafting when
#: they are unsure.
ASSUMED_ACCEPTANCE = 0.7
#: A draft is used only if its expected speed-up is at least this. The margin above 1 pays for the
#: draft's prefill, and for prompts on which it does worse.
MIN_SPEEDUP = 1.1
#: A table with fewer batch sizes was not calibrated: it has only seen a few decodes.
MIN_SIZES = 3
#: The text to decode while timing.
_FILLER = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on)."
#: The number of its tokens that are decoded before anything is timed: llama.cpp plans its graphs.
_N_UNTIMED = 4
#: All batch sizes up to this one are timed. Between larger timed sizes, costs are interpolated.
_N_DENSE = 8
#: The number of times that each size is timed.
_N_REPEATS = 3
#: The total decode time of a calibration, in seconds. It can be short, since answers refine costs.
_BUDGET_S = 2.0
#: The same on a busy machine, where even the longer time would give rough costs only.
_BUSY_BUDGET_S = 0.5
#: The minimum share of that time for a draft model.
_DRAFT_SHARE = 0.25
#: Batch sizes to time for a draft model: drafted tokens, the tokens of the last round, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)
#: The size, in tokens, of the contexts in which decodes are timed.
_TIMING_N_CTX = 256

#: Makes a context manager that shows a text, such as a spinner's, while it is open.
Status: TypeAlias = Callable[[str], contextlib.AbstractContextManager[object]]


def no_status(_text: str) -> contextlib.AbstractContextManager[object]:
    """Show nothing."""
    return contextlib.nullcontext()


# --- entry points -----------------------------------------------------------------------------


def calibrate(
    session: Session,
    interrupted: Callable[[], bool] = never,
    status: Status = no_status,
) -> str:
    """Measure what drafting costs on this machine, if the drafting policy needs to know it.

    Nothing is measured if there is no draft, if the policy does not depend on costs, or if the
    costs are already known.

    Args:
        session: The loaded models; its cost tables are filled in.
        interrupted: Checked between decodes.
        status: Shows the user what is being done.

    Returns:
        A notice for the user if the machine was busy, so that the costs are rough; else "".

    Raises:
        BackendError: If a batch cannot be decoded.
        MemoryLimitError: If there is no memory for the contexts.
        KeyboardInterrupt: If `interrupted` returned True.
    """
    draft = session.draft
    if not session.options.drafting.is_by_cost or draft is None:
        return ""
    if is_pair_measured(session, draft.cost_key):
        return ""
    with status("measuring what drafting costs"):
        measure_costs(session, interrupted)
    # At once: after an answer on a busy machine, the costs would not be written any more.
    session.measurements.save()
    if session.costs.of(None).are_rough:
        return (
            "the machine was busy while the costs of drafting were measured: "
            "they are rough, and will be measured again in some minutes"
        )
    return ""


def measure_costs(session: Session, interrupted: Callable[[], bool] = never) -> None:
    """Measure decode costs that are not known yet, in short contexts opened for that purpose.

    Costs that were measured while the machine was busy are rough: they are used for some minutes
    only, and then measured again. They may suggest that no draft pays; nothing would be drafted
    from then on, so no decode would ever correct them.

    Raises:
        BackendError: If a batch cannot be decoded.
        MemoryLimitError: If there is no memory for the contexts.
        KeyboardInterrupt: If `interrupted` returned True.
    """
    costs = session.costs
    cost_key = session.draft.cost_key if session.draft is not None else None
    if is_pair_measured(session, cost_key):
        return
    started_s = session.clock()
    load = LoadOfOthers()

    def budget_s() -> float:
        """Return the decode time for all models, which depends on the load so far."""
        return _BUSY_BUDGET_S if is_busy(load.share) else _BUDGET_S

    #: The keys of the costs that were measured.
    measured: list[Key | None] = []
    with session.contexts(short_context(session)) as (target, drafts):
        has_draft = bool(drafts) and cost_key is not None
        target_share = 1.0 - _DRAFT_SHARE if has_draft else 1.0
        decode_s_before = target.decode_s
        if not _is_current(session, None, session.n_rows_max):
            measured.append(None)
            _time_target(session, target, lambda: target_share * budget_s(), interrupted)
        if has_draft and not _is_current(session, cost_key):
            # The draft also gets the time that the target did not use.
            target_s = target.decode_s - decode_s_before
            measured.append(cost_key)
            _time_missing(
                costs.table(cost_key),
                drafts[0],
                _DRAFT_SIZES,
                budget_s=lambda: max(_DRAFT_SHARE * budget_s(), budget_s() - target_s),
                n_rows=1,
                interrupted=interrupted,
                times_all=costs.of(cost_key).are_outdated,
            )
    for key in measured:
        costs.of(key).mark(are_rough=is_busy(load.share))
    session.setup_s["measuring_s"] += session.clock() - started_s


def target_costs(session: Session, interrupted: Callable[[], bool] = never) -> CostTable:
    """Return the target's cost table, measuring it first if its costs are not known.

    Raises:
        BackendError: If a batch cannot be decoded.
        MemoryLimitError: If there is no memory for the contexts.
        KeyboardInterrupt: If `interrupted` returned True.
    """
    if not _is_current(session, None):
        measure_costs(session, interrupted)
    return session.costs.table()


# --- what is known ----------------------------------------------------------------------------


def _is_measured(table: CostTable, n_rows: int = 1) -> bool:
    """Return whether a table was calibrated for batches of up to `n_rows` rows."""
    known = table.known
    return len(known) >= MIN_SIZES and max(known) >= n_rows


def _is_current(
    session: Session,
    model: Key | None,
    n_rows: int = 1,
) -> bool:
    """Return whether a model was calibrated, and need not be calibrated again.

    Args:
        session: The session, with its cost tables.
        model: The key of a draft's costs; None for the target.
        n_rows: The number of rows of the largest batch that has to be known.
    """
    table = session.costs.table(model)
    return _is_measured(table, n_rows) and not session.costs.of(model).are_outdated


def is_pair_measured(session: Session, draft: Key | None) -> bool:
    """Return whether the target and a draft were calibrated, and need not be calibrated again.

    The target's costs have to cover the largest batch of a round.

    Args:
        session: The session, with its cost tables.
        draft: The key of the draft's costs; None if the draft has no model to time.
    """
    if not _is_current(session, None, session.n_rows_max):
        return False
    return draft is None or _is_current(session, draft)


def known_costs(session: Session, draft: Key) -> PairCosts | None:
    """Return the measured costs of the target and of a draft.

    Args:
        session: The session, with its cost tables.
        draft: The key of the draft's costs. They may be known before the draft is loaded.

    Returns:
        The costs; None if they were not measured, or if rounds have no room for a drafted token.
    """
    if not is_pair_measured(session, draft):
        return None
    target_s = session.costs.table().known
    batch_s = {n: seconds for n, seconds in target_s.items() if n <= session.n_rows_max}
    if len(batch_s) <= 1:
        return None
    # A parallel draft model predicts several tokens with one decode, which share its cost. A draft
    # that is not loaded yet counts as predicting one token at a time.
    n_at_once = session.draft.n_at_once if session.draft is not None else 1
    draft_token_s = session.costs.table(draft).seconds(n_at_once) / n_at_once
    return PairCosts(batch_s, draft_token_s)


# --- what a draft is expected to gain ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What decodes of a target and of its draft cost."""

    #: The target's seconds per batch, by the number of rows. It contains the cost of 1 row.
    batch_s: Mapping[int, float]
    #: Seconds per drafted token.
    draft_token_s: float = 0.0

    def seconds(self, n_rows: int) -> float:
        """Return the target's seconds for a batch of `n_rows` rows.

        A batch never counts as cheaper than one row, even if one row was timed at a busier moment.
        """
        return max(self.batch_s[1], CostTable(self.batch_s).seconds(n_rows))


def expected_speedup(costs: PairCosts, acceptance: float = ASSUMED_ACCEPTANCE) -> float:
    """Return a draft's expected speed-up, with the best number of drafted tokens per round.

    If each drafted token is accepted with probability a, a round with n of them yields
    1 + a + ... + a^n tokens on average. Plain decoding takes v(1) seconds for each of these; the
    round takes v(n + 1) for the target's batch, and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    This is theorem 3.8 of Leviathan et al. (arXiv:2211.17192), generalized to batches that cost
    more than one row.

    Args:
        costs: v (`seconds`) and c (`draft_token_s`). n + 1 goes up to the largest timed batch.
        acceptance: a, the acceptance rate.
    """

    def speedup(n_drafted: int) -> float:
        n_tokens = sum(acceptance**n_before for n_before in range(n_drafted + 1))
        seconds = costs.seconds(n_drafted + 1) + n_drafted * costs.draft_token_s
        return costs.batch_s[1] * n_tokens / seconds

    n_rows_max = max(costs.batch_s)
    return max(map(speedup, range(1, n_rows_max)))


def break_even(costs: PairCosts) -> float | None:
    """Return the lowest acceptance rate, in steps of 1%, at which a draft pays.

    Returns:
        The rate; None if even a draft that is always accepted would save no time.
    """
    for percent in range(101):
        acceptance = percent / 100
        if expected_speedup(costs, acceptance) >= 1.0:
            return acceptance
    return None


# --- timing -----------------------------------------------------------------------------------


def short_context(session: Session) -> int:
    """Return the size of a context for timing, in tokens."""
    n_train = session.target.n_ctx_train  # 0 if the model file does not say
    return min(_TIMING_N_CTX, n_train) if n_train > 0 else _TIMING_N_CTX


def timed_batch_sizes(n_max: int) -> list[int]:
    """Return the batch sizes to time, ascending, from 1 to `n_max`.

    They include every size up to `_N_DENSE`; each size beyond is a quarter larger than the last.
    """
    sizes = list(range(1, min(n_max, _N_DENSE) + 1))
    while sizes[-1] < n_max:
        sizes.append(min(n_max, sizes[-1] + sizes[-1] // 4))
    return sizes


def _time_target(
    session: Session,
    target: Backend,
    budget_s: Callable[[], float],
    interrupted: Callable[[], bool],
) -> None:
    """Time the batches of the target, as many sizes as the time allows."""
    costs = session.costs
    if session.target.is_streamed:
        _time_passes(costs.table(), target, session.n_rows_max, interrupted)
        return
    _time_missing(
        costs.table(),
        target,
        timed_batch_sizes(max(MIN_SIZES, session.n_rows_max)),
        budget_s=budget_s,
        n_rows=session.n_rows_max,
        interrupted=interrupted,
        times_all=costs.of(None).are_outdated,
    )


def _time_missing(
    table: CostTable,
    backend: Backend,
    sizes: Sequence[int],
    budget_s: Callable[[], float],
    n_rows: int,
    interrupted: Callable[[], bool],
    *,
    times_all: bool,
) -> None:
    """Time the batch sizes that a table lacks, or with `times_all` those that it has, too.

    If the budget runs out before a batch of `n_rows` rows was timed, its cost is extrapolated. If
    `measure_sizes` raises, the table is unchanged.
    """
    # A few decodes may have left costs in a table that was never calibrated: time all its sizes.
    times_all = times_all or not _is_measured(table)
    # One row is always timed again, so that the other sizes are compared with a current figure.
    sizes_to_time = [size for size in sizes if times_all or size == 1 or size not in table.known]
    for size, seconds in measure_sizes(backend, sizes_to_time, budget_s, interrupted).items():
        table.set_seconds(size, seconds)
    if table and max(table.known) < n_rows:
        table.set_seconds(n_rows, table.seconds(n_rows))


def _time_passes(
    table: CostTable,
    target: Backend,
    n_rows: int,
    interrupted: Callable[[], bool],
) -> None:
    """Time a streamed target with only two batches, the smallest and the largest of a round.

    Each of them is a pass that reads weights from disk, which takes seconds, whatever the number
    of rows. The costs of batches between them are interpolated, and answers correct them.

    Args:
        table: The target's costs.
        target: The target's context, which is empty before and after.
        n_rows: The number of rows of the largest batch.
        interrupted: Checked between the two.

    Raises:
        BackendError: If a batch cannot be decoded.
        KeyboardInterrupt: If `interrupted` returned True.
    """
    decode_s_before = target.decode_s
    text = begin_text(target)
    small_s = target.decode_s - decode_s_before
    if interrupted():
        raise KeyboardInterrupt
    large_s = time_batch(target, text, n_rows)
    target.remove(0)
    if large_s is None:
        large_s = small_s
    # By noise, the first pass may have taken longer: a batch never costs more than a larger one.
    small_s = min(small_s, large_s)
    for size in range(1, max(MIN_SIZES, min(n_rows, _N_UNTIMED + 1))):
        table.set_seconds(size, small_s)
    table.set_seconds(max(MIN_SIZES, n_rows), large_s)


def measure_sizes(
    backend: Backend,
    sizes: Iterable[int],
    budget_s: Callable[[], float],
    interrupted: Callable[[], bool] = never,
) -> dict[int, float]:
    """Time batches of several sizes.

    Powers of two are timed first, so that the sizes cover the whole range if the budget runs out.

    Args:
        backend: The model's context. It is empty before and after.
        sizes: The numbers of rows.
        budget_s: Called before each batch. None is started after this many seconds of decoding,
            once `MIN_SIZES` sizes are timed: a table with fewer would be measured again.
        interrupted: Checked between decodes.

    Returns:
        The median seconds of each size that was timed, by size.

    Raises:
        BackendError: If a batch cannot be decoded.
        KeyboardInterrupt: If `interrupted` returned True.
    """
    decode_s_before = backend.decode_s
    text = begin_text(backend)
    samples: defaultdict[int, list[float]] = defaultdict(list)
    ordered = sorted(sizes, key=lambda size: (not _is_power_of_two(size), size))
    for _ in range(_N_REPEATS):
        for size in ordered:
            if len(samples) >= MIN_SIZES and backend.decode_s - decode_s_before > budget_s():
                break
            if interrupted():
                raise KeyboardInterrupt
            seconds = time_batch(backend, text, size)
            if seconds is not None:
                samples[size].append(seconds)
    backend.remove(0)
    # Disturbances only add time: if there are two medians, take the smaller one.
    return {size: statistics.median_low(times_s) for size, times_s in sorted(samples.items())}


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def begin_text(backend: Backend) -> list[int]:
    """Decode the first tokens of a sample text, and return all tokens of the text."""
    # Even a vocabulary that cannot encode the text has a token 0.
    tokens = backend.vocabulary.tokenize(_FILLER, add_special=True, parse_special=False) or [0]
    n_first = min(_N_UNTIMED, backend.n_ctx // 2, backend.n_batch)
    if n_first > 0:
        backend.decode(Batch.of(tokens[:n_first], 0, 1))
    return tokens


def time_batch(
    target: Backend,
    text: Sequence[int],
    n_rows: int,
) -> float | None:
    """Time the decode of one batch, and restore the cache.

    If the decode has to undo the previous one first (a rollback), that counts too.

    Args:
        target: The model's context.
        text: A text, repeated if it is too short; the rows are its last tokens. It is real text,
            and not one repeated token, because the time of a mixture of experts depends on which
            experts the tokens are routed to.
        n_rows: The number of rows.

    Returns:
        Its seconds; None if the batch does not fit into the context.
    """
    length = target.length(0)
    if length + n_rows > target.n_ctx or n_rows > target.n_batch:
        return None
    target.checkpoint(0)
    rows = [text[(row - n_rows) % len(text)] for row in range(n_rows)]
    # With CUDA graphs, the first two decodes of a size are slower; the third replays its graph.
    n_decodes = 3 if target.replays_graphs else 1
    seconds = 0.0
    for _ in range(n_decodes):
        decode_s_before = target.decode_s
        target.decode(Batch.of(rows, length, target.n_outputs))
        seconds = target.decode_s - decode_s_before
        target.remove(0, length)
    return seconds
