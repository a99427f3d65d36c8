"""The states of a grammar: after texts with the same state, the same texts may follow.

A state is a set of stacks, as in llama.cpp: each stack has the place of the next character, and below it the
places where the rules around it go on. A set has each stack once, in however many ways a text leads there, while
llama.cpp follows each way: it takes hours for a token that fits into a chain of optional items in many ways.

Successors are computed once, for a character of each class. In most grammars a text comes back to the same few
states, and what was found out about one holds each time.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import UsageError
from specgen.text.grammar.gbnf import ROOT, Characters, Element, Gbnf

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
