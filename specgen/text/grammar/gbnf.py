"""Reads a grammar in GBNF, llama.cpp's form, and says what is wrong with it.

llama.cpp is not asked: it prints its reasons to stderr only, and some grammars that it accepts hang or kill the
process: ``x{5,3}``, rules that begin with themselves by way of an empty rule, rules that derive nothing, deeply
nested groups. This reader expands rules as llama.cpp does and refuses those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from specgen.errors import UsageError

#: llama.cpp's own limit on repetitions; a larger maximum means "any number" to it.
_MAX_REPETITIONS = 2000
#: The most elements of all rules, with repetitions written out: llama.cpp copies them all for each state.
_MAX_ELEMENTS = 50_000
#: llama.cpp's parser calls itself this deep.
_MAX_DEPTH = 1000

_LAST_CHARACTER = 0x10FFFF
_NAME, _NUMBER = re.compile("[a-zA-Z0-9-]+"), re.compile("[0-9]+")
#: Blanks and comments within a line, and over several.
_SPACE, _LINES = re.compile("(?:[ \t]|#[^\r\n]*)*"), re.compile("(?:[ \t\r\n]|#[^\r\n]*)*")
_CHARACTER = re.compile(r"\\?.", re.DOTALL)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX = {key: (n, re.compile(f"[0-9a-fA-F]{{{n}}}")) for key, n in (("x", 2), ("u", 4), ("U", 8))}
_REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
#: The rule that a text has to follow.
ROOT = "root"


@dataclass(frozen=True, slots=True)
class Characters:
    """One character in any of these ranges (both ends included), or in none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

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


@dataclass(frozen=True, slots=True)
class Gbnf:
    """The rules of a grammar, repetitions written out."""

    rules: list[Rule]
    #: The numbers of the rules that have names of their own, and the lines where these are first named.
    named: dict[str, tuple[int, int]]

    def character_classes(self) -> list[tuple[int, int]]:
        """Return (first code point, class) of ranges of code points, in ascending order.

        Characters of one class are matched by the same elements: to the grammar, texts that
        differ only in characters of the same class are one.
        """
        elements = (element for rule in self.rules for sequence in rule for element in sequence)
        sets = {element for element in elements if isinstance(element, Characters)}
        starts = {0}
        for characters in sets:
            starts |= {end for low, high in characters.ranges for end in (low, high + 1)}
        ordered = sorted(start for start in starts if start <= _LAST_CHARACTER)
        index = {start: number for number, start in enumerate(ordered)}
        members = [0] * len(ordered)  # bit k: in the ranges of the k-th set
        for k, characters in enumerate(sets):
            for low, high in characters.ranges:
                end = index.get(high + 1, len(ordered))
                for number in range(index.get(low, end), end):
                    members[number] |= 1 << k
        numbers: dict[int, int] = {}
        return [
            (start, numbers.setdefault(member, len(numbers)))
            for start, member in zip(ordered, members, strict=True)
        ]


def read_gbnf(text: str) -> Gbnf:
    """Read a grammar. Raise `UsageError` if it is not valid."""
    return _Reader(text).read()


@dataclass(slots=True)
class _Open:
    """A rule or a group that is being read."""

    rule: int
    alternatives: Rule
    #: Where in the last alternative the item begins that a repetition sign would repeat.
    item_start: int = 0

    @property
    def sequence(self) -> Sequence:
        return self.alternatives[-1]


