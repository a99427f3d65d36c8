"""Grammars that hold in a part of an answer: behind the thoughts of a model, or from the mark of a call on.

The text before is free, and its states only look for marks: they allow all tokens without a mask. Like the states of
any grammar they depend on the text alone, in a draft as in the text. A token that ends a mark and goes on behind it is
allowed if the grammar takes what is behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from specgen.options import Grammar
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, Vocabulary
from specgen.text.grammar.llguidance_grammar import LlguidanceGrammar, literal
from specgen.text.prefix import n_begun

#: The state behind a mark, from the tokens that end with it; None if what is behind it is not allowed.
_Then: TypeAlias = Callable[[tuple[int, ...]], "GrammarState | None"]


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks before and behind a family's thoughts; those before the answer that follows, of which calls lack those
    that end with `final`, and those behind it. A prompt may have opened the thoughts, or closed them."""

    begin: str
    end: str
    before: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    final: str = ""
    state: Literal["may come", "open", "over"] = "may come"

    @property
    def around(self) -> tuple[str, ...]:
        return (*self.before, *self.behind)

    @property
    def first(self) -> tuple[str, ...]:
        """What an answer with such marks begins with."""
        return (self.begin, *self.around)


def grammar_start(
    grammar: Grammar, vocabulary: Vocabulary, thoughts: ThoughtMarks | None = None
) -> GrammarState:
    """Return the state of a grammar before an answer, whose thoughts are free. Raise `UsageError` if the grammar is
    invalid."""
    if grammar.mark:
        rules = f"start: lead answer /(?s:.)+/?\nlead[suffix={literal(grammar.mark)}]: /(?s:.*)/"
        own = LlguidanceGrammar(vocabulary, grammar, rules)
        return _from_marks(own, vocabulary, grammar, thoughts)
    if grammar.form == "gbnf" and thoughts is not None and thoughts.begin in grammar.text:
        thoughts = None  # they are part of it
    rules = "" if thoughts is None else _around(thoughts, is_call=grammar.is_call)
    own = LlguidanceGrammar(vocabulary, grammar, rules)
    if thoughts is None or thoughts.state == "over":
        return own.start

    def thinking(begun: tuple[int, ...]) -> GrammarState:
        then = {thoughts.end.encode(): lambda tokens: own.fed((*begun, *tokens))}
        return _Marks(vocabulary, then, may_end=False).plain

    def beginning(state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        text = b"".join(map(vocabulary.token_bytes, tokens)).decode(errors="replace").lstrip()
        if text.startswith(thoughts.begin):
            return thinking(tokens)
        return _Watched(state, beginning, tokens) if thoughts.begin.startswith(text) else state

    if thoughts.state == "open":
        return thinking(tuple(vocabulary.tokenize_inside(thoughts.begin, parse_special=True)))
    return _Watched(own.start, beginning)


def _around(thoughts: ThoughtMarks, *, is_call: bool) -> str:
    """Return rules, in llguidance's form of Lark, for an answer behind thoughts."""
    final = thoughts.final if is_call else ""
    before = [each for each in thoughts.before if not (final and each.endswith(final))]
    first, lead, after = (
        f"({' | '.join(items)} SPACE?){sign}" if items else ""
        for items, sign in (
            (["thoughts"] if thoughts.state != "over" else [], "?"),
            ([*map(literal, before)], "?"),
            ([*map(literal, thoughts.behind)], "{0,2}"),
        )
    )
    if not first and not thoughts.around:
        return ""
    return "\n".join(
        [
            f"start: SPACE? {first} {lead} answer {after}",
            "SPACE: /[ \\n]{1,4}/",
            f"thoughts: {literal(thoughts.begin)} thought",
            f"thought[suffix={literal(thoughts.end)}]: /(?s:.*)/",
        ]
    )


def _from_marks(
    own: LlguidanceGrammar, vocabulary: Vocabulary, grammar: Grammar, thoughts: ThoughtMarks | None
) -> GrammarState:
    """Return the state of a free text in which the grammar holds from each mark on."""

    def call(tokens: tuple[int, ...]) -> GrammarState | None:
        state = own.fed(tokens)
        return None if state is None else _Watched(state, within)

    def within(state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        if not state.allows(own.ends).any():
            return _Watched(state, within)
        return text.after_token(tokens[-1])

    then: dict[bytes, _Then] = {grammar.mark.encode(): call}
    if thoughts is not None and thoughts.state == "may come":
        then[thoughts.begin.encode()] = lambda _tokens: thinking.plain
    text = _Marks(vocabulary, then, is_first=grammar.is_first)
    if thoughts is None or thoughts.state == "over":
        return text.plain
    thinking = _Marks(vocabulary, {thoughts.end.encode(): lambda _tokens: text.plain})
    return thinking.plain if thoughts.state == "open" else text.plain


class _Marks:
    """Free text up to one of these marks, and what holds from it on. With `is_first`, nothing is looked for any more
    if the text does not begin with a mark. It `may_end` before."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        then: Mapping[bytes, _Then],
        *,
        is_first: bool = False,
        may_end: bool = True,
    ) -> None:
        self._vocabulary, self._then = vocabulary, then
        self._ends = frozenset(vocabulary.end_tokens())
        self._at_end = ENDED if may_end else None
        self.n_tokens = vocabulary.n_tokens
        #: Tokens that may not be allowed: those that may go on behind a mark, and ends.
        self.doubtful = {token for mark in then for token in _crossing(vocabulary, mark)}
        self.doubtful |= self._ends
        #: Where no mark has begun.
        self.plain = _FreeText(self, b"", ())
        self._otherwise = _Marks(vocabulary, {}).plain if is_first else None

    def next(self, begun: bytes, tokens: tuple[int, ...], token: int) -> GrammarState | None:
        """Return the state behind a token, if what is `begun` of a mark is in `tokens`."""
        if token in self._ends:
            return self._at_end
        piece = self._vocabulary.token_bytes(token)
        text = begun + piece
        for mark, then in self._then.items():
            if mark in text:
                return then((*tokens, token))
        n = max((n_begun(text, mark) for mark in self._then), default=0)
        if self._otherwise is not None and n < len(text.strip()):
            return self._otherwise
        if not n:
            return self.plain
        return _FreeText(self, text[-n:], (*tokens, token) if n > len(piece) else (token,))

    def after_token(self, token: int) -> GrammarState:
        """Return the state behind a text that ends with a token, which ends no mark."""
        return self._otherwise or self.next(b"", (), token) or self.plain


class _FreeText:
    """The state of a free text that ends with what is `begun` of a mark, in `tokens`."""

    __slots__ = ("__weakref__", "_begun", "_children", "_forbidden", "_marks", "_tokens")

    def __init__(self, marks: _Marks, begun: bytes, tokens: tuple[int, ...]) -> None:
        self._marks, self._begun, self._tokens = marks, begun, tokens
        self._children: dict[int, GrammarState] = {}
        self._forbidden: TokenArray | None = None

    @property
    def is_free(self) -> bool:
        return not len(self._found_forbidden())

    def _found_forbidden(self) -> TokenArray:
        if self._forbidden is None:
            marks = self._marks
            found = [
                token
                for token in sorted(marks.doubtful)
                if marks.next(self._begun, self._tokens, token) is None
            ]
            self._forbidden = np.array(found, np.int64)
        return self._forbidden

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = np.asarray(token_ids, np.int64)
        n_tokens = self._marks.n_tokens
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < n_tokens:
            raise ValueError(f"a token is not among the vocabulary's {n_tokens}")
        return np.isin(token_ids, self._found_forbidden(), invert=True)

    def after(self, token_id: int) -> GrammarState:
        found = self._children.get(token_id)
        if found is None:
            found = self._marks.next(self._begun, self._tokens, token_id)
            if found is None:
                raise ValueError(f"the grammar does not allow token {token_id} here")
            if found is not self._marks.plain:
                self._children[token_id] = found
        return found

    def forget(self) -> None:
        self._children = {}

    def forced(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class _Watched:
    """A state of a grammar whose next state is what `follow` makes of the grammar's own, and of the tokens since."""

    inner: GrammarState
    follow: Callable[[GrammarState, tuple[int, ...]], GrammarState]
    tokens: tuple[int, ...] = ()
    is_free = False

    def allows(self, token_ids: TokenArray) -> BoolArray:
        return self.inner.allows(token_ids)

    def after(self, token_id: int) -> GrammarState:
        return self.follow(self.inner.after(token_id), (*self.tokens, token_id))

    def forget(self) -> None:
        self.inner.forget()

    def forced(self) -> int | None:
        return self.inner.forced()


_found: weakref.WeakKeyDictionary[Vocabulary, dict[bytes, list[int]]] = weakref.WeakKeyDictionary()


def _crossing(vocabulary: Vocabulary, mark: bytes) -> list[int]:
    """Return the tokens that may end a mark and go on behind it."""
    found = _found.setdefault(vocabulary, {})
    if mark not in found:
        ends = tuple(mark[n:] for n in range(len(mark)))
        pieces = map(vocabulary.token_bytes, range(vocabulary.n_tokens))
        found[mark] = [
            token
            for token, piece in enumerate(pieces)
            if (piece.startswith(ends) and piece not in ends) or (mark in piece and piece != mark)
        ]
    return found[mark]
