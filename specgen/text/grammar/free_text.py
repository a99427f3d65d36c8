"""Grammars for a part of an answer: after thoughts, or from the mark of a call on.

The text before that part is free. Its states allow all tokens, without a mask, and only look for
marks. Like those of any grammar, they depend only on the text, whether it is committed or drafted.
A token may complete a mark and go on after it, if the grammar allows what comes after the mark.
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
from specgen.text.grammar.text_up_to_mark import AfterMark, TextUpToMark
from specgen.text.vocabulary import Vocabulary

#: Rules for a call without a mark at the beginning of a text, and what follows it.
_BARE_RULES = "start: bare /(?s:.)+/?"
#: Rules for any text with a mark, and the answer after the first mark.
_MARKED_RULES = "start: lead answer /(?s:.)+/?\nlead[suffix={mark}]: /(?s:.*)/"
#: The white space that may be around thoughts, marks and calls.
_SPACE_RULE = "SPACE: /[ \\n]{1,4}/"
#: A placeholder in marks and forms for what differs from call to call: an id, a number, or a name.
ANY: Final = "\ufffc"


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The marks that a family of models writes around its thoughts and answers."""

    #: The mark before thoughts.
    begin: str
    #: The mark after thoughts.
    end: str
    #: Marks before an answer, with `ANY` for the name of a function.
    before: tuple[str, ...] = ()
    #: Marks after an answer.
    after: tuple[str, ...] = ()
    #: A mark before an answer that ends with this is never before a call.
    final: str = ""
    #: Whether the answer may begin with thoughts, or the prompt opened them, or closed them.
    state: Literal["may come", "open", "over"] = "may come"

    @property
    def around(self) -> tuple[str, ...]:
        """The marks before and after an answer."""
        return (*self.before, *self.after)

    @property
    def first(self) -> tuple[str, ...]:
        """The possible beginnings of an answer that has marks."""
        return (self.begin, *(mark.partition(ANY)[0] for mark in self.around))


def grammar_start(
    grammar: Grammar,
    vocabulary: Vocabulary,
    thoughts: ThoughtMarks | None = None,
) -> GrammarState:
    """Return the state of a grammar at the start of an answer. It does not constrain thoughts.

    Args:
        grammar: The grammar. If it has a mark but does not require a call, the answer is a free
            text in which calls follow the grammar. Otherwise the whole answer follows it.
        vocabulary: The tokens.
        thoughts: The marks of thoughts; None for a model without them.

    Raises:
        UsageError: If the grammar is not valid, or no text follows it.
    """
    if grammar.mark and not grammar.is_call:
        return _free_text_start(grammar, vocabulary, thoughts)
    return _ConstrainedAnswer(grammar, vocabulary, thoughts).start


@dataclass(frozen=True, slots=True)
class _Watched(GrammarState):
    """A grammar's state, with a function that decides after each token how to go on.

    That function can return the grammar's next state, the same watched again, or that of another
    grammar.
    """

    #: The watched state.
    state: GrammarState
    #: Takes the grammar's next state and the tokens since the watch began; returns the state to
    #: use.
    follow: Callable[[GrammarState, tuple[int, ...]], GrammarState]
    #: The tokens since the watch began.
    tokens: tuple[int, ...] = ()

    def allows(self, token_ids: TokenArray) -> BoolArray:
        return self.state.allows(token_ids)

    def adjust_logits(self, logits: Logits) -> Logits:
        return self.state.adjust_logits(logits)

    def after(self, token_id: int) -> GrammarState:
        return self.follow(self.state.after(token_id), (*self.tokens, token_id))

    def forget(self) -> None:
        self.state.forget()

    def forced(self) -> int | None:
        return self.state.forced()


# --- an answer that follows a grammar, after its thoughts


