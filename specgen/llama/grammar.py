"""Grammars (GBNF) on top of llama.cpp's grammar sampler, as states that are values.

llama.cpp decides which tokens may come next. This module avoids needless questions, because a question
takes 0.1 microseconds for a token and a vocabulary may have 152 thousand: texts after which the same may
follow share a state, and with it the answers. It also prevents questions that end the process: a token that
is not allowed in `accept`, or one that does not exist in `apply`.

A token is also refused, beyond llama.cpp's rules, if the text would not be UTF-8 with it (llama.cpp
skips wrong bytes inside a token), if it contains a NUL (llama.cpp would read only up to it), or if it
adds nothing to the text (llama.cpp would read a control token as its name).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from specgen.decoding.grammar.base import ENDED, CachedState, GrammarState
from specgen.decoding.grammar.gbnf import ROOT, read_gbnf
from specgen.decoding.grammar.gbnf_states import GbnfStates
from specgen.errors import UsageError
from specgen.llama.library import forget_log, last_error, llama_cpp
from specgen.llama.token_table import BOUNDARY, INVALID, token_table, utf8_state
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.system.arrays import BoolArray, TokenArray

#: The number of a state, and the bytes behind it of a character that is not complete.
_Key = tuple[int, bytes]

#: llama_token_data of llama.h.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
#: For this many tokens or more, first find out which first bytes may come.
_MANY = 512
#: For this many or more, find out about all tokens, and remember it.
VERY_MANY = 8192
#: The most states that a grammar keeps, with 19 kB each for a vocabulary of 152 thousand tokens.
MOST_STATES = 256
#: The number of tokens in the first question, in a search for a second allowed token.
_CHUNK = 64


class LlamaGrammar:
    """A grammar over the tokens of a vocabulary, which must stay open while the grammar is used.

    `start` is the state before a text. Several threads may use a grammar; a lock lets one at a time ask
    llama.cpp.

    Raises `UsageError` if the grammar is not valid, or llama.cpp does not accept it.
    """

    def __init__(self, vocabulary: LlamaVocabulary, gbnf: str) -> None:
        grammar = read_gbnf(gbnf)
        self.vocabulary = vocabulary
        self.table = token_table(vocabulary)
        self._characters = grammar.characters()
        self.numbers = GbnfStates(grammar)
        self._states: dict[_Key, _LlamaState] = {}
        self._kinds: npt.NDArray[np.int32] | None = None
        self._asker = _Asker(vocabulary.n_tokens)
        #: bool[n_tokens]: whether the token may follow a text that ends with a whole character.
        self.usable: BoolArray = self.table.ends_in(BOUNDARY) != INVALID
        self.usable[self.table.end_tokens] = True
        self.probed = self._probed_bytes()
        forget_log()
        pointer = llama_cpp.llama_sampler_init_grammar(
            vocabulary.handle, gbnf.encode(), ROOT.encode()
        )
        if not pointer:
            raise UsageError(f"llama.cpp does not take the grammar: {last_error()}")
        #: The state before a text.
        self.start: GrammarState = _LlamaState(self, _Sampler(pointer), (self.numbers.start, b""))

    def state(self, key: _Key, make: Callable[[], _LlamaState]) -> _LlamaState:
        """Return the state with this key. The latest of all states are kept."""
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = make()
            if len(self._states) > MOST_STATES:
                with contextlib.suppress(KeyError):  # another thread was here before
                    del self._states[next(iter(self._states))]
        return found

    def ask(self, sampler: _Sampler, token_ids: npt.NDArray[np.integer[Any]]) -> BoolArray:
        """Ask llama.cpp which of the tokens it allows: bool[n]. The tokens must exist."""
        return self._asker.ask(sampler, token_ids)

    def kinds(self) -> npt.NDArray[np.int32]:
        """Return int32[n_tokens]: for each token the first token that the grammar treats alike.

        It treats two texts alike if their characters, one by one, are in the same classes. This is valid
        for tokens of whole characters, after a text that ends with a whole character.
        """
        if self._kinds is None:
            self._kinds = self._find_kinds()
        return self._kinds

    def _find_kinds(self) -> npt.NDArray[np.int32]:
        kinds = np.arange(self.vocabulary.n_tokens, dtype=np.int32)
        classes = self.numbers.classes
        first: dict[str, int] = {}
        whole = self.table.ends_in(BOUNDARY) == BOUNDARY
        for token_id in np.flatnonzero(whole).tolist():
            text = self.table.pieces[token_id].decode().translate(classes)
            kinds[token_id] = first.setdefault(text, token_id)
        return kinds

    def _probed_bytes(self) -> BoolArray:
        """Return bool[257]: whether the token of a single byte can be tested instead of all tokens that
        start with this byte.

        llama.cpp accepts the first byte of a character if some character in its range is allowed. For
        ``[^é]``, however, it refuses the byte as soon as one of these characters is excluded.
        """
        probed = self.table.single >= 0
        if any(
            characters.negated and any(high >= 0x80 for _, high in characters.ranges)
            for characters in self._characters
        ):
            probed[0x80:] = False
        return probed


class _Sampler:
    """Owns one of llama.cpp's grammar samplers. It may be freed after the model."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer

    def advanced(self, token_id: int) -> _Sampler:
        """Return a copy that has accepted a token. The token must be allowed."""
        copy = _Sampler(llama_cpp.llama_sampler_clone(self.pointer))
        llama_cpp.llama_sampler_accept(copy.pointer, token_id)
        return copy

    def __del__(self, free: Callable[[Any], None] = llama_cpp.llama_sampler_free) -> None:
        free(self.pointer)


