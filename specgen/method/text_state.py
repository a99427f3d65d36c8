"""The committed text of a sequence, its grammar state, its characters, and what drafts for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.system.arrays import TokenArray
from specgen.text.grammar.base import GrammarState

#: Tokens to make room for behind the text; there is more if a text outgrows it.
_ROOM = 512


class TextState:
    """The committed tokens of one text, and its grammar state. Penalties see the prompt, the
    grammar does not.
    """

    def __init__(self, prompt: Sequence[int], grammar: GrammarState | None = None) -> None:
        #: All committed tokens, prompt and answer. Read only; `commit` adds to it.
        self.tokens: list[int] = list(prompt)
        self._grammar = grammar
        self.has_grammar = grammar is not None
        #: The tokens that samplers were shown; the first `_n_shown` are those of the text.
        self._history, self._n_shown = np.zeros(len(prompt) + _ROOM, np.int64), 0

    def commit(self, token: int) -> None:
        """Add a token to the text. Raise ValueError if the grammar does not allow it."""
        if (before := self._grammar) is not None:
            self._grammar = before.after(token)
            before.forget()
        self.tokens.append(token)

    def history(self, path: Sequence[int], n_last: int) -> TokenArray:
        """Return the last `n_last` tokens (-1: all) of the text and `path`: int64[m], valid until
        the next call.
        """
        if n_last == 0:
            return self._history[:0]
        n_text, end = len(self.tokens), len(self.tokens) + len(path)
        if end > len(self._history):
            self._history = np.resize(self._history, 2 * end)
        self._history[self._n_shown : n_text] = self.tokens[self._n_shown :]
        self._history[n_text:end] = path
        self._n_shown = n_text
        return self._history[0 if n_last < 0 else max(0, end - n_last) : end]

    def grammar(self, path: Sequence[int] = ()) -> GrammarState | None:
        state = self._grammar
        if state is not None:
            for token in path:
                state = state.after(token)
        return state

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """Return the only token that the grammar allows after the text and `path`, if there is only
        one.
        """
        grammar = self.grammar(path)
        return grammar.forced() if grammar is not None else None

    def within_grammar(self, draft: Draft, before: Sequence[int] = ()) -> Draft:
        """Return the nodes of a draft that the grammar allows after the text and the tokens
        `before`.
        """
        try:
            states = {ROOT: self.grammar(before)}
        except ValueError:
            return NO_DRAFT
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            state = states.get(parent)
            if state is not None and state.allows(np.array([token]))[0]:
                states[node] = state.after(token)
        return draft.only([node for node in states if node != ROOT])
