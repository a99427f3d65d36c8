"""A target's hidden states at the end of its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from specgen.system.arrays import Hidden

#: The number of states that are kept, for a text that goes back to an earlier position.
_N_KEPT = 32


@dataclass(slots=True)
class LastHidden:
    """The target's final hidden states after the last committed tokens that it has read. The loop adds
    one after each round, and decoder heads draft from the last one."""

    all_rows: ClassVar[bool] = False
    _states: deque[tuple[int, Hidden]] = field(default_factory=lambda: deque(maxlen=_N_KEPT))

    def before(self, n_tokens: int) -> tuple[int, Hidden] | None:
        """Return the last state computed from fewer than `n_tokens` tokens, as that number of tokens and
        float32[n_embd]; None if there is none."""
        return next((each for each in reversed(self._states) if each[0] < n_tokens), None)

    def take_rows(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        self.take(rows[-1], n_read)

    def take(self, row: Hidden, n_read: int) -> None:
        """Add a copy of a hidden state, float32[n_embd], that has read `n_read` tokens."""
        self._states.append((n_read, row.copy()))

    def rewind(self, n_tokens: int) -> None:
        """Forget the states that have read more than the text's first `n_tokens`."""
        while self._states and self._states[-1][0] > n_tokens:
            self._states.pop()
