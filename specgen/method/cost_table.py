"""What decoding costs.

Costs are observed, since they are jagged (one more row may double the time, or cost nothing) and
differ between machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specgen.system.arrays import interpolate

# A decode that takes d times the expected seconds corrects its size's entry, and the machine's
# speed, by powers of d: what sizes cost beside others hardly changes with another program's work,
# but the machine's speed does.
_COST_RATE, _SPEED_RATE = 0.05, 0.2
_MAX_DEVIATION = 1.5  # the largest d: a machine that is busy for a moment says nothing of the model


@dataclass(frozen=True, slots=True)
class Price:
    """What drafting costs, in seconds: the first token, each further one, and once the prefill of
    what the drafter has not read yet, beyond the last round, which `seconds` leaves out.
    """

    first_s: float
    next_s: float
    prefill_s: float = 0.0

    def seconds(self, n_drafted: int) -> float:
        return self.first_s + (n_drafted - 1) * self.next_s


FREE = Price(0.0, 0.0)  # nothing worth counting


class CostTable:
    """The seconds of a model's batches by their rows; every decode corrects them. Between known
    sizes they are interpolated; fewer rows than any of these cost what it does, and more in
    proportion.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._seconds = {n: s for n, s in sorted((seconds or {}).items()) if n > 0 and s > 0.0}
        self._n_observed = dict.fromkeys(self._seconds, 20)
        self._slowness = 1.0  # the machine's present seconds over those of the table
        self.n_sharing = 1  # the sequences that the last decode served at once

    def __bool__(self) -> bool:
        return bool(self._seconds)

    @property
    def known(self) -> dict[int, float]:
        """The seconds of each known size, at the machine's present speed."""
        return {size: seconds * self._slowness for size, seconds in self._seconds.items()}

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a batch; 0 for no rows. Raise `LookupError` if no size is
        known.
        """
        known = self._seconds
        if n_rows <= 0:
            return 0.0
        if n_rows in known:
            return self._slowness * known[n_rows]
        if not known:
            raise LookupError("no decode was measured")
        sizes = sorted(known)
        if n_rows > sizes[-1]:
            return self._slowness * known[sizes[-1]] * n_rows / sizes[-1]
        return self._slowness * interpolate(n_rows, sizes, [known[size] for size in sizes])

    def seconds_each(self, n_rows: int) -> float:
        """Return one sequence's part of a decode in which all have `n_rows` rows; 0 while nothing
        is known.
        """
        return self.seconds(n_rows * self.n_sharing) / self.n_sharing if self._seconds else 0.0

    def share_of_batch(self, n_drafted: int, n_rows: int) -> float:
        """Return one sequence's share of a batch: an equal part of plain rows, and the rest by its
        drafted rows.
        """
        n = self.n_sharing
        if n == 1 or n_rows <= n:
            return 1.0 / n
        plain_s, batch_s = self.seconds(n), max(self.seconds(n), self.seconds(n_rows))
        return (plain_s / n + n_drafted / (n_rows - n) * (batch_s - plain_s)) / batch_s

    def set_seconds(self, n_rows: int, seconds: float) -> None:
        if n_rows > 0 and seconds > 0.0:
            self._seconds[n_rows] = seconds / self._slowness

    def observe(self, n_rows: int, seconds: float, n_sharing: int = 1) -> None:
        """Learn from a decode of `n_rows` rows, which served `n_sharing` sequences."""
        if n_rows <= 0 or not seconds > 0.0:
            return
        self.n_sharing = n_sharing
        expected_s = self.seconds(n_rows) if self._seconds else seconds
        deviation = min(_MAX_DEVIATION, max(1.0 / _MAX_DEVIATION, seconds / expected_s))
        is_known, n_seen = n_rows in self._seconds, self._n_observed.get(n_rows, 0)
        self._n_observed[n_rows] = n_seen + 1
        seconds = expected_s * deviation ** max(_COST_RATE, 1 / (n_seen + 3))
        self._seconds[n_rows] = seconds / self._slowness
        if is_known:  # the other sizes say what to expect of a new one only roughly
            self._slowness *= deviation**_SPEED_RATE
