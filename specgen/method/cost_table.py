"""What decoding costs: measured seconds by the number of rows, and the prices of drafters.

There is no formula: the curves are jagged (one more row may double the time, or cost nothing), and
they differ between models, quantisations, builds and machines.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

#: If a decode takes longer or shorter than expected, this share of the deviation is attributed to the
#: size of its batch, and this share to the machine's present speed, which affects all sizes.
_OWN_SHARE = 0.12
_PACE_SHARE = 0.12
#: A single decode counts as slower or faster than expected by at most this factor: a machine that is
#: busy for a moment says nothing about the model.
_MAX_DEVIATION = 1.5
#: A size moves faster until it was observed this many times.
_N_NEW = 3


@dataclass(frozen=True, slots=True)
class Price:
    """What drafting costs, in seconds: the first drafted token, each further one, and once the
    prefill: what the drafter has not read of the text yet, beyond the tokens of the last round.

    A parallel draft predicts all its tokens in one decode, whose size is chosen before it is known how
    sure the draft is. `at_once_s[n - 1]` are the seconds of a decode that predicts n tokens; looking at
    a token that is predicted already costs nothing (`next_s` is 0). Other drafters have none.
    """

    first_s: float
    next_s: float
    prefill_s: float = 0.0
    at_once_s: tuple[float, ...] = ()

    def seconds(self, n_drafted: int) -> float:
        """Return the seconds of drafting n >= 1 tokens, without the prefill."""
        if self.at_once_s:
            return self.at_once_s[min(n_drafted, len(self.at_once_s)) - 1]
        return self.first_s + (n_drafted - 1) * self.next_s


#: The price of drafts that cost nothing worth counting.
FREE = Price(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Others:
    """The other sequences in a batch of the target: their number, and the number of their rows, at
    least one each."""

    n_sequences: int = 0
    n_rows: int = 0


#: No other sequences.
ALONE = Others()


class CostTable:
    """The seconds that a model's batches take, by their rows; every decode corrects them.

    `seconds` are those known so far. Sizes between two known ones are interpolated; sizes beyond
    the largest known one cost in proportion to their rows.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = {n: s for n, s in sorted((seconds or {}).items()) if n > 0 and s > 0.0}
        self._sizes = list(self._seconds)
        self._pace = 1.0
        self._n_observed: dict[int, int] = {}
        #: The number of sequences that the last decodes served at once, each with its own rows.
        self.n_sharing = 1

    def __bool__(self) -> bool:
        """Return whether any cost is known."""
        return bool(self._sizes)

    @property
    def known(self) -> dict[int, float]:
        """Seconds of the sizes that were measured or observed, at the machine's present speed."""
        return {size: seconds * self._pace for size, seconds in self._seconds.items()}

    def knows(self, n_rows: int) -> bool:
        """Return whether decodes of `n_rows` rows were measured or observed."""
        return n_rows in self._seconds

    def n_seen(self, n_rows: int) -> int:
        """Count the observed decodes of `n_rows` rows, without the initial `seconds`."""
        return self._n_observed.get(n_rows, 0)

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a batch of `n_rows` rows; 0 for none. Raise `LookupError` if no
        size is known."""
        if n_rows <= 0:
            return 0.0
        if not self._sizes:
            raise LookupError("no decode was measured")
        return self._pace * self._at_usual_pace(n_rows)

    def share_s(self, n_rows: int) -> float:
        """Return the expected seconds of `n_rows` rows of one sequence, if as many sequences as in the last
        decodes add as many rows each, and each pays an equal share of the batch; 0 while nothing is known."""
        if not self._sizes:
            return 0.0
        return self.seconds(n_rows * self.n_sharing) / self.n_sharing

    def start(self, n_rows: int, seconds: float) -> None:
        """Set the measured seconds of a size; they replace earlier ones."""
        if n_rows > 0 and seconds > 0.0:
            self._learn(n_rows, seconds / self._pace)

    def observe(self, n_rows: int, seconds: float, n_sharing: int = 1) -> None:
        """Learn from a decode of `n_rows` rows, in a round in which `n_sharing` sequences share decodes."""
        self.n_sharing = n_sharing
        if n_rows <= 0 or not seconds > 0.0:
            return
        n_seen = self.n_seen(n_rows)
        self._n_observed[n_rows] = n_seen + 1
        if not self._sizes:
            self._learn(n_rows, seconds)
            return
        deviation = seconds / self.seconds(n_rows)
        deviation = min(_MAX_DEVIATION, max(1.0 / _MAX_DEVIATION, deviation))
        is_known = self.knows(n_rows)
        # The other sizes say what to expect of a new one only roughly.
        own = _OWN_SHARE if is_known and n_seen >= _N_NEW else 0.5
        self._learn(n_rows, self._at_usual_pace(n_rows) * deviation**own)
        if is_known:
            self._pace *= deviation**_PACE_SHARE

    def _learn(self, n_rows: int, seconds: float) -> None:
        if n_rows not in self._seconds:
            bisect.insort(self._sizes, n_rows)
        self._seconds[n_rows] = seconds

    def _at_usual_pace(self, n_rows: int) -> float:
        """Return the seconds of a size, before the correction for the machine's present speed."""
        sizes, known = self._sizes, self._seconds
        if n_rows in known:
            return known[n_rows]
        index = bisect.bisect_left(sizes, n_rows)
        if index == len(sizes):
            return known[sizes[-1]] * n_rows / sizes[-1]
        if index == 0:
            # Fewer rows than any known size: not more seconds than the smallest one takes.
            return known[sizes[0]]
        below, above = sizes[index - 1], sizes[index]
        share = (n_rows - below) / (above - below)
        return known[below] * (1.0 - share) + known[above] * share


class BatchShare:
    """What the rows of one sequence cost in a batch of the target that it shares with others.

    Without drafts, N sequences share a batch of N rows, and each pays for v(N) / N. A drafted
    token is a row more in a batch of B rows, and costs what that row adds: v(B + 1) - v(B). (Alone,
    n rows cost v(n).) `table` is v, the seconds of the target's batches by their rows.
    """

    def __init__(self, table: CostTable, others: Others = ALONE) -> None:
        self._table = table
        self.n_sequences = 1 + others.n_sequences
        self._n_other_rows = others.n_rows

    @property
    def is_known(self) -> bool:
        """Whether a batch without drafts was measured or seen."""
        return self._table.knows(self.n_sequences)

    @property
    def n_seen(self) -> int:
        """How many batches without drafts were seen."""
        return self._table.n_seen(self.n_sequences)

    def seconds(self, n_rows: int) -> float:
        """Return the seconds that `n_rows` rows of this sequence cost; 0 for none. Raise `LookupError` if
        no size is known."""
        if n_rows <= 0:
            return 0.0
        table, others = self._table, self._n_other_rows
        if not others:
            return table.seconds(n_rows)
        plain_s = table.seconds(self.n_sequences) / self.n_sequences
        return plain_s + table.seconds(others + n_rows) - table.seconds(others + 1)

    def of_batch(self, n_rows: int, n_batch_rows: int) -> float:
        """Return the share, in [0, 1], that a sequence with `n_rows` rows pays of a batch of
        `n_batch_rows`. The shares of all sequences sum to at most 1."""
        n, table = self.n_sequences, self._table
        if n == 1:
            return 1.0
        plain_s, batch_s = table.seconds(n), table.seconds(n_batch_rows)
        if n_batch_rows <= n or batch_s <= plain_s:
            return 1.0 / n
        drafted = (n_rows - 1) / (n_batch_rows - n)
        return (plain_s / n + drafted * (batch_s - plain_s)) / batch_s
