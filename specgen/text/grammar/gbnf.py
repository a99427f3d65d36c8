"""Reads a grammar in GBNF, llama.cpp's form, and writes it in Lark for llguidance.

llguidance's own reader of GBNF is not used: there `.` excludes the newline, `fooBar` and `foo-bar`
are one rule, and `("a"*)*` is refused. Here each character is a terminal of its own, so that
nothing depends on how a text is cut into terminals, and each group and repetition is a rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from specgen.errors import UsageError
from specgen.text.vocabulary import Vocabulary

#: llama.cpp's own limit on repetitions; a larger maximum means "any number" to it.
_MAX_REPETITIONS = 2000
#: The most rules, groups and repetitions, and elements in them: llguidance takes 65 thousand
#: symbols.
_MAX_ELEMENTS = 50_000
#: The most groups that are open at once.
_MAX_DEPTH = 1000
_MAX_DIGITS = 18
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
#: The least and the most repetitions of a sign; None means any number.
_REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
#: The rule that a text has to follow.
ROOT = "root"

#: Items in Lark: sets of characters, tokens, and rules such as `r5` or, repeated, `r5{0,3}`.
_Sequence: TypeAlias = list[str]


@dataclass(slots=True)
class _OpenGroup:
    """A group that is being read, or a whole rule."""

    rule: int
    alternatives: list[_Sequence] = field(default_factory=lambda: [[]])
    #: Where the last item begins in the last alternative: a repetition sign would repeat it.
    item_start: int = 0


class GbnfReader:
    """llama.cpp's grammar parser, without its recursion."""

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
            UsageError: It is not valid.
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
        found = "the end"
        if self._next():
            rest_of_line = self.text[self.position : self.position + 16].split("\n")[0]
            found = repr(rest_of_line or "line end")
        self._fail(f"expected {expected}, found {found}")

    def _next(self) -> str:
        """Return the next character; nothing at the end."""
        return self.text[self.position : self.position + 1]

    def _has(self, sign: str) -> bool:
        """Skip a sign if it comes next, and return whether it does."""
        if not self.text.startswith(sign, self.position):
            return False
        self.position += len(sign)
        return True

    def _take(self, pattern: re.Pattern[str], expected: str = "") -> str:
        """Read what matches a pattern."""
        found = pattern.match(self.text, self.position)
        if found is None:
            self._fail_expecting(expected)
        self.position = found.end()
        return found[0]

    def _skip_space(self) -> None:
        self._take(_LINES if len(self._open) > 1 else _SPACE)

    def _integer(self) -> int:
        digits = self._take(_NUMBER, "a number")
        if len(digits) > _MAX_DIGITS:
            self._fail(f"the number {digits[:_MAX_DIGITS]}... is too large")
        return int(digits)

    def _code_point(self) -> int:
        """Read a character, or an escape."""
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

    def _one_of(self, ranges: list[tuple[int, int]], *, negated: bool = False) -> str:
        """Write a set of characters. A text has no NUL and no half of a surrogate pair."""
        written = ""
        for low, high in ranges:
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
        self.rules.append(alternatives)
        self._count(1)
        return len(self.rules) - 1

    def _count(self, n: int) -> None:
        self._n_elements += n
        if self._n_elements > _MAX_ELEMENTS:
            self._fail(f"more than {_MAX_ELEMENTS} characters and references")

    def _named_rule(self) -> int:
        name = self._take(_NAME, "the name of a rule")
        if name not in self.named:
            line = self._line()
            self.named[name] = (self._new_rule(), line)
        return self.named[name][0]

    def _read_rule(self) -> None:
        start = self.position
        rule = self._named_rule()
        name = self.text[start : self.position]
        self._take(_SPACE)
        if not self._has("::="):
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
        """Read an item, or a sign between or after items. Return False where the rule ends."""
        sign = self._next()
        if _NAME.match(sign):
            self._add([f"r{self._named_rule()}"])
        elif sign in ("<", "!"):
            self._add([self._token()])
        elif self._has('"'):
            self._add(self._string())
        elif self._has("["):
            self._add(self._set())
        elif self._has("."):
            self._add([self._one_of([], negated=True)])
        elif sign in _REPETITIONS:
            self.position += 1
            self._repeat(*_REPETITIONS[sign])
        elif self._has("{"):
            self._repeat(*self._bounds())
        else:
            return self._read_structure()
        return True

    def _read_structure(self) -> bool:
        """Read a sign that begins an alternative or a group, or ends a group, if one comes next."""
        inner = self._open[-1]
        if self._has("|"):
            inner.alternatives.append([])
            inner.item_start = 0
            self._take(_LINES)
        elif self._has("("):
            if len(self._open) > _MAX_DEPTH:
                self._fail(f"groups nested more than {_MAX_DEPTH} deep")
            self._open.append(_OpenGroup(self._new_rule()))
        elif len(self._open) > 1 and self._has(")"):
            self._open.pop()
            self.rules[inner.rule] = inner.alternatives
            self._add([f"r{inner.rule}"])
        else:
            return False
        return True

    def _add(self, items: _Sequence) -> None:
        """Add items that a repetition sign would repeat together."""
        self._count(len(items))
        inner = self._open[-1]
        sequence = inner.alternatives[-1]
        inner.item_start = len(sequence)
        sequence.extend(items)

    def _token(self) -> str:
        """Read a token, its number in brackets or its text; `!` before it means any other token."""
        negation = "^" if self._has("!") else ""
        name = self._take(_TOKEN, "a token, as <[42]> or <think>")
        if name.startswith("<["):
            tokens = [int(name[2:-2])]
        else:
            tokens = self._vocabulary.tokenize_inside(name, parse_special=True)
        if len(tokens) != 1 or tokens[0] >= self._vocabulary.n_tokens:
            self._fail(f"{name} is not one token of this model")
        return f"<[{negation}{tokens[0]}]>"

    def _string(self) -> _Sequence:
        characters = []
        while not self._has('"'):
            code_point = self._code_point()
            characters.append(self._one_of([(code_point, code_point)]))
        return characters

    def _set(self) -> _Sequence:
        negated = self._has("^")
        ranges = []
        while not self._has("]"):
            low = high = self._code_point()
            if self._next() == "-" and not self.text.startswith("-]", self.position):
                self.position += 1
                high = self._code_point()
                if high < low:
                    self._fail(f"there is nothing from {chr(low)!r} to {chr(high)!r}")
            ranges.append((low, high))
        # To llama.cpp, an empty set adds nothing to the rule, negated or not.
        return [self._one_of(ranges, negated=negated)] if ranges else []

    def _bounds(self) -> tuple[int, int | None]:
        """Read the least and the most repetitions in braces; None means any number."""
        self._skip_space()
        least = self._integer()
        most: int | None = least
        self._skip_space()
        if self._has(","):
            self._skip_space()
            most = self._integer() if _NUMBER.match(self._next()) else None
            self._skip_space()
        if not self._has("}"):
            self._fail_expecting("'}'")
        if least > _MAX_REPETITIONS:
            self._fail(f"{least} repetitions; llama.cpp takes {_MAX_REPETITIONS} at most")
        if most is None:
            return least, None
        if most < least:
            self._fail(f"at least {least} and at most {most} repetitions")
        return least, most if most <= _MAX_REPETITIONS else None

    def _repeat(self, least: int, most: int | None) -> None:
        """Repeat the last item, which becomes a rule."""
        inner = self._open[-1]
        sequence = inner.alternatives[-1]
        item = sequence[inner.item_start :]
        if not item:
            self._fail("nothing before a repetition")
        one = f"r{self._new_rule([item])}"
        del sequence[inner.item_start :]
        if most is not None:
            sequence.append(f"{one}{{{least},{most}}}")
            return
        if least:
            sequence.append(f"{one}{{{least},{least}}}")
        any_number = self._new_rule()
        self.rules[any_number] = [[], [f"r{any_number}", one]]
        sequence.append(f"r{any_number}")


def _rules_that_end(rules: list[list[_Sequence]]) -> set[int]:
    """Return the rules that derive a text of finite length."""
    ending: set[int] = set()

    def ends(item: str) -> bool:
        if not item.startswith("r"):
            return True
        name, _, bounds = item.partition("{")
        return bounds.startswith("0,") or int(name[1:]) in ending

    is_growing = True
    while is_growing:
        n_before = len(ending)
        for number, alternatives in enumerate(rules):
            if any(all(map(ends, items)) for items in alternatives):
                ending.add(number)
        is_growing = len(ending) > n_before
    return ending
