"""The target's hidden states along a text, for drafts that read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from specgen.method.backend import Backend
from specgen.system.arrays import Hidden
from specgen.text.overlap import common_prefix_length

#: The most states that wait for a draft to read them, and of those it has read, for a text that
#: goes back.
_N_UNREAD, _N_KEPT = 256, 32


class HiddenStateBuffer:
    """The target's hidden states after the last tokens that it has read. The next answer often
    continues the text.
    """

    all_rows: ClassVar[bool] = True

    def __init__(self) -> None:
        #: The text that the target has read, and the states after its tokens from `first` on.
        self.tokens: list[int] = []
        self.states: list[Hidden] = []
        self.first = 0

    @property
    def n_read(self) -> int:
        return len(self.tokens)

    def after(self, index: int) -> Hidden | None:
        """Return the state after the token at `index`, float32[n_embd]; None if it is not known."""
        if index < self.first or index >= len(self.tokens):
            return None
        return self.states[index - self.first]

    def begin(self, text: Sequence[int], others: Iterable[HiddenStateBuffer] = ()) -> None:
        """Begin another text, with the states of its beginning that this trail, or one of the
        `others`, knows.
        """
        lengths = {
            hidden_states: common_prefix_length(hidden_states.tokens, text)
            for hidden_states in (self, *others)
        }
        best = max(lengths, key=lengths.__getitem__)
        self.tokens, self.states, self.first = best.tokens[:], best.states[:], best.first
        self.rewind(lengths[best])

    def keep_states(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        start = n_read - len(rows)
        if start > len(self.tokens):  # the target has read some tokens unseen
            self.states.clear()
            self.first = start
        else:
            self.rewind(start)
        self.tokens.extend(text[len(self.tokens) : n_read])
        self.states.extend(rows.copy())
        self._drop(len(self.states) - _N_UNREAD)

    def forget(self, n_tokens: int) -> None:
        """Forget the states after the first `n_tokens` tokens, but for the last few of them."""
        self._drop(n_tokens - _N_KEPT - self.first)

    def rewind(self, n_tokens: int) -> None:
        """Forget the states that have read more than the text's first `n_tokens`."""
        if n_tokens < len(self.tokens):
            del self.tokens[n_tokens:]
            del self.states[max(0, n_tokens - self.first) :]
            self.first = min(self.first, n_tokens)

    def _drop(self, n: int) -> None:
        if n > 0:
            del self.states[:n]
            self.first = min(self.first + n, len(self.tokens))


@runtime_checkable
class StatesBackend(Backend, Protocol):
    """A context of what drafts from the target's states, which come before its rows
    (`Batch.hidden`).
    """

    @property
    def hidden_states_by_slot(self) -> Sequence[HiddenStateBuffer]:
        """The target's states along the text of each slot."""
        ...

    def state(self, sequence: int) -> Hidden:
        """Return the state of the sequence's last row that wanted logits, float32[n_embd]; the next
        row reads it.
        """
        ...


class LastHiddenState:
    """The target's final hidden state behind the last token it has read, which decoder heads draft
    from.
    """

    all_rows: ClassVar[bool] = False

    def __init__(self) -> None:
        #: The number of tokens that it has read, and the state, float32[n_embd].
        self.last: tuple[int, Hidden] | None = None

    def keep_states(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        self.last = (n_read, rows[-1].copy())
