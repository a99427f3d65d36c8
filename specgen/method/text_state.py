"""The committed text of a sequence, with the state of its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.system.arrays import TokenArray
from specgen.text.grammar.base import GrammarState

#: The room for tokens after the prompt; there is more if a text outgrows it.
_ROOM = 512


class TextState:
    """The committed tokens of one text, and the state of its grammar.

    Penalties see the prompt, the grammar does not.
    """

    def __init__(self, prompt: Sequence[int], grammar: GrammarState | None = None) -> None:
        #: All committed tokens, prompt and answer. Read only; `commit` adds to it.
        self.tokens: list[int] = list(prompt)
        self._grammar = grammar
        self.has_grammar = grammar is not None
        #: The tokens as samplers see them. The first `_n_shown` are those of the text; others may
        #: be left from an earlier path.
        self._history = np.zeros(len(prompt) + _ROOM, np.int64)
        self._n_shown = 0

    def commit(self, token: int) -> None:
        """Add a token to the text. Raise `ValueError` if the grammar does not allow it."""
        before = self._grammar
        if before is not None:
            self._grammar = before.after(token)
            before.forget()
        self.tokens.append(token)

    def history(self, path: Sequence[int], n_last: int) -> TokenArray:
        """Return the last tokens of the text and `path`, valid until the next call.

        Args:
            path: The drafted tokens after the text.
            n_last: The number of tokens; -1 for all.

        Returns:
            The tokens, int64[m].
        """
        if n_last == 0:
            return self._history[:0]
        n_text = len(self.tokens)
        end = n_text + len(path)
        if end > len(self._history):
            self._history = np.resize(self._history, 2 * end)
        self._history[self._n_shown : n_text] = self.tokens[self._n_shown :]
        self._n_shown = n_text
        self._history[n_text:end] = path
        start = 0 if n_last < 0 else max(0, end - n_last)
        return self._history[start:end]

    def grammar(self, path: Sequence[int] = ()) -> GrammarState | None:
        """Return the state of the grammar after the text and `path`."""
        state = self._grammar
        if state is not None:
            for token in path:
                state = state.after(token)
        return state

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """Return the token after the text and `path`, if the grammar allows only one."""
        grammar = self.grammar(path)
        return grammar.forced() if grammar is not None else None

    def within_grammar(self, draft: Draft, before: Sequence[int] = ()) -> Draft:
        """Return the nodes of a draft that the grammar allows after the text and `before`."""
        try:
            states = {ROOT: self.grammar(before)}
        except ValueError:
            return NO_DRAFT
        for node, token in enumerate(draft.tokens):
            state = states.get(draft.parents[node])
            if state is not None and state.allows(np.array([token]))[0]:
                states[node] = state.after(token)
        return draft.only([node for node in states if node != ROOT])
