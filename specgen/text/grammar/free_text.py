"""Grammars that hold in a part of an answer: behind the thoughts of a model, or from the mark of a
call on.

The text before is free, and its states only look for marks: they allow all tokens without a mask.
Like the states of any grammar they depend on the text alone, in a draft as in the text. A token
that ends a mark and goes on behind it is allowed if the grammar takes what is behind.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import numpy as np

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, Logits, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, checked_ids
from specgen.text.grammar.llguidance_grammar import LlguidanceGrammar, literal
from specgen.text.overlap import partial_match_length
from specgen.text.vocabulary import Vocabulary

#: A call at the beginning of a text, and what follows it.
_BARE = "start: bare /(?s:.)+/?"
#: Stands in a mark or a form for what differs from call to call: an id, a number, or a name.
ANY: Final = "\ufffc"
#: The state behind a mark, from the tokens that end with it; None if what is behind it is not
#: allowed.
_Then: TypeAlias = Callable[[tuple[int, ...]], "GrammarState | None"]


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks before and behind a family's thoughts; those before the answer, with `ANY` for a
    function's name, of which calls lack those that end with `final`; and those behind it. A prompt
    may have opened thoughts, or closed.
    """

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
        return (self.begin, *(mark.partition(ANY)[0] for mark in self.around))


def grammar_start(
    grammar: Grammar, vocabulary: Vocabulary, thoughts: ThoughtMarks | None = None
) -> GrammarState:
    """Return the state of a grammar before an answer, whose thoughts are free. Raise `UsageError`."""
    if grammar.mark and not grammar.is_call:
        return _in_free_text(grammar, vocabulary, thoughts)
    return _WholeAnswer(grammar, vocabulary, thoughts).start


class _WholeAnswer:
    """An answer that follows a grammar behind its thoughts. Behind a call only other calls may
    come: a token that begins neither ends the answer, since a mask of calls and the end would make
    one of them of a text.
    """

    def __init__(
        self, grammar: Grammar, vocabulary: Vocabulary, thoughts: ThoughtMarks | None
    ) -> None:
        self._vocabulary, self._thoughts = vocabulary, thoughts
        rules = "" if thoughts is None else _around(thoughts, is_call=grammar.is_call)
        if grammar.mark:  # another call may be on a line of its own
            rules = f"start: SPACE? whole\nwhole:{rules.removeprefix('start:') or ' answer'}"
        if rules:
            rules += "\nSPACE: /[ \\n]{1,4}/"
        self._own = LlguidanceGrammar(vocabulary, grammar, rules)
        self._more: GrammarState | None = None
        if grammar.mark:
            over = LlguidanceGrammar(vocabulary, Grammar("lark", 'start: ""')).start
            then = {grammar.mark.encode(): partial(self._behind, ())}
            self._more = _Marks(vocabulary, then, otherwise=over).plain

    @property
    def start(self) -> GrammarState:
        thoughts = self._thoughts
        if thoughts is None or thoughts.state == "over":
            return self._within(self._own.start)
        if thoughts.state == "open":
            begun = self._vocabulary.tokenize_inside(thoughts.begin, parse_special=True)
            return self._thinking(tuple(begun), thoughts)
        return _Watched(self._own.start, partial(self._beginning, thoughts))

    def _within(self, state: GrammarState, _tokens: tuple[int, ...] = ()) -> GrammarState:
        if self._more is None:
            return state
        return self._more if state.allows(self._own.ends).any() else _Watched(state, self._within)

    def _behind(self, begun: tuple[int, ...], tokens: tuple[int, ...]) -> GrammarState | None:
        state = self._own.fed((*begun, *tokens))
        return None if state is None else self._within(state)

    def _thinking(self, begun: tuple[int, ...], thoughts: ThoughtMarks) -> GrammarState:
        then = {thoughts.end.encode(): partial(self._behind, begun)}
        return _Marks(self._vocabulary, then, may_end=False).plain

    def _beginning(
        self, thoughts: ThoughtMarks, state: GrammarState, tokens: tuple[int, ...]
    ) -> GrammarState:
        data = b"".join(map(self._vocabulary.token_bytes, tokens)).lstrip()
        begin = thoughts.begin.encode()
        if data.startswith(begin):
            return self._thinking(tokens, thoughts)
        if begin.startswith(data):
            return _Watched(state, partial(self._beginning, thoughts), tokens)
        return self._within(state)


def _around(thoughts: ThoughtMarks, *, is_call: bool) -> str:
    """Return rules, in llguidance's form of Lark, for an answer behind thoughts."""
    final = thoughts.final if is_call else ""
    before = [each for each in thoughts.before if not (final and each.endswith(final))]
    before += thoughts.behind if is_call else ()  # a text before calls may be empty
    lead, after = (
        f"(({' | '.join(' NAME '.join(map(literal, mark.split(ANY))) for mark in marks)}) SPACE?){{0,2}}"
        if marks
        else ""
        for marks in (before, thoughts.behind)
    )
    if thoughts.state == "over":
        return f"start: {lead} answer {after}" if lead or after else ""
    return "\n".join(
        [
            f"start: (SPACE? thoughts SPACE?)? {'SPACE?' if lead else ''} {lead} answer {after}",
            r"NAME: /[^\s<>]{1,128}/",
            f"thoughts: {literal(thoughts.begin)} thought",
            f"thought[suffix={literal(thoughts.end)}]: /(?s:.*)/",
        ]
    )


