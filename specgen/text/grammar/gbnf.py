"""Reads a grammar in GBNF, llama.cpp's form, and says what is wrong with it.

llama.cpp is not asked: it prints its reasons to stderr only, and some grammars that it accepts hang or kill the
process: ``x{5,3}``, rules that begin with themselves by way of an empty rule, rules that derive nothing, deeply
nested groups. This reader expands rules as llama.cpp does and refuses those.
"""

from __future__ import annotations

import string
from collections.abc import Callable
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
_WORD = frozenset(string.ascii_letters + string.digits + "-")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
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
    reader = _Reader(text)
    reader.read()
    return Gbnf([rule or [] for rule in reader.rules], reader.named)


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

    def read(self) -> None:
        if "\0" in self.text:
            raise UsageError("the grammar contains a NUL character")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise UsageError("the grammar is not valid UTF-8")
        self._skip_space(newlines=True)
        if not self._peek():
            raise UsageError(
                "the grammar is empty", hint='give at least a rule root: root ::= "yes" | "no"'
            )
        while self._peek():
            self._read_rule()
        for name, (rule, line) in self.named.items():
            if self.rules[rule] is None:
                self.fail(f"there is no rule {name!r}", line)
        if ROOT not in self.named:
            names = ", ".join(list(self.named)[:8])
            raise UsageError(f"the grammar has no rule {ROOT!r}", hint=f"it has {names}")

    def fail(self, what: str, line: int | None = None) -> NoReturn:
        raise UsageError(f"the grammar, line {line or self._line()}: {what}")

    # --- characters ---------------------------------------------------------------------

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.text[index] if index < len(self.text) else ""

    def _expected(self, what: str) -> NoReturn:
        found = self.text[self.position : self.position + 16].split("\n")[0]
        at_end = self.position >= len(self.text)
        self.fail(f"expected {what}, found {'the end' if at_end else repr(found or 'line end')}")

    def _skip_space(self, *, newlines: bool) -> None:
        blank = " \t\r\n" if newlines else " \t"
        while self._peek():
            if self._peek() == "#":
                while self._peek() and self._peek() not in "\r\n":
                    self.position += 1
            elif self._peek() in blank:
                self.position += 1
            else:
                return

    def _read_while(self, accept: Callable[[str], bool], what: str) -> str:
        start = self.position
        while self._peek() and accept(self._peek()):
            self.position += 1
        if start == self.position:
            self._expected(what)
        return self.text[start : self.position]

    def _name(self) -> str:
        return self._read_while(_WORD.__contains__, "the name of a rule")

    def _integer(self) -> int:
        digits = self._read_while(string.digits.__contains__, "a number")
        if len(digits) > 18:
            self.fail(f"the number {digits[:18]}... is too large")
        return int(digits)

    def _character(self) -> int:
        character = self._peek()
        if not character:
            self._expected("a closing quote or bracket")
        self.position += 1
        if character != "\\":
            return ord(character)
        escape = self._peek()
        self.position += 1
        if escape in _HEX_DIGITS:
            digits = self.text[self.position : self.position + _HEX_DIGITS[escape]]
            if len(digits) < _HEX_DIGITS[escape] or not set(digits) <= set(string.hexdigits):
                self._expected(f"{_HEX_DIGITS[escape]} hexadecimal digits after \\{escape}")
            self.position += len(digits)
            return int(digits, 16)
        if escape not in _ESCAPES:  # also where there is none
            self.fail(f"unknown escape \\{escape}")
        return ord(_ESCAPES[escape])

    # --- rules --------------------------------------------------------------------------

    def _new_rule(self) -> int:
        self.rules.append(None)
        return len(self.rules) - 1

    def _named_rule(self, name: str) -> int:
        if name not in self.named:
            self.named[name] = (self._new_rule(), self._line())
        return self.named[name][0]

    def _count(self, n: int) -> None:
        self._n_elements += n
        if self._n_elements > _MAX_ELEMENTS:
            self.fail(
                f"more than {_MAX_ELEMENTS} characters and references, repetitions written out"
            )

    def _read_rule(self) -> None:
        name = self._name()
        self._skip_space(newlines=False)
        if self.text[self.position : self.position + 3] != "::=":
            self._expected(f"::= after {name!r}")
        rule = self._named_rule(name)
        self.position += 3
        self._skip_space(newlines=True)
        self._open = [_Open(rule, [[]])]
        while self._read_item():
            pass
        if len(self._open) > 1:
            self._expected("')'")
        self.rules[rule] = self._open[0].alternatives
        if self._peek() and self._peek() not in "\r\n":
            self._expected("the end of the line")
        self._skip_space(newlines=True)

    def _read_item(self) -> bool:
        character = self._peek()
        if not character:
            return False
        if character in _WORD:
            self._add([Reference(self._named_rule(self._name()))])
        elif character in self._READERS:
            self._READERS[character](self)
        elif not (character == ")" and len(self._open) > 1):
            return False
        else:
            self._close_group()
        self._skip_space(newlines=len(self._open) > 1)
        return True

    def _add(self, elements: Sequence) -> None:
        inner = self._open[-1]
        inner.item_start = len(inner.sequence)
        self._count(len(elements))
        inner.sequence.extend(elements)

    def _literal(self) -> None:
        self.position += 1
        elements: Sequence = []
        while self._peek() != '"':
            code_point = self._character()
            elements.append(Characters(((code_point, code_point),)))
        self.position += 1
        self._add(elements)

    def _set(self) -> None:
        self.position += 1
        negated = self._peek() == "^"
        self.position += negated
        ranges = []
        while self._peek() != "]":
            low = high = self._character()
            if self._peek() == "-" and self._peek(1) != "]":
                self.position += 1
                high = self._character()
                if high < low:
                    self.fail(f"there is nothing from {chr(low)!r} to {chr(high)!r}")
            ranges.append((low, high))
        self.position += 1
        # An empty set adds nothing to the rule, negated or not: llama.cpp's reading.
        self._add([Characters(tuple(ranges), negated)] if ranges else [])

    def _any(self) -> None:
        self.position += 1
        self._add([Characters((), negated=True)])

    def _token(self) -> NoReturn:
        # llama.cpp's two halves disagree about a token whose first characters fit and which
        # the rest of the rule names: one allows it, the other ends the process over it.
        end = self.text.find(">", self.position) + 1
        shown = self.text[self.position : min(end or len(self.text), self.position + 40)]
        self.fail(f"names a token, {shown.splitlines()[0]}: only characters are supported")

    def _alternative(self) -> None:
        self.position += 1
        inner = self._open[-1]
        inner.alternatives.append([])
        inner.item_start = 0
        self._skip_space(newlines=True)

    def _open_group(self) -> None:
        if len(self._open) > _MAX_DEPTH:
            self.fail(f"groups nested more than {_MAX_DEPTH} deep")
        self.position += 1
        self._open.append(_Open(self._new_rule(), [[]]))

    def _close_group(self) -> None:
        self.position += 1
        group = self._open.pop()
        self.rules[group.rule] = group.alternatives
        self._add([Reference(group.rule)])

    def _sign(self) -> None:
        sign = self._peek()
        self.position += 1
        self._repeat(1 if sign == "+" else 0, 1 if sign == "?" else None)

    def _braces(self) -> None:
        nested = len(self._open) > 1
        self.position += 1
        self._skip_space(newlines=nested)
        least = self._integer()
        self._skip_space(newlines=nested)
        most: int | None = least
        if self._peek() == ",":
            self.position += 1
            self._skip_space(newlines=nested)
            most = self._integer() if self._peek() in string.digits and self._peek() else None
            self._skip_space(newlines=nested)
        if self._peek() != "}":
            self._expected("'}'")
        self.position += 1
        if least > _MAX_REPETITIONS:
            self.fail(f"{least} repetitions; llama.cpp takes {_MAX_REPETITIONS} at most")
        if most is not None and most < least:  # llama.cpp would make 2^64 rules
            self.fail(f"at least {least} and at most {most} repetitions")
        self._repeat(least, None if most is not None and most > _MAX_REPETITIONS else most)

    def _repeat(self, least: int, most: int | None) -> None:
        """Repeat an item: x{2,4} is x x (x (x)?)?, and x* is a rule of its own, y ::= x y |"""
        inner = self._open[-1]
        sequence = inner.sequence
        item = sequence[inner.item_start :]
        if not item:
            self.fail("nothing before a repetition")
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

    _READERS: dict[str, Callable[[_Reader], None]] = {  # noqa: RUF012
        '"': _literal,
        "[": _set,
        "<": _token,
        "!": _token,
        ".": _any,
        "(": _open_group,
        "|": _alternative,
        "*": _sign,
        "+": _sign,
        "?": _sign,
        "{": _braces,
    }
