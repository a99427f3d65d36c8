"""Free text up to a mark, such as the one that begins a call or thoughts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, checked_ids
from specgen.text.overlap import partial_match_length
from specgen.text.vocabulary import Vocabulary

#: Takes the tokens that contain a mark and returns the state after them. The last token may go on
#: after the mark: the result is None if that is not allowed.
AfterMark: TypeAlias = Callable[[tuple[int, ...]], "GrammarState | None"]


class TextUpToMark:
    """Free text up to a mark, and what follows each mark.

    Args:
        vocabulary: The tokens.
        after_marks: The marks, with a function for the state after each of them.
        otherwise: If given, a mark counts only at the beginning of the text (after white space),
            and this is the state once the text has begun differently.
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
        #: The state after an end token; None if it is not allowed.
        self._at_end = ENDED if may_end else None
        self.n_tokens = vocabulary.n_tokens
        #: The only tokens that may be forbidden: those that may complete a mark, and end tokens.
        self.doubtful = set(self._ends)
        for mark in after_marks:
            self.doubtful.update(_completing_tokens(vocabulary, mark))
        #: The state in which the text does not end with the beginning of a mark.
        self.plain = _MarkedTextState(self, b"", ())

    def next(
        self,
        partial_mark: bytes,
        partial_tokens: tuple[int, ...],
        token: int,
    ) -> GrammarState | None:
        """Return the state after a token; None if the token is not allowed.

        Args:
            partial_mark: The beginning of a mark that the text ends with; empty if there is none.
            partial_tokens: The tokens that contain `partial_mark`.
            token: The next token.
        """
        if token in self._ends:
            return self._at_end
        piece = self._vocabulary.token_bytes(token)
        text = partial_mark + piece
        # The token completes a mark.
        for mark, after_mark in self._after_marks.items():
            if mark not in text:
                continue
            has_text_before = text.partition(mark)[0].strip() != b""
            if self._otherwise is not None and has_text_before:
                return self._otherwise
            return after_mark((*partial_tokens, token))
        # The text goes on without a mark, but may end with the beginning of one.
        n_partial = max((partial_match_length(text, mark) for mark in self._after_marks), default=0)
        if self._otherwise is not None and n_partial < len(text.strip()):
            return self._otherwise
        if n_partial == 0:
            return self.plain
        begins_earlier = n_partial > len(piece)
        tokens = (*partial_tokens, token) if begins_earlier else (token,)
        return _MarkedTextState(self, text[-n_partial:], tokens)

    def after_token(self, token: int) -> GrammarState:
        """Return the state after other content, such as a call, that ended with `token`.

        The token may end with the beginning of a mark.
        """
        return self._otherwise or self.next(b"", (), token) or self.plain


class _MarkedTextState(GrammarState):
    """The state of a free text that may end with the beginning of a mark."""

    __slots__ = (
        "__weakref__",
        "_children",
        "_forbidden",
        "_partial_mark",
        "_partial_tokens",
        "_text",
    )

    def __init__(
        self,
        text: TextUpToMark,
        partial_mark: bytes,
        partial_tokens: tuple[int, ...],
    ) -> None:
        self._text = text
        #: The beginning of a mark that the text ends with, and the tokens that contain it.
        self._partial_mark = partial_mark
        self._partial_tokens = partial_tokens
        #: The states after tokens that were asked for, by token.
        self._children: dict[int, GrammarState] = {}
        #: int64[n]: the tokens that may not come next; None until they are computed.
        self._forbidden: TokenArray | None = None

    @property
    def is_free(self) -> bool:
        return not len(self._forbidden_tokens())

    def _forbidden_tokens(self) -> TokenArray:
        if self._forbidden is None:
            forbidden = [
                token
                for token in sorted(self._text.doubtful)
                if self._text.next(self._partial_mark, self._partial_tokens, token) is None
            ]
            self._forbidden = np.array(forbidden, np.int64)
        return self._forbidden

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = checked_ids(token_ids, self._text.n_tokens)
        return np.isin(token_ids, self._forbidden_tokens(), invert=True)

    def after(self, token_id: int) -> GrammarState:
        state = self._children.get(token_id)
        if state is None:
            state = self._text.next(self._partial_mark, self._partial_tokens, token_id)
            if state is None:
                raise ValueError(f"the grammar does not allow token {token_id} here")
            if state is not self._text.plain:  # which needs no cache
                self._children[token_id] = state
        return state

    def forget(self) -> None:
        self._children = {}


#: For each vocabulary and mark, the result of `_completing_tokens`, which takes a pass over all
#: tokens.
_completing: weakref.WeakKeyDictionary[Vocabulary, dict[bytes, list[int]]] = (
    weakref.WeakKeyDictionary()
)


def _completing_tokens(vocabulary: Vocabulary, mark: bytes) -> list[int]:
    """Return the tokens that contain a mark, or may complete it: they start with its last bytes."""
    by_mark = _completing.setdefault(vocabulary, {})
    if mark not in by_mark:
        suffixes = tuple(mark[n:] for n in range(len(mark)))
        pieces = map(vocabulary.token_bytes, range(vocabulary.n_tokens))
        by_mark[mark] = [
            token
            for token, piece in enumerate(pieces)
            if piece.startswith(suffixes) or mark in piece
        ]
    return by_mark[mark]