class _Reader:
    """llama.cpp's grammar parser, without its recursion."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.rules: list[Rule | None] = []
        #: Ids and lines of first mention of the rules that have names of their own.
        self.named: dict[str, tuple[int, int]] = {}
        self._n_elements = 0
        self._open: list[_Open] = []

    def read(self) -> Gbnf:
        if "\0" in self.text:
            raise UsageError("the grammar contains a NUL character")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise UsageError("the grammar is not valid UTF-8")
        self._take(_LINES)
        if not self._next():
            raise UsageError(
                "the grammar is empty", hint='give at least a rule root: root ::= "yes" | "no"'
            )
        while self._next():
            self._read_rule()
        for name, (rule, line) in self.named.items():
            if self.rules[rule] is None:
                self._fail(f"there is no rule {name!r}", line)
        if ROOT not in self.named:
            names = ", ".join(list(self.named)[:8])
            raise UsageError(f"the grammar has no rule {ROOT!r}", hint=f"it has {names}")
        return Gbnf([rule or [] for rule in self.rules], self.named)

    # --- characters ---------------------------------------------------------------------

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _fail(self, what: str, line: int | None = None) -> NoReturn:
        raise UsageError(f"the grammar, line {line or self._line()}: {what}")

    def _expected(self, what: str) -> NoReturn:
        found = self.text[self.position : self.position + 16].split("\n")[0]
        self._fail(
            f"expected {what}, found {repr(found or 'line end') if self._next() else 'the end'}"
        )

    def _next(self) -> str:
        return self.text[self.position : self.position + 1]

    def _has(self, sign: str) -> bool:
        """Read a sign if it comes next."""
        is_next = self.text.startswith(sign, self.position)
        self.position += len(sign) if is_next else 0
        return is_next

    def _take(self, pattern: re.Pattern[str], what: str = "") -> str:
        """Read what fits a pattern, and raise `UsageError` if nothing does."""
        found = pattern.match(self.text, self.position)
        if found is None:
            self._expected(what)
        self.position = found.end()
        return found[0]

    def _skip_space(self) -> None:
        self._take(_LINES if len(self._open) > 1 else _SPACE)

    def _integer(self) -> int:
        digits = self._take(_NUMBER, "a number")
        if len(digits) > 18:
            self._fail(f"the number {digits[:18]}... is too large")
        return int(digits)

    def _character(self) -> int:
        character = self._take(_CHARACTER, "a closing quote or bracket")
        if not character.startswith("\\"):
            return ord(character)
        escape = character[1:]
        if escape in _HEX:
            n_digits, pattern = _HEX[escape]
            return int(self._take(pattern, f"{n_digits} hexadecimal digits after {character}"), 16)
        if escape not in _ESCAPES:  # also where there is none
            self._fail(f"unknown escape {character}")
        return ord(_ESCAPES[escape])

    # --- rules --------------------------------------------------------------------------

    def _new_rule(self) -> int:
        self.rules.append(None)
        return len(self.rules) - 1

    def _named_rule(self) -> int:
        name = self._take(_NAME, "the name of a rule")
        if name not in self.named:
            self.named[name] = (self._new_rule(), self._line())
        return self.named[name][0]

    def _count(self, n: int) -> None:
        self._n_elements += n
        if self._n_elements > _MAX_ELEMENTS:
            self._fail(
                f"more than {_MAX_ELEMENTS} characters and references, repetitions written out"
            )

    def _read_rule(self) -> None:
        start = self.position
        rule = self._named_rule()
        name = self.text[start : self.position]
        self._take(_SPACE)
        if not self._has("::="):
            self._expected(f"::= after {name!r}")
        self._take(_LINES)
        self._open = [_Open(rule, [[]])]
        while self._read_item():
            self._skip_space()
        if len(self._open) > 1:
            self._expected("')'")
        self.rules[rule] = self._open[0].alternatives
        if self._next() not in ("", "\r", "\n"):
            self._expected("the end of the line")
        self._take(_LINES)

    def _read_item(self) -> bool:
        """Read an item, or a sign between or behind items. Return False where the rule ends."""
        sign = self._next()
        if _NAME.match(sign):
            self._add([Reference(self._named_rule())])
        elif sign in ("<", "!"):
            # llama.cpp's two halves disagree about a token whose first characters fit and which
            # the rest of the rule names: one allows it, the other ends the process over it.
            end = self.text.find(">", self.position) + 1
            shown = self.text[self.position : min(end or len(self.text), self.position + 40)]
            self._fail(f"names a token, {shown.splitlines()[0]}: only characters are supported")
        elif self._has('"'):
            elements: Sequence = []
            while not self._has('"'):
                code_point = self._character()
                elements.append(Characters(((code_point, code_point),)))
            self._add(elements)
        elif self._has("["):
            self._add(self._set())
        elif self._has("."):
            self._add([Characters((), negated=True)])
        elif sign in _REPETITIONS or sign == "{":
            self.position += 1
            self._repeat(*(_REPETITIONS[sign] if sign in _REPETITIONS else self._bounds()))
        else:
            return self._read_structure()
        return True

    def _read_structure(self) -> bool:
        """Read a sign that begins an alternative or a group, or ends a group, if one comes next."""
        if self._has("|"):
            self._open[-1].alternatives.append([])
            self._open[-1].item_start = 0
            self._take(_LINES)
        elif self._has("("):
            if len(self._open) > _MAX_DEPTH:
                self._fail(f"groups nested more than {_MAX_DEPTH} deep")
            self._open.append(_Open(self._new_rule(), [[]]))
        elif len(self._open) > 1 and self._has(")"):
            group = self._open.pop()
            self.rules[group.rule] = group.alternatives
            self._add([Reference(group.rule)])
        else:
            return False
        return True

    def _add(self, elements: Sequence) -> None:
        inner = self._open[-1]
        inner.item_start = len(inner.sequence)
        self._count(len(elements))
        inner.sequence.extend(elements)

    def _set(self) -> Sequence:
        negated = self._has("^")
        ranges = []
        while not self._has("]"):
            low = high = self._character()
            if self._next() == "-" and not self.text.startswith("-]", self.position):
                self.position += 1
                high = self._character()
                if high < low:
                    self._fail(f"there is nothing from {chr(low)!r} to {chr(high)!r}")
            ranges.append((low, high))
        # An empty set adds nothing to the rule, negated or not: llama.cpp's reading.
        return [Characters(tuple(ranges), negated)] if ranges else []

    def _bounds(self) -> tuple[int, int | None]:
        self._skip_space()
        least = self._integer()
        most: int | None = least
        self._skip_space()
        if self._has(","):
            self._skip_space()
            most = self._integer() if _NUMBER.match(self._next()) else None
            self._skip_space()
        if not self._has("}"):
            self._expected("'}'")
        if least > _MAX_REPETITIONS:
            self._fail(f"{least} repetitions; llama.cpp takes {_MAX_REPETITIONS} at most")
        if most is not None and most < least:  # llama.cpp would make 2^64 rules
            self._fail(f"at least {least} and at most {most} repetitions")
        return least, None if most is not None and most > _MAX_REPETITIONS else most

    def _repeat(self, least: int, most: int | None) -> None:
        """Repeat an item: x{2,4} is x x (x (x)?)?, and x* is a rule of its own, y ::= x y |"""
        inner = self._open[-1]
        sequence = inner.sequence
        item = sequence[inner.item_start :]
        if not item:
            self._fail("nothing before a repetition")
        n_optional = 1 if most is None else most - least
        self._count(max(0, least - 1) * len(item) + n_optional * (len(item) + 1))
        if least == 0:
            del sequence[inner.item_start :]
        else:
            sequence.extend(item * (least - 1))
        last: int | None = None
        for _ in range(n_optional):
            rule = self._new_rule()
            tail = rule if most is None else last
            self.rules[rule] = [[*item, *([] if tail is None else [Reference(tail)])], []]
            last = rule
        if last is not None:
            sequence.append(Reference(last))
