"""Grammars that hold in a part of an answer: after thoughts, or from the mark of a call on.

The text before is free, and its states only look for marks: they allow all tokens without a mask.
Like the states of any grammar they depend on the text alone, in a draft as in the text. A token
that completes a mark and goes on after it is allowed if the grammar takes what is after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, Logits, TokenArray
from specgen.text.grammar.base import GrammarState
from specgen.text.grammar.llguidance_grammar import LlguidanceGrammar, literal
from specgen.text.grammar.marked_text import AfterMark, MarkedText
from specgen.text.vocabulary import Vocabulary

#: Rules for a call without a mark at the beginning of a text, and what follows it.
_BARE_RULES = "start: bare /(?s:.)+/?"
#: Rules for any text with a mark, and the answer after the first mark.
_MARKED_RULES = "start: lead answer /(?s:.)+/?\nlead[suffix={mark}]: /(?s:.*)/"
#: The white space that may be around thoughts, marks and calls.
_SPACE_RULE = "SPACE: /[ \\n]{1,4}/"
#: Stands in a mark or a form for what differs from call to call: an id, a number, or a name.
ANY: Final = "\ufffc"


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks around the thoughts and the answers of a family of models."""

    #: The mark before thoughts.
    begin: str
    #: The mark after thoughts.
    end: str
    #: Marks before an answer, with `ANY` for the name of a function.
    before: tuple[str, ...] = ()
    #: Marks after an answer.
    after: tuple[str, ...] = ()
    #: Marks before an answer that end with this are not before calls.
    final: str = ""
    #: Whether the prompt has opened thoughts already, or closed them.
    state: Literal["may come", "open", "over"] = "may come"

    @property
    def around(self) -> tuple[str, ...]:
        """The marks before and after an answer."""
        return (*self.before, *self.after)

    @property
    def first(self) -> tuple[str, ...]:
        """What an answer with such marks begins with."""
        return (self.begin, *(mark.partition(ANY)[0] for mark in self.around))


def grammar_start(
    grammar: Grammar,
    vocabulary: Vocabulary,
    thoughts: ThoughtMarks | None = None,
) -> GrammarState:
    """Return the state of a grammar before an answer, whose thoughts are free.

    Raises:
        UsageError: The grammar is not valid, or no text follows it.
    """
    if grammar.mark and not grammar.is_call:
        return _free_text_start(grammar, vocabulary, thoughts)
    return _ConstrainedAnswer(grammar, vocabulary, thoughts).start


@dataclass(frozen=True, slots=True)
class _Watched(GrammarState):
    """A state that is replaced by another one where the text asks for that."""

    #: The state of the grammar.
    inner: GrammarState
    #: From the grammar's next state and the tokens since the watch began to the next state.
    follow: Callable[[GrammarState, tuple[int, ...]], GrammarState]
    #: The tokens so far.
    tokens: tuple[int, ...] = ()

    def allows(self, token_ids: TokenArray) -> BoolArray:
        return self.inner.allows(token_ids)

    def adjust_logits(self, logits: Logits) -> Logits:
        return self.inner.adjust_logits(logits)

    def after(self, token_id: int) -> GrammarState:
        return self.follow(self.inner.after(token_id), (*self.tokens, token_id))

    def forget(self) -> None:
        self.inner.forget()

    def forced(self) -> int | None:
        return self.inner.forced()


# --- an answer that follows a grammar, after its thoughts


