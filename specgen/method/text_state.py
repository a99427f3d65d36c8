"""The committed text of a sequence, with the state of its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.system.arrays import TokenArray
from specgen.text.grammar.base import GrammarState

#: How many tokens after the prompt the history buffer has room for at first.
_INITIAL_ROOM = 512


class TextState:
    """The committed tokens of one text, and the state of its grammar.

    The prompt counts for penalties, but not for the grammar.

    Methods with `drafted` tokens look ahead: they tell what holds if these tokens follow the text,
    and change nothing.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        #: All committed tokens, prompt and answer. Only `commit` may change the list.
        self.tokens: list[int] = list(prompt)
        self._grammar = grammar
        self.has_grammar = grammar is not None
        #: The tokens as an array, for samplers. Only the first `_n_copied` are sure to be those of
        #: the text: the others may be drafted tokens of an earlier call.
        self._history = np.zeros(len(prompt) + _INITIAL_ROOM, np.int64)
        self._n_copied = 0

    def commit(self, token: int) -> None:
        """Add a token to the text.

        Raises:
            ValueError: If the grammar does not allow it.
        """
        previous = self._grammar
        if previous is not None:
            self._grammar = previous.after(token)
            previous.forget()
        self.tokens.append(token)

    def history(self, drafted: Sequence[int], n_last: int) -> TokenArray:
        """Return the last tokens of the text with the `drafted` ones after it.

        Args:
            drafted: The drafted tokens after the text.
            n_last: The maximum number of tokens; -1 for all.

        Returns:
            The tokens, int64[m]: a view that is valid until the next call.
        """
        if n_last == 0:
            return self._history[:0]
        n_text = len(self.tokens)
        end = n_text + len(drafted)
        if end > len(self._history):
            self._history = np.resize(self._history, 2 * end)
        # Append what was committed since the last call, then the drafted tokens.
        self._history[self._n_copied : n_text] = self.tokens[self._n_copied :]
        self._n_copied = n_text
        self._history[n_text:end] = drafted
        start = 0 if n_last < 0 else max(0, end - n_last)
        return self._history[start:end]

    def grammar(self, drafted: Sequence[int] = ()) -> GrammarState | None:
        """Return the state of the grammar after the text and `drafted`; None without a grammar.

        Raises:
            ValueError: If the grammar does not allow a token of `drafted`.
        """
        state = self._grammar
        if state is not None:
            for token in drafted:
                state = state.after(token)
        return state

    def forced(self, drafted: Sequence[int] = ()) -> int | None:
        """Return the only token that the grammar allows after the text and `drafted`.

        Returns:
            The token; None if there are several, or no grammar.
        """
        grammar = self.grammar(drafted)
        return grammar.forced() if grammar is not None else None

    def within_grammar(
        self,
        draft: Draft,
        before: Sequence[int] = (),
    ) -> Draft:
        """Return the part of a draft that the grammar allows after the text and `before`.

        Args:
            draft: The draft. It must not be sampled.
            before: Drafted tokens between the text and this draft.
        """
        try:
            #: The state of the grammar after each node that it allows.
            states = {ROOT: self.grammar(before)}
        except ValueError:  # it does not allow `before`
            return NO_DRAFT
        for node, token in enumerate(draft.tokens):
            state = states.get(draft.parents[node])
            if state is not None and state.allows(np.array([token]))[0]:
                states[node] = state.after(token)
        return draft.only([node for node in states if node != ROOT])
