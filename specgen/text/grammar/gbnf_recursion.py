"""Finds rules of a grammar that would be expanded without end, and rules that derive no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

from specgen.text.grammar.gbnf_rules import Reference, Rule, Sequence


def check_left_recursion(rules: list[Rule], fail: Callable[[int, str], NoReturn]) -> None:
    """Refuse what llama.cpp refuses, and what it should: rules that it would expand forever.

    `fail` is called with the number of the first such rule and what is wrong with it.
    """
    # llama.cpp's check knows a rule to be possibly empty only if it has an empty alternative.
    direct = _leftmost(rules, [[] in rule for rule in rules])
    for rule, _, _ in _in_circles(direct):
        fail(rule, "begins with itself (left recursion); llama.cpp cannot follow it")
    # In truth, one may be empty through others. Then llama.cpp expands the rule without end if
    # something is left to do after each round; otherwise it notices that it was there before.
    empty, begins = _possibly_empty(rules), [False] * len(rules)
    for rule, _, more in _in_circles(_leftmost(rules, empty)):
        if more:
            fail(rule, "begins with itself (left recursion), by way of an empty rule")
    _spread(rules, begins, lambda sequence: _begins(sequence, empty, begins))
    for rule in range(len(rules)):
        if not (begins[rule] or empty[rule]):
            fail(rule, "derives no text at all")


def _in_circles(edges: list[list[tuple[int, bool]]]) -> Iterator[tuple[int, int, bool]]:
    """Yield the edges, and whether more follows there, by which a rule leads back to itself."""
    for component in _components([[to for to, _ in each] for each in edges]):
        members = set(component)
        for rule in component:
            for to, more in edges[rule]:
                if to in members:
                    yield rule, to, more


def _leftmost(rules: list[Rule], empty: list[bool]) -> list[list[tuple[int, bool]]]:
    """Return, for each rule, the rules that its texts may start with, and whether more follows there."""
    found: list[list[tuple[int, bool]]] = []
    for rule in rules:
        edges = []
        for sequence in rule:
            for index, element in enumerate(sequence):
                if not isinstance(element, Reference):
                    break
                edges.append((element.rule, index + 1 < len(sequence)))
                if not empty[element.rule]:
                    break
        found.append(edges)
    return found


def _possibly_empty(rules: list[Rule]) -> list[bool]:
    empty = [False] * len(rules)
    _spread(
        rules,
        empty,
        lambda sequence: all(
            isinstance(element, Reference) and empty[element.rule] for element in sequence
        ),
    )
    return empty


def _begins(sequence: Sequence, empty: list[bool], begins: list[bool]) -> bool:
    """Return whether a text of the sequence can start with a character or token."""
    for element in sequence:
        if not isinstance(element, Reference) or begins[element.rule]:
            return True
        if not empty[element.rule]:
            return False
    return False


def _spread(rules: list[Rule], known: list[bool], holds: Callable[[Sequence], bool]) -> None:
    """Set `known` for rules that have an alternative for which `holds` is true, until nothing changes."""
    users: list[set[int]] = [set() for _ in rules]
    for number, rule in enumerate(rules):
        for sequence in rule:
            for element in sequence:
                if isinstance(element, Reference):
                    users[element.rule].add(number)
    todo = set(range(len(rules)))
    while todo:
        rule_number = todo.pop()
        if not known[rule_number] and any(holds(sequence) for sequence in rules[rule_number]):
            known[rule_number] = True
            todo |= {user for user in users[rule_number] if not known[user]}


def _components(edges: list[list[int]]) -> Iterator[list[int]]:
    """Return the strongly connected components, each after those that it leads to (Tarjan, 1972)."""
    order = [-1] * len(edges)
    lowest = [0] * len(edges)
    on_path = [False] * len(edges)
    path: list[int] = []
    count = 0
    for start in range(len(edges)):
        if order[start] >= 0:
            continue
        calls: list[tuple[int, Iterator[int]]] = []
        pending: int | None = start
        while pending is not None or calls:
            if pending is not None:
                order[pending] = lowest[pending] = count
                count += 1
                path.append(pending)
                on_path[pending] = True
                calls.append((pending, iter(edges[pending])))
                pending = None
            node, following = calls[-1]
            for to in following:
                if order[to] < 0:
                    pending = to
                    break
                if on_path[to]:
                    lowest[node] = min(lowest[node], order[to])
            if pending is not None:
                continue
            calls.pop()
            if calls:
                parent = calls[-1][0]
                lowest[parent] = min(lowest[parent], lowest[node])
            if lowest[node] == order[node]:
                cut = path.index(node)
                component = path[cut:]
                del path[cut:]
                for member in component:
                    on_path[member] = False
                yield component
