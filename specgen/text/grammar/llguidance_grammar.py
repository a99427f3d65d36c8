"""Grammars that llguidance follows (JSON schemas, and its own form of Lark), with states that are values.

llguidance (https://github.com/guidance-ai/llguidance) finds the allowed tokens of the whole vocabulary in
some tens of microseconds, and copies a state in a few. If the grammar forces a text, it allows only the
tokens in which the model's own tokenizer writes that text.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from specgen.errors import BackendError, SpecgenError, UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, State, Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: The form of JSON: a space after commas and colons, and no other white space, since a model could write any
#: amount of it.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BITS_OF_A_WORD = 32
_NO_FURTHER = "the grammar cannot be followed any further: "
#: The prefix of the names of tokens that are no text.
_SPECIAL = b"\xff"


def start(grammar: Grammar, vocabulary: Vocabulary) -> GrammarState:
    """Return the state before a text."""
    return LlguidanceGrammar(vocabulary, grammar).start


class LlguidanceGrammar:
    """A grammar over the tokens of a vocabulary; every text begins at `start`.

    Raises `UsageError` if llguidance does not accept the grammar.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        from llguidance import LLMatcher

        if not vocabulary.end_tokens():
            raise UsageError(
                "the model has no end-of-text token, so it cannot follow a grammar or a schema"
            )
        with _panics(UsageError, "the grammar cannot be followed: "):
            matcher = LLMatcher(_tokenizer(vocabulary), _compiled(grammar), log_level=0)
        if matcher.is_error():
            raise UsageError(f"the grammar cannot be followed: {_line(matcher.get_error())}")
        self.n_tokens = vocabulary.n_tokens
        #: int64[n]: the end-of-text tokens.
        self.ends: TokenArray = np.array(vocabulary.end_tokens(), np.int64)
        self._matcher = matcher
        try:  # here, where the one who asked waits, and not in a round that others share
            self._first = _State(self, matcher).mask()
        except BackendError as error:
            raise UsageError(error.message) from error

    @property
    def start(self) -> GrammarState:
        """The state at the start of a text. It is new each time, since a state keeps all that follow it."""
        return _State(self, self._matcher.deep_copy(), self._first)


class _State(State):
    """The state of a grammar after a text. Its matcher never advances: children have copies."""

    __slots__ = ("_children", "_grammar", "_known", "_matcher")

    def __init__(
        self, grammar: LlguidanceGrammar, matcher: LLMatcher, known: BoolArray | None = None
    ) -> None:
        super().__init__(grammar.n_tokens)
        self._grammar = grammar
        self._matcher = matcher
        self._known = known
        self._children: dict[int, GrammarState] = {}

    def _allowed_of(self, token_ids: TokenArray) -> BoolArray:
        found: BoolArray = self.mask()[token_ids]
        return found

    def _find_forced(self) -> int | None:
        allowed, ends = self.mask(), self._grammar.ends
        n_allowed = int(np.count_nonzero(allowed))
        if n_allowed == 1:
            return int(allowed.argmax())
        allowed_ends = ends[allowed[ends]]
        return int(allowed_ends[0]) if n_allowed and n_allowed == len(allowed_ends) else None

    def _next(self, token_id: int) -> GrammarState:
        if token_id in self._grammar.ends:
            return ENDED
        if token_id not in self._children:
            matcher = self._matcher.deep_copy()
            with _panics(BackendError, _NO_FURTHER):
                is_taken = matcher.consume_token(token_id)
            if not is_taken:
                raise _failure(matcher)
            self._children[token_id] = _State(self._grammar, matcher)
        return self._children[token_id]

    def mask(self) -> BoolArray:
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
        return self._known


def objections_to(grammar: Grammar) -> tuple[bool, list[str]]:
    """Return whether llguidance refuses a grammar, and its messages. Those about a grammar that it does not
    refuse say what it ignores."""
    from llguidance import LLMatcher

    try:
        with _panics(UsageError):
            return LLMatcher.validate_grammar_with_warnings(_compiled(grammar))
    except (ValueError, UsageError) as error:
        return True, [str(error)]


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

_tokenizers: weakref.WeakKeyDictionary[Vocabulary, LLTokenizer] = weakref.WeakKeyDictionary()
#: Making one takes up to a second, and two threads may want the same one.
_making = threading.Lock()


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    with _making:
        found = _tokenizers.get(vocabulary)
        if found is None:
            tokens = TokenizerWrapper(_Tokens(vocabulary))
            ends = list(vocabulary.end_tokens())
            found = LLTokenizer(tokens, n_vocab=vocabulary.n_tokens, eos_token=ends)
            _tokenizers[vocabulary] = found
        return found


class _Tokens:
    """A vocabulary in llguidance's interface."""

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
