"""What a round costs on this machine, and whether a draft model can pay for it.

A quick look before a draft is taken that nobody measured: by what decodes cost here, which is
timed once and kept (`specgen.calibration.memory`), and how much of it was accepted so far or, before
anything is known, of drafts in general. `specgen.selection.trial` measures that too, in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specgen.engine.measurements import is_pair_measured, measure_if_new

if TYPE_CHECKING:
    from specgen.engine.session import Session

#: The share of drafted tokens that is accepted of drafts that stop where they are unsure, as
#: draft models of the targets' own families reach it here.
ACCEPTANCE = 0.7
#: The expected speed-up from which a draft is worth taking: the margin pays for its own decode
#: of the prompt, and for prompts that it suits less.
WORTH = 1.1

#: Cells of the contexts, if the models have so many.
_N_CTX = 256


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a target's batches by their rows, 1 row among them, and those in which a draft
    model decodes a token."""

    batch_s: dict[int, float]
    draft_token_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a draft model is expected to gain at best, with so many drafted tokens a round.

    `batch_tokens` is the round's batch and `token_tokens` a drafted token, both in tokens that
    the target decodes plainly meanwhile. `free_speedup` is what a draft model could gain that
    costs nothing at all.
    """

    n_drafted: int
    speedup: float
    batch_tokens: float
    token_tokens: float
    free_speedup: float

    @property
    def is_worth_it(self) -> bool:
        return self.speedup >= WORTH

    @property
    def rules_out_all(self) -> bool:
        """Whether the target's batches alone are too dear, for any draft model."""
        return self.free_speedup < WORTH


def outlook(costs: Costs, acceptance: float = ACCEPTANCE) -> Outlook:
    """What a draft model is expected to gain, from costs for at least two sizes of batches.

    If each drafted token is accepted with probability a, given that those before it were, a
    round of n drafted tokens makes 1 + a + ... + a^n tokens. Plain decoding takes v(1) for each;
    the round takes v(n + 1) for the target's batch and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that are not free.) The best
    n counts, of those whose batches were timed or lie between two that were.
    """
    numbers = range(1, max(costs.batch_s))
    best = max(numbers, key=lambda n: _speedup(costs, n, costs.draft_token_s, acceptance))
    token_s = costs.batch_s[1]
    return Outlook(
        n_drafted=best,
        speedup=_speedup(costs, best, costs.draft_token_s, acceptance),
        batch_tokens=rows_s(costs.batch_s, best + 1) / token_s,
        token_tokens=costs.draft_token_s / token_s,
        free_speedup=max(_speedup(costs, n, 0.0, acceptance) for n in numbers),
    )


def expected_speedup(batch_s: dict[int, float], draft_token_s: float, acceptance: float) -> float:
    """The speed-up of `outlook`, by itself."""
    return outlook(Costs(batch_s, draft_token_s), acceptance).speedup


def _speedup(costs: Costs, n_drafted: int, draft_token_s: float, acceptance: float) -> float:
    n_tokens = sum(acceptance**depth for depth in range(n_drafted + 1))
    round_s = rows_s(costs.batch_s, n_drafted + 1) + n_drafted * draft_token_s
    return costs.batch_s[1] * n_tokens / round_s


def known_costs(session: Session, draft: Path) -> Costs | None:
    """What the session's target and a draft model cost, if that is known."""
    if not is_pair_measured(session, draft):
        return None
    known = session.costs.table().known
    sizes = {n: seconds for n, seconds in known.items() if n <= session.n_rows_max}
    return Costs(sizes, session.costs.table(draft).seconds(1)) if len(sizes) > 1 else None


def measure_costs(session: Session, draft: Path) -> Costs | None:
    """What they cost, measured if that is not known yet; `draft` is the session's. None if a
    round has no room for a draft. Raises `MemoryLimitError` if there is no room for the
    contexts, `BackendError`."""
    if not is_pair_measured(session, draft):
        n_train = session.target_model.n_ctx_train
        n_ctx = min(_N_CTX, n_train) if n_train > 0 else _N_CTX
        with session.contexts(n_ctx) as (target, drafting):
            measure_if_new(session, target, drafting)
    return known_costs(session, draft)


def rows_s(batch_s: Mapping[int, float], n_rows: int) -> float:
    """Seconds for a batch of so many rows, between two sizes that were timed in proportion.

    No batch is taken to cost less than a token: one that seems to was timed while the machine had
    less else to do.
    """
    sizes = sorted(batch_s)
    return float(np.interp(n_rows, sizes, [max(batch_s[size], batch_s[1]) for size in sizes]))
