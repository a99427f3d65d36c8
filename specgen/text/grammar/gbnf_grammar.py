"""Grammars in GBNF over the tokens of a vocabulary, as states that are values.

The tokens that llama.cpp's grammar sampler allows are allowed, and no others. It is not asked, since it follows each
way in which a text can be read by itself (`specgen.text.grammar.gbnf_states`).

A token is also refused, beyond llama.cpp's rules, if the text would not be UTF-8 with it (llama.cpp
skips wrong bytes inside a token), if it contains a NUL (llama.cpp would read only up to it), or if it
adds nothing to the text (llama.cpp would read a control token as its name).
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import weakref
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, State, Vocabulary
from specgen.text.grammar.gbnf import Characters, read_gbnf
from specgen.text.grammar.gbnf_states import DEAD, GbnfStates, Stacks, TooManyWaysError

#: A state, and the bytes behind it of a character that is not complete.
_Key: TypeAlias = tuple[Stacks, bytes]

#: For this many tokens or more, find out about all tokens, and remember it.
VERY_MANY = 512
#: The bytes of a character behind its first one.
_LATER = [bytes([byte]) for byte in range(0x80, 0xC0)]
#: The most states that a grammar keeps, with 19 kB each for a vocabulary of 152 thousand tokens.
MOST_STATES = 256


def read_utf8(data: bytes) -> tuple[str, bytes] | None:
    """Return the whole characters of a text, and the bytes of an incomplete one behind them. None if it can become
    no UTF-8, has a NUL, or is empty."""
    if not data or b"\0" in data:
        return None
    try:
        text, n_read = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    rest = data[n_read:]
    # Python waits for the third byte before it refuses half of a pair (U+D800 to U+DFFF).
    return None if b"\xed\xa0" <= rest[:2] < b"\xee" else (text, rest)


class _TokenTexts:
    """The texts of the tokens that may follow whole characters, one behind the other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.pieces = [vocabulary.token_bytes(token) for token in range(vocabulary.n_tokens)]
        self.ends = frozenset(vocabulary.end_tokens())
        tokens: list[int] = []
        texts: list[str] = []
        #: The bytes of a character that is not complete, by the index of a token that ends with it.
        self.rests: dict[int, bytes] = {}
        #: Tokens that may follow a part of a character, and tokens of a single ASCII character.
        self.continuing: list[int] = []
        self.ascii_tokens: list[int] = []
        for token, piece in enumerate(self.pieces):
            if token in self.ends:
                continue
            if piece[:1] in _LATER:
                self.continuing.append(token)
            if (found := read_utf8(piece)) is None:
                continue
            text, rest = found
            if rest:
                self.rests[len(tokens)] = rest
            elif len(piece) == 1:
                self.ascii_tokens.append(token)
            tokens.append(token)
            texts.append(text)
        #: int64[n]: the tokens, how many characters each has, and where the first one is in `code_points`.
        self.tokens: TokenArray = np.array(tokens, np.int64)
        self.lengths = np.array([len(text) for text in texts], np.int64)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.code_points = np.frombuffer("".join(texts).encode("utf-32-le"), "<i4")


_texts: weakref.WeakKeyDictionary[Vocabulary, _TokenTexts] = weakref.WeakKeyDictionary()


def start(grammar: Grammar, vocabulary: Vocabulary) -> GrammarState:
    """Return the state before a text."""
    return GbnfGrammar(vocabulary, grammar.text).start


class GbnfGrammar:
    """A grammar over the tokens of a vocabulary, which must stay open while the grammar is made.

    `start` is the state before a text. Several threads may use a grammar.

    Raises `UsageError` if the grammar is not valid, or a text can be read in too many ways. Where that turns out
    later only, nothing more is allowed.
    """

    def __init__(self, vocabulary: Vocabulary, gbnf: str) -> None:
        stacks = GbnfStates(read_gbnf(gbnf))
        if vocabulary not in _texts:  # made once
            _texts[vocabulary] = _TokenTexts(vocabulary)
        self.stacks, self.texts = stacks, _texts[vocabulary]
        self._states: dict[_Key, _State] = {}
        self._classes = stacks.classes_of(self.texts.code_points)
        #: The state before a text.
        self.start: GrammarState = _State(self, (stacks.start, b""))
        try:
            self.allowed(stacks.start)
        except TooManyWaysError:
            raise UsageError("the grammar can read a text in too many ways") from None

    def state(self, key: _Key) -> _State:
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = _State(self, key)
            self.stacks.allow_for_token()
            if len(self._states) > MOST_STATES:
                with contextlib.suppress(KeyError):  # another thread was here before
                    del self._states[next(iter(self._states))]
        return found

    def key_after(self, key: _Key, token: int) -> _Key | None:
        """Return the key after a token's text; None if it may not follow. Raise `TooManyWaysError`."""
        stacks, tail = key
        piece = self.texts.pieces[token]
        found = read_utf8(tail + piece) if piece else None
        if found is None:
            return None
        text, rest = found
        stacks = self.stacks.after(stacks, text)
        fits = _may_follow(rest, self.stacks.next_characters(stacks)) if rest else bool(stacks)
        return (stacks, rest) if fits else None

    def allowed(self, stacks: Stacks) -> BoolArray:
        """Return which tokens may follow a text that ends with a whole character, but for end tokens:
        bool[n_tokens]. Raise `TooManyWaysError`."""
        texts = self.texts
        found, states = self.stacks.after_texts(stacks, self._classes, texts.starts, texts.lengths)
        fits = found != DEAD
        following = functools.cache(lambda number: self.stacks.next_characters(states[number]))
        may_follow = functools.cache(lambda number, rest: _may_follow(rest, following(number)))
        for index, rest in texts.rests.items():
            if fits[index]:
                fits[index] = may_follow(int(found[index]), rest)
        allowed = np.zeros(len(texts.pieces), np.bool_)
        allowed[texts.tokens[fits]] = True
        return allowed


