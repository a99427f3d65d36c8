"""Grammars of answers that match a regular expression, or that are one of several texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specgen.errors import UsageError
from specgen.options import Grammar
from specgen.text.grammar.llguidance_grammar import literal, problem_following
from specgen.text.grammar.schema_size import MAX_PARTS, pattern_size

#: Matches a slash that is not escaped, and a line break, which would end a pattern in Lark.
_ENDS_PATTERN = re.compile(r"(\\.)|(/)|(\n)", re.DOTALL)
#: Matches the reason in a message of llguidance.
_REASON = re.compile(r"error: (.*)|\(in regex\): (.*)")


def pattern_grammar(pattern: str) -> Grammar:
    """Return the grammar of the texts that match a regular expression as a whole.

    Raises:
        UsageError: If it is not a regular expression, or not one that can be enforced.
    """
    if not pattern:
        raise UsageError("the regular expression is empty")
    if pattern_size(pattern) > MAX_PARTS:
        raise UsageError(
            f"the regular expression is too large: more than {MAX_PARTS} characters, with "
            "repetitions written out"
        )
    in_lark = _ENDS_PATTERN.sub(_escaped_end, pattern)
    grammar = Grammar("lark", f"start: /{in_lark}/")
    problem = problem_following(grammar)
    if problem:
        reasons = [match[1] or match[2] for match in _REASON.finditer(problem)]
        reason = reasons[-1] if reasons else problem
        raise UsageError(f"the regular expression cannot be enforced: {reason[:200]}")
    return grammar


def _escaped_end(match: re.Match[str]) -> str:
    if match[1]:  # an escape, whatever it escapes
        return match[1] if match[1] != "\\\n" else r"\n"
    return r"\/" if match[2] else r"\n"


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar of several texts, one of which the answer is.

    Raises:
        UsageError: If there are none, or too many.
    """
    if not any(choices):
        raise UsageError("there is nothing to choose from")
    if sum(map(len, choices)) > MAX_PARTS:
        raise UsageError(f"the choices are too large: more than {MAX_PARTS} characters")
    return Grammar("lark", f"start: {' | '.join(map(literal, choices))}")
