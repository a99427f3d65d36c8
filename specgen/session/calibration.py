"""Calibration: what decodes cost on this machine, measured at first use.

`calibrate` is the entry: it measures what is not known yet and writes it into the session's cost
tables, which answers correct from then on (`method/cost_table.py`) and which are kept in a file
(`measurement_store.py`). The speed-up that is expected of a draft that was never tried with its
target follows from these costs. `specgen.measure.draft_trial` measures one.
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

#: The usual acceptance rate of draft models of the target's own family, if drafts stop where they
#: are unsure.
ACCEPTANCE = 0.7
#: The least expected speed-up of a draft in use: the margin pays for prefill, and for prompts that
#: suit it less.
WORTH = 1.1
#: A table with fewer sizes was not measured: it has only seen a few decodes.
MIN_SIZES = 3
#: A text to decode. The first tokens come before anything is timed, so that llama.cpp has planned
#: its graphs.
_FILLER = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on)."
_N_FILLER = 4
#: All sizes of batches up to this one are timed; of larger ones only some, since the others are
#: interpolated.
_N_DENSE = 8
#: How often each size is timed.
_N_REPEATS = 3
#: The seconds of all decodes; answers correct these costs.
_BUDGET_S = 2.0
#: The least share of them for a draft model.
_DRAFT_SHARE = 0.25
#: Batch sizes to time for a draft model: drafted tokens, the tokens of the last round, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)
#: The size, in tokens, of the contexts in which decodes are timed.
_N_SHORT = 256

#: Shows what is being done while a context is open.
Status: TypeAlias = Callable[[str], contextlib.AbstractContextManager[object]]


def no_status(_text: str) -> contextlib.AbstractContextManager[object]:
    """Show nothing."""
    return contextlib.nullcontext()


# --- the entry --------------------------------------------------------------------------------


def calibrate(
    session: Session,
    interrupted: Callable[[], bool] = never,
    status: Status = no_status,
) -> str:
    """Measure what drafting costs here, if costs decide and are not known.

    Returns:
        A sentence if that has to be done again, else "".

    Raises:
        KeyboardInterrupt: If `interrupted` returned True.
    """
    draft = session.draft
    if not session.options.drafting.is_by_cost or draft is None:
        return ""
    if is_pair_measured(session, draft.timed):
        return ""
    with status("measuring what drafting costs"):
        measure_costs(session, interrupted)
    if session.costs.was_busy:
        return (
            "the machine was busy while the costs of drafting were measured: "
            "they will be measured again"
        )
    return ""


def measure_costs(session: Session, interrupted: Callable[[], bool] = never) -> None:
    """Measure the costs of decodes that are not known, in short contexts of their own.

    What was measured while the machine was busy is not kept: it may say that no draft pays, and
    then no decode would correct it.

    Raises:
        BackendError: If a batch cannot be decoded.
        MemoryLimitError: If there is no memory for the contexts.
        KeyboardInterrupt: If `interrupted` returned True.
    """
    costs = session.costs
    timed = session.draft.timed if session.draft is not None else None
    if is_pair_measured(session, timed):
        return
    started_s = session.clock()
    load = LoadOfOthers()
    sizes = timed_batch_sizes(max(MIN_SIZES, session.n_rows_max))
    with session.contexts(short_context(session)) as (target, drafts):
        has_draft = bool(drafts) and timed is not None
        target_budget_s = _BUDGET_S
        if has_draft:
            target_budget_s *= 1.0 - _DRAFT_SHARE
        decode_s_before = target.decode_s
        _time_missing(
            costs.table(),
            target,
            sizes,
            target_budget_s,
            session.n_rows_max,
            interrupted,
        )
        if has_draft:
            left_s = _BUDGET_S - (target.decode_s - decode_s_before)
            draft_budget_s = max(_DRAFT_SHARE * _BUDGET_S, left_s)
            _time_missing(
                costs.table(timed),
                drafts[0],
                _DRAFT_SIZES,
                draft_budget_s,
                1,
                interrupted,
            )
    costs.was_busy = is_busy(load.share)
    if costs.was_busy:
        costs.do_not_keep(None, timed)
    session.setup_s["measuring_s"] += session.clock() - started_s


def target_costs(session: Session, interrupted: Callable[[], bool] = never) -> CostTable:
    """Return the target's costs, measured now if they are not known.

    Raises:
        KeyboardInterrupt: If `interrupted` returned True.
    """
    if not _is_measured(session.costs.table()):
        measure_costs(session, interrupted)
    return session.costs.table()


# --- what is known ----------------------------------------------------------------------------


def _is_measured(table: CostTable, n_rows: int = 1) -> bool:
    """Return whether costs up to `n_rows` rows were measured."""
    known = table.known
    return len(known) >= MIN_SIZES and max(known) >= n_rows


def is_pair_measured(session: Session, draft: Key | None) -> bool:
    """Return whether the costs of the target and of a draft were measured.

    Those of the target have to reach the largest batch of a round.
    """
    if not _is_measured(session.costs.table(), session.n_rows_max):
        return False
    return draft is None or _is_measured(session.costs.table(draft))


def known_costs(session: Session, draft: Key) -> PairCosts | None:
    """Return the costs of the target and of a draft.

    They are None if they are not known, or known for one size of batches only.
    """
    if not is_pair_measured(session, draft):
        return None
    known = session.costs.table().known
    batch_s = {n: seconds for n, seconds in known.items() if n <= session.n_rows_max}
    if len(batch_s) <= 1:
        return None
    n_at_once = session.draft.n_at_once if session.draft is not None else 1
    token_s = session.costs.table(draft).seconds(n_at_once) / n_at_once
    return PairCosts(batch_s, token_s)


# --- what a draft is expected to gain ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What a target and a draft cost together."""

    #: The seconds of the target's batches by their rows, among them that of 1 row.
    batch_s: Mapping[int, float]
    #: The seconds of a drafted token.
    draft_token_s: float = 0.0

    def rows_s(self, n_rows: int) -> float:
        """Return the seconds of a batch: at least those of one row.

        Those of one row may be from a busier moment.
        """
        return max(self.batch_s[1], CostTable(self.batch_s).seconds(n_rows))


