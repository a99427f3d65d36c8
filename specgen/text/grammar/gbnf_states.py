"""The states of a grammar: after texts with the same state, the same texts may follow.

A state is a set of stacks, as in llama.cpp: each stack has the place of the next character, and below it the
places where the rules around it go on. A set has each stack once, in however many ways a text leads there, while
llama.cpp follows each way: it takes hours for a token that fits into a chain of optional items in many ways.

Successors are computed once, for a character of each class. In most grammars a text comes back to the same few
states, and what was found out about one holds each time.
"""

from __future__ import annotations

import bisect
import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.text.grammar.gbnf_rules import Characters, Element, Gbnf

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


class CharacterClasses(dict[int, int]):
    """Maps a code point to the number of its class."""

    def __init__(self, grammar: Gbnf) -> None:
        super().__init__()
        stretches = grammar.character_classes()
        self._starts = [start for start, _ in stretches]
        self._numbers = [number for _, number in stretches]
        #: A code point of each class.
        self.examples = {number: start for start, number in reversed(stretches)}

    def __missing__(self, code_point: int) -> int:
        number = self._numbers[bisect.bisect_right(self._starts, code_point) - 1]
        self[code_point] = number
        return number

    def of_all(self, code_points: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the classes of many code points, int32[n]."""
        places = np.searchsorted(np.array(self._starts), code_points, "right") - 1
        return np.array(self._numbers, np.int32)[places]


class GbnfStates:
    """The states of a grammar. Several threads may use it. Its methods raise `TooManyWaysError`."""

    def __init__(self, grammar: Gbnf) -> None:
        self._rules = grammar.rules
        self.classes = CharacterClasses(grammar)
        self._stacks: list[_Stack] = []
        self._number_of_stack: dict[_Stack, int] = {}
        self._classes: dict[Characters, list[int]] = {}
        self._lock = threading.RLock()
        self._work, self._work_left = 0, float(_MOST_WORK_IN_ALL)
        self._forget()
        root = grammar.root
        todo = [(root, number, 0, _EMPTY) for number in range(len(self._rules[root]))]
        #: The state before a text.
        self.start: Stacks = self._expanded(todo)

    def allow_for_token(self) -> None:
        """Add the work for another token of a text to what is allowed."""
        self._work_left += _WORK_OF_A_TOKEN

    @staticmethod
    def may_end(state: Stacks) -> bool:
        """Return whether the text may end in a state."""
        return _EMPTY in state

    def after(self, state: Stacks, text: str) -> Stacks:
        """Return the state after more text."""
        with self._lock:
            number = self._begin(state)
            for character in text:
                number = self._following(number, self.classes[ord(character)])
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
        """Return the sets of characters that may come next."""
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
        """Forget what was computed; states that are in use are numbered again."""
        self._states: list[Stacks] = []
        self._number_of_state: dict[Stacks, int] = {}
        self._tops: dict[int, dict[int, list[int]]] = {}
        #: The number of the state after a state and a character of a class.
        self._table = np.full((16, len(self.classes.examples)), _UNKNOWN, np.int32)
        self._n_kept = 0
        self._state(frozenset())

    def _following(self, state: int, kind: int) -> int:
        """Return the number of the state after a state and a character of a class."""
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
            examples = self.classes.examples.items()
            found = [kind for kind, example in examples if characters.has(example)]
            self._classes[characters] = found
        return found

    def _element(self, number: int) -> Characters:
        rule, alternative, index, _ = self._stacks[number]
        element: Element = self._rules[rule][alternative][index]
        assert isinstance(element, Characters)
        return element

    def _expanded(self, todo: list[_Stack]) -> Stacks:
        """Return the stacks with a character on top that these lead to."""
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
            n_alternatives = len(self._rules[element.rule])
            todo += [(element.rule, number, 0, below) for number in range(n_alternatives)]
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
