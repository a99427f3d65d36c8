"""Grammars (GBNF) over the tokens of a vocabulary, as states that are values.

The tokens that llama.cpp's grammar sampler allows are allowed, and no others. It is not asked, since it follows each
way in which a text can be read by itself (`specgen.text.grammar.gbnf_states`).

A token is also refused, beyond llama.cpp's rules, if the text would not be UTF-8 with it (llama.cpp
skips wrong bytes inside a token), if it contains a NUL (llama.cpp would read only up to it), or if it
adds nothing to the text (llama.cpp would read a control token as its name).
"""

from __future__ import annotations

import contextlib
import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import UsageError
from specgen.llama.token_table import BOUNDARY, INVALID, token_table, utf8_state
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, CachedState, GrammarState
from specgen.text.grammar.gbnf import read_gbnf
from specgen.text.grammar.gbnf_rules import Characters
from specgen.text.grammar.gbnf_states import DEAD, GbnfStates, Stacks, TooManyWaysError

#: A state, and the bytes behind it of a character that is not complete.
_Key: TypeAlias = tuple[Stacks, bytes]

#: For this many tokens or more, find out about all tokens, and remember it.
VERY_MANY = 512
#: The bytes of a character behind its first one.
_LATER = [bytes([byte]) for byte in range(0x80, 0xC0)]
#: The most states that a grammar keeps, with 19 kB each for a vocabulary of 152 thousand tokens.
MOST_STATES = 256


class LlamaGrammar:
    """A grammar over the tokens of a vocabulary, which must stay open while the grammar is made.

    `start` is the state before a text. Several threads may use a grammar.

    Raises `UsageError` if the grammar is not valid, or a text can be read in too many ways. Where that turns out
    later only, nothing more is allowed.
    """

    def __init__(self, vocabulary: LlamaVocabulary, gbnf: str) -> None:
        self.table = token_table(vocabulary)
        self._states: dict[_Key, _LlamaState] = {}
        #: bool[n_tokens]: whether the token may follow a text that ends with a whole character.
        self.usable: BoolArray = self.table.ends_in(BOUNDARY) != INVALID
        try:
            self.stacks = GbnfStates(read_gbnf(gbnf))
            self._classes = self.stacks.classes.of_all(self.table.texts.code_points)
            #: The state before a text.
            self.start: GrammarState = _LlamaState(self, (self.stacks.start, b""))
            self.allowed(self.stacks.start)
        except TooManyWaysError:
            raise UsageError("the grammar can read a text in too many ways") from None

    def state(self, key: _Key) -> _LlamaState:
        """Return the state with this key. The latest of all states are kept."""
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = _LlamaState(self, key)
            self.stacks.allow_for_token()
            if len(self._states) > MOST_STATES:
                with contextlib.suppress(KeyError):  # another thread was here before
                    del self._states[next(iter(self._states))]
        return found

    def key_after(self, key: _Key, piece: bytes) -> _Key | None:
        """Return the key after a token's bytes, with which the text is UTF-8; None if they may not follow. Raise
        `TooManyWaysError`."""
        stacks, tail = key
        whole = tail + piece
        text = whole.decode(errors="ignore")  # without the bytes of an incomplete character
        stacks, rest = self.stacks.after(stacks, text), whole[len(text.encode()) :]
        fits = _may_follow(rest, self.stacks.next_characters(stacks)) if rest else bool(stacks)
        return (stacks, rest) if fits else None

    def allowed(self, stacks: Stacks) -> BoolArray:
        """Return which tokens may follow a text that ends with a whole character, but for end tokens:
        bool[n_tokens]. Raise `TooManyWaysError`."""
        texts = self.table.texts
        found, states = self.stacks.after_texts(stacks, self._classes, texts.starts, texts.lengths)
        fits = found != DEAD
        following: dict[int, set[Characters]] = {}
        may_follow = functools.cache(lambda number, rest: _may_follow(rest, following[number]))
        for index, rest in texts.rests.items():
            if fits[index]:
                number = int(found[index])
                if number not in following:
                    following[number] = self.stacks.next_characters(states[number])
                fits[index] = may_follow(number, rest)
        allowed = np.zeros(len(self.usable), np.bool_)
        allowed[texts.token_ids[fits]] = True
        return allowed