def expected_gain(costs: PairCosts, acceptance: float = ACCEPTANCE) -> float:
    """Return the expected speed-up of a draft, with the best number of drafted tokens.

    If a drafted token is accepted with probability a, a round with n of them gives
    1 + a + ... + a^n tokens. Plain decoding takes v(1) for each of these; the round takes v(n + 1)
    for the target's batch, and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that cost.)

    Args:
        costs: v and c. n goes up to the largest size that was timed.
        acceptance: a.
    """

    def speedup(n_drafted: int) -> float:
        n_tokens = sum(acceptance**depth for depth in range(n_drafted + 1))
        seconds = costs.rows_s(n_drafted + 1) + n_drafted * costs.draft_token_s
        return costs.batch_s[1] * n_tokens / seconds

    return max(map(speedup, range(1, max(costs.batch_s))))


def break_even(costs: PairCosts) -> float | None:
    """Return the acceptance, in steps of a percent, from which on a draft pays.

    It is None if even a draft that is always right would save nothing.
    """
    for percent in range(101):
        acceptance = percent / 100
        if expected_gain(costs, acceptance) >= 1.0:
            return acceptance
    return None


# --- timing -----------------------------------------------------------------------------------


def short_context(session: Session) -> int:
    """Return the size of a context for timing, in tokens."""
    n_train = session.target.n_ctx_train
    return min(_N_SHORT, n_train) if n_train > 0 else _N_SHORT


def timed_batch_sizes(n_max: int) -> list[int]:
    """Return the sizes to time, ascending: in steps of one at first, of a quarter later."""
    sizes = list(range(1, min(n_max, _N_DENSE) + 1))
    while sizes[-1] < n_max:
        sizes.append(min(n_max, sizes[-1] + sizes[-1] // 4))
    return sizes


def _time_missing(
    table: CostTable,
    backend: Backend,
    sizes: Sequence[int],
    budget_s: float,
    n_rows: int,
    interrupted: Callable[[], bool],
) -> None:
    """Time the sizes that a table lacks, unless it was measured up to `n_rows` rows.

    If there is no time for as many rows, their cost is estimated. If `measure_sizes` raises, the
    table stays as it was.
    """
    if _is_measured(table, n_rows):
        return
    is_new = not _is_measured(table)
    missing = [size for size in sizes if is_new or size == 1 or size not in table.known]
    for size, seconds in measure_sizes(backend, missing, budget_s, interrupted).items():
        table.set_seconds(size, seconds)
    if table and max(table.known) < n_rows:
        table.set_seconds(n_rows, table.seconds(n_rows))


def measure_sizes(
    backend: Backend,
    sizes: Iterable[int],
    budget_s: float,
    interrupted: Callable[[], bool] = never,
) -> dict[int, float]:
    """Time batches of several sizes, powers of two first.

    Args:
        backend: The model, whose context is empty before and after.
        sizes: The numbers of rows.
        budget_s: The seconds after which nothing new is begun, once two sizes are timed.
        interrupted: Asked between decodes.

    Returns:
        The median seconds of each size that was timed.

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
            if len(samples) > 1 and backend.decode_s - decode_s_before > budget_s:
                break
            if interrupted():
                raise KeyboardInterrupt
            seconds = time_batch(backend, text, size)
            if seconds is not None:
                samples[size].append(seconds)
    backend.remove(0)
    # Disturbances only add time: of an even number of samples, take the smaller of the middle two.
    return {size: statistics.median_low(times_s) for size, times_s in sorted(samples.items())}


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def begin_text(backend: Backend) -> list[int]:
    """Decode the first tokens of a text, and return the text."""
    text = backend.vocabulary.tokenize(_FILLER, add_special=True, parse_special=False) or [0]
    n_first = min(_N_FILLER, backend.n_ctx // 2, backend.n_batch)
    if n_first > 0:
        backend.decode(Batch.of(text[:n_first], 0, 1))
    return text


def time_batch(
    target: Backend,
    text: Sequence[int],
    n_rows: int,
) -> float | None:
    """Return the seconds of a batch of `n_rows` rows of a text; None if there is no room for it.

    A rollback of the decode before counts, too. The cache is the same afterwards. Rows differ as
    those of a text do, since the time of experts depends on that.
    """
    length = target.length(0)
    if length + n_rows > target.n_ctx or n_rows > target.n_batch:
        return None
    target.checkpoint(0)
    rows = [text[(row - n_rows) % len(text)] for row in range(n_rows)]
    n_decodes = 3 if target.replays_graphs else 1  # a new size is slower twice
    seconds = 0.0
    for _ in range(n_decodes):
        decode_s_before = target.decode_s
        target.decode(Batch.of(rows, length, target.n_outputs))
        seconds = target.decode_s - decode_s_before
        target.remove(0, length)
    return seconds
