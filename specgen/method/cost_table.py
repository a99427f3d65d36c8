"""What decodes cost: `CostTable`, and the `Price` of drafting that follows from it.

Costs are measured, not modelled: they are jagged (one more row may double the time, or cost
nothing) and differ between machines. `specgen.session.calibration` measures them for the first
time, and `specgen.session.measurement_store` keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specgen.system.arrays import interpolate

# If a decode takes d times as long as expected, the entry of its size is multiplied by one power of
# d, and the slowness of the machine by another. The latter adapts faster: other programs slow the
# machine down, but hardly change what one size costs relative to another.
#: The exponent for the entry of a size that was observed often.
_SIZE_RATE = 0.05
#: The exponent for the slowness of the machine.
_SPEED_RATE = 0.2
#: The limit for d: a machine that is busy for a moment reveals nothing about the model.
_MAX_DEVIATION = 1.5
#: A size from the calibration counts as this many observations.
_N_MEASURED = 20


@dataclass(frozen=True, slots=True)
class Price:
    """What drafting costs, in seconds."""

    #: The first token of a draft.
    first_s: float
    #: Each further token.
    next_s: float
    #: The prefill before the first token, of what the drafter has not decoded yet, apart from the
    #: last round's tokens. It is an investment in later rounds, and not part of `seconds`.
    prefill_s: float = 0.0

    def seconds(self, n_drafted: int) -> float:
        """Return the seconds of a draft of `n_drafted` tokens, 1 or more, without the prefill."""
        return self.first_s + (n_drafted - 1) * self.next_s


#: The price of drafts that take no time worth counting.
FREE = Price(0.0, 0.0)


class CostTable:
    """The seconds of a model's batches by their number of rows; every decode corrects them.

    Between known sizes, costs are interpolated. A batch smaller than any known size costs what the
    smallest one does, and a larger one costs more than the largest in proportion to its rows.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        measured = sorted((seconds or {}).items())
        #: The seconds of each known size, while the machine's slowness is 1.
        self._seconds = {n: size_s for n, size_s in measured if n > 0 and size_s > 0.0}
        self._n_observed = dict.fromkeys(self._seconds, _N_MEASURED)
        #: The current seconds of decodes divided by those in the table.
        self._slowness = 1.0
        #: The number of sequences that shared the last decode.
        self.n_sharing = 1

    def __bool__(self) -> bool:
        """Return whether the cost of any size is known."""
        return bool(self._seconds)

    @property
    def known(self) -> dict[int, float]:
        """The seconds of each known size, at the machine's current speed."""
        return {n_rows: seconds * self._slowness for n_rows, seconds in self._seconds.items()}

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a batch of `n_rows` rows; 0 for no rows.

        Raises:
            LookupError: If the cost of no size is known.
        """
        known = self._seconds
        if n_rows <= 0:
            return 0.0
        if n_rows in known:
            return self._slowness * known[n_rows]
        if not known:
            raise LookupError("no decode was measured")
        sizes = sorted(known)
        largest = sizes[-1]
        if n_rows > largest:
            return self._slowness * known[largest] * n_rows / largest
        return self._slowness * interpolate(n_rows, sizes, [known[size] for size in sizes])

    def seconds_each(self, n_rows: int) -> float:
        """Return one sequence's share of the seconds of a batch in which each has `n_rows` rows.

        The number of sequences is that of the last decode. The result is 0 while nothing is known.
        """
        if not self._seconds:
            return 0.0
        return self.seconds(n_rows * self.n_sharing) / self.n_sharing

    def share_of_batch(self, n_drafted: int, n_rows: int) -> float:
        """Return one sequence's share of the cost of a batch, between 0 and 1.

        Without drafts the batch would have one row for each sequence. That cost is shared equally,
        the rest in proportion to drafted rows.

        Args:
            n_drafted: The number of rows that the sequence drafted.
            n_rows: The number of all rows in the batch.
        """
        n_plain = self.n_sharing
        if n_plain == 1 or n_rows <= n_plain:
            return 1.0 / n_plain
        plain_s = self.seconds(n_plain)
        batch_s = max(plain_s, self.seconds(n_rows))
        share_of_drafted = n_drafted / (n_rows - n_plain)
        return (plain_s / n_plain + share_of_drafted * (batch_s - plain_s)) / batch_s

    def price_of_draft(
        self,
        n_unread: int,
        n_usual: int,
        n_extra_steps: int = 0,
    ) -> Price:
        """Return the price of drafting with a model that has these costs.

        Args:
            n_unread: The number of tokens that the model has to decode before its first draft step.
            n_usual: How many of these at most are part of the price of every round. The others
                count as prefill.
            n_extra_steps: The number of further decodes, of one token each, before the first step.
        """
        first_s = self.seconds_each(min(n_unread, n_usual))
        next_s = self.seconds_each(1)
        prefill_s = max(0.0, self.seconds_each(n_unread) - first_s)
        return Price(first_s + n_extra_steps * next_s, next_s, prefill_s)

    def set_seconds(self, n_rows: int, seconds: float) -> None:
        """Replace the entry of a size with a measurement."""
        if n_rows > 0 and seconds > 0.0:
            self._seconds[n_rows] = seconds / self._slowness

    def observe(
        self,
        n_rows: int,
        seconds: float,
        n_sharing: int = 1,
    ) -> None:
        """Learn from a decode.

        Args:
            n_rows: The number of rows in the batch.
            seconds: The time that it took. A decode without a measured time is ignored.
            n_sharing: The number of sequences that shared the batch.
        """
        if n_rows <= 0 or not seconds > 0.0:
            return
        self.n_sharing = n_sharing
        is_known = n_rows in self._seconds
        expected_s = self.seconds(n_rows) if self._seconds else seconds
        deviation = min(_MAX_DEVIATION, max(1.0 / _MAX_DEVIATION, seconds / expected_s))

        # The first observations of a size change its entry more than later ones.
        n_seen = self._n_observed.get(n_rows, 0)
        self._n_observed[n_rows] = n_seen + 1
        rate = max(_SIZE_RATE, 1 / (n_seen + 3))
        corrected_s = expected_s * deviation**rate
        self._seconds[n_rows] = corrected_s / self._slowness
        if is_known:  # the expected cost of a new size was only interpolated
            self._slowness *= deviation**_SPEED_RATE
