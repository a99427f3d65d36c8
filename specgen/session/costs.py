"""What decodes cost on this machine, and the speed-up that a draft is expected to bring at these costs.

`specgen run` makes this estimate before a draft model is used that was never tried with its target. What is
measured instead, as in `specgen.measure.trial`, is a speed-up by the same quotient, `speedup`. `memory.py` keeps the
costs, and a `CostTable` corrects them while it runs.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specgen.method.backend import Backend, Batch
from specgen.method.tables import CostTable

#: The usual acceptance rate of draft models of the target's own family, measured here, if drafts stop
#: where the draft model is unsure.
ACCEPTANCE = 0.7
#: The least expected speed-up with which a draft is used. The margin pays for the draft's decode of the
#: prompt, and for prompts that suit it less.
WORTH = 1.1
#: A speed-up may exceed the tokens per pass by this factor before it counts as impossible.
_LEEWAY = 1.05
#: Text of which the first tokens are decoded in advance, one by one. So the context is not empty, and
#: the first decodes, in which llama.cpp makes its plans, are not timed.
_FILLER = "The quick brown fox jumps over the lazy dog; 0123456789 (and so on)."
_N_FILLER = 4
#: All sizes up to this are timed; of larger ones only some, since the others are interpolated.
_N_DENSE = 8
#: How often each size is timed, if time allows.
_N_REPEATS = 3
#: A table with fewer sizes was not measured: it has only seen a few decodes.
MIN_SIZES = 3
#: About how many seconds of decodes a measurement of a model's costs takes.
_BUDGET_S = 2.0


# --- what a draft is expected to gain --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a target's batches by their rows, including 1 row, and seconds of a drafted token."""

    batch_s: Mapping[int, float]
    draft_token_s: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds of a token in plain decoding."""
        return self.batch_s[1]

    def rows_s(self, n_rows: int) -> float:
        """Return the seconds of a batch of `n_rows` rows, as a cost table of the sizes that were timed says.

        A batch never counts as cheaper than a single token: if it was measured so, the machine was less
        busy at that time.
        """
        return max(self.token_s, CostTable(self.batch_s).seconds(n_rows))


@dataclass(frozen=True, slots=True)
class Gain:
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


def is_impossible(found: float, tokens_per_pass: float | None) -> bool:
    """Return whether a speed-up is larger than drafting can give: a pass of the target takes at least as long
    as in plain decoding. The machine was then less busy than when plain decoding was measured."""
    return tokens_per_pass is not None and found > _LEEWAY * tokens_per_pass


def speedup(n_tokens: float, seconds: float, token_s: float) -> float:
    """Return the speed-up over plain decoding, which takes `token_s` seconds a token."""
    return token_s * n_tokens / seconds


def expected_gain(costs: Costs, acceptance: float = ACCEPTANCE) -> Gain:
    """Return the expected gain of a draft model, from costs of at least two sizes of batches.

    If each drafted token is accepted with probability a, given that those before it were, a round with n
    drafted tokens gives 1 + a + ... + a^n tokens. Plain decoding takes v(1) for each of them. The round
    takes v(n + 1) for the target's batch and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that are not free.) The result is for
    the best n whose batch is not larger than the largest one that was timed. The acceptance rate at
    temperature 0 is the rate of agreement.
    """

    def of(n_drafted: int, draft_token_s: float) -> float:
        n_tokens = sum(acceptance**depth for depth in range(n_drafted + 1))
        seconds = costs.rows_s(n_drafted + 1) + n_drafted * draft_token_s
        return speedup(n_tokens, seconds, costs.token_s)

    numbers = range(1, max(costs.batch_s))
    best = max(numbers, key=lambda n: of(n, costs.draft_token_s))
    return Gain(
        n_drafted=best,
        speedup=of(best, costs.draft_token_s),
        batch_tokens=costs.rows_s(best + 1) / costs.token_s,
        token_tokens=costs.draft_token_s / costs.token_s,
        free_speedup=max(of(n, 0.0) for n in numbers),
    )


# --- timing ----------------------------------------------------------------------------------------


def timed_batch_sizes(n_max: int) -> list[int]:
    """Return the numbers of rows to time, from 1 to `n_max`, ascending: in steps of one at first, and of
    a quarter later."""
    sizes = list(range(1, min(n_max, _N_DENSE) + 1))
    while sizes[-1] < n_max:
        sizes.append(min(n_max, sizes[-1] + sizes[-1] // 4))
    return sizes


def is_measured(table: CostTable, n_rows: int = 1) -> bool:
    """Return whether a table was measured, up to at least `n_rows` rows."""
    known = table.known
    return len(known) >= MIN_SIZES and max(known) >= n_rows


def complete(
    table: CostTable,
    backend: Backend,
    sizes: Sequence[int],
    n_rows: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Time the sizes that the backend's table lacks, in an empty context, unless the table was measured
    before, up to `n_rows` rows. If the time did not suffice for `n_rows` rows, the estimate from the other
    sizes is stored for them. Raise `BackendError`, and `KeyboardInterrupt` if `interrupted` is true between
    decodes; the table is then unchanged."""
    if is_measured(table, n_rows):
        return
    is_new = not is_measured(table)
    missing = [size for size in sizes if is_new or size == 1 or not table.knows(size)]
    for size, seconds in measure_sizes(backend, missing, _BUDGET_S, interrupted).items():
        table.start(size, seconds)
    if table and max(table.known) < n_rows:
        table.start(n_rows, table.seconds(n_rows))


