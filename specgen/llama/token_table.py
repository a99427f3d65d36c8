"""The bytes of a vocabulary's tokens, in forms that are quick to search, and the states of UTF-8 between them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specgen.llama.vocabulary import LlamaVocabulary
from specgen.system.arrays import BoolArray, TokenArray

#: The state after whole characters.
BOUNDARY = 0
#: The state after bytes that cannot occur in UTF-8, or after a NUL.
INVALID = 255

#: For each state inside a character: the first and last byte that may follow, and the next state.
#: States 1 to 3 expect 1 to 3 more bytes. States 4 to 7 follow E0, ED, F0 and F4, after which some
#: bytes would spell something that is not a character (RFC 3629).
_NEXT = {
    1: (0x80, 0xBF, BOUNDARY),
    2: (0x80, 0xBF, 1),
    3: (0x80, 0xBF, 2),
    4: (0xA0, 0xBF, 1),
    5: (0x80, 0x9F, 1),
    6: (0x90, 0xBF, 2),
    7: (0x80, 0x8F, 2),
}
_AFTER_FIRST = {0xE0: 4, 0xED: 5, 0xF0: 6, 0xF4: 7}
#: Stands for the first byte of a token that adds nothing to the text.
_NO_BYTE = 256


def utf8_state(piece: bytes, state: int = BOUNDARY) -> int:
    """Return the state after `piece` in a text in `state`; INVALID if that is not UTF-8, or has a NUL."""
    if state == BOUNDARY and piece.isascii():
        return INVALID if b"\0" in piece else BOUNDARY
    for byte in piece:
        if state == BOUNDARY:
            state = _first(byte)
        else:
            low, high, state = _NEXT[state]
            if not low <= byte <= high:
                return INVALID
        if state == INVALID:
            break
    return state


def _first(byte: int) -> int:
    if byte < 0x80:
        return BOUNDARY if byte else INVALID
    if 0xC2 <= byte < 0xE0:
        return 1
    if 0xE0 <= byte < 0xF0:
        return _AFTER_FIRST.get(byte, 2)
    if 0xF0 <= byte <= 0xF4:
        return _AFTER_FIRST.get(byte, 3)
    return INVALID


class TokenTable:
    """The bytes that the tokens of a vocabulary add to the text, in forms that are quick to search."""

    def __init__(self, vocabulary: LlamaVocabulary) -> None:
        n = vocabulary.n_tokens
        self.pieces = [vocabulary.token_bytes(token_id) for token_id in range(n)]
        self.end_tokens = np.array(vocabulary.end_tokens(), np.int64)
        #: bool[n_tokens]: whether the token ends a text or a turn.
        self.is_end = np.zeros(n, np.bool_)
        self.is_end[self.end_tokens] = True
        #: int16[n_tokens]: the first byte; `_NO_BYTE` for empty tokens and for end tokens.
        self.first = np.array([piece[0] if piece else _NO_BYTE for piece in self.pieces], np.int16)
        self.first[self.is_end] = _NO_BYTE
        self._ends_in: dict[int, npt.NDArray[np.uint8]] = {}
        self._continues: dict[int, BoolArray] = {}
        #: Tokens of a single ASCII character.
        self.ascii_tokens = [
            token_id
            for token_id in (self.ends_in(BOUNDARY) != INVALID).nonzero()[0].tolist()
            if len(self.pieces[token_id]) == 1 and self.pieces[token_id].isascii()
        ]
        self._texts: TokenTexts | None = None

    @property
    def texts(self) -> TokenTexts:
        """The texts of the tokens that may follow whole characters."""
        if self._texts is None:
            token_ids = (self.ends_in(BOUNDARY) != INVALID).nonzero()[0]
            self._texts = TokenTexts(token_ids, [self.pieces[each] for each in token_ids.tolist()])
        return self._texts

    def ends_in(self, pending: int) -> npt.NDArray[np.uint8]:
        """Return uint8[n_tokens]: the UTF-8 state after a text in the state `pending` and each token;
        INVALID if the text would not be UTF-8, would contain a NUL, or would not change."""
        states = self._ends_in.get(pending)
        if states is None:
            states = np.full(len(self.pieces), INVALID, np.uint8)
            among = self.first < _NO_BYTE
            if pending != BOUNDARY:
                among &= (self.first >= 0x80) & (self.first < 0xC0)
            for token_id in among.nonzero()[0].tolist():
                states[token_id] = utf8_state(self.pieces[token_id], pending)
            self._ends_in[pending] = states
        return states

    def continues(self, pending: int) -> BoolArray:
        """Return bool[n_tokens]: whether the token may follow a text that ends inside a character."""
        usable = self._continues.get(pending)
        if usable is None:
            usable = self._continues[pending] = self.ends_in(pending) != INVALID
        return usable


class TokenTexts:
    """The characters of tokens, one token behind the other."""

    def __init__(self, token_ids: TokenArray, pieces: Sequence[bytes]) -> None:
        #: int64[n]: the tokens.
        self.token_ids = token_ids
        texts = [piece.decode(errors="ignore") for piece in pieces]
        #: The bytes of a character that is not complete, by the index of a token that ends with it.
        self.rests = {
            index: piece[len(text.encode()) :]
            for index, (text, piece) in enumerate(zip(texts, pieces, strict=True))
            if not piece.isascii() and len(text.encode()) < len(piece)
        }
        #: int64[n]: how many characters each token has, and where the first one is in `code_points`.
        self.lengths = np.array([len(text) for text in texts], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.code_points = np.frombuffer("".join(texts).encode("utf-32-le"), "<i4")


_tables: weakref.WeakKeyDictionary[LlamaVocabulary, TokenTable] = weakref.WeakKeyDictionary()


def token_table(vocabulary: LlamaVocabulary) -> TokenTable:
    """Return the table of a vocabulary, which is made once."""
    table = _tables.get(vocabulary)
    if table is None:
        table = _tables[vocabulary] = TokenTable(vocabulary)
    return table
