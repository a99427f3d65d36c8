"""The states of a grammar: what constrained decoding needs from every implementation.

Each node of a draft tree needs its own state, so states are immutable, and `after` returns the next
one. A state caches the states that follow it, so that drafter and verifier get the same objects and
the work is done only once. It does not know the state before it. The loop holds only the state at
the end of the text, and calls `forget` on the one before, so that states of the past and of
rejected branches are freed. (With weak references, the drafter's states would be gone before the
verifier needs them.)
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
        """Return which of these tokens may come next, bool[m].

        End-of-text tokens are allowed exactly where the text may end.

        Raises:
            ValueError: If a token is not in the vocabulary.
        """

    def adjust_logits(self, logits: Logits) -> Logits:
        """Return the logits, adjusted where the mask alone would distort the model's intention.

        By default, nothing is adjusted. `llguidance_grammar` does it at the end of numbers.
        """
        return logits

    def after(self, token_id: int) -> GrammarState:
        """Return the state after a token. After an end-of-text token, no token is allowed.

        Raises:
            ValueError: If the token is not allowed.
        """

    def forget(self) -> None:
        """Drop the cached states that follow this one, which would otherwise all be kept alive."""
        return

    def forced(self) -> int | None:
        """Return the token that has to come next: the only one that is allowed.

        Returns:
            The token. If only end-of-text tokens are allowed, the first of them. None if there is a
            choice, or no token is allowed.
        """
        return None


def checked_ids(token_ids: TokenArray, n_tokens: int) -> TokenArray:
    """Return these tokens as int64, if they are in a vocabulary of `n_tokens` tokens.

    Raises:
        ValueError: If one of them is not.
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
