"""The target's hidden states along a text, for drafts that read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from specgen.method.backend import Backend
from specgen.system.arrays import Hidden
from specgen.text.prefix import n_common

#: The number of states that are kept after they were read, for a text that goes back to an earlier place.
_N_KEPT = 32
#: The memory for hidden states that a draft has not read yet, of all texts together, and the least number
#: of them that a text keeps.
_STATES_BYTES = 2**28
_LEAST_STATES = 256


def most_states(n_values: int, n_slots: int) -> int:
    """Return how many hidden states of `n_values` float32 each of `n_slots` texts may keep unread."""
    return max(_LEAST_STATES, _STATES_BYTES // (4 * n_values * n_slots))


class TargetStates(Protocol):
    """Takes the target's hidden states of one text from the loop, for a drafter that reads them."""

    #: Whether they are the states of all rows, those of the prompt too; else the final states of the rows
    #: of rounds that have logits.
    all_rows: ClassVar[bool]

    def take_rows(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        """Add copies of the last rows, float32[n, n_embd]: the target has read the first `n_read` tokens of
        `text`, and the last row is its state after them."""
        ...


class HiddenTrail:
    """The target's hidden states after each token of a text that it has read, in the order of the text. At
    most the last `n_most` are kept, and those that were read are forgotten (`forget`).

    A trail outlives an answer: the next one in the same part of the caches often continues its text.
    """

    all_rows: ClassVar[bool] = True

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        #: The text that the target has read, and the states after its tokens from `_first` on.
        self._tokens: list[int] = []
        self._states: list[Hidden] = []
        self._first = 0

    @property
    def n_read(self) -> int:
        """The number of tokens that the target has read."""
        return len(self._tokens)

    @property
    def first(self) -> int:
        """The first token whose state is known, and all after it; `n_read` if there is none."""
        return self._first

    def after(self, index: int) -> Hidden | None:
        """Return the state after the token at `index`, float32[n_embd]; None if it is not known."""
        if index < self._first or index >= len(self._tokens):
            return None
        return self._states[index - self._first]

    def begin(self, text: Sequence[int], others: Iterable[HiddenTrail] = ()) -> None:
        """Begin another text. Keep the states of its beginning that this trail, or one of the `others`,
        knows: the target's cache may hold that beginning already."""
        best = max((self, *others), key=lambda trail: (trail.n_common(text), trail is self))
        if best is not self:
            self.take_over(best)
        self.rewind(self.n_common(text))

    def take_over(self, other: HiddenTrail) -> None:
        """Take the text of another trail, and its known states, which are then shared."""
        self._tokens, self._states, self._first = other.copied()

    def n_common(self, text: Sequence[int]) -> int:
        """Return the length of the beginning that a text has in common with this one."""
        return n_common(self._tokens, text)

    def copied(self) -> tuple[list[int], list[Hidden], int]:
        """Return the text, the known states, which are shared, and the first token of these."""
        return list(self._tokens), list(self._states), self._first

    def take_rows(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        start = n_read - len(rows)
        if start > len(self._tokens):  # the target has read some tokens unseen
            self._states.clear()
            self._first = start
        else:
            self.rewind(start)
        self._tokens.extend(text[len(self._tokens) : n_read])
        self._states.extend(rows.copy())
        self._drop(len(self._states) - self._n_most)

    def forget(self, n_tokens: int) -> None:
        """Forget the states after the first `n_tokens` tokens, but for the last few of them."""
        self._drop(n_tokens - _N_KEPT - self._first)

    def rewind(self, n_tokens: int) -> None:
        """Forget the states that have read more than the text's first `n_tokens`."""
        if n_tokens < len(self._tokens):
            del self._tokens[n_tokens:]
            del self._states[max(0, n_tokens - self._first) :]
            self._first = min(self._first, n_tokens)

    def _drop(self, n: int) -> None:
        if n > 0:
            del self._states[:n]
            self._first = min(self._first + n, len(self._tokens))


@runtime_checkable
class StatesBackend(Backend, Protocol):
    """A context of what drafts from the target's hidden states. Its rows have the state before them
    (`Batch.hidden`)."""

    @property
    def trails(self) -> Sequence[HiddenTrail]:
        """Return the target's states along the text of each slot."""
        ...

    def state(self, sequence: int) -> Hidden:
        """Return the state of the sequence's last row that wanted logits, float32[n_embd]; the next row reads it."""
        ...


class LastHidden:
    """The target's final hidden state after the last committed token that it has read. The loop replaces it after
    each round, and decoder heads draft from it."""

    all_rows: ClassVar[bool] = False

    def __init__(self) -> None:
        #: The number of tokens that it has read, and the state, float32[n_embd].
        self.last: tuple[int, Hidden] | None = None

    def take_rows(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        self.last = (n_read, rows[-1].copy())