def measure_sizes(
    backend: Backend,
    sizes: Iterable[int],
    budget_s: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[int, float]:
    """Return the median seconds of decoding batches of these sizes, in an empty context, which is empty
    again afterwards.

    Coarse sizes come first, and after `budget_s` seconds of decoding no other batch than a single row is
    started. So only some sizes of a large model are timed, and all sizes of a small one several times. A
    size for which the context has no room is left out. Raise `BackendError`, and `KeyboardInterrupt` if
    `interrupted` is true between decodes.
    """
    text = begin(backend)
    samples: defaultdict[int, list[float]] = defaultdict(list)
    before_s = backend.decode_s
    for _ in range(_N_REPEATS):
        for size in _coarse_first(sizes):
            if size > 1 and backend.decode_s - before_s > budget_s:
                break
            if interrupted():
                raise KeyboardInterrupt
            seconds = time_batch(backend, text, size)
            if seconds is not None:
                samples[size].append(seconds)
    backend.remove(0)
    # Disturbances only add time: of an even number of samples, take the smaller of the middle two.
    return {size: statistics.median_low(times) for size, times in sorted(samples.items())}


def begin(backend: Backend) -> list[int]:
    """Decode the first tokens of a text; return all of its tokens."""
    text = backend.vocabulary.tokenize(_FILLER, add_special=True, parse_special=False) or [0]
    for position, token in enumerate(text[: min(_N_FILLER, backend.n_ctx // 2)]):
        batch = Batch()
        batch.add(token, position, (0,), True)
        backend.decode(batch)
    return text


def time_batch(target: Backend, text: Sequence[int], n_rows: int) -> float | None:
    """Return the seconds of a batch of `n_rows` rows after the text; None if the context, or a batch, has
    no room for it. The cache is the same afterwards.

    The rows are tokens of the text, since the time of a mixture of experts depends on how much its
    rows differ. If a rollback takes time, that of the batch before is included, as in rounds whose
    drafts are not accepted whole. As many rows want logits as the backend allows.
    """
    length = target.length(0)
    if length + n_rows > target.n_ctx or n_rows > target.n_batch:
        return None
    target.checkpoint(0)
    batch = Batch()
    for row in range(n_rows):
        wants_logits = n_rows - row <= target.n_outputs
        batch.add(text[(row - n_rows) % len(text)], length + row, (0,), wants_logits)
    before_s = target.decode_s
    target.decode(batch)
    seconds = target.decode_s - before_s
    target.remove(0, length)
    return seconds


def _coarse_first(sizes: Iterable[int]) -> Iterator[int]:
    """Order sizes from coarse to fine: 1, then powers of two, then the others."""
    ordered = sorted(sizes)
    powers = [size for size in ordered if size & (size - 1) == 0]
    yield from powers
    yield from (size for size in ordered if size not in powers)
