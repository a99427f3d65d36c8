"""Let grammars (GBNF) be parts of a larger one."""

from __future__ import annotations

import json
import re

#: What a grammar is made of, as far as names must be told from the rest.
_PARTS = re.compile(
    r"""
      "(?:\\.|[^"\\])*"       # a literal
    | \[(?:\\.|[^\]\\])*\]    # a set of characters
    | \{[^}]*\}               # a number of repetitions
    | \#[^\n]*                # a comment
    | (?P<name>[a-zA-Z0-9-]+)
    """,
    re.VERBOSE | re.DOTALL,
)


def with_prefix(gbnf: str, prefix: str) -> str:
    """The same grammar with `prefix` before the name of each rule. Two grammars whose prefixes differ
    can stand one behind the other: the rule ``root`` of each is ``{prefix}root`` then."""
    return _PARTS.sub(
        lambda part: f"{prefix}{part['name']}" if part["name"] else part.group(), gbnf
    )


def literal(text: str) -> str:
    """A text as a grammar has it. Raises ValueError for control characters other than line breaks and
    tabs."""
    quoted = json.dumps(text, ensure_ascii=False)
    if re.search(r"\\[bfu]", quoted):
        raise ValueError(f"{quoted} has a control character")
    return quoted


__all__ = ["literal", "with_prefix"]
