"""Reads a grammar in GBNF, llama.cpp's form, says what is wrong with it, and writes it in Lark for
llguidance.

llguidance's own reader of GBNF is not used: there `.` excludes the newline, `fooBar` and `foo-bar`
are one rule, and `("a"*)*` is refused. Here each character is a terminal of its own, so that
nothing depends on how a text is cut into terminals, and each group and repetition is a rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from specgen.errors import UsageError
from specgen.text.vocabulary import Vocabulary

#: llama.cpp's own limit on repetitions; a larger maximum means "any number" to it.
_MAX_REPETITIONS = 2000
#: The most rules, groups and repetitions counted, and their elements; llguidance takes 65 thousand
#: symbols.
_MAX_ELEMENTS = 50_000
#: The most groups that are open at once.
_MAX_DEPTH = 1000
_LAST_CHARACTER, _SURROGATES = 0x10FFFF, range(0xD800, 0xE000)
_NAME, _NUMBER = re.compile("[a-zA-Z0-9_-]+"), re.compile("[0-9]+")
_TOKEN = re.compile(r"<(?:\[\d{1,18}\]|[^<>\[\r\n][^<>\r\n]*)>")
#: Blanks and comments within a line, and over several.
_SPACE, _LINES = re.compile("(?:[ \t]|#[^\r\n]*)*"), re.compile("(?:[ \t\r\n]|#[^\r\n]*)*")
_CHARACTER = re.compile(r"\\?.", re.DOTALL)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX = {key: (n, re.compile(f"[0-9a-fA-F]{{{n}}}")) for key, n in (("x", 2), ("u", 4), ("U", 8))}
_REPETITIONS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
#: The rule that a text has to follow.
ROOT = "root"
#: Characters and token ids, or a rule with what repeats it, as Lark writes them.
_Alternatives = list[list[str]]


@dataclass(slots=True)
class _Open:
    rule: int
    alternatives: _Alternatives
    #: Where in the last alternative the item begins that a repetition sign would repeat.
    item_start: int = 0


class GbnfReader:
    """llama.cpp's grammar parser, without its recursion. `read` raises `UsageError` if the grammar
    is not valid.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.text = text
        self.position = 0
        self.rules: list[_Alternatives | None] = []
        #: Numbers and lines of first mention of the rules that have names of their own.
        self.named: dict[str, tuple[int, int]] = {}
        self._vocabulary = vocabulary
        self._n_elements = 0
        self._open: list[_Open] = []

    def read(self) -> str:
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
        rules = [rule or [] for rule in self.rules]
        ending = _rules_that_end(rules)
        for name, (rule, line) in self.named.items():
            if rule not in ending:
                self._fail(f"rule {name!r} derives no text at all", line)
        lines = [f"start: r{self.named[ROOT][0]}"]
        for number, alternatives in enumerate(rules):
            written = " | ".join(" ".join(items) or '""' for items in alternatives)
            lines.append(f"r{number}: {written}")
        return "\n".join(lines)

    # --- characters ---------------------------------------------------------------------

    def _fail(self, what: str, line: int | None = None) -> NoReturn:
        line = line or self.text.count("\n", 0, self.position) + 1
        raise UsageError(f"the grammar, line {line}: {what}")

    def _expected(self, what: str) -> NoReturn:
        found = self.text[self.position : self.position + 16].split("\n")[0]
        self._fail(
            f"expected {what}, found {repr(found or 'line end') if self._next() else 'the end'}"
        )

    def _next(self) -> str:
        return self.text[self.position : self.position + 1]

    def _has(self, sign: str) -> bool:
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

    def _one_of(self, ranges: list[tuple[int, int]], *, negated: bool = False) -> str:
        """Write a set of characters. A text has no NUL and no half of a surrogate pair."""
        written = r"\u{0}" if negated else ""
        for low, high in ranges:
            first = 0xE000 if low in _SURROGATES else max(low, 1)
            last = 0xD7FF if high in _SURROGATES else min(high, _LAST_CHARACTER)
            if first <= last:
                written += rf"\u{{{first:X}}}-\u{{{last:X}}}"
        if not written:
            self._fail("names characters that no text can have")
        return f"/[{'^' if negated else ''}{written}]/"

    # --- rules --------------------------------------------------------------------------

    def _new_rule(self, alternatives: _Alternatives | None = None) -> int:
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
            line = self.text.count("\n", 0, self.position) + 1
            self.named[name] = (self._new_rule(), line)
        return self.named[name][0]

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
            self._add([f"r{self._named_rule()}"])
        elif sign in ("<", "!"):
            self._add([self._token()])
        elif self._has('"'):
            characters = []
            while not self._has('"'):
                code_point = self._character()
                characters.append(self._one_of([(code_point, code_point)]))
            self._add(characters)
        elif self._has("["):
            self._add(self._set())
        elif self._has("."):
            self._add([self._one_of([], negated=True)])
        elif sign in _REPETITIONS or sign == "{":
            self.position += 1
            self._repeat(*(_REPETITIONS[sign] if sign in _REPETITIONS else self._bounds()))
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
            self._open.append(_Open(self._new_rule(), [[]]))
        elif len(self._open) > 1 and self._has(")"):
            self._open.pop()
            self.rules[inner.rule] = inner.alternatives
            self._add([f"r{inner.rule}"])
        else:
            return False
        return True

    def _add(self, items: list[str]) -> None:
        inner = self._open[-1]
        self._count(len(items))
        inner.item_start = len(inner.alternatives[-1])
        inner.alternatives[-1].extend(items)

    def _token(self) -> str:
        """Read a token: its number in brackets, or its text; `!` before it means any other token."""
        negated = self._has("!")
        name = self._take(_TOKEN, "a token, as <[42]> or <think>")
        if name.startswith("<["):
            tokens = [int(name[2:-2])]
        else:
            tokens = self._vocabulary.tokenize_inside(name, parse_special=True)
        if len(tokens) != 1 or tokens[0] >= self._vocabulary.n_tokens:
            self._fail(f"{name} is not one token of this model")
        return f"<[{'^' if negated else ''}{tokens[0]}]>"

    def _set(self) -> list[str]:
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
        return [self._one_of(ranges, negated=negated)] if ranges else []

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
        if most is not None and most < least:
            self._fail(f"at least {least} and at most {most} repetitions")
        return least, None if most is not None and most > _MAX_REPETITIONS else most

    def _repeat(self, least: int, most: int | None) -> None:
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


def _rules_that_end(rules: list[_Alternatives]) -> set[int]:
    def ends(item: str) -> bool:
        if not item.startswith("r"):
            return True
        name, _, bounds = item.partition("{")
        return bounds.startswith("0,") or int(name[1:]) in found

    found: set[int] = set()
    n_before = -1
    while len(found) > n_before:
        n_before = len(found)
        for number, alternatives in enumerate(rules):
            if any(all(map(ends, items)) for items in alternatives):
                found.add(number)
    return found