def _may_follow(rest: bytes, following: set[Characters]) -> bool:
    """Return whether a character that begins with these bytes is in one of the sets."""
    return any(each.may_have(*_characters_with(rest)) for each in following)


@functools.cache
def _characters_with(begin: bytes) -> tuple[int, int]:
    """Return the first and last character whose UTF-8 begins with these bytes."""
    low = high = begin
    while (found := read_utf8(low)) is None or found[1]:
        low += next(byte for byte in _LATER if read_utf8(low + byte) is not None)
        high += next(byte for byte in reversed(_LATER) if read_utf8(high + byte) is not None)
    return ord(low.decode()), ord(high.decode())


class _State(State):
    """The state of a grammar after texts with the same key."""

    __slots__ = ("_following", "_grammar", "_key", "_mask_bits")

    def __init__(self, grammar: GbnfGrammar, key: _Key) -> None:
        super().__init__(len(grammar.texts.pieces))
        self._grammar = grammar
        self._key = key
        #: The keys after allowed tokens. (The states themselves would keep every text.)
        self._following: dict[int, _Key] = {}
        #: Bits of all tokens, as soon as somebody has asked about very many.
        self._mask_bits: npt.NDArray[np.uint8] | None = None

    def _allowed_of(self, token_ids: TokenArray) -> BoolArray:
        if self._mask_bits is not None or len(token_ids) >= VERY_MANY:
            found: BoolArray = self._mask()[token_ids]
            return found
        return np.array([self._allows(token) for token in token_ids.tolist()], np.bool_)

    def _allows(self, token: int) -> bool:
        grammar, (stacks, tail) = self._grammar, self._key
        if token in grammar.texts.ends:
            return not tail and grammar.stacks.may_end(stacks)
        if token not in self._following:
            with contextlib.suppress(TooManyWaysError):
                key = grammar.key_after(self._key, token)
                if key is not None:
                    self._following[token] = key
        return token in self._following

    def _mask(self) -> BoolArray:
        grammar, (stacks, tail) = self._grammar, self._key
        if self._mask_bits is None:
            allowed = np.zeros(self._n_tokens, np.bool_)
            if tail:
                for token in grammar.texts.continuing:
                    allowed[token] = self._allows(token)
            else:
                with contextlib.suppress(TooManyWaysError):
                    allowed = grammar.allowed(stacks)
                allowed[list(grammar.texts.ends)] = grammar.stacks.may_end(stacks)
            self._mask_bits = np.packbits(allowed)
        return np.unpackbits(self._mask_bits, count=self._n_tokens).view(np.bool_)

    def _next(self, token_id: int) -> GrammarState:
        if token_id in self._grammar.texts.ends:
            return ENDED
        # A token that the mask allows may turn out to be read in too many ways.
        dead: _Key = (frozenset(), b"")
        key = self._following[token_id] if self._allows(token_id) else dead
        return self._grammar.state(key)

    def _find_forced(self) -> int | None:
        """Return the only allowed token, or None. Tokens of one byte are checked first: two of them end the
        search."""
        texts = self._grammar.texts
        ends = [token for token in sorted(texts.ends) if self._allows(token)]
        n_found = len(ends[:1])
        if not self._key[1]:
            for token in texts.ascii_tokens:
                n_found += self._allows(token)
                if n_found > 1:
                    return None
        allowed = self._mask()
        allowed[list(texts.ends)] = False
        found = [*ends[:1], *allowed.nonzero()[0][:2].tolist()]
        return int(found[0]) if len(found) == 1 else None
