"""The rules of a grammar in GBNF's structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

_LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Characters:
    """One character in any of these ranges (both ends included), or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def has(self, code_point: int) -> bool:
        """Return whether a character is one of these."""
        return any(low <= code_point <= high for low, high in self.ranges) != self.negated

    def may_have(self, first: int, last: int) -> bool:
        """Return whether one of the characters in a range is one of these. Like llama.cpp, this is False for a
        negated set that excludes any of them."""
        return any(low <= last and first <= high for low, high in self.ranges) != self.negated


@dataclass(frozen=True, slots=True)
class Reference:
    """A text that another rule derives."""

    rule: int


Element: TypeAlias = Characters | Reference
Sequence: TypeAlias = list[Element]
#: The alternatives of a rule.
Rule: TypeAlias = list[Sequence]

ANY_CHARACTER = Characters((), negated=True)


@dataclass(frozen=True, slots=True)
class Gbnf:
    """The rules of a grammar that llama.cpp can work with, repetitions written out."""

    rules: list[Rule]
    #: The rule that a whole text derives.
    root: int = 0

    def elements(self) -> Iterator[Element]:
        for rule in self.rules:
            for sequence in rule:
                yield from sequence

    def characters(self) -> set[Characters]:
        """Return the sets of characters that the grammar distinguishes."""
        return {element for element in self.elements() if isinstance(element, Characters)}

    def character_classes(self) -> list[tuple[int, int]]:
        """Return (first code point, class) of ranges of code points, in ascending order.

        Characters of one class are matched by the same elements: to the grammar, texts that
        differ only in characters of the same class are one.
        """
        sets = self.characters()
        starts = {0}
        for characters in sets:
            for low, high in characters.ranges:
                starts |= {low, high + 1}
        ordered = sorted(start for start in starts if start <= _LAST_CHARACTER)
        index = {start: number for number, start in enumerate(ordered)}
        members = [0] * len(ordered)  # bit k: matched by the k-th set
        for k, characters in enumerate(sets):
            for low, high in characters.ranges:
                for number in range(
                    index.get(low, len(ordered)), index.get(high + 1, len(ordered))
                ):
                    members[number] |= 1 << k
        numbers: dict[int, int] = {}
        return [
            (start, numbers.setdefault(member, len(numbers)))
            for start, member in zip(ordered, members, strict=True)
        ]
