"""Translates a grammar from GBNF, llama.cpp's format, to Lark, for llguidance.

llguidance's own translation of GBNF is not used: there `.` excludes the newline, `fooBar` and
`foo-bar` are the same rule, and `("a"*)*` is refused. Here each character becomes a terminal, so
that nothing depends on how a text is split into terminals. Each group and repetition becomes a
rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from specgen.errors import UsageError
from specgen.text.vocabulary import Vocabulary

#: llama.cpp's limit on repetitions. It takes a larger maximum as "any number".
_MAX_REPETITIONS = 2000
#: The maximum number of rules, groups, repetitions and elements in all: llguidance supports 65
#: thousand symbols.
_MAX_ELEMENTS = 50_000
#: The maximum number of groups that are open at once.
_MAX_DEPTH = 1000
#: The maximum number of digits in a number, so that it fits into 64 bits.
_MAX_DIGITS = 18
#: The largest code point.
_LAST_CHARACTER = 0x10FFFF
#: Halves of surrogate pairs, which are not characters.
_SURROGATES = range(0xD800, 0xE000)
_NAME = re.compile("[a-zA-Z0-9_-]+")
_NUMBER = re.compile("[0-9]+")
_TOKEN = re.compile(r"<(?:\[\d{1,18}\]|[^<>\[\r\n][^<>\r\n]*)>")
#: White space and comments within a line, and over several lines.
_SPACE = re.compile("(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile("(?:[ \t\r\n]|#[^\r\n]*)*")
_CHARACTER = re.compile(r"\\?.", re.DOTALL)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
#: The hexadecimal digits after an escape.
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
#: The minimum and maximum number of repetitions for a sign; a maximum of None means any number.
_REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
#: The name of the rule that a text has to follow.
ROOT = "root"

#: Items in Lark: sets of characters, tokens, and rules such as `r5` or, repeated, `r5{0,3}`.
_Sequence: TypeAlias = list[str]


@dataclass(slots=True)
class _OpenGroup:
    """A group that is being read, or a whole rule."""

    #: The number of its rule in Lark.
    rule: int
    #: The alternatives so far; the last one is still being read.
    alternatives: list[_Sequence] = field(default_factory=lambda: [[]])
    #: The index in the last alternative where its last item begins. A repetition sign after the
    #: item applies to everything from there on.
    item_start: int = 0


class GbnfReader:
    """llama.cpp's grammar parser, without its recursion: open groups are on a stack.

    Methods that read something move `position` past it. If it is not there, they raise
    `UsageError` with the line of the grammar.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.text = text
        self.position = 0
        #: The alternatives of each rule; None for one that is mentioned but not defined yet.
        self.rules: list[list[_Sequence] | None] = []
        #: For each rule with a name, its number and the line of its first mention.
        self.named: dict[str, tuple[int, int]] = {}
        self._vocabulary = vocabulary
        self._n_elements = 0
        #: The rule that is being read, and the groups that are open in it.
        self._open: list[_OpenGroup] = []

    def read(self) -> str:
        """Return the grammar in Lark.

        Raises:
            UsageError: If it is not valid.
        """
        if "\0" in self.text:
            raise UsageError("the grammar contains a NUL character")
        if any(ord(character) in _SURROGATES for character in self.text):
            raise UsageError("the grammar is not valid UTF-8")
        self._take(_LINES)
        if not self._next():
            raise UsageError(
                "the grammar is empty", hint='give at least a rule root: root ::= "yes" | "no"'
            )
        while self._next():
            self._read_rule()
        rules = self._checked_rules()
        lines = [f"start: r{self.named[ROOT][0]}"]
        for number, alternatives in enumerate(rules):
            written = " | ".join(" ".join(items) or '""' for items in alternatives)
            lines.append(f"r{number}: {written}")
        return "\n".join(lines)

    def _checked_rules(self) -> list[list[_Sequence]]:
        """Return all rules. Raise `UsageError` if one is missing or derives no text."""
        for name, (rule, line) in self.named.items():
            if self.rules[rule] is None:
                self._fail(f"there is no rule {name!r}", line)
        if ROOT not in self.named:
            names = ", ".join(list(self.named)[:8])
            raise UsageError(f"the grammar has no rule {ROOT!r}", hint=f"it has {names}")
        rules = [rule or [] for rule in self.rules]
        ending = _rules_that_end(rules)
        for name, (rule, line) in self.named.items():
            if rule not in ending:
                self._fail(f"rule {name!r} derives no text at all", line)
        return rules

    # --- characters ---------------------------------------------------------------------

    def _fail(self, problem: str, line: int | None = None) -> NoReturn:
        raise UsageError(f"the grammar, line {line or self._line()}: {problem}")

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _fail_expecting(self, expected: str) -> NoReturn:
        """Raise an error with what was expected at this position, and what is there."""
        found = "the end"
        if self._next():
            rest_of_line = self.text[self.position : self.position + 16].split("\n")[0]
            found = repr(rest_of_line or "line end")
        self._fail(f"expected {expected}, found {found}")

    def _next(self) -> str:
        """Return the next character, without reading it; "" at the end."""
        return self.text[self.position : self.position + 1]

    def _skip(self, sign: str) -> bool:
        """Skip a sign if it comes next; return whether it did."""
        if not self.text.startswith(sign, self.position):
            return False
        self.position += len(sign)
        return True

    def _take(self, pattern: re.Pattern[str], expected: str = "") -> str:
        """Read and return what matches a pattern; `expected` describes it in the error."""
        match = pattern.match(self.text, self.position)
        if match is None:
            self._fail_expecting(expected)
        self.position = match.end()
        return match[0]

    def _skip_space(self) -> None:
        """Skip white space and comments; outside of groups, only up to the end of the line."""
        self._take(_LINES if len(self._open) > 1 else _SPACE)

    def _integer(self) -> int:
        digits = self._take(_NUMBER, "a number")
        if len(digits) > _MAX_DIGITS:
            self._fail(f"the number {digits[:_MAX_DIGITS]}... is too large")
        return int(digits)

    def _code_point(self) -> int:
        """Read a character or an escape, and return its code point."""
        character = self._take(_CHARACTER, "a closing quote or bracket")
        if not character.startswith("\\"):
            return ord(character)
        escape = character[1:]
        if escape in _HEX_DIGITS:
            n = _HEX_DIGITS[escape]
            digits = re.compile(f"[0-9a-fA-F]{{{n}}}")
            return int(self._take(digits, f"{n} hexadecimal digits after {character}"), 16)
        if escape not in _ESCAPES:  # also if the grammar ends here
            self._fail(f"unknown escape {character}")
        return ord(_ESCAPES[escape])

    def _one_of(
        self,
        ranges: list[tuple[int, int]],
        *,
        negated: bool = False,
    ) -> str:
        """Return a set of characters in Lark.

        NUL and halves of surrogate pairs are left out, since no text has them.
        """
        written = ""
        for low, high in ranges:
            # A range that begins or ends among the surrogates is shortened.
            first = 0xE000 if low in _SURROGATES else max(low, 1)
            last = 0xD7FF if high in _SURROGATES else min(high, _LAST_CHARACTER)
            if first <= last:
                written += rf"\u{{{first:X}}}-\u{{{last:X}}}"
        if negated:
            return rf"/[^\u{{0}}{written}]/"
        if not written:
            self._fail("names characters that no text can have")
        return f"/[{written}]/"

    # --- rules --------------------------------------------------------------------------

    def _new_rule(self, alternatives: list[_Sequence] | None = None) -> int:
        """Add a rule, and return its number. Its alternatives may be set later."""
        self.rules.append(alternatives)
        self._count(1)
        return len(self.rules) - 1

    def _count(self, n: int) -> None:
        """Count `n` more elements. Raise `UsageError` if there are too many."""
        self._n_elements += n
        if self._n_elements > _MAX_ELEMENTS:
            self._fail(f"more than {_MAX_ELEMENTS} characters and references")

    def _named_rule(self) -> int:
        """Read the name of a rule, and return its number. A new name gets a new rule."""
        name = self._take(_NAME, "the name of a rule")
        if name not in self.named:
            line = self._line()
            self.named[name] = (self._new_rule(), line)
        return self.named[name][0]

    def _read_rule(self) -> None:
        """Read a whole rule, with its name and the end of its last line."""
        start = self.position
        rule = self._named_rule()
        name = self.text[start : self.position]
        self._take(_SPACE)
        if not self._skip("::="):
            self._fail_expecting(f"::= after {name!r}")
        self._take(_LINES)
        self._open = [_OpenGroup(rule)]
        while self._read_item():
            self._skip_space()
        if len(self._open) > 1:
            self._fail_expecting("')'")
        self.rules[rule] = self._open[0].alternatives
        if self._next() not in ("", "\r", "\n"):
            self._fail_expecting("the end of the line")
        self._take(_LINES)

    def _read_item(self) -> bool:
        """Read an item, or a sign between or after items; return False where the rule ends."""
        sign = self._next()
        if _NAME.match(sign):
            self._add([f"r{self._named_rule()}"])
        elif sign in ("<", "!"):
            self._add([self._token()])
        elif self._skip('"'):
            self._add(self._string())
        elif self._skip("["):
            self._add(self._set())
        elif self._skip("."):
            self._add([self._one_of([], negated=True)])
        elif sign in _REPETITIONS:
            self.position += 1
            self._repeat(*_REPETITIONS[sign])
        elif self._skip("{"):
            self._repeat(*self._bounds())
        else:
            return self._read_structure()
        return True

    def _read_structure(self) -> bool:
        """Read a sign that begins an alternative, or begins or ends a group.

        Returns:
            Whether such a sign came next.
        """
        group = self._open[-1]
        if self._skip("|"):
            group.alternatives.append([])
            group.item_start = 0
            self._take(_LINES)
        elif self._skip("("):
            if len(self._open) > _MAX_DEPTH:
                self._fail(f"groups nested more than {_MAX_DEPTH} deep")
            self._open.append(_OpenGroup(self._new_rule()))
        elif len(self._open) > 1 and self._skip(")"):
            self._open.pop()
            self.rules[group.rule] = group.alternatives
            self._add([f"r{group.rule}"])
        else:
            return False
        return True

    def _add(self, items: _Sequence) -> None:
        """Add items that a repetition sign would repeat together, such as those of a string."""
        self._count(len(items))
        group = self._open[-1]
        sequence = group.alternatives[-1]
        group.item_start = len(sequence)
        sequence.extend(items)

    def _token(self) -> str:
        """Read a token, such as <[42]> or <think>; with `!` before it, any other token."""
        negation = "^" if self._skip("!") else ""
        name = self._take(_TOKEN, "a token, as <[42]> or <think>")
        if name.startswith("<["):
            tokens = [int(name[2:-2])]
        else:
            tokens = self._vocabulary.tokenize_inside(name, parse_special=True)
        if len(tokens) != 1 or tokens[0] >= self._vocabulary.n_tokens:
            self._fail(f"{name} is not one token of this model")
        return f"<[{negation}{tokens[0]}]>"

    def _string(self) -> _Sequence:
        """Read a string up to its closing quote; return an item for each character."""
        characters = []
        while not self._skip('"'):
            code_point = self._code_point()
            characters.append(self._one_of([(code_point, code_point)]))
        return characters

    def _set(self) -> _Sequence:
        """Read a set of characters up to its closing bracket; return it as one item."""
        negated = self._skip("^")
        ranges = []
        while not self._skip("]"):
            low = high = self._code_point()
            if self._next() == "-" and not self.text.startswith("-]", self.position):
                self.position += 1
                high = self._code_point()
                if high < low:
                    self._fail(f"there is nothing from {chr(low)!r} to {chr(high)!r}")
            ranges.append((low, high))
        # In llama.cpp an empty set, negated or not, adds nothing to the rule.
        return [self._one_of(ranges, negated=negated)] if ranges else []

    def _bounds(self) -> tuple[int, int | None]:
        """Read the numbers of repetitions up to the closing brace: minimum and maximum.

        A maximum of None means any number.
        """
        self._skip_space()
        minimum = self._integer()
        maximum: int | None = minimum
        self._skip_space()
        if self._skip(","):
            self._skip_space()
            maximum = self._integer() if _NUMBER.match(self._next()) else None
            self._skip_space()
        if not self._skip("}"):
            self._fail_expecting("'}'")
        if minimum > _MAX_REPETITIONS:
            self._fail(f"{minimum} repetitions; llama.cpp takes {_MAX_REPETITIONS} at most")
        if maximum is None:
            return minimum, None
        if maximum < minimum:
            self._fail(f"at least {minimum} and at most {maximum} repetitions")
        return minimum, maximum if maximum <= _MAX_REPETITIONS else None

    def _repeat(self, minimum: int, maximum: int | None) -> None:
        """Repeat the last item, which becomes a rule; a maximum of None means any number."""
        group = self._open[-1]
        sequence = group.alternatives[-1]
        item = sequence[group.item_start :]
        if not item:
            self._fail("nothing before a repetition")
        one = f"r{self._new_rule([item])}"
        del sequence[group.item_start :]
        if maximum is not None:
            sequence.append(f"{one}{{{minimum},{maximum}}}")
            return
        # The minimum, then any number of further ones, by a rule that refers to itself.
        if minimum:
            sequence.append(f"{one}{{{minimum},{minimum}}}")
        any_number = self._new_rule()
        self.rules[any_number] = [[], [f"r{any_number}", one]]
        sequence.append(f"r{any_number}")


def _rules_that_end(rules: list[list[_Sequence]]) -> set[int]:
    """Return the numbers of the rules that derive a text of finite length.

    These are the rules with an alternative whose items all do so. They are found by adding
    such rules until there are no more.
    """
    ending_rules: set[int] = set()

    def ends(item: str) -> bool:
        if not item.startswith("r"):  # a set of characters, or a token
            return True
        name, _, bounds = item.partition("{")
        return bounds.startswith("0,") or int(name[1:]) in ending_rules

    is_growing = True
    while is_growing:
        n_before = len(ending_rules)
        for number, alternatives in enumerate(rules):
            if any(all(map(ends, items)) for items in alternatives):
                ending_rules.add(number)
        is_growing = len(ending_rules) > n_before
    return ending_rules
