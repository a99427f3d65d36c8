"""The tokens of a model, for llguidance."""

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
#: The first byte of the names of tokens that add nothing to the text.
_SPECIAL = b"\xff"


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """A vocabulary as llguidance knows it, and what grammars need to know about its tokens."""

    own: LLTokenizer
    #: The bytes of each token; a name that no text has for tokens that add nothing to the text.
    pieces: list[bytes]
    #: int64[n]: the tokens that are a single ASCII character.
    letters: TokenArray
    #: uint8[n_tokens]: the first byte of each token.
    first_bytes: np.ndarray[tuple[int], np.dtype[np.uint8]]
    #: int64[n_tokens]: how many digits each token begins with.
    n_leading_digits: TokenArray
    #: The latest grammars, compiled, and bool[n_tokens] tokens that may come first in them: each
    #: request of an agent has the same tools.
    compiled: dict[Grammar, tuple[LLMatcher, BoolArray]] = field(default_factory=dict)


_tokenizers: weakref.WeakKeyDictionary[Vocabulary, GrammarTokenizer] = weakref.WeakKeyDictionary()
#: Making a tokenizer takes up to a second, and two threads may want the same one.
_lock = threading.Lock()


def tokenizer_of(vocabulary: Vocabulary) -> GrammarTokenizer:
    """Return the tokenizer of a vocabulary, which is made once."""
    with _lock:
        found = _tokenizers.get(vocabulary)
        if found is None:
            found = _made(vocabulary)
            _tokenizers[vocabulary] = found
        return found


def _made(vocabulary: Vocabulary) -> GrammarTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    adapter = _VocabularyAdapter(vocabulary)
    pieces = adapter.tokens
    own = LLTokenizer(
        TokenizerWrapper(adapter),
        n_vocab=vocabulary.n_tokens,
        eos_token=list(vocabulary.end_tokens()),
    )
    letters = [
        token_id for token_id, piece in enumerate(pieces) if len(piece) == 1 and piece.isascii()
    ]
    n_leading_digits = [len(piece) - len(piece.lstrip(DIGITS)) for piece in pieces]
    return GrammarTokenizer(
        own,
        pieces,
        letters=np.array(letters, np.int64),
        first_bytes=np.array([piece[0] for piece in pieces], np.uint8),
        n_leading_digits=np.array(n_leading_digits, np.int64),
    )


class _VocabularyAdapter:
    """A vocabulary with the attributes that llguidance's `TokenizerWrapper` asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
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
        """Return the tokens that the model's own tokenizer makes of a text that is forced."""
        vocabulary = self._vocabulary()
        if vocabulary is None or not isinstance(text, str):
            raise TypeError("a text is wanted, while the vocabulary is open")
        tokens = vocabulary.tokenize_inside(text, parse_special=True)
        if all(vocabulary.token_bytes(token) for token in tokens):
            return tokens
        return vocabulary.tokenize_inside(text, parse_special=False)
