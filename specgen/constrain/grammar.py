"""Where a grammar stands: what constrained decoding needs to know, whoever implements it.

In a draft tree the grammar stands elsewhere at each node, so a state is a value: `after` makes
the next one and leaves this one as it was. The drafter and the verifier that ask for the same
path get the same objects, and the work is done once.

A state keeps its children, a child knows nothing of its parent: the loop holds the state at the
end of the text and nothing older, and as it moves on, the states of the past and the branches
that were refused go, while those of the accepted branch stay. (Weak references to children
would lose what the drafter found out before the verifier asks.) Whoever holds on to an old state
holds on to every state reached from it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from specgen.arrays import BoolArray, TokenArray


class GrammarState(Protocol):
    """Where a grammar stands after a text. Immutable."""

    def allows(self, token_ids: TokenArray) -> BoolArray:
        """bool[m]: which of these tokens may come next; end-of-text tokens exactly where the
        text may end. It may happen that no token at all may.

        Raises ValueError for ids that are not in the vocabulary.
        """
        ...

    def after(self, token_id: int) -> GrammarState:
        """The state one token later; after an end-of-text token one that allows nothing.

        Raises ValueError if the token is not allowed here.
        """
        ...

    def forced(self) -> int | None:
        """The only token that may come next, if there is exactly one; if only end-of-text
        tokens may, the first of them. Much cheaper than a model's decode."""
        ...


class _Ended:
    """After an end-of-text token: nothing is allowed."""

    def allows(self, token_ids: TokenArray) -> BoolArray:
        return np.zeros(len(token_ids), np.bool_)

    def after(self, token_id: int) -> GrammarState:
        raise ValueError(f"the text has ended: the grammar does not allow token {token_id}")

    def forced(self) -> int | None:
        return None


#: Where any grammar stands after an end-of-text token.
ENDED: GrammarState = _Ended()