def _in_free_text(
    grammar: Grammar, vocabulary: Vocabulary, thoughts: ThoughtMarks | None
) -> GrammarState:
    """Return the state of a free text in which the grammar holds from each mark on, if it can be
    followed.
    """
    rules = f"start: lead answer /(?s:.)+/?\nlead[suffix={literal(grammar.mark)}]: /(?s:.*)/"
    try:
        own = LlguidanceGrammar(vocabulary, grammar, rules)
        bare = LlguidanceGrammar(vocabulary, grammar, _BARE) if grammar.head else None
    except UsageError:
        return _Marks(vocabulary, {}).plain

    def call(tokens: tuple[int, ...]) -> GrammarState | None:
        state = own.fed(tokens)
        return None if state is None else _Watched(state, within)

    def within(state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        is_over = state.allows(own.ends).any()
        return text.after_token(tokens[-1]) if is_over else _Watched(state, within)

    def beginning(state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        begun = None if bare is None else bare.fed(tokens)
        if begun is None:
            return state
        data = b"".join(map(vocabulary.token_bytes, tokens)).decode(errors="ignore")
        if re.match(grammar.head, data):
            return _Watched(begun, within_bare)
        return _Watched(state, beginning, tokens)

    def within_bare(state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        """Another such call may follow."""
        is_over = state.allows(own.ends).any()
        follow = beginning if is_over else within_bare
        return _Watched(text.after_token(tokens[-1]) if is_over else state, follow)

    then: dict[bytes, _Then] = {grammar.mark.encode(): call}
    if thoughts is not None and thoughts.state == "may come":
        then[thoughts.begin.encode()] = lambda _tokens: thinking.plain
    otherwise = _Marks(vocabulary, {}).plain if grammar.is_first else None
    text = _Marks(vocabulary, then, otherwise=otherwise)
    start = text.plain if bare is None else _Watched(text.plain, beginning)
    if thoughts is None or thoughts.state == "over":
        return start
    thinking = _Marks(vocabulary, {thoughts.end.encode(): lambda _tokens: start})
    return thinking.plain if thoughts.state == "open" else start


class _Marks:
    """Free text up to a mark, and what holds from it on; `otherwise` holds where the text begins
    with none.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        then: Mapping[bytes, _Then],
        *,
        otherwise: GrammarState | None = None,
        may_end: bool = True,
    ) -> None:
        self._vocabulary, self._then = vocabulary, then
        self._ends = frozenset(vocabulary.end_tokens())
        self._at_end = ENDED if may_end else None
        self.n_tokens = vocabulary.n_tokens
        #: Tokens that may not be allowed: those that may end a mark, and ends.
        self.doubtful = {token for mark in then for token in _ending(vocabulary, mark)}
        self.doubtful |= self._ends
        #: Where no mark has begun.
        self.plain = _FreeText(self, b"", ())
        self._otherwise = otherwise

    def next(self, begun: bytes, tokens: tuple[int, ...], token: int) -> GrammarState | None:
        """Return the state behind a token, if what is `begun` of a mark is in `tokens`."""
        if token in self._ends:
            return self._at_end
        piece = self._vocabulary.token_bytes(token)
        text = begun + piece
        for mark, then in self._then.items():
            if mark in text:
                is_late = self._otherwise is not None and text.partition(mark)[0].strip()
                return self._otherwise if is_late else then((*tokens, token))
        n = max((partial_match_length(text, mark) for mark in self._then), default=0)
        if self._otherwise is not None and n < len(text.strip()):
            return self._otherwise
        if not n:
            return self.plain
        return _FreeText(self, text[-n:], (*tokens, token) if n > len(piece) else (token,))

    def after_token(self, token: int) -> GrammarState:
        """Return the state behind a text that ends with a token, which ends no mark."""
        return self._otherwise or self.next(b"", (), token) or self.plain


class _FreeText(GrammarState):
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
        token_ids = checked_ids(token_ids, self._marks.n_tokens)
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


@dataclass(frozen=True, slots=True)
class _Watched(GrammarState):
    """A state of a grammar whose next state is what `follow` makes of the grammar's own, and of the
    tokens since.
    """

    inner: GrammarState
    follow: Callable[[GrammarState, tuple[int, ...]], GrammarState]
    tokens: tuple[int, ...] = ()

    def allows(self, token_ids: TokenArray) -> BoolArray:
        return self.inner.allows(token_ids)

    def ending(self, logits: Logits) -> Logits:
        return self.inner.ending(logits)

    def after(self, token_id: int) -> GrammarState:
        return self.follow(self.inner.after(token_id), (*self.tokens, token_id))

    def forget(self) -> None:
        self.inner.forget()

    def forced(self) -> int | None:
        return self.inner.forced()


_found: weakref.WeakKeyDictionary[Vocabulary, dict[bytes, list[int]]] = weakref.WeakKeyDictionary()


def _ending(vocabulary: Vocabulary, mark: bytes) -> list[int]:
    found = _found.setdefault(vocabulary, {})
    if mark not in found:
        ends = tuple(mark[n:] for n in range(len(mark)))
        pieces = map(vocabulary.token_bytes, range(vocabulary.n_tokens))
        found[mark] = [
            token for token, piece in enumerate(pieces) if piece.startswith(ends) or mark in piece
        ]
    return found[mark]