class _ConstrainedAnswer:
    """An answer that follows a grammar, after its thoughts.

    After a call only other calls may come: a token that begins neither ends the answer. (A mask
    that allows calls and the end would turn the beginning of a text into a call.)
    """

    def __init__(
        self,
        grammar: Grammar,
        vocabulary: Vocabulary,
        thoughts: ThoughtMarks | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._thoughts = thoughts
        self._grammar = LlguidanceGrammar(vocabulary, grammar, _answer_rules(grammar, thoughts))
        #: The state between calls, if the answer is made of calls.
        self._between_calls: GrammarState | None = None
        if grammar.mark:
            end_of_text = LlguidanceGrammar(vocabulary, Grammar("lark", 'start: ""')).start
            next_call: dict[bytes, AfterMark] = {grammar.mark.encode(): partial(self._answer, ())}
            self._between_calls = MarkedText(vocabulary, next_call, otherwise=end_of_text).plain

    @property
    def start(self) -> GrammarState:
        """The state before the answer."""
        thoughts = self._thoughts
        if thoughts is None or thoughts.state == "over":
            return self._in_answer(self._grammar.start)
        if thoughts.state == "open":
            begun = self._vocabulary.tokenize_inside(thoughts.begin, parse_special=True)
            return self._in_thoughts(tuple(begun), thoughts)
        return _Watched(self._grammar.start, partial(self._before_answer, thoughts))

    def _before_answer(
        self,
        thoughts: ThoughtMarks,
        state: GrammarState,
        tokens: tuple[int, ...],
    ) -> GrammarState:
        """Return the state after the first tokens, in which thoughts may begin."""
        text = b"".join(map(self._vocabulary.token_bytes, tokens)).lstrip()
        begin = thoughts.begin.encode()
        if text.startswith(begin):
            return self._in_thoughts(tokens, thoughts)
        if begin.startswith(text):
            return _Watched(state, partial(self._before_answer, thoughts), tokens)
        return self._in_answer(state)

    def _in_thoughts(self, begun: tuple[int, ...], thoughts: ThoughtMarks) -> GrammarState:
        """Return the state in thoughts that began with some tokens."""
        at_end: dict[bytes, AfterMark] = {thoughts.end.encode(): partial(self._answer, begun)}
        return MarkedText(self._vocabulary, at_end, may_end=False).plain

    def _answer(self, begun: tuple[int, ...], tokens: tuple[int, ...]) -> GrammarState | None:
        """Return the state after a mark, where the answer begins, or another call.

        The grammar does not get the thoughts, but the tokens with which they begin and end.
        """
        state = self._grammar.after_tokens((*begun, *tokens))
        return None if state is None else self._in_answer(state)

    def _in_answer(self, state: GrammarState, _tokens: tuple[int, ...] = ()) -> GrammarState:
        if self._between_calls is None:
            return state
        if state.allows(self._grammar.ends).any():
            return self._between_calls
        return _Watched(state, self._in_answer)


def _answer_rules(grammar: Grammar, thoughts: ThoughtMarks | None) -> str:
    """Return rules, in llguidance's form of Lark, for an answer with thoughts before it."""
    rules = ""
    if thoughts is not None:
        rules = _rules_around(thoughts, is_call=grammar.is_call)
    if grammar.mark:  # another call may be on a line of its own
        whole = rules.removeprefix("start:") or " answer"
        rules = f"start: SPACE? whole\nwhole:{whole}"
    return f"{rules}\n{_SPACE_RULE}" if rules else ""


def _rules_around(thoughts: ThoughtMarks, *, is_call: bool) -> str:
    """Return rules for thoughts, and for the marks around an answer; none if there are none."""
    before = thoughts.before
    if is_call:
        if thoughts.final:
            before = tuple(mark for mark in before if not mark.endswith(thoughts.final))
        before += thoughts.after  # a text before calls may be empty
    lead = _optional_marks(before)
    trail = _optional_marks(thoughts.after)
    if thoughts.state == "over":
        return f"start: {lead} answer {trail}" if lead or trail else ""
    if lead:
        lead = f"SPACE? {lead}"
    lines = [
        f"start: (SPACE? thoughts SPACE?)? {lead} answer {trail}",
        r"NAME: /[^\s<>]{1,128}/",
        f"thoughts: {literal(thoughts.begin)} thought",
        f"thought[suffix={literal(thoughts.end)}]: /(?s:.*)/",
    ]
    return "\n".join(lines)


def _optional_marks(marks: tuple[str, ...]) -> str:
    """Return an expression for up to two of these marks."""
    if not marks:
        return ""
    written = [" NAME ".join(map(literal, mark.split(ANY))) for mark in marks]
    return f"(({' | '.join(written)}) SPACE?){{0,2}}"


# --- a free text with calls


def _free_text_start(
    grammar: Grammar,
    vocabulary: Vocabulary,
    thoughts: ThoughtMarks | None,
) -> GrammarState:
    """Return the state of a free text in which the grammar holds from each mark on.

    If the grammar cannot be followed, the whole text is free.
    """
    rules = _MARKED_RULES.format(mark=literal(grammar.mark))
    try:
        marked = LlguidanceGrammar(vocabulary, grammar, rules)
        bare = None
        if grammar.bare_start:
            bare = LlguidanceGrammar(vocabulary, grammar, _BARE_RULES)
    except UsageError:
        return MarkedText(vocabulary, {}).plain
    return _TextWithCalls(grammar, vocabulary, thoughts, marked, bare).start


class _TextWithCalls:
    """A free text with calls.

    Args:
        grammar: What a call looks like after its mark.
        vocabulary: The tokens.
        thoughts: The marks of thoughts, in which there are no calls.
        marked: The grammar of calls with a mark.
        bare: The grammar of calls without a mark, at the beginning of the text.
    """

    def __init__(
        self,
        grammar: Grammar,
        vocabulary: Vocabulary,
        thoughts: ThoughtMarks | None,
        marked: LlguidanceGrammar,
        bare: LlguidanceGrammar | None,
    ) -> None:
        self._bare_start = grammar.bare_start
        self._vocabulary = vocabulary
        self._marked = marked
        self._bare = bare

        after_marks: dict[bytes, AfterMark] = {grammar.mark.encode(): self._call}
        if thoughts is not None and thoughts.state == "may come":
            after_marks[thoughts.begin.encode()] = lambda _tokens: self._in_thoughts
        without_calls = MarkedText(vocabulary, {}).plain if grammar.is_first else None
        self._text = MarkedText(vocabulary, after_marks, otherwise=without_calls)

        #: The state before the text, and after thoughts.
        self._text_start: GrammarState = self._text.plain
        if bare is not None:
            self._text_start = _Watched(self._text.plain, self._beginning)
        self._in_thoughts: GrammarState | None = None
        if thoughts is not None and thoughts.state != "over":
            end = thoughts.end.encode()
            in_thoughts = MarkedText(vocabulary, {end: lambda _tokens: self._text_start})
            self._in_thoughts = in_thoughts.plain

        #: The state before the answer.
        self.start = self._text_start
        if self._in_thoughts is not None and thoughts is not None and thoughts.state == "open":
            self.start = self._in_thoughts

    def _call(self, tokens: tuple[int, ...]) -> GrammarState | None:
        """Return the state after the mark of a call."""
        state = self._marked.after_tokens(tokens)
        return None if state is None else _Watched(state, self._in_call)

    def _in_call(self, state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        if self._is_over(state):
            return self._text.after_token(tokens[-1])
        return _Watched(state, self._in_call)

    def _beginning(self, state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        """Return the state after the first tokens, which may begin a call without a mark."""
        if self._bare is None:
            return state
        bare_state = self._bare.after_tokens(tokens)
        if bare_state is None:
            return state
        text = b"".join(map(self._vocabulary.token_bytes, tokens)).decode(errors="ignore")
        if re.match(self._bare_start, text):
            return _Watched(bare_state, self._in_bare_call)
        return _Watched(state, self._beginning, tokens)

    def _in_bare_call(self, state: GrammarState, tokens: tuple[int, ...]) -> GrammarState:
        if self._is_over(state):  # another such call may follow
            return _Watched(self._text.after_token(tokens[-1]), self._beginning)
        return _Watched(state, self._in_bare_call)

    def _is_over(self, state: GrammarState) -> bool:
        return bool(state.allows(self._marked.ends).any())
