"""What decodes cost on this machine, measured at first use, and the speed-up that is expected of a
draft that was never tried with its target. (`specgen.measure.draft_trial` measures one; `measurement_store.py`
keeps the costs.)
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
from specgen.session.session import Session
from specgen.system.machine import LoadOfOthers, is_busy

#: The usual acceptance rate of draft models of the target's own family, if drafts stop where they
#: are unsure.
ACCEPTANCE = 0.7
#: The least expected speed-up of a draft in use: the margin pays for prefill and prompts that suit
#: it less.
WORTH = 1.1
#: The first tokens of this text are decoded before anything is timed: llama.cpp then has its plans.
_FILLER = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on)."
_N_FILLER = 4
#: All sizes of batches up to this are timed; of larger ones only some, since the others are
#: interpolated.
_N_DENSE = 8
#: Repeats of a size, the seconds of all decodes (answers correct these costs), and a draft's least
#: share.
_N_REPEATS, _BUDGET_S, _DRAFT_SHARE = 3, 2.0, 0.25
#: A table with fewer sizes was not measured: it has only seen a few decodes.
MIN_SIZES = 3
#: Batch sizes to time for a draft model: drafted tokens, the tokens of the last round, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)
#: The size, in tokens, of the contexts in which decodes are timed if their costs are not known.
_N_SHORT = 256


#: Shows what is being done while a context is open.
Status: TypeAlias = Callable[[str], contextlib.AbstractContextManager[object]]


def no_status(_text: str) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


# --- what a draft is expected to gain --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a target's batches by their rows, including 1 row, and seconds of a drafted token."""

    batch_s: Mapping[int, float]
    draft_token_s: float = 0.0

    def rows_s(self, n_rows: int) -> float:
        """Return the seconds of a batch, at least those of a single token, which may be from a
        busier moment.
        """
        return max(self.batch_s[1], CostTable(self.batch_s).seconds(n_rows))


def expected_gain(costs: Costs, acceptance: float = ACCEPTANCE) -> float:
    """Return the expected speed-up of a draft. If a drafted token is accepted with probability a, a
    round with n of them gives 1 + a + ... + a^n tokens, each of which takes plain decoding v(1).
    The round takes v(n + 1), and c for
    each:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that cost.) It is that of the
    best n that was timed.
    """

    def speedup(n_drafted: int) -> float:
        n_tokens = sum(acceptance**depth for depth in range(n_drafted + 1))
        seconds = costs.rows_s(n_drafted + 1) + n_drafted * costs.draft_token_s
        return costs.batch_s[1] * n_tokens / seconds

    return max(map(speedup, range(1, max(costs.batch_s))))


def break_even(costs: Costs) -> float | None:
    """Return the acceptance from which on a draft model pays; None if it cannot, since even a draft
    that is always right would save nothing.
    """
    rates = (percent / 100 for percent in range(101))
    return next((rate for rate in rates if expected_gain(costs, rate) >= 1.0), None)


# --- what is known of a session's models -------------------------------------------------------------


def is_measured(table: CostTable, n_rows: int = 1) -> bool:
    known = table.known
    return len(known) >= MIN_SIZES and max(known) >= n_rows


def is_pair_measured(session: Session, draft: Key | None) -> bool:
    """Return whether the costs of the target, up to the largest batch of a round, and of a draft
    are known.
    """
    own = is_measured(session.costs.table(), session.n_rows_max)
    return own and (draft is None or is_measured(session.costs.table(draft)))


def known_costs(session: Session, draft: Key) -> Costs | None:
    """Return the costs of the target and of a draft; None if they are not known, or only for one
    size of batches.
    """
    if not is_pair_measured(session, draft):
        return None
    known = session.costs.table().known
    sizes = {n: seconds for n, seconds in known.items() if n <= session.n_rows_max}
    n_at_once = session.draft.n_at_once if session.draft is not None else 1
    token_s = session.costs.table(draft).seconds(n_at_once) / n_at_once
    return Costs(sizes, token_s) if len(sizes) > 1 else None


def target_costs(session: Session, interrupted: Callable[[], bool] = bool) -> CostTable:
    """Return the target's costs, measured now if they are not known. Raise `KeyboardInterrupt`."""
    if not is_measured(session.costs.table()):
        measure_costs(session, interrupted)
    return session.costs.table()


# --- measuring -------------------------------------------------------------------------------------


def calibrate(
    session: Session, interrupted: Callable[[], bool] = bool, status: Status = no_status
) -> str:
    """Measure what drafting costs here, if costs decide and are not known; return a sentence if
    that has to be done again.
    """
    draft, is_by_cost = session.draft, session.options.drafting.is_by_cost
    if not is_by_cost or draft is None or is_pair_measured(session, draft.timed):
        return ""
    with status("measuring what drafting costs"):
        measure_costs(session, interrupted)
    busy = "the machine was busy while the costs of drafting were measured: they will be measured again"
    return busy if session.costs.was_busy else ""