class _ConstrainedAnswer:
    """An answer that follows a grammar, after its thoughts.

    After a call only another call may come. A token that does not begin one ends the answer. (If a
    mask allowed only calls and the end, the beginning of a text would be turned into a call.)
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
        #: The state between calls, if the answer consists of calls.
        self._between_calls: GrammarState | None = None
        if grammar.mark:
            end_of_text = LlguidanceGrammar(vocabulary, Grammar("lark", 'start: ""')).start
            next_call: dict[bytes, AfterMark] = {grammar.mark.encode(): partial(self._answer, ())}
            self._between_calls = TextUpToMark(vocabulary, next_call, otherwise=end_of_text).plain

    @property
    def start(self) -> GrammarState:
        """The state before the answer."""
        thoughts = self._thoughts
        if thoughts is None or thoughts.state == "over":
            return self._in_answer(self._grammar.start)
        if thoughts.state == "open":
            # The prompt ends with this mark.
            begin_tokens = self._vocabulary.tokenize_inside(thoughts.begin, parse_special=True)
            return self._in_thoughts(tuple(begin_tokens), thoughts)
        return _Watched(self._grammar.start, partial(self._before_answer, thoughts))

    def _before_answer(
        self,
        thoughts: ThoughtMarks,
        state: GrammarState,
        tokens: tuple[int, ...],
    ) -> GrammarState:
        """Return the state after the first tokens of an answer, which may begin thoughts.

        Args:
            thoughts: The marks of thoughts.
            state: The state of the grammar after these tokens.
            tokens: All tokens of the answer so far.
        """
        text = b"".join(map(self._vocabulary.token_bytes, tokens)).lstrip()
        begin = thoughts.begin.encode()
        if text.startswith(begin):
            return self._in_thoughts(tokens, thoughts)
        if begin.startswith(text):  # perhaps only a part of the mark
            return _Watched(state, partial(self._before_answer, thoughts), tokens)
        return self._in_answer(state)

    def _in_thoughts(
        self,
        begin_tokens: tuple[int, ...],
        thoughts: ThoughtMarks,
    ) -> GrammarState:
        """Return the state within thoughts, which began with `begin_tokens`."""
        end_mark: dict[bytes, AfterMark] = {
            thoughts.end.encode(): partial(self._answer, begin_tokens)
        }
        return TextUpToMark(self._vocabulary, end_mark, may_end=False).plain

    def _answer(
        self,
        begin_tokens: tuple[int, ...],
        mark_tokens: tuple[int, ...],
    ) -> GrammarState | None:
        """Return the state after a mark, where the answer or another call begins.

        The grammar skips the thoughts: it gets only the tokens of the marks around them.

        Args:
            begin_tokens: The tokens that began the thoughts; none before another call.
            mark_tokens: The tokens that contain the mark.

        Returns:
            The state; None if the grammar does not allow these tokens.
        """
        state = self._grammar.after_tokens((*begin_tokens, *mark_tokens))
        return None if state is None else self._in_answer(state)

    def _in_answer(
        self,
        state: GrammarState,
        _tokens: tuple[int, ...] = (),
    ) -> GrammarState:
        """Return the state within the answer: that of the grammar, or between calls."""
        if self._between_calls is None:
            return state
        if state.allows(self._grammar.ends).any():
            return self._between_calls
        return _Watched(state, self._in_answer)


def _answer_rules(grammar: Grammar, thoughts: ThoughtMarks | None) -> str:
    """Return rules, in llguidance's form of Lark, for an answer with thoughts before it.

    They refer to the grammar as `answer`. If nothing surrounds the answer, the text is empty.
    """
    rules = ""
    if thoughts is not None:
        rules = _rules_around(thoughts, is_call=grammar.is_call)
    if grammar.mark:  # white space may come first, since another call may be on its own line
        whole = rules.removeprefix("start:") or " answer"
        rules = f"start: SPACE? whole\nwhole:{whole}"
    return f"{rules}\n{_SPACE_RULE}" if rules else ""


def _rules_around(thoughts: ThoughtMarks, *, is_call: bool) -> str:
    """Return rules for thoughts and for the marks around an answer; empty if there are none."""
    before = thoughts.before
    if is_call:
        if thoughts.final:
            before = tuple(mark for mark in before if not mark.endswith(thoughts.final))
        before += thoughts.after  # an empty text may come before calls
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
    """Return an expression for up to two of these marks, with `NAME` in place of `ANY`."""
    if not marks:
        return ""
    expressions = [" NAME ".join(map(literal, mark.split(ANY))) for mark in marks]
    return f"(({' | '.join(expressions)}) SPACE?){{0,2}}"


# --- a free text with calls


def _free_text_start(
    grammar: Grammar,
    vocabulary: Vocabulary,
    thoughts: ThoughtMarks | None,
) -> GrammarState:
    """Return the state of a free text in which each mark begins a call that follows the grammar.

    If llguidance cannot follow the grammar, the whole text is free.
    """
    rules = _MARKED_RULES.format(mark=literal(grammar.mark))
    try:
        marked = LlguidanceGrammar(vocabulary, grammar, rules)
        bare = None
        if grammar.bare_start:
            bare = LlguidanceGrammar(vocabulary, grammar, _BARE_RULES)
    except UsageError:
        return TextUpToMark(vocabulary, {}).plain
    return _TextWithCalls(grammar, vocabulary, thoughts, marked, bare).start


class _TextWithCalls:
    """A free text with calls.

    Args:
        grammar: The mark of calls, and how calls without a mark begin.
        vocabulary: The tokens.
        thoughts: The marks of thoughts, in which marks of calls do not count.
        marked: The grammar of a call with its mark, and any text after it.
        bare: The grammar of a call without a mark, at the beginning of the text.
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
        without_calls = TextUpToMark(vocabulary, {}).plain if grammar.is_first else None
        self._text = TextUpToMark(vocabulary, after_marks, otherwise=without_calls)

        #: The state before the text, and after thoughts.
        self._text_start: GrammarState = self._text.plain
        if bare is not None:
            self._text_start = _Watched(self._text.plain, self._beginning)
        self._in_thoughts: GrammarState | None = None
        if thoughts is not None and thoughts.state != "over":
            end = thoughts.end.encode()
            in_thoughts = TextUpToMark(vocabulary, {end: lambda _tokens: self._text_start})
            self._in_thoughts = in_thoughts.plain

        #: The state before the answer.
        self.start = self._text_start
        if self._in_thoughts is not None and thoughts is not None and thoughts.state == "open":
            self.start = self._in_thoughts

    def _call(self, tokens: tuple[int, ...]) -> GrammarState | None:
        """Return the state after the tokens that contain a call's mark; None if not allowed."""
        state = self._marked.after_tokens(tokens)
        return None if state is None else _Watched(state, self._in_call)

    def _in_call(
        self,
        state: GrammarState,
        tokens: tuple[int, ...],
    ) -> GrammarState:
        """Return the state within a call, or that of the free text once the call is over."""
        if self._is_over(state):
            return self._text.after_token(tokens[-1])
        return _Watched(state, self._in_call)

    def _beginning(
        self,
        state: GrammarState,
        tokens: tuple[int, ...],
    ) -> GrammarState:
        """Return the state after the first tokens of the text, which may begin a bare call.

        While the grammar of bare calls allows these tokens, but they do not match `bare_start` yet,
        the text stays free and is still watched.
        """
        if self._bare is None:
            return state
        bare_state = self._bare.after_tokens(tokens)
        if bare_state is None:
            return state
        text = b"".join(map(self._vocabulary.token_bytes, tokens)).decode(errors="ignore")
        if re.match(self._bare_start, text):
            return _Watched(bare_state, self._in_bare_call)
        return _Watched(state, self._beginning, tokens)

    def _in_bare_call(
        self,
        state: GrammarState,
        tokens: tuple[int, ...],
    ) -> GrammarState:
        """Return the state within a call without a mark, or after it."""
        if self._is_over(state):  # another bare call may follow
            return _Watched(self._text.after_token(tokens[-1]), self._beginning)
        return _Watched(state, self._in_bare_call)

    def _is_over(self, state: GrammarState) -> bool:
        """Return whether a call is complete: its grammar allows the end of the text."""
        return bool(state.allows(self._marked.ends).any())
