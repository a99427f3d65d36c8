"""Typer's errors in the use of the command line, in our words."""

from __future__ import annotations

import re

import typer

#: Typer's base of errors in the use of the command line, which has no public name.
COMMAND_LINE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
#: What pydantic says of a value, which Typer passes on, and how we say it.
_WORDS = (
    (r"Input should be a valid integer.*", "it is not a whole number"),
    (r"Input should be a valid number.*", "it is not a number"),
    (r"Input should be a valid boolean.*", "it is not true or false"),
    (r"Input should be greater than or equal to (\S+)", r"give \1 or more"),
    (r"Input should be less than or equal to (\S+)", r"give \1 or less"),
    (r"Value error, (.*?)\.?$", r"\1"),
)


def in_words(message: str) -> str:
    """Return a message of Typer's in our words."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message
