"""A target's hidden states beside the end of its text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specgen.arrays import Hidden

#: So many are kept, for a text that goes back to an earlier place.
_N_KEPT = 32


@dataclass(slots=True)
class LastHidden:
    """The target's final hidden states behind the last tokens of a text that it has read for good: the
    loop adds one after each round, and what drafts from them takes the last."""

    _states: deque[tuple[int, Hidden]] = field(default_factory=lambda: deque(maxlen=_N_KEPT))

    def before(self, n_tokens: int) -> tuple[int, Hidden] | None:
        """The last state that had not read all of a text of so many tokens: how many it had read, and
        float32[n_embd]; None if there is none."""
        return next((each for each in reversed(self._states) if each[0] < n_tokens), None)

    def take(self, row: Hidden, n_read: int) -> None:
        """Add a row of hidden states, float32[n_embd], which is copied: `n_read` tokens were read."""
        self._states.append((n_read, row.copy()))

    def rewind(self, n_tokens: int) -> None:
        """Forget those that have read more than the text's first `n_tokens`."""
        while self._states and self._states[-1][0] > n_tokens:
            self._states.pop()
