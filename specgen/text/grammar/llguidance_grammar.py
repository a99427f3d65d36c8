"""Grammars for llguidance: JSON schemas, GBNF, and its variant of Lark.

llguidance (https://github.com/guidance-ai/llguidance) finds all allowed tokens in tens of
microseconds, and copies a state in a few. Where a text is forced, it allows only the tokens that
the model's tokenizer makes of that text.
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

#: The format of JSON: a space after commas and colons, and no other white space, which models tend
#: to repeat endlessly. Strings may escape any character, as in "K\u00f6ln". With `lenient`,
#: llguidance reports what it cannot enforce as a warning.
JSON_FORM: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
    "lenient": True,
}
_BITS_PER_WORD = 32
#: In GBNF a text may consist of any tokens, even where it is forced.
_GBNF_OPTIONS = '%llguidance {"no_forcing": true}\n'
#: The maximum number of items that llguidance's parser keeps in a step of a GBNF grammar, which
#: limits a step to about 25 ms.
_MAX_ITEMS = 500_000
#: The maximum number of digits in a row in a number that may end there, since models may repeat
#: digits endlessly. Every integer with 18 digits fits into 64 bits, and 17 digits are enough for
#: every float64.
_MAX_DIGITS = 18
#: What may follow a number in JSON.
_AFTER_NUMBERS = list(b",]}")
#: The maximum number of compiled grammars that are kept for a vocabulary.
_MAX_COMPILED = 16
#: For this many tokens or more, the mask of a GBNF grammar is computed. Fewer are checked one by
#: one.
_MIN_FOR_MASK = 512
#: The limit on llguidance's work per byte in a trial. It is only a part of its limit per token,
#: since a token may have many bytes.
_TRIAL_FUEL = 50_000
#: The number of bytes in a trial.
_TRIAL_BYTES = 24
#: A step that varies the bytes of a trial: it takes the allowed bytes at multiples of this index.
_TRIAL_STRIDE = 31
_CANNOT_FOLLOW = "the grammar cannot be followed: "
_CANNOT_GO_ON = "the grammar cannot be followed any further: "


class LlguidanceGrammar:
    """A grammar over the tokens of a vocabulary.

    Args:
        vocabulary: The tokens.
        grammar: The grammar.
        rules: Rules for the whole text, in llguidance's variant of Lark, that refer to the grammar
            as `answer`. If empty, the whole text has to follow the grammar.

    Raises:
        UsageError: If the grammar is not valid, or no text follows it.
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
        #: In GBNF each character is a terminal, which makes a mask of all tokens expensive (4 ms
        #: within a JSON string). So a few tokens are checked one by one instead.
        self.is_gbnf = grammar.form == "gbnf"
        source = _whole_grammar(grammar, rules, vocabulary)
        with _translated_panics(UsageError, _CANNOT_FOLLOW):
            self.tokenizer = tokenizer_of(vocabulary)
        compiled = self.tokenizer.compiled
        entry = compiled.get(source)
        if entry is None:
            entry = self._compile(source)
            compiled[source] = entry
            for oldest in list(compiled)[:-_MAX_COMPILED]:
                compiled.pop(oldest, None)  # another thread may have removed it
        self._matcher, self._first_allowed = entry

    def _compile(self, source: Grammar) -> tuple[LLMatcher, BoolArray]:
        """Return a matcher at the start of a text, and the tokens that it allows: bool[n_tokens].

        Raises:
            UsageError: If the grammar is not valid, or no text follows it.
        """
        from llguidance import LLMatcher, LLParserLimits

        max_items = _MAX_ITEMS if self.is_gbnf else None
        limits = LLParserLimits(step_max_items=max_items, max_items_in_row=max_items)
        with _translated_panics(UsageError, _CANNOT_FOLLOW):
            llg_tokenizer = self.tokenizer.llg_tokenizer
            matcher = LLMatcher(llg_tokenizer, _compiled_text(source), log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(_CANNOT_FOLLOW + _first_line(matcher.get_error()))
        # The first mask is computed here, where only this request waits for it, and not in a round
        # that it shares with others.
        try:
            first_allowed = _State(self, matcher).mask()
        except BackendError as error:
            raise UsageError(error.message) from error
        if not first_allowed.any():
            raise UsageError("no text follows the grammar")
        return matcher, first_allowed

    @property
    def start(self) -> GrammarState:
        """A new state at the start of a text. It is not shared, since it caches those after it."""
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
    """Return the grammar of the whole text: `grammar` with `rules` around it, if there are any."""
    if grammar.form == "gbnf":
        lark = GbnfReader(grammar.text, vocabulary).read()
        if rules:
            lark = _with_rules(lark, rules)
        return Grammar("lark", _GBNF_OPTIONS + lark)
    if rules:
        lark = in_lark(grammar) if grammar.form == "json_schema" else grammar.text
        return Grammar("lark", _with_rules(lark, rules))
    return grammar


def _with_rules(lark: str, rules: str) -> str:
    """Return rules that refer to `answer`, with the start rule of `lark` renamed to it."""
    return f"{rules}\nanswer:{lark.removeprefix('start:')}"


class _State(GrammarState):
    """The state of a grammar after a text.

    Its matcher never advances: the states after it get copies.
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
        #: bool[n_tokens]: which tokens may come next; None until it is computed.
        self._allowed = allowed
        #: The number of digits at the end of the text; 0 in GBNF, where numbers may have any
        #: length.
        self._n_digits = n_digits
        #: int64[n]: the allowed tokens that end a number here; None if no number may end here.
        self._number_ends: TokenArray | None = None
        #: The states after tokens that were asked for, by token.
        self._children: dict[int, GrammarState] = {}
        #: The forced token, if `_is_forced_known`; None if no token is forced.
        self._forced: int | None = None
        self._is_forced_known = False

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = checked_ids(token_ids, self._grammar.n_tokens)
        if self._avoids_mask() and len(token_ids) < _MIN_FOR_MASK:
            return self._allows_each(token_ids)
        is_allowed: BoolArray = self.mask()[token_ids]
        return is_allowed

    def _avoids_mask(self) -> bool:
        """Return whether checking a few tokens one by one is cheaper than computing the mask."""
        return self._grammar.is_gbnf and self._allowed is None

    def _allows_each(self, token_ids: TokenArray) -> BoolArray:
        """Return which of these tokens may come next, bool[m], without the mask of all tokens."""
        matcher = self._matcher.deep_copy()
        ends = set(self._grammar.ends.tolist())
        with _translated_panics(BackendError, _CANNOT_GO_ON):
            may_end = matcher.is_accepting()
            is_allowed = [
                may_end if token in ends else matcher.validate_tokens([token]) == 1
                for token in token_ids.tolist()
            ]
        return np.array(is_allowed, np.bool_)

    def adjust_logits(self, logits: Logits) -> Logits:
        """Return logits with which a number ends if the model prefers anything but another digit.

        The best token that ends the number gets the logit of the best forbidden token that does not
        begin with a digit, if that is higher. With the mask alone, where the model wanted a comma
        after "99.50" that is not allowed, it went on with "99.500000000000004000e-01".
        """
        if not self._n_digits:
            return logits
        is_allowed = self.mask()
        if self._number_ends is None:
            return logits
        is_other = ~is_allowed & (self._grammar.tokenizer.n_leading_digits == 0)
        best_end = self._number_ends[logits[self._number_ends].argmax()]
        logits = logits.copy()
        other_logit = logits.max(where=is_other[: len(logits)], initial=-np.inf)
        logits[best_end] = max(logits[best_end], other_logit)
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
                raise _matcher_error(matcher)
            n_digits = self._n_digits_after(token_id)
            self._children[token_id] = _State(self._grammar, matcher, n_digits=n_digits)
        return self._children[token_id]

    def _n_digits_after(self, token_id: int) -> int:
        """Return the number of digits at the end of the text after a token."""
        if self._grammar.is_gbnf:
            return 0
        piece = self._grammar.tokenizer.pieces[token_id]
        n_digits = len(piece) - len(piece.rstrip(DIGITS))
        if n_digits == len(piece):  # the whole token is digits, so those before it count too
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
        """Compute the result of `forced`."""
        if self._avoids_mask():
            # If two different characters may come next, nothing is forced. This saves the mask.
            letters = self._grammar.tokenizer.letters
            if np.count_nonzero(self._allows_each(letters)) > 1:
                return None
        allowed = self.mask()
        n_allowed = int(np.count_nonzero(allowed))
        if n_allowed == 1:
            return int(allowed.argmax())
        ends = self._grammar.ends
        allowed_ends = ends[allowed[ends]]
        if n_allowed and n_allowed == len(allowed_ends):  # only end-of-text tokens
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
        """Return the mask of llguidance, bool[n_tokens], without the limit on numbers."""
        n_tokens = self._grammar.n_tokens
        n_words = -(-n_tokens // _BITS_PER_WORD)  # rounded up
        words = np.zeros(n_words, np.uint32)
        # Two threads must not use one matcher at the same time, but each may use a copy.
        matcher = self._matcher.deep_copy()
        with _translated_panics(BackendError, _CANNOT_GO_ON):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise _matcher_error(matcher)
        bits = np.unpackbits(words.view(np.uint8), count=n_tokens, bitorder="little")
        allowed = bits.view(np.bool_)
        if not matcher.is_accepting():  # if nothing else is allowed, llguidance allows the end
            allowed[self._grammar.ends] = False
        return allowed

    def _limit_number(self, allowed: BoolArray) -> None:
        """Find the tokens that end a number, and forbid those that make it too long.

        Args:
            allowed: The mask, which is changed in place.
        """
        tokenizer = self._grammar.tokenizer
        token_ids = np.flatnonzero(allowed)
        first_bytes = tokenizer.first_bytes[token_ids]
        is_end = np.isin(first_bytes, _AFTER_NUMBERS) | np.isin(token_ids, self._grammar.ends)
        # Where a quote is allowed, the digits are in a string, and not in a number.
        if is_end.any() and ord('"') not in first_bytes:
            self._number_ends = token_ids[is_end]
            n_left = max(0, _MAX_DIGITS - self._n_digits)
            allowed[tokenizer.n_leading_digits > n_left] = False


# --- grammars that llguidance refuses, or cannot follow


def validate(grammar: Grammar) -> tuple[bool, list[str]]:
    """Ask llguidance whether it accepts a grammar.

    Returns:
        Whether it refuses the grammar, and messages: the reasons, or else warnings that name what
        it ignores.
    """
    from llguidance import LLMatcher

    try:
        with _translated_panics(UsageError):
            return LLMatcher.validate_grammar_with_warnings(_compiled_text(grammar))
    except (ValueError, UsageError) as error:
        return True, [str(error)]


@functools.lru_cache(maxsize=1000)
def problem_following(grammar: Grammar) -> str:
    """Try a grammar: follow it for some bytes.

    This finds patterns that llguidance accepts, but that grow too large while it follows them.

    Returns:
        llguidance's message, if it refuses the grammar or cannot follow it; otherwise empty.
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
    """Translate a panic (a bug in llguidance) into a `SpecgenError` of this kind.

    The class of a panic has no public name, and is not an `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(message + _first_line(str(error))) from error


def _matcher_error(matcher: LLMatcher) -> BackendError:
    return BackendError(_CANNOT_GO_ON + _first_line(matcher.get_error()))


def _first_line(text: str) -> str:
    return text.strip().split("\n", maxsplit=1)[0]


# --- llguidance's variant of Lark


def literal(text: str) -> str:
    """Return a text as a literal in Lark, which is written like a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def in_lark(schema: Grammar) -> str:
    """Return a JSON schema as the right-hand side of a rule in Lark."""
    return f"%json {json.dumps({**json.loads(schema.text), 'x-guidance': JSON_FORM})}"


def _compiled_text(grammar: Grammar) -> str:
    """Return a grammar in the form that llguidance's matchers take."""
    from llguidance import LLMatcher

    if grammar.form == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_FORM)
    return LLMatcher.grammar_from_lark(grammar.text)
