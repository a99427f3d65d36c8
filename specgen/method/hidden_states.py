"""The target's hidden states along a text, for drafts that read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from specgen.method.backend import Backend
from specgen.system.arrays import Hidden
from specgen.text.overlap import common_prefix_length

#: The most states that wait for a draft to read them.
_N_UNREAD = 256
#: The most states that were read and are kept, for a text that is rolled back.
_N_KEPT = 32


class HiddenStateBuffer:
    """The target's hidden states after the last tokens that it decoded.

    The buffer outlives an answer, since the next answer often continues the text.
    """

    all_rows: ClassVar[bool] = True

    def __init__(self) -> None:
        #: The text that the target decoded.
        self.tokens: list[int] = []
        #: The states after its tokens from `first` on, float32[n_embd] each.
        self.states: list[Hidden] = []
        self.first = 0

    @property
    def n_decoded(self) -> int:
        """The number of tokens that the target decoded."""
        return len(self.tokens)

    def after(self, index: int) -> Hidden | None:
        """Return the state after the token at `index`, float32[n_embd]; None if it is unknown."""
        if index < self.first or index >= len(self.tokens):
            return None
        return self.states[index - self.first]

    def begin(self, text: Sequence[int], others: Iterable[HiddenStateBuffer] = ()) -> None:
        """Begin another text, with what this buffer, or one of `others`, knows of its prefix."""
        lengths = {buffer: common_prefix_length(buffer.tokens, text) for buffer in (self, *others)}
        best = max(lengths, key=lengths.__getitem__)
        self.tokens = best.tokens[:]
        self.states = best.states[:]
        self.first = best.first
        self.rewind(lengths[best])

    def keep_states(
        self,
        rows: Hidden,
        text: Sequence[int],
        n_decoded: int,
    ) -> None:
        """Store copies of states; see `HiddenStateSink.keep_states`."""
        start = n_decoded - len(rows)
        if start > len(self.tokens):  # the states of some tokens are missing
            self.states.clear()
            self.first = start
        else:
            self.rewind(start)
        self.tokens.extend(text[len(self.tokens) : n_decoded])
        self.states.extend(rows.copy())
        self._drop(len(self.states) - _N_UNREAD)

    def forget(self, n_tokens: int) -> None:
        """Forget the states after the first `n_tokens` tokens, except for the last few of them."""
        self._drop(n_tokens - _N_KEPT - self.first)

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` of the text."""
        if n_tokens < len(self.tokens):
            del self.tokens[n_tokens:]
            del self.states[max(0, n_tokens - self.first) :]
            self.first = min(self.first, n_tokens)

    def _drop(self, n: int) -> None:
        """Forget the first `n` states."""
        if n > 0:
            del self.states[:n]
            self.first = min(self.first + n, len(self.tokens))


@runtime_checkable
class StatesBackend(Backend, Protocol):
    """A context of a draft that reads the target's states, one for each row (`Batch.hidden`)."""

    @property
    def hidden_states_by_slot(self) -> Sequence[HiddenStateBuffer]:
        """The target's states along the text of each slot."""

    def state(self, sequence: int) -> Hidden:
        """Return the state of a sequence's last row that wanted logits, float32[n_embd].

        The next row reads it.
        """


class LastHiddenState:
    """The target's final hidden state after the last token, from which decoder heads draft."""

    all_rows: ClassVar[bool] = False

    def __init__(self) -> None:
        #: The number of tokens that the target decoded, and the state, float32[n_embd].
        self.last: tuple[int, Hidden] | None = None

    def keep_states(
        self,
        rows: Hidden,
        text: Sequence[int],
        n_decoded: int,
    ) -> None:
        """Store a copy of the last state; see `HiddenStateSink.keep_states`."""
        self.last = (n_decoded, rows[-1].copy())
