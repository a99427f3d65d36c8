"""Free text in which marks are looked for, such as those of a call or of thoughts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, checked_ids
from specgen.text.overlap import partial_match_length
from specgen.text.vocabulary import Vocabulary

#: From the tokens that end with a mark to the state after them; None if what comes after the mark
#: in the last of these tokens is not allowed.
AfterMark: TypeAlias = Callable[[tuple[int, ...]], "GrammarState | None"]


class MarkedText:
    """Free text up to a mark, and what follows each mark.

    Args:
        vocabulary: The tokens.
        after_marks: The marks, and the state after each.
        otherwise: The state after a text that begins with none of the marks; None if a mark may
            also come later.
        may_end: Whether the text may end before a mark.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        after_marks: Mapping[bytes, AfterMark],
        *,
        otherwise: GrammarState | None = None,
        may_end: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._after_marks = after_marks
        self._otherwise = otherwise
        self._ends = frozenset(vocabulary.end_tokens())
        self._at_end = ENDED if may_end else None
        self.n_tokens = vocabulary.n_tokens
        #: Tokens that may be forbidden: those that may complete a mark, and end-of-text tokens.
        self.doubtful = set(self._ends)
        for mark in after_marks:
            self.doubtful.update(_completing_tokens(vocabulary, mark))
        #: The state in which no mark has begun.
        self.plain = _MarkedTextState(self, b"", ())

    def next(
        self,
        begun: bytes,
        tokens: tuple[int, ...],
        token: int,
    ) -> GrammarState | None:
        """Return the state after a token; None if the token is not allowed.

        Args:
            begun: The beginning of a mark with which the text ends so far.
            tokens: The tokens that it is in.
            token: The next token.
        """
        if token in self._ends:
            return self._at_end
        piece = self._vocabulary.token_bytes(token)
        text = begun + piece
        for mark, after_mark in self._after_marks.items():
            if mark not in text:
                continue
            is_late = text.partition(mark)[0].strip() != b""
            if self._otherwise is not None and is_late:
                return self._otherwise
            return after_mark((*tokens, token))
        n_begun = max((partial_match_length(text, mark) for mark in self._after_marks), default=0)
        if self._otherwise is not None and n_begun < len(text.strip()):
            return self._otherwise
        if n_begun == 0:
            return self.plain
        in_tokens = (*tokens, token) if n_begun > len(piece) else (token,)
        return _MarkedTextState(self, text[-n_begun:], in_tokens)

    def after_token(self, token: int) -> GrammarState:
        """Return the state after a token that completes no mark."""
        return self._otherwise or self.next(b"", (), token) or self.plain


class _MarkedTextState(GrammarState):
    """The state of a free text that ends with the beginning of a mark, or with none."""

    __slots__ = ("__weakref__", "_begun", "_children", "_forbidden", "_text", "_tokens")

    def __init__(
        self,
        text: MarkedText,
        begun: bytes,
        tokens: tuple[int, ...],
    ) -> None:
        self._text = text
        self._begun = begun
        self._tokens = tokens
        self._children: dict[int, GrammarState] = {}
        #: int64[n]: the tokens that may not come next, once they are known.
        self._forbidden: TokenArray | None = None

    @property
    def is_free(self) -> bool:
        return not len(self._forbidden_tokens())

    def _forbidden_tokens(self) -> TokenArray:
        if self._forbidden is None:
            forbidden = [
                token
                for token in sorted(self._text.doubtful)
                if self._text.next(self._begun, self._tokens, token) is None
            ]
            self._forbidden = np.array(forbidden, np.int64)
        return self._forbidden

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = checked_ids(token_ids, self._text.n_tokens)
        return np.isin(token_ids, self._forbidden_tokens(), invert=True)

    def after(self, token_id: int) -> GrammarState:
        found = self._children.get(token_id)
        if found is None:
            found = self._text.next(self._begun, self._tokens, token_id)
            if found is None:
                raise ValueError(f"the grammar does not allow token {token_id} here")
            if found is not self._text.plain:
                self._children[token_id] = found
        return found

    def forget(self) -> None:
        self._children = {}


_found: weakref.WeakKeyDictionary[Vocabulary, dict[bytes, list[int]]] = weakref.WeakKeyDictionary()


def _completing_tokens(vocabulary: Vocabulary, mark: bytes) -> list[int]:
    """Return the tokens that contain a mark, or begin with an end of it."""
    by_mark = _found.setdefault(vocabulary, {})
    if mark not in by_mark:
        ends = tuple(mark[n:] for n in range(len(mark)))
        pieces = map(vocabulary.token_bytes, range(vocabulary.n_tokens))
        by_mark[mark] = [
            token for token, piece in enumerate(pieces) if piece.startswith(ends) or mark in piece
        ]
    return by_mark[mark]