class _Asker:
    """Asks llama.cpp about tokens, with memory for candidates that is allocated once."""

    def __init__(self, n_tokens: int) -> None:
        self._candidates = np.zeros(n_tokens, _CANDIDATE)
        self._ids = self._candidates["id"]
        self._logits = self._candidates["logit"]
        self._lock = threading.Lock()  # ctypes lets other threads run during native calls
        self._native = llama_cpp.llama_token_data_array(
            data=self._candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data)),
            size=0,
            selected=-1,
            sorted=False,
        )
        self._reference = ctypes.byref(self._native)

    def ask(self, sampler: _Sampler, token_ids: npt.NDArray[np.integer[Any]]) -> BoolArray:
        n = len(token_ids)
        with self._lock:
            self._ids[:n] = token_ids
            self._logits[:n] = 0.0
            self._native.size = n
            llama_cpp.llama_sampler_apply(sampler.pointer, self._reference)
            answer: BoolArray = self._logits[:n] == 0.0  # refused tokens have minus infinity
        return answer


class _LlamaState(CachedState):
    """The state of a grammar after texts with the same key. `pending` is the UTF-8 state at their end."""

    __slots__ = (
        "_allowed",
        "_first_bytes",
        "_following",
        "_grammar",
        "_key",
        "_sampler",
        "pending",
    )

    def __init__(self, grammar: LlamaGrammar, sampler: _Sampler, key: _Key) -> None:
        super().__init__(len(grammar.usable))
        self._grammar = grammar
        self._sampler = sampler
        self._key = key
        self.pending = utf8_state(key[1])
        #: The keys after allowed tokens. (The states themselves would keep every text.)
        self._following: dict[int, _Key] = {}
        self._first_bytes: BoolArray | None = None
        #: Bits of all tokens, as soon as somebody has asked about very many.
        self._allowed: npt.NDArray[np.uint8] | None = None

    def allows(self, token_ids: TokenArray) -> BoolArray:
        token_ids = np.asarray(token_ids, np.int64)
        allowed = np.zeros(len(token_ids), np.bool_)
        if not len(token_ids):
            return allowed
        self._check_exist(token_ids)
        if self.pending == BOUNDARY and len(token_ids) >= VERY_MANY:
            found: BoolArray = self._mask()[token_ids]
            return found
        wanted = self._usable()[token_ids]
        if self.pending == BOUNDARY and (self._first_bytes is not None or len(token_ids) >= _MANY):
            wanted &= self.may_begin()[self._grammar.table.first[token_ids]]
        places = wanted.nonzero()[0]
        if len(places):
            allowed[places] = self._grammar.ask(self._sampler, token_ids[places])
        return allowed

    def _mask(self) -> BoolArray:
        """Return which of all tokens are allowed; ask about one of each kind only."""
        grammar = self._grammar
        if self._allowed is None:
            wanted = grammar.usable & self.may_begin()[grammar.table.first]
            token_ids = wanted.nonzero()[0]
            kinds = grammar.kinds()[token_ids]
            answers = np.zeros(len(wanted), np.bool_)
            answers[kinds] = True
            asked = answers.nonzero()[0]
            answers[asked] = grammar.ask(self._sampler, asked)
            wanted[token_ids] = answers[kinds]
            self._allowed = np.packbits(wanted)
        return np.unpackbits(self._allowed, count=len(grammar.usable)).view(np.bool_)

    def after(self, token_id: int) -> GrammarState:
        if token_id not in self._following and not self.allows(np.array([token_id]))[0]:
            raise ValueError(f"the grammar does not allow token {token_id} here")
        return self._make_child(token_id)

    def _make_child(self, token_id: int) -> GrammarState:
        grammar, sampler = self._grammar, self._sampler
        if grammar.table.is_end[token_id]:
            return ENDED
        key = self._following.get(token_id)
        if key is None:
            key = self._following[token_id] = self._key_after(token_id)
        return grammar.state(key, lambda: _LlamaState(grammar, sampler.advanced(token_id), key))

    def _key_after(self, token_id: int) -> _Key:
        number, tail = self._key
        whole = tail + self._grammar.table.pieces[token_id]
        # It is UTF-8, but for a last character that is not complete.
        text = whole.decode(errors="ignore")
        return self._grammar.numbers.after(number, text), whole[len(text.encode()) :]

    def _usable(self) -> BoolArray:
        """Return bool[n_tokens]: the tokens after which the text is UTF-8 and has grown."""
        if self.pending == BOUNDARY:
            return self._grammar.usable
        return self._grammar.table.continues(self.pending)

    def may_begin(self) -> BoolArray:
        """Return bool[257]: whether an allowed token can begin with this byte (`_NO_BYTE`: with none).
        Call it only after whole characters."""
        if self._first_bytes is None:
            table, probed = self._grammar.table, self._grammar.probed
            possible = np.ones(257, np.bool_)
            possible[:256] = table.begins
            asked = (probed & possible).nonzero()[0]
            if len(asked):
                possible[asked] = self._grammar.ask(self._sampler, table.single[asked])
            self._first_bytes = possible
        return self._first_bytes

    def _find_forced(self) -> int | None:
        """Return the only allowed token, or None. The cheapest tokens are checked first: end tokens, then
        tokens of one byte. If only one first byte is left, the tokens that begin with it follow."""
        ends = self._allowed_ends()
        found: list[int] = []
        for token_ids in self._candidates():
            found += token_ids[self.allows(token_ids)].tolist()
            if len(found) > 1 or (found and ends):
                return None
        return next(iter(found + ends), None)

    def _allowed_ends(self) -> list[int]:
        ends = self._grammar.table.end_tokens
        return ends[self.allows(ends)].tolist() if len(ends) else []

    def _candidates(self) -> Iterator[TokenArray]:
        """Yield all tokens that might be allowed, except end tokens, in portions."""
        table, grammar = self._grammar.table, self._grammar
        if self.pending != BOUNDARY:
            yield from _portions(self._usable().nonzero()[0])
            return
        possible = self.may_begin()
        single = table.single[(possible & grammar.probed).nonzero()[0]]
        yield single[:2]  # all of them are allowed, and two allowed tokens end the search
        if len(single) == 1:
            yield from _portions(self._with_prefix(int(single[0])))
        rest = possible & ~grammar.probed
        if rest[:256].any():
            among = rest[table.first] & grammar.usable & ~table.is_end
            yield from _portions(among.nonzero()[0])

    def _with_prefix(self, single: int) -> TokenArray:
        """Return the other tokens that begin with a token of one byte, and whose second byte may come
        in the state after it."""
        table = self._grammar.table
        then = self.after(single)
        seconds = np.ones(256, np.bool_)
        if isinstance(then, _LlamaState) and then.pending == BOUNDARY:
            seconds = then.may_begin()[:256]
        return table.with_prefix(single, seconds)


def _portions(token_ids: TokenArray) -> Iterator[TokenArray]:
    """Yield the tokens in portions, a small one first: if two tokens in it are allowed, the search ends
    there."""
    start, size = 0, _CHUNK
    while start < len(token_ids):
        yield token_ids[start : start + size]
        start, size = start + size, size * 8
