"""The states of a grammar: the interface that constrained decoding needs, for every implementation.

Each node of a draft tree has a state of its own, so a state is a value, and `after` returns the
next one. It keeps its children, so that drafter and verifier get the same objects and the work is
done once; a child does not know its parent. The loop holds only the state at the end of the text
and lets the one before `forget`, so that states of the past and of rejected branches are freed.
(Weak references would lose the drafter's results before the verifier asks.)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from specgen.system.arrays import BoolArray, Logits, TokenArray


class GrammarState(Protocol):
    """The state of a grammar after a text. Immutable."""

    __slots__ = ()

    @property
    def is_free(self) -> bool:
        return False

    def allows(self, token_ids: TokenArray) -> BoolArray:
        """Return which of these tokens may come next, bool[m]; perhaps none, and end-of-text tokens
        exactly where the text may end. Raise ValueError for ids that are not in the vocabulary.
        """

    def ending(self, logits: Logits) -> Logits:
        """Return the row of logits; a token that ends a number has the score of any such one that
        is forbidden.
        """
        return logits

    def after(self, token_id: int) -> GrammarState:
        """Return the state one token later; behind an end nothing is allowed. Raise ValueError if
        this token is not.
        """

    def forget(self) -> None:
        """Drop the states that follow: whoever holds the start of a long text would hold them all."""
        return

    def forced(self) -> int | None:
        """Return the only token that may come next, or the first if only ends may; None if there
        are others.
        """
        return None


def checked_ids(token_ids: TokenArray, n_tokens: int) -> TokenArray:
    """Return these tokens. Raise ValueError if one is not in a vocabulary of `n_tokens`."""
    token_ids = np.asarray(token_ids, np.int64)
    for token_id in (token_ids.min(), token_ids.max()) if len(token_ids) else ():
        if not 0 <= token_id < n_tokens:
            raise ValueError(f"there is no token {token_id}: the vocabulary has {n_tokens}")
    return token_ids


class _Ended(GrammarState):
    def allows(self, token_ids: TokenArray) -> BoolArray:
        return np.zeros(len(token_ids), np.bool_)

    def after(self, token_id: int) -> GrammarState:
        raise ValueError(f"the text has ended: the grammar does not allow token {token_id}")


#: Where any grammar stands after an end-of-text token.
ENDED: GrammarState = _Ended()
