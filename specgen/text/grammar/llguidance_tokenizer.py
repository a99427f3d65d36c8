"""The tokens of a model, in the form that llguidance needs."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specgen.options import Grammar
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

DIGITS = b"0123456789"
#: llguidance's first byte for the names of special tokens, which add nothing to the text.
_SPECIAL = b"\xff"


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """A vocabulary as llguidance's tokenizer, and what grammars need to know about its tokens."""

    #: llguidance's tokenizer.
    llg_tokenizer: LLTokenizer
    #: The bytes of each token. Tokens that add nothing to the text have a name that no text
    #: contains.
    pieces: list[bytes]
    #: int64[n]: the tokens that consist of a single ASCII character.
    letters: TokenArray
    #: uint8[n_tokens]: the first byte of each token.
    first_bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]
    #: int64[n_tokens]: the number of digits at the beginning of each token.
    n_leading_digits: TokenArray
    #: The latest compiled grammars, each with the tokens that may come first, bool[n_tokens]. They
    #: are kept because all requests of an agent have the same tools.
    compiled: dict[Grammar, tuple[LLMatcher, BoolArray]] = field(default_factory=dict)


_tokenizers: weakref.WeakKeyDictionary[Vocabulary, GrammarTokenizer] = weakref.WeakKeyDictionary()
#: Creating a tokenizer takes up to a second, and two threads may need the same one.
_lock = threading.Lock()


def tokenizer_of(vocabulary: Vocabulary) -> GrammarTokenizer:
    """Return the tokenizer of a vocabulary, which is created only once."""
    with _lock:
        tokenizer = _tokenizers.get(vocabulary)
        if tokenizer is None:
            tokenizer = _create_tokenizer(vocabulary)
            _tokenizers[vocabulary] = tokenizer
        return tokenizer


def _create_tokenizer(vocabulary: Vocabulary) -> GrammarTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    adapter = _VocabularyAdapter(vocabulary)
    pieces = adapter.tokens
    llg_tokenizer = LLTokenizer(
        TokenizerWrapper(adapter),
        n_vocab=vocabulary.n_tokens,
        eos_token=list(vocabulary.end_tokens()),
    )
    letters = [
        token_id for token_id, piece in enumerate(pieces) if len(piece) == 1 and piece.isascii()
    ]
    n_leading_digits = [len(piece) - len(piece.lstrip(DIGITS)) for piece in pieces]
    return GrammarTokenizer(
        llg_tokenizer,
        pieces,
        letters=np.array(letters, np.int64),
        first_bytes=np.array([piece[0] for piece in pieces], np.uint8),
        n_leading_digits=np.array(n_leading_digits, np.int64),
    )


class _VocabularyAdapter:
    """A vocabulary with the attributes that llguidance's `TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # A weak reference, so that `_tokenizers` does not keep the vocabulary alive.
        self._vocabulary = weakref.ref(vocabulary)
        ends = list(vocabulary.end_tokens())
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        pieces = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.n_tokens)]
        for token_id in ends:
            pieces[token_id] = b""
        self.tokens = [
            piece or _SPECIAL + f"[{token_id}]".encode() for token_id, piece in enumerate(pieces)
        ]
        self.special_token_ids = [token_id for token_id, piece in enumerate(pieces) if not piece]

    def __call__(self, text: str) -> list[int]:
        """Tokenize a forced text as the model's tokenizer does.

        Names of control tokens in it count as text if they would add nothing to the text.
        """
        vocabulary = self._vocabulary()
        if vocabulary is None or not isinstance(text, str):
            raise TypeError("a text is wanted, while the vocabulary is open")
        tokens = vocabulary.tokenize_inside(text, parse_special=True)
        if all(vocabulary.token_bytes(token) for token in tokens):
            return tokens
        return vocabulary.tokenize_inside(text, parse_special=False)
