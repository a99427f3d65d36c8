"""Numbers for the states of a grammar: after texts with the same number, the same texts may follow.

A state is a set of stacks, as in llama.cpp: each stack has the place of the next character, and below it the
places where the rules around it go on. States and their successors are computed once. In most grammars a
text comes back to the same few states, and what was found out about one holds each time.
"""

from __future__ import annotations

import bisect
import threading

from specgen.decoding.grammar.gbnf_rules import Characters, Gbnf

#: A place in a grammar, and the stack below it: rule, alternative, index of the element, number of the stack.
_Stack = tuple[int, int, int, int]
#: The number of the empty stack: the text may end.
_EMPTY = -1


class CharacterClasses(dict[int, int]):
    """Maps a code point to the number of its class, for `str.translate` too."""

    def __init__(self, grammar: Gbnf) -> None:
        super().__init__()
        stretches = grammar.character_classes()
        self._starts = [start for start, _ in stretches]
        self._numbers = [number for _, number in stretches]

    def __missing__(self, code_point: int) -> int:
        number = self._numbers[bisect.bisect_right(self._starts, code_point) - 1]
        self[code_point] = number
        return number


class GbnfStates:
    """The states of a grammar. Several threads may use it."""

    def __init__(self, grammar: Gbnf) -> None:
        self._rules = grammar.rules
        self.classes = CharacterClasses(grammar)
        self._stacks: list[_Stack] = []
        self._number_of_stack: dict[_Stack, int] = {}
        self._states: list[frozenset[int]] = []
        self._number_of_state: dict[frozenset[int], int] = {}
        #: The state after a state and a character of a class.
        self._following: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        root = grammar.root
        todo = [(root, number, 0, _EMPTY) for number in range(len(self._rules[root]))]
        self.start = self._state(self._expanded(todo))

    def after(self, state: int, text: str) -> int:
        """Return the state after more text."""
        with self._lock:
            for character in text:
                code_point = ord(character)
                key = state, self.classes[code_point]
                following = self._following.get(key)
                if following is None:
                    following = self._following[key] = self._step(state, code_point)
                state = following
        return state

    def _step(self, state: int, code_point: int) -> int:
        todo: list[_Stack] = []
        for number in self._states[state] - {_EMPTY}:
            rule, alternative, index, below = self._stacks[number]
            element = self._rules[rule][alternative][index]
            if isinstance(element, Characters) and element.has(code_point):
                todo.append((rule, alternative, index + 1, below))
        return self._state(self._expanded(todo))

    def _expanded(self, todo: list[_Stack]) -> frozenset[int]:
        """Return the stacks with a character on top that these lead to."""
        found, seen = set[int](), set[_Stack]()
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
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

    def _stack(self, stack: _Stack) -> int:
        number = self._number_of_stack.setdefault(stack, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(stack)
        return number

    def _state(self, stacks: frozenset[int]) -> int:
        number = self._number_of_state.setdefault(stacks, len(self._states))
        if number == len(self._states):
            self._states.append(stacks)
        return number


__all__ = ["CharacterClasses", "GbnfStates"]
