"""The expected speed-up of a draft model on this machine, from costs and an acceptance rate.

This is a quick check before a draft is used that was never measured with its target. The costs of
decodes are timed once and kept (`specgen.engine.calibration.memory`). The acceptance rate is a usual one unless
the caller knows better. `specgen.measure.selection.trial` measures the acceptance too, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specgen.engine.measurements import is_pair_measured, measure_if_new

if TYPE_CHECKING:
    from specgen.engine.loaded_models import Models

#: The usual acceptance rate of draft models of the target's own family, measured here, if drafts stop
#: where the draft model is unsure.
ACCEPTANCE = 0.7
#: The least expected speed-up with which a draft is used. The margin pays for the draft's decode of the
#: prompt, and for prompts that suit it less.
WORTH = 1.1

#: A parallel draft decodes all its tokens at once: a token counts as its share of so many.
_N_PARALLEL = 4
#: Cells of the contexts in which costs are measured, or the target's training context if that is less.
_N_CTX = 256


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a target's batches by their rows, including 1 row, and seconds of a drafted token."""

    batch_s: dict[int, float]
    draft_token_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The best speed-up that is expected of a draft model, with `n_drafted` tokens in each round.

    `batch_tokens` is the time of the round's batch and `token_tokens` that of a drafted token, both as
    multiples of the target's time for a single token. `free_speedup` is the expected speed-up if drafting
    took no time.
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
        """Whether the target's batches are so slow that even a draft model that takes no time would not
        pay."""
        return self.free_speedup < WORTH


def outlook(costs: Costs, acceptance: float = ACCEPTANCE) -> Outlook:
    """Return the expected speed-up of a draft model, from costs of at least two sizes of batches.

    If each drafted token is accepted with probability a, given that those before it were, a round with n
    drafted tokens gives 1 + a + ... + a^n tokens. Plain decoding takes v(1) for each of them. The round
    takes v(n + 1) for the target's batch and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that are not free.) The result is for
    the best n whose batch is not larger than the largest one that was timed.
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
    """Return the speed-up of `outlook` only."""
    return outlook(Costs(batch_s, draft_token_s), acceptance).speedup


def _speedup(costs: Costs, n_drafted: int, draft_token_s: float, acceptance: float) -> float:
    n_tokens = sum(acceptance**depth for depth in range(n_drafted + 1))
    round_s = rows_s(costs.batch_s, n_drafted + 1) + n_drafted * draft_token_s
    return costs.batch_s[1] * n_tokens / round_s


def known_costs(loaded: Models, draft: Path) -> Costs | None:
    """Return the costs of the target and of a draft model; None if they are not known, or only
    for one size of batches."""
    if not is_pair_measured(loaded, draft):
        return None
    known = loaded.costs.table().known
    sizes = {n: seconds for n, seconds in known.items() if n <= loaded.n_rows_max}
    table, main = loaded.costs.table(draft), loaded.drafts.main
    token_s = table.seconds(1)
    if main is not None and main.mask is not None:
        token_s = table.seconds(_N_PARALLEL) / _N_PARALLEL
    return Costs(sizes, token_s) if len(sizes) > 1 else None


def measure_costs(loaded: Models, draft: Path) -> Costs | None:
    """Return the costs of the target and of its draft model `draft`. Costs that are not known
    are measured. None if a round has no room for a draft. Raises `MemoryLimitError` if the contexts do not
    fit into memory, and `BackendError` if a decode fails."""
    if not is_pair_measured(loaded, draft):
        n_train = loaded.target.n_ctx_train
        n_ctx = min(_N_CTX, n_train) if n_train > 0 else _N_CTX
        with loaded.contexts(n_ctx) as (target, drafting):
            measure_if_new(loaded, target, drafting)
    return known_costs(loaded, draft)


def rows_s(batch_s: Mapping[int, float], n_rows: int) -> float:
    """Return the seconds of a batch of `n_rows` rows, interpolated between the sizes that were timed.

    A batch never counts as cheaper than a single token: if it was measured so, the machine was less busy
    at that time.
    """
    sizes = sorted(batch_s)
    return float(np.interp(n_rows, sizes, [max(batch_s[size], batch_s[1]) for size in sizes]))