def short_context(session: Session) -> int:
    n_train = session.target.n_ctx_train
    return min(_N_SHORT, n_train) if n_train > 0 else _N_SHORT


def measure_costs(session: Session, interrupted: Callable[[], bool] = bool) -> None:
    """Measure the costs of decodes that are not known, in short contexts of their own. What was
    measured while the machine was busy is not kept: by it perhaps no draft pays, and then no decode
    would correct it. Raise `BackendError`, `MemoryLimitError`, and `KeyboardInterrupt` if
    `interrupted`.
    """
    costs, timed = session.costs, session.draft.timed if session.draft is not None else None
    if is_pair_measured(session, timed):
        return
    started, load = session.clock(), LoadOfOthers()
    sizes = timed_batch_sizes(max(MIN_SIZES, session.n_rows_max))
    with session.contexts(short_context(session)) as (target, drafts):
        has_draft, before_s = bool(drafts) and timed is not None, target.decode_s
        own_s = _BUDGET_S * (1.0 - _DRAFT_SHARE if has_draft else 1.0)
        time_missing(costs.table(), target, sizes, own_s, session.n_rows_max, interrupted)
        if has_draft:
            left_s = max(_DRAFT_SHARE * _BUDGET_S, _BUDGET_S - (target.decode_s - before_s))
            time_missing(costs.table(timed), drafts[0], _DRAFT_SIZES, left_s, 1, interrupted)
    costs.was_busy = is_busy(load.share)
    if costs.was_busy:
        costs.do_not_keep(None, timed)
    session.setup_s["measuring_s"] += session.clock() - started


# --- timing ----------------------------------------------------------------------------------------


def timed_batch_sizes(n_max: int) -> list[int]:
    """Return the numbers of rows to time, ascending: in steps of one at first, of a quarter later."""
    sizes = list(range(1, min(n_max, _N_DENSE) + 1))
    while sizes[-1] < n_max:
        sizes.append(min(n_max, sizes[-1] + sizes[-1] // 4))
    return sizes


def time_missing(
    table: CostTable,
    backend: Backend,
    sizes: Sequence[int],
    budget_s: float,
    n_rows: int,
    interrupted: Callable[[], bool],
) -> None:
    """Time the sizes that the table lacks, in an empty context, unless it was measured up to
    `n_rows` rows; these are estimated if there is no time. Raise what `measure_sizes` raises; the
    table is then unchanged.
    """
    if is_measured(table, n_rows):
        return
    is_new = not is_measured(table)
    missing = [size for size in sizes if is_new or size == 1 or size not in table.known]
    for size, seconds in measure_sizes(backend, missing, budget_s, interrupted).items():
        table.set_seconds(size, seconds)
    if table and max(table.known) < n_rows:
        table.set_seconds(n_rows, table.seconds(n_rows))


def measure_sizes(
    backend: Backend,
    sizes: Iterable[int],
    budget_s: float,
    interrupted: Callable[[], bool] = bool,
) -> dict[int, float]:
    """Return the median seconds of batches of these sizes, powers of two first, in a context that
    is empty before and after; two sizes at least, for `budget_s` seconds. Raise `BackendError`, and
    `KeyboardInterrupt` if `interrupted`.
    """
    before_s, text = backend.decode_s, begin_text(backend)
    samples: defaultdict[int, list[float]] = defaultdict(list)
    ordered = sorted(sizes, key=lambda size: (size & (size - 1) != 0, size))
    for _ in range(_N_REPEATS):
        for size in ordered:
            if len(samples) > 1 and backend.decode_s - before_s > budget_s:
                break
            if interrupted():
                raise KeyboardInterrupt
            seconds = time_batch(backend, text, size)
            if seconds is not None:
                samples[size].append(seconds)
    backend.remove(0)
    # Disturbances only add time: of an even number of samples, take the smaller of the middle two.
    return {size: statistics.median_low(times) for size, times in sorted(samples.items())}


def begin_text(backend: Backend) -> list[int]:
    text = backend.vocabulary.tokenize(_FILLER, add_special=True, parse_special=False) or [0]
    if first := text[: min(_N_FILLER, backend.n_ctx // 2, backend.n_batch)]:
        backend.decode(Batch.of(first, 0, 1))
    return text


def time_batch(target: Backend, text: Sequence[int], n_rows: int) -> float | None:
    """Return the seconds of a batch of `n_rows` rows behind the text, with the rollback of the one
    before; None without room. The cache is the same afterwards. Rows are the text's, since experts'
    time depends on how much rows differ.
    """
    length = target.length(0)
    if length + n_rows > target.n_ctx or n_rows > target.n_batch:
        return None
    target.checkpoint(0)
    rows = [text[(row - n_rows) % len(text)] for row in range(n_rows)]
    took_s: list[float] = []
    for _ in range(3 if target.replays_graphs else 1):  # a size is slower twice
        before_s = target.decode_s
        target.decode(Batch.of(rows, length, target.n_outputs))
        took_s.append(target.decode_s - before_s)
        target.remove(0, length)
    return took_s[-1]