def _may_follow(rest: bytes, following: set[Characters]) -> bool:
    """Return whether a character that begins with these bytes is in one of the sets."""
    return any(each.may_have(*_characters_with(rest)) for each in following)


@functools.cache
def _characters_with(begin: bytes) -> tuple[int, int]:
    """Return the first and last character whose UTF-8 begins with these bytes."""
    low = high = begin
    while utf8_state(low) != BOUNDARY:
        low += next(byte for byte in _LATER if utf8_state(low + byte) != INVALID)
        high += next(byte for byte in reversed(_LATER) if utf8_state(high + byte) != INVALID)
    return ord(low.decode()), ord(high.decode())


class _LlamaState(CachedState):
    """The state of a grammar after texts with the same key. `pending` is the UTF-8 state at their end."""

    __slots__ = ("_allowed", "_following", "_grammar", "_key", "pending")

    def __init__(self, grammar: LlamaGrammar, key: _Key) -> None:
        super().__init__(len(grammar.usable))
        self._grammar = grammar
        self._key = key
        self.pending = utf8_state(key[1])
        #: The keys after allowed tokens. (The states themselves would keep every text.)
        self._following: dict[int, _Key] = {}
        #: Bits of all tokens, as soon as somebody has asked about very many.
        self._allowed: npt.NDArray[np.uint8] | None = None

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = np.asarray(token_ids, np.int64)
        if not len(token_ids):
            return np.zeros(0, np.bool_)
        self._check_exist(token_ids)
        if self._allowed is not None or len(token_ids) >= VERY_MANY:
            found: BoolArray = self._mask()[token_ids]
            return found
        return np.array([self._allows(token_id) for token_id in token_ids.tolist()], np.bool_)

    def _allows(self, token_id: int) -> bool:
        grammar, table = self._grammar, self._grammar.table
        stacks, tail = self._key
        if table.is_end[token_id]:
            return not tail and grammar.stacks.may_end(stacks)
        if token_id in self._following:
            return True
        if table.ends_in(self.pending)[token_id] == INVALID:
            return False
        with contextlib.suppress(TooManyWaysError):
            key = grammar.key_after(self._key, table.pieces[token_id])
            if key is not None:
                self._following[token_id] = key
                return True
        return False

    def _mask(self) -> BoolArray:
        """Return which of all tokens are allowed."""
        grammar, table = self._grammar, self._grammar.table
        if self._allowed is None:
            allowed = np.zeros(len(grammar.usable), np.bool_)
            stacks, tail = self._key
            if tail:
                for token_id in table.continues(self.pending).nonzero()[0].tolist():
                    allowed[token_id] = self._allows(token_id)
            else:
                with contextlib.suppress(TooManyWaysError):
                    allowed = grammar.allowed(stacks)
                allowed[table.end_tokens] = grammar.stacks.may_end(stacks)
            self._allowed = np.packbits(allowed)
        return np.unpackbits(self._allowed, count=len(grammar.usable)).view(np.bool_)

    def after(self, token_id: int) -> GrammarState:
        if not self.allows(np.array([token_id]))[0]:
            raise ValueError(f"the grammar does not allow token {token_id} here")
        return self._make_child(token_id)

    def _make_child(self, token_id: int) -> GrammarState:
        grammar = self._grammar
        if grammar.table.is_end[token_id]:
            return ENDED
        key = self._following.get(token_id)
        if key is None:
            try:
                key = grammar.key_after(self._key, grammar.table.pieces[token_id])
            except TooManyWaysError:
                key = None
            key = self._following[token_id] = key or (frozenset(), b"")
        return grammar.state(key)

    def _find_forced(self) -> int | None:
        """Return the only allowed token, or None. Tokens of one byte are checked first: two of them end the
        search."""
        table = self._grammar.table
        ends = [token for token in table.end_tokens.tolist() if self._allows(token)]
        n_found = len(ends[:1])
        if not self._key[1]:
            for token_id in table.ascii_tokens:
                n_found += self._allows(token_id)
                if n_found > 1:
                    return None
        allowed = self._mask()
        allowed[table.end_tokens] = False
        found = allowed.nonzero()[0][:2].tolist()
        if len(found) + len(ends[:1]) != 1:
            return None
        return ends[0] if ends else int(found[0])
