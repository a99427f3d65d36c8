"""Grammars in GBNF over the tokens of a vocabulary, as states that are values.

The tokens that llama.cpp's grammar sampler allows are allowed, and no others. It is not asked, since it follows each
way in which a text can be read by itself: it takes hours for a token that fits into a chain of optional items in many
ways. Here a state (`GbnfStates`) is a set of stacks, and has each stack once, in however many ways a text leads there.
A stack has the place of the next character, and below it the places where the rules around it go on. Successors are
computed once, for a character of each class. In most grammars a text comes back to the same few states.

A token is also refused, beyond llama.cpp's rules, if the text would not be UTF-8 with it (llama.cpp
skips wrong bytes inside a token), if it contains a NUL (llama.cpp would read only up to it), or if it
adds nothing to the text (llama.cpp would read a control token as its name).
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import threading
import weakref
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.system.arrays import BoolArray, TokenArray
from specgen.text.grammar.base import ENDED, GrammarState, State, Vocabulary
from specgen.text.grammar.gbnf import ROOT, Characters, Element, Gbnf, read_gbnf

#: The numbers of its stacks. Without any, no text may follow.
Stacks: TypeAlias = frozenset[int]
#: A place in a grammar, and the stack below it: rule, alternative, index of the element, number of the stack.
_Stack: TypeAlias = tuple[int, int, int, int]
#: The number of the empty stack: the text may end.
_EMPTY = -1
#: The number of the state without stacks, and a successor that is not known yet.
DEAD = 0
_UNKNOWN = -1
#: The most stacks that are followed for one question, about half a second; for all questions, and more for each
#: token of a text.
_MOST_WORK = 200_000
_MOST_WORK_IN_ALL, _WORK_OF_A_TOKEN = 2_000_000, 5_000
#: The most numbers that are kept of states and their successors.
_MOST_KEPT = 8_000_000


class TooManyWaysError(Exception):
    """A question takes too long: texts can be read in too many ways. All later questions raise it at once."""


class GbnfStates:
    """The states of a grammar. Several threads may use it. Its methods raise `TooManyWaysError`.

    Raises `UsageError` if a rule derives no text, begins with itself, or can be read in too many ways."""

    def __init__(self, grammar: Gbnf) -> None:
        self._rules = grammar.rules
        stretches = grammar.character_classes()
        self._class_starts = np.array([start for start, _ in stretches], np.int32)
        self._class_numbers = np.array([number for _, number in stretches], np.int32)
        self._n_classes = len(set(self._class_numbers.tolist()))
        self._stacks: list[_Stack] = []
        self._number_of_stack: dict[_Stack, int] = {}
        self._classes: dict[Characters, list[int]] = {}
        self._lock = threading.RLock()
        for name, (rule, line) in grammar.named.items():
            self._work, self._work_left = 0, float(_MOST_WORK_IN_ALL)
            problem = "derives no text at all"
            try:
                is_possible = bool(self._expanded(self._begin_of(rule)))
            except TooManyWaysError:
                is_possible = False
                problem = "begins with itself (left recursion), or can be read in too many ways"
            if not is_possible:
                raise UsageError(f"the grammar, line {line}: rule {name!r} {problem}")
        self._forget()
        #: The state before a text.
        self.start: Stacks = self._expanded(self._begin_of(grammar.named[ROOT][0]))

    def _begin_of(self, rule: int, below: int = _EMPTY) -> list[_Stack]:
        return [(rule, number, 0, below) for number in range(len(self._rules[rule]))]

    def classes_of(self, code_points: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        found: npt.NDArray[np.int32] = self._class_numbers[
            np.searchsorted(self._class_starts, code_points, "right") - 1
        ]
        return found

    def allow_for_token(self) -> None:
        self._work_left += _WORK_OF_A_TOKEN

    @staticmethod
    def may_end(state: Stacks) -> bool:
        return _EMPTY in state

    def after(self, state: Stacks, text: str) -> Stacks:
        with self._lock:
            number = self._begin(state)
            code_points = np.frombuffer(text.encode("utf-32-le"), "<i4")
            for kind in self.classes_of(code_points).tolist():
                number = self._following(number, kind)
            return self._states[number]

    def after_texts(
        self,
        state: Stacks,
        classes: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int32], list[Stacks]]:
        """Return the states after many texts: int32[n], indices in the list of states. `classes` are those of the
        characters of all texts, one text behind the other; `starts` and `lengths` say where each text is."""
        with self._lock:
            found = np.full(len(starts), self._begin(state), np.int32)
            alive, depth = lengths.nonzero()[0], 0
            while len(alive):
                numbers, kinds = found[alive], classes[starts[alive] + depth]
                following = self._table[numbers, kinds]
                unknown = following == _UNKNOWN
                if unknown.any():
                    n_classes = self._table.shape[1]
                    pairs = numbers[unknown].astype(np.int64) * n_classes + kinds[unknown]
                    for pair in np.unique(pairs).tolist():
                        self._following(*divmod(pair, n_classes))
                    following = self._table[numbers, kinds]
                found[alive] = following
                depth += 1
                alive = alive[(following != DEAD) & (lengths[alive] > depth)]
            return found, self._states

    def next_characters(self, state: Stacks) -> set[Characters]:
        return {self._element(number) for number in state - {_EMPTY}}

    def _begin(self, state: Stacks) -> int:
        """Begin a question about a state, and return its number."""
        if self._work_left < 0:
            raise TooManyWaysError
        if self._n_kept > _MOST_KEPT:
            self._forget()
        self._work = 0
        return self._state(state)

    def _forget(self) -> None:
        self._states: list[Stacks] = []
        self._number_of_state: dict[Stacks, int] = {}
        self._tops: dict[int, dict[int, list[int]]] = {}
        #: The number of the state after a state and a character of a class.
        self._table = np.full((16, self._n_classes), _UNKNOWN, np.int32)
        self._n_kept = 0
        self._state(frozenset())

    def _following(self, state: int, kind: int) -> int:
        number = int(self._table[state, kind])
        if number == _UNKNOWN:
            todo: list[_Stack] = []
            for stack in self._by_class(state).get(kind, ()):
                rule, alternative, index, below = self._stacks[stack]
                todo.append((rule, alternative, index + 1, below))
            number = self._state(self._expanded(todo))
            self._table[state, kind] = number
        return number

    def _by_class(self, state: int) -> dict[int, list[int]]:
        """Return the stacks of a state by the classes of the characters that may come next in them."""
        found = self._tops.get(state)
        if found is None:
            found = self._tops[state] = {}
            for stack in self._states[state] - {_EMPTY}:
                classes = self._classes_of(self._element(stack))
                self._count(len(classes))
                for kind in classes:
                    found.setdefault(kind, []).append(stack)
        return found

    def _classes_of(self, characters: Characters) -> list[int]:
        found = self._classes.get(characters)
        if found is None:
            starts, numbers = self._class_starts.tolist(), self._class_numbers.tolist()
            kinds = dict(zip(numbers, starts, strict=True))
            found = [
                kind
                for kind, code_point in kinds.items()
                if characters.may_have(code_point, code_point)
            ]
            self._classes[characters] = found
        return found

    def _element(self, number: int) -> Characters:
        rule, alternative, index, _ = self._stacks[number]
        element: Element = self._rules[rule][alternative][index]
        assert isinstance(element, Characters)
        return element

    def _expanded(self, todo: list[_Stack]) -> Stacks:
        found, seen = set[int](), set[_Stack]()
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            self._count(1)
            rule, alternative, index, below = stack
            sequence = self._rules[rule][alternative]
            if index == len(sequence):
                if below == _EMPTY:
                    found.add(_EMPTY)
                else:
                    todo.append(self._stacks[below])
                continue
            element = sequence[index]
            if isinstance(element, Characters):
                found.add(self._stack(stack))
                continue
            if index + 1 < len(sequence):  # else nothing is left to do here
                below = self._stack((rule, alternative, index + 1, below))
            todo += self._begin_of(element.rule, below)
        return frozenset(found)

    def _count(self, n: int) -> None:
        self._work += n
        self._work_left -= n
        if self._work > _MOST_WORK:
            self._work_left = float("-inf")  # so that later questions are not asked
            raise TooManyWaysError

    def _stack(self, stack: _Stack) -> int:
        number = self._number_of_stack.setdefault(stack, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(stack)
        return number

    def _state(self, stacks: Stacks) -> int:
        number = self._number_of_state.setdefault(stacks, len(self._states))
        if number == len(self._states):
            self._states.append(stacks)
            self._n_kept += 2 * len(stacks) + self._table.shape[1]
            if number == len(self._table):
                more = np.full_like(self._table, _UNKNOWN)
                self._table = np.concatenate((self._table, more))
        return number


# --- over the tokens of a vocabulary --------------------------------------------------------------

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
