"""The target's hidden states along a text, for drafters that read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from specgen.method.backend import Backend
from specgen.system.arrays import Hidden
from specgen.text.overlap import common_prefix_length

#: The maximum number of states that are stored until a drafter reads them.
_MAX_UNREAD = 256
#: The number of read states that are kept in case the text is rolled back.
_N_KEPT_READ = 32


class HiddenStateBuffer:
    """The target's hidden states after the last tokens that it decoded.

    The buffer outlives an answer, since the next answer often continues the text.
    """

    reads_all_rows: ClassVar[bool] = True

    def __init__(self) -> None:
        #: The text that the target decoded.
        self.tokens: list[int] = []
        #: The states after the tokens from index `first` on, float32[n_embd] each.
        self.states: list[Hidden] = []
        #: The index of the first token whose state is stored.
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

    def begin(
        self,
        text: Sequence[int],
        others: Iterable[HiddenStateBuffer] = (),
    ) -> None:
        """Begin another text, with the states of its longest prefix in this or another buffer.

        Args:
            text: The tokens of the text.
            others: Other buffers to look for a prefix in.
        """
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
        start = n_decoded - len(rows)  # the index of the first row's token
        if start > len(self.tokens):  # the states of some tokens are missing
            self.states.clear()
            self.first = start
        else:
            self.rewind(start)
        self.tokens.extend(text[len(self.tokens) : n_decoded])
        self.states.extend(rows.copy())
        self._drop(len(self.states) - _MAX_UNREAD)

    def forget(self, n_tokens: int) -> None:
        """Forget the states of the first `n_tokens` tokens, except for the last few of them."""
        self._drop(n_tokens - _N_KEPT_READ - self.first)

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
class HiddenStateBackend(Backend, Protocol):
    """A draft model's backend that reads a hidden state with each row (`Batch.hidden`)."""

    @property
    def hidden_states_by_slot(self) -> Sequence[HiddenStateBuffer]:
        """The target's hidden states along the text of each slot."""

    def state(self, sequence: int) -> Hidden:
        """Return the hidden state of a sequence's last row that wanted logits, float32[n_embd].

        The next row has to be decoded with it.
        """


class LastHiddenState:
    """The target's final hidden state after the last token, which decoder heads draft from."""

    reads_all_rows: ClassVar[bool] = False

    def __init__(self) -> None:
        #: The number of tokens that the target decoded, and the state after them, float32[n_embd];
        #: None before the first round.
        self.last: tuple[int, Hidden] | None = None

    def keep_states(
        self,
        rows: Hidden,
        text: Sequence[int],
        n_decoded: int,
    ) -> None:
        """Store a copy of the last state; see `HiddenStateSink.keep_states`."""
        self.last = (n_decoded, rows[-1].copy())
