"""What a round costs on this machine, and whether a draft model can pay for it.

A quick look before a draft is taken that nobody measured: a few batches of the target and a few
tokens of the draft, timed in small contexts. What comes out depends on the machine and not on
the text, so it is kept, and later runs pay nothing. How much of a draft is accepted is not
measured here but assumed; `specgen.trial` measures that too, in minutes.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from specgen.atomic import replace_text
from specgen.backend.base import Backend, Batch

if TYPE_CHECKING:
    from specgen.session import Session

#: The share of drafted tokens that is accepted of drafts that stop where they are unsure, as
#: draft models of the targets' own families reach it here.
ACCEPTANCE = 0.7
#: The expected speed-up from which a draft is worth taking: the margin pays for its own decode
#: of the prompt, and for prompts that it suits less.
WORTH = 1.1

#: All sizes of batches up to this are timed; of larger ones some, the others lie between them.
_N_DENSE = 8
#: Beyond so many tokens' time no batch can pay: however long a draft, it is expected to make
#: less than 1 / (1 - acceptance) tokens a round.
_DEAREST = 1.0 / (1.0 - ACCEPTANCE) / WORTH
#: Rounds of timing: the most, and the seconds after which no other one begins, if it is clear
#: by then whether the draft is worth it; if not, after twice as many.
_N_ROUNDS = 5
_BUDGET_S = 0.4
#: An expected speed-up that is so much above or below what is worth it is clear.
_CLEAR = 1.25
#: What is decoded in advance, token by token: the context is not empty, and the first decodes,
#: in which llama.cpp makes its plans, are not timed.
_FILLER = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on)."
_N_FILLER = 4
#: Cells of the contexts, if the models have so many.
_N_CTX = 256
#: Pairs and settings whose costs are kept, the latest ones.
_N_KEPT = 64

_COSTS = "costs"

#: Everything that decides what a pair costs, as JSON can have it.
Key: TypeAlias = Mapping[str, Any]


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


def outlook(costs: Costs) -> Outlook:
    """What a draft model is expected to gain, from costs for at least two sizes of batches.

    If each drafted token is accepted with probability a, given that those before it were, a
    round of n drafted tokens makes 1 + a + ... + a^n tokens. Plain decoding takes v(1) for each;
    the round takes v(n + 1) for the target's batch and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that are not free.) The best
    n counts, of those whose batches were timed or lie between two that were.
    """
    numbers = range(1, max(costs.batch_s))
    best = max(numbers, key=lambda n: _speedup(costs, n, costs.draft_token_s))
    token_s = costs.batch_s[1]
    return Outlook(
        n_drafted=best,
        speedup=_speedup(costs, best, costs.draft_token_s),
        batch_tokens=rows_s(costs.batch_s, best + 1) / token_s,
        token_tokens=costs.draft_token_s / token_s,
        free_speedup=max(_speedup(costs, n, 0.0) for n in numbers),
    )


def _speedup(costs: Costs, n_drafted: int, draft_token_s: float) -> float:
    n_tokens = sum(ACCEPTANCE**depth for depth in range(n_drafted + 1))
    round_s = rows_s(costs.batch_s, n_drafted + 1) + n_drafted * draft_token_s
    return costs.batch_s[1] * n_tokens / round_s


def measure_costs(session: Session) -> Costs:
    """Time the session's models, batches of 1 row to as many as a round may have; there must be
    a draft model.

    Sizes beyond the first one that is too dear for any draft are left out. Raises
    `MemoryLimitError` if there is no room for the contexts, `BackendError`.
    """
    n_train = session.target_model.n_ctx_train
    n_ctx = min(_N_CTX, n_train) if n_train > 0 else _N_CTX
    with session.contexts(n_ctx) as (target, draft):
        assert draft is not None, "a draft model"
        return time_pair(target, draft, session.n_rows_max)


def time_pair(target: Backend, draft: Backend, n_rows_max: int) -> Costs:
    """Time a target's batches of up to so many rows, 2 at least, and a draft's tokens, by turns:
    what disturbs a machine for a while then disturbs both. Both contexts are empty."""
    text, draft_text = _begin(target), _begin(draft)
    samples: defaultdict[int, list[float]] = defaultdict(list)
    draft_samples: list[float] = []
    before_s = target.decode_s
    for _ in range(_N_ROUNDS):
        for size in batch_sizes(n_rows_max):
            limit_s = _DEAREST * samples[1][-1] if samples[1] else math.inf
            seconds = time_batch(target, text, size)
            if seconds is not None and seconds > limit_s:  # a moment's disturbance decides nothing
                seconds = min(seconds, time_batch(target, text, size) or seconds)
            if seconds is None:  # no room for this one, nor for larger ones
                break
            samples[size].append(seconds)
            if size > 1 and seconds > limit_s:
                break
        draft_samples.append(time_batch(draft, draft_text, 1) or 0.0)
        expected = outlook(_medians(samples, draft_samples))
        is_clear = not 1.0 / _CLEAR < expected.speedup / WORTH < _CLEAR
        if target.decode_s - before_s >= (_BUDGET_S if is_clear else 2.0 * _BUDGET_S):
            break
    return _medians(samples, draft_samples)


def _medians(samples: Mapping[int, list[float]], draft_samples: list[float]) -> Costs:
    # What disturbs only adds: of an even number, the smaller of the two in the middle.
    batch_s = {size: statistics.median_low(samples[size]) for size in sorted(samples)}
    return Costs(batch_s, statistics.median_low(draft_samples))


def _begin(backend: Backend) -> list[int]:
    """Decode the beginning of the filler; returns it whole."""
    text = backend.vocabulary.tokenize(_FILLER, add_special=True, parse_special=False) or [0]
    for position, token in enumerate(text[: min(_N_FILLER, backend.n_ctx // 2)]):
        batch = Batch()
        batch.add(token, position, (0,), True)
        backend.decode(batch)
    return text


# --- batches ---------------------------------------------------------------------------------


def batch_sizes(n_max: int) -> list[int]:
    """The numbers of rows to time, 1 and `n_max` among them, ascending: neighbours differ by one
    first, and by a quarter later."""
    sizes = list(range(1, min(n_max, _N_DENSE) + 1))
    while sizes[-1] < n_max:
        sizes.append(min(n_max, sizes[-1] + sizes[-1] // 4))
    return sizes


def time_batch(target: Backend, text: Sequence[int], n_rows: int) -> float | None:
    """Seconds of a batch of so many rows behind the text, after which the cache is as before;
    None if the context has no room for it.

    The rows are tokens of the text, since a mixture of experts takes as long as its rows
    differ. Where going back takes time, that of the batch before is included, as it is in
    rounds whose drafts are not accepted whole.
    """
    length = target.length(0)
    if length + n_rows > target.n_ctx:
        return None
    target.checkpoint(0)
    batch = Batch()
    for row in range(n_rows):
        batch.add(text[(row - n_rows) % len(text)], length + row, (0,), True)
    before_s = target.decode_s
    target.decode(batch)
    seconds = target.decode_s - before_s
    target.remove(0, length)
    return seconds


def rows_s(batch_s: Mapping[int, float], n_rows: int) -> float:
    """Seconds for a batch of so many rows, between two sizes that were timed in proportion."""
    sizes = sorted(batch_s)
    return float(np.interp(n_rows, sizes, [batch_s[size] for size in sizes]))


# --- what is kept ----------------------------------------------------------------------------


def kept_costs(file: Path, key: Key) -> Costs | None:
    """The costs that were kept under a key; None if there are none, or the file is damaged."""
    for entry in _entries(file):
        if entry.get("key") == key:
            return _costs(entry)
    return None


def keep_costs(file: Path, key: Key, costs: Costs) -> None:
    """Keep costs under a key, in place of what was kept under it, and of the oldest ones where
    there are many. A file that cannot be written is left: they are measured again."""
    entry = {"key": key, "batch_s": costs.batch_s, "draft_token_s": costs.draft_token_s}
    others = [other for other in _entries(file) if other.get("key") != key]
    document = {_COSTS: [*others[1 - _N_KEPT :], entry]}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        document: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # not there, not readable, not JSON
        return []
    entries = document.get(_COSTS) if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict) and _costs(entry) is not None]


def _costs(entry: dict[str, Any]) -> Costs | None:
    """What an entry says; None if it makes no sense."""
    batch_s, token_s = entry.get("batch_s"), entry.get("draft_token_s")
    if not isinstance(batch_s, dict) or not _is_time(token_s):
        return None
    if not all(_is_size(size) and _is_time(seconds) for size, seconds in batch_s.items()):
        return None
    costs = Costs({int(size): seconds for size, seconds in batch_s.items()}, token_s)
    return costs if 1 in costs.batch_s and len(costs.batch_s) > 1 else None


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < len(text) < 6 and int(text) > 0


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, float) and math.isfinite(value) and value > 0.0
