"""Grammars that llguidance follows: JSON schemas, GBNF, and its own form of Lark.

llguidance (https://github.com/guidance-ai/llguidance) finds all allowed tokens in tens of
microseconds, and copies a state in a few. Where a text is forced, it allows only the tokens that
the model's own tokenizer makes of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specgen.errors import BackendError, SpecgenError, UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, Logits, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, checked_ids
from specgen.text.grammar.gbnf import GbnfReader
from specgen.text.grammar.llguidance_tokenizer import DIGITS, tokenizer_of
from specgen.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: How JSON is written: a space after commas and colons, and no other white space, which models
#: write without end. Strings may escape any character, as in "K\u00f6ln". What llguidance cannot
#: enforce, it reports as a warning.
JSON_FORM: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
    "lenient": True,
}
_BITS_PER_WORD = 32
#: In GBNF a text may be written in any tokens, also where it is forced.
_GBNF_OPTIONS = '%llguidance {"no_forcing": true}\n'
#: The most items that llguidance's parser keeps for a step of a GBNF grammar: about 25 ms.
_MAX_ITEMS = 500_000
#: The most digits in a row of a number, where it may end: models may write digits without end.
#: Each integer of 18 digits fits into 64 bits, and each number of 64 bits can be written with 17.
_MAX_DIGITS = 18
#: What may follow a number in JSON.
_AFTER_NUMBERS = list(b",]}")
#: How many compiled grammars are kept for a vocabulary.
_MAX_COMPILED = 16
#: From this many tokens on, all tokens of a GBNF grammar are checked at once.
_CHECKED_AT_ONCE = 512
#: A pattern is tried with a part of the work that llguidance may do for a token, since a token may
#: have many bytes.
_TRIAL_FUEL = 50_000
_TRIAL_BYTES = 24
_TRIAL_STRIDE = 31
_CANNOT_FOLLOW = "the grammar cannot be followed: "
_CANNOT_GO_ON = "the grammar cannot be followed any further: "


class LlguidanceGrammar:
    """A grammar over the tokens of a vocabulary.

    Args:
        vocabulary: The tokens.
        grammar: The grammar.
        rules: In llguidance's form of Lark, rules for the whole text, which refer to the grammar as
            `answer`. Without them the text is what the grammar describes.

    Raises:
        UsageError: The grammar is not valid, or no text follows it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: Grammar,
        rules: str = "",
    ) -> None:
        #: int64[n]: the end-of-text tokens.
        self.ends: TokenArray = np.array(vocabulary.end_tokens(), np.int64)
        if not len(self.ends):
            raise UsageError(
                "the model has no end-of-text token, so it cannot follow a grammar or a schema"
            )
        self.n_tokens = vocabulary.n_tokens
        #: In GBNF each character is a terminal, which makes a mask of all tokens expensive (4 ms in
        #: a JSON string). So a few tokens are checked one by one.
        self.is_gbnf = grammar.form == "gbnf"
        source = _whole_grammar(grammar, rules, vocabulary)
        with _translated_panics(UsageError, _CANNOT_FOLLOW):
            self.tokenizer = tokenizer_of(vocabulary)
        compiled = self.tokenizer.compiled
        found = compiled.get(source)
        if found is None:
            found = self._compile(source)
            compiled[source] = found
            for oldest in list(compiled)[:-_MAX_COMPILED]:
                compiled.pop(oldest, None)
        self._matcher, self._first_allowed = found

    def _compile(self, source: Grammar) -> tuple[LLMatcher, BoolArray]:
        """Return the matcher at the start of a text, and which tokens it allows there."""
        from llguidance import LLMatcher, LLParserLimits

        max_items = _MAX_ITEMS if self.is_gbnf else None
        limits = LLParserLimits(step_max_items=max_items, max_items_in_row=max_items)
        with _translated_panics(UsageError, _CANNOT_FOLLOW):
            own = self.tokenizer.own
            matcher = LLMatcher(own, _compiled_text(source), log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(_CANNOT_FOLLOW + _first_line(matcher.get_error()))
        # The first mask is computed here, where only the sender waits, not in a round that other
        # requests share.
        try:
            first_allowed = _State(self, matcher).mask()
        except BackendError as error:
            raise UsageError(error.message) from error
        if not first_allowed.any():
            raise UsageError("no text follows the grammar")
        return matcher, first_allowed

    @property
    def start(self) -> GrammarState:
        """The state at the start of a text: a new one each time, as it keeps all that follow it."""
        return _State(self, self._matcher.deep_copy(), allowed=self._first_allowed)

    def after_tokens(self, tokens: Sequence[int]) -> GrammarState | None:
        """Return the state after the first tokens of a text; None if these are not allowed."""
        matcher = self._matcher.deep_copy()
        with _translated_panics(BackendError, _CANNOT_GO_ON):
            n_taken = matcher.try_consume_tokens(list(tokens))
        return _State(self, matcher) if n_taken == len(tokens) else None


def _whole_grammar(
    grammar: Grammar,
    rules: str,
    vocabulary: Vocabulary,
) -> Grammar:
    """Return a grammar with the rules around it."""
    if grammar.form == "gbnf":
        lark = GbnfReader(grammar.text, vocabulary).read()
        if rules:
            lark = _with_rules(lark, rules)
        return Grammar("lark", _GBNF_OPTIONS + lark)
    if rules:
        own = in_lark(grammar) if grammar.form == "json_schema" else grammar.text
        return Grammar("lark", _with_rules(own, rules))
    return grammar


def _with_rules(lark: str, rules: str) -> str:
    return f"{rules}\nanswer:{lark.removeprefix('start:')}"


class _State(GrammarState):
    """The state of a grammar after a text.

    Its matcher never advances: the states that follow have copies.
    """

    __slots__ = (
        "__weakref__",
        "_allowed",
        "_children",
        "_forced",
        "_grammar",
        "_is_forced_known",
        "_matcher",
        "_n_digits",
        "_number_ends",
    )

    def __init__(
        self,
        grammar: LlguidanceGrammar,
        matcher: LLMatcher,
        *,
        allowed: BoolArray | None = None,
        n_digits: int = 0,
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        #: bool[n_tokens]: which tokens may come next, once that is known.
        self._allowed = allowed
        #: How many digits the text ends with; 0 in GBNF, where numbers may be of any length.
        self._n_digits = n_digits
        #: int64[n]: the allowed tokens that end a number here, if a number may end.
        self._number_ends: TokenArray | None = None
        self._children: dict[int, GrammarState] = {}
        self._forced: int | None = None
        self._is_forced_known = False

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = checked_ids(token_ids, self._grammar.n_tokens)
        if self._checks_one_by_one() and len(token_ids) < _CHECKED_AT_ONCE:
            return self._checked(token_ids)
        found: BoolArray = self.mask()[token_ids]
        return found

    def _checks_one_by_one(self) -> bool:
        return self._grammar.is_gbnf and self._allowed is None

    def _checked(self, token_ids: TokenArray) -> BoolArray:
        matcher = self._matcher.deep_copy()
        ends = set(self._grammar.ends.tolist())
        with _translated_panics(BackendError, _CANNOT_GO_ON):
            may_end = matcher.is_accepting()
            found = [
                may_end if token in ends else matcher.validate_tokens([token]) == 1
                for token in token_ids.tolist()
            ]
        return np.array(found, np.bool_)

    def adjust_logits(self, logits: Logits) -> Logits:
        """Return the row, in which a number ends where the model wants anything but a digit.

        The best token that ends the number gets the score of the best forbidden token that does not
        begin with a digit. With the mask alone, "99.50" before a comma that is not allowed went on
        as "99.500000000000004000e-01".
        """
        if not self._n_digits:
            return logits
        is_allowed = self.mask()
        if self._number_ends is None:
            return logits
        is_other = ~is_allowed & (self._grammar.tokenizer.n_leading_digits == 0)
        end = self._number_ends[logits[self._number_ends].argmax()]
        logits = logits.copy()
        wish = logits.max(where=is_other[: len(logits)], initial=-np.inf)
        logits[end] = max(logits[end], wish)
        return logits

    def after(self, token_id: int) -> GrammarState:
        if not self.allows(np.array([token_id]))[0]:
            raise ValueError(f"the grammar does not allow token {token_id} here")
        if token_id in self._grammar.ends:
            return ENDED
        if token_id not in self._children:
            matcher = self._matcher.deep_copy()
            with _translated_panics(BackendError, _CANNOT_GO_ON):
                is_taken = matcher.consume_token(token_id)
            if not is_taken:
                raise _failure(matcher)
            n_digits = self._n_digits_after(token_id)
            self._children[token_id] = _State(self._grammar, matcher, n_digits=n_digits)
        return self._children[token_id]

    def _n_digits_after(self, token_id: int) -> int:
        if self._grammar.is_gbnf:
            return 0
        piece = self._grammar.tokenizer.pieces[token_id]
        n_digits = len(piece) - len(piece.rstrip(DIGITS))
        if n_digits == len(piece):
            n_digits += self._n_digits
        return n_digits

    def forget(self) -> None:
        self._children = {}

    def forced(self) -> int | None:
        if not self._is_forced_known:
            self._forced = self._find_forced()
            self._is_forced_known = True
        return self._forced

    def _find_forced(self) -> int | None:
        if self._checks_one_by_one():
            # If two characters may come next, no token is forced, and no mask is needed.
            letters = self._grammar.tokenizer.letters
            if np.count_nonzero(self._checked(letters)) > 1:
                return None
        allowed = self.mask()
        n_allowed = int(np.count_nonzero(allowed))
        if n_allowed == 1:
            return int(allowed.argmax())
        ends = self._grammar.ends
        allowed_ends = ends[allowed[ends]]
        if n_allowed and n_allowed == len(allowed_ends):
            return int(allowed_ends[0])
        return None

    def mask(self) -> BoolArray:
        """Return which tokens of the vocabulary may come next: bool[n_tokens]."""
        if self._allowed is None:
            self._allowed = self._compute_mask()
            if self._n_digits:
                self._limit_number(self._allowed)
        return self._allowed

    def _compute_mask(self) -> BoolArray:
        n_tokens = self._grammar.n_tokens
        n_words = -(-n_tokens // _BITS_PER_WORD)
        words = np.zeros(n_words, np.uint32)
        # Two threads must not use one matcher at the same time, but each may use a copy.
        matcher = self._matcher.deep_copy()
        with _translated_panics(BackendError, _CANNOT_GO_ON):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise _failure(matcher)
        bits = np.unpackbits(words.view(np.uint8), count=n_tokens, bitorder="little")
        allowed = bits.view(np.bool_)
        if not matcher.is_accepting():  # where no token is left, llguidance allows the end
            allowed[self._grammar.ends] = False
        return allowed

    def _limit_number(self, allowed: BoolArray) -> None:
        """Find the tokens that end a number, and forbid those that make it too long.

        Where a quote is allowed the digits are in a string, not in a number.
        """
        tokenizer = self._grammar.tokenizer
        token_ids = np.flatnonzero(allowed)
        first_bytes = tokenizer.first_bytes[token_ids]
        is_end = np.isin(first_bytes, _AFTER_NUMBERS) | np.isin(token_ids, self._grammar.ends)
        if is_end.any() and ord('"') not in first_bytes:
            self._number_ends = token_ids[is_end]
            n_left = max(0, _MAX_DIGITS - self._n_digits)
            allowed[tokenizer.n_leading_digits > n_left] = False


# --- grammars that llguidance refuses, or cannot follow


def validate(grammar: Grammar) -> tuple[bool, list[str]]:
    """Ask llguidance about a grammar.

    Returns:
        Whether llguidance refuses it, and why; if not, warnings that name what it ignores.
    """
    from llguidance import LLMatcher

    try:
        with _translated_panics(UsageError):
            return LLMatcher.validate_grammar_with_warnings(_compiled_text(grammar))
    except (ValueError, UsageError) as error:
        return True, [str(error)]


@functools.lru_cache(maxsize=1000)
def problem_following(grammar: Grammar) -> str:
    """Follow a grammar for some bytes, and return why llguidance cannot.

    Patterns can grow too large while they are followed.

    Returns:
        llguidance's message; empty if there is no problem.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    is_refused, messages = validate(grammar)
    if is_refused:
        return "; ".join(messages)
    limits = LLParserLimits(step_lexer_fuel=_TRIAL_FUEL)
    matcher = LLMatcher(LLTokenizer("byte"), _compiled_text(grammar), log_level=0, limits=limits)
    for step in range(_TRIAL_BYTES):
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(allowed[_TRIAL_STRIDE * step % len(allowed)]))
    return _first_line(matcher.get_error())


@contextlib.contextmanager
def _translated_panics(kind: type[SpecgenError], message: str = "") -> Iterator[None]:
    """Translate a bug in llguidance, which it reports by an exception that has no public name."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(message + _first_line(str(error))) from error


def _failure(matcher: LLMatcher) -> BackendError:
    return BackendError(_CANNOT_GO_ON + _first_line(matcher.get_error()))


def _first_line(text: str) -> str:
    return text.strip().split("\n", maxsplit=1)[0]


# --- llguidance's form of Lark


def literal(text: str) -> str:
    """Return a text as a literal of Lark, which has JSON's form."""
    return json.dumps(text, ensure_ascii=False)


def in_lark(schema: Grammar) -> str:
    """Return a JSON schema as the right-hand side of a rule of Lark."""
    return f"%json {json.dumps({**json.loads(schema.text), 'x-guidance': JSON_FORM})}"


def _compiled_text(grammar: Grammar) -> str:
    """Return a grammar in the form that llguidance's matchers take."""
    from llguidance import LLMatcher

    if grammar.form == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_FORM)
    return LLMatcher.grammar_from_lark(grammar.text)
