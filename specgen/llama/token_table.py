"""The bytes of a vocabulary's tokens, in forms that are quick to search, and the states of UTF-8 between them."""

from __future__ import annotations

import weakref

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
        #: Two-byte keys in ascending order, and the tokens with these keys.
        self._by_two_bytes: tuple[npt.NDArray[np.int64], TokenArray] | None = None
        usable = self.ends_in(BOUNDARY) != INVALID
        #: bool[256]: whether a token that may follow whole characters begins with the byte.
        self.begins = np.zeros(257, np.bool_)
        self.begins[self.first[usable]] = True
        self.begins = self.begins[:256]
        #: int64[257]: the token that consists of this byte only; -1 if there is none.
        self.single = np.full(257, -1, np.int64)
        for token_id in usable.nonzero()[0].tolist():
            piece = self.pieces[token_id]
            if len(piece) == 1 and self.single[piece[0]] < 0:
                self.single[piece[0]] = token_id

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

    def with_prefix(self, single: int, seconds: BoolArray) -> TokenArray:
        """Return the other tokens that begin with the byte of the token `single`: first those of only
        this byte (SentencePiece may have both the letter and the byte), then those whose second byte
        is in `seconds`, bool[256]."""
        if self._by_two_bytes is None:
            self._by_two_bytes = self._sort_by_two_bytes()
        keys, token_ids = self._by_two_bytes
        byte = self.pieces[single][0]
        begin, end = keys.searchsorted([_key(byte), _key(byte + 1)]).tolist()
        keys, token_ids = keys[begin:end] - _key(byte), token_ids[begin:end]
        wanted = np.concatenate(([True], seconds))[keys] & (token_ids != single)
        found: TokenArray = token_ids[wanted]
        return found

    def _sort_by_two_bytes(self) -> tuple[npt.NDArray[np.int64], TokenArray]:
        token_ids = (self.ends_in(BOUNDARY) != INVALID).nonzero()[0]
        keys = np.array([_key(*self.pieces[token][:2]) for token in token_ids.tolist()], np.int64)
        order = keys.argsort(kind="stable")
        return keys[order], token_ids[order]


def _key(first: int, second: int = -1) -> int:
    """Return a number that sorts like the bytes; a key without a second byte comes first."""
    return first * 257 + second + 1


_tables: weakref.WeakKeyDictionary[LlamaVocabulary, TokenTable] = weakref.WeakKeyDictionary()


def token_table(vocabulary: LlamaVocabulary) -> TokenTable:
    """Return the table of a vocabulary, which is made once."""
    table = _tables.get(vocabulary)
    if table is None:
        table = _tables[vocabulary] = TokenTable(vocabulary)
    return table
