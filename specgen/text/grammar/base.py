"""The states of a grammar: what constrained decoding needs from every implementation.

Each node of a draft tree has a state of its own. So a state is a value, and `after` returns the
next one. It keeps the states that follow it, so that drafter and verifier get the same objects and
the work is done once; a state does not know the one before it. The loop holds only the state at the
end of the text and lets the one before `forget`, so that states of the past and of rejected
branches are freed. (Weak references would lose the drafter's states before the verifier asks.)
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
        """Whether every token is known to be allowed."""
        return False

    def allows(self, token_ids: TokenArray) -> BoolArray:
        """Return which of these tokens may come next, bool[m]; perhaps none of them.

        End-of-text tokens are allowed exactly where the text may end.

        Raises:
            ValueError: An id is not in the vocabulary.
        """

    def adjust_logits(self, logits: Logits) -> Logits:
        """Return the row of logits, changed where the model's choice would be lost by the mask.

        See `llguidance_grammar` on the ends of numbers.
        """
        return logits

    def after(self, token_id: int) -> GrammarState:
        """Return the state one token later. After the end of the text no token is allowed.

        Raises:
            ValueError: The token is not allowed.
        """

    def forget(self) -> None:
        """Drop the states that follow: the first state of a long text would keep them all."""
        return

    def forced(self) -> int | None:
        """Return the token that has to come next: the only one that is allowed.

        If only end-of-text tokens are allowed, it is the first of them. None if there is a choice.
        """
        return None


def checked_ids(token_ids: TokenArray, n_tokens: int) -> TokenArray:
    """Return these tokens.

    Raises:
        ValueError: One of them is not in a vocabulary of `n_tokens`.
    """
    token_ids = np.asarray(token_ids, np.int64)
    if not len(token_ids):
        return token_ids
    for token_id in (token_ids.min(), token_ids.max()):
        if not 0 <= token_id < n_tokens:
            raise ValueError(f"there is no token {token_id}: the vocabulary has {n_tokens}")
    return token_ids


class _Ended(GrammarState):
    def allows(self, token_ids: TokenArray) -> BoolArray:
        return np.zeros(len(token_ids), np.bool_)

    def after(self, token_id: int) -> GrammarState:
        raise ValueError(f"the text has ended: the grammar does not allow token {token_id}")


#: The state of any grammar after an end-of-text token.
ENDED: GrammarState = _Ended()
