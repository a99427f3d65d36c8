"""One text in the cache of what drafts from the target's hidden states."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specgen.drafters.hidden_trail import HiddenTrail
from specgen.method.backend import Batch, MtpBackend
from specgen.method.cost_table import CostTable
from specgen.method.drafter import Ask
from specgen.system.arrays import Hidden, Logits


class StatesCache:
    """The rows of a text in one sequence of a cache. The row of a token reads the hidden state before it:
    the target's (`trail`) or, behind what the target has read, a drafted one.

    If states of some tokens are missing, the cache begins behind these tokens.
    """

    def __init__(
        self,
        backend: MtpBackend,
        trail: HiddenTrail,
        costs: CostTable,
        sequence: int,
        n_held: int,
    ) -> None:
        self._backend = backend
        self._trail = trail
        self._costs = costs
        self._sequence = sequence
        #: The number of tokens that the cache holds, counted from the text's beginning, and how many of
        #: the first are left out.
        self.n_held = n_held
        self.n_skipped = 0

    @property
    def length(self) -> int:
        """The number of rows of tokens that the target has read."""
        return self.n_held - self.n_skipped

    def n_missing(self, n_read: int) -> int:
        """Return the number of rows that the next draft decodes before it drafts: those up to that of token
        `n_read`."""
        return max(1, n_read + 1 - max(self.n_held, self._trail.first))

    def find_start(self, n_read: int) -> bool:
        """Drop the rows that the first batch decodes again, and return whether the state that its last row
        reads is known. If other states are missing, the cache begins behind them."""
        if n_read and self._trail.after(n_read - 1) is None:
            return False
        n_held = min(self.n_held, n_read)
        if self._trail.first > n_held:
            # One state too few happens wherever a kept text goes on: the row then reads zeros.
            n_held = self.n_skipped = self._trail.first
            self._backend.remove(self._sequence)
        self.n_held = n_held
        self.drop_drafted()
        return True

    def catch_up(
        self,
        context: Sequence[int],
        n_read: int,
        drafted: Sequence[int] = (),
        behind: Sequence[Hidden] = (),
    ) -> Generator[Ask, Logits, Logits]:
        """Decode the rows up to that of token `n_read`, and further ones, which read the states `behind`;
        return the logits after the last, float32[n_vocab]. `drafted` are the tokens behind `context`."""
        start, n_rows = self.n_held, n_read + 1 + len(behind)
        rows: Logits | None = None
        while start < n_rows:
            batch = Batch()
            for index in range(start, n_rows)[: self._backend.n_batch]:
                is_text, wants = index < len(context), index == n_rows - 1
                token = context[index] if is_text else drafted[index - len(context)]
                batch.add(token, index - self.n_skipped, (self._sequence,), wants)
                is_read = index <= n_read
                state = self._trail.after(index - 1) if is_read else behind[index - n_read - 1]
                batch.hidden.append(state)
            rows = yield Ask(self._backend, batch, self._costs)
            start += len(batch)
            self.n_held = min(start, n_read + 1)
        assert rows is not None, "at least one token is decoded"
        row: Logits = rows[0]
        return row

    def state(self) -> Hidden:
        """Return the hidden state of the last row, float32[n_embd]."""
        return self._backend.state(self._sequence)

    def drop_drafted(self) -> None:
        """Drop the rows behind those of tokens that the target has read."""
        if self._backend.length(self._sequence) > self.length:
            self._backend.remove(self._sequence, self.length)

    def rewind(self, n_tokens: int) -> None:
        """Drop the rows of all but the text's first `n_tokens` tokens."""
        if n_tokens < self.n_held:
            self.n_held = max(n_tokens, self.n_skipped)
            self._backend.remove(self._sequence, self.length)
