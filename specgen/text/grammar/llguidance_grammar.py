"""Grammars that llguidance follows (JSON schemas, GBNF, and its own form of Lark), with states that
are values.

llguidance (https://github.com/guidance-ai/llguidance) finds all allowed tokens in some tens of
microseconds, and copies a state in a few. Of a forced text it allows only the tokens in which the
model's own tokenizer writes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specgen.errors import BackendError, SpecgenError, UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, Logits, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, checked_ids
from specgen.text.grammar.gbnf import GbnfReader
from specgen.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: The form of JSON: a space after commas and colons, and no other white space, which models write
#: without end. Strings may escape any character, as in "K\u00f6ln". What llguidance cannot enforce,
#: it names as a warning.
JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
    "lenient": True,
}
_BITS_OF_A_WORD = 32
#: GBNF allows each way of writing a text in tokens, also where the text is forced.
_GBNF_OPTIONS = '%llguidance {"no_forcing": true}\n'
#: The most items that llguidance's parser keeps for a step, some 25 ms, in a grammar of single
#: characters.
_MOST_ITEMS = 500_000
#: The most digits in a row of a number, where it may end: models may write digits for ever. Each
#: integer of 18 digits fits into 64 bits, and each number of 64 bits can be written with 17 digits.
_MOST_DIGITS = 18
_DIGITS, _BEHIND_NUMBERS = b"0123456789", [*b",]}"]
#: Grammars that are kept compiled, for each vocabulary.
_N_KEPT = 16
#: Of this many tokens or more, all are found out about at once.
_VERY_MANY = 512
#: A pattern is tried with a part of the work that llguidance may do for a token, since a token may
#: have many bytes.
_TRIAL_FUEL, _TRIAL_BYTES, _TRIAL_STRIDE = 50_000, 24, 31
_NO_FURTHER = "the grammar cannot be followed any further: "
#: The prefix of the names of tokens that are no text.
_SPECIAL = b"\xff"


class LlguidanceGrammar:
    """A grammar over the tokens of a vocabulary; every text begins at `start`. With `rules`, in
    llguidance's form of Lark, a text follows these, and what they call `answer` the grammar. Raises
    `UsageError` if no text follows it.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, rules: str = "") -> None:
        from llguidance import LLMatcher, LLParserLimits

        #: int64[n]: the end-of-text tokens.
        self.ends: TokenArray = np.array(vocabulary.end_tokens(), np.int64)
        if not len(self.ends):
            raise UsageError(
                "the model has no end-of-text token, so it cannot follow a grammar or a schema"
            )
        self.n_tokens = vocabulary.n_tokens
        #: Whether a few tokens are checked one by one: terminals of one character make a mask of
        #: all tokens dear (4 ms inside of a JSON string). Where a text is forced, a mask has the
        #: model's own tokens only.
        self.checks_few = grammar.form == "gbnf"
        if self.checks_few:
            grammar = Grammar("lark", GbnfReader(grammar.text, vocabulary).read())
        if rules:
            own = in_lark(grammar) if grammar.form == "json_schema" else grammar.text
            grammar = Grammar("lark", f"{rules}\nanswer:{own.removeprefix('start:')}")
        if self.checks_few:
            grammar = Grammar("lark", _GBNF_OPTIONS + grammar.text)
        most = _MOST_ITEMS if self.checks_few else None
        limits = LLParserLimits(step_max_items=most, max_items_in_row=most)
        with _panics(UsageError, "the grammar cannot be followed: "):
            self.tokenizer = _tokenizer(vocabulary)
            kept = self.tokenizer.kept
            if (known := kept.get(grammar)) is not None:
                self._matcher, self._first = known
                return
            matcher = LLMatcher(self.tokenizer.own, _compiled(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(f"the grammar cannot be followed: {_line(matcher.get_error())}")
        self._matcher = matcher
        try:  # here, where the one who asked waits, and not in a round that others share
            self._first = _State(self, matcher).mask()
        except BackendError as error:
            raise UsageError(error.message) from error
        if not self._first.any():
            raise UsageError("no text follows the grammar")
        kept[grammar] = matcher, self._first
        for oldest in [*kept][:-_N_KEPT]:
            kept.pop(oldest, None)

    @property
    def start(self) -> GrammarState:
        """The state at the start of a text. It is new each time, since a state keeps all that
        follow it.
        """
        return _State(self, self._matcher.deep_copy(), self._first)

    def fed(self, tokens: Sequence[int]) -> GrammarState | None:
        matcher = self._matcher.deep_copy()
        with _panics(BackendError, _NO_FURTHER):
            n_taken = matcher.try_consume_tokens(list(tokens))
        return _State(self, matcher) if n_taken == len(tokens) else None


class _State(GrammarState):
    """The state of a grammar after a text. Its matcher never advances: children have copies."""

    __slots__ = (
        *("__weakref__", "_children", "_ends", "_forced", "_grammar", "_known", "_matcher"),
        "_n_digits",
    )

    def __init__(
        self,
        grammar: LlguidanceGrammar,
        matcher: LLMatcher,
        known: BoolArray | None = None,
        n_digits: int = 0,
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._known = known
        self._n_digits = n_digits  # at the end of the text
        self._ends: TokenArray | None = None  # the tokens that end a number here
        self._children: dict[int, GrammarState] = {}
        self._forced: int | None = -1  # not known yet

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = checked_ids(token_ids, self._grammar.n_tokens)
        if self._known is None and self._grammar.checks_few and len(token_ids) < _VERY_MANY:
            return self._checked(token_ids)
        found: BoolArray = self.mask()[token_ids]
        return found

    def _checked(self, token_ids: TokenArray) -> BoolArray:
        matcher, ends = self._matcher.deep_copy(), set(self._grammar.ends.tolist())
        with _panics(BackendError, _NO_FURTHER):
            may_end = matcher.is_accepting()
            return np.array(
                [
                    may_end if token in ends else matcher.validate_tokens([token]) == 1
                    for token in token_ids.tolist()
                ],
                np.bool_,
            )

    def ending(self, logits: Logits) -> Logits:
        is_allowed = self.mask() if self._n_digits else None
        if is_allowed is None or self._ends is None:
            return logits
        # Masked alone, "99.50" before a comma that is not allowed went on as
        # "99.500000000000004000e-01".
        is_other = (~is_allowed & (self._grammar.tokenizer.n_digits == 0))[: len(logits)]
        end = self._ends[logits[self._ends].argmax()]
        logits = logits.copy()
        logits[end] = max(logits[end], logits.max(where=is_other, initial=-np.inf))
        return logits

    def after(self, token_id: int) -> GrammarState:
        if not self.allows(np.array([token_id]))[0]:
            raise ValueError(f"the grammar does not allow token {token_id} here")
        if token_id in self._grammar.ends:
            return ENDED
        if token_id not in self._children:
            matcher = self._matcher.deep_copy()
            with _panics(BackendError, _NO_FURTHER):
                is_taken = matcher.consume_token(token_id)
            if not is_taken:
                raise _failure(matcher)
            piece = b"" if self._grammar.checks_few else self._grammar.tokenizer.pieces[token_id]
            n_digits = len(piece) - len(piece.rstrip(_DIGITS))
            n_digits += self._n_digits if n_digits == len(piece) else 0
            self._children[token_id] = _State(self._grammar, matcher, n_digits=n_digits)
        return self._children[token_id]

    def forget(self) -> None:
        self._children = {}

    def forced(self) -> int | None:
        if self._forced == -1:
            self._forced = self._find_forced()
        return self._forced

    def _find_forced(self) -> int | None:
        ends = self._grammar.ends
        if self._grammar.checks_few and self._known is None:
            # Two characters that may come next are enough to see that none is forced.
            letters = self._grammar.tokenizer.letters
            if np.count_nonzero(self._checked(letters)) > 1:
                return None
        allowed = self.mask()
        n_allowed = int(np.count_nonzero(allowed))
        if n_allowed == 1:
            return int(allowed.argmax())
        allowed_ends = ends[allowed[ends]]
        return int(allowed_ends[0]) if n_allowed and n_allowed == len(allowed_ends) else None

    def mask(self) -> BoolArray:
        """Return which tokens of the vocabulary may come next: bool[n_tokens]."""
        if self._known is None:
            n_tokens = self._grammar.n_tokens
            words = np.zeros(-(-n_tokens // _BITS_OF_A_WORD), np.uint32)
            # Two threads must not ask one matcher at the same time, but each may ask a copy.
            matcher = self._matcher.deep_copy()
            with _panics(BackendError, _NO_FURTHER):
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                raise _failure(matcher)
            bits = np.unpackbits(words.view(np.uint8), count=n_tokens, bitorder="little")
            self._known = bits.view(np.bool_)
            if not matcher.is_accepting():  # where nothing is left, llguidance allows the end
                self._known[self._grammar.ends] = False
            if self._n_digits:
                self._end_number(self._known)
        return self._known

    def _end_number(self, allowed: BoolArray) -> None:
        """Find the tokens that end a number, and take away those that make it too long, where a
        string may not end.
        """
        tokenizer, token_ids = self._grammar.tokenizer, np.flatnonzero(allowed)
        heads = tokenizer.heads[token_ids]
        ends = np.isin(heads, _BEHIND_NUMBERS) | np.isin(token_ids, self._grammar.ends)
        if ends.any() and ord('"') not in heads:
            self._ends = token_ids[ends]
            allowed[tokenizer.n_digits > max(0, _MOST_DIGITS - self._n_digits)] = False


def objections_to(grammar: Grammar) -> tuple[bool, list[str]]:
    """Return whether llguidance refuses a grammar, and its messages: else they say what it ignores."""
    from llguidance import LLMatcher

    try:
        with _panics(UsageError):
            return LLMatcher.validate_grammar_with_warnings(_compiled(grammar))
    except (ValueError, UsageError) as error:
        return True, [str(error)]


@functools.lru_cache(maxsize=1000)
def trouble_with(grammar: Grammar) -> str:
    """Follow a grammar for some bytes, and return why llguidance cannot, or nothing: patterns can
    grow too large.
    """
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    is_wrong, messages = objections_to(grammar)
    if is_wrong:
        return "; ".join(messages)
    limits = LLParserLimits(step_lexer_fuel=_TRIAL_FUEL)
    matcher = LLMatcher(LLTokenizer("byte"), _compiled(grammar), log_level=0, limits=limits)
    for step in range(_TRIAL_BYTES):
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            break
        matcher.consume_token(int(allowed[_TRIAL_STRIDE * step % len(allowed)]))
    return _line(matcher.get_error())


def literal(text: str) -> str:
    """Return a text as a literal of Lark, which has JSON's form."""
    return json.dumps(text, ensure_ascii=False)


def in_lark(schema: Grammar) -> str:
    return f"%json {json.dumps({**json.loads(schema.text), 'x-guidance': JSON_FORM})}"


def _compiled(grammar: Grammar) -> str:
    from llguidance import LLMatcher

    if grammar.form == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_FORM)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_lark(grammar.text)


@contextlib.contextmanager
def _panics(kind: type[SpecgenError], message: str = "") -> Iterator[None]:
    """Translate a bug in llguidance, which it reports by an exception without a name of its own."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(message + _line(str(error))) from error


def _failure(matcher: LLMatcher) -> BackendError:
    return BackendError(_NO_FURTHER + _line(matcher.get_error()))


def _line(text: str) -> str:
    return text.strip().split("\n", maxsplit=1)[0]


# --- tokens -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """A vocabulary for llguidance, and about its tokens: the tokens of one ASCII character
    (int64[n]), the first bytes (uint8[n_tokens]), and with how many digits they begin
    (int64[n_tokens]).
    """

    own: LLTokenizer
    pieces: list[bytes]
    letters: TokenArray
    heads: np.ndarray[tuple[int], np.dtype[np.uint8]]
    n_digits: TokenArray
    #: The latest grammars, compiled, and the tokens that may begin: each request of an agent has
    #: the same tools.
    kept: dict[Grammar, tuple[LLMatcher, BoolArray]] = field(default_factory=dict)


_tokenizers: weakref.WeakKeyDictionary[Vocabulary, _Tokenizer] = weakref.WeakKeyDictionary()
#: Making one takes up to a second, and two threads may want the same one.
_making = threading.Lock()


def _tokenizer(vocabulary: Vocabulary) -> _Tokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    with _making:
        found = _tokenizers.get(vocabulary)
        if found is None:
            tokens = _Tokens(vocabulary)
            ends = list(vocabulary.end_tokens())
            pieces, n_tokens = tokens.tokens, vocabulary.n_tokens
            letters = [n for n, piece in enumerate(pieces) if len(piece) == 1 and piece < b"\x80"]
            found = _Tokenizer(
                LLTokenizer(TokenizerWrapper(tokens), n_vocab=n_tokens, eos_token=ends),
                pieces,
                np.array(letters, np.int64),
                np.array([piece[0] for piece in pieces], np.uint8),
                np.array([len(each) - len(each.lstrip(_DIGITS)) for each in pieces], np.int64),
            )
            _tokenizers[vocabulary] = found
        return found


class _Tokens:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = weakref.ref(vocabulary)
        ends = list(vocabulary.end_tokens())
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        pieces = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.n_tokens)]
        for token_id in ends:
            pieces[token_id] = b""
        #: The names of tokens; tokens that add nothing to the text get names that no text has.
        self.tokens = [
            piece or _SPECIAL + f"[{number}]".encode() for number, piece in enumerate(pieces)
        ]
        self.special_token_ids = [number for number, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens in which the model's tokenizer writes a text that a grammar forces."""
        vocabulary = self._vocabulary()
        if vocabulary is None or not isinstance(text, str):
            raise TypeError("a text of an open vocabulary is wanted")
        tokens = vocabulary.tokenize_inside(text, parse_special=True)
        if all(vocabulary.token_bytes(token) for token in tokens):
            return tokens
        return vocabulary.tokenize_inside(text, parse_special=False)
